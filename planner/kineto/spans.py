"""Pieces of time: their union, what lies outside of others, gaps. Arrays of shape (N, 2), start and end in seconds."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from planner.arrays import ArrayLike, Floats, NDArray

Key = TypeVar("Key", bound=Hashable)
NONE = np.zeros((0, 2))
TOUCH = 2e-9
"""Seconds between two pieces that touch: microseconds since a start of weeks ago are known to a nanosecond as floats."""


def union(spans: ArrayLike) -> Floats:
    """The same time as disjoint pieces in order: (N, 2) -> (M, 2); pieces that touch are one."""
    pieces = np.asarray(spans, dtype=float).reshape(-1, 2)
    pieces = pieces[pieces[:, 1] > pieces[:, 0]]
    if not len(pieces):
        return NONE
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    ends = np.maximum.accumulate(pieces[:, 1])
    first = np.append(True, pieces[1:, 0] > ends[:-1] + TOUCH)
    return np.column_stack([pieces[first, 0], ends[np.append(first[1:], True)]])


def covered(spans: ArrayLike) -> float:
    """Seconds in which at least one of the pieces runs."""
    return float(np.sum(np.diff(union(spans), axis=1)))


def outside(spans: ArrayLike, others: ArrayLike) -> float:
    """Seconds in which one of the pieces runs and none of the others: |A or B| - |B|."""
    both = np.concatenate([np.asarray(one, dtype=float).reshape(-1, 2) for one in (spans, others)])
    return covered(both) - covered(others)


def clipped(spans: Floats, low: float, high: float) -> Floats:
    """The pieces inside of one piece of time; those outside have no length."""
    return np.clip(spans, low, high)


def gaps(spans: ArrayLike, low: float, high: float) -> Floats:
    """The time between two moments in which none of the pieces runs, (M, 2)."""
    busy = union(clipped(np.asarray(spans, dtype=float).reshape(-1, 2), low, high))
    edges = np.concatenate([[low], busy.ravel(), [high]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0] + TOUCH]


def shared(kinds: Mapping[Key, ArrayLike], under: ArrayLike = NONE) -> dict[Key, float]:
    """Seconds of each kind in which nothing of ``under`` runs; where several kinds run they share the time evenly.

    The sum over kinds is |union of all kinds| - |what of it is under|, so that parts of a step sum to it.
    """
    merged = {kind: union(spans) for kind, spans in kinds.items()}
    below = union(under)
    edges = np.unique(np.concatenate([below.ravel(), *(one.ravel() for one in merged.values())]))
    if len(edges) < 2:
        return dict.fromkeys(kinds, 0.0)

    def runs(pieces: Floats) -> NDArray[np.bool_]:
        change = np.zeros(len(edges), dtype=np.int64)
        np.add.at(change, np.searchsorted(edges, pieces[:, 0]), 1)
        np.add.at(change, np.searchsorted(edges, pieces[:, 1]), -1)
        return np.cumsum(change)[:-1] > 0

    running = {kind: runs(pieces) for kind, pieces in merged.items()}
    free = np.diff(edges) * ~runs(below) / np.maximum(np.sum([*running.values()], axis=0), 1)
    return {kind: float(np.sum(free[one])) for kind, one in running.items()}
