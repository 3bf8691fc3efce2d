"""What unsloth puts in the place of what TRL does by itself, and of torch's checkpointing."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

LEAN = """
from unsloth import FastLanguageModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from transformers import TrainingArguments
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(output_dir="out"), train_dataset=rows).train()
"""
ARGS = 'args=SFTConfig(output_dir="out"), '
TRL_FIRST = "from trl import SFTConfig, SFTTrainer\n"
PARSED = """
from transformers import HfArgumentParser
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
args, = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=args, train_dataset=rows).train()
"""


def said_by(found: Reading) -> tuple[object, ...]:
    return found.optimizer, found.fields["micro_batch_size"], found.fields["num_microbatches"]


@pytest.mark.parametrize(
    ("old", "new", "optimizer"),
    [
        ("", "", "adam_8bit"),
        (ARGS, "", "adam_8bit"),
        ("SFTTrainer(model=model, args=SFTConfig", "DPOTrainer(model=model, args=DPOConfig", "adam_8bit"),
        ('out"', 'out", optim="adamw_torch"', "adam"),
    ],
)
def test_defaults_of_trl_under_unsloth(tmp_path: Path, old: str, new: str, optimizer: str) -> None:
    found = read(written(tmp_path, LEAN.replace(old, new) if old else LEAN, "own.py"), None, Given())
    assert said_by(found) == (optimizer, 4, 2)


@pytest.mark.parametrize(
    "text",
    [
        LEAN.replace("args=SFTConfig(", "args=TrainingArguments("),
        TRL_FIRST + LEAN.replace("from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer\n", ""),
    ],
)
def test_arguments_that_unsloth_leaves(tmp_path: Path, text: str) -> None:
    assert said_by(read(written(tmp_path, text, "own.py"), None, Given())) == ("adam", 8, 1)


def test_defaults_of_trl_before_unsloth_had_them(tmp_path: Path) -> None:
    written(tmp_path, "unsloth==2024.11.5\n", "requirements.txt")
    assert said_by(read(written(tmp_path, LEAN, "own.py"), None, Given())) == ("adam", 8, 1)


def test_defaults_of_a_parser_under_unsloth(tmp_path: Path) -> None:
    written(tmp_path, PARSED, "tune.py")
    command = written(tmp_path, "python tune.py --output_dir out --gradient_checkpointing true\n", "run.sh")
    found = read(command, None, Given(num_gpus=1))
    assert said_by(found) == ("adam_8bit", 4, 2)


@pytest.mark.parametrize(
    ("pin", "loads", "offloads", "noted"),
    [
        ("", "", False, True),
        ("unsloth==2025.9.6\n", "", True, False),
        ("unsloth>=2026.4\n", "", False, False),
        ("", "use_gradient_checkpointing=False, ", False, False),
    ],
)
def test_true_beside_a_load_that_patches(tmp_path: Path, pin: str, loads: str, offloads: bool, noted: bool) -> None:
    text = LEAN.replace("r=16", "r=16, use_gradient_checkpointing=True").replace("max_seq_length", f"{loads}max_seq_length")
    if pin:
        written(tmp_path, pin, "requirements.txt")
    found = read(written(tmp_path, text, "own.py"), None, Given())
    assert (found.fields.get("offload_activations", False), asked_for(found)) == (offloads, [])
    assert any("from_pretrained has them sent to the host" in one for one in found.notes) is noted
    found = read(tmp_path / "own.py", None, Given(settings={"activation_offloading": "true"}))
    assert found.fields["offload_activations"]
    assert not any("from_pretrained" in one for one in found.notes)


@pytest.mark.parametrize(
    ("pin", "targets", "noted"), [("", "all", True), ("==2025.9.6", "attention", False), (">=2026.8", "all", False)]
)
def test_adapters_on_experts_of_gpt_oss(tmp_path: Path, pin: str, targets: str, noted: bool) -> None:
    names = [f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")]
    if pin:
        written(tmp_path, f"unsloth{pin}\n", "requirements.txt")
    text = LEAN.replace("unsloth/Llama-3.2-1B", "openai/gpt-oss-20b").replace("r=16", f"r=16, target_modules={names}")
    found = read(written(tmp_path, text, "own.py"), None, Given())
    assert found.lora_targets == targets
    assert any("on the experts of gpt-oss too" in one for one in found.notes) is noted
