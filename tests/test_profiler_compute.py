"""Points of the profiler's compute half: their work by hand, which are chosen, in which order, and what is refused."""

from __future__ import annotations

import pytest

from planner.cost.estimate import estimate
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.lab.profile import definitions
from planner.lab.profile.compute_points import affordable, compute_points, layout_points, weighed
from planner.lab.profile.compute_timing import measure_compute
from planner.lab.profile.definitions import COMPILED, EAGER, Heads, flop, layer_flop, moved_bytes
from planner.lab.profile.points import Point
from planner.layout import Layout
from planner.search import search

pytest.importorskip("torch")


def test_definitions_by_hand() -> None:
    """Y[4, 6] = X[4, 8] W[6, 8]^T: 2 x 4 x 6 x 8 FLOP in any pass; 2 heads of 3 over 10 tokens, causal: half of 100 pairs."""
    assert {flop(definitions.gemm("bf16", name, 4, 6, 8)) for name in definitions.GEMM_PASSES} == {384.0}
    assert definitions.rows_columns_depth(definitions.gemm("bf16", "dgrad", 4, 6, 8)) == (4, 8, 6)
    assert definitions.rows_columns_depth(definitions.gemm("bf16", "wgrad", 4, 6, 8)) == (6, 8, 4)
    assert flop(definitions.attention("bf16", "forward", Heads(1, 2, 1, 3, 3, 10))) == 2 * 2 * 50 * (3 + 3)
    assert flop(definitions.attention("bf16", "backward", Heads(1, 2, 1, 3, 3, 10))) == 2.5 * 1200
    assert moved_bytes(definitions.memory_bound("norm_backward", "backward", 5, 7, "bf16")) == 3 * 2 * 35
    assert moved_bytes(definitions.memory_bound("cross_entropy", "forward", 5, 7, "fp32")) == (4 + 4) * 35
    assert moved_bytes(definitions.memory_bound("optimizer", "forward", 5, 7, "fp32")) == 28 * 35
    assert moved_bytes(definitions.memory_bound("swiglu", "forward", 5, 7, "bf16", kernel=COMPILED)) == 3 * 2 * 35
    assert moved_bytes(definitions.memory_bound("swiglu", "backward", 5, 7, "bf16", kernel=EAGER)) == 9 * 2 * 35
    assert moved_bytes(definitions.rope("backward", 5, (4, 2, 8), "fp32", EAGER)) == 10 * 4 * 5 * 48
    # one of 4 ranks: 4 queries against 16 keys, each sees 8 of them on average
    assert flop(definitions.attention("bf16", "forward", Heads(1, 2, 1, 3, 3, 4, seq_kv=16))) == 2 * 2 * (4 * 8) * (
        3 + 3
    )
    sizes = {"hidden": 8, "ffn": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "batch": 3, "seq": 10, "dtype": "fp32"}
    # 4 heads' worth of q, k, v, out: 8 x 4 x (2 + 1 + 1 + 2) weights and 3 x 8 x 16 of the gated MLP; 30 tokens
    weights = 8 * 4 * 6 + 3 * 8 * 16
    assert layer_flop(Point.of("layer", pass_="forward", gated=True, **sizes)) == 2 * 30 * weights + 3 * 2 * 2 * 50 * 8  # type: ignore[arg-type]
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 5, "shared_ffn": 6}  # two experts, the shared one and the router
    weights = 8 * 4 * 6 + 3 * 8 * (2 * 5 + 6) + 8 * 4
    assert (
        layer_flop(Point.of("layer", pass_="forward", gated=True, **sizes, **experts))
        == 2 * 30 * weights + 3 * 2 * 2 * 50 * 8
    )  # type: ignore[arg-type]


def test_shares_of_a_layout_add_up_to_its_computation() -> None:
    """Every FLOP and byte of the step's own list is in some point: shares sum to the computing part of the step."""
    job = resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).job
    layout = Layout(tp=2, pp=1, dp=4, micro_batch_size=1, num_microbatches=job.workload.global_batch_size // 4, zero=1)
    layout = layout.replace(sequence_parallel=1)
    found = estimate(job.workload, job.cluster, job.trainer, Layout.stack([layout]))
    points = layout_points(job, layout, found)
    computing = float(found.time["compute"][0]) / float(found.step_time[0])
    assert sum(point.weight for point in points) == pytest.approx(computing, rel=0.03)
    assert len(set(points)) == len(points)


def test_budget_goes_first_to_what_the_best_layouts_live_on() -> None:
    points = weighed(("llama-8b",), (8,), "h100-sxm")
    weights = [point.weight for point in points]
    assert weights == sorted(weights, reverse=True) and weights[0] > 0.05 and weights[-1] < 0.01
    best = search(resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).job, top=1).layouts[0]
    tokens = 8192 // int(best.cp) * int(best.micro_batch_size)
    up = definitions.gemm("bf16", "forward", tokens, 2 * 14336 // int(best.tp), 4096)
    assert up in points[:12]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_budget_gives_a_whole_profile(device: str) -> None:
    """Facts, then one point of every kind of operator, come before a second one of any kind."""
    points = compute_points(("llama-3.2-1b" if device == "cuda" else "gpt3-125m",), "h100-sxm", device)
    assert len(set(points)) == len(points)
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
        (definitions.attention("fp32", "forward", Heads(1, 1, 1, 8, 8, 8), kernel="magic"), "unknown kernel 'magic'"),
        (definitions.gemm("nvfp4", "forward", 16, 64, 64), "products in nvfp4 need a GPU"),
        (definitions.gemm("fp8_block", "forward", 128, 64, 128), "multiples of 128"),
        (definitions.memory_bound("swiglu", "forward", 4, 4, "fp32", kernel=COMPILED), "torch.compile are measured on a GPU"),
        (Point.of("gemm", dtype="fp32", m=8, n=8, k=8, **{"pass": "sideways"}), "sideways"),
    ):
        with pytest.raises(PlannerError, match=sentence):
            measure_compute(point, "cpu", 0.01)
    with pytest.raises(PlannerError, match="unknown device 'tpu'"):
        measure_compute(Point.of("launch", kind="stream"), "tpu", 0.01)
