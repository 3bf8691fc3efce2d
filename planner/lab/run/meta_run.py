"""Rung meta as the command runs it: the ranks asked for, or those that may be the worst, on fake tensors."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from planner.errors import PlannerError
from planner.lab.run.full import kills
from planner.lab.run.ipc import Lost
from planner.lab.run.levels import Say, Task
from planner.lab.run.time_limits import FAKE
from planner.units import format_seconds


def obstacle(task: Task) -> str:
    """None but a launcher: every rank would do the same."""
    return "it is one process; start it without torchrun or srun" if task.machine.place is not None else ""


def stated_limits(task: Task, count: int) -> str:
    """What is started and how long it may take, before it starts."""
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    limit = format_seconds(FAKE * task.timeout)
    return f"{ranks} on fake tensors. Limit: {limit} for each ({FAKE:.0f} times --timeout), then it is named and ended"


def run(task: Task, say: Say) -> dict[str, Any]:
    """The ranks asked for, or one of each stage that may be the worst. One that does not come to its end is a result."""
    from planner.lab.run.meta import stage_ranks
    from planner.lab.run.predicted_ranks import result
    from planner.lab.run.workers import ON_FAKE_TENSORS, measure_all

    split, gone, killed = task.asked.split, list[Lost](), kills()
    for one in task.ranks:
        if not 0 <= one < split.world:
            raise PlannerError(f"--rank {one}: the plan has ranks 0 to {split.world - 1}")
    wanted = list(dict.fromkeys(task.ranks)) or stage_ranks(split)
    print(stated_limits(task, len(wanted)), file=sys.stderr, flush=True)
    manner = dataclasses.replace(ON_FAKE_TENSORS, limit=FAKE * task.timeout)
    every = measure_all(split, wanted, lambda text: say(f"{len(wanted)} ranks, {text}"), manner, gone.append)
    found = result(task.asked, [one for one in every if one is not None])
    return found | {"limits": {"rank_seconds": FAKE * task.timeout}} | (_lost(gone[0], killed) if gone else {})


def _lost(one: Lost, killed: int) -> dict[str, Any]:
    """Outcome and failure of the first rank that did not come to its end. Raises PlannerError where the model failed on it."""
    if one.kind == "failed":  # the torch model has not got what the plan asks for: nothing was run
        raise PlannerError(one.sentence)
    outcome = "lost_rank" if one.kind == "died" else one.kind
    sentence = one.sentence
    if one.kind == "hung":
        sentence += "; if it only needs longer, raise --timeout"
    if one.kind == "died" and kills() > killed:
        outcome, sentence = "out_of_memory", f"{sentence}: the kernel ended it because main memory was used up"
    rank = one.rank if one.rank >= 0 else None
    return {
        "outcome": outcome, "failure": {"rank": rank, "phase": one.phase, "sentence": sentence, "allocated_gib": None},
    }  # fmt: skip
