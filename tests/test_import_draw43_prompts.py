"""Scores of prompts, of which no loss is taken: ms-swift and TRL leave them out where they are told to, or by themselves."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

COMMAND = "swift MODE --model Qwen/Qwen2.5-7B --max_length 4096 --per_device_train_batch_size 2 MORE\n"
RECIPE = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nbf16: true\ngradient_checkpointing: true\nMORE\n"


@pytest.mark.parametrize(
    ("mode", "more", "pin", "noted"),
    [
        ("sft", "", "", True),
        ("sft", "--use_logits_to_keep True", "ms-swift==3.4.0\n", True),
        ("sft", "", "ms-swift==3.4.0\n", False),
        ("sft", "--use_logits_to_keep false", "", False),
        ("sft", "--sequence_parallel_size 2", "", False),
        ("sft", "--use_liger_kernel true", "", False),
        ("sft", "--loss_scale all", "", False),
        ("pt", "", "", False),
    ],
)
def test_scores_of_answers_alone(tmp_path: Path, mode: str, more: str, pin: str, noted: bool) -> None:
    if pin:
        written(tmp_path, pin, "requirements.txt")
    found = read(written(tmp_path, COMMAND.replace("MODE", mode).replace("MORE", more), "run.sh"), "ms-swift", Given(num_gpus=2))
    assert any("too high where prompts are long" in one for one in found.notes) is noted


@pytest.mark.parametrize(("more", "noted"), [("use_logits_to_keep: true\nbeta: 0.1", True), ("beta: 0.1", False)])
def test_scores_of_answers_alone_under_trl(tmp_path: Path, more: str, noted: bool) -> None:
    found = read(written(tmp_path, RECIPE.replace("MORE", more), "recipe.yaml"), "trl", Given(num_gpus=1))
    assert any("use_logits_to_keep leaves out" in one for one in found.notes) is noted
