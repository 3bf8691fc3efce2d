"""What recipes of TRL showed in draw 46: lengths that nobody reads, launchers of any recipe."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

RECIPE = """model_name_or_path: Qwen/Qwen2.5-7B
torch_dtype: bfloat16
bf16: true
attn_implementation: flash_attention_2
max_seq_length: 4096
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 1.0e-4
"""
PROGRAM = """from dataclasses import dataclass
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
from transformers import AutoModelForCausalLM
import helpers
@dataclass
class Words:
    rows: str = ""
    max_seq_length: int = 2048
def main(model_args, words, training_args):
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, torch_dtype=model_args.torch_dtype)
    trainer = SFTTrainer(model=model, args=training_args, train_dataset=helpers.rows(words.rows{used}))
    trainer.train()
if __name__ == "__main__":
    parser = TrlParser((ModelConfig, Words, SFTConfig))
    model_args, words, training_args = parser.parse_args_and_config()
    main(model_args, words, training_args)
"""
LAUNCHER = """#!/bin/bash
HERE="$(cd "$(dirname "$0")" && pwd)"
SPLIT="${{HERE}}/configs/split.yaml"
TRAINS="${{HERE}}/{program}"
RECIPE=""
while [[ $# -gt 0 ]]; do case "$1" in
  --config) RECIPE="$2"; shift 2 ;;
esac; done
if accelerate launch \\
    --config_file "$SPLIT" \\
    --num_processes "$ALL" \\
    "$TRAINS" \\
    --config "{recipe}"
then echo done; fi
python3 "${{HERE}}/inference.py" --config "$RECIPE"
"""
SPLIT = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\nnum_processes: 8\n"


def _written(folder: Path, used: str = "", recipe: str = "$RECIPE", trl: str = "==0.21.0", launches: bool = True) -> Path:
    written(folder, f"trl{trl}\n", "requirements.txt")
    written(folder, PROGRAM.format(used=used), "train.py")
    written(folder, PROGRAM.format(used=used), "inference.py")
    if launches:
        written(folder, LAUNCHER.format(recipe=recipe, program="train.py"), "run.sh")
    (folder / "configs").mkdir(exist_ok=True)
    written(folder / "configs", SPLIT, "split.yaml")
    inner = folder / "recipes" / "qwen"
    inner.mkdir(parents=True, exist_ok=True)
    return written(inner, RECIPE, "full.yaml")


def _notes(reading: Reading) -> str:
    return " | ".join(reading.notes)


def test_a_launcher_of_any_recipe_starts_those_below_it(tmp_path: Path) -> None:
    found = read(_written(tmp_path), None, Given(num_gpus=8))
    assert found.trainer.startswith("deepspeed") and found.fields["zero"] == 3
    assert "launched with configs/split.yaml by a command in" in _notes(found) and "inference" not in _notes(found)
    for recipe in ("$1", "${1:-recipes/other.yaml}", "$RECIPES_OF_A_CALLER"):
        written(tmp_path, LAUNCHER.format(recipe=recipe, program="train.py"), "run.sh")
        assert read(tmp_path / "recipes/qwen/full.yaml", None, Given(num_gpus=8)).fields["zero"] == 3
    assert "accelerate" in asked_for(read(_written(tmp_path, recipe="recipes/other.yaml"), None, Given(num_gpus=8)))
    written(tmp_path, "from trl import TrlParser\nTrlParser((Words,)).parse_args_and_config()\n", "score.py")
    written(tmp_path, LAUNCHER.format(recipe="$RECIPE", program="score.py"), "run.sh")  # which trains nothing
    assert "accelerate" in asked_for(read(tmp_path / "recipes/qwen/full.yaml", None, Given(num_gpus=8)))


def test_of_launchers_of_several_programs_what_they_share_counts(tmp_path: Path) -> None:
    path = _written(tmp_path)
    written(tmp_path, PROGRAM.format(used=", words.max_seq_length"), "other.py")
    written(tmp_path, LAUNCHER.format(recipe="$RECIPE", program="other.py"), "run_other.sh")
    found = read(path, None, Given(num_gpus=8, sequence_length=2048))
    assert found.fields["zero"] == 3 and "does nothing" not in _notes(found)
    steps = (("sft.py", "sft_a.yaml", True), ("dpo.py", "dpo_a.yaml", False))
    for program, _, idle in steps:  # the name of each says which
        written(tmp_path, PROGRAM.format(used="" if idle else ", words.max_seq_length"), program)
        written(tmp_path, LAUNCHER.format(recipe="$RECIPE", program=program), f"run_{program}.sh")
    for name in ("run.sh", "run_other.sh"):
        (tmp_path / name).unlink()
    for _, recipe, idle in steps:
        found = read(written(tmp_path / "recipes", RECIPE, recipe), None, Given(num_gpus=8))
        assert ("max_seq_length does nothing: sft.py uses it nowhere" in _notes(found)) is idle
        assert found.sequence_length == (1024 if idle else 4096)


@pytest.mark.parametrize(
    ("trl", "used", "length"),
    [
        ("==0.21.0", "", 1024), ("==0.21.0", ", words.max_seq_length", 4096), ("==0.21.0", ", **vars(words)", 4096),
        ("==0.21.0", ", words", 4096),
        ("==0.19.1", "", 4096), (">=0.12", "", 4096),
    ],
)  # fmt: skip
def test_a_length_that_no_trainer_has_counts_where_its_program_uses_it(tmp_path: Path, trl: str, used: str, length: int) -> None:
    found = read(_written(tmp_path, used=used, trl=trl), None, Given(num_gpus=8))
    assert found.sequence_length == length
    note = "max_seq_length does nothing: train.py uses it nowhere, and it is no word of its trainer's arguments"
    assert (note in _notes(found)) is (length == 1024)


def test_a_length_that_no_trainer_has_is_asked_for_without_a_program(tmp_path: Path) -> None:
    path = _written(tmp_path, launches=False)
    found = read(path, None, Given(num_gpus=8))
    about = "max_seq_length is no word of the TRL that its project pins: a program of its own reads this file, and cuts"
    assert asked_for(found) == ["accelerate", "--sequence-length S"] and about in found.questions[1].about
    for given in (Given(num_gpus=8, sequence_length=2048), Given(num_gpus=8, settings={"max_seq_length": "2048"})):
        assert asked_for(read(path, None, given)) == ["accelerate"]
    assert asked_for(read(_written(tmp_path, trl=">=0.12", launches=False), None, Given(num_gpus=8))) == ["accelerate"]
