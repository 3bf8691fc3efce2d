"""Programs in variables, recipes that do not fit their builders, kernels and copies of weights that a trainer does not have."""

from pathlib import Path

import pytest
from import_files import NEMO_RL, asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

BATCH = "--per_device_train_batch_size 8 --gradient_accumulation_steps 2"
WORDS = f"sft --model Qwen/Qwen3-4B --train_type full --max_length 2048 {BATCH}"
SWIFT = f'NPROC_PER_NODE=4 "$S" {WORDS} --torch_dtype bfloat16 --deepspeed zero3'


@pytest.mark.parametrize("before", [
    'S="$(command -v swift || true)"', 'S="$(command -v swift 2>/dev/null || true)"', "S=$(type -P swift)",
    "S=$(which swift 2>/dev/null || echo /opt/swift)", "S=$(command -v swift || command -v /x/swift4 || :)",
    'S=/a/env/bin/swift; if [[ ! -x $S ]]; then S="$(command -v swift)"; fi', '[ -x /a/swift ] && S=/a/swift || S=$(which swift)',
    'S=""; for one in /a/bin/swift; do if [ -x $one ]; then S=$one; fi; done', "S=$(./where.py --program)",
])  # fmt: skip
def test_a_program_in_a_variable(tmp_path: Path, before: str) -> None:
    found = read(written(tmp_path, f"#!/bin/bash\n{before}\n{SWIFT}\n", "run.sh"))
    assert (found.trainer, found.num_gpus, found.global_batch_size, found.model_name) == ("deepspeed", 4, 64, "Qwen/Qwen3-4B")
    assert found.fields["recompute"] == 2 and asked_for(found) == []  # its default, where transformers has none


def test_other_programs_in_variables(tmp_path: Path) -> None:
    words = "--dataset x --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 --cutoff_len 2048"
    line = f"CUDA_VISIBLE_DEVICES=0,1 $L train --stage sft --finetuning_type lora --model_name_or_path Qwen/Qwen2.5-7B {words}"
    found = read(written(tmp_path, f"L=$(command -v llamafactory-cli || true)\n{line}\n", "one.sh"))
    assert (found.trainer.split("+")[0], found.lora_rank, asked_for(found)) == ("llama-factory", 8, [])
    degrees = "--tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 16 --max_length 4096"
    text = f"NPROC_PER_NODE=8 $M sft --model Qwen/Qwen3-8B {degrees}\n"
    assert read(written(tmp_path, f"M=$(type -p megatron)\n{text}", "two.sh")).fields["tp"] == 2
    assert read(written(tmp_path, f"M=$(./find_it)\n{text}", "three.sh")).trainer.startswith("ms-swift-megatron")


def test_branches_that_do_not_agree_are_not_known(tmp_path: Path) -> None:
    words = WORDS.replace("Qwen/Qwen3-4B", "$P")
    text = f"P=/models/7B/hf\nif [ -e /x ]; then P=/models/70B/hf; fi\nNPROC_PER_NODE=4 swift {words}\n"
    found = read(written(tmp_path, text, "run.sh"), None, Given())
    assert found.model is None and "hf" not in found.model_name


@pytest.mark.parametrize("value", ["embedding", "seq_cls", "SEQ_CLS", "generative_reranker"])
def test_steps_without_a_loss_over_the_vocabulary(tmp_path: Path, value: str) -> None:
    text = "torchrun --nproc_per_node 4 train.py --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 8 --bf16 true"
    with pytest.raises(PlannerError, match=f"task_type is '{value}': a step without a loss over the vocabulary is not modelled"):
        read(written(tmp_path, f"{text} --max_seq_length 2048 --task_type {value}\n", "run.sh"))
    kept = read(written(tmp_path, f"{text} --max_seq_length 2048 --task_type CAUSAL_LM\n", "run.sh"))
    assert kept.global_batch_size == 32


TUNE = """# tune run RECIPE --config FILE
model: {_component_: torchtune.models.BUILDER}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
enable_activation_checkpointing: true
"""
WHOLE, LORA = "llama3_1.llama3_1_8b", "llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 16"


def _tune(folder: Path, builder: str, recipe: str = "--nproc_per_node 8 mine", **said: str) -> Reading:
    text = TUNE.replace("BUILDER", builder).replace("RECIPE", recipe)
    return read(written(folder, text), None, Given(num_gpus=8, settings=said))


@pytest.mark.parametrize(("builder", "window"), [
    ("phi3.phi3_mini", 0), ("mistral.mistral_7b", 0), ("gemma2.gemma2_9b", 4096), ("mistral.qlora_mistral_7b, lora_rank: 8", 0),
])  # fmt: skip
def test_windows_of_its_builders(tmp_path: Path, builder: str, window: int) -> None:
    model = _tune(tmp_path, builder).model
    assert model is not None and model.window == window and (model.num_windowed_layers > 0) is (window > 0)


@pytest.mark.parametrize(("recipe", "builder", "asked"), [
    ("lora_finetune_distributed", WHOLE, True), ("--nnodes 1 --nproc_per_node 2 lora_dpo_distributed", WHOLE, True),
    ("full_finetune_distributed", LORA, True), ("lora_finetune_distributed", LORA, False),
    ("full_finetune_single_device", WHOLE, False),
    ("knowledge_distillation_distributed", LORA, False), ("lora_finetune_distributed, or full_finetune_distributed", WHOLE, False),
])  # fmt: skip
def test_a_recipe_that_its_builder_does_not_fit(tmp_path: Path, recipe: str, builder: str, asked: bool) -> None:
    found = _tune(tmp_path, builder, recipe)
    assert asked_for(found) == (["model._component_"] if asked else [])
    if asked:
        named = f"torchtune.models.{builder.split(',')[0]}"
        assert "lora_" in " ".join(found.questions[0].choices) and named in found.questions[0].choices
        assert asked_for(_tune(tmp_path, builder, recipe, **{"model._component_": named})) == []
    written(tmp_path, TUNE.replace("BUILDER", builder), "own.yaml")
    text = f"tune run --nproc_per_node 8 {recipe.split(' ')[-1]} --config own.yaml\n"
    if asked:
        with pytest.raises(PlannerError, match="is its recipe, and model._component_ a builder with(out)? adapters: torchtune"):
            read(written(tmp_path, text, "run.sh"))


def test_builders_that_it_does_not_have(tmp_path: Path) -> None:
    notes = _tune(tmp_path, "mixtral.mixtral_8x7b").notes
    assert any("torchtune has no builders torchtune.models.mixtral" in one for one in notes)
    assert not any("has no builders" in one for one in _tune(tmp_path, WHOLE).notes)


def test_options_of_adapters_and_dpo(tmp_path: Path) -> None:
    assert _tune(tmp_path, LORA).trainer == "torchtune+optimizer_in_backward=off"
    text = TUNE.replace("BUILDER", LORA).replace("modules.loss.LinearCrossEntropyLoss", "rlhf.loss.DPOLoss")
    found = read(written(tmp_path, text), None, Given(num_gpus=8))
    assert found.objective == "dpo" and set(found.trainer.split("+")[1:]) == {"loss=full", "optimizer_in_backward=off"}


CORE = NEMO_RL + """  dtensor_cfg: {enabled: NATIVE}
  megatron_cfg:
    enabled: true
    peft: {enabled: ADAPTERS, dim: 8}
    optimizer: {optimizer: adam, bf16: HALF, use_distributed_optimizer: DIST}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def _core(folder: Path, half: bool, dist: bool, native: bool = False, adapters: bool = False) -> str:
    words = {"NATIVE": native, "HALF": half, "DIST": dist, "ADAPTERS": adapters}
    text = CORE
    for name, value in words.items():
        text = text.replace(name, str(value).lower())
    found = read(written(folder, text, "sft.yaml"), None, Given())
    assert asked_for(found) == []
    return "\n".join(found.notes)


def test_copies_of_weights_in_nemo_rl(tmp_path: Path) -> None:
    says = "policy.megatron_cfg.optimizer.bf16 is false without use_distributed_optimizer"
    assert says in _core(tmp_path, half=False, dist=False)
    for half, dist, adapters in ((True, False, False), (False, True, False), (False, False, True)):
        assert says not in _core(tmp_path, half, dist, adapters=adapters)


def test_both_engines_of_nemo_rl(tmp_path: Path) -> None:
    assert "dtensor_cfg and megatron_cfg are both enabled" in _core(tmp_path, half=True, dist=True, native=True)
    assert "both enabled" not in _core(tmp_path, half=True, dist=True)


@pytest.mark.parametrize(("word", "kernel"), [("", "fa2"), ("sdpa", "best"), ("eager", "eager"), ("flash_attention_3", "best")])
def test_kernels_of_verl(tmp_path: Path, word: str, kernel: str) -> None:
    words = "data.train_batch_size=64 data.micro_batch_size_per_gpu=2 data.max_length=2048 model.partial_pretrain=Qwen/Qwen2.5-1.5B"
    words += f" +model.override_config.attn_implementation={word}" if word else ""
    found = read(written(tmp_path, f"torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer {words}\n", "run.sh"))
    assert f"attention_kernel={kernel}" in found.trainer.split("+")
