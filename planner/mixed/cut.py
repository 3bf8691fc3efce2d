"""The exact cut of a model's layers over unlike pipeline stages."""

from __future__ import annotations

import bisect
from collections import Counter

import numpy as np

from planner.arrays import Floats, NDArray
from planner.record import record


@record
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
    return Cuts([StageCosts(one) for one in costs]).best(microbatches)


class StageCosts:
    """Seconds of one stage as the cut looks them up."""

    def __init__(self, costs: Floats) -> None:
        """``costs``: by layers behind which the stage begins, as many as make a difference, and number of layers."""
        rows, size = costs.shape
        held, end = np.indices((size, size), sparse=True)
        self.by_count = np.where(end >= held, costs[np.clip(end - held, 0, rows - 1), held], np.inf)
        """By number of layers n and end e, infinite for e < n."""
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
        table = self.by_count[: max(bisect.bisect_right(self._levels, bound), 1)]
        return table if self._plain and self._levels[0] <= bound else np.where(table <= bound, table, np.inf)

    def most(self, bounds: Floats) -> NDArray[np.intp]:
        """Most layers, wherever the stage begins, that take no longer than each bound; 0 where none does."""
        return np.asarray(np.maximum(np.searchsorted(self._least, bounds, side="right") - 1, 0))


class Cuts:
    """All cuts over some stages: what one number of microbatches finds of them is known to the next."""

    def __init__(self, stages: list[StageCosts]) -> None:
        counts = Counter(stages)
        bounds = np.unique(np.concatenate([one.values for one in counts]))
        room = np.sum([count * one.most(bounds) for one, count in counts.items()], axis=0)
        self.stages, self.bounds = stages, bounds[room >= stages[0].by_count.shape[1] - 1]
        self._known: dict[float, tuple[float, Cut | None]] = {}

    def least(self, bound: float) -> tuple[float, Cut | None]:
        """The least sum with no stage above a bound, and its cut; infinite and None where there is none."""
        if bound not in self._known:
            sums = LeastSums(self.stages, bound)
            self._known[bound] = sums.least, sums.cut() if np.isfinite(sums.least) else None
        return self._known[bound]

    def best(self, microbatches: float, below: float = np.inf) -> Cut | None:
        """``best_cut``; None as well where none takes less than ``below`` seconds.

        The least sum does not grow with z: that of one z bounds those of all smaller ones, so that most are not looked at. The
        smallest z is often the best, and without a bound there is the least sum of all.
        """
        waits = (microbatches - 1.0) * self.bounds
        best: Cut | None = None
        least = self.least(np.inf)[0] if len(waits) else np.inf
        spans = [(1, len(waits), least), (0, 1, least)] if np.isfinite(least) else []  # numbers of z, and what no sum is less than
        while spans:
            low, high, least = spans.pop()
            high = low + int(np.searchsorted(waits[low:high], below - least))
            if low >= high:
                continue
            middle = (low + high) // 2
            total, cut = self.least(float(self.bounds[middle]))
            if cut is not None and cut.seconds(microbatches) < below:
                best, below = cut, cut.seconds(microbatches)
            spans += [(middle + 1, high, least), (low, middle, total)]
            spans = [one for one in spans if np.isfinite(one[2])]
        return self.least(best.slowest)[1] if best else None  # of equal ones always the same


class LeastSums:
    """The least sums of stages of which none is above a bound."""

    def __init__(self, stages: list[StageCosts], bound: float) -> None:
        size, allowed = stages[0].by_count.shape[1], {one: one.within(bound) for one in set(stages)}
        self.stages, self.tables = stages, [allowed[one] for one in stages]
        every = np.full((len(stages) + 1, 2 * size), np.inf)  # f_j(e - n) stands behind as many infinities
        every[0, size] = 0.0
        self.before = np.lib.stride_tricks.sliding_window_view(every, size, axis=1)[:, ::-1]
        """f_j(e - n) by j, n and e."""
        for number, table in enumerate(self.tables):
            np.minimum.reduce(self.before[number, : len(table)] + table, axis=0, out=every[number + 1, size:])
        self.least = float(every[-1, -1])

    def cut(self) -> Cut:
        """The cut with the least sum."""
        end, layers, taken = self.before.shape[-1] - 1, list[int](), list[float]()
        for number in range(len(self.stages) - 1, -1, -1):
            table = self.tables[number]
            layers.append(int(np.argmin(self.before[number, : len(table), end] + table[:, end])))
            taken.append(float(table[layers[-1], end]))
            end -= layers[-1]
        return Cut(layers=tuple(reversed(layers)), slowest=max(taken), total=sum(reversed(taken)))
