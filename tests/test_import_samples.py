"""``plan import`` of the forms that people fine-tune with: small configurations of each, and what must be found in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import PlannerError
from planner.model_names import preset_of
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given

SAMPLES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "data" / "import_samples.yaml").read_text())


def reading_of(sample: dict[str, Any], folder: Path) -> Reading:
    for name, text in sample["files"].items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read(folder / sample["read"], None, Given(num_gpus=sample.get("gpus"), settings=sample.get("set", {})))


def value(reading: Reading, name: str) -> Any:
    if name == "model":
        return reading.model.name if reading.model else None
    return reading.fields[name] if name in reading.fields else getattr(reading, name)


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if "expect" in sample])
def test_what_a_configuration_says_is_found(name: str, tmp_path: Path) -> None:
    reading = reading_of(SAMPLES[name], tmp_path)
    expected = SAMPLES[name]["expect"]
    found = {one: value(reading, one) for one in expected}
    found["trainer"] = reading.trainer if "+" in str(expected.get("trainer")) else reading.trainer.partition("+")[0]
    assert found == {"trainer": found["trainer"], **expected}


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if "asks" in sample])
def test_what_is_left_open_is_asked_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as error:
        to_plan(reading_of(SAMPLES[name], tmp_path), {"num_gpus": SAMPLES[name].get("gpus")})
    assert SAMPLES[name]["asks"] in str(error.value)


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if "model" in sample.get("expect", {})][::2])
def test_a_reading_becomes_a_plan_with_the_same_workload(name: str, tmp_path: Path) -> None:
    reading = reading_of(SAMPLES[name], tmp_path)
    plan = to_plan(reading, {"num_gpus": SAMPLES[name].get("gpus"), "hardware": "h100-sxm"})
    work = plan.workload
    assert (work.lora_rank, work.objective, work.precision) == (reading.lora_rank or 0, reading.objective, reading.precision)
    assert work.frozen_weights == (reading.frozen_weights or "bf16")
    assert plan.layout.global_batch_size == work.global_batch_size


def test_a_settings_name_that_changes_memory_is_never_dropped(tmp_path: Path) -> None:
    sample = SAMPLES["axolotl, whole weights in bf16 on one GPU"]
    sample = {**sample, "files": {"a.yml": sample["files"]["a.yml"] + "pose_num_chunks: 2\nwandb_project: x\n"}}
    assert reading_of(sample, tmp_path).unread == ("pose_num_chunks = 2",)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Qwen3-14B-bnb-4bit", "qwen3-14b"), ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"), ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("Qwen/Qwen2-VL-7B-Instruct", None), ("some/llama-8b-pruned", None), ("", None),
    ],
)  # fmt: skip
def test_names_of_the_hub_are_presets(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


def test_no_script_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = f"""
import pathlib
pathlib.Path({str(trap)!r}).touch()
length = [pathlib.Path({str(trap)!r}).touch(), 512][1]
trainer = SFTTrainer(model="Qwen/Qwen3-8B", args=SFTConfig(max_length=length, per_device_train_batch_size=10**10**10))
"""
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(PlannerError, match="--set per_device_train_batch_size"):
        to_plan(read(tmp_path / "train.py", None, Given(num_gpus=1)), {})
    assert not trap.exists()


def test_names_that_double_each_other_end(tmp_path: Path) -> None:
    lines = ["x0 = 1", *(f"x{i + 1} = x{i} + x{i}" for i in range(200))]
    (tmp_path / "train.py").write_text("\n".join([*lines, "t = SFTTrainer(model='m', args=SFTConfig(max_length=x200))"]))
    questions = read(tmp_path / "train.py", None, Given(num_gpus=1)).questions
    assert [one.name for one in questions] == ["max_length", "gradient_checkpointing", "bf16"]
