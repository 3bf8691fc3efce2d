"""The exact cut of a model's layers over unlike pipeline stages."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats, NDArray


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layers of every stage, and what a microbatch takes with them."""

    layers: tuple[int, ...]
    slowest: float
    """Seconds of the slowest stage."""
    total: float
    """Seconds of all stages together."""

    def seconds(self, microbatches: float) -> float:
        """Of the pipeline: sum tau + (m - 1) max tau.  [1F1B with stages of any length; Narayanan 2021, section 2.2.1]"""
        return self.total + (microbatches - 1.0) * self.slowest


def best_cut(costs: list[Floats], microbatches: float) -> Cut | None:
    """The layers of p stages that minimise sum tau_j + (m - 1) max tau_j; None where no cut fits.

    ``costs[j][s, n]``: seconds of stage j with n layers behind s others, infinite where its card would run out; (L + 1, L + 1).
    For a bound z on the slowest stage the least sum is found by dynamic programming over layers,

        f_j(e) = min over s of f_{j-1}(s) + tau_j(s, e - s),  tau <= z,

    in O(p L^2); z takes the values of tau, from the smallest at which the stages could hold all layers until (m - 1) z with the
    least possible sum is not better than what was found.
    """
    return best_cut_of([StageCosts(one) for one in costs], microbatches)


class StageCosts:
    """Seconds of one stage as the cut looks them up."""

    def __init__(self, costs: Floats) -> None:
        """``costs``: by layers behind which the stage begins, as many as make a difference, and number of layers."""
        rows, size = costs.shape
        end, held = np.indices((size, size), sparse=True)
        self.by_count = np.where(end >= held, costs[np.clip(end - held, 0, rows - 1), held], np.inf)
        """By end e and number of layers n, infinite for e < n."""
        there = np.arange(rows)[:, None] < size - np.arange(size)
        fastest = np.where(there, costs, np.inf).min(axis=0)
        self.values = np.unique(costs[np.isfinite(costs)])
        self._least = np.minimum.accumulate(fastest[::-1])[::-1]
        self._levels: list[float] = self._least.tolist()
        slowest = np.where(there, costs, -np.inf).max(axis=0)
        alike = slowest == self._least  # wherever it begins, and more layers take longer; a stage may need one at least
        self._plain = bool(np.all(alike[1:]) and (alike[0] or np.isinf(fastest[0])))

    def within(self, bound: float) -> Floats:
        """``by_count`` up to the most layers that the bound allows, infinite where one is above it."""
        table = self.by_count[:, : max(bisect.bisect_right(self._levels, bound), 1)]
        return table if self._plain and self._levels[0] <= bound else np.where(table <= bound, table, np.inf)

    def most(self, bounds: Floats) -> NDArray[np.intp]:
        """Most layers, wherever the stage begins, that take no longer than each bound; 0 where none does."""
        return np.asarray(np.maximum(np.searchsorted(self._least, bounds, side="right") - 1, 0))


def best_cut_of(stages: list[StageCosts], microbatches: float, below: float = np.inf) -> Cut | None:
    """The same of stages made before; None as well where none takes less than ``below`` seconds."""
    counts = Counter(stages)
    bounds = np.unique(np.concatenate([one.values for one in counts]))
    room = np.sum([count * one.most(bounds) for one, count in counts.items()], axis=0)
    enough = np.flatnonzero(room >= len(stages[0].by_count) - 1)
    best: Cut | None = None
    least_sum = 0.0
    for tried, z in enumerate(bounds[enough].tolist(), 1):
        if least_sum + (microbatches - 1.0) * z >= below:
            break
        found = _least_sum(stages, z)
        if found is not None:
            layers, taken = found
            cut = Cut(layers=layers, slowest=max(taken), total=sum(taken))
            if cut.seconds(microbatches) < below:
                best, below = cut, cut.seconds(microbatches)
        if tried == 2:
            unbounded = _least_sum(stages, np.inf)
            if unbounded is None:
                return None
            least_sum = sum(unbounded[1])
    return best


def _least_sum(stages: list[StageCosts], bound: float) -> tuple[tuple[int, ...], list[float]] | None:
    """The cut with the least sum and no stage above the bound, with the seconds of its stages."""
    size = len(stages[0].by_count)
    rows = np.arange(size)
    behind = size + rows[:, None] - rows  # where f(e - n) stands behind as many infinities
    before = np.full(2 * size, np.inf)
    before[size] = 0.0
    counts, allowed = list[NDArray[np.intp]](), dict[int, Floats]()
    for one in stages:
        if id(one) not in allowed:
            allowed[id(one)] = one.within(bound)
        table = allowed[id(one)]
        sums = before.take(behind[:, : table.shape[1]]) + table
        counts.append(sums.argmin(axis=1))
        before[size:] = sums[rows, counts[-1]]
    if not np.isfinite(before[-1]):
        return None
    end, layers, taken = size - 1, list[int](), list[float]()
    for one, held in zip(reversed(stages), reversed(counts), strict=True):
        layers.append(int(held[end]))
        taken.append(float(one.by_count[end, layers[-1]]))
        end -= layers[-1]
    return tuple(reversed(layers)), taken[::-1]
