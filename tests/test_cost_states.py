"""Model states and data-parallel traffic by sharding level, against ZeRO, Megatron's distributed optimizer and FSDP."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job, priced

from planner.cost.layer.operators import Shard, kept_logit_bytes, logit_bytes
from planner.cost.memory.allocator import GIVEN_BACK, HELD_GIVEN_BACK
from planner.cost.memory.states import host_bytes, state_bytes, update_bytes
from planner.cost.parameters import total_parameters
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.state_dtypes import stored_as
from planner.layout import Layout
from planner.units import GIB

N = total_parameters(MODELS["gqa"])


def states(trainer: str, name: str = "gqa", **layout: Any) -> tuple[float, float, float]:
    found = priced(job(name, trainer), Layout(**{"dp": 8, "num_microbatches": 4, **layout}))
    return tuple(float(found.memory[part][0]) for part in ("weights", "gradients", "optimizer_states"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("trainer", "layout", "weights", "gradients", "optimizer"),
    [
        ("megatron", {"zero": 0}, 2, 4, 12),
        ("megatron", {"zero": 1}, 2, 4, 12 / 8),  # 18; 6 + 12 / d
        ("megatron", {"zero": 1, "dp": 4, "cp": 2}, 2, 4, 12 / 8),  # context-parallel ranks share the states too
        ("deepspeed", {"zero": 0}, 2, 2, 12),
        ("deepspeed", {"zero": 1}, 2, 2, 12 / 8),  # 16; 4 + 12 / d
        ("deepspeed", {"zero": 2}, 2, 2 / 8, 12 / 8),
        ("deepspeed", {"zero": 3}, 2 / 8, 2 / 8, 12 / 8),  # 2 + 14 / d; 16 / d
        ("nanotron", {"zero": 0}, 2, 6, 12),  # most allocated in the update: 18.2 of one replica, 20.1 and 10.1 + 14.3 / d, the
        ("nanotron", {"zero": 1}, 2, 4, 12 / 8),  # last with the 4 + 2 / d of gather buffers that activations can take
        ("torchtitan", {"zero": 2}, 4 / 8, 4 / 8, 8 / 8),
        ("torchtitan", {"zero": 3}, 4 / 8, 4 / 8, 8 / 8),
        ("torchtitan", {"zero": 3, "dp_shard": 2}, 4 / 2, 4 / 2, 8 / 2),  # HSDP
    ],
)
def test_bytes_per_parameter(
    trainer: str, layout: dict[str, Any], weights: float, gradients: float, optimizer: float
) -> None:
    """[ZeRO, arXiv 1910.02054, figure 1; Megatron Core, distributed optimizer: 6 + 12 / d]"""
    assert states(trainer, **layout) == pytest.approx((weights * N, gradients * N, optimizer * N), rel=1e-12)


def test_experts_are_sharded_over_their_own_ranks() -> None:
    """ep 4 of dp 8: a rank holds a quarter of the experts, and edp 2 ranks share the states of each."""
    experts = 8 * 16 * 3 * 1024 * 1024.0
    dense = total_parameters(MODELS["moe"]) - experts
    found = states("megatron", "moe", ep=4, zero=1)
    expected = (2 * (dense + experts / 4), 4 * (dense + experts / 4), 12 * (dense / 8 + experts / 8))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gqa", "gpt", "moe", "window"])
def test_stages_hold_all_parameters_once(name: str) -> None:
    """The stages of a pipeline hold the model once; a tied embedding lives on the first and on the last."""
    spec = MODELS[name]
    for pp, ends in (
        (1, {}),
        (2, {"first_stage_layers": 7}),
        (4, {}),
        (4, {"first_stage_layers": 1, "last_stage_layers": 1}),
    ):
        layout = Layout(pp=pp, **ends)
        stages = split_stages(spec, layout)
        held = (stage_parameters(job(name).workload, layout, stages).all * stages.weight).sum()
        copies = 32000.0 * 1024 * (spec.tied_embeddings and pp > 1)
        assert held == pytest.approx(total_parameters(spec) + copies, rel=1e-12)


def test_replicated_key_value_heads() -> None:
    """tp 8 with 4 key-value heads: every rank keeps a whole head, so K and V are stored twice."""
    found = priced(job("gqa"), Layout(tp=8, num_microbatches=32, sequence_parallel=1))
    norms = (2 * 8 + 1) * 1024.0
    twice = 8 * 2 * 1024 * 4 * 64.0
    assert found.memory["weights"][0] == pytest.approx(2 * ((N - norms + twice) / 8 + norms), rel=1e-12)


RS, AG, AR = "reduce_scatter", "all_gather", "all_reduce"
ALONE: dict[str, Any] = {"overlap": frozenset(), "copy_bytes": {"gather": 0.0, "reduce": 0.0}, "root_units": 0}
"""Nothing hides, nothing is copied, all goes at once: what is left is the time of the collectives (units: test_fsdp.py)."""


@pytest.mark.parametrize(
    ("trainer", "layout", "expected"),
    [
        ("megatron", {"zero": 0}, {(AR, 4): 1}),
        ("megatron", {"zero": 1}, {(RS, 4): 1, (AG, 2): 1}),
        ("deepspeed", {"zero": 1}, {(RS, 2): 1, (AG, 2): 1}),
        ("deepspeed", {"zero": 2}, {(RS, 2): 4, (AG, 2): 1}),  # weights stay whole: gathered once after the update
        ("deepspeed", {"zero": 3}, {(RS, 2): 4, (AG, 2): 8}),  # forward and backward of every microbatch
        ("torchtitan", {"zero": 2}, {(RS, 4): 4, (AG, 2): 4}),
        ("torchtitan", {"zero": 3}, {(RS, 4): 4, (AG, 2): 8}),
    ],
)
def test_traffic_of_each_level(trainer: str, layout: dict[str, Any], expected: dict[tuple[str, int], int]) -> None:
    """How often a step reduces the gradients and gathers the weights: {(operation, bytes per parameter): times}."""
    plain = job("gqa", TRAINERS[trainer].replace(**ALONE))
    found = priced(plain, Layout(dp=8, num_microbatches=4, **layout))
    seconds = sum(
        times * float(plain.cluster.collective_time(op, size * N, 8, 1)) for (op, size), times in expected.items()
    )
    assert found.time["data_communication"][0] == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("zero", "gathers"), [(2, 4), (3, 8)])
def test_copies_of_sharded_states(zero: int, gathers: int) -> None:
    """FSDP2 copies weights out of every gather (4 bytes per parameter) and gradients into every reduction (6)."""
    layout = Layout(dp=8, num_microbatches=4, zero=zero)
    seconds = []
    for changes in (ALONE, {"overlap": frozenset(), "root_units": 0}):
        one = job("gqa", TRAINERS["torchtitan"].replace(**changes))
        seconds.append(priced(one, layout).time["data_communication"][0])
    expected = one.cluster.hardware.memory_time((4 * gathers + 6 * 4) * N, "copy")
    assert seconds[1] - seconds[0] == pytest.approx(float(expected), rel=1e-9)


def test_a_pipeline_reduces_once() -> None:
    """torch pipelining sets requires_gradient_sync only for the last backward pass of a stage."""
    plain = job("gqa", TRAINERS["torchtitan"].replace(overlap=frozenset()))
    few, many = (
        priced(plain, Layout(pp=2, dp=4, num_microbatches=m, zero=2)).time["data_communication"] for m in (4, 32)
    )
    assert few[0] == many[0] > 0


def test_a_pipeline_that_drops_weights_gathers_them_again() -> None:
    """Zero 3 in a pipeline: m + 1 gathers per step, one without; counted in torch by validator.traffic (test_agreement)."""
    plain = job("gqa", TRAINERS["torchtitan"].replace(**ALONE))
    (two, three), (_, twice) = (
        [
            priced(plain, Layout(pp=2, dp=4, num_microbatches=m, zero=zero)).time["data_communication"][0]
            for zero in (2, 3)
        ]
        for m in (4, 8)
    )
    assert three > two and twice - two == pytest.approx(2 * (three - two), rel=1e-9)
    model = MODELS["gqa"]
    least = float(plain.cluster.collective_time("all_gather", 2 * total_parameters(model) / 2, 4, 1))
    assert three - two == pytest.approx(4 * least, rel=0.15)  # stages are not quite the same size


def test_hybrid_sharding_reduces_in_two_steps() -> None:
    """HSDP: reduce-scatter over the shard group, all-reduce of the shard over the replicas. [FSDP, section 3.2.2]"""
    plain = job("gqa", TRAINERS["torchtitan"].replace(**ALONE), gpus=16)
    found = priced(plain, Layout(dp=16, dp_shard=8, num_microbatches=2, zero=3))
    time = plain.cluster.collective_time
    step = time(RS, 4 * N, 8, 1) + time(AR, 4 * N / 8, 2, 8) + 2 * time(AG, 2 * N, 8, 1)
    assert found.time["data_communication"][0] == pytest.approx(2 * float(step), rel=1e-12)


def test_strided_ranks_pay_for_the_network() -> None:
    """With the pipeline inside (tp-cp-ep-pp-dp), replicas of one stage are pp apart and own fewer NICs of a node."""
    plain = job("gqa", TRAINERS["megatron"].replace(overlap=frozenset()), gpus=32)
    layouts = [Layout(pp=4, dp=8, num_microbatches=4, zero=1, order=order) for order in (0, 1)]
    found = priced(plain, Layout.stack(layouts)).time["data_communication"]
    assert found[1] > 2 * found[0]


def test_update_reads_and_writes_every_state() -> None:
    """Megatron bf16 Adam: 4 + 4 (gradient, its norm) + 2 x 12 + 2 = 34 bytes per local parameter."""
    one = job("gqa")
    found = priced(one, Layout.stack([Layout(dp=8, num_microbatches=4, zero=level) for level in (0, 1)]))
    expected = one.cluster.hardware.memory_time(np.array([N, N / 8]) * 34, "optimizer")
    assert found.time["optimizer"] == pytest.approx(expected)


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 34 + 16), ("fp16", 34 + 24)])
def test_kernels_beside_the_update_move_bytes_too(precision: str, moved: int) -> None:
    """Megatron-LM of 2022: gradients zeroed 4, clipped 8, master weights read to be copied 4; in fp16 unscaled 8."""
    one = job("gpt", "megatron-2021", hardware="a100-sxm-80gb", sequence=2048, precision=precision)
    found = priced(one, Layout(dp=8, num_microbatches=4))
    expected = one.cluster.hardware.memory_time(np.array(total_parameters(MODELS["gpt"]) * moved), "optimizer")
    assert found.time["optimizer"][0] == pytest.approx(float(expected))


def test_gather_buffers_take_the_place_of_activations_at_the_end() -> None:
    """ZeRO 1 of nanotron: 10 + 14 / d bytes per parameter are alive in the gather; the library's 2 stay reserved, free."""
    one = job("gqa", "nanotron")
    few = dataclasses.replace(one, workload=one.workload.replace(sequence_length=8, global_batch_size=8))
    found = priced(few, Layout(dp=8, zero=1))
    assert found.memory_allocated[0] == pytest.approx(N * (10 + 14 / 8), rel=1e-6)
    assert found.reclaimed[0] == 0.0  # the block is in use at the peak
    many = priced(one, Layout(dp=8, num_microbatches=4, zero=1))
    assert many.memory_allocated[0] > N * (10 + 14 / 8)
    assert many.reclaimed[0] == pytest.approx(GIVEN_BACK * 2 * N, rel=1e-6)
    assert priced(one, Layout(dp=8, num_microbatches=4, zero=0)).reclaimed[0] == 0.0


def test_collectives_in_flight_are_reserved_but_not_needed() -> None:
    """Two tensors of T h per layer and pass, held_collectives at most; none without tensor parallelism or a host that is ahead."""
    one = job("gqa", "nanotron", gpus=8)
    ahead = dataclasses.replace(one, trainer=one.trainer.replace(host_time=1e-9))
    layout = {"dp": 1, "num_microbatches": 8, "sequence_parallel": 1, "micro_batch_size": 4}
    each = 4 * one.workload.sequence_length * 1024 * 2.0
    for tp, job_, m, tensors in (
        (8, ahead, 8, 45),
        (8, ahead, 2, 45),
        (8, ahead, 1, 2 * 8),
        (1, ahead, 8, 0),
        (8, one, 8, 0),
    ):
        found = priced(job_, Layout(**{**layout, "tp": tp, "dp": 8 // tp, "num_microbatches": m}))
        assert found.memory_peak[0] - found.memory_needed[0] == pytest.approx(
            HELD_GIVEN_BACK * tensors * each, rel=1e-4, abs=1.0
        )
    full = dataclasses.replace(ahead, trainer=ahead.trainer.replace(terms={"nanotron": {"held_collectives": 1e9}}))
    found = priced(
        full, Layout(**{**layout, "tp": 2, "pp": 4, "dp": 1, "num_microbatches": 64, "micro_batch_size": 62})
    )
    assert found.memory_peak[0] == pytest.approx(found.usable_memory)


def test_an_allocator_without_room_for_collectives_in_flight_costs_time() -> None:
    """4 microbatches, 8 layers, 2 inputs of T h a layer and pass, all allocated anew: 128 T h, 2 ms a GiB for each of 8 ranks.

    Where the room that is missing is less than what memory is uncertain by, nothing: 45 inputs in flight, of which so many fit.
    """
    one = job("gqa", "nanotron", gpus=8)
    ahead = dataclasses.replace(one, trainer=one.trainer.replace(host_time=1e-9))
    layout = Layout(dp=1, tp=8, num_microbatches=4, sequence_parallel=1, micro_batch_size=4)
    each = 4 * one.workload.sequence_length * 1024 * 2.0
    plain = priced(ahead, layout)
    needed = float(plain.memory_peak[0]) - 45 * each
    assert needed > 0

    def host(fitting: float, allocation_time: float = 2e-3) -> float:
        """Seconds of the host on a card on which ``fitting`` inputs find room."""
        hardware = dataclasses.replace(ahead.cluster.hardware, usable_memory=needed + fitting * each)
        trainer = ahead.trainer.replace(terms={"nanotron": {"allocation_time": allocation_time}})
        changed = dataclasses.replace(ahead, cluster=dataclasses.replace(ahead.cluster, hardware=hardware), trainer=trainer)
        return float(priced(changed, layout).time["host"][0])

    lost = 128 * each * 8 * 2e-3 / GIB
    assert host(10) - host(10, 1e-9) == pytest.approx(lost, rel=1e-4)
    assert host(10) - host(46) == pytest.approx(lost, rel=1e-4)
    uncertain = ahead.trainer.stored.memory_error * (needed + 44 * each)
    assert each < uncertain and host(44) == host(46)


def test_fp16_keeps_half_precision_gradients_beside_fp32_ones() -> None:
    """[Megatron Core, distributed optimizer: fp16 20, sharded 4 + 16 / d]"""
    for zero, expected in ((0, (2, 2, 16)), (1, (2, 2, 16 / 8))):
        found = priced(job("gqa", precision="fp16"), Layout(dp=8, num_microbatches=4, zero=zero))
        got = [float(found.memory[part][0]) for part in ("weights", "gradients", "optimizer_states")]
        assert got == pytest.approx([each * N for each in expected], rel=1e-12)


@pytest.mark.parametrize(("ep", "moved"), [(1, 0), (8, 100), (4, 100)])
def test_adapters_of_experts_are_divided_among_their_own_replicas(ep: int, moved: int) -> None:
    """r (in + out) a linear layer: of 16 / e experts a rank, 8 layers, gate and up joined and down, over the 8 / e ranks that
    have the same ones; all else over 8. On the host 12 bytes of states, 4 of the gradient, 2 of the weight."""
    work = job("moe", lora_rank=16, lora_targets="all").workload
    layout = Layout(dp=8, ep=ep, zero=1, num_microbatches=4, offload_optimizer=moved)
    held = stage_parameters(work, layout, split_stages(MODELS["moe"], layout))
    experts = 8 * 16 * 16 / ep * ((1024 + 2 * 1024) + (1024 + 1024))
    others = 8 * 16 * ((1024 + 16 * 64 + 2 * 4 * 64) + (16 * 64 + 1024))
    assert float(held.adapters[0, 0]) == experts + others
    each = others / 8 + experts / (8 / ep)
    bytes_of = state_bytes(work, TRAINERS["megatron"], layout, held)
    assert float(bytes_of["optimizer_states"][0, 0]) == 12 * each
    assert float(host_bytes(work, TRAINERS["megatron"], layout, held, bytes_of)[0, 0]) == 18 * each * moved / 100


def test_buckets_of_torchs_ddp_are_as_large_as_all_gradients() -> None:
    """Only where nothing is sharded and there are replicas; of adapters theirs; in bf16 2 bytes each.

    [torch, nn/parallel/distributed.py, gradient_as_bucket_view: "the saved memory size will be equal to the total gradients size"]
    """

    def kept(trainer: str, work: dict[str, Any] | None = None, **layout: Any) -> float:
        found = priced(job("gqa", trainer, **(work or {})), Layout(**{"dp": 8, "num_microbatches": 4, **layout}))
        return float(found.memory["gradients"][0])

    alone = kept("fsdp", zero=0, dp=1)
    assert kept("fsdp", zero=0) - alone == pytest.approx(4 * N, rel=1e-9) and alone == pytest.approx(4 * N, rel=1e-3)
    pure = kept("fsdp", {"precision": "bf16_true"}, zero=0, dp=1)
    assert kept("fsdp", {"precision": "bf16_true"}, zero=0) - pure == pytest.approx(2 * N, rel=1e-9)
    assert 0 < kept("fsdp", {"lora_rank": 8}, zero=0) < 0.2 * N
    assert kept("verl", zero=0) == alone and kept("deepspeed", zero=0) == pytest.approx(2 * N)
    assert kept("nanotron", zero=0) - kept("nanotron", zero=1) == pytest.approx(2 * N, rel=1e-9)


def test_gradients_that_wait_for_the_last_microbatch_are_whole_and_reduced_once() -> None:
    """FSDP under no_sync: 2 bytes a parameter on every rank for 4 / 8 sharded ones (reduced in bf16), one reduction a step.

    [accelerate, Accelerator.no_sync; torch 2.13, FullyShardedDataParallel.no_sync, "may be higher memory usage"]
    """
    one = TRAINERS["fsdp"].replace(gradient_reduce_bytes=2.0, overlap=frozenset())
    every, last = (job("gqa", one.replace(gradients=word)) for word in ("on_demand", "deferred"))

    def of(work: Any, part: str, **layout: Any) -> float:
        found = priced(work, Layout(**{"dp": 8, "zero": 3, "num_microbatches": 4, **layout}))
        return float((found.memory if part == "gradients" else found.time)[part][0])

    assert of(every, "gradients") == pytest.approx(4 * N / 8, rel=0.01) and of(last, "gradients") == pytest.approx(2 * N, rel=0.01)
    assert of(last, "gradients", num_microbatches=1) == of(every, "gradients", num_microbatches=1)
    assert of(last, "gradients", zero=0) == of(every, "gradients", zero=0)
    four, eight = (of(last, "data_communication", num_microbatches=m) for m in (4, 8))
    more, most = (of(every, "data_communication", num_microbatches=m) for m in (4, 8))
    assert 0 < eight - four < most - more and four < more
    assert of(last, "data_communication", num_microbatches=1) == of(every, "data_communication", num_microbatches=1)


@pytest.mark.parametrize(("changes", "layout", "share"), [
    ({}, {"zero": 0}, 1.0), ({}, {"zero": 3, "dp": 4}, 0.25), ({"precision": "bf16_true"}, {"zero": 0}, 1.0),
    ({}, {"zero": 3, "dp": 4, "offload_parameters": 1}, 0.0), ({"optimizer": "sgd"}, {"zero": 0}, 0.0),
    ({"lora_rank": 8, "lora_whole": "both"}, {"zero": 0}, 1.0),
])  # fmt: skip
def test_foreach_adam_makes_half_of_its_states_once_more(changes: dict[str, Any], layout: dict[str, Any], share: float) -> None:
    """Of what is trained: adapters, and tables beside them in the dtype that theirs have."""
    one = job("gqa", TRAINERS["fsdp"].with_option("optimizer_kernel", "foreach"), gpus=int(layout.get("dp", 1)))
    work = one.workload.replace(**changes)
    trainer, stacked = stored_as(work, one.trainer), Layout.stack([Layout(**layout)])
    parameters = stage_parameters(work, stacked, split_stages(work.model, stacked), trainer.kernels)
    found = update_bytes(work, trainer, stacked, parameters)
    held = state_bytes(work.replace(optimizer="adam"), trainer, stacked, parameters)["optimizer_states"]
    assert found == pytest.approx(held / 2 * (share > 0)) and float(found[0, 0]) <= total_parameters(work.model) * 4.0 * share


def test_scores_that_a_loop_holds_count_in_fp32_too() -> None:
    """12 bytes at the peak of the loss, and 4 that stay; 14 and 2 of them in half precision."""
    for precision, kept, full in (("fp32", (16.0, 4.0), 12.0), ("bf16", (14.0, 2.0), 14.0)):
        one = job("gqa", "fsdp", gpus=1)
        work, alone = one.workload.replace(precision=precision), Layout.stack([Layout()])
        shard = Shard(workload=work, trainer=one.trainer, layout=alone, ep_stride=1.0)
        holds = dataclasses.replace(shard, trainer=one.trainer.with_option("loss", "kept"))
        assert (logit_bytes(holds), kept_logit_bytes(holds)) == kept
        assert (logit_bytes(shard), kept_logit_bytes(shard)) == (full, 0.0)
