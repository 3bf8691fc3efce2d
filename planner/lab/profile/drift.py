"""How far a machine's figures move while it is profiled: some points are measured again in rounds until the end.

The interval of a median says how well it is known at one moment. Heat, clocks, other jobs and the modes of a library move it
from minute to minute, which no interval shows; a later profile differs by that. The scatter of the rounds estimates it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean, variance
from typing import TypeAlias

from planner.lab.profile.journal import Journal
from planner.lab.profile.points import Measured, Point, Value

Identity: TypeAlias = tuple[str, tuple[tuple[str, Value], ...]]
ROUNDS = 12
"""Rounds of a part that has its whole budget."""
SHARE = 0.1
"""Part of the time that rounds may take: fewer are made where they are long against the budget."""
SECONDS = 0.02
"""Budget of one point of a round; a run that is longer is still timed three times."""
LONGEST = 0.05
"""Seconds: a reference must not eat the budget."""
ALONE = ("gemm", "attention", "memory_bound")
"""Families whose first short points are references."""
EACH_ALONE = 3
"""More average the scatter of single points out, which is no drift."""
TOGETHER = ("all_reduce", "all_gather", "all_to_all")
"""Collectives that are references at two sizes, in one group inside a node and one across."""
EACH = 2


def alone(journal: Journal) -> list[Point]:
    """References among what rank 0 has measured alone."""
    found: list[Point] = []
    for family in ALONE:
        rows = [one.point for one in journal.of(family) if one.median <= LONGEST]
        found += rows[:EACH_ALONE]
    return found


def together(points: Sequence[Point]) -> list[Point]:
    """References among the collectives, the same on every rank: two sizes of three operations in the largest group of a
    node, and in the first that leaves it. ``points`` start with those that are measured whatever the budget."""
    found: list[Point] = []
    for across in (False, True):
        mine = [one for one in points if one["op"] in TOGETHER and (int(one["nodes"]) > 1) == across]
        if not mine:
            continue
        n = max(int(one["n"]) for one in mine) if not across else int(mine[0]["n"])
        for op in TOGETHER:
            alike = sorted((one for one in mine if one["op"] == op and one["n"] == n), key=lambda one: int(one["size"]))
            found += alike[-EACH:]
    return found


def again(point: Point, journal: Journal) -> Point:
    """The point of the next round of a reference."""
    turn = 1 + sum(_original(one.point) == point.identity for one in journal.of("again"))
    values: dict[str, Value] = {**point.values, "of_family": point.family, "turn": turn}
    return Point(family="again", key=tuple(sorted(values.items())))


def _original(point: Point) -> Identity:
    return str(point["of_family"]), tuple(pair for pair in point.key if pair[0] not in ("of_family", "turn"))


class Rounds:
    """When the next round is due: ROUNDS of them over the seconds of a part."""

    def __init__(self, seconds: float) -> None:
        self._each = max(seconds, 0.0) / ROUNDS
        self._next = time.monotonic() + self._each

    def due(self) -> bool:
        """Whether one is due now."""
        return self._each > 0.0 and time.monotonic() >= self._next

    def done(self, seconds: float) -> None:
        """A round took so long: the next waits for its turn, and until rounds are SHARE of the time again."""
        self._next = time.monotonic() + max(self._each, seconds * (1.0 / SHARE - 1.0))


def family_of(point: Point) -> str:
    """``gemm`` or ``collective across``: what a drift is stated of."""
    family = str(point["of_family"])
    return f"{family} {'across' if int(point['nodes']) > 1 else 'inside'}" if family == "collective" else family


def drift(journal: Journal) -> dict[str, dict[str, float]]:
    """By family: ``percent``, the standard deviation of one round's common shift, and ``rounds``, its degrees of freedom.

    The shift of a round is the mean over its references of ln(t / t_mean): what moves all of a family alike. The scatter
    of single points about it is seen where two profiles are compared. The first measurement is round 0.
    """
    series: dict[Identity, dict[int, float]] = {}
    families: dict[Identity, str] = {}
    for one in journal.of("again"):
        key = _original(one.point)
        families[key] = family_of(one.point)
        series.setdefault(key, {})[int(one.point["turn"])] = math.log(one.median)
    measured: dict[Identity, Measured] = {one.point.identity: one for one in journal.of()}
    found = {}
    for family in sorted(set(families.values())):
        mine = {key: dict(values) for key, values in series.items() if families[key] == family}
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
