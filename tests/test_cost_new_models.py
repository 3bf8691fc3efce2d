"""Sparse attention, chunks, sinks and image encoders, each by hand; what is assumed of a model's file is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS
from sentences import sentence

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.cost.layer import sparse_attention, transformer_layer
from planner.cost.layer.operators import GatheredRows, Shard
from planner.cost.layer.vision_layer import image_encoder, kept_inputs
from planner.cost.parameters import count_parameters, indexer_parameters, total_parameters
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.compute import price
from planner.cost.price.gathering import GATHER_RATE
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.defaults import Request, resolve
from planner.lab.reference.split import refusals
from planner.layout import CpMethod, Layout, Recompute
from planner.model import ModelSpec, load_model
from planner.rules import RULES, Job
from planner.trainer import load_trainer
from planner.vision import VisionTower
from planner.workload import Workload

H100, B200 = HARDWARE["h100-sxm"], HARDWARE["b200-sxm"]
MEGATRON = TRAINERS["megatron"]
DSA = load_model("deepseek-v3.2")
TOWER = VisionTower(
    num_layers=4, hidden_size=64, num_heads=4, ffn_size=256, patches_per_token=4, patches_per_image=256, patch_parameters=64 * 588,
    projector_parameters=64 * 1024, position_parameters=640,
)  # fmt: skip


def shard(model: ModelSpec, length: int = 8192, work: dict[str, Any] | None = None, **layout: Any) -> Shard:
    job = Workload(model=model, sequence_length=length, global_batch_size=64, **(work or {}))
    return Shard(workload=job, trainer=MEGATRON, layout=Layout(**layout), ep_stride=1.0)


def seeing(model: ModelSpec, **changes: Any) -> ModelSpec:
    return dataclasses.replace(model, vision=dataclasses.replace(TOWER, **changes))


# ---------------------------------------------------------------------------------------------------- sparse attention


def test_parameters_of_an_indexer_by_hand() -> None:
    """1536 x 64 x 128 + 7168 x 128 + 2 x 128 + 7168 x 64, whole on every tensor rank, in 61 layers of DeepSeek-V3."""
    each = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert indexer_parameters(DSA) == each == 13_959_424
    plain = load_model("deepseek-v3")
    assert total_parameters(DSA) - total_parameters(plain) == 61 * each
    assert count_parameters(DSA).attention_replicated - count_parameters(plain).attention_replicated == each
    assert indexer_parameters(plain) == 0
    shared = dataclasses.replace(DSA, index_layers=0 + 30)
    assert total_parameters(DSA) - total_parameters(shared) == pytest.approx(31 * each)


def test_mean_keys_of_a_query() -> None:
    """8,192 tokens: 2,048 with half of 2,048 at the mean, 6,144 with all; at most 2,048 tokens: half of them."""
    assert sparse_attention.chosen_keys(shard(DSA)) == (2048 * 1024 + 6144 * 2048) / 8192 == 1792
    assert sparse_attention.chosen_keys(shard(DSA, 2048)) == 1024
    assert sparse_attention.chosen_keys(shard(DSA, 1000)) == 500
    assert sparse_attention.chosen_keys(shard(DSA, 8192, work={"document_length": 4096})) == 1536


def test_core_of_sparse_attention_by_hand() -> None:
    """FLOP 2 x 1088 per query, key and head, counted as 2 x 320; keys of 576 values; 2,048 indices of 4 bytes."""
    one = sparse_attention.sparse_core(shard(DSA, tp=2))[0]
    assert isinstance(one, GatheredRows)
    pairs = 8192 * 1792
    assert one.flop[0] == pytest.approx(2 * pairs * 64 * 1088)
    assert one.flop[1] == pytest.approx(3.5 * one.flop[0])
    assert one.model_flop == pytest.approx(2 * pairs * 64 * 320)
    assert one.gathered[0] == pytest.approx(pairs * 576 * 2)
    assert one.kept == pytest.approx(8192 * (64 * 128 * 2 + 64 * (512 * 2 + 4) + 2048 * 4))


def test_tensor_parallelism_gains_nothing_below_one_pass_of_heads() -> None:
    """128 heads are two passes of gathering on Hopper and one on Blackwell; 64 are one, and so are 16."""

    def seconds(hardware: Any, tp: int) -> float:
        here = shard(DSA, tp=tp)
        return float(np.ravel(price(list(sparse_attention.sparse_core(here)), here, hardware)["core_attention"].forward)[0])

    gather = 8192 * 1792 * 576 * 2 / GATHER_RATE
    assert seconds(H100, 2) == seconds(H100, 8) == pytest.approx(gather / H100.sustained_clock)
    assert seconds(H100, 1) == pytest.approx(2 * gather / H100.sustained_clock)
    assert seconds(B200, 8) == pytest.approx(gather / B200.sustained_clock)


@pytest.mark.parametrize(("length", "measured"), [(4096, 6.96e-3), (8192, 14.6e-3), (16384, 31.1e-3), (32768, 69.0e-3)])
def test_module_of_deepseek_as_measured(length: int, measured: float) -> None:
    """Forward pass of attention in vLLM 0.24 on H100, bf16, 128 heads.  [aiconfigurator @095f58a]"""
    here = shard(DSA, length)
    operators, _ = transformer_layer.layer(here, moe=False)
    names = ("mla_down", "mla_q_up", "qkv", "attention_out", "index_queries", "index_keys", "index_choice", "core_attention")
    work = price([one for one in operators if one.name in (*names, "index_scores")], here, H100)
    half = work.pop("index_scores").forward * 0.5  # in fp8 there, in bf16 here
    burst = float(np.ravel(sum(one.forward for one in work.values()) + half)[0]) * H100.sustained_clock
    assert burst == pytest.approx(measured, rel=0.15)


def test_indexer_by_hand() -> None:
    """All pairs, half of them causal: 2 x 64 x 128 FLOP; backward 128 heads over 576 values and 4 x 8,192 per chosen key."""
    found = {one.name: one for one in sparse_attention.indexer(shard(DSA))}
    scores = found["index_scores"]
    assert scores.flop[0] == pytest.approx(2 * 8192 * 4096 * 8192)
    assert scores.flop[1] == pytest.approx(8192 * 1792 * (2 * 128 * 576 + 4 * 8192))
    assert (found["index_queries"].n, found["index_queries"].k) == (8192, 1536)
    assert (found["index_keys"].n, found["index_keys"].k) == (128 + 64, 7168)
    assert scores.saved == pytest.approx(8192 * (8192 + 192) * 2)
    # Whole on every tensor rank, but for the heads of the target; of half of the layers half.
    split = {one.name: one for one in sparse_attention.indexer(shard(DSA, tp=8))}["index_scores"]
    assert split.flop[0] == scores.flop[0]
    assert split.flop[1] == pytest.approx(8192 * 1792 * (2 * 16 * 576 + 4 * 8192))
    few = sparse_attention.indexer(shard(dataclasses.replace(DSA, index_layers=30, num_layers=60)))
    assert few[2].flop[0] == pytest.approx(scores.flop[0] / 2)
    frozen = sparse_attention.indexer(shard(DSA, work={"lora_rank": 8}))
    assert frozen[2].flop[1] == 0 and not frozen[0].trained


def test_sparse_attention_pays_at_long_sequences_alone() -> None:
    def layer(model: ModelSpec, length: int) -> float:
        here = shard(model, length)
        table = price_blocks(here.workload, Cluster(hardware=H100, num_gpus=8), MEGATRON, here.layout).dense[:, 0]
        return float(sum(table[INDEX[name]] for name in ("forward", "dgrad", "wgrad")))

    dense = dataclasses.replace(DSA, index_top_k=0, index_heads=0, index_head_dim=0, index_layers=0)
    assert layer(DSA, 4096) > layer(dense, 4096)
    assert layer(DSA, 131072) < 0.5 * layer(dense, 131072)


def test_exchange_of_sparse_attention() -> None:
    found = {one.name: one for one in sparse_attention.sparse_exchange(shard(DSA, tp=2, cp=4, sequence_parallel=1))}
    tokens = 8192 / 4
    assert found["index_gather"].size == pytest.approx(tokens * (7168 + 1536) * 2)
    assert found["index_target"].size == pytest.approx(tokens * 1792 * 4)
    assert found["kv_gather"].size == pytest.approx(8192 * (512 + 64 + 128) * 2)
    assert (float(np.ravel(found["kv_gather"].n)[0]), float(np.ravel(found["kv_gather"].stride)[0])) == (4, 2)


def test_a_mask_over_all_keys_by_hand() -> None:
    """AutoModel: core attention as without an indexer; 64 x 8192^2 scores with 2 x 128 FLOP each, 24 bytes, and a mask per head."""
    here = dataclasses.replace(shard(DSA), trainer=load_trainer("automodel"))
    operators, collectives = transformer_layer.layer(here, moe=False)
    found = {one.name: one for one in operators}
    dense = dataclasses.replace(DSA, index_top_k=0, index_heads=0, index_head_dim=0, index_layers=0)
    plain, _ = transformer_layer.layer(dataclasses.replace(here, workload=here.workload.replace(model=dense)), moe=False)
    same = next(one for one in plain if one.name == "core_attention")
    assert np.ravel(found["core_attention"].kept)[0] == np.ravel(same.kept)[0]
    scores, mask = 64 * 8192**2, 128 * 8192**2 * 2
    assert found["index_scores"].flop[0] == pytest.approx(2 * scores * 128) and found["index_scores"].flop[1] == 0
    assert found["index_choice"].forward == pytest.approx(24 * scores + 3 * mask)
    assert not [one for one in collectives if one.name.startswith("index_")]
    work = price([found["index_scores"]], here, H100)["index_scores"]
    assert np.ravel(work.forward)[0] == pytest.approx(2 * scores * 128 / (0.8 * H100.peak("fp32")) / H100.sustained_clock)
    assert assumed("deepseek-v3.2", trainer="automodel")["sparse attention"] == (
        "2048 keys per query", "a mask over all keys in automodel: the choice saves no time",
    )  # fmt: skip


def test_who_has_sparse_attention() -> None:
    text = sentence(resolve, Request(model="glm-5", num_gpus=8, trainer="fsdp"))
    assert text.startswith("glm-5 has sparse attention, of which trainer fsdp has no kernel that is modelled")
    job = Job(workload=shard(DSA).workload, cluster=Cluster(hardware=H100, num_gpus=4), trainer=MEGATRON)
    for method, legal in ((CpMethod.RING, False), (CpMethod.ALLGATHER, True)):
        layout = Layout(cp=4, cp_method=int(method), num_microbatches=64)
        rule = next(one for one in RULES if one.name == "context parallel kernels")
        assert bool(np.all(rule.holds(job, layout))) == legal


# ------------------------------------------------------------------------------------------------- chunks and sinks


def test_chunks_are_documents() -> None:
    """Chunks of 2,048 in 8,192 tokens: a quarter of the keys of full attention, a window has almost twice the chunk's."""
    chunked = dataclasses.replace(MODELS["gqa"], window=2048, num_windowed_layers=8, chunked_attention=True)
    assert chunked.num_layers == 8

    def flop(model: ModelSpec, **work: Any) -> float:
        here = shard(model, 8192, work=work)
        operators, _ = transformer_layer.layer(here, moe=False)
        return float(np.ravel(price(operators, here, H100)["core_attention"].flop)[0])

    def seconds(model: ModelSpec, **work: Any) -> float:
        here = shard(model, 8192, work=work)
        operators, _ = transformer_layer.layer(here, moe=False)
        return float(np.ravel(price(operators, here, H100)["core_attention"].forward)[0])

    full, window = MODELS["gqa"], dataclasses.replace(chunked, chunked_attention=False)
    assert flop(chunked) == pytest.approx(flop(full) / 4) == pytest.approx(flop(full, document_length=2048))
    assert flop(window) == pytest.approx(flop(full) * (1 - 0.75**2))
    assert seconds(chunked) == pytest.approx(seconds(full, document_length=2048))


def test_sinks_are_a_number_per_head() -> None:
    model = load_model("gpt-oss-120b")
    without = dataclasses.replace(model, attention_sinks=False)
    assert total_parameters(model) - total_parameters(without) == 64 * 36
    assert total_parameters(load_model("gpt-oss-20b")) == 20_914_757_184  # as published


# ------------------------------------------------------------------------------------------------- image encoders


def test_parameters_of_an_image_encoder_by_hand() -> None:
    """4 h^2 + 2 h f, biases 5 h + f, two norms of 2 h each."""
    assert TOWER.layer_parameters == 4 * 64**2 + 2 * 64 * 256 + 5 * 64 + 256 + 4 * 64
    assert TOWER.parameters == 4 * TOWER.layer_parameters + 64 * 588 + 64 * 1024 + 640
    plain = dataclasses.replace(TOWER, bias=False, gated=True)
    assert plain.layer_parameters == 4 * 64**2 + 3 * 64 * 256 + 2 * 64


def test_first_stage_holds_the_encoder_and_trains_it_when_asked() -> None:
    model, layout = seeing(MODELS["gqa"]), Layout(tp=2, pp=4, dp=2)
    for how, trained in (("frozen", 0.0), ("trained", TOWER.parameters)):
        work = shard(model, work={"image_encoder": how}).workload
        held = stage_parameters(work, layout, split_stages(model, layout))
        text = stage_parameters(shard(MODELS["gqa"]).workload, layout, split_stages(model, layout))
        assert (held.dense - text.dense)[0].tolist() == pytest.approx([TOWER.parameters, 0.0, 0.0])
        assert (held.trained(work)[0] - text.dense)[0].tolist() == pytest.approx([trained, 0.0, 0.0])
    assert total_parameters(model) == total_parameters(MODELS["gqa"]) + TOWER.parameters


def test_image_encoder_by_hand() -> None:
    """Two sequences of 128 image tokens: 1,024 patches, four images; GEMMs and attention of four layers, patches, projector."""
    model = seeing(MODELS["gqa"])
    here = shard(model, work={"image_tokens": 128, "image_encoder": "trained"}, micro_batch_size=2)
    operators = image_encoder(here)
    work = price(operators, here, H100)
    rows, h, f = 1024, 64, 256
    linear = 2 * rows * (4 * h * h + 2 * h * f) * 4 + 2 * rows * 64 * 588 + 2 * 256 * 64 * 1024
    attention = 4 * rows * 256 * h * 4
    assert sum(float(np.ravel(work[one.name].flop)[0]) for one in operators) == pytest.approx(linear + attention)
    kept = sum(float(np.ravel(one.saved)[0]) for one in operators)
    assert kept == pytest.approx(4 * rows * (2 * (4 * h + 3 * h + h + f + f) + 4 * 4))
    assert kept_inputs(here) == 0
    full = shard(model, work={"image_tokens": 128, "image_encoder": "trained"}, micro_batch_size=2, recompute=int(Recompute.FULL))
    assert float(np.ravel(kept_inputs(full))[0]) == rows * h * 4 * 2
    assert image_encoder(shard(model)) == []
    assert image_encoder(shard(MODELS["gqa"])) == []


def test_frozen_encoder_runs_forward_and_keeps_nothing() -> None:
    model = seeing(MODELS["gqa"])
    frozen, trained = (shard(model, work={"image_tokens": 128, "image_encoder": how}) for how in ("frozen", "trained"))
    idle, busy = (price(image_encoder(one), one, H100) for one in (frozen, trained))
    assert all(np.all(np.asarray(one.dgrad) == 0) and np.all(np.asarray(one.wgrad) == 0) for one in idle.values())
    for name, one in idle.items():
        assert np.ravel(one.forward)[0] == pytest.approx(np.ravel(busy[name].forward)[0])
        assert 3 * np.ravel(one.flop)[0] == pytest.approx(np.ravel(busy[name].flop)[0])
    assert sum(float(np.ravel(one.saved)[0]) for one in image_encoder(frozen)) == 0


def test_windows_of_an_encoder() -> None:
    """One of four layers sees 256 patches, the others 64 each."""
    here = shard(seeing(MODELS["gqa"], window_patches=64, num_full_layers=1), work={"image_tokens": 128})
    work = price(image_encoder(here), here, H100)
    full, windows = (float(np.ravel(work[name].flop)[0]) * 3 for name in ("vision_attention", "vision_windows"))
    assert full == pytest.approx(4 * 512 * 256 * 64)
    assert windows == pytest.approx(4 * 512 * 64 * 64 * 3)


def test_images_cost_time_and_memory_on_the_first_stage() -> None:
    def found(**work: Any) -> Any:
        job = Workload(model=load_model("qwen2.5-vl-7b"), sequence_length=4096, global_batch_size=64, **work)
        layout = Layout(tp=2, pp=2, dp=2, num_microbatches=32, zero=1)
        return estimate(job, Cluster(hardware=H100, num_gpus=8), MEGATRON, layout)

    text, some, many, trained = (
        found(), found(image_tokens=512), found(image_tokens=2048), found(image_tokens=2048, image_encoder="trained"),
    )  # fmt: skip
    times = [float(np.ravel(one.step_time)[0]) for one in (text, some, many, trained)]
    assert times == sorted(times) and len(set(times)) == 4
    memory = [float(np.ravel(one.memory_peak)[0]) for one in (text, many, trained)]
    assert memory[0] == pytest.approx(memory[1]) and memory[2] > memory[1]


@pytest.mark.parametrize(
    ("model", "work", "said"),
    [
        ("llama-3.1-8b", {"image_tokens": 8}, "image_tokens is 8, but llama-3.1-8b has no image encoder; leave it out"),
        ("qwen3-vl-8b", {"image_tokens": 4097}, "image_tokens is 4097; it must be a whole number from 0 to the 4096 tokens"),
        ("llama-3.1-8b", {"image_encoder": "trained"}, "image_encoder is trained, but llama-3.1-8b has none; leave it frozen"),
        ("qwen3-vl-8b", {"image_encoder": "trained", "lora_rank": 8}, "image_encoder is trained, but adapters are on the text"),
        ("qwen3-vl-8b", {"image_encoder": "thawed"}, "unknown image_encoder 'thawed'"),
    ],
)
def test_wrong_images(model: str, work: dict[str, Any], said: str) -> None:
    assert sentence(Workload, model=load_model(model), sequence_length=4096, global_batch_size=8, **work).startswith(said)


def test_exports_and_the_torch_model_say_what_they_have_not(run: Any, tmp_path: Any) -> None:
    file = str(tmp_path / "plan.yaml")
    seen = ("--model", "qwen3-vl-4b", "--gpus", "8", "--trainer", "fsdp", "--sequence-length", "4096")
    assert run(*seen, "--image-tokens", "512", "--output", file).exit_code == 0
    result = run("export", file, "--to", "accelerate", "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "trains on text, and the plan has 512 image tokens per sequence" in " ".join(result.output.split())
    for name, what in (
        ("glm-5", "sparse attention"), ("gpt-oss-20b", "attention sinks"), ("qwen3-vl-8b", "an image encoder"),
        ("olmo-2-7b", "layers of its own (olmo2)"),
    ):  # fmt: skip
        work = Workload(model=load_model(name), sequence_length=4096, global_batch_size=8)
        assert f"{name} has {what}, which the torch model of `plan validate` has not" in " ".join(refusals(work, Layout()))


# ------------------------------------------------------------------------------------------------------ what is said


def assumed(model: str | ModelSpec, **request: Any) -> dict[str, tuple[str, str]]:
    return {one.what: (one.value, one.why) for one in resolve(Request(model=model, num_gpus=8, **request)).assumptions}


def test_what_a_models_file_leaves_open_is_said() -> None:
    said = assumed("qwen2.5-vl-7b", image_tokens=256)["image encoder"]
    assert said[0] == "676.6M parameters, frozen; 256 image tokens per sequence"
    assert "text only" in assumed("qwen2.5-vl-7b")["image encoder"][0]
    assert assumed("glm-5")["sparse attention"][0] == "2048 keys per query, indexer trained on these"
    quantised = dataclasses.replace(load_model("llama-3.1-8b"), quantised="gptq of 4 bits")
    assert assumed(quantised)["weights"] == (
        "trained in bf16",
        "published weights are quantised (gptq of 4 bits); what is kept otherwise is converted before training",
    )
    for published, kept in (("gptq of 4 bits", "nf4"), ("mxfp4", "nf4"), ("bitsandbytes of 8 bits", "int8"), ("fp8", "fp8")):
        one = dataclasses.replace(quantised, quantised=published)
        assert assumed(one, lora_rank=8, trainer="fsdp")["weights"][0] == f"frozen in {kept}"
        assert assumed(one, lora_rank=8, trainer="torchtitan")["weights"][0] == "frozen in bf16"
    assert assumed(quantised, lora_rank=8, frozen_weights="nf4", trainer="fsdp")["weights"][0] == "frozen in nf4"
    assert not {"weights", "image encoder", "sparse attention", "parameters"} & set(assumed("llama-3.1-8b"))


@pytest.mark.parametrize("wrong", [{"head_dim": 1}, {"vocab_size": 1, "num_layers": 20}, {"ffn_size": 2}])
def test_sizes_that_disagree_with_the_published_count_are_said(wrong: dict[str, int]) -> None:
    value, why = assumed(dataclasses.replace(load_model("llama-3.1-8b"), **wrong))["parameters"]
    assert "published are 8" in why and "a size of its file is wrong" in why
    assert value in why
