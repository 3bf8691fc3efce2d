"""Priced plans, two of them those of tests/logs, what a run of one finds, and a command in place of a trainer."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from pathlib import Path
from typing import Any

from planner.layout import Layout, Module
from planner.plan_file import Plan, predict
from planner.timeline.priced_plan import estimate_of, job_of
from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "logs"


def plan_of(
    trainer: str,
    layout: Layout,
    *,
    hardware: str = "h100-sxm",
    sequence_length: int = 8192,
    model: Any = None,
    **work: Any,
) -> Plan:
    """A priced plan."""
    from planner.model import load_model

    workload = Workload(
        model=model or load_model("llama-3.1-8b"), sequence_length=sequence_length,
        global_batch_size=int(layout.global_batch_size), **work,
    )  # fmt: skip
    empty: Any = None
    plan = Plan(
        workload=workload,
        hardware=hardware,
        num_gpus=int(layout.num_gpus),
        trainer=trainer,
        layout=layout,
        prediction=empty,
    )
    job = job_of(plan)
    return dataclasses.replace(plan, prediction=predict(estimate_of(job, layout), job, plan.kind()))


@functools.cache
def of_megatron() -> Plan:
    """The job of tests/logs/megatron.log."""
    return plan_of("megatron", Layout(tp=2, dp=4, num_microbatches=32, zero=1, sequence_parallel=1))


@functools.cache
def of_torchtitan() -> Plan:
    """The job of tests/logs/torchtitan.log."""
    return plan_of("torchtitan", Layout(dp=8, zero=3, recompute=1, recompute_modules=int(Module.EVERY_SECOND_MATMUL)))


def measured_step(plan: Plan, seconds: float, peak_gib: float | None = None, **more: Any) -> dict[str, Any]:
    """What level full finds."""
    low, high = plan.prediction.step_time_range_s
    predicted = plan.prediction.step_time_s
    row = {"what": "step", "predicted_seconds": predicted, "measured_seconds": seconds, "spread": 0.01,
           "error": predicted / seconds - 1, "interval": [low, high], "inside": low <= seconds <= high}  # fmt: skip
    ranks = (
        []
        if peak_gib is None
        else [{"rank": 0, "stage": 0, "memory": [{"what": "reserved", "measured_gib": peak_gib}]}]
    )
    return {
        "rung": "full", "outcome": "completed", "trainer": plan.load_trainer().name, "layout": plan.layout.to_dict(),
        "num_gpus": plan.num_gpus, "changes": [], "failure": None, "times": [row], "ranks": ranks,
        "device": {"name": "NVIDIA H100 80GB HBM3", "kind": "cuda", "pressure": None}, **more,
    }  # fmt: skip


STAND_IN = """
import os, subprocess, sys, time
log, mode = open(sys.argv[1]).read(), sys.argv[2]
start = log.rindex(chr(10), 0, log.index(sys.argv[3])) + 1
head, steps = log[:start], log[start:].splitlines()
print(head, flush=True)
for line in steps[:4]:
    print(line, flush=True)
if mode == "oom":
    print("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 "
          "GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.88 GiB memory in use.", flush=True)
    sys.exit(1)
if mode == "killed":
    print("Root Cause (first observed failure):\\n[0]:\\n  rank      : 5 (local_rank: 5)\\n  exitcode  : -9 (pid: 1)\\n")
    sys.exit(1)
if mode == "error":
    print("[rank0]: ValueError: heads must divide")
    sys.exit(1)
if mode == "hang":
    child = subprocess.Popen(["sleep", "30"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(30)
for line in steps[4:]:
    print(line, flush=True)
"""


def stand_in(folder: Path, log: str, mode: str) -> str:
    """A command that prints a real log and ends as asked; it is not the trainer."""
    script = folder / "stand_in.py"
    script.write_text(STAND_IN)
    first = {"megatron": "iteration        1/", "torchtitan": "step:  1"}[log]
    return shlex.join([sys.executable, str(script), str(LOGS / f"{log}.log"), mode, first])
