"""What a sweep of every option of transformers, accelerate and DeepSpeed showed: each was dropped or misread before."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

TRAIN = """
import os, torch, bitsandbytes as bnb
from dataclasses import dataclass
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
class Own(Trainer):
    def create_optimizer(self):
        self.optimizer = bnb.optim.AdamW8bit(self.model.parameters())
        return self.optimizer
args, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
#BEFORE
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
Trainer(model=model, args=training_args, train_dataset=d).train()
"""
OPTIONS = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --gradient_accumulation_steps 16 "
OPTIONS += "--model_max_length 2048"
HALF = f"{OPTIONS} --bf16 True"
ACCELERATE: dict[str, dict[str, Any]] = {
    "FSDP": {"fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_sharding_strategy": "FULL_SHARD"}},
    "DEEPSPEED": {"deepspeed_config": {"zero_stage": 3}},
    "MEGATRON_LM": {"megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_num_micro_batches": 4}},
}


def launched(tmp_path: Path, kind: str, options: str = "", program: str = HALF, **more: Any) -> Reading:
    """A job of accelerate over a file of that distributed_type."""
    text = {"distributed_type": kind, "mixed_precision": "no", "num_processes": 8, **ACCELERATE.get(kind, {}), **more}
    written(tmp_path, yaml.safe_dump(text), "acc.yaml")
    written(tmp_path, TRAIN, "train.py")
    command = f"accelerate launch --config_file acc.yaml {options} train.py {program}\n"
    return read(written(tmp_path, command, "run.sh"), None, Given())


@pytest.mark.parametrize(
    ("kind", "options", "fields"),
    [("FSDP", "--fsdp_sharding_strategy SHARD_GRAD_OP", {"zero": 2}),
     ("FSDP", "--fsdp_offload_params true", {"offload_parameters": 1}),
     ("FSDP", "--fsdp_activation_checkpointing true", {"recompute": 2}), ("DEEPSPEED", "--zero_stage 2", {"zero": 2}),
     ("DEEPSPEED", "--offload_optimizer_device cpu", {"offload_optimizer": 100}), ("DEEPSPEED", "--multi_gpu", {"zero": 0}),
     ("MEGATRON_LM", "--megatron_lm_tp_degree 4", {"tp": 4, "dp": 2}), ("FSDP", "--use_deepspeed --zero_stage 1", {"zero": 1}),
     ("MULTI_GPU", "--use_fsdp --fsdp_version 2", {"zero": 3}), ("FSDP", "--parallelism_config_cp_size 2", {"cp": 2, "dp": 4})],
)  # fmt: skip
def test_options_of_accelerate_go_before_its_file(tmp_path: Path, kind: str, options: str, fields: dict[str, int]) -> None:
    """Beside a file all but the number of processes were dropped."""
    assert fields.items() <= launched(tmp_path, kind, options).fields.items()


@pytest.mark.parametrize(
    ("options", "program", "precision"),
    [("--mixed_precision fp16", OPTIONS, "fp16"), ("--mixed_precision bf16", f"{OPTIONS} --bf16 False", "bf16"),
     ("--mixed_precision fp8", OPTIONS, "fp8"), ("--mixed_precision fp16", HALF, "bf16")],
)  # fmt: skip
def test_the_precision_of_the_launcher_counts_where_the_arguments_are_false(
    tmp_path: Path, options: str, program: str, precision: str
) -> None:
    assert launched(tmp_path, "FSDP", options, program).precision == precision
    alone = written(tmp_path, f"accelerate launch --num_processes 8 {options} train.py {program}\n", "alone.sh")
    assert read(alone, None, Given()).precision == precision


def test_what_accelerate_compiles_and_what_it_does_not_train(tmp_path: Path) -> None:
    assert "compile=on" in launched(tmp_path, "FSDP", "--dynamo_backend inductor").trainer
    assert "compile=on" in launched(tmp_path, "FSDP", dynamo_config={"dynamo_backend": "INDUCTOR"}).trainer
    for kind, options, more in (("FSDP", "--cpu", {}), ("NO", "", {"use_cpu": True})):
        with pytest.raises(PlannerError, match="it trains on CPUs"):
            launched(tmp_path, kind, options, **more)
    for kind in ("FSDP", "MULTI_GPU"):  # whose launchers set no ACCELERATE_USE_CPU  [accelerate, utils/launch.py]
        assert any("use_cpu of acc.yaml does nothing" in one for one in launched(tmp_path, kind, use_cpu=True).notes)
    unwrapped = {"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
    assert any("auto_wrap_policy" in one for one in launched(tmp_path, "FSDP", **unwrapped).notes)
    idle = launched(tmp_path, "FSDP", deepspeed_config={"offload_optimizer_device": "cpu"})
    assert any("deepspeed_config of acc.yaml does nothing" in one for one in idle.notes)


def test_numbers_of_accelerate_that_are_not_numbers_of_processes(tmp_path: Path) -> None:
    """-1 was refused, which stands for --num_processes; GPUs by their ids are as many."""
    assert launched(tmp_path, "FSDP", "--num_processes 4", num_processes=-1).num_gpus == 4
    assert launched(tmp_path, "FSDP", num_processes=-1).num_gpus is None
    assert launched(tmp_path, "MULTI_GPU", num_processes=None, gpu_ids="0,1,2").num_gpus == 3


def test_micro_batches_of_megatron_go_before_the_arguments(tmp_path: Path) -> None:
    assert launched(tmp_path, "MEGATRON_LM").fields["num_microbatches"] == 4


def test_variables_of_accelerate(tmp_path: Path) -> None:
    written(tmp_path, TRAIN, "train.py")
    export = "export ACCELERATE_USE_FSDP=true FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP ACCELERATE_MIXED_PRECISION=bf16\n"
    found = read(written(tmp_path, f"{export}torchrun --nproc_per_node 4 train.py {OPTIONS}\n", "run.sh"), None, Given())
    assert (found.fields["zero"], found.precision) == (2, "bf16")


ENGINE = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}


def engine(tmp_path: Path, **more: Any) -> Reading:
    """A job under a configuration of DeepSpeed."""
    written(tmp_path, json.dumps({**ENGINE, **more}), "ds.json")
    written(tmp_path, TRAIN, "train.py")
    return read(written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} --deepspeed ds.json\n", "run.sh"), None, Given())


def test_the_optimizer_of_deepspeed_goes_before_that_of_the_arguments(tmp_path: Path) -> None:
    assert engine(tmp_path, optimizer={"type": "Lion"}).optimizer == "lion"
    said = Given(settings={"optim": "adamw_torch"})
    engine(tmp_path, optimizer={"type": "OneBitAdam"})
    assert read(tmp_path / "run.sh", None, said).optimizer == "adam"
    asked = Given()
    read(tmp_path / "run.sh", None, asked)
    assert "optim" in [one.name for one in asked.questions]


@pytest.mark.parametrize(
    "more",
    [{"mics_shard_size": 4}, {"torch_autocast": {"enabled": True}},
     {"elasticity": {"enabled": True}}, {"curriculum_learning": {"enabled": True}}],
)  # fmt: skip
def test_keys_of_deepspeed_that_change_memory_or_batch_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    name = next(iter(more))
    with pytest.raises(PlannerError, match=name):
        engine(tmp_path, **more)
    word = name if name == "mics_shard_size" else f"{name}.{next(iter(more[name]))}"
    assert read(tmp_path / "run.sh", None, Given(settings={word: "false"})).fields["zero"] == 3  # as the sentence says
    assert engine(tmp_path, mics_shard_size=-1, elasticity={"enabled": False}).fields["zero"] == 3


def test_numbers_that_deepspeed_and_the_arguments_say_differently(tmp_path: Path) -> None:
    assert any("train_micro_batch_size_per_gpu 4" in one for one in engine(tmp_path, train_micro_batch_size_per_gpu=4).notes)
    older = engine(tmp_path, zero_optimization={"stage": 2, "cpu_offload": True})
    assert older.fields["offload_optimizer"] == 100


@pytest.mark.parametrize(
    ("words", "found"),
    [("--adafactor True", ("adafactor", "")), ("--torch_compile_mode max-autotune", ("adam", "compile=on")),
     ("--torchdynamo inductor", ("adam", "compile=on"))],
)  # fmt: skip
def test_arguments_that_stand_for_others(tmp_path: Path, words: str, found: tuple[str, str]) -> None:
    written(tmp_path, TRAIN, "train.py")
    file = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} {words}\n", "run.sh")
    reading = read(file, None, Given())
    assert reading.optimizer == found[0] and found[1] in reading.trainer


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [("--activation_checkpointing True", "recompute", 2),
     ("--gradient_checkpointing True --no_gradient_checkpointing", "recompute", 0),
     ("--per_gpu_train_batch_size 3", "micro_batch_size", 3), ("--fsdp_config '{\"version\": 2}'", "zero", 0)],
)  # fmt: skip
def test_older_and_newer_names(tmp_path: Path, words: str, field: str, value: int) -> None:
    """Settings of FSDP do nothing without fsdp."""
    written(tmp_path, TRAIN, "train.py")
    file = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} {words}\n", "run.sh")
    assert read(file, None, Given()).fields[field] == value


@pytest.mark.parametrize("word", ["--sharded_ddp zero_dp_2", "--mp_parameters x", "--tpu_num_cores 8", "--use_mps_device True"])
def test_words_of_other_machines_are_refused(tmp_path: Path, word: str) -> None:
    written(tmp_path, TRAIN, "train.py")
    with pytest.raises(PlannerError, match=word.split()[0].strip("-")):
        read(written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} {word}\n", "run.sh"), None, Given())


def test_processes_share_out_a_batch_that_is_split(tmp_path: Path) -> None:
    written(tmp_path, TRAIN, "train.py")
    words = "--accelerator_config '{\"split_batches\": true}'"
    file = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} {words}\n", "run.sh")
    said = read(file, None, Given(settings={"per_device_train_batch_size": "16", "torch_dtype": "float32"}))
    assert asked_for(said) == [] and said.fields["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("before", "fields"),
    [("training_args.gradient_accumulation_steps = 8", {"num_microbatches": 8}),
     ("training_args.gradient_checkpointing = True", {"recompute": 2}),
     ("if args.size > 512:\n    training_args.gradient_accumulation_steps = 8", None),
     ('w = int(os.environ.get("WORLD_SIZE", 1))\ntraining_args.gradient_accumulation_steps //= w', None),
     ('w = int(os.environ.get("WORLD_SIZE", 1))\nn = training_args.gradient_accumulation_steps // w\n'
      "training_args.gradient_accumulation_steps = n", {"num_microbatches": 2})],
)  # fmt: skip
def test_arguments_that_a_program_sets_itself(tmp_path: Path, before: str, fields: dict[str, int] | None) -> None:
    """Those of its command were taken; what is not known is asked for."""
    written(tmp_path, TRAIN.replace("#BEFORE", before), "train.py")
    file, said = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF}\n", "run.sh"), Given()
    found = read(file, None, said)
    if fields is None:
        assert {"gradient_accumulation_steps", "size"} & {*asked_for(found), *(one.name for one in said.questions)}
    else:
        assert fields.items() <= found.fields.items()


def test_what_a_program_makes_beside_its_arguments(tmp_path: Path) -> None:
    file = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF}\n", "run.sh")
    made = "optimizers=(bnb.optim.AdamW8bit(model.parameters()), None), train_dataset=d"
    written(tmp_path, TRAIN.replace("train_dataset=d", made), "train.py")
    assert read(file, None, Given()).optimizer == "adam_8bit"
    written(tmp_path, TRAIN.replace("\nTrainer(", "\nOwn("), "train.py")
    assert read(file, None, Given()).optimizer == "adam_8bit"
    written(tmp_path, TRAIN.replace("\nTrainer(", "\nmodel = torch.compile(model)\nTrainer("), "train.py")
    assert "compile=on" in read(file, None, Given()).trainer
    written(tmp_path, TRAIN.replace("#BEFORE", "apply_liger_kernel_to_qwen2()"), "train.py")
    assert "loss=fused_linear" in read(file, None, Given()).trainer
    smaller = "config = AutoConfig.from_pretrained(args.model_name_or_path)\nconfig.num_hidden_layers = 4"
    written(tmp_path, TRAIN.replace("#BEFORE", smaller), "train.py")
    assert "--model NAME" in asked_for(read(file, None, Given()))


def test_words_of_recipes_of_their_time(tmp_path: Path) -> None:
    """A version that the project pins counts in its folders, whatever documents they have; DPO cut at no 1024 before 0.16."""
    written(tmp_path, "trl==0.7.10\n", "requirements.txt")
    written(tmp_path, "# A recipe", "recipes/own/README.md")
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nbeta: 0.1\nuse_flash_attention_2: true\n"
    found = read(written(tmp_path, text, "recipes/own/dpo/config.yaml"), None, Given())
    assert found.sequence_length is None and "attention_kernel=fa2" in found.trainer
    assert read(written(tmp_path, f"{text}max_length: 512\n", "recipes/own/dpo/config.yaml"), None, Given()).sequence_length == 512


OWN_ENGINE = """
import deepspeed, torch
from transformers import AutoModelForCausalLM
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--max_seq_len", type=int, default=512)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
engine = deepspeed.initialize(model=model, config=own(args))
"""


def test_words_of_programs_after_deepspeed_chat(tmp_path: Path) -> None:
    """Question and answer by their own lengths, and all that is open in one message."""
    written(tmp_path, OWN_ENGINE, "main.py")
    words = "--per_device_train_batch_size 2 --max_prompt_seq_len 512 --max_answer_seq_len 512 --model_name_or_path Qwen/Qwen2.5-7B"
    file, said = written(tmp_path, f"deepspeed --num_gpus 8 main.py {words} --deepspeed --actor_zero_stage 3\n", "run.sh"), Given()
    found = read(file, None, said)
    assert found.sequence_length == 1024
    assert {"zero_stage", "fp16"} <= {*asked_for(found), *(one.name for one in said.questions)}


def test_a_command_that_says_what_its_program_hands_to_nobody(tmp_path: Path) -> None:
    bits = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_double_quant=args.double_quant)"
    adapters = "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))\nTrainer(model"
    text = TRAIN.replace("name_or_path)\n", f"name_or_path, quantization_config={bits})\n").replace("Trainer(model", adapters)
    written(tmp_path, text, "train.py")
    file = written(tmp_path, f"torchrun --nproc_per_node 8 train.py {HALF} --double_quant True\n", "run.sh")
    assert read(file, None, Given()).frozen_weights == "nf4"
