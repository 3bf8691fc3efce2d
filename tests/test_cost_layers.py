"""One layer against hand-worked limits and papers: FLOP, saved bytes, collectives, experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS, job, model, priced

from planner.cluster import Cluster
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Collective, Gemm, MemoryBound, Shard
from planner.cost.price.communication import collective_seconds, distinct_share, neighbours_share
from planner.cost.price.compute import price
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.layout import CpMethod, Layout, Module, Recompute
from planner.model import ModelSpec
from planner.trainer import Trainer
from planner.workload import Workload

S, B = 4096, 2
PAPER = model(
    "paper",
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_size=8192,
    gated=False,
    activation="gelu",
    norm="layernorm",
    position="learned",
    num_position_embeddings=8192,
)
SBH = S * B * 2048.0


def saved(spec: ModelSpec, trainer: Trainer, **layout: Any) -> float:
    """Bytes that one dense layer keeps for the backward pass."""
    work = Workload(model=spec, sequence_length=S, global_batch_size=8)
    cluster = Cluster(hardware=HARDWARE["a100-sxm-80gb"], num_gpus=8)
    blocks = price_blocks(work, cluster, trainer, Layout(**{"micro_batch_size": B, **layout}))
    return float(blocks.dense[INDEX["saved"], 0])


def shard_of(name: str, trainer: str | Trainer = "megatron", **layout: Any) -> Shard:
    work = job(name, trainer).workload
    chosen = TRAINERS[trainer] if isinstance(trainer, str) else trainer
    return Shard(workload=work, trainer=chosen, layout=Layout(**layout), ep_stride=1.0)


def live(collectives: list[Collective], group: str) -> list[Collective]:
    return [one for one in collectives if one.group == group and float(np.max(one.n)) > 1]


# ---------------------------------------------------------------------------------------------------- FLOP


@pytest.mark.parametrize("name", ["gpt", "gqa", "window", "moe"])
def test_flop_is_six_n_and_attention(name: str) -> None:
    """Per token 6 N for the weights that multiply it, 3 x 2 x 2 a d times the keys that a query sees (causal: s/2)."""
    spec = MODELS[name]
    h, kv, mats = 1024, 64 * spec.num_kv_heads, spec.num_mlp_matrices
    mlp = spec.top_k * 3 * h * 1024 + h * 16 if spec.is_moe else mats * h * 4096
    weights = 8 * (2 * h * h + 2 * h * kv + mlp) + h * 32000
    full, within = S / 2, 1024 * (1 - 0.5 * 1024 / S)  # keys per query: all before it, or a window that fills up
    keys = (8 - spec.num_windowed_layers) * full + spec.num_windowed_layers * within
    expected = 6 * weights + 12 * 1024 * keys
    for layout in (
        Layout(num_microbatches=32),
        Layout(tp=2, dp=2, pp=2, num_microbatches=16, sequence_parallel=1),
        Layout(cp=2, dp=4, num_microbatches=8),
        Layout(tp=2, dp=4, num_microbatches=8, sequence_parallel=1, recompute=2),
    ):
        found = priced(job(name, gpus=int(layout.num_gpus)), layout)
        assert float(found.flop[0] / found.tokens[0]) == pytest.approx(expected, rel=1e-9)
        per_second = found.flop[0] / found.step_time[0]
        assert found.mfu[0] == pytest.approx(per_second / found.peak_flops)


# ---------------------------------------------------------------------------------------------------- activations

SELECTIVE = {"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.CORE_ATTENTION)}


@pytest.mark.parametrize(
    ("layout", "per_sbh"),
    [
        ({}, lambda x: 34 + 5 * x),
        ({"tp": 4}, lambda x: 10 + 24 / 4 + 5 * x / 4),
        ({"tp": 4, "sequence_parallel": 1}, lambda x: (34 + 5 * x) / 4),
        (SELECTIVE, lambda x: 34.0),
        ({"tp": 4, **SELECTIVE}, lambda x: 10 + 24 / 4),
        ({"tp": 4, "sequence_parallel": 1, **SELECTIVE}, lambda x: 34 / 4),
        ({"recompute": Recompute.FULL}, lambda x: 2.0),
        ({"tp": 4, "recompute": Recompute.FULL}, lambda x: 2.0),
    ],
)
def test_activations_of_korthikanti(layout: dict[str, Any], per_sbh: Any) -> None:
    """Table 2 of arXiv 2205.05198, exactly: sbh (10 + 24/t + 5 a s / (h t)) and what follows from it."""
    assert saved(PAPER, TRAINERS["megatron-2021"], **layout) == pytest.approx(SBH * per_sbh(16 * S / 2048), rel=1e-12)


@pytest.mark.parametrize(("early", "repeats"), [(False, 3.0), (True, 2.0)])
def test_early_stop_leaves_the_down_projection_out(early: bool, repeats: float) -> None:
    """A gated MLP repeats w1 and w3, and w2 only where the checkpoint runs to its end."""
    one = job("gqa", TRAINERS["torchtitan"].replace(recompute_stops_early=early))
    never = one.trainer.replace(recompute_stops_early=True)
    full = Layout(dp=8, num_microbatches=4, recompute=2, zero=2)
    least = priced(job("gqa", never), full).time["recompute"][0]
    down = one.cluster.hardware.gemm_time(S * 1.0, 1024.0, 4096.0) / one.cluster.hardware.sustained_clock
    extra = priced(one, full).time["recompute"][0] - least
    assert extra >= (repeats - 2.0) * 8 * 4 * float(down)
    assert (extra == 0) == early


def test_activations_with_flash_attention() -> None:
    """Today's Megatron against the paper: no scores (5 a s^2 b), no masks (2 s b h), 4 bytes per row and head more."""
    assert saved(PAPER, TRAINERS["megatron"]) == pytest.approx(SBH * (34 - 2) + 4 * 16 * S * B, rel=1e-12)
    # Llama: norm inputs and outputs 8 h, Q 2 h, K and V 4 k d, output 2 h, gate and up 4 f, their product 2 f.
    gqa = 8 * 1024 + 2 * 1024 + 4 * 4 * 64 + 2 * 1024 + 6 * 4096 + 4 * 16
    assert saved(MODELS["gqa"], TRAINERS["megatron"]) == pytest.approx(S * B * gqa, rel=1e-12)
    without = {"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.MLP_ACTIVATION | Module.NORM)}
    separate = TRAINERS["megatron"].replace(transformer_engine=False)
    assert saved(MODELS["gqa"], separate, **without) == pytest.approx(S * B * (gqa - 4 * 1024 - 2 * 4096))


def test_modules_that_transformer_engine_can_repeat() -> None:
    """Norms and activations of dense layers are inside linear layers: only the whole MLP, with its norm, can be repeated.
    Experts: their activation and the norm before the router, not the one before QKV."""

    def selective(modules: Module, model: str = "gqa") -> float:
        return saved(MODELS[model], TRAINERS["megatron"], recompute=Recompute.SELECTIVE, recompute_modules=int(modules))

    whole = saved(MODELS["gqa"], TRAINERS["megatron"])
    assert selective(Module.NORM | Module.MLP_ACTIVATION) == whole
    assert whole - selective(Module.MLP) == pytest.approx(S * B * (2 * 1024 + 6 * 4096))


def test_gathered_inputs_are_kept_whole() -> None:
    """DTensor keeps the gathered inputs of QKV and of the MLP, Megatron their shard: 2 x 2 s b h (1 - 1/t) more."""
    split = {"tp": 4, "sequence_parallel": 1}
    shard, whole = TRAINERS["megatron"], TRAINERS["megatron"].replace(gathered_inputs=True)
    assert saved(PAPER, whole, **split) - saved(PAPER, shard, **split) == pytest.approx(4 * SBH * 3 / 4)


# ---------------------------------------------------------------------------------------------------- tensor parallel


@pytest.mark.parametrize(("trainer", "gathers"), [("megatron", 6), ("torchtitan", 4)])
def test_tensor_collectives_with_sequence_parallelism(trainer: str, gathers: int) -> None:
    """Per layer 4 all-gathers and 4 reduce-scatters of 2 s b h bytes; inputs kept as shards are gathered twice more."""
    shard = shard_of("gqa", trainer, tp=4, micro_batch_size=B, sequence_parallel=1)
    found = live(layers.layer(shard, moe=False)[1], "tp")
    names = [one.op for one in found]
    assert (names.count("all_gather"), names.count("reduce_scatter"), len(names)) == (gathers, 4, gathers + 4)
    assert all(float(np.max(one.size)) == 2.0 * S * B * 1024 for one in found)
    forward = [one for one in found if not one.backward]
    assert [one.op for one in forward] == ["all_gather", "reduce_scatter"] * 2


def test_tensor_collectives_without_sequence_parallelism() -> None:
    """Two all-reduces forward and two backward [Shoeybi 2019]; one pair where attention and MLP are parallel."""
    for name, blocks in (("gqa", 2), ("parallel", 1)):
        found = live(layers.layer(shard_of(name, "nanotron", tp=4, micro_batch_size=B), moe=False)[1], "tp")
        assert [one.op for one in found] == ["all_reduce"] * (2 * blocks)
        assert sum(one.backward for one in found) == blocks


def test_full_recompute_sends_again() -> None:
    """Full recompute repeats the forward collectives in the backward pass."""
    trainer = TRAINERS["megatron"].replace(overlap=frozenset())
    plain = {"tp": 8, "num_microbatches": 32, "sequence_parallel": 1}
    found = priced(job("gqa", trainer), Layout.stack([Layout(**plain), Layout(**plain, recompute=Recompute.FULL)]))
    shard = shard_of("gqa", trainer, tp=8, sequence_parallel=1)
    cluster = job("gqa").cluster
    forward = sum(
        float(np.max(collective_seconds([one], cluster, 1)[0]))
        for one in layers.layer(shard, moe=False)[1]
        if not one.backward
    )
    tensor = found.time["tensor_communication"]
    assert tensor[1] - tensor[0] == pytest.approx(32 * 8 * forward)


# ---------------------------------------------------------------------------------------------------- context parallel


def test_context_exchange_volumes() -> None:
    """ring: c - 1 hops of local K and V, doubled backward; allgather: the whole K and V; a2a: Q, K, V, output."""
    local, key_values = S * B / 4, 2 * 4 * 64 * 2  # tokens of a rank; bytes of K and V per token
    layout = {"cp": 4, "micro_batch_size": B}

    def found(method: CpMethod) -> list[tuple[str, float, bool]]:
        collectives = live(layers.layer(shard_of("gqa", cp_method=method, **layout), moe=False)[1], "cp")
        return [(one.op, float(np.max(one.size * one.count)), one.backward) for one in collectives]

    assert found(CpMethod.RING) == [
        ("send_recv", 3 * local * key_values, False),
        ("send_recv", 2 * 3 * local * key_values, True),
    ]
    whole = 4 * local * key_values
    assert found(CpMethod.ALLGATHER) == [
        ("all_gather", whole, False),
        ("all_gather", whole, True),
        ("reduce_scatter", whole, True),
    ]
    moved = local * (2 * 1024 + 2 * 256) * 2
    assert found(CpMethod.A2A) == [("all_to_all", moved, False), ("all_to_all", moved, True)]


def test_a_ring_goes_at_the_pace_of_its_slowest_hop() -> None:
    """cp 8 stays in a node of 8; cp 16 leaves it, so every hop waits for the network."""
    hardware = HARDWARE["h100-sxm"]
    cluster = Cluster(hardware=hardware, num_gpus=16)
    size = 2.0**26
    for cp, expected in (
        (8, hardware.scale_up_time("send_recv", size, 2)),
        (16, hardware.scale_out_time("send_recv", size, 2, 1)),
    ):
        ring = Collective(name="ring", group="cp", op="send_recv", size=size, n=float(cp), stride=1.0, backward=False)
        assert float(collective_seconds([ring], cluster, 1)[0][0]) == pytest.approx(float(expected))


def test_all_methods_compute_the_same() -> None:
    """FLOP of attention over the whole group do not depend on how keys and values travel."""
    flops = []
    for method in CpMethod:
        found = priced(job("gqa"), Layout(cp=4, dp=2, num_microbatches=16, cp_method=method))
        flops.append(float(found.flop[0]))
    assert flops == pytest.approx([flops[0]] * 3)


# ---------------------------------------------------------------------------------------------------- experts


def test_rows_of_the_experts() -> None:
    """Token copies per rank: T K / t, times etp that see each other's; the busiest rank's share under imbalance."""
    tokens = S * 1.0
    assert float(shard_of("moe").expert_rows) == tokens * 2
    split = {"tp": 4, "sequence_parallel": 1}
    assert float(shard_of("moe", **split).expert_rows) == tokens * 2 / 4
    assert float(shard_of("moe", etp=4, **split).expert_rows) == tokens * 2
    whole = shard_of(
        "moe", "megatron-deepspeed", tp=4, etp=4
    )  # no sequence parallelism: all ranks hold the same tokens
    assert float(whole.expert_rows) == tokens * 2
    skewed = dataclasses.replace(shard_of("moe", ep=8), workload=job("moe", expert_imbalance=1.5).workload)
    assert float(skewed.expert_rows) == tokens * 2 * 1.5
    alone = dataclasses.replace(shard_of("moe"), workload=job("moe", expert_imbalance=1.5).workload)
    assert float(alone.expert_rows) == tokens * 2


def test_expert_exchange_volumes() -> None:
    """Dispatch and combine move T / t K copies of h each, both ways; etp gathers and scatters the received ones."""
    shard = shard_of("moe", tp=2, etp=2, ep=4, dp=4, sequence_parallel=1)
    found = [
        (one.op, float(np.max(one.size)), float(np.max(one.n))) for one in live(layers.layer(shard, moe=True)[1], "ep")
    ]
    copies = S / 2 * 2 * 1024 * 2.0
    once = [("all_to_all", copies, 4.0)] * 2 + [("all_gather", 2 * copies, 2.0), ("reduce_scatter", 2 * copies, 2.0)]
    weights = (
        "all_to_all",
        S / 2 * 2 * 4.0,
        4.0,
    )  # an fp32 router weight for each copy, and a count per expert and rank
    assert found == [weights, weights, ("all_gather", 8.0 * shard.model.num_experts * 4, 4.0)] + once * 2
    flex = dataclasses.replace(shard, trainer=shard.trainer.replace(expert_dispatch="deduplicated"))
    assert len(live(layers.layer(flex, moe=True)[1], "ep")) == 8  # what describes the tokens travels with them


def test_grouped_gemms_hold_the_experts() -> None:
    """E / e experts in one kernel, their rows together those of the rank, width over etp."""
    operators = layers.layer(shard_of("moe", ep=4, dp=8), moe=True)[0]
    up = next(one for one in operators if one.name == "experts_up")
    assert isinstance(up, Gemm)
    assert (float(up.groups), float(up.m * up.groups), float(up.n)) == (4.0, S * 2.0, 2 * 1024.0)
    flops = {
        float(priced(job("moe"), layout).flop[0])
        for layout in (Layout(dp=8, num_microbatches=4), Layout(dp=8, ep=8, num_microbatches=4))
    }
    assert max(flops) == pytest.approx(min(flops))


def test_adapters_have_no_other_weight_gradients() -> None:
    shard = dataclasses.replace(shard_of("gqa"), workload=job("gqa", lora_rank=8).workload)
    gemms = [one for one in layers.layer(shard, moe=False)[0] if isinstance(one, Gemm)]
    assert {one.name for one in gemms if one.trained} == {
        f"{name}_lora_{side}" for name in ("qkv", "attention_out", "mlp_up", "mlp_down") for side in "ab"
    }
    assert len(gemms) == 12


def test_adapters_only_where_they_are_named() -> None:
    """MLPerf adapts attention, NeMo its first projections alone; scaling and adding are bytes of their own."""
    shard = dataclasses.replace(shard_of("gqa"), workload=job("gqa", lora_rank=8, lora_targets="qkv").workload)
    added = [one for one in layers.layer(shard, moe=False)[0] if "_lora_" in one.name]
    assert {one.name for one in added} == {"qkv_lora_a", "qkv_lora_b", "qkv_lora_add"}
    up, both = added[1], added[2]
    assert isinstance(up, Gemm) and isinstance(both, MemoryBound)
    assert float(both.forward) == pytest.approx(float(up.m * up.n) * (3 * 2 + 4))
    assert float(both.backward) == pytest.approx(float(up.m * up.n) * 4 + 3 * 2 * float(added[0].m * added[0].k))


def test_packed_documents_shorten_attention_only() -> None:
    """s / n documents of n tokens: FLOP of attention fall by n / s, and nothing else changes."""
    works = []
    for length in (0, S // 8):
        shard = dataclasses.replace(shard_of("gqa"), workload=job("gqa", document_length=length).workload)
        works.append(price(layers.layer(shard, moe=False)[0], shard, HARDWARE["h100-sxm"]))
    whole, packed = works
    assert float(packed["core_attention"].flop) == pytest.approx(float(whole["core_attention"].flop) / 8)
    assert np.all(packed["core_attention"].forward < whole["core_attention"].forward)
    assert all(np.all(packed[name].forward == whole[name].forward) for name in whole if name != "core_attention")


def test_neighbouring_experts_meet_fewer_places() -> None:
    """Runs of 8 experts: one GPU of 16 experts, two of 4, 4/3 of 12 on average; never more than random routing meets."""
    assert neighbours_share(8, 8, 128) * 8 == pytest.approx(1.0)
    assert neighbours_share(64, 8, 256) * 8 == pytest.approx(2.0)
    assert neighbours_share(32, 8, 384) * 8 == pytest.approx(4 / 3)
    assert neighbours_share(64, 8, 256) < distinct_share(64, 8)


def test_kept_attention_is_not_repeated() -> None:
    """Full recompute that keeps the attention output repeats neither attention nor its ring, and saves one tensor more."""
    plain = TRAINERS["megatron"].replace(recompute_stops_early=False, terms={"distflashattn": {}})
    kept = plain.replace(terms={"distflashattn": {"recompute_keeps_attention": True}})
    one = job("gqa")
    layout = Layout(cp=4, num_microbatches=1, recompute=Recompute.FULL, cp_method=CpMethod.RING)
    columns = [price_blocks(one.workload, one.cluster, t, Layout.stack([layout])).dense[:, 0] for t in (plain, kept)]
    shard = shard_of("gqa")
    assert columns[1][INDEX["recompute"]] < columns[0][INDEX["recompute"]]
    assert columns[1][INDEX["cp_backward"]] < columns[0][INDEX["cp_backward"]]
    more = columns[1][INDEX["saved"]] - columns[0][INDEX["saved"]]
    assert more >= float(shard.tokens) / 4 * shard.model.attention_output_size * 2


def test_copies_around_gathers_of_the_second_dimension() -> None:
    """Gathered and scattered tensor once each, read and written; half of the latter when pipelined with the GEMM."""
    trainer = TRAINERS["torchtitan"]
    for overlap, forward in ((frozenset[str](), 8.0), (frozenset({"tp"}), 2.0)):
        shard = dataclasses.replace(
            shard_of("gqa", tp=2, sequence_parallel=1), trainer=trainer.replace(overlap=overlap)
        )
        copies = [one for one in layers.layer(shard, moe=False)[0] if one.name.endswith("_rank_order")]
        assert [one.name for one in copies] == ["attention_rank_order", "mlp_rank_order"]
        assert all(isinstance(one, MemoryBound) for one in copies)
        assert float(copies[0].forward) == pytest.approx(forward * float(shard.tokens) * shard.model.hidden_size)
    alone = dataclasses.replace(shard_of("gqa"), trainer=trainer)
    assert not [one for one in layers.layer(alone, moe=False)[0] if one.name.endswith("_rank_order")]
