"""Layers with linear attention by hand: parameters, FLOP, bytes, what is kept, the split over ranks, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS, job, model, priced

import planner
from planner.cluster import Cluster
from planner.cost.layer.linear_layer import backward_bytes, linear_block, traffic
from planner.cost.layer.operators import Collective, Operator, Scan, Shard
from planner.cost.layer.transformer_layer import layer
from planner.cost.parameters import count_parameters, total_parameters
from planner.cost.price.compute import KIMI_SLOWDOWN, MAMBA_PRODUCTS, SCAN_BACKWARD, SCAN_STEP, price
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.lab.reference.split import refusals
from planner.layout import Layout, Recompute
from planner.library import profiles_directory
from planner.linear_attention import LayerKind, LinearAttention
from planner.model import ModelSpec, from_hugging_face, load_model
from planner.runs.row_models import completed
from planner.runs.rows import read_rows
from planner.workload import Workload

H, S = 1024, 4096
SIZES: dict[str, Any] = {"key_heads": 4, "key_head_dim": 64, "value_heads": 8, "value_head_dim": 128}
DELTA = LinearAttention(kind="gated_delta_net", num_layers=6, **SIZES)
KIMI = dataclasses.replace(DELTA, kind="kimi_delta_attention")
MAMBA = dataclasses.replace(DELTA, kind="mamba2", chunk_size=128)
K, V = 256, 1024  # widths of all keys and values


def hybrid(linear: LinearAttention, **changes: Any) -> ModelSpec:
    return model("one", hidden_size=H, num_heads=8, head_dim=128, num_kv_heads=8, linear=linear, **changes)


def block(linear: LinearAttention, trainer: str = "megatron", **layout: Any) -> tuple[dict[str, Operator], list[Collective]]:
    work = Workload(model=hybrid(linear), sequence_length=S, global_batch_size=8)
    shard = Shard(workload=work, trainer=TRAINERS[trainer], layout=Layout(**layout), ep_stride=1.0)
    operators, collectives = linear_block(shard)
    return {one.name: one for one in operators}, collectives


def scan_of(linear: LinearAttention, **layout: Any) -> Scan:
    found = block(linear, **layout)[0]["scan"]
    assert isinstance(found, Scan)
    return found


# ---------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("linear", "sharded", "whole"),
    [
        (MAMBA, H * (2 * V + 2 * K + 8) + (2 * K + V) * 5 + 3 * 8 + V + V * H, 0),
        (DELTA, H * (2 * K + 2 * V + 16) + (2 * K + V) * 4 + 2 * 8 + V * H, 128),
        (KIMI, H * (2 * K + V + 8) + (2 * K + V) * 4 + 64 * (512 + V) + 8 + 512 + V * H, 2 * H * 64 + 128),
    ],
)
def test_parameters_of_a_mixer_by_hand(linear: LinearAttention, sharded: float, whole: float) -> None:
    counts = count_parameters(hybrid(linear), [LayerKind(1.0, "linear", False)])
    assert counts.attention_sharded == sharded
    assert counts.attention_replicated == whole + H  # with the norm of a layer that is a mixer alone
    assert (counts.mlp_sharded, counts.expert, counts.router, counts.key_value_weights) == (0, 0, 0, 0)


def test_published_sizes() -> None:
    """Exact sums of the published weight files, to the digits that are published."""
    found = {name: total_parameters(load_model(name)) for name in ("nemotron-h-8b", "nemotron-3-nano-30b", "kimi-linear-48b")}
    assert found["nemotron-h-8b"] == pytest.approx(8_100_852_736, rel=1e-12)
    assert found["nemotron-3-nano-30b"] == pytest.approx(31.578e9, rel=1e-4)
    assert found["kimi-linear-48b"] == pytest.approx(49.123e9, rel=1e-4)


def test_layers_of_a_stage_are_the_mean_and_the_largest_is_gathered() -> None:
    """Nemotron-H: 52 layers of one kind each; mean times 52 is the sum, and a unit of zero 3 the largest of them."""
    spec = load_model("nemotron-h-8b")
    assert [round(52 * one.share) for one in spec.layer_kinds] == [4, 24, 24]
    alone = [count_parameters(spec, [one._replace(share=1.0)]) for one in spec.layer_kinds]
    sizes = [one.attention_sharded + one.attention_replicated + one.mlp_sharded for one in alone]
    tables = 2 * spec.vocab_size * spec.hidden_size + spec.hidden_size
    assert 4 * sizes[0] + 24 * sizes[1] + 24 * sizes[2] + tables == pytest.approx(total_parameters(spec), rel=1e-12)
    assert max(sizes) == sizes[2] == 2 * 4096 * 21504 + 4096


# --------------------------------------------------------------------------------------------- operators of a layer


def test_flop_of_the_scan_by_hand() -> None:
    assert scan_of(MAMBA).flop == S * (4 * 64 * 128 + 8 * (128 * 128 + 4 * 64 * 128))
    delta = 8 * (64 * (3 * 64 + 2 * 128) + 64 * 64 / 3 + 6 * 64 * 128)
    assert scan_of(DELTA).flop == pytest.approx(S * delta) and scan_of(KIMI).flop == pytest.approx(S * delta)


def test_bytes_of_the_gated_delta_net_by_hand() -> None:
    """128 x 128 states, chunks of 64, bf16: 5.1 kB per token and head forward, of which 1.5 kB carry the state."""
    forward, backward = traffic(dataclasses.replace(DELTA, key_head_dim=128), 2.0)
    assert forward.carried == (4 * 128 + 256) * 2 and forward.together == (9 * 128 + 256) * 2 + 64 * 12
    assert backward.carried == (10 * 128 + 2 * 256) * 2 and backward.together == (23 * 128 + 512) * 2 + 64 * 4
    assert sum(backward) / sum(forward) == pytest.approx(2.2, abs=0.15)


def test_mamba_carries_no_state_through_matrix_products() -> None:
    forward, backward = traffic(MAMBA, 2.0)
    state = 64 * 128 / 128
    assert forward == (3 * 128 * 2 + state * 12 + 0.5 * (8 * 128 + 4 * 64 * 2) + 26, 0.0)
    assert backward.carried == 0.0 and 2.5 < backward.together / forward.together < 4.0
    assert all(np.all(one == 0.0) for one in scan_of(MAMBA).steps)


def test_what_a_layer_keeps_by_hand() -> None:
    """Input projection, and for delta rules the convolution, normalised queries and keys and triangles; output, gated output."""
    kept = {name: sum(float(np.sum(one.kept)) for one in block(linear)[0].values()) / S for name, linear in
            (("mamba", MAMBA), ("delta", DELTA), ("kimi", KIMI))}  # fmt: skip
    norm = 2 * H
    assert kept["mamba"] == norm + 2 * (2 * V + 2 * K + 8) + 2 * V + 2 * V
    delta = 2 * (2 * K + V) + 2 * 2 * 8 * 64 + 2 * V + 2 * V
    assert kept["delta"] == norm + 2 * (2 * K + 2 * V + 16) + delta + 8 * (64 * 2 + 8)
    gates = 2 * (64 + 8 * 64) + 2 * (64 + V)
    assert kept["kimi"] == norm + 2 * (2 * K + V + 8) + gates + delta + 8 * (2 * 64 * 2 + 8)


@pytest.mark.parametrize("linear", [MAMBA, DELTA, KIMI])
def test_heads_are_split_by_tensor_and_context_parallelism(linear: LinearAttention) -> None:
    """A quarter of the bytes each with tp 2 and cp 2; context parallelism passes as many chunks, and exchanges heads."""
    one, both = scan_of(linear), scan_of(linear, tp=2, cp=2)
    for name in ("forward", "backward", "flop", "kept"):
        assert 4 * float(np.sum(getattr(both, name))) == pytest.approx(float(np.sum(getattr(one, name))))
    assert np.sum(one.steps[0]) == np.sum(both.steps[0])
    exchanges = [one for one in block(linear, cp=2)[1] if one.name.startswith("linear_heads")]
    assert [(one.op, one.backward) for one in exchanges] == [("all_to_all", False), ("all_to_all", True)]
    assert np.sum(exchanges[0].size) == S / 2 * (linear.input_size + V) * 2


def test_seconds_of_a_scan_by_hand() -> None:
    """Bytes at the lesser of 0.75 of the memory bandwidth and 20 GB/s per multiprocessor; few heads wait chunk after chunk."""
    hardware = HARDWARE["h100-sxm"]
    rate = min(0.75 * hardware.memory_bandwidth, 20e9 * hardware.compute_units)
    for linear, slower in ((DELTA, 1.0), (KIMI, KIMI_SLOWDOWN)):
        spec = dataclasses.replace(linear, value_heads=64)
        work = Workload(model=hybrid(spec), sequence_length=S, global_batch_size=8)
        for batch, waits in ((1, True), (8, False)):
            shard = Shard(workload=work, trainer=TRAINERS["megatron"], layout=Layout(micro_batch_size=batch), ep_stride=1.0)
            operators = linear_block(shard)[0]
            forward, _ = traffic(spec, 2.0)
            per_head = batch * S * 64
            carried = max(per_head * forward.carried / rate, S / 64 * SCAN_STEP)
            wanted = slower * (per_head * forward.together / rate + carried) + 6 * hardware.launch_floor
            assert float(np.sum(price(operators, shard, hardware)["scan"].forward)) == pytest.approx(wanted)
            assert (carried == S / 64 * SCAN_STEP) is waits


def test_products_of_mamba_take_time_beside_its_bytes() -> None:
    """Chunk scan on H800, 80 heads of 64, states of 128, chunks of 256: of 0.36 ns per token and head 0.14 are bytes."""
    hardware = HARDWARE["h100-sxm"]
    rate = min(0.75 * hardware.memory_bandwidth, 20e9 * hardware.compute_units)
    moved, products = (2 * 128 + 64 * 128 / 256 * 2 + 24) / rate, (64 * 256 + 2 * 64 * 128) / (MAMBA_PRODUCTS * 132)
    assert moved * 1e9 == pytest.approx(0.137, abs=0.002) and products * 1e9 == pytest.approx(0.36 - 0.137, abs=0.01)
    one = scan_of(MAMBA)
    work = Workload(model=hybrid(MAMBA), sequence_length=S, global_batch_size=8)
    shard = Shard(workload=work, trainer=TRAINERS["megatron"], layout=Layout(), ep_stride=1.0)
    found = price([one], shard, hardware)["scan"]
    passes = ((one.forward, found.forward, 1.0), (one.backward, found.dgrad, SCAN_BACKWARD))
    for number, (bytes_, got, slower) in enumerate(passes):
        seconds = bytes_ / rate + one.products[number] / (MAMBA_PRODUCTS * hardware.compute_units)
        wanted = slower * (seconds + one.launches[number] * hardware.launch_floor)
        assert float(np.sum(got)) == pytest.approx(float(np.sum(wanted)))
    assert np.sum(one.products[1]) == S * 8 * (3 * 128 * 128 + 10 * 64 * 128)
    assert not any(scan_of(DELTA).products)


def test_backward_pass_of_the_delta_net_as_its_own_benchmark_has_it() -> None:
    """GB200, both passes and forward, milliseconds  [fla, README]: within 16 % where the GPU is busy."""
    rows = ((1, 8192, 96, 1.265, 4.738), (2, 16384, 16, 1.029, 3.616), (4, 4096, 64, 1.581, 5.964))
    for batch, length, heads, forward, both in rows:
        linear = LinearAttention(kind="gated_delta_net", num_layers=1, key_heads=heads, key_head_dim=128, value_heads=heads,
                                 value_head_dim=128)  # fmt: skip
        work = Workload(model=hybrid(linear), sequence_length=length, global_batch_size=8)
        shard = Shard(workload=work, trainer=TRAINERS["megatron"], layout=Layout(micro_batch_size=batch), ep_stride=1.0)
        found = price(linear_block(shard)[0], shard, load_hardware("gb200-nvl72"))["scan"]
        assert float(np.sum(found.forward)) * 1e3 == pytest.approx(forward, rel=0.16)
        assert float(np.sum(found.dgrad)) * 1e3 == pytest.approx(both - forward, rel=0.16)


def test_a_gate_widens_the_query_projection() -> None:
    plain, gated = (model("one", attention_gate=gate) for gate in (False, True))
    width, h = plain.attention_output_size, plain.hidden_size
    assert count_parameters(gated).attention_sharded - count_parameters(plain).attention_sharded == h * width
    names = [one.name for one in layer(Shard(workload=Workload(model=gated, sequence_length=S, global_batch_size=8),
             trainer=TRAINERS["megatron"], layout=Layout(), ep_stride=1.0), moe=False)[0]]  # fmt: skip
    assert "attention_gate" in names


def test_narrow_experts_move_and_multiply_less() -> None:
    """Experts at a width of 256: their products, their rows on the network, and the projections both ways."""
    spec = MODELS["hybrid"]
    shard = Shard(workload=job("hybrid").workload, trainer=TRAINERS["megatron"], layout=Layout(ep=2, dp=2), ep_stride=1.0)
    operators, collectives = layer(shard, True, LayerKind(1.0, "none", True))
    found: dict[str, Any] = {one.name: one for one in operators}
    assert (found["experts_up"].k, found["experts_down"].n) == (256.0, 256.0)
    assert (found["experts_in"].n, found["experts_out"].n) == (256.0, float(spec.hidden_size))
    dispatch = next(one for one in collectives if one.name == "dispatch")
    assert np.sum(dispatch.size) == 4096 * 2 * 256 * 2
    assert not any(name.startswith(("linear", "attention", "core")) for name in found)


# ------------------------------------------------------------------------------------------------------ whole layers


def test_a_hybrid_is_the_mean_of_its_layers() -> None:
    """Rows of the block: 3/4 delta net and 1/4 attention; what recompute brings back is the larger of the two."""
    work = Workload(model=hybrid(DELTA), sequence_length=S, global_batch_size=8)
    cluster = Cluster(hardware=HARDWARE["h100-sxm"], num_gpus=8)

    def dense(spec: ModelSpec, **layout: Any) -> Any:
        return price_blocks(work.replace(model=spec), cluster, TRAINERS["megatron"], Layout(**layout)).dense[:, 0]

    only = dense(hybrid(dataclasses.replace(DELTA, num_layers=8)))
    mixed, none = dense(hybrid(DELTA)), dense(ModelSpec(**_without_linear(hybrid(DELTA))))
    rows = [INDEX[name] for name in ("forward", "dgrad", "wgrad", "saved", "flop")]
    assert mixed[rows] == pytest.approx(0.75 * only[rows] + 0.25 * none[rows])
    full = {"recompute": int(Recompute.FULL)}
    row = INDEX["working"]
    larger = max(dense(hybrid(dataclasses.replace(DELTA, num_layers=8)), **full)[row],
                 dense(ModelSpec(**_without_linear(hybrid(DELTA))), **full)[row])  # fmt: skip
    assert dense(hybrid(DELTA), **full)[row] == pytest.approx(larger)


def _without_linear(spec: ModelSpec) -> dict[str, Any]:
    return {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec) if one.name != "linear"}


def test_workspace_holds_what_the_backward_pass_of_a_scan_needs() -> None:
    assert backward_bytes(MAMBA, 2.0) == (2 * K + V + 2 * V + 2 * K + 8 + V) * 2 + 8 * 8 * 64 * 128 / 128
    assert backward_bytes(DELTA, 2.0) == 8 * (4 * 64 + 5 * 128) * 2 + 2 * 8 * 64 * 128 / 64 * 2
    assert backward_bytes(KIMI, 2.0) == backward_bytes(DELTA, 2.0) + 8 * 8 * 64


def test_long_sequences_cost_a_hybrid_less() -> None:
    """Eight times the length at equal tokens: attention grows with it, linear attention does not."""
    def ratio(name: str) -> float:
        short, long = (priced(job(name, sequence=4096 * n, batch=8 // n), Layout(dp=1, num_microbatches=8 // n)).step_time[0]
                       for n in (1, 8))  # fmt: skip
        return float(long / short)

    assert ratio("hybrid") < ratio("moe")


# ------------------------------------------------------------------------------------------------------ what is said


def refused(**config: Any) -> str:
    with pytest.raises(PlannerError) as caught:
        from_hugging_face(config)
    return str(caught.value)


def test_layers_that_are_not_modelled_are_refused_by_name() -> None:
    assert "model_type 'jamba' is not modelled: it has Mamba-1 layers" in refused(model_type="jamba")
    assert "not modelled: it has layers of lightning attention" in refused(model_type="minimax_text_01")
    assert "attention and Mamba-2 side by side in each layer" in refused(model_type="falcon_h1")


def test_a_hybrid_wants_heads_that_fit() -> None:
    with pytest.raises(PlannerError, match="linear value_heads 8 must be a multiple of key_heads 3"):
        hybrid(dataclasses.replace(DELTA, key_heads=3))
    with pytest.raises(PlannerError, match="are more than num_layers 8"):
        hybrid(dataclasses.replace(DELTA, num_layers=6, num_mlp_layers=3))


# --------------------------------------------------------------------------------------------- config.json and presets

BASE = {"max_position_embeddings": 262144, "num_key_value_heads": 2, "tie_word_embeddings": False}
GDN = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "head_dim": 256,
}  # fmt: skip
NEMOTRON = {
    **BASE, "model_type": "nemotron_h", "vocab_size": 131072, "n_groups": 8, "mamba_head_dim": 64, "head_dim": 128,
    "conv_kernel": 4, "ssm_state_size": 128, "mlp_hidden_act": "relu2", "chunk_size": 128, "num_attention_heads": 32, "expand": 2,
}  # fmt: skip
MAMBA_KEYS = {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128, "mamba_n_groups": 1}
KIMI_LAYERS = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-next-80b": {
        **BASE, **GDN, "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "vocab_size": 151936, "intermediate_size": 5120, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "mlp_only_layers": [],
    },
    "kimi-linear-48b": {
        **BASE, "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "vocab_size": 163840, "head_dim": 72,
        "max_position_embeddings": 1048576, "num_attention_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "intermediate_size": 9216,
        "mla_use_nope": True, "linear_attn_config": {**KIMI_LAYERS, "kda_layers": [n for n in range(1, 27) if n % 4]},
    },
    "nemotron-h-8b": {
        **NEMOTRON, "num_key_value_heads": 8, "max_position_embeddings": 8192, "hidden_size": 4096, "mamba_num_heads": 128,
        "intermediate_size": 21504, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "nemotron-3-nano-30b": {
        **NEMOTRON, "hidden_size": 2688, "mamba_num_heads": 64, "intermediate_size": 1856, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_shared_experts": 1, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    "nemotron-3-ultra": {
        **NEMOTRON, "hidden_size": 8192, "mamba_num_heads": 256, "num_attention_heads": 64, "intermediate_size": 5120,
        "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 5120, "moe_latent_size": 2048,
        "moe_shared_expert_intermediate_size": 10240, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
        "num_hidden_layers": None, "layers_block_type": ["mamba", "moe", "mamba", "moe"] * 24 + ["attention"] * 12,
    },
    "granite-4-h-small": {
        **BASE, **MAMBA_KEYS, "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "num_attention_heads": 32, "num_local_experts": 72, "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536, "intermediate_size": 768, "tie_word_embeddings": True,
        "vocab_size": 100352, "max_position_embeddings": 131072,
        "position_embedding_type": "nope", "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_is_its_preset(name: str) -> None:
    """Values of the published files; newer ones of Nemotron list layers by kind and leave the number out."""
    preset = load_model(name)
    stated = {"published_parameters": 0.0, "published_active_parameters": 0.0, "source": ""}
    assert from_hugging_face(PUBLISHED[name], name=name) == dataclasses.replace(preset, **stated)


def test_layers_of_other_hybrids() -> None:
    """Qwen 3.5, dense and with experts, its text inside of a multimodal file; Bamba; what is not understood is said."""
    state = {"mamba_ssm_dtype": "float32"}  # of the state that is passed on; in the published files of Qwen3.5
    text = {**PUBLISHED["qwen3-next-80b"], **state, "model_type": "qwen3_5_moe_text", "intermediate_size": None}
    sparse = from_hugging_face({"model_type": "qwen3_5_moe", "text_config": text})
    assert (sparse.linear and sparse.linear.num_layers, sparse.num_shared_experts) == (36, 1)
    dense = {**BASE, **GDN, **state, "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
             "num_attention_heads": 24, "vocab_size": 248320, "intermediate_size": 17408,
             "layer_types": ["linear_attention", "full_attention"] * 32}  # fmt: skip
    one = from_hugging_face(dense)
    assert (one.num_attention_layers, one.attention_gate, one.is_moe) == (32, True, False)
    bamba = {**BASE, **MAMBA_KEYS, "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "vocab_size": 128256, "intermediate_size": 14336, "attn_layer_indices": [9, 18, 27]}  # fmt: skip
    assert from_hugging_face(bamba).num_attention_layers == 3
    assert "moonwalk layers are not modelled (layer_types)" in refused(**{**dense, "layer_types": ["moonwalk"] * 64})
    assert "layer_types has 3 entries for 64 layers" in refused(**{**dense, "layer_types": ["linear_attention"] * 3})
    assert "no layer has linear attention" in refused(**{**dense, "layer_types": ["full_attention"] * 64})
    mixed = {**PUBLISHED["nemotron-3-nano-30b"], "hybrid_override_pattern": "M-ME"}
    assert "layers of MLPs and layers of experts in one model" in refused(**mixed)
    section = {**PUBLISHED["kimi-linear-48b"]["linear_attn_config"], "use_full_rank_gate": True}
    assert "gates of full rank are not modelled" in refused(**{**PUBLISHED["kimi-linear-48b"], "linear_attn_config": section})


def test_exports_and_the_lab_refuse_hybrids_by_name(tmp_path: Path) -> None:
    one, plan = job("hybrid"), planner.plan(model="nemotron-h-8b", gpus=8)[0]
    with pytest.raises(PlannerError, match=r"megatron: what is exported builds transformer layers, and nemotron-h-8b .*mamba2"):
        plan.export("megatron", tmp_path / "run")
    assert any("hybrid has linear attention, which the torch model" in text for text in refusals(one.workload, Layout(dp=8)))


def test_rows_take_the_sizes_of_the_preset_that_they_name() -> None:
    """Sizes that a row leaves open come from its model's preset; one that it states otherwise is not overridden."""
    rows = read_rows([profiles_directory() / "runs" / "nv-mbridge-26.06-b300.yaml"])
    row = next(row for row in rows if row.get("model.name") == "nemotron-3-super-120b-a12b")
    assert row.get("model.heads") is None
    assert completed(row).get("model.heads") == 32 and completed(row).get("model.hidden") == 4096
    other = dataclasses.replace(row, data={**row.data, "model": {**row.data["model"], "layers": 44}})
    assert completed(other) is other
