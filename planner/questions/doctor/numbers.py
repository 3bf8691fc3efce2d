"""Measured against predicted: is the gap inside the interval, and if not, what would explain it.

Every mechanism is priced again over the sizes that it may have; its weight among the others is Bayes' rule for one cause at a
time, with the model's own error as one more cause: the equation, its priors and its limits stand in docs/explain.md.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from planner.cost.estimate import Estimate
from planner.error_bars import QUANTITIES, error_bar
from planner.errors import PlannerError
from planner.plan_file import Plan
from planner.questions.doctor.mechanisms import Mechanism, faster, memory_mechanisms, slower
from planner.questions.doctor.traced import MOST, Traced, likelihood
from planner.record import record
from planner.timeline.priced_plan import estimate_of, price_plan
from planner.units import GIB, format_bytes, format_seconds

MODEL = 4.0
"""The model's own error counts as a cause that this many published sources had: those that docs/log could not explain."""
OUTSIDE = (0.1, 5.0)
"""Part of all runs that lies outside the interval, by what the interval is; and how many times wider these are spread."""
GRID = 5
"""Sizes of a continuous mechanism that are priced; between them its effect is interpolated."""
FINE = 400
"""Steps of the integral over sizes."""
LEAST = 0.1
"""Mechanisms that explain less of the gap than this are not listed."""
LEAST_SHARE, LISTED = 1e-3, 3
"""Explanations that weigh less than this share are not listed, but for the first three."""
MOVES = 0.005
"""A mechanism moves the other quantity when it changes it by more than this part."""
MOST_ODDS = 1e3
"""Most that the other quantity can count for or against."""
STRANGE = 1000.0
"""Times the prediction, or the prediction over what was measured, from which on it is not the same quantity."""
KINDS = {"device": "memory_peak", "reserved": "memory_reserved", "allocated": "memory_allocated"}
"""Kinds of measured peaks (nvidia-smi; torch.cuda.max_memory_reserved; torch.cuda.max_memory_allocated) -> of Estimate."""
Values = tuple[float, float, float, float]
"""Seconds, bytes of the measured kind, the chance that it does not run out of memory, and how well its parts meet a trace."""


@record
class Explanation:
    """One mechanism as the cause of a gap."""

    key: str
    name: str
    size: str
    """The size that explains most, in words."""
    value: float
    """The same as a number: a factor, or an option."""
    would_be: float
    """Seconds, or bytes, that are predicted with it."""
    explains: float
    """Part of the gap (in the logarithm) that this explains; above 1 it would do more."""
    share: float
    """Weight among all explanations, the model's own error included."""
    seen: int
    source: str
    check: str

    @property
    def verdict(self) -> str:
        """The share in a word."""
        return "likely" if self.share >= 0.3 else "possible" if self.share >= 0.08 else "unlikely"

    def to_dict(self, unit: str, scale: float) -> dict[str, Any]:
        """Plain data."""
        plain = {**vars(self), f"would_be_{unit}": self.would_be / scale, "verdict": self.verdict}
        del plain["would_be"]
        return plain


@record
class Finding:
    """One measured quantity."""

    quantity: str
    """'step_time' or 'memory'."""
    measured: float
    """Seconds, or bytes."""
    predicted: float
    interval: tuple[float, float]
    """Nine of ten runs lie within."""
    explanations: tuple[Explanation, ...]
    """Largest share first."""
    model_share: float
    """Share of the model's own error."""
    rest: float
    """Share of all explanations that are too small to be listed."""

    @property
    def inside(self) -> bool:
        """The measured value lies in the stated interval: nothing needs to be wrong."""
        return self.interval[0] <= self.measured <= self.interval[1]

    @property
    def gap(self) -> float:
        """Measured over predicted, minus 1."""
        return self.measured / self.predicted - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data; seconds, and GiB."""
        unit, scale = ("s", 1.0) if self.quantity == "step_time" else ("gib", GIB)
        return {
            "quantity": self.quantity, f"measured_{unit}": self.measured / scale, f"predicted_{unit}": self.predicted / scale,
            f"interval_{unit}": [bound / scale for bound in self.interval], "inside": self.inside, "gap": self.gap,
            "model_error_share": self.model_share, "not_listed_share": self.rest,
            "explanations": [one.to_dict(unit, scale) for one in self.explanations],
        }  # fmt: skip


@record
class Diagnosis:
    """The measured values of a plan, explained."""

    plan: Plan

    findings: tuple[Finding, ...]
    memory_kind: str
    """One of KINDS."""
    basis: str
    """Runs behind the interval of the step time."""
    traced: Traced | None = None
    """Traces of the run, compared with the plan."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        findings = [one.to_dict() for one in self.findings]
        traced = {} if self.traced is None else {"trace": self.traced.to_dict()}
        return {"memory_kind": self.memory_kind, "interval_basis": self.basis, "findings": findings, **traced}


def _check(step_time: float | None, memory: float | None, memory_kind: str) -> None:
    """Raise PlannerError where nothing was measured, or nothing that can be."""
    if step_time is None and memory is None:
        raise PlannerError("what was measured? give --measured 14.2s, --memory 71GiB, or both; or --trace with a trace of torch")
    for name, value in (("--measured", step_time), ("--memory", memory)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise PlannerError(f"{name} must be above zero")
    if memory_kind not in KINDS:
        raise PlannerError(f"memory is measured as one of {', '.join(KINDS)}, not '{memory_kind}'")


def diagnose(
    plan: Plan, step_time: float | None, memory: float | None = None, memory_kind: str = "device", traced: Traced | None = None
) -> Diagnosis:
    """Compare what was measured, in seconds and bytes, with a plan; what is ``traced`` weighs for and against mechanisms by the
    parts of the step. Raises PlannerError."""
    _check(step_time, memory, memory_kind)
    base = price_plan(plan)
    usable = base.estimate.usable_memory
    step = float(base.estimate.step_time[0])
    _require_of_this_job("--measured", step_time, step, format_seconds, "the time of one optimizer step")
    if memory is not None and memory > 4 * usable:
        raise PlannerError(
            f"--memory {memory / GIB:.4g} GiB is more than four times the {usable / GIB:.4g} GiB of the card; "
            "give the peak of one GPU"
        )
    _require_of_this_job("--memory", memory, float(base.estimate.memory_peak[0]), format_bytes, "the peak of one GPU")

    def values(found: Estimate) -> Values:
        chance = 1.0 - float(found.out_of_memory_probability[0])
        time = {name: float(column[0]) for name, column in found.time.items()}
        meets = likelihood(time, traced.measured) if traced is not None else 0.0
        return float(found.step_time[0]), float(getattr(found, KINDS[memory_kind])[0]), chance, meets

    @cache
    def changed(mechanism: Mechanism, size: float) -> Values:
        return values(estimate_of(*mechanism.change(base, size)))

    one, before = plan.prediction, values(base.estimate)
    # The interval of the device's peak holds for its other kinds as well, in proportion.
    low, high = (before[1] / one.memory_peak_gib * bound for bound in one.memory_peak_range_gib)
    job, kind = base.job, plan.kind()
    times, peaks = (error_bar(name, job.trainer, job.cluster.hardware, kind).bulk for name in QUANTITIES)
    asked: tuple[_Asked, _Asked] = ((step_time, one.step_time_range_s, times), (memory, (low, high), peaks))
    findings = []
    if step_time is not None:
        mechanisms = slower(base) if step_time > before[0] else faster(base)
        findings.append(_finding(0, asked, before, mechanisms, changed, traced))
    if memory is not None:
        findings.append(_finding(1, asked, before, memory_mechanisms(base, memory > before[1]), changed, traced))
    return Diagnosis(
        plan=plan, findings=tuple(findings), memory_kind=memory_kind, basis=one.step_time_range_basis, traced=traced
    )  # fmt: skip


def _require_of_this_job(
    flag: str, measured: float | None, predicted: float, in_words: Callable[[float], str], what: str
) -> None:
    """Raise PlannerError where what was measured is so far from the prediction that it is of something else, or in another unit."""
    if measured is not None and not 1.0 / STRANGE < measured / predicted < STRANGE:
        times = measured / predicted if measured > predicted else predicted / measured
        raise PlannerError(
            f"{flag} {in_words(measured)} is {times:,.0f} times {'more' if measured > predicted else 'less'} than the predicted "
            f"{in_words(predicted)}, which no cause explains; give {what}, with its unit"
        )


_Asked = tuple[float | None, tuple[float, float], float]
"""What was measured of one quantity, if it was, where nine of ten runs lie, and the deviation of the bulk of them."""


def _finding(
    index: int, asked: tuple[_Asked, _Asked], before: Values, mechanisms: list[Mechanism],
    changed: Callable[[Mechanism, float], Values], traced: Traced | None,
) -> Finding:  # fmt: skip
    """Step time (index 0) or memory (1); ``before`` is predicted, ``changed`` with a mechanism at a size."""
    (said, interval, sigma), predicted = asked[index], before[index]
    measured = said or math.nan
    gap = math.log(measured / predicted)
    weighed: list[tuple[float, Explanation]] = []
    for mechanism in mechanisms:

        def effect(size: float, one: Mechanism = mechanism) -> float:
            return math.log(changed(one, size)[index] / predicted)

        evidence, best = _weigh(mechanism, effect, gap, sigma)
        if gap == 0 or effect(best) / gap < LEAST:
            continue
        with_it = changed(mechanism, best)
        named = {name: getattr(mechanism, name) for name in ("key", "name", "seen", "source", "check")}
        explanation = Explanation(
            **named, size=mechanism.size_text(best), value=best, would_be=with_it[index], explains=effect(best) / gap,
            share=0.0,
        )  # fmt: skip
        odds = _odds(with_it, before, asked[1 - index], 1 - index) * math.exp(min(max(with_it[3] - before[3], -MOST), MOST))
        if traced is not None and mechanism.key == "slow_gpu":
            odds *= math.exp(traced.waits_odds(with_it[0] / before[0]))
        weighed.append(((mechanism.seen + 1) * evidence * odds, explanation))
    model = MODEL * ((1.0 - OUTSIDE[0]) * _normal(gap, sigma) + OUTSIDE[0] * _normal(gap, OUTSIDE[1] * sigma))
    whole = model + sum(weight for weight, _ in weighed) or 1.0  # all are 0 where the gap is beyond what the weights resolve
    ranked = sorted(weighed, key=lambda pair: -pair[0])
    listed = max(LISTED, sum(weight >= LEAST_SHARE * whole for weight, _ in weighed))
    return Finding(
        quantity=("step_time", "memory")[index], measured=measured, predicted=predicted, interval=interval,
        explanations=tuple(replace(one, share=weight / whole) for weight, one in ranked[:listed]),
        model_share=model / whole, rest=sum(weight for weight, _ in ranked[listed:]) / whole,
    )  # fmt: skip


def _weigh(
    mechanism: Mechanism, effect: Callable[[float], float], gap: float, sigma: float
) -> tuple[float, float]:
    """Evidence of a mechanism, and the size whose effect (of the logarithm) comes nearest to the gap."""
    if mechanism.width == 0:
        likelihoods = [_normal(gap - effect(size), sigma) for size in mechanism.sizes]
        return sum(likelihoods) / len(likelihoods), min(mechanism.sizes, key=lambda size: abs(gap - effect(size)))
    grid = np.linspace(0.0, math.log(mechanism.sizes[0]), GRID)
    errors = np.array([effect(math.exp(x)) for x in grid]) - gap
    fine = np.linspace(0.0, grid[-1], FINE)
    prior = np.exp(-0.5 * (fine / mechanism.width) ** 2)
    likelihood = np.array([_normal(x, sigma) for x in np.interp(fine, grid, errors)])
    crossed = np.flatnonzero(np.sign(errors[:-1]) != np.sign(errors[1:]))
    best = float(grid[int(np.argmin(np.abs(errors)))])
    if len(crossed):
        from scipy.optimize import brentq  # type: ignore[import-untyped]

        cell = grid[crossed[0]], grid[crossed[0] + 1]
        best = float(brentq(lambda x: effect(math.exp(x)) - gap, *cell, xtol=1e-4))
    return float(np.sum(prior * likelihood) / np.sum(prior)), math.exp(best)


def _odds(with_it: tuple[float, ...], without: tuple[float, ...], other: _Asked, index: int) -> float:
    """How much more plausible the rest is with the mechanism: the job ran at all, and the other quantity where measured."""
    odds = min((with_it[2] + 1.0 / MOST_ODDS) / (without[2] + 1.0 / MOST_ODDS), 1.0)
    measured, _, sigma = other
    if measured is None or abs(with_it[index] / without[index] - 1.0) < MOVES:
        return odds
    better, before = (_normal(math.log(measured / one[index]), sigma) + 1e-12 for one in (with_it, without))
    return odds * min(max(better / before, 1.0 / MOST_ODDS), MOST_ODDS)


def _normal(x: float, sigma: float) -> float:
    return math.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2.0 * math.pi))
