"""Defaults of fields that functions other than dataclasses.field make, and switches of the precision whose default is not read."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import Reading, read
from planner.trainers.reading.given import Given

PROGRAM = """
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from helpers import FIELDS

@dataclass
class Own(TrainingArguments):
    model_name_or_path: str = field(default=None)
    model_max_length: int = field(default=1024)
    bf16: bool = SWITCH
    rank: int = RANK

args = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16"))
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=args.rank, target_modules=["q_proj", "v_proj"]))
Trainer(model=model, args=args, train_dataset=rows(args.model_max_length)).train()
"""
START = "torchrun --nproc_per_node=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 \\\n"
START += "  --gradient_accumulation_steps 2 --output_dir out\n"


def _read(folder: Path, switch: str, rank: str = "8", **said: str) -> Reading:
    written(folder, PROGRAM.replace("SWITCH", switch).replace("RANK", rank), "train.py")
    return read(written(folder, START, "start.sh"), None, Given(settings=said, sequence_length=1024))


@pytest.mark.parametrize(("switch", "rank"), [
    ("HfArg(default=True, help='half')", "HfArg(aliases=['--r'], default=32)"), ("arg(True, help='half')", "arg(32)"),
    ("attr.ib(default=True)", "attr.ib(default_factory=lambda: 32)"), ("chz.field(default=True)", "Field(32, description='rank')"),
    ("simple_parsing.flag(default=True)", "simple_parsing.choice(16, 32, default=32)"),
    ("field(default=torch.cuda.is_bf16_supported())", "field(default=32)"),
])  # fmt: skip
def test_fields_of_other_libraries_have_their_defaults(tmp_path: Path, switch: str, rank: str) -> None:
    found = _read(tmp_path, switch, rank)
    assert (found.lora_rank, found.precision) == (32, "bf16")
    assert not found.questions


def test_a_switch_of_the_precision_whose_default_is_not_read_is_asked_for(tmp_path: Path) -> None:
    assert [one.name for one in _read(tmp_path, "default_for('bf16')").questions] == ["bf16"]
    assert _read(tmp_path, "default_for('bf16')", bf16="true").precision == "bf16"


def test_frozen_layers_in_half_are_said_to_change_memory_too(tmp_path: Path) -> None:
    assert "memory too high where the trainer has bf16 on" in " ".join(_read(tmp_path, "field(default=False)").notes)


OVER = """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from dataclasses import dataclass

@dataclass
class Own(TrainingArguments):
    model_name_or_path: str = HfArg(default=None)
    bf16: bool = HfArg(default=True)
    lora: bool = HfArg(default=False)
    qlora: bool = HfArg(default=False)

args = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
if args.qlora:
    args.lora = True
bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, quantization_config=bits if args.qlora else None)
if args.lora:
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(("word", "rank", "recompute"), [("--qlora True", 16, 2), ("--lora True", 16, 2), ("", 0, 0)])
def test_what_a_program_puts_over_a_default_counts(tmp_path: Path, word: str, rank: int, recompute: int) -> None:
    """Full recompute by prepare_model_for_kbit_training, where adapters are made."""
    written(tmp_path, OVER, "train.py")
    start = written(tmp_path, f"{START.rstrip()} {word}\n", "start.sh")
    found = read(start, None, Given(sequence_length=1024))
    assert (found.lora_rank or 0, found.fields["recompute"]) == (rank, recompute)
