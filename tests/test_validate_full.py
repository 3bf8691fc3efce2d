"""plan validate --rung full: runs through torchrun on this CPU, one of them with a killed rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh import fresh
from validate_samples import ROOT, alive, needs_torch, plan_file, start, steps_written

from planner.lab.run.comparison import BOUNDS
from planner.lab.run.eager_pricing import as_run, computed, processor_seconds
from planner.lab.run.levels import question
from planner.lab.run.record import FOUND
from planner.plan_file import load_plan
from planner.rules import Job
from planner.timeline.priced_plan import price

pytestmark = pytest.mark.proof


@needs_torch
@pytest.mark.alone
def test_a_plan_runs_on_two_processes_and_is_compared(tmp_path: Path) -> None:
    plan_file(tmp_path)
    here = profile_here(tmp_path)
    plan, output, trace = plan_file(tmp_path, hardware=here), tmp_path / "validation.yaml", tmp_path / "step.json"
    (tmp_path / "ranks").mkdir()
    process = start(tmp_path / "ranks", str(plan), "--output", str(output), "--json", "--steps", "3", "--warmup", "1",
                    "--trace", str(trace))  # fmt: skip
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    found = json.loads(out)
    assert found == yaml.safe_load(output.read_text())
    assert list(found)[6:-1] == list(FOUND), "the order of the file"
    assert error.startswith(
        "2 ranks as processes on this CPU: a comparison with one process, 1 warm and 3 measured steps."
    )
    assert error.count("\n") == 1 and "60 s for each of 4 steps" in error
    assert (found["rung"], found["outcome"], found["failure"]) == ("full", "completed", None)
    assert found["parity"]["equal"] and found["parity"]["largest_error"] < 1e-12
    assert found["parity"]["compared_parameters"] == 2 * 9 + 3  # a layer on each stage, embedding, norm and head
    times = {row["what"]: row for row in found["times"]}
    assert {"step", "forward_backward", "optimizer", "replayed_step"} <= set(times)
    assert (
        len(found["steps"]["seconds"]) == 3
        and times["step"]["measured_seconds"] == sorted(found["steps"]["seconds"])[1]
    )
    low, high = times["step"]["interval"]
    assert low < times["step"]["predicted_seconds"] < high
    _check_passes(found, plan)
    near, tries = _near(found), 0
    while not near and tries < 4:  # others came between
        again = start(tmp_path / "ranks", str(plan), "--json", "--steps", "5", "--warmup", "1", "--no-parity")
        near, tries = _near(json.loads(again.communicate(timeout=280)[0])), tries + 1
    assert near, found["stages"]
    _check_memory(found["ranks"])
    low, high = 0.1 * 6.3, 2 * 6.3  # ln of 512 tokens is 6.2
    assert all(low < one < high for one in found["rates"]["loss"])
    tokens = found["rates"]["tokens_per_second"]["measured"]
    assert tokens == pytest.approx(4 * 128 / times["step"]["measured_seconds"])
    files = [Path(one["file"]) for one in found["traces"]]
    assert files == [trace, tmp_path / "step.stage1.json", tmp_path / "step.predicted.json"]
    assert all(json.loads(file.read_text())["traceEvents"] for file in files)
    left = [one.name for one in (tmp_path / "ranks").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")], left


def profile_here(folder: Path) -> Path:
    """A profile of one core, as far as a few seconds reach."""
    output = folder / "here.yaml"
    command = [sys.executable, str(ROOT / "cli.py"), "profile", "--device", "cpu", "--ranks", "1", "--only", "compute",
               "--budget", "3s", "--model", str(folder / "little.yaml"), "--output", str(output)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return output


def _check_passes(found: dict[str, Any], plan: Path) -> None:
    """Priced as chains of kernels with the host's work that was measured, and not as the plan's compiled trainer."""
    asked, said = question(load_plan(plan)), found["as_run"]
    assert said["sentences"][0].startswith("priced as it ran: nothing is compiled on a CPU, so norms, SwiGLU, rotary")
    assert said["yardstick"]["slowed"] > 0.3 and said["profile_error"] > 0 and len(said["sentences"]) == 4
    host = {
        kind: (said["host"][name]["layer_seconds"], said["host"][name]["ends_seconds"])
        for kind, name in (("F", "forward"), ("B", "backward"))
    }
    assert min(each for each, _ in host.values()) > 50e-6, "a layer is some dozens of calls from Python"
    priced = {
        chains: price(
            Job(workload=asked.workload, cluster=asked.cluster,
                trainer=as_run(asked.trainer, asked.split, on_cpu=True) if chains else asked.trainer), asked.layout,
        )
        for chains in (True, False)
    }  # fmt: skip
    predicted = processor_seconds(priced[True], asked.split, host)
    passes = {(row["stage"], row["kind"]): row for row in found["stages"]}
    assert set(passes) == {(0, "F"), (0, "B"), (1, "F"), (1, "B")}
    for (stage, kind), row in passes.items():
        assert row["predicted_seconds"] == pytest.approx(float(predicted[kind][stage]), rel=1e-6)
        assert row["currency"] == "processor" and row["measured_seconds"] > 0
    fused = computed(priced[False])
    apart = [abs(float(fused[kind][stage]) / row["predicted_seconds"] - 1) for (stage, kind), row in passes.items()]
    assert max(apart) > 0.05, "the compiled trainer is another price"


def _near(found: dict[str, Any]) -> bool:
    """Passes of a few milliseconds, most of it the host's, on a machine that others use: within a factor of two."""
    return all(-0.5 < row["error"] < 1.0 for row in found["stages"])


def _check_memory(ranks: list[dict[str, Any]]) -> None:
    """States to the byte: 2 layers on each stage, the embedding on the first, norm and head on the last, fp32 and two moments."""
    h, f, vocabulary = 128, 256, 512
    layer = 2 * h * h + 2 * h * 64 + 3 * h * f + 2 * h
    sizes = [2 * layer + vocabulary * h, 2 * layer + vocabulary * h + h]
    for one, size in zip(ranks, sizes, strict=True):
        rows = {row["what"]: row for row in one["memory"]}
        assert round(rows["weights"]["measured_gib"] * 2**30) == 4 * size
        assert round(rows["gradients"]["measured_gib"] * 2**30) == 4 * size
        assert rows["optimizer_states"]["measured_gib"] * 2**30 == pytest.approx(8 * size, rel=1e-3)
        for name in ("activations", "peak"):
            assert abs(rows[name]["error"]) < BOUNDS[name], (
                name,
                rows[name],
            )  # fp32 weights and logits are twice as large
        assert (
            rows["resident"]["measured_gib"]
            > 0.1
            > rows["peak"]["measured_gib"]
            > rows["optimizer_states"]["measured_gib"]
        )


@needs_torch
def test_a_rank_that_is_killed_is_named_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    plan, output = plan_file(tmp_path), tmp_path / "validation.yaml"
    folder = tmp_path / "ranks"
    folder.mkdir()
    process = start(folder, str(plan), "--output", str(output), "--steps", "1000", "--warmup", "0", "--no-parity")
    steps = 0
    until = time.monotonic() + 200
    while steps < 3:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        steps = min((steps_written(file) for file in folder.glob("*/rank-?.json")), default=0) if _both(folder) else 0
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in sorted(folder.glob("*/pid-?"))]
    begun = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    out, error = process.communicate(timeout=60)
    assert time.monotonic() - begun < 60
    found = yaml.safe_load(output.read_text())
    assert process.returncode == 1 and found["outcome"] == "lost_rank"
    assert found["failure"]["rank"] == 1 and found["failure"]["phase"].startswith("step ")
    assert found["failure"]["sentence"] == f"rank 1 ({os.uname().nodename}) died during {found['failure']['phase']}"
    assert error.endswith(f"error: {found['failure']['sentence']}\n") and "The run lost a rank" in out
    assert len(found["steps"]["seconds"]) >= 3 and found["times"] and found["parity"] is None
    left = [one.suffix for one in folder.rglob("*") if one.is_file()]
    assert not any(alive(pid) for pid in pids) and left == [".log"]  # what ranks printed


def _both(folder: Path) -> bool:
    return len(list(folder.glob("*/rank-?.json"))) == 2


TINY = """
import json, sys, torch
import torch.distributed as dist
from planner.lab.run.parity import among_ranks, tiny_of
from planner.lab.run.training import Meshes
from tests.proofs.forked_ranks import run_ranks
from tests.proofs.parity import combination

def job(split):
    return among_ranks(tiny_of(split), torch.device("cpu"), Meshes(split, "cpu"))

for name, fields in json.loads(sys.argv[1]):
    split = combination(name, **fields)
    found = run_ranks(job, split.world, split)
    assert all(one == found[0] for one in found)
    print(json.dumps(found[0]))
"""


@needs_torch
def test_ranks_of_a_job_compare_a_tiny_model_of_its_kind() -> None:
    """Experts, a pipeline of two chunks, latent attention: inside of a job, each rank with its own one-process run."""
    cases = [
        ("shared", {"ep": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 9}),
        ("mla", {"tp": 2, "cp": 2, "recompute": "full", "micro_batch_size": 4}),
        ("gqa", {"pp": 2, "vpp": 2, "schedule": 2, "num_microbatches": 6, "fused": True}),
    ]
    rows = [json.loads(line) for line in fresh(TINY, json.dumps(cases)).splitlines() if line.startswith("{")]
    assert len(rows) == 3 and all(row["equal"] and row["parameters"] >= 20 for row in rows), rows
