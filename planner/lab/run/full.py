"""Level ``full``: the plan itself on all its ranks, started here with torchrun or by torchrun or srun; no torch in this module."""

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.lab.launch.nccl import without_multicast
from planner.lab.launch.place import Place
from planner.lab.launch.state import Bar
from planner.lab.launch.torchrun import PRINTED, FailedRanksError, InterruptedRunError, run_here
from planner.lab.launch.watch import Verdict
from planner.lab.run.comparison import predicted_host, predicted_memory
from planner.lab.run.full_result import result
from planner.lab.run.levels import OUT_OF_MAIN_MEMORY, SETTING_UP, START, Task, kills, step_limits
from planner.units import GIB, format_seconds

MOST_ON_CPU = 64
"""Processes on a CPU."""
LIBRARIES = 0.4 * GIB
"""Bytes that a process with torch takes before it does anything: 0.3 to 0.4 GiB were resident  [torch 2.13, CPU build]."""


def obstacle(task: Task) -> str:
    """Too few GPUs, too little memory, or another number of ranks than the plan has."""
    world, place, gpus = task.asked.split.world, task.machine.place, task.machine.gpus
    if task.ranks:
        return "it runs all ranks and --rank names some; leave --rank out"
    if place is not None:
        wrong = f"{place.world} ranks were started and the plan has {world}; start as many as it has GPUs"
        return wrong if place.world != world else ""
    if task.machine.device == "cuda":
        few = (
            f"the plan has {world} ranks and this machine {gpus} GPUs; --print-commands shows how to start it on several machines"
        )
        host = sum(predicted_host(task.asked, stage) for stage in range(task.asked.split.pp)) * (world // task.asked.split.pp)
        full = (
            f"its optimizer states on the host need {host / GIB:.0f} GiB of main memory and "
            f"{task.machine.memory / GIB:.0f} GiB are free; plan with a smaller --offload-optimizer, or --rung rank"
        )
        return few if gpus < world else full if host > task.machine.memory else ""
    if world > MOST_ON_CPU:
        return f"the plan has {world} ranks, and on a CPU at most {MOST_ON_CPU} are started; --rung meta looks at one of them"
    needed = needed_memory(task)
    large = (
        f"its {world} ranks need {needed / GIB:.1f} GiB of main memory and {task.machine.memory / GIB:.1f} GiB are free; "
        "validate a smaller model, or --rung meta"
    )
    return large if needed > task.machine.memory else ""


def needed_memory(task: Task) -> float:
    """Bytes of all ranks together: what is predicted for the stages, and the libraries."""
    pp, world = task.asked.split.pp, task.asked.split.world
    needs = [predicted_memory(task.asked, stage) for stage in range(pp)]
    every = sum(one["peak"] + one["host"] for one in needs)
    return every * (world // pp) + world * LIBRARIES


def run(task: Task) -> dict[str, Any]:
    """Runs it and compares. Faults of the run are results."""
    place = task.machine.place
    if place is None or place.rank == 0:
        print(stated_limits(task), file=sys.stderr, flush=True)
    return _here(task) if place is None else _as_rank(task, place)


def stated_limits(task: Task) -> str:
    """What is started and how long it may take, before it starts."""
    split, steps = task.asked.split, task.warmup + task.steps
    parity = "a comparison with one process, " if task.parity else ""
    where = "on GPUs" if task.machine.device == "cuda" else "as processes on this CPU"
    setting_up = f"{format_seconds(SETTING_UP)} to set up{' and to compare' if task.parity else ''}"
    return (
        f"{split.world} ranks {where}: {parity}{task.warmup} warm and {task.steps} measured steps. Limits: "
        f"{format_seconds(START)} to meet, {setting_up}, {step_limits(task, steps)}"
    )


def _here(task: Task) -> dict[str, Any]:
    """One machine: torchrun is started, the result is made of what the ranks left."""
    world, killed = task.asked.split.world, kills()
    verdict: Verdict | None = None
    with tempfile.TemporaryDirectory(prefix="plan-validate-") as name:
        try:
            with Bar(which=task.which) as bar:
                without_multicast(
                    lambda _: run_here("planner.lab.run", task.to_json(), world, _emptied(Path(name)), bar.show)
                )
        except InterruptedRunError:
            verdict = Verdict(kind="interrupted", rank=-1, phase="", sentence="stopped")
        except PlannerError as error:
            verdict = _verdict(Path(name), str(error))
            if isinstance(error, FailedRanksError) and error.log and error.log not in verdict.sentence:
                print(f"note: {PRINTED} {error.log}", file=sys.stderr, flush=True)
        if verdict is not None and verdict.kind == "died" and kills() > killed:
            sentence = f"{verdict.sentence}: the kernel ended a process of this machine {OUT_OF_MAIN_MEMORY}"
            facts = {"out_of_memory": True}
            verdict = Verdict(kind="error", rank=verdict.rank, phase=verdict.phase, facts=facts, sentence=sentence)
        files = [Path(name) / f"rank-{rank}.json" for rank in range(world)]
        entries = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
        return result(task, entries, verdict)


def _emptied(directory: Path) -> Path:
    """What an earlier start has left there is gone."""
    for file in directory.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    return directory


def _verdict(directory: Path, sentence: str) -> Verdict:
    """What the rank that reports has found out; where none could, what torchrun said."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads((directory / "verdict.json").read_text(encoding="utf-8")))
    kind = "said" if (directory / "failure.txt").is_file() else "died"
    return Verdict(kind=kind, rank=-1, phase="", sentence=sentence)


def _as_rank(task: Task, place: Place) -> dict[str, Any]:
    """One of the ranks that torchrun or srun started: the first, or the one that finds out what is wrong, reports."""
    from planner.lab.run.full_rank import work

    finished: list[dict[str, Any]] = []

    def report(entries: list[dict[str, Any]], verdict: Verdict | None) -> None:
        found = result(task, entries, verdict)
        if verdict is None:
            finished.append(found)
        else:  # this rank ends at once
            task.report({"rung": "full", "why": task.why, **found})

    with Bar(quiet=place.rank != 0, which=task.which) as bar:
        try:
            work(task, place, report, bar.show)
        except KeyboardInterrupt:
            sys.exit(1)  # the first rank has reported
    return finished[0] if finished else {}
