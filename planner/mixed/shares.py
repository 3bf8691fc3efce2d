"""Shares of the batch for unlike replicas: water-filling in whole microbatches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from planner.errors import PlannerError
from planner.record import record


@record
class Replicas:
    """Equal replicas that take T(m) = fixed + m each."""

    fixed: float
    """Seconds to fill and drain the pipeline: those of all its stages but the slowest."""
    each: float
    """Seconds of a microbatch on the slowest stage."""
    count: int = 1


def water_fill(replicas: Sequence[Replicas], microbatches: int) -> list[list[int]]:
    """Microbatches of every replica, by group: the slowest is as early as whole numbers allow, and each has one at least.

    Minimise max_r (fixed_r + m_r each_r), sum of m_r = M. Greedy is exact: each next microbatch goes to the replica that would end
    first with it; if another choice ended earlier, it would have left one with a later end to somebody. What a level z of water
    holds, floor((z - fixed_r) / each_r), is given out at once, and the few that remain one by one.
    Raises PlannerError where there are fewer microbatches than replicas.
    """
    total = sum(one.count for one in replicas)
    if microbatches < total:
        raise PlannerError(f"{microbatches} microbatches do not reach for {total} replicas; use fewer replicas or a larger batch")
    low, high = 0.0, max(one.fixed + microbatches * one.each for one in replicas)
    for _ in range(60):
        level = 0.5 * (low + high)
        held = sum(one.count * _held(one, level) for one in replicas)
        low, high = (low, level) if held > microbatches else (level, high)
    base = [_held(one, low) for one in replicas]
    shares = [[held] * one.count for one, held in zip(replicas, base, strict=True)]
    left = microbatches - sum(map(sum, shares))
    queue = [
        (one.fixed + (shares[group][at] + 1) * one.each, group, at)
        for group, one in enumerate(replicas) for at in range(min(one.count, left))
    ]  # fmt: skip
    heapq.heapify(queue)
    for _ in range(left):
        _, group, at = heapq.heappop(queue)
        shares[group][at] += 1
        one = replicas[group]
        heapq.heappush(queue, (one.fixed + (shares[group][at] + 1) * one.each, group, at))
    while left < 0:  # replicas that hold one whatever the level is took more than there are
        group, at = max(
            ((group, at) for group, some in enumerate(shares) for at, held in enumerate(some) if held > 1),
            key=lambda place: replicas[place[0]].fixed + shares[place[0]][place[1]] * replicas[place[0]].each,
        )
        shares[group][at] -= 1
        left += 1
    return shares


def shared(replicas: Sequence[Replicas], microbatches: int, equal: bool) -> list[list[int]]:
    """Water-filled shares, or equal ones. Raises PlannerError where they cannot be."""
    if not equal:
        return water_fill(replicas, microbatches)
    each, left = divmod(microbatches, sum(one.count for one in replicas))
    if left or not each:
        raise PlannerError(f"{microbatches} microbatches have no equal shares for {sum(one.count for one in replicas)} replicas")
    return [[each] * one.count for one in replicas]


def _held(one: Replicas, level: float) -> int:
    """Microbatches that a replica ends before ``level``, at least one."""
    return max(int((level - one.fixed) / one.each), 1) if one.each > 0 else 1


def longest(replicas: Sequence[Replicas], shares: Sequence[Sequence[int]]) -> float:
    """Seconds of the last replica."""
    return max(one.fixed + held * one.each for one, some in zip(replicas, shares, strict=True) for held in some)
