"""Goodput of every answer to failures against simulations of single events: within 3 points where a step is shorter than half the
time between failures."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from planner.elastic.checkpoints import SaveTimes
from planner.elastic.failing_job import FailingJob, FailingNodes, Failures
from planner.elastic.failure_answers import group_shares, restart_answer, shrink_answer
from planner.elastic.failure_rates import NodeMtbf, constants

POINTS = 0.03


def groups_simulated(step: float, mtbf: float, groups: int, away: float, steps: int = 8000) -> float:
    """Work of replica groups over that of all without failures, step by step: a failure comes to a random group, one that is away
    begins anew; a step in which a group fails that takes part is given up at its end, and groups that are back join the next."""
    rng, back, work = np.random.default_rng(5), np.zeros(groups), 0.0
    for number in range(steps):
        part, kept = back <= number * step, True
        for which in rng.integers(groups, size=rng.poisson(step / mtbf)):
            kept = kept and not part[which]
            back[which] = (number + rng.uniform()) * step + away
        work += kept * part.mean()
    return work / steps


@pytest.mark.parametrize(
    ("step", "mtbf", "groups", "away"),
    [(10.9, 60.0, 30, 24.0), (10.0, 21.0, 30, 20.0), (1.0, 60.0, 4, 60.0), (5.0, 600.0, 8, 120.0), (30.0, 70.0, 64, 100.0)],
)
def test_replica_groups(step: float, mtbf: float, groups: int, away: float) -> None:
    """From a step of a sixtieth to one of nearly half the time between failures."""
    assert step < mtbf / 2
    found = group_shares(step_time=step, mtbf=mtbf, groups=groups, away=away)["work"]
    assert found == pytest.approx(groups_simulated(step, mtbf, groups, away), abs=POINTS)


NODES, STALL, BEHIND, RESTART, INTERVAL = 8, 1.0, 20.0, 60.0, 300.0


def job_simulated(hours: float, repair: float, spares: int, *, shrinks: bool, failures: int = 4000) -> float:
    """Work of a job that starts again from its last whole checkpoint, event by event. All nodes or none; or with those that are
    there, n / N as fast, growing by a planned start when a node comes back. Nodes fail alike whether the job runs or waits; spares
    do not."""
    rng, known = np.random.default_rng(3), constants()
    now = work = whole = since = 0.0
    repairs: list[float] = []
    planned = RESTART - known.detect_node.value + STALL + BEHIND + known.last_call.value
    ready, count = RESTART, 0
    while count < failures:
        there = min(NODES, NODES + spares - len(repairs))
        using = there if shrinks or there == NODES else 0
        fails = now + rng.exponential(hours * 3600.0 / there) if there else np.inf
        until = min(fails, repairs[0] if repairs else np.inf)
        if using and until > ready:
            cycle, rate = INTERVAL + STALL, using / NODES
            trained = until - max(now, ready)
            saves = int((since + trained) // cycle)
            ended = (since + trained) % cycle
            work += rate * trained * INTERVAL / cycle
            if fails <= until:  # falls back to the last save that is whole: the one before where the last is under way
                back = ended if saves == 0 or ended >= BEHIND or since + trained < BEHIND else ended + cycle
                work -= rate * min(back, trained + whole) * INTERVAL / cycle
            since, whole = ended, whole + trained
        now = until
        if fails <= until:
            count += 1
            heapq.heappush(repairs, now + repair)
            short = NODES + spares - len(repairs) < NODES
            ready, since, whole = now + RESTART + short * shrinks * known.last_call.value, 0.0, 0.0
        else:
            heapq.heappop(repairs)
            if there < NODES:
                ready, since, whole = max(now, ready) + (planned if shrinks else RESTART), 0.0, 0.0
    return work / now


@pytest.mark.parametrize("shrinks", [False, True], ids=["restart", "shrink"])
@pytest.mark.parametrize(
    ("hours", "repair", "spares"), [(20.0, 1800.0, 0), (20.0, 7200.0, 1), (4.0, 600.0, 1), (100.0, 86400.0, 2)]
)
def test_jobs_that_start_again(hours: float, repair: float, spares: int, shrinks: bool) -> None:
    """A failure of the job every half an hour to half a day, repairs from ten minutes to a day."""
    nodes = FailingNodes(kind="a", count=NODES, mtbf=NodeMtbf(seconds=hours * 3600.0, why=""), repair=repair, spares=spares)
    times = SaveTimes(stall=STALL, behind=BEHIND, load=5.0)
    job: Any = SimpleNamespace(times=times, speed=lambda missing: 1.0 - sum(missing) / NODES)
    answer = shrink_answer if shrinks else restart_answer
    found = answer(cast(FailingJob, job), Failures(kinds=(nodes,)), RESTART, INTERVAL).goodput
    assert found == pytest.approx(job_simulated(hours, repair, spares, shrinks=shrinks), abs=POINTS)
