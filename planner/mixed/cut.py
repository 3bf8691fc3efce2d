"""The exact cut of a model's layers over unlike pipeline stages."""

from __future__ import annotations

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

    in O(p L^2); z takes the values of tau from the smallest that is feasible (found by bisection) until (m - 1) z alone with
    the least possible sum is not better than what was found.
    """
    tables = [_by_end(one) for one in costs]
    bounds = np.unique(np.concatenate([one[np.isfinite(one)] for one in tables]))
    unbounded = _least_sum(tables, np.inf)
    if unbounded is None:
        return None
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if _feasible(tables, bounds[middle]):
            high = middle
        else:
            low = middle + 1
    least_sum = sum(unbounded[1])
    best: Cut | None = None
    number = high
    while number < len(bounds):
        z = float(bounds[number])
        if best is not None and least_sum + (microbatches - 1.0) * z >= best.seconds(microbatches):
            break
        found = _least_sum(tables, z)
        if found is not None:
            layers, taken = found
            cut = Cut(layers=layers, slowest=max(taken), total=sum(taken))
            if best is None or cut.seconds(microbatches) < best.seconds(microbatches):
                best = cut
        number += 1
    return best


def _by_end(costs: Floats) -> Floats:
    """Cost by first layer s and end e, (L + 1, L + 1), infinite for e < s."""
    size = len(costs)
    start, end = np.indices((size, size))
    return np.where(end >= start, costs[start, np.maximum(end - start, 0)], np.inf)


def _feasible(tables: list[Floats], bound: float) -> bool:
    """Whether some cut has no stage above the bound."""
    reached: NDArray[np.bool_] = np.zeros(len(tables[0]), dtype=bool)
    reached[0] = True
    for one in tables:
        reached = np.any(reached[:, None] & (one <= bound), axis=0)
    return bool(reached[-1])


def _least_sum(tables: list[Floats], bound: float) -> tuple[tuple[int, ...], list[float]] | None:
    """The cut with the least sum and no stage above the bound, with the seconds of its stages."""
    least = np.full(len(tables[0]), np.inf)
    least[0] = 0.0
    came = list[NDArray[np.intp]]()
    for one in tables:
        sums = least[:, None] + np.where(one <= bound, one, np.inf)
        came.append(np.argmin(sums, axis=0))
        least = sums[came[-1], np.arange(sums.shape[1])]
    if not np.isfinite(least[-1]):
        return None
    end, ends = len(least) - 1, list[int]()
    for back in reversed(came):
        ends.append(end)
        end = int(back[end])
    ends = [0, *reversed(ends)]
    layers = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
    return layers, [float(one[a, b]) for one, a, b in zip(tables, ends, ends[1:], strict=False)]
