"""Before the first point a warm-up, then operators and whole layers in rounds: clocks and load are the same for both.

A processor that was idle, or whose core others use too, and a GPU that clocks up, run at another rate for seconds. Points
of one operator are therefore measured several times, a round apart, with all others in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from planner.lab.profile.points import Measured, Point

ROUNDS = {"cpu": 5, "cuda": 3}
"""Times that each point is measured where the budget lasts; the time of a visit leaves that much for the others."""
IN_ROUNDS = ("gemm", "grouped_gemm", "attention", "memory_bound", "layer", "chain")
"""Families that are measured in rounds; clocks, launches, copies and facts of the memory are measured once."""
WARM_UP_LIMIT = {"cpu": 6.0, "cuda": 15.0}
"""Seconds after which measuring begins whether rates are steady or not."""
WARM_UP_SHARE = 0.1
"""Part of the budget that the warm-up takes at most."""
BLOCK_SECONDS = 0.1
STEADY, WINDOW = 0.02, 5
"""Rates are steady when the medians of the last WINDOW blocks and of the WINDOW blocks before differ by less than STEADY."""


def steady(blocks: Sequence[float]) -> bool:
    """Whether the last two windows of seconds per run agree."""
    if len(blocks) < 2 * WINDOW:
        return False
    late, early = median(blocks[-WINDOW:]), median(blocks[-2 * WINDOW : -WINDOW])
    return abs(late / early - 1.0) < STEADY


def warm_up(run: Callable[[], float], limit: float) -> tuple[list[float], float]:
    """Runs until rates are steady or the limit is over: seconds per run of each block, and how long it took.

    ``run`` runs once and returns its seconds.
    """
    begun = time.perf_counter()
    blocks: list[float] = []
    while not steady(blocks) and time.perf_counter() - begun < limit:
        start, samples = time.perf_counter(), []
        while time.perf_counter() - start < BLOCK_SECONDS:
            samples.append(run())
        blocks.append(median(samples))
    return blocks, time.perf_counter() - begun


class Rounds:
    """What each point gave in every round, and which round counts."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._found: dict[object, list[Measured]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, point: Point) -> bool:
        return point.identity in self._found

    def add(self, found: Measured) -> Measured:
        """The round that counts so far: the middle one.

        ``rounds`` and ``over_rounds``, the slowest median over the quickest less one, are kept with it.
        """
        every = self._found.setdefault(found.point.identity, [])
        every.append(found)
        ordered = sorted(every, key=lambda one: one.median)
        best = ordered[(len(ordered) - 1) // 2]
        if len(every) == 1:
            return found
        more = {"rounds": len(every), "over_rounds": round(ordered[-1].median / ordered[0].median - 1.0, 4)}
        return Measured(
            point=best.point, median=best.median, low=best.low, high=best.high, repetitions=best.repetitions,
            outliers=best.outliers, clock=best.clock, confidence=best.confidence,
            details=tuple(sorted({**dict(best.details), **more}.items())),
        )  # fmt: skip


def schedule(points: Sequence[Point], rounds: int) -> list[Point]:
    """Visits in their order: points up to the last whole layer, the weightiest, twice; the others once; all again.

    A budget that ends early so has operators and layers from one time, before it has shapes that no layout lives on.
    """
    layers = [number for number, point in enumerate(points) if point.family == "layer"]
    early = list(points[: layers[-1] + 1]) if layers else []
    again = [point for point in points if point.family in IN_ROUNDS]
    twice = [point for point in early if point.family in IN_ROUNDS]
    if rounds < 2:
        return list(points)
    once = [point for point in points[len(early) :] if point.family in IN_ROUNDS]
    return [*early, *twice, *points[len(early) :], *once, *again * (rounds - 2)]
