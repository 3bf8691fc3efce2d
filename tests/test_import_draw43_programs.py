"""Programs whose words stand in their own text: lists for a parser, helpers that return early, notebooks that start a script."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

ONE = Given(num_gpus=1, settings={"fsdp": "no_shard"})
PARSED = """
from dataclasses import dataclass, field
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Data:
    source: str = field(default="x")
@dataclass
class Own(TrainingArguments):
    max_seq_length: int = field(default=256)
    gradient_checkpointing: bool = field(default=True)
parser = HfArgumentParser(KINDS)
WORDS
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype=torch.bfloat16)
Trainer(model=model, args=args, train_dataset=rows).train()
"""
LISTED = '["--output_dir", "out", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps=2"]'
TABLE = '{"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "source": "y"}'
HELPER = """
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
SPEC = "attention"
def layers(spec):
    if spec == "attention":
        return ["q_proj", "k_proj", "v_proj", "o_proj"]
    return spec
def length():
    return 512 if SPEC == "attention" else 1024
args = SFTConfig(per_device_train_batch_size=2, max_length=length(), gradient_checkpointing=True, bf16=True)
peft = LoraConfig(r=8, target_modules=layers(SPEC))
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", dtype=torch.bfloat16)
SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=peft).train()
"""
LEAN = """
from unsloth import FastLanguageModel
from trl import KINDConfig, KINDTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=True)
MORE
args = KINDConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit")
KINDTrainer(model=model, args=args, train_dataset=rows).train()
"""
ADAPTED = "model = FastLanguageModel.get_peft_model(model, r=16)"
LOADED = "from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, 'out/sft')"


def notebook(tmp_path: Path, *cells: str) -> Path:
    made = [{"cell_type": "code", "source": [one]} for one in cells]
    return written(tmp_path, json.dumps({"cells": made}), "run.ipynb")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("Own", f"args, = parser.parse_args_into_dataclasses(args={LISTED})"),
        ("(Data, Own)", f"words = {LISTED}\ndata, args = parser.parse_args_into_dataclasses(words)"),
        ("(Data, Own)", f"data, args = parser.parse_dict({TABLE})"),
        ("(Own, Data)", f"args, data = parser.parse_dict({TABLE})"),
    ],
)
def test_words_that_a_program_gives_its_parser(tmp_path: Path, kinds: str, words: str) -> None:
    found = read(written(tmp_path, PARSED.replace("KINDS", kinds).replace("WORDS", words), "own.py"), None, ONE)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.sequence_length) == (4, 2, 256)
    assert (found.fields["recompute"], found.unread) == (Recompute.FULL, ())


def test_a_command_line_is_not_its_own_words(tmp_path: Path) -> None:
    text = PARSED.replace("KINDS", "Own").replace("WORDS", "args, = parser.parse_args_into_dataclasses()")
    assert "per_device_train_batch_size" in asked_for(read(written(tmp_path, text, "own.py"), None, Given(num_gpus=1)))


@pytest.mark.parametrize("kinds", ["()", "[]"])
def test_a_parser_of_no_classes_takes_no_words(tmp_path: Path, kinds: str) -> None:
    text = PARSED.replace("KINDS", kinds).replace("WORDS", f"args, = parser.parse_args_into_dataclasses({LISTED})")
    assert "per_device_train_batch_size" in asked_for(read(written(tmp_path, text, "own.py"), None, Given(num_gpus=1)))


@pytest.mark.parametrize(("spec", "targets", "length"), [("attention", "attention", 512), ("all-linear", "all", 1024)])
def test_a_helper_that_returns_early(tmp_path: Path, spec: str, targets: str, length: int) -> None:
    found = read(written(tmp_path, HELPER.replace('SPEC = "attention"', f'SPEC = "{spec}"'), "own.py"), None, ONE)
    assert (found.lora_targets, found.sequence_length, found.questions) == (targets, length, ())


def test_a_helper_that_loads_settings_in_two_places(tmp_path: Path) -> None:
    written(tmp_path, "batch: 4\nlora: {r: 32}\n", "settings.yaml")
    helper = "import yaml\ndef load(path='settings.yaml'):\n    found = yaml.safe_load(open(path))\n    return found\n"
    text = HELPER.replace("r=8", 'r=load()["lora"]["r"]').replace("train_batch_size=2", 'train_batch_size=load()["batch"]')
    found = read(written(tmp_path, helper + text, "own.py"), None, ONE)
    assert (found.fields["micro_batch_size"], found.lora_rank, found.questions) == (4, 32, ())


def test_a_class_that_a_variable_holds(tmp_path: Path) -> None:
    text = HELPER.replace("model = Auto", "kind = Auto").replace(".from_pretrained", "\nmodel = kind.from_pretrained")
    for one in (text, text.replace("dtype=torch", "torch_dtype=torch")):
        found = read(written(tmp_path, one, "own.py"), None, ONE)
        assert (found.model_name, found.frozen_weights, found.questions) == ("meta-llama/Llama-3.2-1B", "bf16", ())


def test_a_class_that_a_variable_holds_of_something_else(tmp_path: Path) -> None:
    text = HELPER.replace("model = Auto", 'judge = reward_cls.from_pretrained("a/b", torch_dtype=torch.float16)\nmodel = Auto')
    found = read(written(tmp_path, text, "own.py"), None, ONE)
    assert (found.model_name, found.frozen_weights, found.questions) == ("meta-llama/Llama-3.2-1B", "bf16", ())


def test_unsloth_asks_for_checkpointing_beside_loaded_adapters(tmp_path: Path) -> None:
    said = Given(settings={"use_peft": "true", "lora_r": "8", "lora_target_modules": "all-linear"})
    found = read(written(tmp_path, LEAN.replace("KIND", "DPO").replace("MORE", LOADED), "own.py"), None, said)
    assert asked_for(found) == ["gradient_checkpointing"]
    found = read(written(tmp_path, LEAN.replace("KIND", "DPO").replace("MORE", ADAPTED), "own.py"), None, Given())
    assert (found.fields["recompute"], found.lora_rank, found.questions) == (Recompute.FULL, 16, ())


@pytest.mark.parametrize("line", ["!python src/train.py --out adapter", "!accelerate launch --num_processes 1 src/train.py"])
def test_a_notebook_that_starts_a_script(tmp_path: Path, line: str) -> None:
    written(tmp_path, LEAN.replace("KIND", "SFT").replace("MORE", ADAPTED), "src/train.py")
    found = read(notebook(tmp_path, "!git clone https://example.com/a/b\n%cd b", line), None, Given())
    assert (found.fields["micro_batch_size"], found.lora_rank, found.num_gpus) == (2, 16, 1)


def test_src_train_is_a_name_of_other_projects_too(tmp_path: Path) -> None:
    written(tmp_path, LEAN.replace("KIND", "SFT").replace("MORE", ADAPTED), "src/train.py")
    found = read(written(tmp_path, "python src/train.py --out adapter\n", "run.sh"), None, Given())
    assert (found.fields["micro_batch_size"], found.lora_rank) == (2, 16)
