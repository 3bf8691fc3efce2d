"""Practice before draw 44: how projects wrap their programs: modules without options, JSON of arguments, defaults that nobody uses.
Short files of the same shape."""

import contextlib
import json
import time
from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

FIELDS = """
from dataclasses import dataclass, field
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
from trl import SFTTrainer
@dataclass
class Words:
    seq_length: int = field(default=128)
    batch: int = field(default=2)
    gradient_checkpointing: bool = field(default=True)
    pref_loss: str = field(default="sigmoid")
    simpo_gamma: float = field(default=0.5)
    lora_rank: int = field(default=8)
    finetuning_type: str = field(default="lora")
    train_args_file: str = field(default="args/base.json")
"""
BUILT = FIELDS + """
words = HfArgumentParser(Words).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16", device_map={"": 0})
made = TrainingArguments(per_device_train_batch_size=words.batch, gradient_accumulation_steps=4, bf16=True)
peft_config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
SFTTrainer(model=model, args=made, train_dataset=d, max_seq_length=256, peft_config=peft_config).train()
"""


def _run(folder: Path, program: str, command: str, name: str = "tune.py", **said: str) -> Reading:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    written(folder, program, name)
    return read(written(folder, f"{command}\n", "run.sh"), None, Given(num_gpus=1, settings=said))


@pytest.mark.parametrize("comment", ["", "# accelerate launch pack/sft.py"])
def test_a_module_that_is_started_without_options_is_its_program(tmp_path: Path, comment: str) -> None:
    found = _run(tmp_path, BUILT, f"#!/bin/bash\n#SBATCH --gres=gpu:1\npython -m pack.sft\n{comment}", "pack/sft.py")
    assert (found.fields["micro_batch_size"], found.sequence_length, found.lora_rank) == (2, 256, 8)
    assert found.fields["recompute"] == Recompute.NONE  # its own word, which it hands to nobody


@pytest.mark.parametrize("command", ["python tune.py --batch 4", "python tune.py --batch 4 --seq_length 64"])
def test_what_a_program_gives_its_trainer_goes_before_its_options(tmp_path: Path, command: str) -> None:
    program = BUILT.replace("HfArgumentParser(Words)", "HfArgumentParser((Words, TrainingArguments))")
    assert _run(tmp_path, program, command).sequence_length == 256


PARSED = FIELDS + """
import argparse
def setup():
    p = argparse.ArgumentParser()
    p.add_argument("--train_args_file", default="args/base.json")
    file = p.parse_args().train_args_file
    return HfArgumentParser((Words, TrainingArguments)).parse_json_file(json_file=file)
words, made = setup()
Trainer(model=AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16"), args=made).train()
"""


@pytest.mark.parametrize(("option", "batch"), [("--train_args_file args/long.json", 3), ("", 1)])
def test_json_that_a_program_parses_its_arguments_from_is_read(tmp_path: Path, option: str, batch: int) -> None:
    (tmp_path / "args").mkdir()
    for name, size in (("base", 1), ("long", 3)):
        said = {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "per_device_train_batch_size": size, "max_seq_length": 2048}
        (tmp_path / "args" / f"{name}.json").write_text(json.dumps({**said, "bf16": True, "gradient_accumulation_steps": 6}))
    found = _run(tmp_path, PARSED, f"deepspeed --include=localhost:0 train.py {option}", "train.py", deepspeed="zero2")
    assert (found.fields["micro_batch_size"], found.sequence_length, found.lora_rank) == (batch, 2048, 0)
    assert (found.global_batch_size, found.precision) == (6 * batch, "bf16")


WHOLE = FIELDS + """
words, made = HfArgumentParser((Words, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16")
Trainer(model=model, args=made, train_dataset=d).train()
"""


def test_defaults_of_other_steps_and_of_adapters_that_are_never_made_do_nothing(tmp_path: Path) -> None:
    found = _run(tmp_path, WHOLE, "python tune.py --per_device_train_batch_size 2 --bf16 --deepspeed zero2 --lora_target q_proj")
    assert (found.objective, found.lora_rank, found.sequence_length) == ("lm", 0, 128)


SHARED = FIELDS + """
def prepared(model, use_gradient_checkpointing=True):
    if use_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model
def load(words, is_trainable=False):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16")
    return prepared(model) if is_trainable else model
def train():
    words, made = HfArgumentParser((Words, TrainingArguments)).parse_args_into_dataclasses()
    Trainer(model=load(words, made.do_train), args=made, train_dataset=d).train()
def export():
    load(None).save_pretrained("out")
if __name__ == "__main__":
    train()
"""


@pytest.mark.parametrize(("option", "kept"), [("--do_train", Recompute.FULL), ("--do_train False", Recompute.NONE)])
def test_a_caller_that_never_runs_leaves_no_parameter_at_its_default(tmp_path: Path, option: str, kept: Recompute) -> None:
    command = f"python tune.py --per_device_train_batch_size 2 --bf16 --deepspeed zero2 {option}"
    program = SHARED.replace("    gradient_checkpointing: bool = field(default=True)\n", "")
    assert _run(tmp_path, program, command).fields["recompute"] == kept


LISTED = BUILT.replace('["q_proj", "v_proj"]', '["q_proj", "v_proj", "k_proj", "out_proj", "fc_in", "fc_out", "wte"]')


@pytest.mark.parametrize(("model", "layers"), [("meta-llama/Llama-2-7b-hf", "qkv"), ("EleutherAI/gpt-j-6b", "all")])
def test_layers_of_gpt_j_in_the_list_for_another_model_have_no_adapters(tmp_path: Path, model: str, layers: str) -> None:
    program = LISTED.replace("meta-llama/Llama-2-7b-hf", model)
    written(tmp_path, program, "tune.py")
    said = Given(num_gpus=1, model=None if "llama" in model else "llama-2-7b")
    found = read(written(tmp_path, "python tune.py\n", "run.sh"), None, said)
    assert found.lora_targets == layers
    assert any("has no such layers" in one for one in found.notes) is (layers == "qkv")


def test_a_mapping_of_a_module_beside_it_gives_a_program_its_values(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    written(tmp_path, 'CONFIG = {"batch": 3, "length": 4096, "r": 32, "base": "meta-llama/Llama-2-7b-hf"}\n', "pack/values.py")
    program = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer
from pack.values import CONFIG
def train(config):
    model = AutoModelForCausalLM.from_pretrained(config["base"], torch_dtype="bfloat16", device_map={"": 0})
    made = TrainingArguments(per_device_train_batch_size=config["batch"], gradient_accumulation_steps=4, bf16=True)
    peft_config = LoraConfig(r=config["r"], target_modules=["q_proj", "v_proj"])
    SFTTrainer(model=model, args=made, train_dataset=d, max_seq_length=config["length"], peft_config=peft_config).train()
train(CONFIG)
"""
    found = read(written(tmp_path, program, "tune.py"), None, Given(num_gpus=1))
    assert (found.fields["micro_batch_size"], found.sequence_length, found.lora_rank) == (3, 4096, 32)


def test_routers_that_are_frozen_are_no_refusal(tmp_path: Path) -> None:
    command = "python tune.py --per_device_train_batch_size 2 --bf16 --deepspeed zero2 --freeze_gate True"
    assert _run(tmp_path, WHOLE, command).fields["zero"] == 0


@pytest.mark.parametrize("program", ["src/train.py", "train.py"])
def test_a_program_with_the_name_of_llama_factorys_is_read_by_what_it_builds(tmp_path: Path, program: str) -> None:
    command = f"deepspeed --include=localhost:0 {program} --data_path train.json --deepspeed zero2 --model_max_length 2048"
    found = _run(tmp_path, WHOLE, f"{command} --per_device_train_batch_size 2 --fp16 True", program)
    assert (found.fields["micro_batch_size"], found.sequence_length, found.precision, found.questions) == (2, 2048, "fp16", ())


def test_a_model_that_an_unknown_function_takes_may_have_adapters(tmp_path: Path) -> None:
    """The words of the command stay, where the helper is not there."""
    program = """
import argparse
from helpers import build
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--use_lora", type=bool, default=False)
    parser.add_argument("--lora_r", type=int, default=8)
    a = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", torch_dtype="bfloat16")
    model = build(model, a)
    args = TrainingArguments(output_dir="o", per_device_train_batch_size=2, bf16=True)
    Trainer(model=model, args=args).train()

main()
"""
    (tmp_path / "train.py").write_text(program)
    line = "torchrun --nproc_per_node 8 train.py --use_lora true --lora_r 16\n"
    found = read(written(tmp_path, line, "run.sh"), None, Given(sequence_length=2048, settings={"fsdp": "no_shard"}))
    assert found.lora_rank == 16


@pytest.mark.parametrize("number", [".inf", ".nan", "1.0e+999", "-5"])
def test_buckets_of_odd_sizes_end_in_no_traceback(tmp_path: Path, number: str) -> None:
    """Numbers that are none; the name of a person is no encoder."""
    text = "model_name_or_path: me/robert-7b-sft\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\nbf16: true\n"
    text += f"deepspeed: {{zero_optimization: {{stage: 2, reduce_bucket_size: {number}}}}}\n"
    found = read(written(tmp_path, text, "sft.yaml"), "llama-factory", Given(num_gpus=8, model="qwen2.5-7b"))
    assert found.fields["zero"] == 2


@pytest.mark.parametrize("blank", ["\n", " \n"])
@pytest.mark.parametrize("command", ["torchrun --nproc_per_node 8 pretrain_gpt.py", "accelerate launch train.py --bf16"])
def test_empty_lines_take_no_longer_than_others(tmp_path: Path, blank: str, command: str) -> None:
    """Expressions that ran across line ends took minutes for 30,000 of them; comments are passed over at once."""
    took = []
    for line in ("#\n", blank):
        file = written(tmp_path, f"#!/bin/bash\n{line * 30_000}{command}\n", "run.sh")
        started = time.process_time()
        with contextlib.suppress(PlannerError):
            read(file, None, Given())
        took.append(time.process_time() - started)
    assert took[1] < 10 * took[0] + 1
