"""The constants that were calibrated on published runs, fitted again: on all their runs, or without one source.

Constants that are fitted to times, memory or differences of times: least squares (``calibrate.fit``). Constants that decide whether
a layout runs out of memory: the likelihood of what happened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.questions.calibrate.fit import Solution, solve
from planner.runs import Run
from tools.evidence.constants import Constant, predict_with

GRID = 13
"""Values of a constant between the ends of its range at which the likelihood of running out is worked out."""
SURE = 0.01
"""No run is taken to be more certain than this: a mislabelled one weighs ln(100), not without end."""
Z90 = 1.645
"""Standard deviations that hold 90 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What a constant is when a source is left out."""

    value: float
    """In base units."""
    low: float
    """Lower end of its interval (90 %)."""
    high: float
    """Upper end."""
    runs: int
    """Runs behind it; 0 = the default, or the shipped value where the left-out source is not one of its sources."""
    reason: str
    """'fitted', 'shipped' (its sources are all there) or 'default' (none of its runs is left)."""


# ------------------------------------------------------------------------------------------------ fitting again


def refit(
    listed: Sequence[Constant], runs: Sequence[Run], *, without: Collection[str] = ()
) -> dict[str, Refit]:
    """Every constant as it would be without the runs of some sources (file names in profiles/runs), by name.

    A constant that was calibrated on one of them is fitted again on the other runs that determine it, together with
    constants that share them (prior: the default, a quarter of the logarithm of its range wide); where none is left it falls back to its default. All others keep their shipped value.
    Without any source named every constant is fitted again on all its runs, which shows how near the shipped values are.
    ``runs`` is what ``read_runs`` gives, unchanged (all sources, or at least those of the constants).
    """
    concerned = [one for one in listed if not without or set(without) & {*one.sources}]
    evidence = {one.name: one.evidence(runs, without=without) for one in concerned}
    answers: dict[str, Refit] = {}
    for one in listed:
        if one not in concerned:
            answers[one.name] = Refit(value=one.value, low=one.value, high=one.value, runs=0, reason="shipped")
        elif not evidence[one.name]:
            answers[one.name] = _interval(one, 0.0, _width(one), 0, "default")
    for group in _groups([one for one in concerned if evidence[one.name]], evidence):
        known = {name: answer.value for name, answer in answers.items()}
        if group[0].fits == "running out":
            answers[group[0].name] = _likeliest(group[0], listed, known, evidence[group[0].name])
            continue
        solution = _solve(group, listed, known, evidence)
        for one, x, deviation in zip(group, solution.x, solution.deviations, strict=True):
            answers[one.name] = _interval(one, float(x), float(deviation), len(evidence[one.name]), "fitted")
    return {one.name: answers[one.name] for one in listed}


def _groups(concerned: Sequence[Constant], evidence: Mapping[str, list[Run]]) -> list[list[Constant]]:
    """Constants that share runs are fitted together; those that decide what runs out each alone."""
    groups: list[tuple[set[int], list[Constant]]] = []
    for one in concerned:
        mine, members = {id(run) for run in evidence[one.name]}, [one]
        apart = []
        for ids, others in groups:
            if ids & mine and others[0].fits == one.fits != "running out":
                mine, members = mine | ids, [*others, *members]
            else:
                apart.append((ids, others))
        groups = [*apart, (mine, members)]
    return [members for _, members in groups]


def _width(constant: Constant) -> float:
    return math.log(constant.high / constant.low) / 4.0


def _interval(constant: Constant, x: float, deviation: float, runs: int, reason: str) -> Refit:
    """90 % of a normal distribution lie within Z90 deviations; cut at the physical range."""
    ends = (constant.default * math.exp(x + sign * Z90 * deviation) for sign in (-1.0, 1.0))
    low, high = (min(max(end, constant.low), constant.high) for end in ends)
    return Refit(value=constant.default * math.exp(x), low=low, high=high, runs=runs, reason=reason)


def _solve(
    group: Sequence[Constant], listed: Sequence[Constant], known: Mapping[str, float], evidence: Mapping[str, list[Run]]
) -> Solution:
    """The least squares of constants that share their runs, the others at what is ``known`` of them."""
    fits = group[0].fits
    runs = list({id(run): run for one in group for run in evidence[one.name]}.values())
    runs = [run for run, ok in zip(runs, np.isfinite(_logs(runs, listed, known, fits)), strict=True) if ok]
    mean = _means(group, runs)

    def residuals(x: Floats) -> Floats:
        values = {one.name: one.default * math.exp(float(step)) for one, step in zip(group, x, strict=True)}
        errors = _logs(runs, listed, {**known, **values}, fits)
        return errors - mean @ errors if fits == "time differences" else errors

    bounds = [(math.log(one.low / one.default), math.log(one.high / one.default), _width(one)) for one in group]
    return solve(residuals, np.array(bounds).reshape(-1, 3).T)


def _logs(runs: Sequence[Run], listed: Sequence[Constant], values: Mapping[str, float], fits: str) -> Floats:
    """ln(predicted / measured) of time or memory; nan where a run cannot be priced."""
    which = "memory" if fits == "memory" else "step_time"
    found = [getattr(one, which) or math.nan for one in predict_with(runs, listed, values)]
    return np.log(found) - np.log([getattr(run.measured, which) for run in runs])


def _means(group: Sequence[Constant], runs: Sequence[Run]) -> Floats:
    """The matrix that puts the mean of its series in the place of every run, (N, N)."""
    listed = [one for constant in group for one in (*constant.runs, *constant.also)]
    series = [next(one.series(run) for one in listed if one.of([run], group[0].fits)) for run in runs]
    same = np.array([[one == other for other in series] for one in series], dtype=float)
    return np.asarray(same / same.sum(axis=1, keepdims=True))


def _likeliest(one: Constant, listed: Sequence[Constant], known: Mapping[str, float], runs: Sequence[Run]) -> Refit:
    """The value under which what ran out and what did not was most likely, by Bayes' rule on a grid in the logarithm.

    ln p(x) = sum over runs of ln(chance of what happened) - x^2 / (2 w^2),     x = ln(value / default)
    """
    grid = np.linspace(math.log(one.low / one.default), math.log(one.high / one.default), GRID)
    ran = np.array([bool(run.measured.fits) for run in runs])
    logs = []
    for x in grid:
        values = {**known, one.name: one.default * math.exp(float(x))}
        out = np.array([found.out_of_memory or 0.0 for found in predict_with(runs, listed, values)])
        logs.append(np.sum(np.log(np.clip(np.where(ran, 1.0 - out, out), SURE, 1.0))) - x**2 / (2.0 * _width(one) ** 2))
    weight = np.exp(np.array(logs) - max(logs))
    ends = np.interp([0.05, 0.95], (np.cumsum(weight) - 0.5 * weight) / weight.sum(), grid)
    best = float(grid[int(np.argmax(weight))])
    low, high = (one.default * math.exp(float(end)) for end in (min(ends[0], best), max(ends[1], best)))
    return Refit(value=one.default * math.exp(best), low=low, high=high, runs=len(runs), reason="fitted")
