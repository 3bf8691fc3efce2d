"""Does the walked schedule tell how long torch's own schedule takes? Pipelines whose stages sleep, as real processes.

A stage sleeps F seconds forward, I for the gradient of its input and W for that of its weight, in two autograd functions, so
that schedules which split the backward pass find two parts. Sleeping needs no core: eight processes overlap truly on two.
The first stage has no gradient of an input, so none is charged there. ``python -m tests.proofs.sleeping`` runs every
schedule that torch.distributed.pipelining and the planner both have, on 2, 4 and 8 processes, with equal stages and with a
last stage that is half as long again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from planner.arrays import Floats
from planner.cost.pipeline.schedule_walk import stage_rank, walk
from planner.lab.reference.split import SCHEDULES
from planner.layout import NAMES, Schedule
from tests.proofs.forked_ranks import run_ranks

BOUND = 0.08
"""Largest error of the walked step that is right."""
HEAVY = 1.5
"""Seconds of a heavy last stage over those of the others."""
UNIT = 0.03
"""Seconds of a forward pass of one stage; the fixed cost of an action, 1 ms and less on a machine that is free, must be small
beside it."""
PARTS = (1.0, 1.2, 0.8)
"""F, I and W of a stage in units: not equal, because real ones are not and orders made for equal ones show it."""
STEPS = 3
PRIORITY = -10
"""Above that of usual processes: these hardly run, and have to be there in time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pipeline of sleeping stages."""

    schedule: int
    """Schedule of the layout."""
    pp: int
    """Pipeline ranks."""
    vpp: int = 1
    """Virtual stages per rank."""
    num_microbatches: int = 8
    """Microbatches per step."""
    heavy: float = 1.0
    """Seconds of the last virtual stage over those of the others."""
    unit: float = UNIT
    """Seconds of a forward pass."""

    def durations(self) -> tuple[Floats, Floats, Floats]:
        """F, B = I + W and W of every virtual stage, seconds."""
        scale = np.full(self.pp * self.vpp, self.unit)
        scale[-1] *= self.heavy
        forward, inputs, weight = (part * scale for part in PARTS)
        inputs[0] = 0.0
        return forward, inputs + weight, weight

    def predicted(self) -> float:
        """Seconds of a step, as the planner walks the schedule."""
        spans = walk(self.schedule, self.pp, self.vpp, self.num_microbatches, self.durations())
        return max(one.end for one in spans)

    def __str__(self) -> str:
        shape = f"{NAMES['schedule'][Schedule(self.schedule)]} pp {self.pp} vpp {self.vpp} m {self.num_microbatches}"
        return f"{shape}, {'heavy last stage' if self.heavy > 1 else 'equal stages'}"


class _Input(Function):
    """Sleeps in the forward pass, and in the backward pass where the gradient of the input is wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None, None  # of a sum it is one number in every place, which cannot be sent


class _Weight(Function):
    """Sleeps in the backward pass, off the path from the stage's output to its input."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: float) -> Tensor:
        ctx.seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage without work."""

    def __init__(self, forward: float, inputs: float, weight: float) -> None:
        super().__init__()
        self.seconds = (forward, inputs, weight)
        self.awake = False
        """Passes take no time: for a first step that only makes connections and buffers."""
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape; the same out."""
        forward, inputs, weight = (0.0, 0.0, 0.0) if self.awake else self.seconds
        return _Input.apply(x, forward, inputs) + _Weight.apply(self.weight, weight)


def _measure(case: Case, group: Any, rank: int, steps: int) -> list[tuple[float, float]]:
    """Start and end of each step on this rank, seconds of the machine's clock."""
    forward, backward, weight = case.durations()
    kind, count = get_schedule_class(SCHEDULES[Schedule(case.schedule)]), case.pp * case.vpp
    mine = [stage for stage in range(count) if stage_rank(stage, case.pp, case.schedule) == rank]
    example, stages = torch.empty(1, 8, device="meta"), []
    for stage in mine:
        module = Sleeper(float(forward[stage]), float(backward[stage] - weight[stage]), float(weight[stage]))
        stages.append(
            PipelineStage(module, stage, count, torch.device("cpu"), input_args=example.clone().requires_grad_(stage > 0),
                          output_args=example.clone().requires_grad_(), group=group)
        )  # fmt: skip
    schedule = kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        case.num_microbatches, loss_fn=lambda output, _: output.sum(), scale_grads=False,
    )  # fmt: skip
    rows = torch.zeros(case.num_microbatches, 8)
    found = []
    gc.collect()
    gc.disable()  # a collection in a pass is no part of a schedule
    for number in range(1 + steps):
        for stage in stages:
            stage.submod.awake = number == 0
        dist.barrier(group)
        start = time.monotonic()
        schedule.step(*((rows,) if 0 in mine else ()), target=rows if count - 1 in mine else None, return_outputs=False)
        found.append((start, time.monotonic()))
    gc.enable()
    return found[1:]


def _on_rank(cases: Sequence[Case], steps: int) -> list[list[tuple[float, float]] | None]:
    """All cases one after the other; the larger ones use all ranks, the others the first few."""
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in sorted({case.pp for case in cases})}
    found = []
    for case in cases:
        dist.barrier()
        found.append(_measure(case, groups[case.pp], rank, steps) if rank < case.pp else None)
    return found


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """Of root: what is started inside, with all its threads, is woken at once, however busy the machine is."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


def measure(cases: Sequence[Case], steps: int = STEPS) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each case; measured is the median of the steps."""
    limit = 60.0 + 3.0 * steps * sum(case.predicted() for case in cases)
    with _first_in_line():
        ranks = run_ranks(_on_rank, max(case.pp for case in cases), list(cases), steps, limit=limit)
    rows = []
    for number, case in enumerate(cases):
        spans = [one[number] for one in ranks if one[number] is not None]
        took = [max(end for _, end in each) - min(start for start, _ in each) for each in zip(*spans, strict=True)]
        measured, predicted = statistics.median(took), case.predicted()
        rows.append({
            **asdict(case), "what": str(case), "predicted_seconds": predicted, "measured_seconds": measured,
            "spread": (max(took) - min(took)) / measured, "error": predicted / measured - 1.0,
        })  # fmt: skip
    return rows


def table(unit: float = UNIT, ranks: Sequence[int] = (2, 4, 8)) -> list[Case]:
    """Every schedule of torch and the planner, on 2, 4 and 8 ranks, equal stages and a heavy last one."""
    chunks = {Schedule.INTERLEAVED: 2, Schedule.ZBV: 2, Schedule.DUALPIPE_V: 2}
    return [
        Case(schedule=schedule, pp=pp, vpp=chunks.get(schedule, 1), num_microbatches=2 * pp, heavy=heavy, unit=unit)
        for pp in ranks
        for schedule in SCHEDULES
        for heavy in (1.0, HEAVY)
    ]


def subset() -> list[Case]:
    """What the tests run: every schedule on 4 processes, two of them on 2 and 8."""
    chosen = {(Schedule.GPIPE, 1.0), (Schedule.ONE_F_ONE_B, HEAVY), (Schedule.INTERLEAVED, 1.0), (Schedule.ZB_H1, 1.0),
              (Schedule.ZBV, HEAVY), (Schedule.DUALPIPE_V, HEAVY)}  # fmt: skip
    of_four = [case for case in table(ranks=(4,)) if (case.schedule, case.heavy) in chosen]
    ends = [
        Case(schedule=Schedule.ZB_H1, pp=8),
        Case(schedule=Schedule.ZBV, pp=2, vpp=2, num_microbatches=4, heavy=HEAVY),
    ]
    return of_four + ends


def confirmed(cases: Sequence[Case], steps: int = 1, rounds: int = 3) -> list[dict[str, Any]]:
    """Each case; those that take too long again, twice as slow, and then that counts.

    The fixed cost of an action, which others on the machine make longer and never shorter, is then half as large beside it. A
    step that the walk takes too long for stays wrong.
    """
    rows = measure(cases, steps)
    for number in range(1, rounds):
        late = [row for row, found in enumerate(rows) if found["error"] < -BOUND]
        if not late:
            break
        slower = [dataclasses.replace(cases[row], unit=cases[row].unit * 2.0**number) for row in late]
        for row, found in zip(late, measure(slower, steps), strict=True):
            rows[row] = found
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The table; 1 when a step lies outside of the bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.sleeping", description=__doc__.split("\n\n")[0])
    parser.add_argument("--unit", type=float, default=UNIT, help="seconds of a forward pass of one stage")
    parser.add_argument("--ranks", type=int, action="append", help="only pipelines of so many ranks; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = confirmed(table(options.unit, options.ranks or (2, 4, 8)), STEPS)
    for row in rows:
        slower = f", again with {row['unit']:g} s" if row["unit"] > options.unit else ""
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(f"{row['what']:52} predicted {row['predicted_seconds']:6.3f} s, measured {row['measured_seconds']:6.3f} s "
                  f"(spread {row['spread']:5.1%}): {row['error']:+6.1%}{slower}")  # fmt: skip
    wrong = [row["what"] for row in rows if abs(row["error"]) > BOUND]
    if not options.json:
        errors = [abs(row["error"]) for row in rows]
        print(f"{len(rows)} runs: median {statistics.median(errors):.1%}, largest {max(errors):.1%}, "
              f"{len(wrong)} outside of {BOUND:.0%}")  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
