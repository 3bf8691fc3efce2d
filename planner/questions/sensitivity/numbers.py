"""The measured numbers that a choice depends on: the factor on each at which another plan wins, and what the choice then loses."""

import math
from collections.abc import Callable
from typing import Any

from planner.cost.refine import price_exactly
from planner.defaults import ResolvedJob
from planner.error_bars import error_bar
from planner.errors import PlannerError
from planner.explain import differences, layout_text
from planner.layout import Layout
from planner.questions.best_plan import Best, best_of
from planner.questions.sensitivity.quantities import Quantity, relevant
from planner.record import record
from planner.search import Pins, fits, plan_key
from planner.ties import Ties, shipped_ties

REACH = 2.0
"""Each number is looked at from 1 / REACH to REACH times what the profile says."""
WIDTH = 1.01
"""A flip is located between two searches whose factors differ by less than this."""
LOOKS = 12
"""Searches between the profile's value and the end of the reach, at most."""
NEIGHBOURS = 10
"""Best plans that are looked at for ties."""
BY_HAND = (
    "To tell them apart, run each for some 20 steps after warm-up on the smallest number of GPUs that keeps tp, pp, cp and ep "
    "(data parallel replicas can go), with the same micro batch: 'plan export' writes what the trainer runs."
)
"""How to decide between plans that count as equal."""


@record
class Flip:
    """One direction of one number."""

    factor: float | None
    """Where another plan wins; None = not up to ``reach``."""
    reach: float
    """How far was looked."""
    layout: Layout | None
    """The plan that wins just beyond the flip."""
    loss: float | None
    """Step time of today's choice over that of the best plan at ``reach``, minus 1. None where the choice does not fit there."""
    forced: float | None
    """Where the choice does not fit at ``reach``: step time of the best plan there over that of the choice today, minus 1."""
    fits: bool
    """Something fits at ``reach``."""

    @property
    def stake(self) -> float:
        """The loss, or what is forced; infinite where nothing fits."""
        known = self.loss if self.loss is not None else self.forced
        return math.inf if known is None else known

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the layout as text."""
        return {**vars(self), "layout": None if self.layout is None else layout_text(self.layout)}


@record
class Reading:
    """One number, multiplied both ways."""

    quantity: Quantity
    origin: str
    """How the profile knows it."""
    down: Flip
    up: Flip

    @property
    def nearest(self) -> float:
        """Distance |ln factor| to the nearer flip; infinite without one."""
        return min(abs(math.log(one.factor)) if one.factor else math.inf for one in (self.down, self.up))

    @property
    def stake(self) -> float:
        """What is at stake: the larger loss of both ends."""
        return max(self.down.stake, self.up.stake)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        one = self.quantity
        return {
            "key": one.key, "what": one.text, "unit": one.unit, "origin": self.origin, "measure": one.measure,
            "down": self.down.to_dict(), "up": self.up.to_dict(),
        }  # fmt: skip


@record
class Neighbour:
    """A plan near the best one."""

    layout: Layout
    step_time_s: float
    behind: float
    """Step time over that of the best, minus 1."""
    right: float
    """Chance that the best is truly the faster, by measured pairs with this gap."""
    equal: bool
    """The gap is within the model's error."""
    differs: tuple[str, ...]
    """Where their times differ most."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the layout as text."""
        return {**vars(self), "layout": layout_text(self.layout), "differs": list(self.differs)}


@record
class Sensitivity:
    """Everything about one choice."""

    best: Best
    """The choice: the best plan by the profile as it is."""
    readings: tuple[Reading, ...]
    """The numbers: the largest loss first, then the nearest flip."""
    neighbours: tuple[Neighbour, ...]
    """The plans behind it, best first."""
    ties: Ties
    """The measured pairs behind the chances."""
    complete: bool
    """All numbers were looked at; False = interrupted."""

    @property
    def equal(self) -> tuple[Neighbour, ...]:
        """Plans within the model's error of the best."""
        return tuple(one for one in self.neighbours if one.equal)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        assert self.best.layout is not None and self.best.prediction is not None
        return {
            "layout": layout_text(self.best.layout), "step_time_s": self.best.prediction.step_time_s,
            "readings": [one.to_dict() for one in self.readings],
            "neighbours": [one.to_dict() for one in self.neighbours],
            "equal_gap": self.ties.equal_gap, "equal_basis": self.ties.basis, "complete": self.complete, "test": BY_HAND,
        }  # fmt: skip


def sensitivity(
    resolved: ResolvedJob,
    *,
    pins: Pins | None = None,
    reach: float = REACH,
    progress: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """Scale every number that can matter both ways, search again, and find where the winner changes.

    About two searches per number where nothing flips, two to four more per flip: 20 to 45 of 0.1 to 2 s each. Raises
    PlannerError when nothing fits: there is no choice then. Ctrl-C leaves what was found, ``complete`` False.
    """
    if not (math.isfinite(reach) and 1.0 < reach <= 100.0):
        raise PlannerError(f"--reach is {reach:g}; it must be a factor above 1, at most 100")
    progress("the choice itself")
    base = best_of(resolved, pins, NEIGHBOURS)
    if not base.fits or base.layout is None or base.finding is None:
        raise PlannerError(f"nothing fits, so there is no choice that could hang on a number: {base.why_not}")
    offloads = any(one.offloads for one in base.finding.layouts)
    readings: list[Reading] = []
    complete = True
    try:
        for quantity in relevant(resolved, bool(offloads)):
            look = _Look(resolved=resolved, pins=pins, quantity=quantity, choice=base.layout, progress=progress)
            low, high = _ends(resolved, quantity, reach)
            origin = quantity.origin(resolved.job.cluster.hardware)
            readings.append(Reading(quantity=quantity, origin=origin, down=look.flip(low), up=look.flip(high)))
    except KeyboardInterrupt:
        complete = False
    counted = shipped_ties()
    return Sensitivity(
        best=base, readings=tuple(sorted(readings, key=lambda one: (-one.stake, one.nearest))), ties=counted,
        neighbours=tuple(neighbours(base, counted)), complete=complete,
    )  # fmt: skip


def _ends(resolved: ResolvedJob, quantity: Quantity, reach: float) -> tuple[float, float]:
    """How far a number is looked at: to the reach, within what physics allows; usable memory as far as measured peaks lie
    from predicted ones in nine of ten published runs, as a card that needs more is like a smaller card."""
    hardware = resolved.job.cluster.hardware
    if quantity.key == "usable_memory":
        bar = error_bar("memory", resolved.job.trainer, hardware, resolved.kind)
        return max(1.0 / bar.high, 1.0 / reach), min(1.0 / bar.low, reach)
    return 1.0 / reach, min(reach, quantity.most(hardware))


def neighbours(base: Best, counted: Ties) -> list[Neighbour]:
    """The plans behind the best one, with the chance that it really is the faster."""
    assert base.finding is not None
    first = base.finding.estimates[0]
    found = []
    for layout, one in list(zip(base.finding.layouts, base.finding.estimates, strict=True))[1:]:
        step = float(one.step_time[0])
        ratio = step / float(first.step_time[0])
        pays, saves = differences(one, first)
        found.append(
            Neighbour(
                layout=layout, step_time_s=step, behind=ratio - 1.0, right=counted.chance(math.log(ratio)),
                equal=math.log(ratio) < counted.equal_gap, differs=(*pays[:2], *(f"saves {x}" for x in saves[:2])),
            )
        )  # fmt: skip
    return found


@record
class _Look:
    """One number of one job, and the choice that it may flip."""

    resolved: ResolvedJob
    pins: Pins | None
    quantity: Quantity
    choice: Layout
    progress: Callable[[str], None]

    def at(self, factor: float) -> Best:
        """The search with the number multiplied."""
        self.progress(f"{self.quantity.text} x {factor:.3g}")
        return best_of(self.quantity.scale(self.resolved, factor), self.pins)

    def times(self, factor: float, layouts: list[Layout]) -> list[float]:
        """Seconds of some layouts with the number multiplied; infinite for what does not fit."""
        job = self.quantity.scale(self.resolved, factor).job
        priced = price_exactly(job.workload, job.cluster, job.trainer, layouts)
        return [float(one.step_time[0]) if fits(job, one)[0] else math.inf for one in priced]

    def kept(self, found: Best, factor: float) -> bool:
        """The choice still wins: it is the plan found, or as fast, as the search refines its finalists only."""
        if not found.fits or found.layout is None or found.prediction is None:
            return False
        same = plan_key(found.layout) == plan_key(self.choice)
        return same or self.times(factor, [self.choice])[0] <= found.prediction.step_time_s

    def flip(self, reach: float) -> Flip:
        """The direction that ends at ``reach``.

        Times are sums of terms proportional to the number or its inverse, and of maxima of such: the fastest of many
        plans is their lower envelope, which one plan seldom leaves and comes back to. So a winner that is the same at the
        end counts as the same on the way. Else the choice is priced against the winners known so far until they cross, and
        a search on both sides of that point says who wins there: a third plan joins the known ones.
        """
        if abs(math.log(reach)) < 0.001 or self.kept(end := self.at(reach), reach):
            return Flip(factor=None, reach=reach, layout=None, loss=0.0, forced=None, fits=True)
        near, far, mine, winners = 1.0, reach, [self.choice], [end.layout] if end.fits and end.layout else []
        winner = end.layout if end.fits else None

        def lost(factor: float) -> bool:
            times = self.times(factor, [*mine, *winners])
            time = min(times[: len(mine)])
            return math.isinf(time) or time > min(times[len(mine) :], default=math.inf)

        for _ in range(LOOKS):
            before, behind = narrowed(near, far, math.log(WIDTH), lost)
            probe = before if before != near else behind
            if probe == far:
                break
            found = self.at(probe)
            if self.kept(found, probe):
                near = probe
                mine += [found.layout] if found.layout else []  # the same plan with another number of virtual stages, say
            else:
                far, winner = probe, found.layout if found.fits else None
                winners += [winner] if winner else []
        loss, forced = self._loss(reach, end)
        return Flip(factor=math.sqrt(near * far), reach=reach, layout=winner, loss=loss, forced=forced, fits=end.fits)

    def _loss(self, reach: float, end: Best) -> tuple[float | None, float | None]:
        """What today's choice costs over the best at the end; or what the best there costs over the choice today."""
        if end.prediction is None or not end.fits:
            return None, None
        best, mine = end.prediction.step_time_s, self.times(reach, [self.choice])[0]
        if math.isinf(mine):
            return None, best / self.times(1.0, [self.choice])[0] - 1.0
        return max(0.0, mine / best - 1.0), None


def narrowed(near: float, far: float, width: float, beyond: Callable[[float], bool]) -> tuple[float, float]:
    """Halves of an interval of factors, in the logarithm, until it is ``width`` wide: ``far`` stays beyond, ``near`` not."""
    while abs(math.log(far / near)) > width:
        middle = math.sqrt(near * far)
        near, far = (near, middle) if beyond(middle) else (middle, far)
    return near, far
