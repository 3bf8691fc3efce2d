"""How far each number of a profile moves a plan's step time, and where another of the good plans would take over.

``sensitivity`` searches the whole space at every step, which takes minutes for a large job; a picture needs seconds. Here the
plan and the good layouts around it are priced again with one number changed. What a search alone would bring up stays unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.estimate import Estimate, estimate
from planner.defaults import ResolvedJob
from planner.layout import Layout
from planner.questions.sensitivity.numbers import REACH, narrowed
from planner.questions.sensitivity.quantities import Quantity, relevant
from planner.search import fits, plan_key

CLEAR = 0.02
"""Another plan takes over where it is faster by at least this part: smaller gaps are no reason to change."""
MOST = 150
"""Layouts around the plan that are priced again each time."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One number, changed one way."""

    factor: float
    """What it is multiplied by."""
    step_time_s: float
    """Of the plan."""
    change: float
    """Step time over that of today, minus 1."""
    fits: bool
    """The plan fits there."""
    flip: float | None
    """Factor nearest to 1 at which another layout is CLEAR faster, or the plan no longer fits; None = none up to ``factor``,
    or another plan is the better choice today already."""
    winner: Layout | None
    """The layout that is the fastest there."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """One number of the profile."""

    quantity: Quantity
    origin: str
    """How the profile knows it."""
    sides: tuple[Side, Side]
    """Divided and multiplied by REACH, as far as physics allows."""

    @property
    def largest(self) -> float:
        """The larger change of the two."""
        return max(abs(one.change) for one in self.sides)


def pulls(
    resolved: ResolvedJob, layout: Layout, found: Estimate, others: Sequence[Layout], *, settled: bool = True
) -> tuple[Pull, ...]:
    """Every number that matters to a job, the strongest first; ``found`` is the refined estimate of the plan.

    ``settled``: no other plan is clearly faster today; else there is no choice that could change, and no flip is looked for.
    ``others`` are layouts around it, the best first. Their times keep the ratio to the closed form that the plan's has,
    and at today's numbers none counts as faster than the plan: what the exact timeline adds differs by a few percent.
    """
    key = plan_key(layout)
    around = [one for one in others if plan_key(one) != key][:MOST]
    table = Layout.stack([layout, *around])
    now = _price(resolved, table)
    exact = float(found.step_time[0])
    ratio = np.maximum(exact / now.step_time[0], exact / now.step_time)
    today = settled and bool(fits(resolved.job, now)[0])
    offloads = bool(layout.offload_optimizer or layout.offload_activations)
    result = []
    for quantity in relevant(resolved, offloads):
        hardware = resolved.job.cluster.hardware
        ends = (1.0 / REACH, min(REACH, quantity.most(hardware)))
        sides = tuple(_side(resolved, quantity, table, ratio, exact, end, today) for end in ends)
        result.append(Pull(quantity=quantity, origin=quantity.origin(hardware), sides=(sides[0], sides[1])))
    return tuple(sorted(result, key=lambda one: -one.largest))


def _price(resolved: ResolvedJob, table: Layout) -> Estimate:
    job = resolved.job
    return estimate(job.workload, job.cluster, job.trainer, table)


def _side(
    resolved: ResolvedJob, quantity: Quantity, table: Layout, ratio: Floats, exact: float, end: float, today: bool
) -> Side:
    """The plan at the end of the reach, and the factor nearest to 1 at which it should be changed."""

    def look(factor: float) -> tuple[float, bool, bool, int]:
        """Step time of the plan, whether it fits, whether it should be changed, and the row that takes over (0 = none)."""
        moved = quantity.scale(resolved, factor)
        found = _price(moved, table)
        fit = fits(moved.job, found)
        times = np.where(fit, found.step_time * ratio, np.inf)
        best = int(np.argmin(times))
        over = not fit[0] or bool(times[best] < times[0] / (1.0 + CLEAR))
        row = best if over and np.isfinite(times[best]) else 0
        return float(found.step_time[0] * ratio[0]), bool(fit[0]), over, row

    if abs(math.log(end)) < 0.001:
        return Side(factor=end, step_time_s=exact, change=0.0, fits=True, flip=None, winner=None)
    time, fit, over, winner = look(end)
    flip = None
    if over and today:
        flip = narrowed(1.0, end, 0.02, lambda factor: look(factor)[2])[1]
        winner = look(flip)[3]
    return Side(
        factor=end, step_time_s=time, change=time / exact - 1.0, fits=fit, flip=flip,
        winner=table.row(winner) if winner and today else None,
    )  # fmt: skip
