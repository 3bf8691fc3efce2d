"""Fine-tuning behind templates, accelerate with sections of DeepSpeed, and keywords of what loads a model."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

TEMPLATE = """model_name_or_path: ${MODEL}
adapter_name_or_path: ${ADAPTER}
stage: dpo
finetuning_type: lora
lora_rank: 8
dataset: a
template: qwen3
cutoff_len: 4096
per_device_train_batch_size: $BATCH
gradient_accumulation_steps: 8
bf16: true
"""
FILLED = """HERE="$(cd "$(dirname "$0")" && pwd)"
MODEL=Qwen/Qwen3-8B
BATCH=2
for one in "$@"; do SKIP=true; done
if ! command -v llamafactory-cli > /dev/null; then exit 1; fi
export MODEL BATCH
ADAPTER=$(ls -d out/checkpoint-* | tail -1)
envsubst {} < "$HERE/job.yaml" > /tmp/run.yaml
llamafactory-cli train /tmp/run.yaml
"""


def _batches(found: Reading) -> list[int]:
    return [found.fields[one] for one in ("micro_batch_size", "num_microbatches")]


@pytest.mark.parametrize("names", ["", "'${MODEL} ${BATCH} ${ADAPTER}'"])
def test_a_template_that_envsubst_fills_in(tmp_path: Path, names: str) -> None:
    written(tmp_path, TEMPLATE)
    found = read(written(tmp_path, FILLED.format(names), "train.sh"), None, Given(num_gpus=2))
    assert found.model is not None and found.model.name == "qwen3-8b"
    assert (_batches(found), found.sequence_length, found.objective) == ([2, 8], 4096, "dpo")
    assert not asked_for(found) and any("adapters go on from there" in one for one in found.notes)


def test_a_template_above_the_folder_of_the_script(tmp_path: Path) -> None:
    written(tmp_path, TEMPLATE, "examples/job.yaml.template")
    text = FILLED.format("").replace('"$HERE/job.yaml"', "examples/job.yaml.template \\\n ").replace("/tmp/run", "made/run")
    found = read(written(tmp_path, text, "scripts/train.sh"), None, Given(num_gpus=2))
    assert (_batches(found), found.objective) == ([2, 8], "dpo")


def test_a_template_is_filled_in_where_its_command_names_the_variable(tmp_path: Path) -> None:
    written(tmp_path, TEMPLATE)
    with pytest.raises(PlannerError, match=r"per_device_train_batch_size is '\$BATCH'"):
        read(written(tmp_path, FILLED.format("'$MODEL'"), "train.sh"), None, Given(num_gpus=2))


ACCELERATE = """distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2
deepspeed_config:
  zero_stage: 3
  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}
  optimizer: {type: adamw_torch_fused}
"""
PARSED = """import torch
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel


@dataclass
class Own:
    model_name_or_path: str
    max_seq_length: int = 2048
    kernel: str = "eager"
    peft_lora_r: int = 16

    def words(self, training):
        kwargs = {"torch_dtype": "auto"}
        kwargs["attn_implementation"] = self.kernel
        return kwargs


def main():
    training, own = HfArgumentParser((TrainingArguments, Own)).parse_args_into_dataclasses()
%s
    SFTTrainer(model=model, args=training, max_seq_length=own.max_seq_length, train_dataset=load()).train()


main()
"""
FULL = "    kwargs = own.words(training)\n    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, **kwargs)"
LEAN = """    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=own.model_name_or_path, max_seq_length=own.max_seq_length, dtype=torch.bfloat16
    )
    model = FastLanguageModel.get_peft_model(model, r=own.peft_lora_r, use_gradient_checkpointing=True)"""
COMMAND = (
    "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file acc.yaml train.py --model_name_or_path Qwen/Qwen3-8B --bf16 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 16 --gradient_checkpointing --max_seq_length 1536 {}\n"
)


def _started(folder: Path, model: str, more: str = "") -> Reading:
    written(folder, ACCELERATE, "acc.yaml")
    written(folder, PARSED % model, "train.py")
    return read(written(folder, COMMAND.format(more), "run.sh"))


def test_sections_of_deepspeed_in_a_configuration_of_accelerate_do_nothing(tmp_path: Path) -> None:
    found = _started(tmp_path, FULL)
    assert (found.fields["zero"], found.num_gpus, _batches(found)) == (3, 2, [4, 16])
    assert not {"offload_optimizer", "offload_weights"} & {name for name, value in found.fields.items() if value}
    said = "deepspeed_config.zero_optimization, deepspeed_config.optimizer of acc.yaml does nothing"
    assert any(one.startswith(said) for one in found.notes) and not any("one process sees" in one for one in found.notes)


def test_the_kernel_of_attention_that_a_method_puts_into_keywords(tmp_path: Path) -> None:
    assert "attention_kernel=eager" in _started(tmp_path, FULL).trainer
    assert "attention_kernel=fa2" in _started(tmp_path, FULL, "--kernel flash_attention_2").trainer


def test_a_program_of_unsloth_with_arguments_of_transformers(tmp_path: Path) -> None:
    found = _started(tmp_path, LEAN, "--peft_lora_r 8")
    assert (found.lora_rank, _batches(found), found.sequence_length) == (8, [4, 16], 1536)
    assert (found.frozen_weights, found.precision, found.fields["recompute"]) == ("nf4_dq", "bf16", Recompute.FULL)
    assert found.num_gpus == 2 and not any("peft_lora_r" in one for one in found.unread)


BRANCHES = """import argparse
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--merged", default=None)
    parser.add_argument("--adapter", default=None)
    args = parser.parse_args()
    if args.merged:
        model = AutoModelForCausalLM.from_pretrained(args.merged, torch_dtype=torch.bfloat16, attn_implementation="eager")
    elif args.adapter:
        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", torch_dtype=torch.bfloat16, attn_implementation="{}")
    else:
        raise ValueError("neither")
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    config = DPOConfig(max_length=2048, per_device_train_batch_size=1, gradient_accumulation_steps=16, bf16=True,
                       gradient_checkpointing=True)
    DPOTrainer(model=model, args=config, train_dataset=load()).train()


main()
"""


def test_a_model_that_every_branch_loads_alike(tmp_path: Path) -> None:
    alike = read(written(tmp_path, BRANCHES.format("eager"), "train.py"), None, Given(num_gpus=1, model="qwen3-8b"))
    assert "torch_dtype" not in asked_for(alike) and "attention_kernel=eager" in alike.trainer
    other = read(written(tmp_path, BRANCHES.format("sdpa"), "train.py"), None, Given(num_gpus=1, model="qwen3-8b"))
    assert "torch_dtype" in asked_for(other)


NOTEBOOK = """import os
{}
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("{}", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True)).train()
"""


@pytest.mark.parametrize(
    ("line", "model", "noted"),
    [
        ("os.environ['UNSLOTH_COMPILE_DISABLE'] = '1'", "Qwen/Qwen3.5-27B", True),
        ("os.environ['UNSLOTH_COMPILE_DISABLE'] = '1'", "unsloth/Qwen3-8B", False),
        ("os.environ['UNSLOTH_RETURN_LOGITS'] = '1'", "unsloth/Qwen3-8B", True),
        ("os.environ['UNSLOTH_COMPILE_DISABLE'] = '0'", "Qwen/Qwen3.5-27B", False),
        ("# os.environ['UNSLOTH_RETURN_LOGITS'] = '1'", "unsloth/Qwen3-8B", False),
    ],
)
def test_variables_of_unsloth_that_keep_all_scores_have_a_note(tmp_path: Path, line: str, model: str, noted: bool) -> None:
    found = read(written(tmp_path, NOTEBOOK.format(line, model), "train.py"))
    assert any("keeps the scores of all tokens" in one for one in found.notes) is noted


SWIFT = (
    "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-8B --train_type lora --max_length 2048 --{} own.py "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 8\n"
)


@pytest.mark.parametrize("name", ["external_plugins", "custom_register_path"])
@pytest.mark.parametrize(
    ("text", "noted"), [("register_dataset(DatasetMeta())\n", False), ("register_model(ModelMeta('own'))\n", True), (None, True)]
)
def test_code_that_swift_loads_has_a_note_unless_it_registers_data_alone(
    tmp_path: Path, name: str, text: str | None, noted: bool
) -> None:
    if text is not None:
        written(tmp_path, text, "own.py")
    found = read(written(tmp_path, SWIFT.format(name), "sft.sh"))
    assert any(one.startswith(f"{name} 'own.py'") for one in found.notes) is noted


def test_linear_attention_among_names_of_all_layers_is_known(tmp_path: Path) -> None:
    named = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z in_proj_a out_proj"
    text = "".join(f"  - {one}\n" for one in named.split())
    job = "base_model: Qwen/Qwen3.5-27B\nadapter: lora\nlora_r: 8\nsequence_len: 2048\nmicro_batch_size: 1\nbf16: true\n"
    job += "gradient_accumulation_steps: 4\ndatasets: [{path: a, type: alpaca}]\nlora_target_modules:\n"
    found = read(written(tmp_path, job + text))
    assert found.lora_targets == "all" and not any("no linear layer known here" in one for one in found.notes)


BATCH = "#!/bin/bash\n#SBATCH --gres=gpu:a100:4\n{}{}\n"
CLI = "llamafactory-cli train job.yaml\nllamafactory-cli export --model_name_or_path Qwen/Qwen3-8B --export_dir out"


def test_a_launcher_of_its_own_takes_the_gpus_that_a_batch_system_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, TEMPLATE.replace("$BATCH", "2").replace("${MODEL}", "Qwen/Qwen3-8B").replace("${ADAPTER}", "out"))
    found = read(written(tmp_path, BATCH.format("", CLI), "train.sh"))
    assert found.num_gpus == 4 and not any("commands that train" in one for one in found.notes)
    assert read(written(tmp_path, BATCH.format("#SBATCH --nodes=2\n", CLI), "train.sh")).num_gpus is None
    job = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\nbf16: true\n"
    written(tmp_path, job + "datasets: [{path: a, type: alpaca}]\n", "job.yaml")
    assert read(written(tmp_path, BATCH.format("", "axolotl train job.yaml"), "train.sh")).num_gpus == 4
    assert read(written(tmp_path, BATCH.format("", "python -m axolotl.cli.train job.yaml"), "train.sh")).num_gpus is None


def test_long_commands_are_told_apart_by_where_they_differ(tmp_path: Path) -> None:
    start = "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen3-8B --finetuning_type lora --template qwen3"
    ends = [f"{start} --cutoff_len 2048 --per_device_train_batch_size 1 --lora_rank {one} --bf16 true" for one in (8, 64)]
    found = read(written(tmp_path, "\n".join(ends), "train.sh"), None, Given(num_gpus=1))
    about = next(one.about for one in found.questions if one.name == "which_training")
    assert about.endswith("1 '--lora_rank 8 --bf16 true', 2 '--lora_rank 64 --bf16 true'")


@pytest.mark.parametrize(
    ("model", "slow"), [("unsloth/gemma-3-12b-it", True), ("unsloth/Qwen3-8B", False), ("unsloth/gpt-oss-20b", False)]
)
def test_unsloth_takes_the_slow_kernel_with_models_that_it_only_rewrites(tmp_path: Path, model: str, slow: bool) -> None:
    text = NOTEBOOK.format("", model).replace("load_in_4bit=True", "load_in_4bit=True, attn_implementation='eager'")
    assert ("attention_kernel=eager" in read(written(tmp_path, text, "train.py")).trainer) is slow
