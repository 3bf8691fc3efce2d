"""How far each number of a profile moves a plan's step time, and where another of the good plans would take over.

``sensitivity`` searches the whole space at every step: minutes for a large job. Here, in seconds, only the plan and the good
layouts around it are priced again with one number changed.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.arrays import NDArray
from planner.cost.estimate import Estimate, estimate
from planner.defaults import ResolvedJob
from planner.layout import Layout
from planner.questions.sensitivity.numbers import REACH, narrowed
from planner.questions.sensitivity.quantities import Quantity, relevant
from planner.record import record
from planner.search import fits, plan_key

CLEAR = 0.02
"""Another plan takes over where it is faster by at least this part: smaller gaps are no reason to change."""
MOST = 150
"""Layouts around the plan that are priced again each time."""


@record
class Side:
    """One number, changed one way."""

    factor: float
    """Its factor."""
    step_time_s: float
    """Of the plan."""
    change: float
    """Step time over that of today, minus 1."""
    fits: bool
    """The plan fits there."""
    flip: float | None
    """Factor nearest to 1 at which another layout is CLEAR faster, or the plan no longer fits; None = none up to ``factor``."""
    winner: Layout | None
    """The layout that is the fastest there."""


@record
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
    ``others`` are layouts around it, the best first. Their times keep the plan's ratio to its closed form, and at today's
    numbers none counts as faster than the plan: the walked timeline adds between them a few percent more or less.
    """
    key = plan_key(layout)
    table = Layout.stack([layout, *[one for one in others if plan_key(one) != key][:MOST]])

    def price(moved: ResolvedJob) -> tuple[Estimate, NDArray[np.bool_]]:
        one = estimate(moved.job.workload, moved.job.cluster, moved.job.trainer, table)
        return one, fits(moved.job, one)

    now, fit_now = price(resolved)
    refined = float(found.step_time[0])
    ratio = np.maximum(refined / now.step_time[0], refined / now.step_time)

    def look(quantity: Quantity, factor: float) -> tuple[float, bool, bool, int]:
        """Step time of the plan, whether it fits, whether it should be changed, and the row that takes over (0 = none)."""
        moved, fit = price(quantity.scale(resolved, factor))
        times = np.where(fit, moved.step_time * ratio, np.inf)
        best = int(np.argmin(times))
        over = not fit[0] or bool(times[best] < times[0] / (1.0 + CLEAR))
        row = best if over and np.isfinite(times[best]) else 0
        return float(moved.step_time[0] * ratio[0]), bool(fit[0]), over, row

    def side(quantity: Quantity, end: float) -> Side:
        """The plan at the end of the reach, and the factor nearest to 1 at which it should be changed."""
        if abs(math.log(end)) < 0.001:
            return Side(factor=end, step_time_s=refined, change=0.0, fits=True, flip=None, winner=None)
        time, fit, over, _ = look(quantity, end)
        flip, winner = None, None
        if over and settled and fit_now[0]:
            _, flip = narrowed(1.0, end, 0.02, lambda factor: look(quantity, factor)[2])
            row = look(quantity, flip)[3]
            winner = table.row(row) if row else None
        return Side(factor=end, step_time_s=time, change=time / refined - 1.0, fits=fit, flip=flip, winner=winner)

    hardware, result = resolved.job.cluster.hardware, []
    for quantity in relevant(resolved, bool(layout.offloads)):
        sides = (side(quantity, 1.0 / REACH), side(quantity, min(REACH, quantity.most(hardware))))
        result.append(Pull(quantity=quantity, origin=quantity.origin(hardware), sides=sides))
    return tuple(sorted(result, key=lambda one: -one.largest))
