"""A trace of machines, and what each answer to failures makes of it for a plan."""

from __future__ import annotations

from collections.abc import Callable

from planner.elastic.availability import Job, Replay, Trace, replay
from planner.elastic.failing_job import Failures, only
from planner.elastic.resilience import Resilience, regrouped
from planner.errors import PlannerError, listed


def traced_kind(failures: Failures) -> int:
    """Which kind of node a trace holds: the only one, else the only one that may be taken away. Raises PlannerError."""
    kinds = failures.kinds
    spot = [number for number, one in enumerate(kinds) if one.spot]
    if len(kinds) == 1:
        return 0
    if len(spot) != 1:
        raise PlannerError(
            f"a trace holds machines of one kind, the plan has {listed([one.kind for one in kinds], 'and')}; write spot: true at "
            "that kind, and at no other, in the cluster file, and name it with --cluster"
        )
    return spot[0]


def replayed(found: Resilience, trace: Trace, progress: Callable[[str], None] = lambda _: None) -> Replay:
    """A trace of machines, each a node of the plan, and what each policy makes of it; nodes of other kinds stay. Raises
    PlannerError."""
    number = traced_kind(found.nodes)
    progress("replaying the trace")
    job, groups, restart = found.job, found.job.groups(), sum(found.restart_parts.values())
    nodes, kinds = found.nodes.kinds[number].count, len(found.nodes.kinds)

    return replay(trace, Job(
        nodes=nodes, step_time=groups.step_time or job.step_time, restart=restart, save=job.times.stall + job.times.behind,
        interval=found.interval, behind=job.times.behind, group_nodes=nodes // groups.number if groups.number else 0, away=restart,
        speed=lambda missing: job.speed(only(number, missing, kinds)),
        group_rate=min(job.step_time / groups.step_time, 1.0) if groups.number else 1.0,
        set_up=regrouped(job), reroute=job.rerouting().rate,
    ))  # fmt: skip
