"""What import reads of the trainers' own examples of 2026-08."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import CpMethod, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

SECTIONS = """
model: Qwen/Qwen3-0.6B
model_class: llm
kernel_config: {name: auto}
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/sft.yaml
output_dir: out
micro_batch_size: 2
cutoff_len: 4096
learning_rate: 1.0e-4
max_steps: 10
"""


def test_llama_factory_in_sections_of_plugins(tmp_path: Path) -> None:
    """FSDP2 around weights that are trained, which it casts to fp32.  [v1/core/model_engine.py]"""
    found = read(written(tmp_path, SECTIONS), None, Given(num_gpus=8))
    assert (found.trainer, found.model_name, found.precision) == (
        "llama-factory+attention_kernel=best", "Qwen/Qwen3-0.6B", "bf16",
    )
    assert (found.sequence_length, found.global_batch_size, found.optimizer, found.objective) == (4096, 16, "adam", "lm")
    assert {one: found.fields[one] for one in ("zero", "dp", "micro_batch_size", "num_microbatches")} == {
        "zero": 3, "dp": 8, "micro_batch_size": 2, "num_microbatches": 1,
    }  # fmt: skip
    assert (found.fields["recompute"], found.unread, found.questions) == (int(Recompute.FULL), (), ())


@pytest.mark.parametrize(("more", "fields", "precision"), [
    ("global_batch_size: 64\n", {"num_microbatches": 4}, "bf16"),
    ("cp_size: 2\nglobal_batch_size: 64\n", {"cp": 2, "dp": 4, "num_microbatches": 8, "cp_method": int(CpMethod.A2A)}, "bf16"),
    ("mp_replicate_size: 2\n", {"dp": 8, "dp_shard": 4}, "bf16"),
    ("enable_activation_checkpointing: false\n", {"recompute": int(Recompute.NONE)}, "bf16"),
    ("dist_config: {name: fsdp2, offload_params: true}\n", {"zero": 3, "offload_parameters": 1}, "bf16"),
    ("dist_config: {name: deepspeed, config_file: ds_z2_config.json}\n", {"zero": 2}, "bf16"),
    ("dist_config: {name: fsdp2, reshard_after_forward: false}\n", {"zero": 2}, "bf16"), ("bf16: false\n", {"zero": 3}, "fp32"),
    ("dist_config: null\n", {"zero": 0, "dp": 8}, "fp32"),
])  # fmt: skip
def test_how_llama_factory_in_sections_is_split(tmp_path: Path, more: str, fields: dict[str, int], precision: str) -> None:
    text = SECTIONS.replace("dist_config: {name: fsdp2, dcp_path: null}\n", "") if more.startswith("dist_config") else SECTIONS
    found = read(written(tmp_path, text + more), None, Given(num_gpus=8))
    assert ({one: found.fields[one] for one in fields}, found.precision) == (fields, precision)


ADAPTERS = "peft_config: {name: lora, r: 16, target_modules: all}\nquant_config: {name: bnb, quantization_bit: 4}\n"


def test_adapters_and_preferences_of_llama_factory_in_sections(tmp_path: Path) -> None:
    """Double quantisation is its default; which step it is stands on the command line alone."""
    file = written(tmp_path, SECTIONS.replace("sft.yaml", "dpo.yaml") + ADAPTERS)
    found = read(file, None, Given(num_gpus=8))
    assert (found.lora_rank, found.lora_targets, found.frozen_weights, asked_for(found)) == (16, "all", "nf4_dq", ["stage"])
    for word, objective in (("sft", "lm"), ("dpo", "dpo")):
        assert read(file, None, Given(num_gpus=8, settings={"stage": word})).objective == objective
        script = written(tmp_path, f"NPROC_PER_NODE=4 llamafactory-cli {word} job.yaml\n", "run.sh")
        started = read(script, None, Given(num_gpus=4))
        assert (started.objective, started.num_gpus, asked_for(started)) == (objective, 4, [])


@pytest.mark.parametrize(("more", "words"), [
    ("bf16: false\npeft_config: {name: lora}\n", "computes in fp32"),
    ("peft_config: {name: freeze}\n", "'freeze', which is not modelled"), ("cp_size: 2\ncp_mode: ring\n", "a plan knows ulysses"),
    ("quant_config: {name: bnb, quantization_bit: 4}\n", "are not trained"),
])  # fmt: skip
def test_what_llama_factory_in_sections_has_and_no_plan(tmp_path: Path, more: str, words: str) -> None:
    from planner.api import import_config

    with pytest.raises(PlannerError, match=words):
        import_config(written(tmp_path, SECTIONS + more), gpus=8)


MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --transformer-impl transformer_engine"
    " --use-distributed-optimizer"
)


def test_arguments_that_megatron_makes_of_its_configurations_are_known(tmp_path: Path) -> None:
    """Most are fields of TransformerConfig and its like, of which its parser is built.  [training/arguments.py, 2026-08]"""
    words = " --moe-token-drop-policy probs --muon-momentum 0.95 --no-rope-freq 4 --disable-jit-fuser --most-recent-k 2"
    found = read(written(tmp_path, f"{MEGATRON}{words}\n", "run.sh"), None, Given())
    assert (asked_for(found), found.unread) == ([], ("--disable-jit-fuser",))
    with pytest.raises(OpenQuestionsError, match="word_of_a_fork=false"):
        read(written(tmp_path, f"{MEGATRON} --word-of-a-fork 3\n", "run.sh"), None, Given())


def test_reinforcement_learning_of_megatron_is_no_pre_training(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="--perform-rl-step decides"):
        read(written(tmp_path, f"{MEGATRON} --perform-rl-step --grpo-group-size 8\n", "run.sh"), None, Given())


PREFERENCES = """
# tune run --nnodes 1 --nproc_per_node 2 lora_dpo_distributed --config job
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 8
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 1024
loss:
  _component_: torchtune.rlhf.loss.DPOLoss
optimizer:
  _component_: torch.optim.AdamW
# what ends like a program of TRL: lora_dpo.py
batch_size: 4
gradient_accumulation_steps: 8
dtype: bf16
"""


def test_preferences_of_torchtune_are_torchtunes(tmp_path: Path) -> None:
    found = read(written(tmp_path, PREFERENCES), None, Given(num_gpus=2))
    assert found.trainer == "torchtune+loss=full+optimizer_in_backward=off"
    assert (found.objective, found.lora_rank, found.global_batch_size) == ("dpo", 8, 64)


EXPERIMENT = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: MODEL.yaml
    overrides:
      global_batch_size: 256
      seq_length: 4096
      MORE
"""


def _experiment(folder: Path, model: str, more: str, said: Given | None = None) -> Reading:
    text = EXPERIMENT.replace("MODEL", model).replace("MORE", more)
    (folder / "examples").mkdir(exist_ok=True)
    return read(written(folder / "examples", text), None, said or Given(num_gpus=16))


def test_what_primus_says_in_the_files_of_its_trainers_and_models(tmp_path: Path) -> None:
    """Experts of a model's file lie on 8 ranks, a pre-trainer's micro batch is 2.  [trainer_base.yaml, deepseek_v3.yaml]"""
    found = _experiment(tmp_path, "deepseek_v2_lite", "pipeline_model_parallel_size: 2")
    assert [found.fields[one] for one in ("ep", "micro_batch_size", "pp")] == [8, 2, 2]
    said = _experiment(tmp_path, "deepseek_v2_lite", "expert_model_parallel_size: 4\n      micro_batch_size: 1")
    assert [said.fields[one] for one in ("ep", "micro_batch_size")] == [4, 1]


def test_adapters_of_primus(tmp_path: Path) -> None:
    more = "lora: {enabled: true, dim: 16, alpha: 32, target_modules: [linear_qkv, linear_proj]}"
    text = EXPERIMENT.replace("MODEL", "llama3_8B").replace("MORE", more).replace("pre_trainer.yaml", "sft_trainer.yaml")
    file = written(tmp_path, text.replace("      seq_length: 4096\n", ""))
    found = read(file, None, Given(num_gpus=8))
    assert (found.lora_rank, found.lora_targets, found.frozen_weights, found.sequence_length) == (16, "attention", "bf16", 2048)
    assert read(file, None, Given(num_gpus=8, settings={"lora": "false"})).lora_rank == 0
    with pytest.raises(PlannerError, match="these adapters of Primus are not read"):
        read(written(tmp_path, text.replace("alpha: 32", "kind: dora")), None, Given(num_gpus=8))


def test_models_of_primus_that_are_no_presets(tmp_path: Path) -> None:
    """Sizes stand in the model's file of the checkout around an experiment, and in the files that it extends."""
    folder = tmp_path / "primus/configs/models/megatron"
    folder.mkdir(parents=True)
    written(folder, "swiglu: true\nnormalization: RMSNorm\nadd_bias_linear: false\nposition_embedding_type: rope\n", "base.yaml")
    sizes = "num_layers: 10\nhidden_size: 1024\nnum_attention_heads: 8\nffn_hidden_size: 4096\nvocab_size: 32000\n"
    written(folder, f"extends: [base.yaml]\n{sizes}bias_gelu_fusion: false\n", "own_1B.yaml")
    found = _experiment(tmp_path, "own_1B", "micro_batch_size: 4")
    assert found.model is not None
    assert (found.model.num_layers, found.model.activation, found.unread) == (10, "silu", ())
    written(folder, "extends: [own_1B.yaml]\n", "base.yaml")
    with pytest.raises(PlannerError, match="at most 8 files"):
        _experiment(tmp_path, "own_1B", "micro_batch_size: 4")


MLPERF = "export DGXNNODES=4\nexport DGXNGPU=8\nexport MINIBS=8\nexport TP=4\nexport FP8=True\n"


@pytest.mark.parametrize(("says", "frozen"), [
    ("fp8_params: ${oc.decode:${oc.env:FP8,False}}", "fp8"), ("fp8_params: ${oc.decode:${oc.env:FP8_PARAMS,False}}", "bf16"),
])  # fmt: skip
def test_frozen_weights_of_mlperf_are_as_the_settings_beside_say(tmp_path: Path, says: str, frozen: str) -> None:
    folder = tmp_path / "llama2_70b_lora"
    (folder / "conf").mkdir(parents=True)
    file = written(folder, MLPERF, "config_DGXH100_4x8x1.sh")
    with pytest.raises(OpenQuestionsError, match="FP8_PARAMS"):
        read(file, None, Given())
    degrees = "tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}"
    written(folder / "conf", f"model:\n  {degrees}\n  {says}\n", "megatron_gpt_peft_tuning_config.yaml")
    found = read(file, None, Given())
    assert (found.lora_rank, found.frozen_weights, found.precision) == (16, frozen, "fp8")


def test_pre_training_of_mlperf_gathers_weights_in_fp8(tmp_path: Path) -> None:
    (tmp_path / "gpt3").mkdir()
    text = MLPERF.replace("DGXNNODES=4", "DGXNNODES=16") + "export FP8_PARAMS=True\nexport PP=2\n"
    found = read(written(tmp_path / "gpt3", text, "config_DGXH100_16x8x1.sh"), None, Given())
    assert "fp8_param_gather=on" in found.trainer and found.fields["zero"] == 1
