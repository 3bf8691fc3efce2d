"""Compute half of the profiler: what is measured, that it is what it says, and what the fits make of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
from planner.profiler.definitions import COMPILED, EAGER, flop, layer_flop, moved_bytes
from planner.profiler.layer_check import HOST_LAYER, layer_point, predicted, predicted_parts
from planner.profiler.more_points import warm_up_point
from planner.profiler.points import Measured, Point
from planner.profiler.rounds import Rounds, steady, warm_up
from planner.profiler.shapes import Wanted, affordable, layout_points, weighed
from planner.profiler.timing import Yardstick, measure
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
    assert moved_bytes(definitions.swiglu("forward", 5, 7, "bf16", COMPILED)) == 3 * 2 * 35
    assert moved_bytes(definitions.swiglu("backward", 5, 7, "bf16", EAGER)) == 9 * 2 * 35
    assert moved_bytes(definitions.rope("backward", 5, 4, 2, 8, "fp32", EAGER)) == 10 * 4 * 5 * 48
    # one of 4 ranks: 4 queries against 16 keys, each sees 8 of them on average
    assert flop(definitions.attention("bf16", "forward", 1, 2, 1, 3, 3, 4, seq_kv=16)) == 2 * 2 * (4 * 8) * (3 + 3)
    sizes = {"hidden": 8, "ffn": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "batch": 3, "seq": 10, "dtype": "fp32"}
    # 4 heads' worth of q, k, v, out: 8 x 4 x (2 + 1 + 1 + 2) weights and 3 x 8 x 16 of the gated MLP; 30 tokens
    weights = 8 * 4 * 6 + 3 * 8 * 16
    assert layer_flop(layer_point("forward", gated=True, **sizes)) == 2 * 30 * weights + 3 * 2 * 2 * 50 * 8  # type: ignore[arg-type]
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 5, "shared_ffn": 6}  # two experts, the shared one and the router
    weights = 8 * 4 * 6 + 3 * 8 * (2 * 5 + 6) + 8 * 4
    assert layer_flop(layer_point("forward", gated=True, **sizes, **experts)) == 2 * 30 * weights + 3 * 2 * 2 * 50 * 8  # type: ignore[arg-type]


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
        (definitions.gemm("nvfp4", "forward", 16, 64, 64), "products in nvfp4 need a GPU"),
        (definitions.gemm("fp8_block", "forward", 128, 64, 128), "multiples of 128"),
        (definitions.swiglu("forward", 4, 4, "fp32", COMPILED), "torch.compile are measured on a GPU"),
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
    latent = sizes | {"kv_heads": 4, "q_rank": 24, "kv_rank": 8, "rope_dim": 8, "value_dim": 12}
    for pass_ in ("forward", "backward"):
        point = layer_point(pass_, gated=True, dtype="fp32", **latent)
        attention = definitions.attention("fp32", pass_, 2, 4, 4, 16, 12, 32)
        assert counted(layer(point, "cpu")) == flop(point) - flop(attention), point.label


def test_a_layer_of_experts_multiplies_what_its_point_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all grouped products are T K, whatever the router says; the combination weighs K outputs of each token."""
    from planner.profiler import whole_layer
    from planner.reference import experts

    rows: list[tuple[int, ...]] = []
    grouped = experts.Grouped.apply
    monkeypatch.setattr(
        experts.Grouped,
        "apply",
        staticmethod(lambda x, w, n: rows.append((*x.shape, *w.shape, *n)) or grouped(x, w, n)),
    )
    point = layer_point(
        "forward", hidden=32, ffn=1, heads=2, kv_heads=1, head_dim=16, batch=1, seq=24, gated=True, dtype="fp32",
        experts=4, top_k=2, expert_ffn=16, shared_ffn=8,
    )  # fmt: skip
    dense = counted(whole_layer.layer(point, "cpu"))
    up, down = (48, 32, 4, 16, 32, 12, 12, 12, 12), (48, 16, 4, 32, 16, 12, 12, 12, 12)
    assert rows == [up, up, down]
    products, combined, attention = 3 * 2 * 48 * 32 * 16, 2 * 24 * 2 * 32, 2 * 2 * (24 * 12) * 32
    # torch counts neither flash attention nor, unless it looks inside, grouped products; it does count the combination
    assert dense in (flop(point) - attention + combined, flop(point) - attention + combined - products)


def test_products_add_to_an_fp32_gradient_in_place() -> None:
    """dW += dY^T X, dense and grouped one after the other, to the last value: twice is twice."""
    from planner.profiler import operators

    dense = operators.operator(definitions.gemm("fp32", definitions.ACCUMULATING, 6, 4, 5), "cpu")
    first = torch.as_tensor(dense()).clone()
    assert torch.allclose(dense(), 2 * first) and first.abs().sum() > 0
    point = Point.of("grouped_gemm", dtype="fp32", tokens=6, n=4, k=5, groups=3, **{"pass": definitions.ACCUMULATING})
    plain = Point.of("grouped_gemm", dtype="fp32", tokens=6, n=4, k=5, groups=3, **{"pass": "wgrad"})
    made = operators.operator(point, "cpu")
    turns = operators.operator(plain, "cpu")()
    assert counted(made) == flop(point) == flop(plain)
    assert [tuple(one.shape) for one in turns] == [(4, 5)] * 3


def test_one_rank_of_context_parallelism_attends_to_half_of_the_keys() -> None:
    """Both ends of the sequence, against the whole computed by plain torch; pieces of the last end merge to its rows."""
    from planner.profiler import operators

    torch.manual_seed(0)
    point = definitions.attention("fp32", "forward", 1, 2, 1, 8, 8, 8, seq_kv=32)
    drawn: list[Any] = []
    real = operators.values
    operators.values = lambda *a: drawn.append(torch.randn(a[0])) or drawn[-1]  # type: ignore[attr-defined,assignment]
    try:
        first, own, before = operators.operator(point, "cpu")()  # type: ignore[misc]
    finally:
        operators.values = real  # type: ignore[attr-defined]
    query, key, value = drawn
    assert query.shape[2] == 8 and key.shape[2] == value.shape[2] == 32

    def rows(q: Any, end: int, begin: int, seen: Any) -> Any:
        scores = (q @ key[:, :, begin:end].transpose(2, 3)) / 8**0.5
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value[:, :, begin:end]

    below = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.allclose(first, rows(query[:, :, :4], 4, 0, below), atol=1e-5)
    assert torch.allclose(own, rows(query[:, :, 4:], 32, 28, below), atol=1e-5)
    assert torch.allclose(before, rows(query[:, :, 4:], 28, 0, torch.ones(4, 28, dtype=torch.bool)), atol=1e-5)
    pairs = 4 * 4 / 2 * 2 + 4 * 28  # what the three kernels work on is what the point counts, half of all
    assert flop(point) == 2 * 2 * pairs * 16


def test_chains_are_what_they_stand_for() -> None:
    """The rotary embedding turns pairs (i, i + d / 2) by position times rate and keeps their length; SwiGLU and its gradients
    are those of the formula; and the kernels and tensors that a chain counts are those that torch runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from planner.profiler.operators import operator

    class Traffic(TorchDispatchMode):
        """Elements in and out of every kernel, views left out."""

        def __init__(self) -> None:
            super().__init__()
            self.kernels, self.elements = 0, 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not function.is_view and "detach" not in str(function):
                inside = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
                self.kernels += 1
                self.elements += out.numel() + sum(one.numel() for one in inside if 2 * one.numel() >= out.numel())
            return out

    for pass_ in ("forward", "backward"):
        for point in (
            definitions.swiglu(pass_, 6, 10, "fp32", EAGER), definitions.rope(pass_, 6, 8, 4, 8, "fp32", EAGER)
        ):  # fmt: skip
            run = operator(point, "cpu")
            run()
            with Traffic() as seen:
                run()
            elements = float(point.values["rows"]) * float(point.values["columns"])
            assert seen.elements == pytest.approx(moved_bytes(point) / 4.0, rel=0.01), point.label
            assert seen.elements > 4 * elements and seen.kernels == definitions.kernels(point), point.label
    turned = operator(definitions.rope("forward", 6, 4, 2, 8, "fp32", EAGER), "cpu")()
    assert [tuple(one.shape) for one in turned] == [(1, 6, 4, 8), (1, 6, 2, 8)]  # type: ignore[attr-defined]


def test_the_whole_layer_is_a_causal_transformer_layer() -> None:
    """A later token changes no earlier output; positions enter; every weight has a gradient."""
    from planner.profiler.whole_layer import built

    torch.manual_seed(0)
    common = {"hidden": 32, "ffn": 48, "heads": 4, "batch": 1, "seq": 12, "gated": True, "dtype": "fp32"}
    kinds: tuple[dict[str, Any], ...] = (
        {"kv_heads": 2, "head_dim": 8},
        {"kv_heads": 4, "head_dim": 12, "q_rank": 16, "kv_rank": 8, "rope_dim": 4, "value_dim": 8},
    )
    for kind in kinds:
        made = built(layer_point("forward", **common, **kind), "cpu")  # type: ignore[arg-type]
        x = torch.randn(1, 12, 32)
        other = x.clone()
        other[:, 7:] += 1.0
        before, after = made(x), made(other)
        assert torch.allclose(before[:, :7], after[:, :7], atol=1e-5)
        assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-2)
        assert not torch.allclose(made(torch.roll(x, 1, dims=1))[:, 5], before[:, 4], atol=1e-3)
        before.sum().backward()
        assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in made.parameters())


def test_memory_bound_operators_run_in_both_passes() -> None:
    from planner.profiler.operators import operator

    kinds = [kind for kind in definitions.MEMORY_BYTES if kind[0] not in ("swiglu", "rope")] + [definitions.WHOLE_LOSS]
    for op, pass_ in kinds:
        point = definitions.memory_bound(op, pass_, 6, 10, "fp32")
        made = operator(point, "cpu")()
        assert moved_bytes(point) > 0
        first = made[0] if isinstance(made, tuple) else made
        if first is not None:  # an optimizer step returns nothing
            assert tuple(first.shape) == (6, 10), op
    with pytest.raises(PlannerError, match="no memory-bound operator 'norm_forward' with a pass 'backward'"):
        moved_bytes(definitions.memory_bound("norm_forward", "backward", 6, 10, "fp32"))


def test_a_gpu_would_take_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own shape functions for CUDA, without a GPU: layouts, alignment and types of every forward operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from planner.profiler import operators, tensors

    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 0.0)
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in compute_points(("qwen3-30b-a3b",), "h100-sxm", "cuda"):
        if point.family in ("gemm", "grouped_gemm", "attention", "memory_bound"):
            kinds.setdefault(
                tuple(point.values.get(name) for name in ("pass", "dtype", "op", "kernel", "groups")), point
            )
    without = {
        "copy",
        "norm_backward",
        "optimizer",
        "cross_entropy_whole",
        "rope",
    }  # need a build with CUDA, or gradients
    checked = set()
    for point in kinds.values():
        value = point.values
        if value.get("pass") in ("backward", definitions.ACCUMULATING) or value.get("op") in without:
            continue
        if value.get("kernel") == COMPILED:
            continue  # what it compiles is checked as a chain
        with FakeTensorMode(), torch.no_grad():
            made = operators.operator(point, "cuda")()
        if point.family == "gemm":
            assert tuple(made.shape) == definitions.rows_columns_depth(point)[:2], point.label
            low = value["dtype"] in definitions.SCALED
            assert made.dtype == (torch.bfloat16 if low else tensors.DTYPES[str(value["dtype"])])
        if point.family == "grouped_gemm":
            rows, n, k, groups = (int(value[name]) for name in ("tokens", "n", "k", "groups"))
            wanted = {"forward": (rows * groups, n), "dgrad": (rows * groups, k), "wgrad": (groups, n, k)}
            assert tuple(made.shape) == wanted[str(value["pass"])], point.label
        checked.add((point.family, value.get("dtype")))
    low = {("gemm", name) for name in definitions.SCALED}
    assert low | {("gemm", name) for name in ("bf16", "fp16", "tf32")} | {("grouped_gemm", "bf16")} <= checked
    for pass_ in definitions.GEMM_PASSES:
        point = Point.of("grouped_gemm", dtype="fp8", tokens=32, n=64, k=128, groups=4, **{"pass": pass_})
        with FakeTensorMode(), torch.no_grad():
            made = operators.operator(point, "cuda")()
        assert tuple(made.shape) == {"forward": (128, 64), "dgrad": (128, 128), "wgrad": (4, 64, 128)}[pass_]


# ------------------------------------------------------------------------------------------------ what the fits make of it


def synthetic(profile: HardwareProfile, scatter: float, seed: int = 0) -> list[Measured]:
    """Points of the two models on a GPU that is exactly ``profile``, each disturbed by up to ``scatter``."""
    random = np.random.default_rng(seed)
    found = []
    chains = {op: 0.8 * profile.memory_fraction[op] for op in ("swiglu", "rope")}  # slower than the fused kernels
    plain = replace(profile, memory_fraction=profile.memory_fraction | chains)
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
            size |= {"seq_q": float(value["seq"]), "seq_kv": float(value.get("seq_kv", value["seq"]))}
            seconds = slow * float(
                profile.attention_time(**size, causal=bool(value["causal"]), pass_=str(value["pass"]))
            )
        elif point.family == "memory_bound" and str(value["op"]) in profile.memory_fraction:
            by = plain if value.get("kernel") == EAGER else profile
            seconds = float(by.memory_time(moved_bytes(point), str(value["op"])))
            seconds += definitions.kernels(point) * profile.launch_floor
        elif point.family == "launch" and value["kind"] in ("stream", "graph"):
            seconds = profile.launch_floor if value["kind"] == "stream" else profile.graph_launch_floor
        elif point.family == "sustained":
            burst = float(profile.gemm_time(*(float(value[name]) for name in ("m", "n", "k"))))
            found.append(known(point, burst / 0.83, first=burst))
            continue
        elif point.family == "bytes" and value["name"] == "usable":
            seconds = 85e9
        elif point.family == "layer":
            seconds = predicted(point, plain)
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
    assert fit.residuals["memory rope eager"]["fraction"] == pytest.approx(
        0.8 * truth.memory_fraction["rope"], rel=0.05
    )
    assert max(abs(row["error_percent"]) for row in fit.measurements["layer"]) < 6.0
    kinds = {("experts" in row, row["heads"]) for row in fit.measurements["layer"]}
    assert kinds == {(False, 32), (False, 4), (True, 32), (True, 4)}, "8b dense, 30b experts, whole and an eighth"
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
            adds = pass_ == "wgrad"  # to an fp32 gradient, by the faster of two ways
            seconds = float(
                truth.grouped_time(t, *shape, g, which, H100.peak("bf16"), H100.memory_bandwidth, 4.0 if adds else 1.0)
            )
            sizes: dict[str, Any] = {"tokens": tokens, "n": 4096, "k": 2048, "groups": 16, "dtype": "bf16"}
            if adds:
                slow = Point.of("grouped_gemm", **sizes, kernel="loop", **{"pass": definitions.ACCUMULATING})
                rows.append(known(slow, 1.4 * seconds))
            sizes["pass"] = definitions.ACCUMULATING if adds else pass_
            rows.append(known(Point.of("grouped_gemm", **sizes), seconds))
    guess = replace(H100, gemm={"bf16": replace(curve, grouped_m0=(1.0, 1.0, 1.0), grouped_efficiency=(0.5, 0.5, 0.5))})
    fit = fit_compute(rows, base_of("cuda", rows, guess), "cuda")
    assert fit.keys["gemm"]["bf16"]["grouped_efficiency"] == pytest.approx([0.9, 0.85, 0.8], rel=0.05)
    assert fit.keys["gemm"]["bf16"]["grouped_m0"][:2] == pytest.approx([150.0, 180.0], rel=0.1)
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    for row in rows[8:]:  # of few tokens the traffic of the sum is longer than the product: the price counts, not m_0
        if "kernel" not in row.point.values:
            priced = float(found.grouped_gemm_time(float(row.point.values["tokens"]), 4096, 2048, 16, "bf16", "wgrad"))
            assert priced == pytest.approx(row.median, rel=0.04)


def test_scaled_products_have_curves_of_their_own() -> None:
    """Block scales at 0.7 of the fp8 rate, NVFP4 at 0.6 of its peak, MXFP8 and scales per row as slow: the first two get curves
    without quantisation, the others are priced as fp8 and the file says by how much that is off."""
    b200, rows = load_hardware("b200-sxm"), []
    rate = {"fp8": 0.8, "fp8_row": 0.4, "mxfp8": 0.4, "fp8_block": 0.56, "nvfp4": 0.6}
    for dtype, part in rate.items():
        peak = b200.peak("fp4" if dtype == "nvfp4" else "fp8")
        for m in (2048, 4096, 8192, 16384):
            point = definitions.gemm(dtype, "forward", m, 8192, 8192)
            rows.append(known(point, flop(point) / (part * peak)))
    fit = fit_compute(rows, base_of("cuda", rows, b200), "cuda")
    found = HardwareProfile.from_dict(b200.to_dict() | fit.keys, where="fitted")
    for dtype in ("fp8", "fp8_block", "nvfp4"):
        seconds = float(found.gemm_time(4096, 8192, 8192, dtype))
        assert 2.0 * 4096 * 8192**2 / seconds / found.peak(dtype) == pytest.approx(rate[dtype], rel=0.15), dtype
        assert not found.gemm[dtype].quantise
    for dtype in ("mxfp8", "fp8_row"):
        assert fit.residuals[f"gemm {dtype} on the fp8 curve"][0] == pytest.approx(50.0, abs=8.0)


def test_rounds_and_the_yardstick_take_a_busy_machine_out() -> None:
    """A machine that is slowed to half from the 16th run on: samples after it are the same by the yardstick; the warm-up waits
    for two windows that agree and no longer than its limit; of rounds the middle one counts."""
    work = {"runs": 0}

    def spin(times: int) -> None:
        work["runs"] += 1
        for _ in range(times * (2 if work["runs"] > 16 else 1)):
            sum(range(20000))

    for _ in range(3):  # a clock that jumps in the middle of it is tried again
        work["runs"] = 0
        yardstick = Yardstick(run=lambda: spin(2), reference=1.0)
        base = sorted(yardstick.seconds() for _ in range(10))[2]
        found = measure(
            lambda: spin(6), device="cpu", clock="cpu", budget_s=0.3, yardstick=replace(yardstick, reference=base)
        )  # fmt: skip
        if found.median == pytest.approx(3.0 * base, rel=0.25) and found.slowed > 1.4:
            break
    assert found.median == pytest.approx(3.0 * base, rel=0.25) and found.slowed > 1.4
    assert found.measured(definitions.gemm("fp32", "forward", 8, 8, 8)).details[0][0] == "slowed"
    assert not steady([1.0] * 9) and steady([3.0, 2.0, *[1.0] * 10]) and not steady([2.0] * 5 + [1.0] * 5)
    falling = iter(np.exp(-np.arange(400.0)))
    blocks, lasted = warm_up(lambda: float(next(falling)) if not time.sleep(0.04) else 0.0, 0.5)
    assert not steady(blocks) and 0.5 <= lasted < 2.0
    rounds, point = Rounds(), definitions.gemm("fp32", "forward", 8, 8, 8)
    counted_ = [rounds.add(known(point, seconds)) for seconds in (3.0, 1.0, 2.0)]
    assert [one.median for one in counted_] == [3.0, 1.0, 2.0]
    assert dict(counted_[-1].details) == {"rounds": 3, "over_rounds": 2.0} and point in rounds


def test_what_was_measured_is_kept_and_a_point_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is stopped in the second round: the journal has the first one whole; a resumed one measures the rest."""
    from planner.profiler import compute_profile, worker
    from planner.profiler.assemble import _failures
    from planner.profiler.journal import Journal
    from planner.profiler.settings import Settings

    product, low, late = (
        definitions.gemm(dtype, "forward", 64, 64, 64 * scale)
        for dtype, scale in (("fp32", 1), ("nvfp4", 1), ("fp32", 2))
    )
    more = [definitions.gemm("nvfp4", name, 64, 64, 64) for name in ("dgrad", "wgrad")]
    whole = layer_point("forward", dtype="fp32", **LAYERS[0])
    points, visited = [product, low, *more, whole, late], []

    def measured(point: Point, device: str, budget: float) -> Measured:
        visited.append(point)
        if point in (low, *more):
            raise PlannerError(f"{point.label}: products in nvfp4 need a GPU; this is a CPU")
        if visited.count(whole) == 2:
            raise KeyboardInterrupt
        return known(point, 1e-3 * len(visited))

    class Ranks:
        first, timeout, place, watch = True, 1.0, type("Place", (), {"rank": 0}), None

    Ranks.watch = type("Watch", (), {"doing": staticmethod(lambda *_: contextlib.nullcontext())})  # type: ignore[assignment]
    monkeypatch.setattr(compute_profile, "measure_compute", measured)
    path = tmp_path / "mine.journal.json"

    def go(journal: Journal, points: list[Point]) -> None:
        settings = Settings(output=str(tmp_path / "mine.yaml"), device="cpu", budget=30.0)
        teller: Any = worker.Teller(None)
        with journal:
            run = worker.Run(
                settings=settings, ranks=Ranks(), journal=journal, teller=teller, begun=time.monotonic(),  # type: ignore[arg-type]
            )  # fmt: skip
            worker._alone(run, points, 1.0)

    with pytest.raises(KeyboardInterrupt):
        go(Journal(path, {}), points)
    assert visited == [warm_up_point("cpu"), product, low, *more, whole, product, whole], (
        "failed ones are not tried again"
    )
    kept = Journal.read(path)
    assert product in kept and whole in kept and late not in kept
    assert _failures(kept) == [
        f"not measured: {low.label} and 2 more like it: products in nvfp4 need a GPU; this is a CPU"
    ]
    assert dict(kept.get(product).details)["rounds"] == 2  # type: ignore[union-attr]
    visited.clear()
    resumed = Journal.resume(path, {})
    go(resumed, list(resumed.missing(points)))
    assert late in resumed and visited.count(late) == 5 and product not in visited and visited.count(low) == 1


# ------------------------------------------------------------------------------------------------ the proof

LAYERS: tuple[dict[str, Any], ...] = (
    {"hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 8, "head_dim": 64, "batch": 1, "seq": 192, "gated": True},
    {"hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12, "head_dim": 64, "batch": 1, "seq": 128, "gated": False},
    {"hidden": 640, "ffn": 1728, "heads": 10, "kv_heads": 2, "head_dim": 64, "batch": 1, "seq": 256, "gated": True},
    {"hidden": 384, "ffn": 1536, "heads": 6, "kv_heads": 6, "head_dim": 64, "batch": 2, "seq": 192, "gated": False},
)
"""Four shapes, none of which is among the shapes that the profile is fitted to."""
FURTHER: tuple[dict[str, Any], ...] = (
    {"hidden": 512, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "batch": 1, "seq": 192, "gated": True,
     "experts": 8, "top_k": 2, "expert_ffn": 640, "shared_ffn": 512},
    {"hidden": 640, "ffn": 1536, "heads": 8, "kv_heads": 8, "head_dim": 96, "batch": 1, "seq": 192, "gated": True,
     "q_rank": 384, "kv_rank": 128, "rope_dim": 32, "value_dim": 64},
)  # fmt: skip
"""Experts with a shared one; latent attention."""


def cpu_profile(measured: Sequence[Measured]) -> HardwareProfile:
    fit = fit_compute(measured, base_of("cpu", measured, None), "cpu")
    data = {key: value for key, value in H100.to_dict().items() if key != "precise_accumulation"}
    return HardwareProfile.from_dict(data | fit.keys | {"name": "cpu"}, where="cpu")


def proof_points() -> list[Point]:
    """Shapes around those of the layers."""
    points = [Point.of("launch", kind=kind) for kind in ("stream", *HOST_LAYER)]
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
    kinds = ("norm_forward", "norm_backward", "elementwise", "permute", "copy")
    points += [
        definitions.memory_bound(op, "backward" if op == "norm_backward" else "forward", 256, width, "fp32")
        for op in kinds for width in (512, 1024)
    ]  # fmt: skip
    for pass_ in ("forward", "backward"):
        points += [definitions.swiglu(pass_, 256, width, "fp32", EAGER) for width in (1024, 2048)]
        points += [definitions.rope(pass_, 256, heads, heads // 2, 64, "fp32", EAGER) for heads in (8, 12)]
    return points + [
        Point.of("grouped_gemm", dtype="fp32", tokens=tokens, n=n, k=k, groups=8, **{"pass": name})
        for tokens, n, k in ((64, 768, 512), (48, 512, 512), (64, 512, 768)) for name in definitions.GEMM_PASSES
    ]  # fmt: skip


def test_layers_are_predicted_from_their_operators_on_this_cpu() -> None:
    """Processor time of whole layers, forward and backward, against the cost model with this CPU's own curves.

    A shared machine slows some samples down to half, others not: after a warm-up operators and layers are measured in turn,
    by a yardstick, in up to four rounds until the median of the errors of the dense layers is what a quiet machine gives.
    """
    points = proof_points()
    layers = [
        layer_point(name, dtype="fp32", **sizes) for sizes in LAYERS + FURTHER for name in ("forward", "backward")
    ]
    measure_compute(warm_up_point("cpu"), "cpu", 3.0)
    rounds = Rounds()
    for _ in range(4):
        operators = [rounds.add(measure_compute(point, "cpu", 0.02)) for point in points]
        whole = [rounds.add(measure_compute(point, "cpu", 0.05)) for point in layers]
        profile = cpu_profile(operators)
        errors = [abs(predicted(one.point, profile) / one.median - 1.0) for one in whole]
        dense = float(np.median(errors[: 2 * len(LAYERS)]))
        if dense < 0.08:
            break
    assert len(errors) == 12 and dense < 0.15, errors
    assert np.median(errors[2 * len(LAYERS) :]) < 0.25, errors
    parts = predicted_parts(layers[0], profile)
    assert sum(parts.values()) == pytest.approx(predicted(layers[0], profile)) and min(parts.values()) >= 0.0
    assert {"rope", "mlp_activation", "qkv"} <= {name for name, seconds in parts.items() if seconds > 0}
    assert profile.memory_bandwidth < 1000 * GIGA and profile.usable_memory > 64 * MIB
    assert profile.launch_floor > operators[0].median
