"""Mixtures of experts: what routing adds, against bytes and launches counted by hand; adapters; packed documents."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS, job, priced
from test_cost_layers import shard_of

from planner.cluster import Cluster
from planner.cost.layer import eager_kernels as kernels
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.expert_layer import DEEPEP_BANDWIDTH, distinct_share
from planner.cost.layer.operators import Collective, MemoryBound, Operator, Shard
from planner.cost.price.communication import DISPATCH_LATENCY, dispatch_seconds, exposed_seconds
from planner.cost.price.compute import Work, price
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.errors import PlannerError
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.trainer import Trainer
from planner.workload import Workload

MEGATRON = TRAINERS["megatron"]
TOKENS = 4096.0
"""Tokens of one microbatch of the jobs of samples.py."""


def operators(shard: Shard) -> dict[str, Operator]:
    """Operators of an expert layer by name."""
    return {one.name: one for one in layers.layer(shard, moe=True)[0]}


def moved(shard: Shard, name: str) -> tuple[float, float]:
    """Bytes of a memory-bound operator, forward and backward."""
    found = operators(shard)[name]
    assert isinstance(found, MemoryBound)
    return float(np.max(found.forward)), float(np.max(found.backward))


def with_trainer(name: str = "moe", precision: str = "bf16", trainer: Trainer = MEGATRON, **layout: Any) -> Shard:
    """A shard of a small job under a changed trainer and precision."""
    shard = shard_of(name, **layout)
    return dataclasses.replace(shard, trainer=trainer, workload=job(name, precision=precision).workload)


def test_tokens_that_travel_once_are_copied_once() -> None:
    """All-to-all: C out of C in, N sorted, N sorted back and C summed. Sent once: d N rows arrive, N are made of them."""
    rows = TOKENS * 2 * 1024 * 2.0  # T K h w
    plain, once = with_trainer(ep=8, dp=8), with_trainer(ep=8, dp=8, trainer=MEGATRON.replace(expert_dispatch="deepep"))
    assert [moved(plain, name)[0] for name in ("permute", "sort", "unpermute")] == [2 * rows, 2 * rows, 3 * rows]
    share = 8 * (1 - (7 / 8) ** 2) / 2
    assert float(distinct_share(8.0, 2.0)) == pytest.approx(share)
    assert [moved(once, name)[0] for name in ("permute", "sort")] == [0.0, pytest.approx((1 + share) * rows)]
    assert moved(once, "unpermute")[0] == pytest.approx((1 + share) * rows)


@pytest.mark.parametrize(("precision", "static", "there"), [("bf16", False, 0), ("fp8", False, 2), ("fp8", True, 0)])
def test_rows_are_padded_in_low_precision_only(precision: str, static: bool, there: int) -> None:
    shard = with_trainer(
        precision=precision, trainer=MEGATRON.replace(cuda_graphs="static_experts" if static else "none")
    )
    assert sum(name in operators(shard) for name in ("pad", "unpad")) == there


def gpt_oss(**changes: Any) -> Shard:
    spec = dataclasses.replace(
        MODELS["moe"], expert_bias=True, clamped_activation=True, scaled_rope=True, linear_bias=True
    )
    return dataclasses.replace(
        with_trainer(trainer=MEGATRON.replace(**changes)), workload=job("moe").workload.replace(model=spec)
    )


def test_views_of_nanotron_by_hand() -> None:
    """Out of views, twice as long per byte: Q, K and V read and written, K and V once more; K and V joined at full rate. Backward
    the same, and Q joined. The activation: 5 x 2 inner widths forward instead of 5, 6 x 2 + 7 backward instead of 9."""
    plain = MEGATRON.replace(unfused=frozenset({"swiglu"}))
    views = MEGATRON.replace(unfused=frozenset({"swiglu", "gate_views", "qkv_copies"}))
    shards = [dataclasses.replace(shard_of("gqa", tp=2, dp=4), trainer=one) for one in (plain, views)]
    before, after = ({one.name: one for one in layers.layer(shard, moe=False)[0]} for shard in shards)
    assert "qkv_copies" not in before
    copies, model = after["qkv_copies"], MODELS["gqa"]
    keys = model.num_kv_heads * 2 * model.head_dim
    whole, joined = (2 * TOKENS * each / 2 * 2 for each in (model.query_size + keys, keys))
    assert isinstance(copies, MemoryBound)
    assert float(np.max(copies.forward)) == pytest.approx(2 * (whole + joined) + joined)
    assert float(np.max(copies.backward)) == pytest.approx(2 * (whole + joined) + joined + whole - joined)
    one, other = before["mlp_activation"], after["mlp_activation"]
    assert isinstance(one, MemoryBound) and isinstance(other, MemoryBound)
    assert float(np.max(other.forward / one.forward)) == pytest.approx(10 / 5)
    assert float(np.max(other.backward / one.backward)) == pytest.approx(19 / 9)


Hand = tuple[float, float, float, float, float, float, float]
BY_HAND: dict[str, dict[float, Hand]] = {
    # bytes by contiguous and by strided kernels forward, the same backward, saved, kernels forward and backward; by element size
    "clamp": {2.0: (4, 4, 5.5, 9.5, 2, 3, 9), 4.0: (8, 8, 9.5, 16.5, 4, 3, 9)},
    "expert_bias": {2.0: (10, 2, 8, 8, 0, 0, 0), 4.0: (20, 4, 16, 16, 0, 0, 0)},
    "expert_bias_fp32": {2.0: (14, 14, 18, 22, 0, 0, 0), 4.0: (16, 16, 24, 24, 0, 0, 0)},
    "scaled_rope": {2.0: (10, 14, 14, 14, 0, 24, 16), 4.0: (20, 28, 28, 28, 0, 24, 16)},
    "swiglu": {2.0: (10, 0, 18, 0, 2, 2, 3), 4.0: (20, 0, 36, 0, 4, 2, 3)},
    "gate_views": {2.0: (0, 10, 14, 12, 2, 2, 4), 4.0: (0, 20, 28, 24, 4, 2, 4)},
    "softmax": {2.0: (28, 0, 32, 0, 7, 5, 5), 4.0: (28, 0, 32, 0, 7, 5, 5)},
    "clamp_views": {2.0: (7, 4, 11, 7, 3, 6, 10), 4.0: (14, 8, 22, 13, 6, 6, 10)},
    "gelu_new": {2.0: (76, 0, 118, 0, 12, 10, 16), 4.0: (72, 0, 112, 0, 12, 8, 13)},
    "gelu_new_half": {2.0: (36, 0, 56, 0, 6, 8, 13), 4.0: (72, 0, 112, 0, 12, 8, 13)},
    "softmax_copy": {2.0: (20, 0, 20, 0, 6, 4, 3), 4.0: (24, 0, 20, 0, 4, 3, 2)},
    "softmax_fp32": {2.0: (16, 9, 20, 9, 4, 3, 3), 4.0: (16, 9, 20, 9, 4, 3, 3)},
    "norm": {2.0: (40, 0, 94, 0, 0, 8, 12), 4.0: (28, 0, 76, 0, 0, 6, 9)},
    "swiglu uncompiled": {2.0: (30, 0, 118, 0, 0, 4, 13), 4.0: (20, 0, 96, 0, 0, 2, 9)},
    "rope": {2.0: (48, 0, 48, 0, 0, 18, 18), 4.0: (36, 0, 36, 0, 0, 14, 14)},
    "cross_entropy": {2.0: (28, 0, 36, 0, 0, 6, 10), 4.0: (24, 0, 24, 0, 0, 4, 8)},
}


def test_every_row_of_eager_kernels_by_hand() -> None:
    """What each series of kernels reads and writes, saves and launches; views and broadcast operands take twice as long."""
    uncompiled = {
        name if name not in kernels.EAGER else f"{name} uncompiled": row for name, row in kernels.UNCOMPILED.items()
    }
    table = {**kernels.EAGER, **uncompiled}
    assert set(table) == set(BY_HAND)
    for name, row in table.items():
        for element, (plain, strided, back, strided_back, saved, forward, backward) in BY_HAND[name].items():
            at = int(element > 2)
            assert (row.forward.bytes(element), row.backward.bytes(element)) == (
                plain + strided,
                back + strided_back,
            ), name
            assert row.forward.as_plain(element) == plain + 2 * strided, name
            assert row.backward.as_plain(element) == back + 2 * strided_back, name
            assert (row.saved[at], row.launches[0][at], row.launches[1][at]) == (saved, forward, backward), name


def test_eager_kernels_of_gpt_oss() -> None:
    """In Megatron only; router weights are fp32 where DeepEP or HybridEP carry them. Nothing where they are fused."""
    rows = TOKENS * 2
    shard = gpt_oss()
    assert moved(shard, "experts_clamp") == (12 * rows * 2048, 24.5 * rows * 2048)
    assert moved(shard, "expert_bias") == (14 * rows * 1024, 24 * rows * 1024)
    assert moved(gpt_oss(expert_dispatch="deepep"), "expert_bias") == (42 * rows * 1024, 62 * rows * 1024)
    plain = dataclasses.replace(shard, workload=job("moe").workload)
    factor = moved(shard, "rope")[0] / moved(plain, "rope")[0]
    assert factor == pytest.approx(38 / 4)
    there = {"expert_bias", "experts_clamp", "attention_bias"}
    assert there <= set(operators(shard))
    assert not there & set(operators(dataclasses.replace(shard, trainer=TRAINERS["torchtitan"])))
    assert not there & set(operators(plain))


def test_host_waits_twice_where_the_clamp_is_apart() -> None:
    """gpt-oss-120b, 16 local experts: the GPU is slower up to the clamp and faster after it. What the host falls behind there
    is not made up for by what it was ahead before."""
    moe = job("moe", hardware="h100-sxm")
    workload = moe.workload.replace(model=load_model("gpt-oss-120b"), sequence_length=4096)
    layout = Layout.stack([Layout(dp=8, ep=8, num_microbatches=4)])

    def behind() -> float:
        return float(price_blocks(workload, moe.cluster, MEGATRON, layout).moe[INDEX["behind"]][0])

    plain = layers._clamp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_clamp", lambda *sizes: [dataclasses.replace(one, waits=False) for one in plain(*sizes)])
        once = behind()
    assert behind() > 1.05 * once > 0


def test_experts_are_launched_one_by_one() -> None:
    """16 local experts: a GEMM each forward and two backward; quantised with current scaling by three kernels each (amax, scale,
    cast), with a scale per block by one, with delayed scaling by one for all; one GEMM where they are grouped."""
    grouped = MEGATRON.replace(unfused=frozenset(), copy_bytes={"accumulate": 0.0})
    for trainer, precision, expected in (
        (MEGATRON, "bf16", (16, 32)), (MEGATRON, "fp8", (64, 80)), (MEGATRON, "mxfp8", (32, 48)),
        (TRAINERS["nemo"], "fp8", (16, 32)), (grouped, "bf16", (1, 2)), (grouped, "fp8", (4, 5)),
    ):  # fmt: skip
        found = operators(with_trainer(precision=precision, trainer=trainer))["experts_up"].launches
        assert tuple(float(np.max(count)) for count in found) == expected


def test_graphs_hold_experts_only_when_their_rows_are_fixed() -> None:
    def launches(**changes: Any) -> float:
        moe = job("moe")
        trainer = MEGATRON.replace(**changes)
        blocks = price_blocks(moe.workload, moe.cluster, trainer, Layout.stack([Layout(dp=8, num_microbatches=4)]))
        return float(blocks.moe[INDEX["launches_forward"]][0])

    eager, captured = launches(), launches(cuda_graphs="layers")
    assert launches(cuda_graphs="layers_and_experts") == 1.0
    assert 32 < captured < eager


def test_fused_experts_cast_and_activate_inside() -> None:
    """No activation forward, gate and up read once backward; between the layers nothing is quantised on its own."""
    shard = with_trainer(precision="fp8", trainer=MEGATRON.replace(fused_experts=True))
    plain = with_trainer(precision="fp8")
    assert moved(shard, "experts_activation") == (0.0, TOKENS * 2 * 2048 * 2)
    cluster = job("moe", hardware="gb200-nvl72").cluster
    apart, inside = (price(layers.layer(one, moe=True)[0], one, cluster.hardware) for one in (plain, shard))
    for name, forward, backward in (("experts_up", True, False), ("experts_down", False, True)):
        assert (float(np.max(inside[name].forward)) == float(np.max(apart[name].forward))) == forward
        assert (float(np.max(inside[name].dgrad)) == float(np.max(apart[name].dgrad))) == backward
        assert float(np.max(inside[name].wgrad)) == float(np.max(apart[name].wgrad))


def test_attention_in_fp8_is_faster_in_fp8_jobs_only() -> None:
    hardware = HARDWARE["gb300-nvl72"]
    for precision, faster in (("fp8", True), ("bf16", False)):
        times = []
        for dtype in ("bf16", "fp8"):
            shard = with_trainer(
                precision=precision,
                trainer=MEGATRON.replace(fp8=MEGATRON.kernels.fp8 | ({"attention"} if dtype == "fp8" else set())),
            )
            found = price(layers.layer(shard, moe=True)[0], shard, hardware)["core_attention"]
            times.append(float(np.max(found.forward)))
        assert (times[1] < times[0]) == faster


def test_the_gpu_waits_for_the_host_after_routing() -> None:
    """What the launches of experts exceed their own time is not made good by slower parts of the layer."""
    moe, layout = job("moe"), Layout.stack([Layout(dp=8, num_microbatches=4)])

    def behind(**changes: Any) -> float:
        found = price_blocks(moe.workload, moe.cluster, MEGATRON.replace(**changes), layout)
        return float(found.moe[INDEX["behind"]][0])

    assert behind(cuda_graphs="static_experts") == behind(host_time=0.0) == 0.0
    assert behind(host_time=80e-6) - behind(host_time=40e-6) > 32 * 40e-6
    wait = behind(host_time=1e-3)
    slow = dataclasses.replace(moe, trainer=MEGATRON.replace(host_time=1e-3))
    assert priced(slow, Layout(dp=8, num_microbatches=4)).time["host"][0] > wait


def test_dispatch_reaches_what_was_measured() -> None:
    """DeepEP's combine on H100, 4096 tokens of 7168, top 8: 973 us on 8 GPUs, 1777 on 16, 3522 on 32, within 5 percent."""
    cluster = Cluster(hardware=HARDWARE["h100-sxm"], num_gpus=64)
    for ranks, measured in ((8, 973e-6), (16, 1777e-6), (32, 3522e-6)):
        one = exchange(float(ranks), size=4096 * 8 * 7168 * 2.0)
        assert float(dispatch_seconds(one, cluster)) == pytest.approx(measured, rel=0.05)


def exchange(ranks: float, size: float, **more: float) -> Collective:
    """A dispatch among neighbours, top 8."""
    return Collective(name="dispatch", group="ep", op="all_to_all", size=size, n=ranks, stride=1.0, backward=False,
                      copies=8.0, overlap="ep", overlaps_with="layer", **more)  # fmt: skip


def test_multiprocessors_bound_a_dispatch() -> None:
    """On a fast link a kernel of few multiprocessors is slower; during computation it leaves what it does not take."""
    cluster = Cluster(hardware=HARDWARE["gb200-nvl72"], num_gpus=64)
    times = [
        float(dispatch_seconds(exchange(32.0, 4e8, bandwidth=most), cluster)) - DISPATCH_LATENCY
        for most in (np.inf, DEEPEP_BANDWIDTH)
    ]
    assert times[1] / times[0] == pytest.approx(0.66 * 900e9 / DEEPEP_BANDWIDTH)
    overlapped = MEGATRON.replace(overlap=frozenset({"ep"}))
    for units, slowdown in ((0.0, 1.2), (37.0, 148 / 111)):
        added = exposed_seconds(exchange(32.0, 4e8, units=units), np.array([1e-3]), overlapped, {}, 8e-3, 148.0)
        assert float(added[0]) == pytest.approx((slowdown - 1) * 1e-3)


def test_grouped_weight_gradients_accumulate() -> None:
    """bf16 gradients move half of what fp32 ones do: faster, the more so the fewer tokens an expert gets."""
    hardware = HARDWARE["b200-sxm"]
    saved = [
        1.0 - float(hardware.grouped_gemm_time(tokens, 4096, 7168, 32, "bf16", "wgrad", gradient_bytes=2.0))
        / float(hardware.grouped_gemm_time(tokens, 4096, 7168, 32, "bf16", "wgrad"))
        for tokens in (512, 2048, 8192)
    ]  # fmt: skip
    assert saved[0] > saved[1] > saved[2] > 0
    same = [hardware.grouped_gemm_time(512, 4096, 7168, 32, "bf16", "dgrad", gradient_bytes=g) for g in (2.0, 4.0)]
    assert same[0] == same[1]


# ---------------------------------------------------------------------------------------------------- fine-tuning


def test_documents_attend_to_themselves() -> None:
    """Eight documents of an eighth each: an eighth of the pairs; nothing else changes."""
    whole = job("gqa")
    packed = dataclasses.replace(whole, workload=whole.workload.replace(document_length=512))

    def flop(workload: Workload) -> tuple[float, float]:
        shard = dataclasses.replace(shard_of("gqa"), workload=workload)
        names = {one.name: one for one in layers.layer(shard, moe=False)[0]}
        attention = names["core_attention"]
        pairs = attention.documents * float(np.max(attention.seq_q)) * float(np.max(attention.seq_kv))  # type: ignore[attr-defined]
        return pairs, float(np.max(names["qkv"].m))  # type: ignore[attr-defined]

    assert flop(packed.workload)[0] == flop(whole.workload)[0] / 8
    assert flop(packed.workload)[1] == flop(whole.workload)[1]
    assert (
        priced(packed, Layout(dp=8, num_microbatches=4)).flop[0]
        < priced(whole, Layout(dp=8, num_microbatches=4)).flop[0]
    )
    with pytest.raises(
        PlannerError, match="document_length is 8192; it must be a whole number from 0 to the 4096 tokens"
    ):
        whole.workload.replace(document_length=8192)


@pytest.mark.parametrize(("targets", "adapted"), [("all", 4), ("attention", 2), ("qkv", 1)])
def test_adapters_only_where_they_are(targets: str, adapted: int) -> None:
    workload = job("gqa").workload.replace(lora_rank=8, lora_targets=targets)
    found = layers.layer(dataclasses.replace(shard_of("gqa"), workload=workload), moe=False)[0]
    assert sum(one.name.endswith("_lora_a") for one in found) == adapted


def test_ring_attention_merges_its_steps() -> None:
    """Four steps, three of other ranks: 2 + 2.25 x 3 of the queries' bytes, 2 + 1.5 and 5 + 4.25 x 3 of keys with values."""
    shard = shard_of("gqa", cp=4, dp=2)
    model, tokens = shard.model, TOKENS / 4
    queries = tokens * model.query_size * 2
    both = tokens * 2 * model.key_size * 2
    found = {one.name: one for one in layers.layer(dataclasses.replace(shard, trainer=MEGATRON), moe=False)[0]}[
        "ring_merge"
    ]
    assert isinstance(found, MemoryBound)
    assert float(np.max(found.forward)) == pytest.approx(8.75 * queries + 3.5 * both)
    assert float(np.max(found.backward)) == pytest.approx(8.75 * queries + 17.75 * both)
    for other, trainer in ((shard_of("gqa"), MEGATRON), (shard, TRAINERS["torchtitan"])):
        there = [one.name for one in layers.layer(dataclasses.replace(other, trainer=trainer), moe=False)[0]]
        assert "ring_merge" not in there


def test_frozen_layers_do_not_gather_their_input_again() -> None:
    shard = shard_of("gqa", tp=4, dp=2, sequence_parallel=1)
    frozen = dataclasses.replace(shard, workload=shard.workload.replace(lora_rank=8))
    again = [
        {one.name for one in layers.layer(one, moe=False)[1] if one.name.endswith("gather_again")}
        for one in (shard, frozen)
    ]
    assert again == [{"attention_gather_again", "mlp_gather_again", "kv_gather_again"}, {"kv_gather_again"}]


def test_python_of_a_layer_bounds_its_forward_pass() -> None:
    """20 ms per layer of Python: the forward pass takes that, the backward pass what it took; graphs hold it."""
    one = job("gqa", trainer="megatron")
    layout = Layout(dp=8, num_microbatches=4)

    def seconds(**changes: Any) -> tuple[float, float]:
        found = priced(dataclasses.replace(one, trainer=one.trainer.replace(**changes)), layout)
        return float(found.time["host"][0]), float(found.step_time[0])

    layers_count = one.workload.model.num_layers
    slow_layers = {"nemo": {"layer_host_time": 20e-3}}
    plain, slow = seconds(), seconds(terms=slow_layers)
    assert slow[1] == pytest.approx(4 * layers_count * 20e-3, rel=0.2)
    assert slow[1] - plain[1] == pytest.approx(slow[0] - plain[0], rel=0.05)
    assert seconds(terms=slow_layers, cuda_graphs="layers") == seconds(cuda_graphs="layers")


def test_fp8_attention_casts_and_looks_back_further() -> None:
    """3 bytes per value of queries, keys, values and output each way; its backward pass takes no less with a window."""
    model = dataclasses.replace(MODELS["gqa"], window=128, num_windowed_layers=MODELS["gqa"].num_layers)
    cluster = job("gqa", hardware="gb300-nvl72").cluster

    def priced_with(spec: ModelSpec, **changes: Any) -> tuple[Operator | None, Work]:
        shard = with_trainer("gqa", precision="mxfp8", trainer=MEGATRON.replace(**changes))
        shard = dataclasses.replace(shard, workload=shard.workload.replace(model=spec))
        found = {one.name: one for one in layers.layer(shard, moe=False)[0]}
        return found.get("attention_casts"), price([found["core_attention"]], shard, cluster.hardware)["core_attention"]

    casts, windowed = priced_with(model, fp8=MEGATRON.kernels.fp8 | {"attention"})
    _, full = priced_with(MODELS["gqa"], fp8=MEGATRON.kernels.fp8 | {"attention"})
    values = TOKENS * (2 * model.query_size + 2 * model.key_size)
    assert isinstance(casts, MemoryBound)
    assert float(np.max(casts.forward)) == float(np.max(casts.backward)) == 3 * values
    assert float(np.max(windowed.dgrad)) == float(np.max(full.dgrad))
    assert float(np.max(windowed.forward)) < float(np.max(full.forward))
    none, half = priced_with(model)
    assert none is None
    assert float(np.max(half.dgrad)) < float(np.max(priced_with(MODELS["gqa"])[1].dgrad))
