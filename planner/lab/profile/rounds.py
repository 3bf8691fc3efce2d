"""Before the first point a warm-up, then operators and whole layers in rounds: clocks and load are the same for both; and drift.

A processor that was idle, or whose core others use too, and a GPU that clocks up, run at another rate for seconds. Points
of one operator are therefore measured several times, a round apart, with all others in between.

Drift: the interval of a median says how well it is known at one moment. Heat, clocks, other jobs and the modes of a library move
it from minute to minute, which no interval shows; a later profile differs by that. Some points, the references, are measured again
until the end; the scatter of these rounds estimates it.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median, variance

from planner.lab.profile.journal import Journal
from planner.lab.profile.points import Measured, Point

ROUNDS = {"cpu": 5, "cuda": 3}
"""Times that each point is measured where the budget lasts; the time of a visit leaves that much for the others."""
IN_ROUNDS = ("gemm", "grouped_gemm", "attention", "memory_bound", "layer")
"""Families that are measured in rounds; clocks, launches, copies and facts of the memory are measured once."""
WARM_UP_LIMIT = {"cpu": 6.0, "cuda": 15.0}  # Seconds after which measuring begins whether rates are steady or not
WARM_UP_SHARE = 0.1  # Part of the budget that the warm-up takes at most
BLOCK_SECONDS = 0.1
STEADY, WINDOW = 0.02, 5
"""Rates are steady when the medians of the last WINDOW blocks and of the WINDOW blocks before differ by less than STEADY."""
DRIFT_ROUNDS = 12  # Rounds of the references of a part that has its whole budget
DRIFT_SHARE = 0.1  # Part of the time that they may take: fewer are made where they are long against the budget
DRIFT_SECONDS = 0.02  # Budget of one point of a round; a run that is longer is still timed three times
LONGEST = 0.05  # Seconds: a reference must not eat the budget
ALONE = ("gemm", "attention", "memory_bound")  # Families whose first short points are references
EACH_ALONE = 3  # More average the scatter of single points out, which is no drift
TOGETHER = ("all_reduce", "all_gather", "all_to_all")
"""Collectives that are references at two sizes, in one group inside a node and one across."""
EACH = 2


def steady(blocks: Sequence[float]) -> bool:
    """Whether the last two windows of seconds per run agree."""
    if len(blocks) < 2 * WINDOW:
        return False
    return abs(median(blocks[-WINDOW:]) / median(blocks[-2 * WINDOW : -WINDOW]) - 1.0) < STEADY


def warm_up(run: Callable[[], float], limit: float) -> tuple[list[float], float]:
    """Runs until rates are steady or the limit is over: seconds per run of each block, and how long it took."""
    begun = time.perf_counter()
    blocks: list[float] = []
    while not steady(blocks) and time.perf_counter() - begun < limit:
        start, samples = time.perf_counter(), []
        while time.perf_counter() - start < BLOCK_SECONDS:
            samples.append(run())
        blocks.append(median(samples))
    return blocks, time.perf_counter() - begun


class Rounds(dict[Point, list[Measured]]):
    """What each point gave in every round, and which round counts."""

    def add(self, found: Measured) -> Measured:
        """The round that counts so far: the middle one, with ``over_rounds``, the slowest median over the quickest less one."""
        every = self.setdefault(found.point, [])
        every.append(found)
        if len(every) == 1:
            return found
        ordered = sorted(every, key=lambda one: one.median)
        best, slowest = ordered[(len(ordered) - 1) // 2], round(ordered[-1].median / ordered[0].median - 1.0, 4)
        return best.measured(best.point, rounds=len(every), over_rounds=slowest)


def schedule(points: Sequence[Point], rounds: int) -> list[Point]:
    """Visits in their order: points up to the last whole layer, the weightiest, twice (operators and layers of one time come before
    shapes that no layout lives on); the others once; all again."""
    end = max((number + 1 for number, point in enumerate(points) if point.family == "layer"), default=0)
    parts = points[:end], points[end:]
    again = [[point for point in part if point.family in IN_ROUNDS] for part in parts]
    return [*parts[0], *again[0], *parts[1], *again[1], *(again[0] + again[1]) * (rounds - 2)]


def references_alone(journal: Journal) -> list[Point]:
    """References among what rank 0 has measured alone."""
    return [
        point for family in ALONE
        for point in [one.point for one in journal.of(family) if one.median <= LONGEST][:EACH_ALONE]
    ]  # fmt: skip


def references_together(points: Sequence[Point]) -> list[Point]:
    """References among the collectives, the same on every rank: two sizes of three operations in the largest group of a
    node, and in the first that leaves it. ``points`` start with those that are measured whatever the budget."""
    found: list[Point] = []
    for across in (False, True):
        mine = [one for one in points if one["op"] in TOGETHER and (one["nodes"] > 1) == across]
        n = mine[0]["n"] if across and mine else max((one["n"] for one in mine), default=0)
        for op in TOGETHER:
            alike = [one for one in mine if one["op"] == op and one["n"] == n]
            found += sorted(alike, key=lambda one: one["size"])[-EACH:]
    return found


def measure_again(references: Iterable[Point], journal: Journal, measure: Callable[[Point], Measured | None]) -> float:
    """Adds the next round of the references to the journal; the seconds that it took."""
    begun = time.monotonic()
    for point in references:
        if found := measure(point):
            turn = 1 + sum(_original(one.point) == point for one in journal.of("again"))
            again = Point.of("again", **point.values, of_family=point.family, turn=turn)
            journal.add(replace(found, point=again))
    return time.monotonic() - begun


def _original(point: Point) -> Point:
    key = tuple(pair for pair in point.key if pair[0] not in ("of_family", "turn"))
    return Point(family=point["of_family"], key=key)


class Due:
    """When the next round of the references is due: DRIFT_ROUNDS of them over the seconds of a part."""

    def __init__(self, seconds: float) -> None:
        self._each = max(seconds, 0.0) / DRIFT_ROUNDS
        self._next = time.monotonic() + self._each

    def now(self) -> bool:
        """Whether one is due."""
        return self._each > 0.0 and time.monotonic() >= self._next

    def done(self, seconds: float) -> None:
        """A round took so long: the next waits until it is due, and until rounds are DRIFT_SHARE of the time again."""
        self._next = time.monotonic() + max(self._each, seconds * (1.0 / DRIFT_SHARE - 1.0))


def drift(journal: Journal) -> dict[str, dict[str, float]]:
    """By family: ``percent``, the standard deviation of one round's common shift, and ``rounds``, its degrees of freedom.

    The shift of a round is the mean over its references of ln(t / t_mean): what moves all of a family alike. The scatter
    of single points about it is seen where two profiles are compared. The first measurement is round 0. A family of collectives
    is stated inside a node and across apart.
    """
    families: dict[str, dict[Point, dict[int, float]]] = {}
    first = {one.point: one for one in journal.of()}
    for one in journal.of("again"):
        family, reference = one.point["of_family"], _original(one.point)
        if family == "collective":
            family += " across" if one.point["nodes"] > 1 else " inside"
        series = families.setdefault(family, {}).setdefault(reference, {})
        series[one.point["turn"]] = math.log(one.median)
        if reference in first:
            series[0] = math.log(first[reference].median)
    found = {}
    for family, mine in sorted(families.items()):
        turns = sorted(set.intersection(*(set(values) for values in mine.values())))
        if len(turns) < 3:
            continue
        means = [(values, fmean(values[turn] for turn in turns)) for values in mine.values()]
        shifts = [fmean(values[turn] - mean for values, mean in means) for turn in turns]
        found[family] = {"percent": round(100.0 * math.sqrt(variance(shifts)), 2), "rounds": float(len(turns) - 1)}
    return found
