"""Rung meta as the command runs it: the ranks asked for, or those that may be the worst, on fake tensors."""

from __future__ import annotations

from typing import Any

from planner.errors import PlannerError
from planner.validator.rungs import Say, Task


def obstacle(task: Task) -> str:
    """None but a launcher: every rank would do the same."""
    return "it is one process; start it without torchrun or srun" if task.machine.place is not None else ""


def run(task: Task, say: Say) -> dict[str, Any]:
    """The ranks asked for, or one of each stage that may be the worst."""
    from planner.validator.compare import result
    from planner.validator.meta import stage_ranks
    from planner.validator.workers import measure_all

    split = task.asked.split
    for one in task.ranks:
        if not 0 <= one < split.world:
            raise PlannerError(f"--rank {one}: the plan has ranks 0 to {split.world - 1}")
    wanted = list(dict.fromkeys(task.ranks)) or stage_ranks(split)
    return result(task.asked, measure_all(split, wanted, lambda text: say(f"{len(wanted)} ranks, {text}")))
