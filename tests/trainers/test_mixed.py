"""Megatron-LM's and torchtitan's own code on exports of mixed plans: uneven cuts, sites that average with torchft."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mixed_samples import DILOCO, LLAMA_CUT, SITES, export_of, pipeline, stage

from planner.mixed.export.cut_job import cut_job
from planner.mixed.export.mixed_folder import mixed_bundle
from planner.mixed.mixed_layout import MixedLayout
from planner.trainers.bundle.folder import write_bundle
from planner.trainers.checking.child import check_many

PLAN = {"planner_mixed_plan": 1}


def installed(name: str) -> None:
    """Skip, loudly, where the package is missing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"NOT CHECKED: {name} is not installed")


CUTS = [
    LLAMA_CUT,
    MixedLayout(zero=1, pipelines=(
        pipeline(stage("big", 25, 2, recompute="full"), stage("small", 7, 2, recompute="full"), m=16, count=2),)),
    MixedLayout(zero=1, pipelines=(
        pipeline(stage("big", 10), stage("big", 12), stage("small", 6), stage("small", 4), m=8, count=2),)),
    MixedLayout(pipelines=(pipeline(stage("small", 0, 2), stage("big", 32, 2), m=8, count=1),), zero=1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "package", "zero"), [("megatron", "megatron", 1), ("torchtitan", "torchtitan", 2)])
def test_uneven_cuts_are_accepted_with_the_planners_stages(name: str, package: str, zero: int, tmp_path: Path) -> None:
    """Their parsers and validators, their process groups, and the layers that they give each stage."""
    installed(package)
    pairs = []
    for number, layout in enumerate(CUTS):
        if name == "torchtitan" and not all(one.layers for one in layout.pipelines[0].stages):
            continue
        mixed = export_of(dataclasses.replace(layout, zero=zero), trainer=name, model="llama-8b")
        folder = tmp_path / str(number)
        write_bundle(mixed_bundle(mixed, name, PLAN), folder)
        pairs.append((cut_job(mixed), folder))
    for (job, _), one in zip(pairs, check_many(name, pairs), strict=True):
        assert not one.problem and not one.missing and one.level == "groups built", (job.cut, one.text())


PARSE = """
import sys
from planner.trainers.torchtitan import check
check.prepare()
from planner.trainers.checking.import_standins import pretend_gpu, stand_in
pretend_gpu(9, 0)
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--module", "diloco_config", "--config", sys.argv[1]])
ft = config.fault_tolerance
print(type(config).__qualname__, ft.enable, ft.semi_sync_method, ft.sync_steps, ft.num_fragments, ft.should_quantize, ft.replica_id,
      ft.group_size, config.training.global_batch_size, config.training.steps, type(config.optimizer).__module__)
"""


def test_sites_are_parsed_as_torchft_trainers(tmp_path: Path) -> None:
    installed("torchtitan")
    write_bundle(mixed_bundle(export_of(DILOCO, SITES), "torchtitan", PLAN), tmp_path / "run")
    for number, batch in enumerate((8, 4)):
        folder = tmp_path / "run" / f"site-{number}"
        path = os.pathsep.join(
            [str(folder), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        )
        for config in ("plan", "smoke"):
            done = subprocess.run(
                [sys.executable, "-c", PARSE, config], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                text=True, timeout=240, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
            words = done.stdout.split()[-11:]
            assert words[:8] == ["FaultTolerantTrainer.Config", "True", "diloco", "10", "2", "True", str(number), "2"]
            assert words[8] == str(2 * batch) and words[10] == "torchtitan.experiments.torchft.optimizer"
            assert config == "plan" or words[9] == "20"
