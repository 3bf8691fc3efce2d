"""plan export of a mixed plan file, from Python and as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from mixed_samples import ALIKE, DILOCO, SITES, UNEQUAL, export_of

from planner import api
from planner.commands.main import main
from planner.errors import PlannerError
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import priced_plan


def plan_file(folder: Path, layout: MixedLayout, trainer: str = "torchtitan", **more: object) -> Path:
    """A mixed plan of the tiny model as its file."""
    mixed = export_of(layout, trainer=trainer, **more)  # type: ignore[arg-type]
    path = folder / "mixed.yaml"
    priced_plan(mixed.job, trainer, layout).save(path)
    return path


def test_a_mixed_plan_is_exported_by_the_command(tmp_path: Path) -> None:
    path, folder = plan_file(tmp_path, UNEQUAL), tmp_path / "run"
    done = CliRunner().invoke(main, ["export", str(path), "--to", "pytorch", "--output", str(folder), "--check"])
    assert done.exit_code == 0, done.output
    assert (
        "mixed_train.py" in done.output and "note: Loss scales R m b / G of the pipelines: 1, 1.5, 0.5" in done.output
    )
    assert "not checked: planner runs no code of pytorch on mixed plans" in done.output
    assert [one["loss_scale"] for one in json.loads((folder / "plan.json").read_text())["replicas"]] == [1.0, 1.5, 0.5]
    assert api.plan_kind(folder / "plan.yaml") == "mixed" and api.load_mixed(folder / "plan.yaml").file.layout == UNEQUAL
    again = CliRunner().invoke(main, ["export", str(path), "--to", "pytorch", "--output", str(folder)])
    assert again.exit_code == 2 and "is not empty" in again.output


def test_a_refusal_is_one_sentence_with_the_nearest_plan(tmp_path: Path) -> None:
    path = plan_file(tmp_path, UNEQUAL)
    done = CliRunner().invoke(main, ["export", str(path), "--to", "torchtitan", "--output", str(tmp_path / "run")])
    assert done.exit_code == 2 and "The nearest plan that it runs is" in done.output and not (tmp_path / "run").exists()
    done = CliRunner().invoke(
        main, ["export", str(path), "--to", "pytorch", "--output", str(tmp_path / "x"), "--launcher", "ray"]
    )
    assert done.exit_code == 2 and "starts on each node by hand, or by srun" in done.output
    with pytest.raises(PlannerError, match="target of a mixed plan"):
        api.load_mixed(path).export("deepspeed", tmp_path / "y")


def test_local_updates_are_exported_for_torchft(tmp_path: Path) -> None:
    path = plan_file(tmp_path, DILOCO, cluster=SITES)
    made = api.load_mixed(path).export("torchtitan", tmp_path / "run")
    assert {"site-0/diloco_config.py", "site-1/run.sh", "README.md"} <= set(made.files)
    assert "east: " in made.check() and "west: " in made.check()


def test_megatron_gets_the_uneven_cut(tmp_path: Path) -> None:
    path = plan_file(tmp_path, ALIKE, trainer="megatron")
    made = api.load_mixed(path).export("megatron", tmp_path / "run")
    assert "'Et*3|tL'" in (tmp_path / "run" / "arguments.sh").read_text()
    assert not made.warnings
