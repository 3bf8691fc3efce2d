"""How far each number of a profile moves a plan's step time, and where another of the good plans would take over.

``sensitivity`` searches the whole space at every step, which takes minutes for a large job; a picture needs seconds. Here the
plan and the good layouts around it are priced again with one number changed. What a search alone would bring up stays unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.analysis.quantities import Quantity, relevant
from planner.analysis.sensitivity import REACH, plan_key
from planner.arrays import Floats
from planner.cost.step import Estimate, estimate
from planner.defaults import ResolvedJob
from planner.layout import Layout
from planner.search import fits

CLEAR = 0.02
"""Another plan takes over where it is faster by at least this part: smaller gaps are no reason to change."""
MOST = 150
"""Layouts around the plan that are priced again each time."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One number, changed one way."""

    factor: float
    """What it is multiplied by."""
    step_time_s: float | None
    """Of the plan; None where it no longer fits."""
    change: float | None
    """Step time over that of today, minus 1."""
    flip: float | None
    """Factor nearest to 1 at which another layout is CLEAR faster, or the plan no longer fits; None = none up to ``factor``."""
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
        """The larger change of the two; infinite where the plan stops to fit."""
        return max(math.inf if one.change is None else abs(one.change) for one in self.sides)


def pulls(resolved: ResolvedJob, layout: Layout, found: Estimate, others: Sequence[Layout]) -> tuple[Pull, ...]:
    """Every number that matters to a job, the strongest first; ``found`` is the refined estimate of the plan.

    ``others`` are layouts around it, the best first. Their times keep the ratio to the closed form that the plan's has,
    and at today's numbers none counts as faster than the plan: what the exact timeline adds differs by a few percent.
    """
    key = plan_key(layout)
    around = [one for one in others if plan_key(one) != key][:MOST]
    table = Layout.stack([layout, *around])
    now = _price(resolved, table)
    exact = float(found.step_time[0])
    ratio = np.maximum(exact / now.step_time[0], exact / now.step_time)
    offloads = bool(layout.offload_optimizer or layout.offload_activations)
    result = []
    for quantity in relevant(resolved, offloads):
        hardware = resolved.job.cluster.hardware
        ends = (1.0 / REACH, min(REACH, quantity.most(hardware)))
        sides = tuple(_side(resolved, quantity, table, ratio, exact, end) for end in ends)
        result.append(Pull(quantity=quantity, origin=quantity.origin(hardware), sides=(sides[0], sides[1])))
    return tuple(sorted(result, key=lambda one: -one.largest))


def _price(resolved: ResolvedJob, table: Layout) -> Estimate:
    job = resolved.job
    return estimate(job.workload, job.cluster, job.trainer, table)


def _side(
    resolved: ResolvedJob, quantity: Quantity, table: Layout, ratio: Floats, exact: float, end: float
) -> Side:
    """The plan at the end of the reach, and the factor nearest to 1 at which it should be changed."""

    def look(factor: float) -> tuple[float, int]:
        """Step time of the plan (infinite when it does not fit), and the row that should take over, 0 = none."""
        moved = quantity.scale(resolved, factor)
        found = _price(moved, table)
        times = np.where(fits(moved.job, found), found.step_time * ratio, np.inf)
        best = int(np.argmin(times))
        clear = times[best] < times[0] / (1.0 + CLEAR) or not np.isfinite(times[0])
        return float(times[0]), best if clear and np.isfinite(times[best]) else 0

    if abs(math.log(end)) < 0.001:
        return Side(factor=end, step_time_s=exact, change=0.0, flip=None, winner=None)
    time, winner = look(end)
    flip = None
    if winner or not np.isfinite(time):
        near, far = 1.0, end
        while abs(math.log(far / near)) > 0.02:
            middle = math.sqrt(near * far)
            at, row = look(middle)
            if row or not np.isfinite(at):
                far, winner = middle, row
            else:
                near = middle
        flip = far
    fit = np.isfinite(time)
    return Side(
        factor=end, step_time_s=time if fit else None, change=time / exact - 1.0 if fit else None, flip=flip,
        winner=table.row(winner) if winner else None,
    )  # fmt: skip


__all__ = ["CLEAR", "Pull", "Side", "pulls"]
