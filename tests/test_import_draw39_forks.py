"""Rules of readers: prediction layers of verl, DDP of torchtitan, old words of nanotron and of BigCode's Megatron-LM."""

import re
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given
from planner.trainers.reading.twice import given_twice


def _read(path: Path, text: str, trainer: str, **said: Any) -> Reading:
    path.write_text(text)
    return read(path, trainer, Given(**said))


# ----------------------------------------------------------------------------------------------------------------- verl

SFT = (
    "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron model.path={model} data.train_batch_size=64"
    " data.micro_batch_size_per_gpu=1 data.max_length=4096 data.use_dynamic_bsz=False engine.tensor_model_parallel_size=2 {words}\n"
)
RL = (
    "python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer actor_rollout_ref.model.path=zai-org/GLM-4.5-Air"
    " trainer.n_gpus_per_node=8 trainer.nnodes=4 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    " actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 {words}\n"
)


@pytest.mark.parametrize(
    ("model", "words", "layers"),
    [
        ("Qwen/Qwen3-8B", "", 0),
        ("Qwen/Qwen3-8B", "model.mtp.enable=False model.mtp.enable_train=True", 0),
        ("Qwen/Qwen3-8B", "model.mtp.enable=True model.mtp.enable_train=True", 1),
        ("zai-org/GLM-4.5-Air", "", 0),
        ("zai-org/GLM-4.5-Air", "model.mtp.enable=True model.mtp.enable_train=True", 1),
    ],
)
def test_a_prediction_layer_is_in_verls_model_where_it_is_trained(tmp_path: Path, model: str, words: str, layers: int) -> None:
    found = _read(tmp_path / "run.sh", SFT.format(model=model, words=words), "verl")
    for said in ({}, {"model": "glm-4.5-air"}):
        assert to_plan(found, {**said, "hardware": "h100-sxm"}).workload.model.mtp_layers == layers


def test_a_detached_encoder_is_noted(tmp_path: Path) -> None:
    words = "model.mtp.enable=True model.mtp.enable_train=True model.mtp.detach_encoder=True"
    found = _read(tmp_path / "run.sh", SFT.format(model="Qwen/Qwen3-8B", words=words), "verl")
    assert any("model.mtp.detach_encoder" in one for one in found.notes)


def test_the_actor_has_the_same_rule(tmp_path: Path) -> None:
    on = "actor_rollout_ref.model.mtp.enable=True actor_rollout_ref.model.mtp."
    assert _read(tmp_path / "a.sh", RL.format(words=""), "verl").architecture["mtp_layers"] == 0
    assert _read(tmp_path / "b.sh", RL.format(words=f"{on}enable_train=True"), "verl").architecture["mtp_layers"] == 1
    with pytest.raises(PlannerError, match=r"--set actor_rollout_ref\.model\.mtp\.enable=false"):
        _read(tmp_path / "c.sh", RL.format(words=f"{on}enable_rollout=True"), "verl")


def test_fsdp_has_no_prediction_layer(tmp_path: Path) -> None:
    words = "model.mtp.enable=True model.mtp.enable_train=True"
    text = SFT.replace("engine=megatron", "engine=fsdp").replace("engine.tensor_model_parallel_size=2", "")
    with pytest.raises(PlannerError, match="over Megatron alone"):
        _read(tmp_path / "run.sh", text.format(model="Qwen/Qwen3-8B", words=words), "verl")


# ----------------------------------------------------------------------------------------------------------- torchtitan

TOML = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[activation_checkpoint]\n'
    'mode = "full"\n[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n'
    "context_parallel_degree = {cp}\ntensor_parallel_degree = {tp}\n"
)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [((8, 1, 1, 1), (0, 0)), ((2, 4, 1, 1), (3, 4)), ((1, 8, 1, 1), (3, 0)), ((4, 1, 2, 1), (3, 1))],
)
def test_replicas_without_shards_are_those_of_ddp(
    tmp_path: Path, degrees: tuple[int, int, int, int], expected: tuple[int, int]
) -> None:
    words = dict(zip(("replicate", "shard", "cp", "tp"), degrees, strict=True))
    found = _read(tmp_path / "run.toml", TOML.format(**words), "torchtitan")
    assert (found.fields["zero"], found.fields["dp_shard"]) == expected
    assert ("data_parallel=ddp" in found.trainer) == (expected[0] == 0)


def test_ddp_keeps_its_gradients_and_their_buckets(tmp_path: Path) -> None:
    found = _read(tmp_path / "run.toml", TOML.format(replicate=8, shard=1, cp=1, tp=1), "torchtitan")
    plan = to_plan(found, {"hardware": "h100-sxm"})
    assert plan.prediction.memory_gib["gradients"] == pytest.approx((4 + 4) * 8.03e9 / 2**30, rel=0.02)


def test_ddp_of_torchtitan_has_no_tensor_parallelism(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="--set parallelism.data_parallel_shard_degree=4"):
        _read(tmp_path / "run.toml", TOML.format(replicate=4, shard=1, cp=1, tp=2), "torchtitan")


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_forks_word_for_the_usual_precision_is_no_other(tmp_path: Path, kind: str) -> None:
    text = TOML.format(replicate=1, shard=8, cp=1, tp=1).replace("seq_len", f'mixed_precision = "{kind}"\nseq_len')
    if kind == "bfloat16":
        found = _read(tmp_path / "run.toml", text, "torchtitan")
        assert found.precision == "bf16" and "training.mixed_precision" in found.unread
    else:
        with pytest.raises(PlannerError, match="training.mixed_precision"):
            _read(tmp_path / "run.toml", text, "torchtitan")


# ------------------------------------------------------------------------------------------------------------- nanotron

NANOTRON = """general: {project: a}
lighteval: null
parallelism: {dp: 8, pp: 1, tp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER%s}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192, num_attention_heads: 16, num_hidden_layers: 24,
    num_key_value_heads: 16, vocab_size: 32000, hidden_act: silu, tie_word_embeddings: false, max_position_embeddings: 2048}
tokens: {micro_batch_size: 4, batch_accumulation_per_replica: 1, sequence_length: 2048}
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
"""


def test_a_part_that_decides_nothing_may_stand_twice(tmp_path: Path) -> None:
    text = NANOTRON % ""
    found = _read(tmp_path / "a.yaml", f"{text}lighteval: {{batch_size: 16}}\n", "nanotron")
    assert found.notes == ("lighteval: given twice, the last counts",)
    for more in ("tokens: {micro_batch_size: 2}\n", "lighteval: {batch_size: 16}\ntokens: {micro_batch_size: 2}\n"):
        with pytest.raises(PlannerError, match="is given twice"):
            _read(tmp_path / "b.yaml", text + more, "nanotron")
    nested = text.replace("{zero_stage: 0,", "{zero_stage: 0, zero_stage: 1,") + "lighteval: {batch_size: 16}\n"
    with pytest.raises(PlannerError, match="is given twice"):
        _read(tmp_path / "c.yaml", nested, "nanotron")


def test_keys_that_are_given_twice_are_found_inside_sections() -> None:
    assert given_twice("a: {b: 1, b: 2}\nc: [{d: 1, d: 2}]\ne: 1\ne: 1\n") == ["a.b", "c.d"]
    assert given_twice("a: &x [*x]\n") == []


def test_selective_recompute_of_nanotron_is_what_flash_attention_does(tmp_path: Path) -> None:
    found = _read(tmp_path / "a.yaml", NANOTRON % ", recompute_granularity: SELECTIVE", "nanotron")
    assert found.fields["recompute"] == 0 and "recompute_granularity" in found.notes[0]
    found = _read(tmp_path / "b.yaml", NANOTRON % ", recompute_granularity: FULL", "nanotron")  # which no model of 0.1 heeds
    assert found.fields["recompute"] == 0 and "recompute_granularity full" in found.notes[0]


# ------------------------------------------------------------------------------------------------- BigCode's Megatron-LM

BIGCODE = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 24 --hidden-size 4096"
    " --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16"
    " --vocab-size 49152 {words}\n"
)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("", None),
        ("--attention-head-type multiquery", "unfused"),
        ("--tokenizer-type TokenizerFromFile --tokenizer-file a.json", "unfused"),
        ("--fim-rate 0.5", "unfused"),
        ("--fim-rate 0.5 --fim-data", None),
        ("--attention-head-type multiquery --use-flash-attn", "fa2"),
        ("--attention-head-type multiquery --attention-backend flash", None),
    ],
)
def test_bigcodes_fork_has_flash_attention_by_its_switch_alone(tmp_path: Path, words: str, kernel: str | None) -> None:
    found = _read(tmp_path / "run.sh", BIGCODE.format(words=words), "megatron")
    said = re.search(r"attention_kernel=(\w+)", found.trainer)
    assert (said[1] if said else None) == kernel
    assert any("BigCode" in one for one in found.notes) == (kernel == "unfused")
    assert "attention_head_type" not in found.noise
