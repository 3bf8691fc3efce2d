"""Factors that a user's runs determine, with their values: the fit, its doubts, and its check on runs held back.

1. All factors are fitted together, held by their priors. A factor is *determined* when the runs leave at most half of its
   prior width, the doubt about all other factors included; any other stays at 1, with the reason, and so does one whose
   90 % interval holds 1. A factor that costs nothing now (host work below what the GPU needs) counts among the others with
   what it would cost where it is three prior widths larger.
2. The determined ones are fitted alone, and each run is predicted with the factors fitted on the others (in up to 24 folds).
   When that is no better than no change at all, nothing is changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.arrays import Floats, NDArray
from planner.error_bars import Z90
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.questions.calibrate.factors import (
    FACTORS,
    Factor,
    Pair,
    bounds,
    highest,
    log_errors,
    usable,
    with_factors,
)
from planner.questions.calibrate.fit import Solution, solve
from planner.record import record
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


@record
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


@record
class Checked:
    """One run: predicted over measured, minus 1, three times."""

    run: Run
    fits: str
    before: float
    after: float
    held_out: float
    """With factors fitted on the other runs."""


@record
class Calibration:
    """What the runs say about a profile and a trainer."""

    moved: tuple[Moved, ...]
    kept: Mapping[str, str]
    """Factors that stay at 1, by key: why, a sentence without their name."""
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
    parts: list[Calibration] = []
    kept: dict[str, str] = {}
    for fits, some in (("time", timed), ("memory", weighed)):
        asked = [one for one in FACTORS if one.fits == fits]
        kept |= {one.key: why for one in asked if (why := _ruled_out(one, some, trainer))}
        first = trainer or next((run.trainer for run in some if run.trainer), None)
        if len(some) >= LEAST_RUNS and first is not None:
            found = _Fit(fits, some, (hardware, first)).run([one for one in asked if one.key not in kept])
            kept |= found.kept
            parts.append(found)
    return Calibration(
        moved=tuple(one for part in parts for one in part.moved), checked=tuple(one for part in parts for one in part.checked),
        kept={one.key: kept[one.key] for one in FACTORS if one.key in kept}, notes=tuple(notes),
    )  # fmt: skip


def _ruled_out(factor: Factor, runs: Sequence[Run], trainer: Trainer | None) -> str:
    """Why a factor cannot be asked of these runs at all; '' = it can."""
    if unused := factor.unused(runs):
        return unused
    if factor.of == "trainer":
        if trainer is None:
            return "your runs come from several trainers; calibrate them one trainer at a time"
        if len({run.trainer.fact(factor.key) for run in runs if run.trainer}) > 1:
            return "your runs were set up with different values of it; calibrate them apart"
    if len(runs) < LEAST_RUNS:
        return f"only {len(runs)} of your runs measured what it shows in; at least {LEAST_RUNS} are needed"
    return ""


class _Fit:
    """The fit of one quantity, time or memory."""

    def __init__(self, fits: str, runs: Sequence[Run], base: Pair) -> None:
        self.fits, self.runs, self.base = fits, list(runs), base

    def solved(self, factors: Sequence[Factor], start: Floats | None = None) -> Solution:
        """The least squares with some factors, the others at 1."""
        return solve(lambda x: self.errors(self.runs, factors, x), bounds(factors, *self.base), start=start)

    def errors(self, runs: Sequence[Run], factors: Sequence[Factor], x: Floats) -> Floats:
        """Logarithms of predicted over measured with factors at the logarithms x."""
        values = {one.key: math.exp(float(value)) for one, value in zip(factors, x, strict=True)}
        return log_errors(with_factors(runs, values), self.fits)

    def run(self, candidates: Sequence[Factor]) -> Calibration:
        """Steps 1 and 2 of the module."""
        together = self.solved(candidates)
        flat = np.max(np.abs(together.jacobian), axis=0) * math.log(1.1) < SENSITIVE
        together = replace(together, jacobian=self._larger(candidates, together, flat))
        reasons = {one.key: self._doubt(n, candidates, together, flat) for n, one in enumerate(candidates)}
        free = [n for n, one in enumerate(candidates) if not reasons[one.key]]
        best = self.solved([candidates[n] for n in free], together.x[free])
        zero, held = self.errors(self.runs, [], np.zeros(0)), self._held_out([candidates[n] for n in free], best)
        if free and np.median(np.abs(np.expm1(held))) >= np.median(np.abs(np.expm1(zero))):
            why = "runs that were held back come out no better than with the profile as it is"
            reasons |= {candidates[n].key: why for n in free}
            free, best, held = [], self.solved([]), zero
        deviations = together.deviations
        moved = (self._moved(candidates[n], x, float(deviations[n])) for n, x in zip(free, best.x.tolist(), strict=True))
        rows = zip(self.runs, *(np.expm1(one).tolist() for one in (zero, best.residuals, held)), strict=True)
        return Calibration(
            moved=tuple(moved), kept={key: why for key, why in reasons.items() if why},
            checked=tuple(Checked(run=run, fits=self.fits, before=a, after=b, held_out=c) for run, a, b, c in rows),
        )  # fmt: skip

    def _larger(self, candidates: Sequence[Factor], together: Solution, flat: NDArray[np.bool_]) -> Floats:
        """The slopes, those of factors that cost nothing now over the way to three prior widths more."""
        jacobian = together.jacobian.copy()
        for n in np.flatnonzero(flat).tolist():
            moved = together.x.copy()
            moved[n] = min(moved[n] + 3.0 * candidates[n].width, float(together.bounds[1, n]))
            way = max(float(moved[n] - together.x[n]), 1e-6)
            jacobian[:, n] = (self.errors(self.runs, candidates, moved) - together.residuals) / way
        return jacobian

    def _moved(self, factor: Factor, x: float, deviation: float) -> Moved:
        """Its interval: the doubt of the fit of all factors, around the value of the determined ones alone."""
        hardware, trainer = self.base
        low, high = (math.exp(x + sign * Z90 * deviation) for sign in (-1.0, 1.0))
        before = trainer.fact(factor.key) if factor.of == "trainer" else getattr(hardware, factor.key, None)
        return Moved(
            factor=factor, value=math.exp(x), low=max(low, factor.low), high=min(high, highest(factor, *self.base)),
            before=float(before) if isinstance(before, (int, float)) else math.nan,
        )  # fmt: skip

    def _doubt(self, n: int, candidates: Sequence[Factor], together: Solution, flat: NDArray[np.bool_]) -> str:
        """Why the runs do not determine a factor; '' = they do."""
        factor, left, found = candidates[n], float(together.deviations[n]), float(together.x[n])
        if flat[n]:
            kind = "time" if self.fits == "time" else "peak"
            return f"{factor.hidden}: 10 % of it moves no predicted {kind} by {SENSITIVE:.1%}; it would take {factor.helps}"
        known = left <= DETERMINED * factor.width
        if known and abs(found) > Z90 * left:
            return ""
        row = np.abs(together.covariance[n]) / together.deviations / left
        row[n] = 0.0
        other = int(np.argmax(row))
        moves = abs(found) > Z90 * left * math.sqrt(max(1.0 - row[other] ** 2, 0.0))  # were the other one certain
        if row[other] >= TOGETHER and (moves or not known):
            pair = f"it and {candidates[other].name} move together"
            return f"{pair}: their correlation is {row[other]:.2f}; it would take {factor.helps}"
        if known:
            low, high = (math.exp(found + sign * Z90 * left) for sign in (-1.0, 1.0))
            return f"your runs agree with it as it is: they put it at {low:.2f} to {high:.2f} times"
        return (
            f"your runs would tell it to {_spread(left)} only, and {_spread(factor.width)} is known without them; "
            f"it would take {factor.helps}"
        )

    def _held_out(self, factors: Sequence[Factor], solution: Solution) -> Floats:
        """Errors of runs held back, each fold priced with the factors that the others give."""
        held, fold = solution.residuals.copy(), np.arange(len(self.runs)) % FOLDS
        for out in (fold == number for number in range(min(FOLDS, len(self.runs)) if factors else 0)):
            some = [self.runs[place] for place in np.flatnonzero(out)]
            held[out] = self.errors(some, factors, solution.without(out))
        return held


def _spread(deviation: float) -> str:
    """A standard deviation of a logarithm as text: +- 20 %, or a factor of 3."""
    return f"+- {100 * deviation:.0f} %" if deviation < 0.5 else f"a factor of {math.exp(deviation):.1f}"
