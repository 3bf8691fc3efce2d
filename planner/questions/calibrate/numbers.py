"""Factors that a user's runs determine, with their values: the fit, its doubts, and its check on runs held back.

1. All factors are fitted together, held by their priors. A factor is *determined* when the runs leave at most half of its
   prior width, the doubt about all other factors included; any other stays at 1, with the reason, and so does one whose
   90 % interval holds 1.
2. The determined ones are fitted alone. Then each run is predicted with the factors fitted on the others (in up to 24
   folds); a factor without which these predictions are as good goes back to 1 too.
3. When what is left does not predict held-back runs better than no change at all, nothing is changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats, NDArray
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.questions.calibrate.factors import (
    FACTORS,
    Factor,
    Pair,
    highest,
    log_errors,
    unknown,
    usable,
    with_factors,
)
from planner.questions.calibrate.fit import Residuals, Solution, Unknown, held_back, solve, solve_near, total
from planner.runs import Run
from planner.trainer import Trainer

LEAST_RUNS = 3
"""Runs that must have measured time (or memory): each is predicted from the others."""
DETERMINED = 0.5
"""Width that the runs leave over that of the prior, at most."""
SENSITIVE = 0.003
"""Least change of a predicted time or peak, for 10 % of a factor, that counts."""
TOGETHER = 0.8
"""Correlation from which two factors move together."""
FOLDS = 24
"""Most groups of runs that are held back in turn; every run is one of its own when there are fewer."""
LARGER = "it would matter where it is larger"
"""Begins the reason of a factor whose cost is hidden now."""
Z90 = 1.645
"""Standard deviations that hold 90 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A factor that the runs determined."""

    factor: Factor
    value: float
    """What it multiplies by."""
    low: float
    """Lower end of its 90 % interval."""
    high: float
    """Upper end."""
    before: float
    """The quantity as the profile or the trainer had it, where it is one number; nan where it is a curve."""

    @property
    def after(self) -> float:
        """The quantity now."""
        return self.before * self.value


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A factor that stays at 1."""

    factor: Factor
    reason: str
    """Why: a sentence without its name."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One run: predicted over measured, minus 1, three times."""

    run: Run
    fits: str
    before: float
    after: float
    held_out: float
    """With factors fitted on the other runs."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the runs say about a profile and a trainer."""

    moved: tuple[Moved, ...]
    kept: tuple[Kept, ...]
    checked: tuple[Checked, ...]
    notes: tuple[str, ...] = ()
    """What else a user should know: runs left out, and why."""

    @property
    def values(self) -> dict[str, float]:
        """Factors by key; those that stay at 1 are not in it."""
        return {one.factor.key: one.value for one in self.moved}

    def medians(self, fits: str) -> dict[str, float] | None:
        """Median size of the errors before, after and held out, and their number; None without such runs."""
        rows = [one for one in self.checked if one.fits == fits]
        if not rows:
            return None
        found = {
            name: float(np.median([abs(getattr(r, name)) for r in rows])) for name in ("before", "after", "held_out")
        }
        return {"runs": len(rows), **found}


def calibrate(runs: Sequence[Run], hardware: HardwareProfile, trainer: Trainer | None) -> Calibration:
    """Fit the factors of a profile, and of a trainer where all runs share one, to measured runs.

    ``hardware`` is the base that the runs' profiles are variants of (other nodes, other networks); ``trainer`` None means
    that they come from several trainers, whose own factors then stay. Raises PlannerError when there are too few.
    """
    notes = [f"{run.source}/{run.id} is left out: {run.unsupported}" for run in runs if run.unsupported]
    timed = usable(runs, "time")
    weighed = [run for run in usable(runs, "memory") if run.measured.memory_kind != "allocated"]
    if len(timed) < LEAST_RUNS and len(weighed) < LEAST_RUNS:
        more = f"; {notes[0]}" if notes else ""
        raise PlannerError(
            f"calibration needs at least {LEAST_RUNS} runs with a step time, because each is predicted from the others; "
            f"{len(timed)} of your {len(runs)} can be used{more}"
        )
    moved: list[Moved] = []
    kept: dict[str, Kept] = {}
    checked: list[Checked] = []
    for fits, some in (("time", timed), ("memory", weighed)):
        candidates = []
        for factor in (one for one in FACTORS if one.fits == fits):
            reason = _ruled_out(factor, some, trainer)
            if reason:
                kept[factor.key] = Kept(factor=factor, reason=reason)
            else:
                candidates.append(factor)
        if len(some) < LEAST_RUNS:
            continue
        first = trainer or some[0].trainer
        assert first is not None
        found = _Fit(fits, some, candidates, (hardware, first)).run()
        moved += found.moved
        kept |= {one.factor.key: one for one in found.kept}
        checked += found.checked
    ordered = tuple(kept[one.key] for one in FACTORS if one.key in kept)
    return Calibration(moved=tuple(moved), kept=ordered, checked=tuple(checked), notes=tuple(notes))


def _ruled_out(factor: Factor, runs: Sequence[Run], trainer: Trainer | None) -> str:
    """Why a factor cannot be asked of these runs at all; '' = it can."""
    if not any(factor.used(run) for run in runs):
        return factor.unused
    if factor.of == "trainer":
        if trainer is None:
            return "your runs come from several trainers; calibrate them one trainer at a time"
        if len({run.trainer.fact(factor.key) for run in runs if run.trainer}) > 1:
            return "your runs were set up with different values of it; calibrate them apart"
    if len(runs) < LEAST_RUNS:
        return f"only {len(runs)} of your runs measured what it shows in; at least {LEAST_RUNS} are needed"
    return ""


class _Fit:
    """The fit of one quantity, time or memory, with all that is asked of it."""

    def __init__(self, fits: str, runs: Sequence[Run], candidates: Sequence[Factor], base: Pair) -> None:
        self.fits, self.runs, self.candidates, self.base = fits, list(runs), list(candidates), base
        self.zero = self._residuals([])(np.zeros(0))

    def _residuals(self, factors: Sequence[Factor]) -> Residuals:
        return lambda x: log_errors(with_factors(self.runs, _values(factors, x)), self.fits)

    def _unknowns(self, factors: Sequence[Factor]) -> list[Unknown]:
        return [unknown(one, *self.base) for one in factors]

    def run(self) -> Calibration:
        """Steps 1 to 3 of the module."""
        together = solve(self._residuals(self.candidates), self._unknowns(self.candidates))
        reasons = {one.key: self._doubt(index, together) for index, one in enumerate(self.candidates)}
        self._rivals(together, reasons)
        free = [one for one in self.candidates if not reasons[one.key]]
        start = np.array([together.x[self.candidates.index(one)] for one in free])
        best = solve(self._residuals(free), self._unknowns(free), start=start)
        free, best = self._eliminated(free, best, reasons)
        held = self._held_out(free, best)
        if free and np.median(np.abs(np.expm1(held))) >= np.median(np.abs(np.expm1(self.zero))):
            for one in free:
                reasons[one.key] = "runs that were held back come out no better than with the profile as it is"
            free, held = [], self.zero
            best = solve(self._residuals([]), [])
        moved = tuple(self._moved(one, index, best, together) for index, one in enumerate(free))
        kept = tuple(Kept(factor=one, reason=reasons[one.key]) for one in self.candidates if reasons[one.key])
        rows = zip(self.runs, *(np.expm1(one).tolist() for one in (self.zero, best.residuals, held)), strict=True)
        checked = tuple(Checked(run=run, fits=self.fits, before=a, after=b, held_out=c) for run, a, b, c in rows)
        return Calibration(moved=moved, kept=kept, checked=checked)

    def _eliminated(self, free: list[Factor], best: Solution, reasons: dict[str, str]) -> tuple[list[Factor], Solution]:
        """Without the factors that held-back runs do as well without, one after the other; the reasons are filled in."""
        whole, score = len(free), _score(self._held_out_near(free, best))
        while free:
            fewer = []
            for one in free:
                some = [other for other in free if other is not one]
                places = [free.index(other) for other in some]
                near = solve_near(self._residuals(some), best, places, self._unknowns(some))
                fewer.append((_score(self._held_out_near(some, near)), one, some, near))
            least, one, some, near = min(fewer, key=lambda entry: entry[0])
            if least > score:
                break
            reasons[one.key] = (
                f"runs that were held back come out no better with it (off by {score:.2%} with, {least:.2%} without it)"
            )
            free, best, score = some, near, least
        if len(free) < whole:
            best = solve(self._residuals(free), self._unknowns(free), start=best.x)
        return free, best

    def _moved(self, factor: Factor, index: int, best: Solution, together: Solution) -> Moved:
        """Its interval: the doubt of the fit of all factors, around the value of the determined ones alone."""
        deviation = float(together.deviations[self.candidates.index(factor)])
        x = float(best.x[index])
        top = highest(factor, *self.base)
        low, high = (math.exp(x + sign * Z90 * deviation) for sign in (-1.0, 1.0))
        hardware, trainer = self.base
        before = trainer.fact(factor.key) if factor.of == "trainer" else getattr(hardware, factor.key, None)
        return Moved(
            factor=factor, value=math.exp(x), low=max(low, factor.low), high=min(high, top),
            before=float(before) if isinstance(before, (int, float)) else math.nan,
        )  # fmt: skip

    def _doubt(self, index: int, together: Solution) -> str:
        """Why the runs do not determine a factor; '' = they do."""
        factor = self.candidates[index]
        change = float(np.max(np.abs(together.jacobian[:, index]))) * math.log(1.1)
        kind = "time" if self.fits == "time" else "peak"
        if change < SENSITIVE:
            wide = self._change(factor, index, together)
            if wide > 3 * SENSITIVE:
                return (
                    f"{LARGER} ({math.exp(factor.width):.1f} times moves a predicted {kind} by {wide:.1%}), but other factors "
                    f"explain your runs without that; it would take {factor.helps}"
                )
            most = f"10 % of it moves no predicted {kind} by more than {max(change, 1e-3):.1%}"
            return f"{factor.hidden}: {most}; it would take {factor.helps}"
        left, found = float(together.deviations[index]), float(together.x[index])
        if left <= DETERMINED * factor.width:
            if abs(found) > Z90 * left:
                return ""
            low, high = (math.exp(found + sign * Z90 * left) for sign in (-1.0, 1.0))
            return f"your runs agree with it as it is: they put it at {low:.2f} to {high:.2f} times"
        row = np.abs(together.correlations[index])
        row[index] = 0.0
        other = int(np.argmax(row))
        if row[other] >= TOGETHER:
            pair = f"it and {self.candidates[other].name} move together"
            return f"{pair}: their correlation is {row[other]:.2f}; it would take {factor.helps}"
        return (
            f"your runs would tell it to {_spread(left)} only, and {_spread(factor.width)} is known without them; "
            f"it would take {factor.helps}"
        )

    def _rivals(self, together: Solution, reasons: dict[str, str]) -> None:
        """Factors that seem determined, but without which one that costs nothing now would explain the runs as well.

        Slopes do not show it: host work costs nothing until it passes what the GPU needs. The runs are fitted again without
        the one and with more of the other; as well means within what 90 % intervals allow.
        """
        unknowns = self._unknowns(self.candidates)
        limit = total(together.residuals, together.x, unknowns, together.spread) + Z90**2
        flat = [n for n, one in enumerate(self.candidates) if reasons[one.key].startswith(LARGER)]
        for mine in [n for n, one in enumerate(self.candidates) if not reasons[one.key]]:
            for other in flat:
                if self._without(mine, other, together, unknowns) > limit:
                    continue
                one, rival = self.candidates[mine], self.candidates[other]
                reasons[one.key] = f"{rival.name} would explain your runs as well; it would take {one.helps}"
                reasons[rival.key] = f"{one.name} would explain your runs as well; it would take {rival.helps}"

    def _without(self, mine: int, other: int, together: Solution, unknowns: list[Unknown]) -> float:
        """What the least squares leave without one factor, from the best of three larger values of another."""
        rest = [number for number in range(len(self.candidates)) if number != mine]
        some, bounds = self._residuals([self.candidates[n] for n in rest]), [unknowns[n] for n in rest]
        place, starts = rest.index(other), []
        for widths in (0.5, 1.0, 1.5):
            start = together.x[rest]
            start[place] = min(start[place] + widths * bounds[place].width, bounds[place].high)
            starts.append((total(some(start), start, bounds, together.spread), start))
        found = solve(some, bounds, start=min(starts, key=lambda pair: pair[0])[1])
        return total(found.residuals, found.x, bounds, together.spread)

    def _change(self, factor: Factor, index: int, together: Solution) -> float:
        """Largest change of a prediction when the factor is one width of its prior larger."""
        moved = together.x.copy()
        moved[index] = min(moved[index] + factor.width, math.log(max(highest(factor, *self.base), 1.0)))
        return float(np.max(np.abs(self._residuals(self.candidates)(moved) - together.residuals)))

    def _folds(self) -> list[NDArray[np.bool_]]:
        """Which runs are held back together."""
        count = min(FOLDS, len(self.runs))
        return [np.arange(len(self.runs)) % count == fold for fold in range(count)]

    def _held_out_near(self, factors: Sequence[Factor], solution: Solution) -> Floats:
        """Errors of runs held back, by the slopes of the solution: near enough to compare sets of factors."""
        held, unknowns = solution.residuals.copy(), self._unknowns(factors)
        for out in self._folds() if factors else ():
            held[out] += solution.jacobian[out] @ (held_back(solution, unknowns, out) - solution.x)
        return held

    def _held_out(self, factors: Sequence[Factor], solution: Solution) -> Floats:
        """Errors of runs held back, each fold priced with the factors that the others give."""
        held, unknowns = self.zero.copy(), self._unknowns(factors)
        for out in self._folds() if factors else ():
            some = [self.runs[place] for place in np.flatnonzero(out)]
            held[out] = log_errors(with_factors(some, _values(factors, held_back(solution, unknowns, out))), self.fits)
        return held


def _values(factors: Sequence[Factor], x: Floats) -> dict[str, float]:
    return {one.key: math.exp(float(value)) for one, value in zip(factors, x, strict=True)}


def _score(errors: Floats) -> float:
    """Mean size of the errors, odd runs counted up to 50 %."""
    return float(np.mean(np.minimum(np.abs(errors), 0.5)))


def _spread(deviation: float) -> str:
    """A standard deviation of a logarithm as text: +- 20 %, or a factor of 3."""
    return f"+- {100 * deviation:.0f} %" if deviation < 0.5 else f"a factor of {math.exp(deviation):.1f}"
