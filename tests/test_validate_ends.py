"""How runs of plan validate end: a rank that hangs or runs out of memory, Ctrl-C, limits; and watching changes no number."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh import fresh
from validate_samples import ROOT, alive, needs_torch, plan_file, steps_written

pytestmark = pytest.mark.proof

WIDE = {"hidden_size": 256, "ffn_size": 4096, "vocab_size": 65536}
"""More than the 64 MiB that a processor's heap is given at once: weights and the first step need memory of the kernel."""


@dataclass
class Ended:
    """A command whose ranks were disturbed in mid-run."""

    code: int
    out: str
    error: str
    found: dict[str, Any]
    """validation.yaml."""
    seconds: float
    """From the disturbance to the end."""
    alive: list[int]
    """Ranks that outlived it."""
    left: list[str]
    """Files of ranks that were left behind."""


def disturbed(folder: Path, plan: Path, disturb: Callable[[int, list[int]], object], steps: int = 2) -> Ended:
    """``plan validate --rung full`` with a limit of 8 s on a step, ``disturb(pid of the command, pids of the ranks)`` after
    ``steps`` of each rank; 0: before they make what they train."""
    folder.mkdir()
    output = folder.with_suffix(".yaml")
    command = [sys.executable, str(ROOT / "cli.py"), "validate", str(plan), "--rung", "full", "--steps", "1000", "--warmup",
               "0", "--no-parity", "--timeout", "8s", "--output", str(output)]  # fmt: skip
    process = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 200
        while min(sorted(steps_written(file) for file in folder.glob("*/rank-?.json"))[-2:] or [0]) < steps or not _two(
            folder
        ):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in sorted(folder.glob("*/pid-?"))]
        begun = time.monotonic()
        disturb(process.pid, pids)
        out, error = process.communicate(timeout=100)
        seconds = time.monotonic() - begun
    finally:
        process.kill()
    return Ended(
        code=process.returncode, out=out, error=error, found=yaml.safe_load(output.read_text()), seconds=seconds,
        alive=[pid for pid in pids if alive(pid)], left=[file.name for file in folder.iterdir()],
    )  # fmt: skip


def _two(folder: Path) -> bool:
    return len(list(folder.glob("*/rank-?.json"))) == 2


def no_more_memory(pid: int) -> None:
    """From now on the process gets no address space from the kernel."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def ctrl_c(command: int) -> None:
    """As a terminal sends it, to the whole group; and once more to the command, by somebody who does not like to wait."""
    os.killpg(command, signal.SIGINT)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        os.kill(command, signal.SIGINT)


CASES: dict[str, Callable[[int, list[int]], object]] = {
    "hangs": lambda _, ranks: os.kill(ranks[1], signal.SIGSTOP),
    "out_of_memory": lambda _, ranks: no_more_memory(ranks[1]),
    "ctrl_c": lambda command, _: ctrl_c(command),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """All cases at the same time: most of it is waiting."""
    folder = tmp_path_factory.mktemp("ends")
    plans = {
        name: plan_file(folder, name=f"{name}.plan.yaml", **(WIDE if name == "out_of_memory" else {})) for name in CASES
    }
    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = {
            name: pool.submit(disturbed, folder / name, plans[name], disturb, 0 if name == "out_of_memory" else 2)
            for name, disturb in CASES.items()
        }
    yield {name: run.result() for name, run in runs.items()}


def _kept(end: Ended, steps: int = 2) -> None:
    """Whatever happened: one sentence, what was measured before, nothing left behind."""
    assert end.code == (130 if end.found["outcome"] == "interrupted" else 1) and end.alive == []
    logs = [name for name in end.left if name.startswith("plan-ranks-")]  # what they printed, and torch's cache of kernels
    assert len(logs) == (end.found["outcome"] != "interrupted")
    assert not [name for name in end.left if name not in logs and not name.startswith("torchinductor_")]
    assert all("note: all that the ranks printed is in " in end.error and name in end.error for name in logs)
    assert end.error.endswith(f"error: {end.found['failure']['sentence']}\n") and "Traceback" not in end.error
    assert "8 s for each of 1000 steps (--timeout; 32 s for the first)" in end.error
    assert len(end.found["steps"]["seconds"]) >= steps and end.found["limits"]["step_seconds"] == 8.0
    if steps:
        assert end.found["times"] and end.found["run"] is None and end.found["no_run"]


@needs_torch
def test_a_rank_that_hangs_is_named_after_its_limit(ends: dict[str, Ended]) -> None:
    end = ends["hangs"]
    _kept(end)
    failure = end.found["failure"]
    assert end.found["outcome"] == "hung" and failure["rank"] == 1 and failure["phase"].startswith("step ")
    assert failure["sentence"].startswith(f"rank 1 ({os.uname().nodename}) stopped answering for 8 s during step ")
    assert failure["sentence"].endswith("; if a step only needs longer, raise --timeout")
    assert 7 < end.seconds < 60 and "The run hung" in end.out


@needs_torch
def test_a_rank_that_runs_out_of_memory_is_named_with_what_it_had(ends: dict[str, Ended]) -> None:
    """The heap of a processor keeps what was freed: only a run that has not had its memory yet asks for more."""
    end = ends["out_of_memory"]
    _kept(end, steps=0)
    failure = end.found["failure"]
    assert end.found["outcome"] == "out_of_memory" and failure["rank"] == 1 and failure["allocated_gib"] > 0.01
    assert failure["phase"] in ("allocating weights and optimizer states", "a step with its memory followed")
    assert "allocate memory" in failure["sentence"]
    [row] = end.found["run"]["rows"]  # that it does not fit is something to learn from
    assert row["measured"] == {"oom": True}
    assert "The run ran out of memory" in end.out and end.seconds < 30


@needs_torch
def test_ctrl_c_ends_all_and_keeps_what_was_measured(ends: dict[str, Ended]) -> None:
    end = ends["ctrl_c"]
    _kept(end)
    assert end.found["outcome"] == "interrupted" and end.found["failure"]["rank"] is None and end.seconds < 30
    assert end.found["failure"]["sentence"] == "stopped" and "The run was stopped" in end.out


ALONE = """
import os, signal, threading, time
from dataclasses import replace
from tests.proofs import parity
from planner.lab.run.workers import Manner, measure_all

def work(split, rank, say):
    say("begin", ("the first half", 30.0))
    say("kept", f"half of {rank}")
    if rank == 1:
        say("begin", ("the second half", 0.5))
        time.sleep(60)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        raise ValueError("no such thing")
    if rank == 4:
        threading.Timer(0.5, os.kill, (os.getppid(), signal.SIGINT)).start()
        time.sleep(60)
    return rank

split = parity.combination("llama", dp=8)
manner = Manner(work=work, at_once=1, fork=True, where="here", limit=30.0)
begun, gone, phases = time.monotonic(), [], []
found = measure_all([(rank, split) for rank in (0, 1, 2, 3, 5, 4, 6)], manner, lost=gone.append, begun=phases.append)
print("ALONE", found, [(one.rank, one.kind, one.phase, one.kept) for one in gone], phases.count("the first half"))
print("SAID", " | ".join(one.sentence for one in gone))
try:
    measure_all([(1, split)], manner)
except Exception as error:
    print("RAISED", type(error).__name__, error)
print("TOOK", time.monotonic() - begun < 20)
"""


@needs_torch
def test_ranks_alone_end_within_their_limits_and_keep_what_they_found() -> None:
    """One that hangs, is killed, fails, and Ctrl-C: the others run on until it, and nobody waits longer than a phase may take."""
    lines = script(ALONE)
    assert lines["ALONE"] == (
        "[0, None, None, None, 5, None, None] [(1, 'hung', 'the second half', 'half of 1'), "
        "(2, 'died', 'the first half', 'half of 2'), (3, 'failed', 'the first half', 'half of 3'), "
        "(4, 'interrupted', 'the first half', 'half of 4')] 6"
    )
    hung, died, failed, stopped = lines["SAID"].split(" | ")
    assert hung == "rank 1 was ended: the second half took longer than 500 ms"
    assert died == "rank 2: its process was ended by SIGKILL during the first half"
    assert failed.startswith("rank 3 failed here: ValueError: no such thing") and stopped == "stopped"
    assert lines["RAISED"] == f"PlannerError {hung}" and lines["TOOK"] == "True"


FAR = """
import time
from tests.proofs import parity
from planner.lab.run.workers import Manner, measure_all

def work(split, rank, say):
    for done in (0.25, 0.5, 1.0):
        time.sleep(0.6)
        say("progress", (done, f"{done} of rank {rank}"))
    return rank

said = []
measure_all([(rank, parity.combination("llama", dp=8)) for rank in (0, 1)],
            Manner(work=work, at_once=1, fork=True, where="here"), say=said.append)
print("SAID", " | ".join(said))
"""


@needs_torch
def test_a_validation_says_how_far_all_of_it_is_and_how_long_the_rest_takes() -> None:
    said = script(FAR)["SAID"].split(" | ")
    first = r"12 % done(, about \d+ s left)?; rank 0, 0.25 of rank 0"  # it promises nothing in its first second
    assert re.fullmatch(first, said[0])
    assert said[-1].startswith("100 % done, about")
    left = re.fullmatch(r"25 % done, about (\d+) s left; rank 0, 0.5 of rank 0", said[1])
    assert left and float(left[1]) > 3.0, "three times what it took so far, 1.2 s at least"
    assert [one.split(" %")[0] for one in said] == ["12", "25", "50", "62", "75", "100"]


WATCHED = """
import torch
from contextlib import ExitStack
from tests.proofs import parity
from tests.proofs.forked_ranks import run_ranks
from planner.lab.run.training import Run
from planner.lab.run.memory_tracker import MemoryTracker

def job(split, watch):
    with ExitStack() as stack:
        if watch:
            tracker = MemoryTracker()
            stack.enter_context(tracker.patches())
            stack.enter_context(tracker)
        run = Run(split, torch.device("cpu")).allocate()
        steps = [run.step(*run.data(step)) for step in range(2)]
    return [(run.total_loss(loss), float(norm)) for loss, norm in steps]

split = parity.combination("gqa", tp=2, precision="fp32", fused=True)
plain, watched = (run_ranks(job, 2, split, watch) for watch in (False, True))
print("SAME", plain == watched and plain[0] == plain[1])
"""


@needs_torch
def test_watching_memory_changes_no_number() -> None:
    """Tensor-parallel results are waited for: unwaited, losses were NaN and what collectives took stayed allocated."""
    assert script(WATCHED)["SAME"] == "True"


def script(text: str) -> dict[str, str]:
    """Runs it; what it prints, by the first word of the line."""
    return dict(line.split(" ", 1) for line in fresh(text).splitlines() if " " in line)
