"""Compute half of the profiler: what is measured, that it is what it says, and what the fits make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.step import estimate
from planner.curves import GemmCurve
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.profiler import definitions
from planner.profiler.compute_profile import base_of, compute_points, fit_compute, measure_compute
from planner.profiler.definitions import flop, layer_flop, moved_bytes
from planner.profiler.layer_check import check, layer_point, predicted, predicted_parts
from planner.profiler.points import Measured, Point
from planner.profiler.shapes import Wanted, affordable, layout_points, weighed
from planner.search import search
from planner.units import GIGA, MIB

torch = pytest.importorskip("torch")

H100 = load_hardware("h100-sxm")


def known(point: Point, seconds: float, **details: Any) -> Measured:
    """A measured point with a scatter of 1 percent."""
    return Measured(
        point=point, median=seconds, low=0.99 * seconds, high=1.01 * seconds, repetitions=9, clock="cuda_events",
        details=tuple(sorted(details.items())),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is measured


def test_definitions_by_hand() -> None:
    """Y[4, 6] = X[4, 8] W[6, 8]^T: 2 x 4 x 6 x 8 FLOP in any pass; 2 heads of 3 over 10 tokens, causal: half of 100 pairs."""
    assert {flop(definitions.gemm("bf16", name, 4, 6, 8)) for name in definitions.GEMM_PASSES} == {384.0}
    assert definitions.rows_columns_depth(definitions.gemm("bf16", "dgrad", 4, 6, 8)) == (4, 8, 6)
    assert definitions.rows_columns_depth(definitions.gemm("bf16", "wgrad", 4, 6, 8)) == (6, 8, 4)
    assert flop(definitions.attention("bf16", "forward", 1, 2, 1, 3, 3, 10)) == 2 * 2 * 50 * (3 + 3)
    assert flop(definitions.attention("bf16", "backward", 1, 2, 1, 3, 3, 10)) == 2.5 * 1200
    assert moved_bytes(definitions.memory_bound("norm_backward", "backward", 5, 7, "bf16")) == 3 * 2 * 35
    assert moved_bytes(definitions.memory_bound("cross_entropy", "forward", 5, 7, "fp32")) == (4 + 4) * 35
    assert moved_bytes(definitions.memory_bound("optimizer", "forward", 5, 7, "fp32")) == 28 * 35
    sizes = {"hidden": 8, "ffn": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "batch": 3, "seq": 10, "dtype": "fp32"}
    # 4 heads' worth of q, k, v, out: 8 x 4 x (2 + 1 + 1 + 2) weights and 3 x 8 x 16 of the gated MLP; 30 tokens
    weights = 8 * 4 * 6 + 3 * 8 * 16
    assert layer_flop(layer_point("forward", gated=True, **sizes)) == 2 * 30 * weights + 3 * 2 * 2 * 50 * 8  # type: ignore[arg-type]


def test_shares_of_a_layout_add_up_to_its_computation() -> None:
    """Every FLOP and byte of the step's own list is in some point: shares sum to the computing part of the step."""
    job = resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).job
    layout = Layout(tp=2, pp=1, dp=4, micro_batch_size=1, num_microbatches=job.workload.global_batch_size // 4, zero=1)
    layout = layout.replace(sequence_parallel=1)
    found = estimate(job.workload, job.cluster, job.trainer, Layout.stack([layout]))
    points = layout_points(job, layout, found)
    computing = float(found.time["compute"][0]) / float(found.step_time[0])
    assert sum(point.weight for point in points) == pytest.approx(computing, rel=0.03)
    assert len({point.identity for point in points}) == len(points)


def test_budget_goes_first_to_what_the_best_layouts_live_on() -> None:
    points = weighed(Wanted(models=("llama-8b",), gpus=(8,)), "h100-sxm")
    weights = [point.weight for point in points]
    assert weights == sorted(weights, reverse=True) and weights[0] > 0.05 and weights[-1] < 0.01
    best = search(resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).job, top=1).layouts[0]
    tokens = 8192 // int(best.cp) * int(best.micro_batch_size)
    up = definitions.gemm("bf16", "forward", tokens, 2 * 14336 // int(best.tp), 4096)
    assert up.identity in {point.identity for point in points[:12]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_budget_gives_a_whole_profile(device: str) -> None:
    """Facts, then one point of every kind of operator, come before a second one of any kind."""
    points = compute_points(("llama-3.2-1b" if device == "cuda" else "gpt3-125m",), "h100-sxm", device)
    assert len({point.identity for point in points}) == len(points)
    assert points[0].family == "bytes"
    kinds = [(one.family, one.values.get("pass")) for one in points]
    first = {kind: kinds.index(kind) for kind in kinds if kind[0] in ("gemm", "attention")}
    seconds = {kind: kinds.index(kind, at + 1) for kind, at in first.items() if kinds.count(kind) > 1}
    wanted = [at for (_, pass_), at in first.items() if pass_ in ("forward", "backward", "dgrad", "wgrad")]
    assert max(wanted) < max(seconds.values())
    families = {point.family for point in points}
    assert {"gemm", "attention", "memory_bound", "layer", "sustained", "launch", "bytes", "cpu_adam"} <= families
    if device == "cpu":
        operators = [point for point in points if point.family in ("gemm", "attention")]
        assert affordable(operators, 5e10, 8e9, 0.2) == operators


def test_what_cannot_run_here_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        PlannerError, match=r"no layer of llama-405b at 8192 tokens runs in .* on one core; profile a smaller"
    ):
        compute_points(("llama-405b",), "h100-sxm", "cpu", sequence_length=8192)
    for point, sentence in (
        (Point.of("host_copy", direction="h2d", bytes=8), "need a GPU"),
        (Point.of("launch", kind="graph"), "a CUDA graph needs a GPU"),
        (Point.of("bytes", name="context"), "fact of a GPU"),
        (definitions.gemm("bf16", definitions.ACCUMULATING, 8, 8, 8), "fp32 gradient needs a GPU"),
        (definitions.gemm("fp8", "forward", 16, 24, 16), "multiples of 16"),
        (Point.of("sustained", dtype="fp32", m=8, n=8, k=8, seconds=0.5), "show no heat"),
        (definitions.attention("fp32", "forward", 1, 1, 1, 8, 8, 8, kernel="magic"), "unknown kernel 'magic'"),
        (Point.of("gemm", dtype="fp32", m=8, n=8, k=8, **{"pass": "sideways"}), "sideways"),
    ):
        with pytest.raises(PlannerError, match=sentence):
            measure_compute(point, "cpu", 0.01)
    with pytest.raises(PlannerError, match="unknown device 'tpu'"):
        measure_compute(Point.of("launch", kind="stream"), "tpu", 0.01)


# ------------------------------------------------------------------------------------------------ that it is what it says


def counted(run: Any) -> float:
    """FLOP of matrix products that torch itself counts."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def test_products_do_the_work_that_their_point_counts() -> None:
    from planner.profiler.operators import operator
    from planner.profiler.whole_layer import layer

    points = [definitions.gemm("fp32", name, 24, 40, 56) for name in definitions.GEMM_PASSES]
    points += [
        Point.of("grouped_gemm", dtype="fp32", tokens=8, n=24, k=40, groups=3, **{"pass": name})
        for name in definitions.GEMM_PASSES
    ]
    for point in points:
        assert counted(operator(point, "cpu")) == flop(point), point.label
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "seq": 32}
    for gated in (True, False):
        for pass_ in ("forward", "backward"):
            point = layer_point(pass_, gated=gated, dtype="fp32", **sizes)
            attention = definitions.attention("fp32", pass_, 2, 4, 2, 16, 16, 32)
            assert counted(layer(point, "cpu")) == flop(point) - flop(attention), (
                point.label
            )  # torch counts no flash attention


def test_the_whole_layer_is_a_causal_transformer_layer() -> None:
    """A later token changes no earlier output; heads of one key group see the same keys; a step down the gradient helps."""
    from planner.profiler.whole_layer import Layer

    torch.manual_seed(0)
    point = layer_point(
        "forward", hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, batch=1, seq=12, gated=True, dtype="fp32"
    )
    made = Layer(point, "cpu")
    x = torch.randn(1, 12, 32)
    other = x.clone()
    other[:, 7:] += 1.0
    before, after = made(x), made(other)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-5) and not torch.allclose(
        before[:, 7:], after[:, 7:], atol=1e-2
    )
    moved = torch.roll(x, 1, dims=1)  # positions enter: the same tokens one place later attend differently
    assert not torch.allclose(made(moved)[:, 5], before[:, 4], atol=1e-3)
    assert all(weight.requires_grad for weight in made.weights.values())


def test_memory_bound_operators_run_in_both_passes() -> None:
    from planner.profiler.operators import operator

    kinds = [*definitions.MEMORY_BYTES, definitions.WHOLE_LOSS]
    for op, pass_ in kinds:
        point = definitions.memory_bound(op, pass_, 6, 10, "fp32")
        made = operator(point, "cpu")()
        assert moved_bytes(point) > 0
        first = made[0] if isinstance(made, tuple) else made
        if first is not None:  # an optimizer step returns nothing
            wanted = {"swiglu": 20 if pass_ == "backward" else 10}.get(op, 10)
            assert tuple(first.shape) == (6, wanted), op
    with pytest.raises(PlannerError, match="no memory-bound operator 'norm_forward' with a pass 'backward'"):
        moved_bytes(definitions.memory_bound("norm_forward", "backward", 6, 10, "fp32"))


def test_a_gpu_would_take_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own shape functions for CUDA, without a GPU: layouts, alignment and types of every forward operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from planner.profiler import operators

    monkeypatch.setattr(operators, "_cache_bytes", lambda _: 50.0 * MIB)
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in compute_points(("llama-3.2-1b", "qwen3-30b-a3b"), "h100-sxm", "cuda"):
        if point.family in ("gemm", "grouped_gemm", "attention", "memory_bound"):
            kinds.setdefault(
                tuple(point.values.get(name) for name in ("pass", "dtype", "op", "kernel", "groups")), point
            )
    without = {"copy", "norm_backward", "optimizer", "cross_entropy_whole"}  # need a build with CUDA, or gradients
    checked = set()
    for point in kinds.values():
        value = point.values
        if value.get("pass") in ("backward", definitions.ACCUMULATING) or value.get("op") in without:
            continue
        with FakeTensorMode(), torch.no_grad():
            made = operators.operator(point, "cuda")()
        if point.family == "gemm":
            assert tuple(made.shape) == definitions.rows_columns_depth(point)[:2], point.label
            assert made.dtype == (torch.bfloat16 if value["dtype"] == "fp8" else operators.DTYPES[str(value["dtype"])])
        if point.family == "grouped_gemm":
            rows, n, k, groups = (int(value[name]) for name in ("tokens", "n", "k", "groups"))
            wanted = {"forward": (rows * groups, n), "dgrad": (rows * groups, k), "wgrad": (groups, n, k)}
            assert tuple(made.shape) == wanted[str(value["pass"])], point.label
        checked.add((point.family, value.get("dtype")))
    assert {("gemm", name) for name in ("bf16", "fp16", "fp8", "tf32")} | {("grouped_gemm", "bf16")} <= checked


# ------------------------------------------------------------------------------------------------ what the fits make of it


def synthetic(profile: HardwareProfile, scatter: float, seed: int = 0) -> list[Measured]:
    """Points of the two models on a GPU that is exactly ``profile``, each disturbed by up to ``scatter``."""
    random = np.random.default_rng(seed)
    found = []
    for point in compute_points(("llama-8b", "qwen3-30b-a3b"), "h100-sxm", "cuda"):
        value = point.values
        if point.family == "gemm" and value["dtype"] != "bf16":
            continue
        if point.family == "gemm" and value["pass"] == definitions.ACCUMULATING:
            sizes = (float(value[name]) for name in ("m", "n", "k"))
            seconds = float(profile.gemm_times(*sizes, "bf16")[2])
        elif point.family == "gemm":
            times = profile.gemm_times(*(float(value[name]) for name in ("m", "n", "k")), "bf16", gradient_bytes=1.0)
            seconds = float(times[definitions.GEMM_PASSES.index(str(value["pass"]))])
        elif point.family == "attention":
            size = {name: float(value[name]) for name in ("batch", "heads", "kv_heads", "head_dim")}
            slow = {"flash": 2.0, "cudnn": 1.0, "default": 1.0}[str(value["kernel"])]
            size |= {"seq_q": float(value["seq"]), "seq_kv": float(value["seq"])}
            seconds = slow * float(
                profile.attention_time(**size, causal=bool(value["causal"]), pass_=str(value["pass"]))
            )
        elif point.family == "memory_bound" and str(value["op"]) in profile.memory_fraction:
            seconds = float(profile.memory_time(moved_bytes(point), str(value["op"]))) + profile.launch_floor
        elif point.family == "launch":
            seconds = profile.launch_floor if value["kind"] == "stream" else profile.graph_launch_floor
        elif point.family == "sustained":
            burst = float(profile.gemm_time(*(float(value[name]) for name in ("m", "n", "k"))))
            found.append(known(point, burst / 0.83, first=burst))
            continue
        elif point.family == "bytes" and value["name"] == "usable":
            seconds = 85e9
        elif point.family == "layer":
            seconds = predicted(point, profile)
        else:
            continue
        found.append(known(point, seconds * float(np.exp(random.uniform(-scatter, scatter)))))
    return found


def test_fits_give_back_the_device_that_was_measured() -> None:
    """A GPU 0.9 times as fast as the guess in products, 0.8 in memory, measured with 2 percent scatter: the fitted
    profile prices every measured shape, and shapes between them, within a few percent of the truth."""
    truth = replace(
        H100,
        gemm={name: replace(one, efficiency=0.9 * one.efficiency, grid=None, m0=80.0) for name, one in H100.gemm.items()},
        attention={key: replace(one, efficiency=0.85 * one.efficiency) for key, one in H100.attention.items()},
        memory_fraction={op: 0.8 * fraction for op, fraction in H100.memory_fraction.items()},
    )  # fmt: skip
    measured = synthetic(truth, 0.02)
    fit = fit_compute(measured, base_of("cuda", measured, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    tokens, width = (np.exp2(np.arange(10.0, 15.0)), np.array([2500.0, 5000.0, 9000.0]))
    shapes = [axis.ravel() for axis in np.meshgrid(tokens, width, width)]
    ratio = found.gemm_times(*shapes, gradient_bytes=4.0) / truth.gemm_times(*shapes, gradient_bytes=4.0)
    assert np.median(np.abs(ratio - 1.0)) < 0.02 and np.max(np.abs(ratio - 1.0)) < 0.08
    for pass_ in ("forward", "backward"):
        for seq in (1500.0, 6000.0):
            pair = [float(one.attention_time(2, 32, 8, 128, seq, seq, pass_=pass_)) for one in (found, truth)]
            assert pair[0] == pytest.approx(pair[1], rel=0.08)
    for op in ("norm_forward", "swiglu", "rope", "permute", "optimizer", "cross_entropy"):
        assert found.memory_fraction[op] == pytest.approx(truth.memory_fraction[op], rel=0.05)
    assert found.sustained_clock == pytest.approx(0.83, rel=0.03)
    assert found.usable_memory == pytest.approx(85e9, rel=0.03)
    assert found.kernels["slowdown"]["fa2"]["forward"] == pytest.approx(2.0, rel=0.05)
    assert found.launch_floor == pytest.approx(2.5e-6, rel=0.03)
    assert fit.residuals["gemm bf16"]["held_out_percent_median_p90"]["all"][0] < 3.0
    assert max(abs(row["error_percent"]) for row in fit.measurements["layer"]) < 6.0
    assert set(fit.measured) == {"gemm", "attention", "memory"} and fit.spread["gemm"] == pytest.approx(1.0, rel=0.1)


def test_few_points_move_the_guess_and_keep_its_shape() -> None:
    """Three products at 0.8 of the guess's rate: all shapes follow; the rest of the guess stays."""
    points = [definitions.gemm("bf16", "forward", m, 4096, 4096) for m in (2048, 4096, 8192)]
    slow = [
        known(point, float(H100.gemm_time(*(float(point.values[n]) for n in ("m", "n", "k")))) / 0.8)
        for point in points
    ]
    fit = fit_compute(slow, base_of("cuda", slow, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    for shape in ((1024.0, 8192.0, 8192.0), (16384.0, 4096.0, 14336.0)):
        assert float(found.gemm_time(*shape)) == pytest.approx(float(H100.gemm_time(*shape)) / 0.8, rel=0.02)
    assert found.memory_fraction == H100.memory_fraction
    assert float(found.attention_time(1, 32, 8, 128, 4096, 4096)) == pytest.approx(
        float(H100.attention_time(1, 32, 8, 128, 4096, 4096))
    )


def test_no_fit_passes_the_peak_and_nothing_measured_is_an_error() -> None:
    points = [definitions.gemm("bf16", "forward", m, 4096, 4096) for m in (2048, 4096, 8192)]
    fast = [known(point, 0.5 * flop(point) / H100.peak("bf16")) for point in points]
    fit = fit_compute(fast, base_of("cuda", fast, H100), "cuda")
    assert fit.keys["gemm"]["bf16"]["efficiency"] <= 1.0
    HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    random = np.random.default_rng(
        1
    )  # a boosted clock: many shapes at 0.7 to 1.2 of the nominal peak, with a residual grid
    shapes = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 16384) for k in (1024, 4096, 16384)]
    many = [
        known(point, flop(point) / H100.peak("bf16") / random.uniform(0.7, 1.2))
        for shape in shapes
        for point in (definitions.gemm("bf16", name, *shape) for name in definitions.GEMM_PASSES)
    ]
    fit = fit_compute(many, base_of("cuda", many, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys | {"measured": {**H100.measured, **fit.measured}})
    assert all(
        float(found.gemm_time(*shape)) >= 2.0 * np.prod(np.float64(shape)) / H100.peak("bf16") for shape in shapes
    )
    with pytest.raises(PlannerError, match="larger --budget"):
        base_of("cpu", [], None)
    with pytest.raises(PlannerError, match="give --hardware"):
        base_of("cuda", [], None)


def test_grouped_products_fit_back() -> None:
    curve = replace(H100.gemm["bf16"], grid=None, grouped_m0=(150.0, 180.0, 180.0), grouped_efficiency=(0.9, 0.85, 0.8))
    truth: GemmCurve = curve
    rows = []
    for which, pass_ in enumerate(definitions.GEMM_PASSES):
        for tokens in (128, 256, 512, 2048):
            t, n, k, g = (np.array(float(x)) for x in (tokens, 4096, 2048, 16))
            shape = ((t, n, k), (t, k, n), (n, k, t))[which]
            seconds = float(truth.grouped_time(t, *shape, g, which, H100.peak("bf16"), H100.memory_bandwidth, 1.0))
            point = Point.of("grouped_gemm", dtype="bf16", tokens=tokens, n=4096, k=2048, groups=16, **{"pass": pass_})
            rows.append(known(point, seconds))
    guess = replace(H100, gemm={"bf16": replace(curve, grouped_m0=(1.0, 1.0, 1.0), grouped_efficiency=(0.5, 0.5, 0.5))})
    fit = fit_compute(rows, base_of("cuda", rows, guess), "cuda")
    assert fit.keys["gemm"]["bf16"]["grouped_efficiency"] == pytest.approx([0.9, 0.85, 0.8], rel=0.03)
    assert fit.keys["gemm"]["bf16"]["grouped_m0"] == pytest.approx([150.0, 180.0, 180.0], rel=0.1)


# ------------------------------------------------------------------------------------------------ the proof

LAYERS: tuple[dict[str, Any], ...] = (
    {"hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 8, "head_dim": 64, "batch": 1, "seq": 192, "gated": True},
    {"hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12, "head_dim": 64, "batch": 1, "seq": 128, "gated": False},
    {"hidden": 640, "ffn": 1728, "heads": 10, "kv_heads": 2, "head_dim": 64, "batch": 1, "seq": 256, "gated": True},
    {"hidden": 384, "ffn": 1536, "heads": 6, "kv_heads": 6, "head_dim": 64, "batch": 2, "seq": 192, "gated": False},
)
"""Four shapes, none of which is among the shapes that the profile is fitted to."""


def cpu_profile(measured: Sequence[Measured]) -> HardwareProfile:
    fit = fit_compute(measured, base_of("cpu", measured, None), "cpu")
    data = {key: value for key, value in H100.to_dict().items() if key != "precise_accumulation"}
    return HardwareProfile.from_dict(data | fit.keys | {"name": "cpu"}, where="cpu")


def proof_points() -> list[Point]:
    """Shapes around those of the layers."""
    points = [Point.of("launch", kind="stream")]
    points += [
        definitions.gemm("fp32", name, m, n, k)
        for m, n, k in ((128, 768, 768), (256, 512, 512), (256, 1024, 512), (192, 512, 1536), (384, 2048, 640))
        for name in definitions.GEMM_PASSES
    ]
    points += [
        definitions.attention("fp32", name, 1, 8, 8, 64, 64, seq)
        for name in ("forward", "backward")
        for seq in (128, 256, 384)
    ]
    skipped = ("quantize", "optimizer", "cross_entropy")
    kinds = [kind for kind in definitions.MEMORY_BYTES if kind[0] not in skipped]
    return points + [definitions.memory_bound(*kind, 256, width, "fp32") for kind in kinds for width in (512, 1024)]


def quieter(before: list[Measured], now: list[Measured]) -> list[Measured]:
    """The lower of two medians of every point: others on the machine only ever add time."""
    return [min(pair, key=lambda one: one.median) for pair in zip(before or now, now, strict=True)]


def test_layers_are_predicted_from_their_operators_on_this_cpu() -> None:
    """Processor time of whole layers, forward and backward, against the cost model with this CPU's own curves.

    A shared machine adds up to half (caches and memory are shared too), unevenly: operators and layers are measured in
    turn, in up to four rounds until the median of the eight errors is what a quiet machine gives.
    """
    points = proof_points()
    layers = [layer_point(name, dtype="fp32", **sizes) for sizes in LAYERS for name in ("forward", "backward")]
    operators: list[Measured] = []
    whole: list[Measured] = []
    for _ in range(4):
        operators = quieter(operators, [measure_compute(point, "cpu", 0.02) for point in points])
        whole = quieter(whole, [measure_compute(point, "cpu", 0.05) for point in layers])
        profile = cpu_profile(operators)
        errors = [abs(row["error_percent"]) for row in check(whole, profile)]
        if np.median(errors) < 12.0:
            break
    assert len(errors) == 8
    assert np.median(errors) < 25.0, errors
    parts = predicted_parts(layers[0], profile)
    assert sum(parts.values()) == pytest.approx(predicted(layers[0], profile)) and min(parts.values()) > 0.0
    assert profile.memory_bandwidth < 1000 * GIGA and profile.usable_memory > 64 * MIB
