"""Exports of RL plans, read by the frameworks' own configuration code: every placement that a framework has.

One process per case: imports take most of the time. Where a package is missing, the test says NOT CHECKED.
"""

from __future__ import annotations

import os

import pytest

from planner.errors import PlannerError
from planner.rl.export.framework_check import NEEDED, check_export
from planner.rl.export.rl_folder import export_rl
from planner.trainers.checking.child import installed
from tests.rl_samples import rl_plan

LEVEL = {"verl": "validated"}
"""Level that an export reaches, where it is more than 'parsed'."""
CASES = [
    *(("verl", ahead, trainer) for ahead in (None, 1, 4) for trainer in ("verl", "megatron")),
    *(("openrlhf", ahead, "deepspeed") for ahead in (None, 0, 2)),
    *(("trl", ahead, "trl") for ahead in (None, 0, 4)),
    *(("nemo-rl", ahead, trainer) for ahead in (None, 1) for trainer in ("megatron", "automodel")),
]
WRONG = {
    "verl": ("overrides.txt", "actor_rollout_ref.rollout.n=", "actor_rollout_ref.rollout.number="),
    "openrlhf": ("arguments.txt", "--train.batch_size", "--train.batchsize"),
    "trl": ("grpo.yaml", "num_generations: 8", "num_generations: 7\nnumgenerations: 8"),
    "nemo-rl": ("overrides.txt", "grpo.num_prompts_per_step", "grpo.num_prompts_a_step"),
}


def skip_without(name: str) -> None:
    """A sentence where the framework is not there."""
    missing = [one for one in NEEDED[name] if not installed(one)]
    missing += ["$NEMO_RL"] if name == "nemo-rl" and not os.environ.get("NEMO_RL") else []
    if missing:
        pytest.skip(f"NOT CHECKED: {', '.join(missing)} missing here")


@pytest.mark.proof
@pytest.mark.parametrize(("name", "ahead", "trainer"), CASES)
def test_the_frameworks_own_code_takes_it(name, ahead, trainer, tmp_path):
    skip_without(name)
    made = export_rl(rl_plan(name, ahead, gpus=8, trainer=trainer), name, tmp_path / "run")
    found = check_export(made, tmp_path / "run")
    assert not found.problem, found.text()
    assert found.level == LEVEL.get(name, "parsed"), found.text()


@pytest.mark.proof
@pytest.mark.parametrize("name", WRONG)
def test_and_refuses_what_is_wrong(name, tmp_path):
    skip_without(name)
    made = export_rl(rl_plan(name, None, gpus=8), name, tmp_path / "run")
    file, right, wrong = WRONG[name]
    text = (tmp_path / "run" / file).read_text()
    assert right in text
    (tmp_path / "run" / file).write_text(text.replace(right, wrong, 1))
    assert check_export(made, tmp_path / "run").problem


def test_without_the_framework_names_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("planner.rl.export.framework_check.installed", lambda name: False)
    made = export_rl(rl_plan("verl", 1, gpus=8), "verl", tmp_path / "run")
    found = check_export(made, tmp_path / "run")
    assert (found.level, found.problem) == ("name known", "") and "hydra" in found.missing
    assert "planner runs no parser" in check_export(export_rl(rl_plan("slime", 1), "slime", tmp_path / "b"), tmp_path / "b").missing
    with pytest.raises(PlannerError):
        export_rl(rl_plan("verl", 1, gpus=8), "verl", tmp_path / "run")

