"""How certain a bias is: the median signed error of a family if other jobs of its kind had been published."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from planner.questions.accuracy.prediction import Pair

DRAWS = 400
"""Resamplings: the ends of a 90 % interval then rest on 20 draws each."""
INSIDE = 0.9
"""Share of the resamplings inside of the interval."""


def kind_of(pair: Pair) -> Hashable:
    """Runs that share most of what could be wrong about them: a source, a model, a GPU, a precision."""
    workload, cluster = pair.run.workload, pair.run.cluster
    if workload is None or cluster is None:
        return (pair.run.source, pair.run.id)
    model = workload.model
    return (pair.run.source, model.num_layers, model.hidden_size, cluster.hardware.name, workload.precision)


def bias_interval(errors: Sequence[float], kinds: Sequence[Hashable]) -> tuple[float, float] | None:
    """Ends of the interval that holds INSIDE of the medians when kinds of run are drawn again, with replacement.

    The cluster bootstrap [Field and Welsh 2007, J. R. Stat. Soc. B 69(3)]: rows of one model on one machine are wrong
    together, so that whole kinds are drawn, not rows. Draws are the same every time. None with fewer than three kinds.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    place, count = np.array([numbers[kind] for kind in kinds], dtype=int), len(numbers)
    if count < 3:
        return None
    order = np.argsort(errors, kind="stable")
    values, place = np.asarray(errors, dtype=float)[order], place[order]
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), size=DRAWS)
    weights = np.cumsum(drawn[:, place], axis=1)
    total = weights[:, -1:]
    low, high = (values[np.argmax(2 * weights >= total + more, axis=1)] for more in (0, 1))
    ends = np.quantile((low + high) / 2.0, [(1.0 - INSIDE) / 2.0, (1.0 + INSIDE) / 2.0])
    return float(ends[0]), float(ends[1])
