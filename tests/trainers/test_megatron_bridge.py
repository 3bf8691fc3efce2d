"""Megatron-Bridge's own checks on every exported plan, and on files that are wrong. Needs it beside megatron-core."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainers.plans import jobs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None,
    reason="NOT CHECKED: megatron-bridge is not beside megatron-core",
)
TARGET = load_target("megatron-bridge")
WRONG = (
    (
        "    cfg.train.micro_batch_size = ",
        "    cfg.train.micro_batch_size = 7 * ",
        "must be divisible by eval_micro_batch_size",
    ),
    ("        tensor_model_parallel_size=", "        tensor_model_parallel_sizes=", "unexpected keyword argument"),
    ("        tensor_model_parallel_size=", "        tensor_model_parallel_size=3 * ", "divisible"),
    ("    cfg.train.global_batch_size = ", "    cfg.train.global_batch_size = 2 * ", "global batch"),
)
"""Text of the file, what it becomes, what is said about it."""


def written(job: ExportJob, folder: Path, old: str = "", new: str = "") -> tuple[ExportJob, Path]:
    """The file of one plan, with a change."""
    folder.mkdir(parents=True)
    text = TARGET.render(job).files["plan_config.py"]
    assert old in text
    (folder / "plan_config.py").write_text(text.replace(old, new, 1) if old else text)
    return job, folder


def test_every_plan_is_accepted_and_what_is_wrong_is_not(tmp_path: Path) -> None:
    """runtime_config_update, validate; batch, layers of every virtual stage. One process: its import takes most of the time."""
    cases = [job for job in jobs() if job.plan.trainer in TARGET.trainers and not TARGET.refusals(job)]
    assert len(cases) >= 200
    dense = next(job for job in cases if job.model.num_heads % 3 and not job.model.is_moe)
    pairs = [written(job, tmp_path / str(number)) for number, job in enumerate(cases)]
    pairs += [written(dense, tmp_path / f"wrong{i}", old, new) for i, (old, new, _) in enumerate(WRONG)]
    results = check_many("megatron-bridge", pairs)
    said = [f"{job.model.name} on {job.cluster.num_gpus} {job.layout.to_dict()}: {one.text()}"
            for one, job in zip(results, cases, strict=False) if one.level != TARGET.level or one.problem]  # fmt: skip
    assert not said, "\n".join(said[:8])
    for one, (_, _, says) in zip(results[len(cases) :], WRONG, strict=True):
        assert says in one.problem, (says, one.text())
