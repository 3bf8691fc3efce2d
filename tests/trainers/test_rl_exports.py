"""Exports of RL plans, read by the frameworks' own configuration code: every placement that a framework has.

One process per case: imports take most of the time. Where a package is missing, the test says NOT CHECKED.
"""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlannerError
from planner.model import load_model
from planner.rl.export.framework_check import check_export, missing
from planner.rl.export.rl_folder import export_rl
from tests.rl_samples import rl_plan

LEVEL = {"trl": "parsed", "nemo-rl": "parsed"}
"""Level that an export reaches, where it is less than 'validated'."""
LORA = {"work": {"lora_rank": 16}}
VALUES = {"work": {"algorithm": "ppo", "critic": load_model("qwen3-8b")}}
EXPERTS = {"trainer": "megatron", "work": {"model": load_model("qwen3-30b-a3b")}, "actor": {"tp": 2, "dp": 2, "ep": 4, "etp": 1}}
"""A mixture of experts on four GPUs that train."""
CASES: list[tuple[str, int | None, dict[str, Any]]] = [
    *(("verl", ahead, {"trainer": trainer}) for ahead in (None, 1, 4) for trainer in ("verl", "megatron")),
    ("verl", 1, LORA), ("verl", 1, VALUES), ("verl", 4, EXPERTS),
    ("verl", 1, {"gpus": 16, "place": {"mode": "hybrid", "train_gpus": 8, "generate_gpus": 16, "partial": True}}),
    *(("openrlhf", ahead, {}) for ahead in (None, 0, 2)),
    ("openrlhf", None, VALUES), ("openrlhf", 2, LORA), ("openrlhf", 0, VALUES | {"gpus": 24, "place": {"critic_gpus": 8}}),
    *(("trl", ahead, {}) for ahead in (None, 0, 4)),
    *(("nemo-rl", ahead, {"trainer": trainer}) for ahead in (None, 1) for trainer in ("megatron", "automodel")),
    ("nemo-rl", 1, LORA), ("nemo-rl", 0, EXPERTS),
    *(("areal", ahead, {}) for ahead in (None, 0, 4)),
    ("areal", 1, EXPERTS), ("areal", 1, VALUES), ("areal", 2, LORA | {"place": {"sync": "disk"}}),
    ("areal", 2, VALUES | {"gpus": 24, "place": {"critic_gpus": 8}}), ("areal", 2, {"generate_hardware": "h200-sxm"}),
    *(("prime-rl", ahead, {}) for ahead in (0, 1, 4)),
    ("prime-rl", 4, {"gpus": 32}), ("prime-rl", 1, {"actor": {"recompute": 0}}),
    ("prime-rl", 2, LORA | {"place": {"sync": "disk"}}),
    *(("slime", ahead, {}) for ahead in (None, 0, 1, 4)),
    ("slime", 1, EXPERTS), ("slime", 1, VALUES), ("slime", 1, {"work": {"algorithm": "reinforce++"}}),
    ("slime", 4, {"place": {"sync": "delta"}}),
]  # fmt: skip
WRONG = {
    "verl": ("overrides.txt", "actor_rollout_ref.rollout.n=", "actor_rollout_ref.rollout.number="),
    "openrlhf": ("arguments.txt", "--train.batch_size", "--train.batchsize"),
    "trl": ("grpo.yaml", "num_generations: 8", "num_generations: 7\nnumgenerations: 8"),
    "nemo-rl": ("overrides.txt", "grpo.num_prompts_per_step", "grpo.num_prompts_a_step"),
    "areal": ("areal.yaml", "max_head_offpolicyness", "max_head_off"),
    "prime-rl": ("rl.toml", "max_off_policy_steps", "max_off_steps"),
    "slime": ("arguments.txt", "--max-tokens-per-gpu", "--max-tokens-a-gpu"),
}


def skip_without(name: str) -> None:
    """A sentence where the framework is not there."""
    if lacks := missing(name):
        pytest.skip(f"NOT CHECKED: {', '.join(lacks)} missing here")


@pytest.mark.proof
@pytest.mark.parametrize(("name", "ahead", "changes"), CASES)
def test_the_frameworks_own_code_takes_it(name, ahead, changes, tmp_path):
    skip_without(name)
    made = export_rl(rl_plan(name, ahead, **{"gpus": 8, **changes}), name, tmp_path / "run")
    found = check_export(made, tmp_path / "run")
    assert not found.problem, found.text()
    assert found.level == LEVEL.get(name, "validated"), found.text()


@pytest.mark.proof
@pytest.mark.parametrize("name", WRONG)
def test_and_refuses_what_is_wrong(name, tmp_path):
    skip_without(name)
    made = export_rl(rl_plan(name, 1 if name == "prime-rl" else None, gpus=8), name, tmp_path / "run")
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
    assert "$SLIME missing" in check_export(export_rl(rl_plan("slime", 1), "slime", tmp_path / "b"), tmp_path / "b").missing
    with pytest.raises(PlannerError):
        export_rl(rl_plan("verl", 1, gpus=8), "verl", tmp_path / "run")

