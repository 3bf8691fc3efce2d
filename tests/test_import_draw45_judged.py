"""What the judging of draw 45 showed: optimizers, processes, adapters and losses said in passing. Short files of the same shape."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

MUON = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
dataset: notes
template: llama3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
use_muon: true
bf16: true
"""
PROGRAM = """
from dataclasses import dataclass, field
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
@dataclass
class Words:
    model_name_or_path: str = field(default="meta-llama/Llama-3.1-8B")
    trained: str = field(default="embed,norm")
def main():
    words, arguments = HfArgumentParser((Words, {arguments})).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path, torch_dtype=torch.bfloat16, device_map="auto")
{body}
    {trainer}(model=model, args=arguments).train()
main()
"""
UNFREEZES = '    [p.requires_grad_() for n, p in model.named_parameters() if any(k in n for k in words.trained.split(","))]'
ADAPTERS = '    model = get_peft_model(model, LoraConfig(r=512, target_modules=["q_proj", "v_proj"]))'
COMMAND = "python tune.py --per_device_train_batch_size 1 --max_length 2048 --bf16 True --gradient_checkpointing True\n"


def _run(folder: Path, body: str, pins: str = "", *, trainer: str = "Trainer", before: str = "") -> Reading:
    arguments = "TrainingArguments" if trainer == "Trainer" else "SFTConfig"
    written(folder, PROGRAM.format(arguments=arguments, body=body, trainer=trainer), "tune.py")
    written(folder, f"transformers==4.40.0\n{pins}\n", "requirements.txt")
    return read(written(folder, before + COMMAND, "run.sh"), None, Given(num_gpus=2, sequence_length=2048))


def test_muon_of_llama_factory_is_priced_as_adam_with_a_note(tmp_path: Path) -> None:
    found = read(written(tmp_path, MUON), None, Given(num_gpus=1))
    assert found.optimizer == "adam" and any(one.startswith("muon keeps one state of a matrix") for one in found.notes)


@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize(("before", "told"), [("CUDA_VISIBLE_DEVICES=0,1 ", True), ("CUDA_VISIBLE_DEVICES=0 ", False)])
def test_one_process_that_sees_several_gpus_is_told_of(tmp_path: Path, trainer: str, before: str, told: bool) -> None:
    found = _run(tmp_path, ADAPTERS, "trl==0.11.0", trainer=trainer, before=before)
    assert any(one.startswith("one process sees 2 GPUs") for one in found.notes) == told


@pytest.mark.parametrize(("body", "whole"), [
    (f"{UNFREEZES}\n{ADAPTERS}", "none"), (f"{ADAPTERS}\n{UNFREEZES}", "embedding"),
])  # fmt: skip
def test_peft_freezes_what_was_unfrozen_before_it_makes_adapters(tmp_path: Path, body: str, whole: str) -> None:
    assert _run(tmp_path, body).lora_whole == whole


@pytest.mark.parametrize(("version", "half"), [("0.5.0", False), ("0.6.0", True), ("0.11.1", True), ("0.12.0", False)])
def test_peft_gives_adapters_the_dtype_of_their_base_in_some_releases(tmp_path: Path, version: str, half: bool) -> None:
    assert ("adapter_dtype=half" in _run(tmp_path, ADAPTERS, f"peft=={version}").trainer) == half


def test_flash_attention_of_a_third_kind(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16 --deepspeed "
        "--zero-stage 1 --use-flash-attn-v3\n"
    )
    assert "unfused" not in read(written(tmp_path, text, "run.sh"), None, Given()).trainer


PHI = """
base_model: microsoft/Phi-4-mini-instruct
datasets: [{path: notes, type: alpaca}]
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [%s]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def test_names_of_layers_apart_on_a_model_whose_layers_are_joined(tmp_path: Path) -> None:
    """PEFT adapts those of a list that are there: phi3 has qkv_proj, o_proj, gate_up_proj and down_proj."""
    notes = " ".join(read(written(tmp_path, PHI % "q_proj, k_proj, v_proj, o_proj"), None, Given(num_gpus=1)).notes)
    assert "adapters on q_proj, k_proj, v_proj: phi-4-mini has no such layers" in notes and "adapters on o alone" in notes
    assert "one adapter; priced as one for each" not in notes
    with pytest.raises(PlannerError, match="q_proj, v_proj are none of the layers of phi-4-mini"):
        read(written(tmp_path, PHI % "q_proj, v_proj"), None, Given(num_gpus=1))
    assert "has no such layers" not in " ".join(read(written(tmp_path, PHI % "qkv_proj, o_proj"), None, Given(num_gpus=1)).notes)
    llama = PHI.replace("microsoft/Phi-4-mini-instruct", "meta-llama/Llama-3.1-8B") % "q_proj, v_proj"
    assert "has no such layers" not in " ".join(read(written(tmp_path, llama), None, Given(num_gpus=1)).notes)


@pytest.mark.parametrize(("layers", "told"), [
    (1, ""), (4, "by up to 0.8 GiB"), (4, "too high by up to 0.4 GiB"), (64, "of all 32 at once"),
])  # fmt: skip
def test_uniform_recompute_of_several_layers_at_once_is_told_with_bytes(tmp_path: Path, layers: int, told: str) -> None:
    """34 bytes for each of 4,096 x 2 tokens and 4,096 channels over 4 ranks, of three layers more than one; and 2 bytes of each for
    24 of 32 inputs that are not kept."""
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 64 --vocab-size 32000 --bf16 --use-flash-attn "
        "--tensor-model-parallel-size 4 --sequence-parallel --recompute-granularity full --recompute-method uniform "
        f"--recompute-num-layers {layers}\n"
    )
    notes = [one for one in read(written(tmp_path, text, "run.sh"), None, Given()).notes if "in units of" in one]
    assert len(notes) == bool(told) and all(told in one for one in notes)


@pytest.mark.parametrize(("pins", "word", "foreach"), [
    ("", "", False), ("torch==2.6.0", "", True), ("torch==2.9.0", "", False), ("transformers==4.46.0", "", True),
    ("torch==2.9.0", " --optim adamw_torch", True), ("torch==2.6.0", " --optim adamw_torch_fused", False),
])  # fmt: skip
def test_the_kernels_of_adam_by_name_and_release(tmp_path: Path, pins: str, word: str, foreach: bool) -> None:
    written(tmp_path, PROGRAM.format(arguments="TrainingArguments", body="", trainer="Trainer"), "tune.py")
    written(tmp_path, f"{pins}\n", "requirements.txt")
    command = f"{COMMAND.strip()} --model_name_or_path meta-llama/Llama-3.1-8B{word}"
    found = read(written(tmp_path, command, "run.sh"), None, Given(num_gpus=1, sequence_length=1024))
    assert ("optimizer_kernel=foreach" in found.trainer) is foreach


@pytest.mark.parametrize(("pins", "checkpointing", "told"), [
    ("", "False", "up to 12.0 GiB more"), ("flash-linear-attention", "False", ""), ("", "True", ""),
])  # fmt: skip
def test_linear_attention_without_its_kernels_is_told_of(tmp_path: Path, pins: str, checkpointing: str, told: str) -> None:
    """85 bytes of 1,024 tokens, 36 of 48 layers and 4,096 channels of the values."""
    written(tmp_path, PROGRAM.format(arguments="TrainingArguments", body="", trainer="Trainer"), "tune.py")
    written(tmp_path, f"{pins}\n", "requirements.txt")
    command = COMMAND.strip().replace("checkpointing True", f"checkpointing {checkpointing}")
    command += " --model_name_or_path Qwen/Qwen3-Next-80B-A3B-Instruct"
    found = read(written(tmp_path, command, "run.sh"), None, Given(num_gpus=8, sequence_length=1024))
    notes = [one for one in found.notes if "linear attention" in one]
    assert len(notes) == bool(told) and all(told in one for one in notes), found.notes


@pytest.mark.parametrize(("name", "deepspeed", "priced"), [
    ("EleutherAI/gpt-j-6b", "", "plain"), ("EleutherAI/gpt-j-6b", "zero2.json", "plain_half"), ("meta-llama/Llama-3.1-8B", "", ""),
])  # fmt: skip
def test_an_activation_of_plain_operations_is_priced(tmp_path: Path, name: str, deepspeed: str, priced: str) -> None:
    """gelu_new; DeepSpeed has no autocast, which brings its power to fp32."""
    written(tmp_path, PROGRAM.format(arguments="TrainingArguments", body="", trainer="Trainer"), "tune.py")
    written(tmp_path, '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "zero2.json")
    command = COMMAND.strip() + f" --model_name_or_path {name}" + f" --deepspeed {deepspeed}" * bool(deepspeed)
    found = read(written(tmp_path, command, "run.sh"), None, Given(num_gpus=2, sequence_length=2048))
    assert ("activation_kernel" in found.trainer) is bool(priced) and f"activation_kernel={priced}" * bool(priced) in found.trainer
