"""plan validate of mixed plans: every unlike stage on fake tensors, or alone on this machine's device."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from mixed_samples import TINY, UNEQUAL, export_of, pipeline, stage

from planner.commands.main import main
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import priced_plan

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
pytestmark = needs_torch
UNLIKE = MixedLayout(
    pipelines=(
        pipeline(stage("big", 5, 2), stage("small", 3, 2), m=6),
        pipeline(stage("big", 8, 2, recompute="full"), m=3),
    ),
    zero=2,
)
SIZES = {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 2816,
         "vocab_size": 8192, "max_sequence_length": 2048}  # fmt: skip


def plan_file(folder: Path, layout: MixedLayout, **more: Any) -> Path:
    """A mixed plan as its file."""
    mixed = export_of(layout, **more)
    priced_plan(mixed.job, mixed.trainer, layout).save(folder / "mixed.yaml")
    return folder / "mixed.yaml"


def test_unlike_stages_are_found_once_each() -> None:
    from planner.lab.run.mixed_stages import tasks_of

    mixed = export_of(UNLIKE, sizes=SIZES, sequence_length=1024)
    found, changes, unchecked = tasks_of(priced_plan(mixed.job, "torchtitan", UNLIKE))
    assert [(one.pipeline, one.number, one.kind, one.layers, one.rank) for one in found] == [
        (0, 0, "big", 5, 0), (0, 1, "small", 3, 4), (1, 0, "big", 8, 0),
    ]  # fmt: skip
    assert not changes and unchecked[0].startswith("sends between stages")
    split = found[1].split
    assert (split.pp, split.dp, split.num_microbatches, split.recompute) == (2, 2, 6, "none")
    assert [one.layers for one in split.stages] == [(0, 1, 2, 3, 4), (5, 6, 7)]
    assert found[2].split.recompute == "full" and found[2].split.num_microbatches == 3
    for one in found:
        assert sum(one.predicted[name] for name in one.predicted if name != "peak") == pytest.approx(
            one.predicted["peak"]
        )
    same = MixedLayout(pipelines=(pipeline(stage("big", 4), m=2, count=2), pipeline(stage("big", 4), m=2)), zero=2)
    assert len(tasks_of(priced_plan(export_of(same).job, "torchtitan", same))[0]) == 1


def test_a_plan_of_megatron_is_run_as_torchtitans_and_that_is_said() -> None:
    from planner.lab.run.mixed_stages import tasks_of

    layout = MixedLayout(pipelines=(pipeline(stage("big", 3), stage("small", 1)),), zero=1)
    _, changes, _ = tasks_of(priced_plan(export_of(layout, trainer="megatron").job, "megatron", layout))
    assert changes == [
        "trainer torchtitan instead of megatron, whose memory the torch model has not",
        "zero 2 instead of 1",
    ]


def test_what_cannot_be_validated_is_one_sentence(tmp_path: Path) -> None:
    path = plan_file(tmp_path, UNEQUAL)
    for words, sentence in (
        (["--rung", "full"], "--rung full runs ranks together, and a mixed plan has unlike ones on unlike GPUs"),
        (
            ["--rung", "rank"],
            "--rung rank needs a device of the plan, which has big and small, and this machine has none",
        ),
        (["--top", "2"], "--top is of plans of one kind of GPU"),
    ):
        done = CliRunner().invoke(main, ["validate", str(path), "--device", "cpu", *words])
        assert done.exit_code == 2 and sentence in done.output, done.output


@pytest.mark.proof
def test_memory_of_unlike_stages_is_what_torch_takes(tmp_path: Path) -> None:
    """Level meta: peaks of three stages of other lengths, shares and recompute within 5 % of the price."""
    path = plan_file(tmp_path, UNLIKE, sizes=SIZES, sequence_length=1024)
    output = tmp_path / "validation.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "planner", "validate", str(path), "--rung", "meta", "--json", "--output", str(output)], cwd=ROOT,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["rung"] == "meta" and len(found["stages"]) == 3
    for one in found["stages"]:
        rows = {row["what"]: row for row in one["memory"]}
        assert abs(rows["peak"]["error"]) < 0.05 and rows["peak"]["inside"], one
        parts = [row for what, row in rows.items() if what != "peak"]
        for side in ("predicted_gib", "measured_gib"):
            assert sum(row[side] for row in parts) == pytest.approx(rows["peak"][side])
    assert yaml.safe_load(output.read_text())["stages"] == found["stages"]


ALONE = """
import json, sys
from pathlib import Path
import yaml
sys.path.insert(0, "tests")
from mixed_samples import TINY, pipeline, stage
from planner.cluster_file import ClusterFile, NodeKind
from planner.lab.profile.definitions import flop, moved_bytes
from planner.lab.run.mixed_stages import validate_stages
from planner.layout import Layout
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import job_of, priced_plan
from planner.model import ModelSpec
from planner.workload import Workload
from tests.proofs.processor_time import Asked, profiled

points = Asked(layout=Layout(num_microbatches=2)).points()
made = profiled(points, [[flop(one) / 50e9 + moved_bytes(one) / 8e9 + 1e-5] for one in points], 1.0)
path = Path(sys.argv[1]) / "here.yaml"
hidden = ("provenance", "measurements", "sources")
path.write_text(yaml.safe_dump({name: value for name, value in made.to_dict().items() if name not in hidden}))
here, away = NodeKind(kind="here", hardware=str(path), count=2, gpus=2), NodeKind(kind="away", hardware="l40s", count=1, gpus=2)
cluster = ClusterFile(nodes=(here, away))
layout = MixedLayout(pipelines=(pipeline(stage("here", 3), stage("away", 1), m=3), pipeline(stage("here", 4), m=2)), zero=2)
work = Workload(model=ModelSpec(**TINY), sequence_length=16, global_batch_size=5, precision="fp32")
plan = priced_plan(job_of(work, cluster, "torchtitan"), "torchtitan", layout)
print(json.dumps(validate_stages(plan, "auto", "cpu", steps=(1, 2))))
"""


@pytest.mark.proof
def test_stages_of_this_device_are_run_alone(tmp_path: Path) -> None:
    """Level rank on this processor, whose profile one kind has: its stages are run, the other kind's are said to be unchecked."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rung"] == "rank" and [(one["kind"], one["layers"]) for one in found["stages"]] == [
        ("here", 3),
        ("here", 4),
    ]
    assert any("stages on away: not this machine's device" in one for one in found["unchecked"])
    for one in found["stages"]:
        assert {row["pass"] for row in one["passes"]} == {"F", "B"} and all(
            row["measured_s"] > 0 for row in one["passes"]
        )
        assert next(row for row in one["memory"] if row["what"] == "peak")["measured_gib"] > 0
    first, second = found["stages"]
    assert first["passes"][0]["error"] is None, "its price has a send in it"
    assert second["passes"][0]["error"] is not None
    assert TINY["num_layers"] == second["layers"]
