"""Training programs that many projects copy: what their options switch on and off, and what the classes of their models decide.
Short files of the same shape."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

HEAD = """
from dataclasses import dataclass, field
from typing import Optional
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from trl import DPOTrainer
from attention import replace_llama_attn_with_flash_attn
@dataclass
class Words:
    model_name_or_path: str = field(default="huggyllama/llama-7b")
    model_max_length: int = 512
    use_unsloth: bool = False
    flash_attn: bool = False
    whole: bool = False
    task: str = "sft"
    trained: str = "embed,norm"
def train():
    words, arguments = HfArgumentParser((Words, TrainingArguments)).parse_args_into_dataclasses()
"""
LOAD = "    model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path, trust_remote_code=True)\n"
TAIL = """    Trainer(model=model, args=arguments, train_dataset=data).train()
train()
"""
COMMAND = "torchrun --nproc_per_node 4 tune.py --per_device_train_batch_size 2 --bf16 True --gradient_checkpointing True "


def _run(folder: Path, body: str, options: str = "", pins: str = "transformers==4.40.0", command: str = COMMAND) -> Reading:
    written(folder, HEAD + body + TAIL, "tune.py")
    written(folder, f"{pins}\n", "requirements.txt")
    return read(written(folder, f"{command}{options}\n", "run.sh"), None, Given())


@pytest.mark.parametrize(("options", "trainer"), [("", "fsdp"), ("--use_unsloth True", "unsloth"), ("--task dpo", "trl")])
def test_a_trainer_is_the_one_that_options_leave(tmp_path: Path, options: str, trainer: str) -> None:
    body = """    if words.use_unsloth:
        from unsloth import FastLanguageModel
        model, _ = FastLanguageModel.from_pretrained(words.model_name_or_path, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path, torch_dtype=torch.bfloat16)
    if words.task == "dpo":
        DPOTrainer(model, None, args=arguments, train_dataset=data).train()
        return
"""
    assert _run(tmp_path, body, options).trainer.partition("+")[0] == trainer


@pytest.mark.parametrize(("switch", "trainer"), [("True", "unsloth"), ("False", "fsdp")])
def test_unsloth_in_a_module_of_the_program(tmp_path: Path, switch: str, trainer: str) -> None:
    made = """from unsloth import FastLanguageModel
from transformers import AutoModelForCausalLM
def made(words):
    if words.use_unsloth:
        model, _ = FastLanguageModel.from_pretrained(words.model_name_or_path)
    else:
        model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path, torch_dtype="bfloat16")
    return model
"""
    written(tmp_path, made, "making.py")
    body = "    from making import made\n    model = made(words)\n"
    assert _run(tmp_path, body, f"--use_unsloth {switch}").trainer.partition("+")[0] == trainer


@pytest.mark.parametrize(
    ("model", "precision"), [("Qwen/Qwen-7B", "bf16_true"), ("THUDM/chatglm3-6b", "bf16_true"), ("Qwen/Qwen1.5-7B", "bf16")]
)
def test_classes_that_set_their_dtype_themselves(tmp_path: Path, model: str, precision: str) -> None:
    assert _run(tmp_path, LOAD, f"--model_name_or_path {model}").precision == precision


@pytest.mark.parametrize(("options", "eager"), [("--flash_attn True", False), ("--flash_attn False", True), ("", True)])
def test_attention_that_a_program_puts_in_by_a_switch(tmp_path: Path, options: str, eager: bool) -> None:
    body = "    if words.flash_attn:\n        replace_llama_attn_with_flash_attn()\n" + LOAD
    assert ("attention_kernel=eager" in _run(tmp_path, body, options, "transformers==4.31.0").trainer) is eager


def test_a_load_without_flash_attention_is_eager_in_old_versions(tmp_path: Path) -> None:
    body = LOAD.replace("trust_remote_code=True", "use_flash_attention_2=words.flash_attn")
    assert "attention_kernel=eager" in _run(tmp_path, body, pins="transformers==4.35.0").trainer
    assert "attention_kernel=eager" not in _run(tmp_path, body, "--flash_attn True", "transformers==4.35.0").trainer


ADAPTERS = """    if not words.whole:
        if (last := newest(arguments.output_dir)) is not None:
            model = PeftModel.from_pretrained(model, last, is_trainable=True)
        else:
            model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
"""


def test_adapters_that_are_gone_on_with_or_new_are_adapters(tmp_path: Path) -> None:
    body = LOAD.replace("trust_remote_code=True", "torch_dtype=torch.bfloat16") + ADAPTERS
    assert _run(tmp_path, body).lora_rank == 16
    assert _run(tmp_path, body, "--whole True").lora_rank == 0


@pytest.mark.parametrize(("trained", "whole"), [("embed,norm", "embedding"), ("norm", "none"), ("embed,lm_head", "both")])
def test_tables_trained_beside_adapters_by_parts_of_their_names(tmp_path: Path, trained: str, whole: str) -> None:
    body = LOAD.replace("trust_remote_code=True", "torch_dtype=torch.bfloat16") + (
        '    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))\n'
        '    [p.requires_grad_() for n, p in model.named_parameters() if any(k in n for k in words.trained.split(","))]\n'
    )
    assert _run(tmp_path, body, f"--trained {trained}").lora_whole == whole


def test_adapters_that_deepspeed_halves_itself_are_not_half(tmp_path: Path) -> None:
    written(tmp_path, '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}', "z2.json")
    body = LOAD.replace("trust_remote_code=True", "torch_dtype=torch.bfloat16") + ADAPTERS.replace("r=16", "r=512")
    halved, alone = _run(tmp_path, body, "--deepspeed z2.json", "peft==0.6.0"), _run(tmp_path, body, "", "peft==0.6.0")
    assert "adapter_dtype" not in halved.trainer and "adapter_dtype=half" in alone.trainer


def test_other_adapters_of_a_fork_are_refused(tmp_path: Path) -> None:
    body = LOAD + "    model = get_peft_model(model, BottleneckConfig(bottleneck_size=256))\n"
    with pytest.raises(PlannerError, match="BottleneckConfig is not modelled"):
        _run(tmp_path, body)


@pytest.mark.parametrize(("words", "host"), [("full_shard auto_wrap offload", 1), ("full_shard auto_wrap", 0)])
def test_fsdp_of_the_arguments_goes_before_that_of_the_environment(tmp_path: Path, words: str, host: int) -> None:
    command = f"ACCELERATE_USE_FSDP=1 {COMMAND}"
    found = _run(tmp_path, LOAD, f'--fsdp "{words}"', command=command)
    assert (found.fields["zero"], found.fields.get("offload_parameters", 0)) == (3, host)
    assert not any("auto_wrap" in one for one in (*found.notes, *found.unread))


def test_a_file_with_sections_that_a_command_names(tmp_path: Path) -> None:
    text = "max_input_length: 128\nmax_output_length: 128\ntraining_args:\n  per_device_train_batch_size: 4\n  bf16: true\n"
    written(tmp_path, text + "peft_config:\n  peft_type: LORA\n  r: 8\n", "lora.yaml")
    written(tmp_path, HEAD + LOAD + TAIL, "tune.py")
    job = read(written(tmp_path, "python tune.py data huggyllama/llama-7b lora.yaml\n", "run.sh"), None, Given(num_gpus=1))
    assert (job.fields["micro_batch_size"], job.sequence_length, job.lora_rank) == (4, 256, 8)


LOOP = "torchrun --nproc_per_node 8 {} --model_name meta-llama/Llama-2-7b-hf --enable_fsdp --batch_size_training 4"
LOOP += " --context_length 2048"


def test_a_loop_with_a_switch_of_its_own_for_fsdp(tmp_path: Path) -> None:
    path = written(tmp_path, LOOP.format("finetuning.py") + " --pure_bf16\n", "run.sh")
    assert asked_for(read(path, None, Given())) == ["gradient_checkpointing"]
    job = read(path, None, Given(settings={"gradient_checkpointing": "true"}))
    fields = job.fields
    assert (fields["zero"], fields["dp"], fields["micro_batch_size"], job.sequence_length) == (3, 8, 4, 2048)
    assert (job.precision, fields["recompute"]) == ("bf16_true", Recompute.FULL)
    more = written(tmp_path, LOOP.format("finetuning.py") + " --sharding_strategy SHARD_GRAD_OP --fsdp_cpu_offload\n", "more.sh")
    halved = read(more, None, Given(settings={"gradient_checkpointing": "true", "torch_dtype": "bfloat16"})).fields
    assert (halved["zero"], halved["offload_parameters"]) == (2, 1)
    bits = written(tmp_path, LOOP.format("finetuning.py") + " --use_peft --quantization 4bit\n", "bits.sh")
    said = {"gradient_checkpointing": "true", "lora_r": "8", "lora_target_modules": "q_proj,v_proj"}
    assert read(bits, None, Given(settings=said)).frozen_weights == "nf4"


def test_a_loop_that_checkpoints_under_what_is_not_known_is_asked(tmp_path: Path) -> None:
    loop = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM
def main(**words):
    model = AutoModelForCausalLM.from_pretrained(words["model_name"], torch_dtype="auto")
    if settings().checkpoints:
        model.gradient_checkpointing_enable()
    model = FSDP(model)
fire.Fire(main)
"""
    written(tmp_path, loop, "loop.py")
    assert "gradient_checkpointing" in asked_for(read(written(tmp_path, LOOP.format("loop.py") + "\n", "run.sh"), None, Given()))


def test_arguments_of_transformers_that_trl_parses_are_those_of_old_trl(tmp_path: Path) -> None:
    program = """
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer, TrlParser
words, arguments = TrlParser((Words, TrainingArguments)).parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16")
SFTTrainer(model=model, args=arguments, train_dataset=d, max_seq_length=1024, tokenizer=t).train()
"""
    written(tmp_path, program, "run_sft.py")
    command = "torchrun --nproc_per_node 4 run_sft.py --per_device_train_batch_size 2 --bf16 True --max_seq_length 1024\n"
    job = read(written(tmp_path, command, "run.sh"), None, Given())
    assert "loss=full" in job.trainer
    assert job.fields["recompute"] == Recompute.NONE
