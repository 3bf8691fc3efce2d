"""What draw 43 showed of torchtune: published configurations by release, and those that are neither here nor published."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.versions import pinned
from planner.trainers.torchtune import published_configs

SINGLE = "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device"


def _read(folder: Path, command: str, **settings: str) -> Reading:
    return read(written(folder, f"{command}\n", "start.sh"), None, Given(settings=settings, sequence_length=512))


@pytest.mark.parametrize("command", ["pip install --pre torchtune --extra-index-url x", "pip install 'torchtune>=0.3'"])
def test_a_published_configuration_of_an_open_release_asks_for_it(tmp_path: Path, command: str) -> None:
    written(tmp_path, f"{command}\n", "setup.sh")
    found = _read(tmp_path, SINGLE)
    assert asked_for(found) == ["torchtune"]
    assert "nothing pins to one: up to 0.3.1 configuration 'llama3_1/8B_lora_single_device' has grad" in found.questions[0].about
    assert "gradient_accumulation_steps=64 instead of 8" in found.questions[0].about


@pytest.mark.parametrize(("version", "steps", "targets", "loss"), [
    ("0.2.1", 64, "qv", "full"), ("0.3.0", 64, "qv", ""), ("0.3.1", 64, "qv", ""), ("0.4.0", 8, "all", ""), ("0.6.1", 8, "all", ""),
    ("0.7.0", 8, "all", ""),
])  # fmt: skip
def test_a_published_configuration_as_its_release_has_it(tmp_path: Path, version: str, steps: int, targets: str, loss: str) -> None:
    said = _read(tmp_path, SINGLE, torchtune=version)
    written(tmp_path, f"pip install torchtune=={version}\n", "setup.sh")
    pinned = _read(tmp_path, SINGLE)
    for found in (said, pinned):
        assert asked_for(found) == []
        assert (found.fields["num_microbatches"], found.lora_targets) == (steps, targets)
        assert ("loss=full" in found.trainer) == (loss == "full")
    assert "as torchtune" in said.notes[-1]
    assert (f"as torchtune {version[:3]}" in " ".join(pinned.notes)) == (steps == 64)


@pytest.mark.parametrize(("pin", "steps", "choices"), [
    ("torchtune>=0.3,<0.4", 64, []), ("torchtune<0.3", 64, []), ("torchtune>=0.3.1,<0.4.0", 64, []),
    ("torchtune<=0.3", None, ["0.2", "0.3.0"]), ("torchtune>=0.5,<0.4", None, ["0.2", "0.3.1", "main"]),
    ("torchtune>=0.3,<0.5", None, ["0.3.1", "0.4"]),
])  # fmt: skip
def test_the_releases_between_two_bounds(tmp_path: Path, pin: str, steps: int | None, choices: list[str]) -> None:
    written(tmp_path, f"{pin}\n", "requirements.txt")
    found = _read(tmp_path, SINGLE)
    assert [one for asked in found.questions for one in asked.choices] == choices
    assert steps is None or found.fields["num_microbatches"] == steps


@pytest.mark.parametrize(("line", "asked"), [
    ("pip install -e ../torchtune\ncd ../apex\ngit checkout 0.3.1", 1),
    ("cd torchtune && pip install . && cd .. && git checkout 0.3.1", 1),
    ("git clone https://example.com/torchtune\ncd torchtune\ngit checkout v0.3.1", 0),
    ("cd src/torchtune\ngit checkout v0.3.1", 0), ("We tested to install with torchtune==0.3.1.", 1),
    ("pip install torchtune<...>", 1), ("# pip install torchtune==0.3.1", 1),
    ("RUN apt-get update && \\\n  python -m pip install -U \\\n  torchtune==0.3.1", 0), ("uv pip install torchtune==0.3.1", 0),
])  # fmt: skip
def test_commands_that_install_a_release(tmp_path: Path, line: str, asked: int) -> None:
    written(tmp_path, f"{line}\n", "setup.sh")
    assert asked_for(_read(tmp_path, SINGLE)) == ["torchtune"] * asked


def test_a_class_that_only_moved_to_another_module_is_no_other_plan() -> None:
    older = library.read_yaml(Path(published_configs.__file__).with_name("older_configs.yaml"))
    for name, releases in older.items():
        for place, value in (one for differs in releases.values() for one in differs.items() if one[0].endswith("_component_")):
            today = published_configs.known()[name][place.partition(".")[0]]["_component_"]
            assert str(value).rpartition(".")[2] != today.rpartition(".")[2]


def test_any_patch_of_a_version_is_a_range(tmp_path: Path) -> None:
    written(tmp_path, "torchtune==0.3.*\n", "requirements.txt")
    found = _read(tmp_path, "tune run lora_finetune_single_device --config llama3/8B_qlora_single_device")
    assert [one.choices for one in found.questions] == [("0.3.0", "0.3.1")]


def test_releases_that_agree_are_not_asked_about(tmp_path: Path) -> None:
    over = ("gradient_accumulation_steps=4 model.lora_attn_modules=[q_proj] model.apply_lora_to_mlp=false "
            "loss=torch.nn.CrossEntropyLoss")  # fmt: skip
    assert asked_for(_read(tmp_path, f"{SINGLE} {over}")) == []
    written(tmp_path, "torchtune>=0.4\n", "requirements.txt")
    assert asked_for(_read(tmp_path, SINGLE)) == []


def test_a_release_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"a release of torchtune is one of 0\.1"):
        _read(tmp_path, SINGLE, torchtune="new")


def test_a_configuration_that_is_neither_here_nor_published_is_asked_for_with_the_rest(tmp_path: Path) -> None:
    command = "tune run --nproc_per_node 8 lora_finetune_distributed --config /bucket/70B_lora.yaml batch_size=1"
    found = read(written(tmp_path, f"{command}\n", "start.sh"))
    assert (asked_for(found), found.sequence_length) == (["config", "torchtune"], None)
    assert found.questions[0].choices[1].endswith("/70B_lora")
    found = _read(tmp_path, command, config="llama3/70B_lora", torchtune="0.6")
    assert (asked_for(found), found.num_gpus, found.fields["micro_batch_size"], found.lora_rank) == ([], 8, 1, 16)
    assert found.model is not None and found.model.name == "llama-3-70b"
    text = "model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\noptimizer: {_component_: torch.optim.AdamW}\n"
    written(tmp_path, text, "own/mine.yaml")
    found = _read(tmp_path, command.replace("lora_", "full_", 1), config="own/mine.yaml", torchtune="0.6")
    assert found.model is not None and (asked_for(found), found.model.name) == ([], "llama-3-8b")


def test_a_configuration_that_a_variable_names_is_asked_for_by_it(tmp_path: Path) -> None:
    command = 'tune run --nproc_per_node 8 full_finetune_distributed --config "$RECIPE"'
    found = read(written(tmp_path, f"{command}\n", "start.sh"))
    assert asked_for(found) == ["RECIPE", "torchtune"] and found.sequence_length is None
    found = _read(tmp_path, command, RECIPE="llama3_1/8B_full", torchtune="0.6")
    assert found.model is not None and (asked_for(found), found.model.name) == ([], "llama-3.1-8b")


@pytest.mark.parametrize("text", ["torchtune=={}\n", "git clone own/torchtune\ncd torchtune\ngit checkout v0.{}\n"])
def test_a_version_of_thousands_of_digits_is_none_that_stops_an_import(tmp_path: Path, text: str) -> None:
    """Python converts no more than 4,300 digits."""
    low, _ = pinned(written(tmp_path, text.format("9" * 5000), "requirements.txt"), "torchtune") or ((), ())
    assert all(one < 10**60 for one in low)
