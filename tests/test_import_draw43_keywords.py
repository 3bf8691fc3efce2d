"""Keywords that a program gathers in a mapping, a dtype behind a helper, and adapters that are loaded with their model."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

GATHERED = """
import inspect
import torch
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
def known(kind, words):
    names = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in words.items() if key in names}
words = {"output_dir": "out", "per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True}
signature = inspect.signature(DPOConfig.__init__).parameters
if "max_length" in signature:
    words["max_length"] = 1536
if "max_seq_length" in signature:
    words["max_seq_length"] = 512
args = DPOConfig(**known(DPOConfig, words))
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", dtype=torch.bfloat16)
given = {"model": model, "args": args, "train_dataset": rows}
DPOTrainer(**known(DPOTrainer, given)).train()
"""
LOOKED_UP = """
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
def dtype_of(name):
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
words = {"device_map": None}
words["torch_dtype"] = dtype_of(WORD)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", **words)
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True, max_length=1024)
SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=LoraConfig(r=8)).train()
"""
FOLDER = """
import os
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
peft = None
if os.path.exists("out/sft"):
    model = AutoPeftModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", is_trainable=True, torch_dtype="bfloat16")
else:
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype="bfloat16")
    peft = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
args = DPOConfig(output_dir="out", per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True, max_length=1024)
DPOTrainer(model=model, args=args, train_dataset=rows, peft_config=peft).train()
"""
RANKS = {"lora_r": "32", "lora_target_modules": "all-linear"}


def one(**settings: str) -> Given:
    return Given(num_gpus=1, settings={"fsdp": "no_shard", **settings})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("known(DPOConfig, words)", "known(DPOConfig, words)"),
        ("known(DPOConfig, words)", "{k: v for k, v in words.items() if v is not None}"),
        ("known(DPOConfig, words)", "known(words=words, kind=DPOConfig)"),
        ("= inspect.signature(DPOConfig.__init__).parameters\nif", "= {f.name for f in fields(DPOConfig)}\nif"),
    ],
)
def test_a_mapping_less_what_a_class_does_not_know(tmp_path: Path, old: str, new: str) -> None:
    found = read(written(tmp_path, GATHERED.replace(old, new), "own.py"), None, one())
    assert (found.fields["micro_batch_size"], found.sequence_length, found.questions) == (2, 1536, ())
    assert (found.objective, found.optimizer) == ("dpo", "adam")


@pytest.mark.parametrize(
    ("condition", "length"),
    [
        ('k not in ("optim", "max_length")', 1024),
        ("k in KEPT", 1024),
        ("k not in ['optim'] and v is not None", 1536),
        ("hasattr(DPOConfig, k)", 1536),
        ("v", 1536),
    ],
)
@pytest.mark.parametrize("helper", [False, True])
def test_a_condition_that_leaves_keys_out(tmp_path: Path, condition: str, length: int, helper: bool) -> None:
    thin = f"{{k: v for k, v in words.items() if {condition}}}"
    text = f"KEPT = ['output_dir', 'per_device_train_batch_size', 'bf16', 'gradient_checkpointing']\n{GATHERED}"
    text = text.replace('words["max_seq_length"] = 512', "pass")
    text = text.replace("known(DPOConfig, words)", "thin(words)" if helper else thin)
    text = text.replace("def known", f"def thin(words):\n    return {thin}\ndef known")
    written(tmp_path, "trl==0.20.0\n", "requirements.txt")
    found = read(written(tmp_path, text, "own.py"), None, one())
    assert (found.fields["micro_batch_size"], found.sequence_length, found.questions) == (2, length, ())


def test_a_condition_on_keys_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    text = GATHERED.replace("known(DPOConfig, words)", "{k: v for k, v in words.items() if k[:3] in rows}")
    assert "per_device_train_batch_size" in asked_for(read(written(tmp_path, text, "own.py"), None, one()))
    text = GATHERED.replace("known(DPOConfig, words)", "{k: v for k, v in words.items() if k not in rows}")
    assert "per_device_train_batch_size" in asked_for(read(written(tmp_path, text, "own.py"), None, one()))


def test_a_mapping_that_is_changed_on_the_way_is_asked_for(tmp_path: Path) -> None:
    text = GATHERED.replace("{key: value for", "{key: value * 2 for")
    assert "per_device_train_batch_size" in asked_for(read(written(tmp_path, text, "own.py"), None, one()))


@pytest.mark.parametrize(("pin", "length"), [("0.9.6", 512), ("0.17.0", 1536), ("0.24.0", 1536)])
def test_a_length_that_a_class_has_in_its_version(tmp_path: Path, pin: str, length: int) -> None:
    written(tmp_path, f"trl=={pin}\n", "requirements.txt")
    text = GATHERED.replace("DPO", "SFT").replace('if "max_seq', 'elif "max_seq')
    assert read(written(tmp_path, text, "own.py"), None, one(loss_type="nll")).sequence_length == length


def test_a_dtype_that_is_looked_up_by_an_unknown_name(tmp_path: Path) -> None:
    found = read(written(tmp_path, LOOKED_UP.replace("WORD", "load()"), "own.py"), None, one())
    assert asked_for(found) == ["torch_dtype"]
    assert read(tmp_path / "own.py", None, one(torch_dtype="bfloat16")).frozen_weights == "bf16"
    assert read(written(tmp_path, LOOKED_UP.replace("WORD", '"bf16"'), "own.py"), None, one()).frozen_weights == "bf16"


def test_adapters_that_are_loaded_with_their_model(tmp_path: Path) -> None:
    found = read(written(tmp_path, FOLDER, "own.py"), None, one())
    assert asked_for(found) == ["lora_r", "lora_target_modules"]
    found = read(tmp_path / "own.py", None, one(**RANKS))
    assert (found.lora_rank, found.lora_targets, found.questions) == (32, "all", ())
    assert any("a frozen copy of adapters" in one for one in found.notes)


def test_loaded_adapters_without_others(tmp_path: Path) -> None:
    text = FOLDER.split("if os")[0] + FOLDER.split('sft"):\n    ')[1].split("else:")[0] + "args" + FOLDER.split("\nargs")[1]
    found = read(written(tmp_path, text, "own.py"), None, one())
    assert asked_for(found) == ["lora_r", "lora_target_modules"]


def test_new_adapters_beside_loaded_ones_are_merged(tmp_path: Path) -> None:
    text = FOLDER.replace("else:\n    model", "if rows:\n    model").replace("peft = None", "peft = LoraConfig(r=16)")
    text = text.replace('    peft = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])\n', "")
    found = read(written(tmp_path, text, "own.py"), None, one())
    assert (found.lora_rank, found.lora_targets, found.questions) == (16, "qv", ())
