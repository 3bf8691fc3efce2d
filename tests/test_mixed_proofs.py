"""Mixed plans proven on real gloo processes with the exported script: gradients, uneven cuts, shares of the batch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_samples import DILOCO, SITES, UNEQUAL, export_of, pipeline, stage, two_kinds

from planner.cost.pipeline.schedule_walk import StageDurations, walked_time
from planner.layout import Schedule
from planner.mixed.cut import best_cut
from planner.mixed.export.mixed_folder import mixed_bundle
from planner.mixed.export.torch_bundle import settings
from planner.mixed.known_links import read_outer
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.shares import Replicas, water_fill
from planner.trainers.bundle.folder import write_bundle

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
pytestmark = [pytest.mark.proof, needs_torch]
LEVEL = 0.05
"""Within which a margin is as predicted, and replicas are level."""
SCALES = (1.0, 1.5, 3.0)
"""Of the sleeps, one try after the other: the cost of an action, longer on a busy machine and never shorter, is then smaller beside
them."""


def python(code: str, *arguments: str, limit: int = 200) -> list[Any]:
    """The JSON lines that a fresh process prints: ranks are forked, which a process that has computed must not do."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def exported(folder: Path, layout: MixedLayout, **more: Any) -> str:
    """The folder that ``plan export --to pytorch`` writes."""
    write_bundle(mixed_bundle(export_of(layout, **more), "pytorch", {"planner_mixed_plan": 1}), folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------ gradients

GRADIENTS = """
import json, sys
from tests.proofs.mixed_ranks import largest_difference
for folder in sys.argv[1:]:
    for zero in (0, 2):
        print(json.dumps(largest_difference(folder, zero=zero)))
wrong = json.load(open(sys.argv[1] + "/plan.json"))["replicas"]
for one in wrong:
    one["loss_scale"] = 1.0
print(json.dumps(largest_difference(sys.argv[1], replicas=wrong)))
"""


def test_gradients_of_unequal_shares_and_unlike_stages_are_those_of_one_rank(tmp_path: Path) -> None:
    """float64, the exported script: other cuts, shares, microbatch sizes and recompute in every replica; tensor parallelism with a
    pipeline that goes to lower ranks; tied embeddings; stages of the embedding or the head alone. Without loss scales they are
    not."""
    folders = [
        exported(tmp_path / "unequal", UNEQUAL),
        exported(tmp_path / "split", MixedLayout(pipelines=(
            pipeline(stage("small", 1, 2), stage("big", 3, 2), m=3), pipeline(stage("big", 4, 2), m=1, b=2)), zero=2)),
        exported(tmp_path / "tied", MixedLayout(pipelines=(
            pipeline(stage("small", 4), m=1), pipeline(stage("big", 4), m=3, count=2)), zero=2), sizes={"tied_embeddings": True}),
        exported(tmp_path / "ends", MixedLayout(pipelines=(
            pipeline(stage("small", 0), stage("big", 4), stage("small", 0), m=2, count=2),), zero=2, schedule="gpipe")),
    ]  # fmt: skip
    *rows, wrong = python(GRADIENTS, *folders)
    assert len(rows) == 2 * len(folders)
    for one in rows:
        assert one["gradient"] < 1e-12 and one["loss"] < 1e-12 and not one["missing"] and one["weights"] >= 38, one
    assert wrong["gradient"] > 0.1, "without the scales the replica with fewer sequences weighs too much"


TRAINING = """
import json, sys
from tests.proofs.mixed_ranks import losses
print(json.dumps(losses(sys.argv[1], 3)))
"""


def test_training_steps_are_those_of_one_rank(tmp_path: Path) -> None:
    """Clipping and the optimizer too: three steps of AdamW, losses and norms of gradients."""
    (found,) = python(TRAINING, exported(tmp_path / "run", UNEQUAL))
    assert len(found["alone"]) == 3 and found["alone"][0] != found["alone"][-1]
    for mine, theirs in zip(found["ranks"], found["alone"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


# ------------------------------------------------------------------------------------------------ times

TIMES = """
import json, sys
from tests.proofs.mixed_ranks import step_times
for folder in sys.argv[2:]:
    print(json.dumps(step_times(folder, json.loads(sys.argv[1]))))
"""


def slept(forward: dict[str, float], scale: float) -> str:
    """Seconds of a layer forward and backward, by kind."""
    return json.dumps({kind: (scale * one, 2.0 * scale * one) for kind, one in forward.items()})


def walked(cut: tuple[int, ...], forward: tuple[float, ...], microbatches: int) -> float:
    """Seconds of a pipeline whose stage j takes so long per layer forward, and twice that backward."""
    ahead = np.array(cut) * np.array(forward)
    passes = StageDurations(ahead, 2.0 * ahead, np.zeros(len(cut)))
    return float(walked_time(int(Schedule.ONE_F_ONE_B), len(cut), 1, microbatches, passes))


@pytest.mark.alone
def test_the_planned_uneven_cut_beats_the_even_one_by_the_predicted_margin(tmp_path: Path) -> None:
    """Twelve layers over a fast and a slow stage: the exact cut of ``best_cut`` against halves, layers that sleep 30 and 60 ms
    forward. Time of events (10 ms a pass) is small beside that; a busy machine lengthens both alike."""
    layers, microbatches, forward = 12, 6, (0.03, 0.06)
    costs = [np.full((layers + 1, layers + 1), 3.0 * one) * np.arange(layers + 1)[None, :] for one in forward]
    for one in costs:
        one[:, 0] = np.inf
    planned = best_cut(costs, microbatches)
    assert planned is not None and planned.layers == (8, 4)
    folders = [
        exported(tmp_path / str(cut[0]), MixedLayout(
            pipelines=(pipeline(stage("big", cut[0]), stage("small", cut[1]), m=microbatches),), zero=2),
            sizes={"num_layers": layers})
        for cut in (planned.layers, (6, 6))
    ]  # fmt: skip
    predicted = walked((6, 6), forward, microbatches) / walked(planned.layers, forward, microbatches)
    assert predicted > 1.3
    for scale in SCALES:
        found, even = python(TIMES, slept(dict(zip(("big", "small"), forward, strict=True)), scale), *folders)
        if abs(even["step"] / found["step"] / predicted - 1.0) < LEVEL:
            break
    assert even["step"] / found["step"] == pytest.approx(predicted, rel=LEVEL)
    assert found["step"] == pytest.approx(scale * walked(planned.layers, forward, microbatches), rel=2 * LEVEL)


@pytest.mark.alone
def test_water_filled_shares_level_the_replicas(tmp_path: Path) -> None:
    """A fast replica and one that takes 2.5 times as long: ten and four microbatches end together, seven each do not."""
    layers, forward, batch = 4, {"big": 0.02, "small": 0.05}, 14
    each = {kind: 3.0 * layers * one for kind, one in forward.items()}
    shares = water_fill([Replicas(fixed=0.0, each=each[kind]) for kind in ("big", "small")], batch)
    assert shares == [[10], [4]]

    def replicas(counts: tuple[int, int]) -> MixedLayout:
        return MixedLayout(
            pipelines=(pipeline(stage("big", layers), m=counts[0]), pipeline(stage("small", layers), m=counts[1])),
            zero=2,
        )

    longer = 7 * each["small"] / (10 * each["big"])
    folders = [exported(tmp_path / str(one[0]), replicas(one)) for one in ((10, 4), (7, 7))]
    for scale in SCALES:
        level, equal = python(TIMES, slept(forward, scale), *folders)
        fast, slow = level["replicas"]
        if max(abs(fast / slow - 1.0), abs(equal["step"] / level["step"] / longer - 1.0)) < LEVEL:
            break
    assert fast == pytest.approx(slow, rel=LEVEL)
    assert equal["replicas"][1] / equal["replicas"][0] > 2.0
    assert equal["step"] / level["step"] == pytest.approx(longer, rel=LEVEL)


def test_the_exported_scripts_start_under_torchrun(tmp_path: Path) -> None:
    """run.sh of every node of the plan, on this machine: two nodes with two processes and with one."""
    layout = MixedLayout(
        pipelines=(pipeline(stage("big", 3), stage("small", 1), m=2), pipeline(stage("big", 4), m=1)), zero=2
    )
    folder = exported(tmp_path / "run", layout, cluster=two_kinds(t=1))
    assert (
        sum(len(one["ranks"]) for replica in settings(export_of(layout))["replicas"] for one in replica["stages"]) == 3
    )
    from tests.proofs.forked_ranks import free_port

    port = free_port()
    text = (Path(folder) / "smoke.sh").read_text().replace("--plan plan.json", "--plan plan.json --device cpu")
    assert "--device cpu" in text
    (Path(folder) / "smoke.sh").write_text(text)
    nodes = [
        subprocess.Popen(
            ["bash", "smoke.sh"], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]  # fmt: skip
    printed = [one.communicate(timeout=150) for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], printed
    out = "".join(out for out, _ in printed)
    assert (
        "step 5 loss" in out
        and "replica 0 stage 1: " in out
        and "loss scale 1.33333" in out
        and "loss scale 0.666667" in out
    )


# ------------------------------------------------------------------------------------------------ local updates


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="NOT RUN: torchft is not installed (pip install torchft)")
@pytest.mark.parametrize("outer", ["diloco:10", "streaming_diloco:20:32:2"])
def test_exported_sites_average_as_local_updates_say(tmp_path: Path, outer: str) -> None:
    """torchft on gloo with the settings of the exported files: weights after the first average are those by hand, on both sites."""
    from torchft._torchft import LighthouseServer

    layout = replace(DILOCO, outer=read_outer(outer))
    made = mixed_bundle(export_of(layout, SITES), "torchtitan", {"planner_mixed_plan": 1})
    write_bundle(made, tmp_path / "run")
    limits = {name: str(one.value) for name, one in made.rendered.environment.items() if name.startswith("TORCHFT")}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    words = [sys.executable, "-m", "tests.proofs.local_updates"]
    try:
        running = [
            subprocess.Popen(
                [*words, str(site), str(tmp_path / f"run/site-{site}/diloco_config.py"), lighthouse.address()],
                env={**os.environ, **limits}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for site in (0, 1)
        ]  # fmt: skip
        for one in running:
            text, wrong = one.communicate(timeout=120)
            found = re.search(r"averages (\d+) difference (\S+)", text)
            assert found is not None, wrong[-2000:]
            assert found[1] == "1" and float(found[2]) < 1e-12
    finally:
        lighthouse.shutdown()
