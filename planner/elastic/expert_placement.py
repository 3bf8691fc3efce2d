"""Which experts lie on which expert-parallel rank: by the tokens that each gets, so that no rank gets many more than the others."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np

from planner.arrays import Floats, NDArray
from planner.errors import PlannerError

Order = NDArray[np.int64]
"""Experts of every layer, rank by rank, (layers, experts)."""


def loads_of(tokens: Mapping[tuple[int, int], float], experts: int) -> tuple[tuple[int, ...], Floats]:
    """Layers that were seen, and tokens of each expert there, (layers, experts). Raises PlannerError."""
    layers = tuple(sorted({layer for layer, _ in tokens}))
    number = {layer: row for row, layer in enumerate(layers)}
    found = np.zeros((len(layers), experts))
    for (layer, expert), value in tokens.items():
        if expert >= experts:
            raise PlannerError(f"expert {expert} was counted, but the model has {experts} experts; is it the plan of this run?")
        found[number[layer], expert] = value
    return layers, found


def unevenness(loads: Floats, ranks: int, order: Order | None = None) -> float:
    """Tokens of the busiest of some ranks over the mean, mean over layers weighted by their tokens; a rank holds as many experts as
    the others, in ``order``, or as they are numbered."""
    placed = loads if order is None else np.take_along_axis(loads, order, axis=1)
    by_rank = placed.reshape(len(loads), ranks, -1).sum(axis=2)
    total = float(by_rank.sum())
    return float(by_rank.max(axis=1).sum()) * ranks / total if total > 0 else 1.0


def placed(loads: Floats, ranks: int) -> Order:
    """An even placement: the busiest expert first, each to the rank with the fewest tokens that has room.

    Longest processing time first with equal counts; every layer for itself.  [Graham 1969, SIAM J. Appl. Math. 17(2); as
    balanced_packing of EPLB]
    """
    layers, experts = loads.shape
    room = experts // ranks
    found = np.empty((layers, experts), dtype=np.int64)
    for layer in range(layers):
        held: list[list[int]] = [[] for _ in range(ranks)]
        queue = [(0.0, rank) for rank in range(ranks)]
        for expert in np.argsort(-loads[layer], kind="stable"):
            tokens, rank = heapq.heappop(queue)
            held[rank].append(int(expert))
            if len(held[rank]) < room:
                heapq.heappush(queue, (tokens + float(loads[layer, expert]), rank))
        found[layer] = [expert for one in held for expert in sorted(one)]
    return found
