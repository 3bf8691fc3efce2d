"""Tests of a program that are not decided, methods of known texts, classes of settings beside it, forms of LLaMA Board."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

UNSLOTH = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
several = count_devices(args)
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-2-7b", max_seq_length=512, load_in_4bit=FOUR)
model = FastLanguageModel.get_peft_model(model, r=16, lora_dropout=0.0, use_gradient_checkpointing=KEPT)
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True)
SFTTrainer(model=model, args=args, train_dataset=data).train()
"""


def _read(folder: Path, text: str, name: str = "tune.py", **settings: str) -> Reading:
    (folder / name).write_text(text)
    return read(folder / name, None, Given(num_gpus=1, settings=settings))


def _asked(found: Reading) -> dict[str, tuple[str, ...]]:
    return {one.name: one.choices for one in found.questions}


def _memory(found: Reading) -> tuple[bool, bool, str]:
    full = found.fields["recompute"] == Recompute.FULL
    return full, bool(found.fields["offload_activations"]), found.frozen_weights


def test_a_test_is_asked_once_for_all_that_hangs_on_it(tmp_path: Path) -> None:
    text = UNSLOTH.replace("FOUR", "not several").replace("KEPT", '"unsloth" if not several else False')
    assert _asked(_read(tmp_path, text)) == {"several": ("true", "false")}
    assert _memory(_read(tmp_path, text, several="false")) == (True, True, "nf4_dq")
    assert _memory(_read(tmp_path, text, several="true")) == (False, False, "bf16")


def test_checkpointing_of_unsloth_that_is_open_is_asked(tmp_path: Path) -> None:
    text = UNSLOTH.replace("FOUR", "True").replace("KEPT", "chosen(args)")
    assert _asked(_read(tmp_path, text)) == {"gradient_checkpointing": ("unsloth", "true", "false")}
    for word, kept in (("unsloth", (True, True)), ("true", (True, False)), ("false", (False, False))):
        assert _memory(_read(tmp_path, text, gradient_checkpointing=word))[:2] == kept


BRANCHES = UNSLOTH.replace("FOUR", "True").replace("trl import", "peft import LoraConfig, get_peft_model\nfrom trl import").replace(
    'model = FastLanguageModel.get_peft_model(model, r=16, lora_dropout=0.0, use_gradient_checkpointing=KEPT)',
    'name = "Acme/LLAMA-chat"\nif TEST:\n    model = FastLanguageModel.get_peft_model(model, r=16)\n'
    'else:\n    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))',
).replace("bf16=True", "bf16=True, gradient_checkpointing=False")  # fmt: skip


def test_methods_of_a_known_text_decide_which_adapters_are_made(tmp_path: Path) -> None:
    first = _read(tmp_path, BRANCHES.replace("TEST", '"llama" in name.lower()'))
    assert (first.lora_rank, *_memory(first)[:2]) == (16, True, True) and not first.questions
    for test in ('name.lower().startswith("gpt")', '"mistral" in name.strip().lower()', 'name.replace("LLAMA", "x").endswith("y")'):
        second = _read(tmp_path, BRANCHES.replace("TEST", test))
        assert (second.lora_rank, *_memory(second)[:2]) == (8, False, False) and not second.questions


def test_where_either_branch_may_make_adapters_checkpointing_is_asked(tmp_path: Path) -> None:
    asked = _asked(_read(tmp_path, BRANCHES.replace("TEST", "chosen(args)")))
    assert asked["gradient_checkpointing"] == ("unsloth", "true", "false")


PEFT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
CONFIG
config.batch = 2
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype=HALF, load_in_8bit=EIGHT)
model = get_peft_model(model, LoraConfig(r=config.rank, target_modules=config.modules))
args = TrainingArguments("out", per_device_train_batch_size=config.batch, gradient_accumulation_steps=1, bf16=True)
Trainer(model=model, args=args, train_dataset=tokenizer(texts, max_length=512)).train()
"""


def test_what_is_tested_is_true_or_false_and_what_is_compared_one_of_its_texts(tmp_path: Path) -> None:
    text = PEFT.replace("CONFIG", "config = settings(args)").replace("EIGHT", 'args.bits == "8bit"')
    text = text.replace("HALF", "torch.bfloat16 if args.half else torch.float16").replace("config.rank", "8")
    text = text.replace("config.modules", '["q_proj", "v_proj"]')
    asked = _asked(_read(tmp_path, text, fsdp="no_shard"))
    assert asked["half"] == ("true", "false") and asked["bits"] == ("8bit", "none")
    eight, half = (_read(tmp_path, text, fsdp="no_shard", half="true", bits=one).frozen_weights for one in ("8bit", "none"))
    assert (eight, half) == ("int8", "bf16")


def test_fields_of_a_class_of_settings_beside_the_program(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Job:\n    rank: int = 32\n    batch: int = 8\n    half: bool = True\n"
        "    modules: list = None\n    def __post_init__(self):\n        if self.modules is None:\n"
        '            self.modules = ["q_proj", "k_proj", "v_proj", "o_proj"]\n'
    )
    text = PEFT.replace("CONFIG", "from config import Job\nconfig = Job()").replace("EIGHT", "False")
    text = text.replace("HALF", "torch.bfloat16 if config.half else torch.float16")
    found = _read(tmp_path, text, fsdp="no_shard")
    assert not found.questions and (found.lora_rank, found.lora_targets, found.fields["micro_batch_size"]) == (32, "attention", 2)
    assert found.frozen_weights == "bf16"
    changed = _read(tmp_path, text.replace("Job()", "Job(**vars(parsed))"), fsdp="no_shard")
    assert {"lora_r", "rank"} & _asked(changed).keys()


def test_what_llama_board_saves_is_named(tmp_path: Path) -> None:
    text = "top.finetuning_type: lora\ntop.model_name: Qwen3-8B\ntrain.batch_size: 1\ntrain.cutoff_len: 2048\n"
    with pytest.raises(PlannerError, match=r"LLaMA Board saves.*training_args\.yaml"):
        _read(tmp_path, text, "saved.yaml")
