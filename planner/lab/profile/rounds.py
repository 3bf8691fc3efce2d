"""Before the first point a warm-up, then operators and whole layers in rounds: clocks and load are the same for both; and drift.

A processor that was idle, or whose core others use too, and a GPU that clocks up, run at another rate for seconds. Points
of one operator are therefore measured several times, a round apart, with all others in between.

Drift: the interval of a median says how well it is known at one moment. Heat, clocks, other jobs and the modes of a library move
it from minute to minute, which no interval shows; a later profile differs by that. Some points, the references, are measured again
until the end; the scatter of these rounds estimates it.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median, variance

from planner.lab.profile.journal import Journal
from planner.lab.profile.points import Identity, Measured, Point

ROUNDS = {"cpu": 5, "cuda": 3}
"""Times that each point is measured where the budget lasts; the time of a visit leaves that much for the others."""
IN_ROUNDS = ("gemm", "grouped_gemm", "attention", "memory_bound", "layer", "chain")
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
        slowest = round(ordered[-1].median / ordered[0].median - 1.0, 4)
        return best.measured(best.point, rounds=len(every), over_rounds=slowest)


def schedule(points: Sequence[Point], rounds: int) -> list[Point]:
    """Visits in their order: points up to the last whole layer, the weightiest, twice; the others once; all again.

    A budget that ends early so has operators and layers from one time, before it has shapes that no layout lives on.
    """
    if rounds < 2:
        return list(points)
    end = max((number + 1 for number, point in enumerate(points) if point.family == "layer"), default=0)
    early, late = points[:end], points[end:]
    first, second = ([point for point in part if point.family in IN_ROUNDS] for part in (early, late))
    return [*early, *first, *late, *second, *[point for point in points if point.family in IN_ROUNDS] * (rounds - 2)]


def references_alone(journal: Journal) -> list[Point]:
    """References among what rank 0 has measured alone."""
    found: list[Point] = []
    for family in ALONE:
        found += [one.point for one in journal.of(family) if one.median <= LONGEST][:EACH_ALONE]
    return found


def references_together(points: Sequence[Point]) -> list[Point]:
    """References among the collectives, the same on every rank: two sizes of three operations in the largest group of a
    node, and in the first that leaves it. ``points`` start with those that are measured whatever the budget."""
    found: list[Point] = []
    for across in (False, True):
        mine = [one for one in points if one["op"] in TOGETHER and (one["nodes"] > 1) == across]
        if not mine:
            continue
        n = mine[0]["n"] if across else max(one["n"] for one in mine)
        for op in TOGETHER:
            alike = sorted(
                (one for one in mine if one["op"] == op and one["n"] == n), key=lambda one: one["size"]
            )
            found += alike[-EACH:]
    return found


def again(point: Point, journal: Journal) -> Point:
    """The point of the next round of a reference."""
    turn = 1 + sum(_original(one.point) == point.identity for one in journal.of("again"))
    return Point.of("again", **point.values, of_family=point.family, turn=turn)


def _original(point: Point) -> Identity:
    return point["of_family"], tuple(pair for pair in point.key if pair[0] not in ("of_family", "turn"))


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


def _family_of(point: Point) -> str:
    """``gemm`` or ``collective across``: what a drift is stated of."""
    family = point["of_family"]
    return f"{family} {'across' if point['nodes'] > 1 else 'inside'}" if family == "collective" else family


def drift(journal: Journal) -> dict[str, dict[str, float]]:
    """By family: ``percent``, the standard deviation of one round's common shift, and ``rounds``, its degrees of freedom.

    The shift of a round is the mean over its references of ln(t / t_mean): what moves all of a family alike. The scatter
    of single points about it is seen where two profiles are compared. The first measurement is round 0.
    """
    families: dict[str, dict[Identity, dict[int, float]]] = {}
    for one in journal.of("again"):
        series = families.setdefault(_family_of(one.point), {}).setdefault(_original(one.point), {})
        series[one.point["turn"]] = math.log(one.median)
    measured: dict[Identity, Measured] = {one.point.identity: one for one in journal.of()}
    found = {}
    for family, mine in sorted(families.items()):
        for key, values in mine.items():
            if key in measured:
                values[0] = math.log(measured[key].median)
        turns = sorted(set.intersection(*(set(values) for values in mine.values())))
        if len(turns) < 3:
            continue
        shifts = [
            fmean(values[turn] - fmean(values[each] for each in turns) for values in mine.values()) for turn in turns
        ]
        percent = 100.0 * math.sqrt(variance(shifts))
        found[family] = {"percent": round(percent, 2), "rounds": float(len(turns) - 1)}
    return found
