"""Adapters on frozen weights, pure bf16, losses in pieces: bytes and seconds by hand, and one sentence per mistake."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import TRAINERS, job

from planner.cost.estimate import Estimate, estimate
from planner.cost.layer.adapters import adapters_of
from planner.cost.layer.operators import Gemm, Operator, Shard
from planner.cost.layer.transformer_layer import head, layer
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.state_dtypes import FROZEN_BYTES, PURE_STATES
from planner.errors import PlannerError
from planner.layout import Layout, Recompute
from planner.rules import Job
from planner.rules.jobs import check_workload
from planner.timeline.priced_plan import price
from planner.timeline.step_slices import timeline_of
from planner.trainer import load_trainer
from planner.workload import Workload

ALONE = Layout(zero=3, recompute=int(Recompute.FULL))
GQA = job("gqa", "fsdp").model  # 1024 wide, 16 heads on 8, 32,000 tokens
H, LAYERS, V = float(GQA.hidden_size), GQA.num_layers, float(GQA.vocab_size)
KV, F = float(GQA.key_size), float(GQA.ffn_size)
LINEAR = LAYERS * (H * H * 2 + 2 * H * KV + 3 * H * F)
OTHERS = 2 * V * H + LAYERS * 2 * H + H


def asked(trainer: str = "fsdp", facts: dict[str, Any] | None = None, **workload: Any) -> Job:
    """A job of the sample model on one GPU."""
    one = job("gqa", TRAINERS[trainer].replace(**facts or {}), gpus=1, sequence=2048, batch=1)
    return dataclasses.replace(one, workload=one.workload.replace(**workload))


def priced(one: Job, layout: Layout = ALONE) -> Estimate:
    """The estimate of one layout."""
    return estimate(one.workload, one.cluster, one.trainer, Layout.stack([layout]))


def operators(one: Job, part: Any = layer) -> dict[str, Operator]:
    """Operators of a layer, or the head, by name."""
    shard = Shard(workload=one.workload, trainer=one.trainer, layout=Layout.stack([Layout()]), ep_stride=1.0)
    found = part(shard, moe=False) if part is layer else part(shard)
    return {one.name: one for one in found[0]}


@pytest.mark.parametrize("name", ["bf16", *FROZEN_BYTES])
def test_a_frozen_base_by_hand(name: str) -> None:
    """Linear layers in their own dtype, tables and norms in bf16, adapters in fp32 with their gradients and moments."""
    found = priced(asked(lora_rank=8, frozen_weights=name)).memory
    adapters = LAYERS * 8 * ((H + H) * 2 + (H + KV) * 2 + (H + F) * 3)
    base = LINEAR * FROZEN_BYTES.get(name, 2.0) + OTHERS * (4 if name == "fp32" else 2)
    assert found["weights"][0] == pytest.approx(base + 4 * adapters)
    assert found["optimizer_states"][0] == pytest.approx(8 * adapters)
    assert found["gradients"][0] <= 4 * adapters


@pytest.mark.parametrize(("trainer", "zero", "parts"), [("fsdp", 3, 4), ("fsdp", 2, 4), ("deepspeed", 3, 4), ("deepspeed", 2, 1)])
def test_adapters_are_sharded_with_the_weights(trainer: str, zero: int, parts: int) -> None:
    """FSDP and ZeRO 3 divide weights of adapters among their ranks like any other: at rank 64 they are no small part."""
    one = job("gqa", trainer, gpus=4, sequence=2048, batch=4)
    each = []
    for rank in (64, 128):
        work = one.workload.replace(lora_rank=rank)
        each.append(float(priced(dataclasses.replace(one, workload=work), Layout(dp=4, zero=zero)).memory["weights"][0]))
    more = LAYERS * 64 * ((H + H) * 2 + (H + KV) * 2 + (H + F) * 3) * TRAINERS[trainer].stored.weight_bytes
    assert each[1] - each[0] == pytest.approx(more / parts)


@pytest.mark.parametrize("frozen", ["bf16", "fp32", "nf4"])
@pytest.mark.parametrize(("whole", "tables"), [("embedding", 1), ("head", 1), ("both", 2)])
def test_tables_trained_as_a_whole_by_hand(whole: str, tables: int, frozen: str) -> None:
    """A copy of each with gradient and two moments, all in the dtype of the frozen table: fp32 beside a base of 4 bits."""
    plain, more = (priced(asked(lora_rank=8, frozen_weights=frozen, lora_whole=one)) for one in ("none", whole))
    each = tables * V * H * (2 if frozen == "bf16" else 4)
    added = {name: float(more.memory[name][0] - plain.memory[name][0]) for name in ("weights", "gradients", "optimizer_states")}
    assert added["weights"] == pytest.approx(each) and added["optimizer_states"] == pytest.approx(2 * each)
    assert 0.0 <= added["gradients"] <= each * 1.001 and more.memory_peak[0] > plain.memory_peak[0] + 2.9 * each
    assert (more.time["compute"][0] > plain.time["compute"][0]) == (whole != "embedding"), "the head has a weight gradient"
    assert more.time["optimizer"][0] > plain.time["optimizer"][0]


@pytest.mark.parametrize(
    ("trainer", "frozen", "each"),
    [("llama-factory", "bf16", (4, 8)), ("axolotl", "nf4", (2, 4)), ("deepspeed", "bf16", (2, 12)), ("deepspeed", "nf4", (2, 12))],
)
def test_tables_of_trainers_with_a_dtype_of_their_own(trainer: str, frozen: str, each: tuple[int, int]) -> None:
    """LLaMA-Factory casts what is trained to fp32, axolotl tables to bf16 before they are copied; DeepSpeed has master weights."""
    jobs = (asked(trainer, lora_rank=8, frozen_weights=frozen, lora_whole=one) for one in ("none", "both"))
    plain, more = (priced(one, ALONE.replace(zero=0)) for one in jobs)
    added = [float(more.memory[name][0] - plain.memory[name][0]) for name in ("weights", "optimizer_states")]
    assert added == pytest.approx([2 * V * H * one for one in each])


def test_scores_of_pairs_in_fp32() -> None:
    """LLaMA-Factory holds scores and log softmax of policy and reference in fp32, TRL takes one sequence at once in bf16."""
    mine, theirs = (priced(asked(one, lora_rank=8, objective="dpo"), ALONE).memory_peak[0] for one in ("llama-factory", "trl"))
    assert mine - theirs == pytest.approx(8 * 2 * 2048 * V, rel=0.1)


@pytest.mark.parametrize("moved", [False, True])
def test_unsloth_trains_tables_in_bf16_and_moves_the_frozen_ones(moved: bool) -> None:
    """Two tables: a copy of 2 bytes each; with its own checkpointing the frozen originals wait on the disk."""
    layout = ALONE.replace(zero=0, offload_activations=int(moved))
    work: dict[str, Any] = {"lora_rank": 8, "frozen_weights": "nf4_dq"}
    plain, more = (priced(asked("unsloth", lora_whole=one, **work), layout) for one in ("none", "both"))
    added = {name: float(more.memory[name][0] - plain.memory[name][0]) for name in ("weights", "optimizer_states")}
    assert added["weights"] == pytest.approx(0.0 if moved else 2 * 2 * V * H)
    assert added["optimizer_states"] == pytest.approx(4 * 2 * V * H)


def test_gradients_of_tables_are_those_of_their_copies() -> None:
    """bf16 copies beside adapters in fp32: 2 bytes each while they add up over microbatches."""
    work: dict[str, Any] = {"lora_rank": 8, "frozen_weights": "nf4_dq", "global_batch_size": 4}
    layout = ALONE.replace(zero=0, num_microbatches=4)
    plain, more = (priced(asked("unsloth", lora_whole=one, **work), layout) for one in ("none", "both"))
    assert float(more.memory["gradients"][0] - plain.memory["gradients"][0]) == pytest.approx(2 * 2 * V * H)


def test_tables_are_trained_beside_adapters_alone() -> None:
    with pytest.raises(PlannerError, match="lora_whole is head, but without adapters every weight is trained"):
        asked(lora_whole="head")
    with pytest.raises(PlannerError, match="lora_whole"):
        asked(lora_rank=8, lora_whole="all")
    one = asked(lora_rank=8, lora_whole="both")
    for trainer in ("megatron", "litgpt"):
        with pytest.raises(PlannerError, match="trains adapters alone"):
            check_workload(one.workload, one.cluster, load_trainer(trainer))


def test_bits_of_four_bit_weights() -> None:
    """4.5 bits with an fp32 scale per 64 weights, 4.127 with scales in 8 bits.  [Dettmers 2023, section 3]"""
    assert FROZEN_BYTES["nf4"] * 8 == 4.5
    assert FROZEN_BYTES["nf4_dq"] * 8 == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "adam_8bit", "adafactor", "lion", "sgd"])
def test_pure_bf16_by_hand(optimizer: str) -> None:
    """Weights 2, gradients 2 at most, states by the optimizer: no fp32 copy of anything."""
    found = priced(asked(precision="bf16_true", optimizer=optimizer), ALONE.replace(num_microbatches=2)).memory
    assert found["weights"][0] == pytest.approx(2 * (LINEAR + OTHERS))
    assert found["optimizer_states"][0] == pytest.approx(PURE_STATES[optimizer] * (LINEAR + OTHERS))
    assert found["gradients"][0] == pytest.approx(2 * (LINEAR + OTHERS))


def test_paged_states_live_on_the_host() -> None:
    """Nothing of them at the peak of the GPU; they cross PCIe both ways per step, at once."""
    found, plain = priced(asked(optimizer="paged_adam")), priced(asked(optimizer="adam"))
    states = 8 * (LINEAR + OTHERS)
    assert found.memory["optimizer_states"][0] == 0 and found.host_memory[0] == pytest.approx(states)
    bandwidth = asked().cluster.hardware.pcie_bandwidth
    assert found.time["offload"][0] == pytest.approx(states / bandwidth)
    assert found.time["optimizer"][0] == pytest.approx(plain.time["optimizer"][0])


def test_paged_states_of_weights_on_the_host_are_updated_there() -> None:
    """bitsandbytes keeps no pages for weights on the CPU: the update takes as long there as without them."""
    there = ALONE.replace(offload_parameters=1)
    paged, plain = (priced(asked(optimizer=name), there).time for name in ("paged_adam_8bit", "adam_8bit"))
    assert paged["offload"][0] == pytest.approx(plain["offload"][0]) and plain["offload"][0] > 0
    assert paged["optimizer"][0] == plain["optimizer"][0] == 0


def test_gradients_that_are_given_back_at_once() -> None:
    """Only a step of one microbatch can: then those of a layer and of the head are there, not those of all."""
    facts = {"gradients": "released"}
    short = {"precision": "bf16_true", "sequence_length": 128}
    kept, released = (priced(asked(**short, facts=one)) for one in ({}, facts))
    assert kept.memory_allocated[0] - released.memory_allocated[0] > 1.5 * LINEAR
    again = ALONE.replace(num_microbatches=2)
    same = [priced(asked(**short, facts=one), again).memory_allocated[0] for one in ({}, facts)]
    assert same[0] == same[1]


def test_weights_in_fp32_are_cast_once_per_pass() -> None:
    """At the loss all casts are there, 2 bytes per weight; not where weights are bf16 already, nor of what is frozen."""
    facts = {"loss": "full", "logit_bytes": 40.0}  # the loss is the peak
    long = {"facts": facts, "sequence_length": 2048}
    cast, sharded = (priced(asked(**long), Layout(zero=zero)) for zero in (0, 3))
    assert cast.memory["workspace"][0] - sharded.memory["workspace"][0] == pytest.approx(2 * (LINEAR + OTHERS), rel=0.01)
    pure = [priced(asked(**long, precision="bf16_true"), Layout(zero=zero)).memory["workspace"][0] for zero in (0, 3)]
    assert pure[0] == pure[1]


def test_inputs_are_saved_for_those_who_read_them() -> None:
    """Adapters on query and value: their norm's output alone; on all: both norms' and the activation's; trained weights too."""
    facts = {"unfused": []}  # projections in one: adapters share the input

    def saved(**workload: Any) -> tuple[float, ...]:
        found = operators(asked(facts=facts, **workload))
        return tuple(float(np.ravel(found[name].saved)[0]) for name in ("attention_norm", "mlp_norm", "mlp_activation"))

    rows = 2048 * H * 2
    assert saved() == saved(lora_rank=8) == (rows, rows, 2048 * F * 2)
    assert saved(lora_rank=8, lora_targets="qv") == saved(lora_rank=8, lora_targets="attention") == (rows, 0, 0)


@pytest.mark.parametrize(("facts", "each"), [({}, 2.0), ({"dropout": True}, 3.0), ({"weight_bytes": 2.0}, 0.0)])
def test_adapters_with_an_input_of_their_own(facts: dict[str, Any], each: float) -> None:
    """A cast copy for adapters in fp32, a copy and a mask with dropout: query, key and value each; in bf16 they share one."""
    found = operators(asked(facts=facts, lora_rank=8))
    down, norm = found["qkv_lora_a"], found["attention_norm"]
    assert np.ravel(down.kept)[0] == 3 * each * 2048 * H
    assert np.ravel(norm.saved)[0] == (0 if each else 2048 * H * 2)


@pytest.mark.parametrize(("targets", "names"), [("qv", {"qkv"}), ("qkv", {"qkv"}), ("attention", {"qkv", "attention_out"})])
def test_adapters_are_where_they_are_asked_for(targets: str, names: set[str]) -> None:
    """And their parameters are what their GEMMs have."""
    one = asked(lora_rank=4, lora_targets=targets)
    gemms = [found for found in operators(one).values() if isinstance(found, Gemm) and "_lora_" in found.name]
    assert {found.name.split("_lora")[0] for found in gemms} == names
    layout = Layout.stack([Layout()])
    stages = split_stages(one.model, layout)
    held = stage_parameters(one.workload, layout, stages, one.trainer.kernels).adapters[0, 0]
    pairs = {"qv": (H + H) + (H + KV), "qkv": (H + H) + 2 * (H + KV), "attention": (H + H) + 2 * (H + KV) + (H + H)}
    assert held == 4 * LAYERS * pairs[targets]


def test_weights_are_brought_to_bf16_before_each_product() -> None:
    """q + 2 bytes per weight and pass; fp8 weights are not where products run in fp8."""
    found = operators(asked(lora_rank=8, frozen_weights="nf4"))["mlp_down_dequantise"]
    assert np.ravel(found.forward)[0] == np.ravel(found.backward)[0] == (0.5625 + 2) * H * F  # type: ignore[attr-defined]
    fp8 = asked("megatron", lora_rank=8, frozen_weights="fp8", precision="fp8")
    assert not any("dequantise" in name for name in operators(fp8))
    slower, plain = (priced(asked(lora_rank=8, frozen_weights=name)).time for name in ("nf4", "bf16"))
    assert slower["compute"][0] > plain["compute"][0] and slower["recompute"][0] > plain["recompute"][0]


def test_a_loss_in_pieces() -> None:
    """Logits of 256 tokens, and the head's product and the loss once more; fused_linear T h / V tokens and nothing twice."""
    losses = ("full", "chunked", "fused_linear")
    full, chunked, fused = (asked(precision="bf16_true", facts={"loss": name}) for name in losses)
    kept = [float(np.ravel(operators(one, head)["loss"].kept)[0]) for one in (full, chunked, fused)]
    assert kept[0] == 2048 * V * 14
    assert kept[1:] == [pytest.approx(kept[0] / 8), pytest.approx(kept[0] * H / V)]
    found = [priced(one) for one in (full, chunked, fused)]
    assert found[1].memory_allocated[0] < found[0].memory_allocated[0]
    assert found[0].time["recompute"][0] == found[2].time["recompute"][0] < found[1].time["recompute"][0]


def test_pieces_of_the_vocabulary_by_hand() -> None:
    """prime-rl: 112 bytes a logit over three passes, four products, of a frozen head too; own adapters copy no input."""
    own = operators(asked("prime-rl", lora_rank=8, frozen_weights="fp32"), head)
    loss, logits = own["loss"], own["logits"]
    assert isinstance(logits, Gemm) and logits.again and logits.trained
    assert 2 * float(np.ravel(loss.forward)[0]) + float(np.ravel(loss.backward)[0]) == pytest.approx(2048 * V * 112, rel=0.01)
    assert float(np.ravel(loss.kept)[0]) == pytest.approx(2048 * 2048 * 22)
    kept = [operators(asked(name, lora_rank=8, frozen_weights="fp32"))["mlp_up_lora_a"].kept for name in ("prime-rl", "fsdp")]
    assert np.ravel(kept[0])[0] == 0 < np.ravel(kept[1])[0]


def test_adapters_of_experts_count_every_expert() -> None:
    one = job("moe", "megatron", gpus=8)
    one = dataclasses.replace(one, workload=one.workload.replace(lora_rank=4))
    layout = Layout.stack([Layout(dp=8, ep=2)])
    shard = Shard(workload=one.workload, trainer=one.trainer, layout=layout, ep_stride=1.0)
    down = adapters_of(shard, "experts_up", np.ones(1) * 64.0, 32.0, 16.0, 4.0)[0]
    assert isinstance(down, Gemm) and down.groups == 4.0 and down.n == 4.0


def test_merged_experts_are_saved_by_every_layer() -> None:
    """W + B A of all experts, in half precision, unless the layer is computed again."""
    one = job("moe", TRAINERS["fsdp"].with_option("expert_adapters", "on"), gpus=1)
    one = dataclasses.replace(one, workload=one.workload.replace(lora_rank=4, lora_targets="all"))
    shard = Shard(workload=one.workload, trainer=one.trainer, layout=Layout.stack([Layout()]), ep_stride=1.0)
    merged = next(found for found in layer(shard, moe=True)[0] if found.name == "experts_merged")
    model = one.model
    assert float(np.ravel(merged.saved)[0]) == model.num_experts * 3 * model.hidden_size * model.expert_ffn_size * 2.0
    plain = dataclasses.replace(one, trainer=TRAINERS["fsdp"])
    shard = dataclasses.replace(shard, trainer=plain.trainer)
    assert not any(found.name == "experts_merged" for found in layer(shard, moe=True)[0])


@pytest.mark.parametrize(
    ("unfused", "linear"),
    [(["projections"], False), (["projections", "grouped_gemm"], True), ([], True),
     (["projections", "own_adapters"], True)],
)
def test_experts_in_one_tensor_are_neither_adapted_nor_quantised(unfused: list[str], linear: bool) -> None:
    """transformers 5 holds them in one parameter; a loop over modules, or a library's grouped linear layer, is found."""
    one = job("moe", TRAINERS["fsdp"].replace(unfused=unfused), gpus=1)
    one = dataclasses.replace(one, workload=one.workload.replace(lora_rank=4, frozen_weights="nf4"))
    shard = Shard(workload=one.workload, trainer=one.trainer, layout=Layout.stack([Layout()]), ep_stride=1.0)
    names = {found.name for found in layer(shard, moe=True)[0]}
    assert ("experts_up_lora_a" in names, "experts_up_dequantise" in names) == (linear, linear)
    model = one.model
    experts = model.num_moe_layers * model.num_experts * 3 * model.hidden_size * model.expert_ffn_size
    held = priced(one, Layout(zero=3)).memory["weights"][0]
    assert (held > 2 * experts) != linear


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"frozen_weights": "nf4"}, "frozen_weights is nf4, but without adapters every weight is trained; give --lora-rank too"),
        ({"frozen_weights": "int3", "lora_rank": 8}, "unknown frozen_weights 'int3'"),
    ],
)
def test_frozen_weights_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        Workload(model=GQA, sequence_length=2048, global_batch_size=1, **changes)


def test_a_trainer_without_four_bit_weights() -> None:
    one = asked("megatron", lora_rank=8, frozen_weights="nf4")
    with pytest.raises(PlannerError, match="trainer megatron has no frozen weights in nf4; it knows bf16, fp8"):
        check_workload(one.workload, one.cluster, one.trainer)


@pytest.mark.parametrize("trainer", ["fsdp", "torchtitan", "torchtune"])
def test_gradients_in_bf16_are_copied_in_bf16(trainer: str) -> None:
    """No cast to fp32 before the reduction: less traffic of memory and of the link than in mixed precision."""
    layout = Layout(dp=4, zero=3)
    one = dataclasses.replace(asked(trainer), cluster=job("gqa", trainer, gpus=4).cluster)
    names = [name for name in ("bf16", "bf16_true") if name in one.legal.precisions]
    times = [
        priced(dataclasses.replace(one, workload=one.workload.replace(precision=name, global_batch_size=4)), layout)
        for name in names
    ]
    data = [found.time["data_communication"][0] + found.hidden["data"][0] for found in times]
    assert data == sorted(data, reverse=True) and len(set(data)) == len(data)


@pytest.mark.parametrize("changes", [{"precision": "bf16_true"}, {"lora_rank": 8, "frozen_weights": "nf4"}])
def test_a_timeline_takes_the_predicted_step(changes: dict[str, Any]) -> None:
    """Action by action, as the closed form says."""
    one = dataclasses.replace(asked("fsdp", **changes), cluster=job("gqa", "fsdp", gpus=4).cluster)
    one = dataclasses.replace(one, workload=one.workload.replace(global_batch_size=8))
    priced_layout = price(one, Layout(dp=4, zero=3, num_microbatches=2))
    assert timeline_of(priced_layout).step_time == pytest.approx(priced_layout.estimate.step_time[0])
