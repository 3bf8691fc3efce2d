"""``plan resilience``: interval between checkpoints, goodput, days and dollars, spares, and the best answer to a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.costs import DAY, HOUR
from planner.defaults import ResolvedJob
from planner.elastic.availability import Job as TracedJob
from planner.elastic.availability import Replay, Trace, replay
from planner.elastic.checkpoints import lost_by_failure, young
from planner.elastic.elastic_job import ElasticJob, restarted_in
from planner.elastic.failure_answers import (
    FailureAnswer,
    interval_of,
    missing_nodes,
    replica_answer,
    reroute_answer,
    rerouted,
    restart_answer,
    shrink_answer,
    why_no_reroute,
)
from planner.elastic.failure_rates import constants, node_mtbf
from planner.elastic.fewer_nodes import Fewer
from planner.elastic.spares import spares_for
from planner.errors import PlannerError
from planner.plan_file import Assumption
from planner.timeline.priced_plan import estimate_of, job_of

REPAIR = DAY
"""Seconds until a failed node is back, where the user does not say."""
SHORTAGE = 0.01
POINTS = 13
"""Points of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked beside the job."""

    days: float = 30.0
    """Days of training if nothing failed."""
    repair: float = 0.0
    """Seconds until a failed node is back; 0 = as published rates of spot machines show it, else REPAIR."""
    shortage: float = SHORTAGE
    """Chance that spares do not suffice."""
    restart: float | None = None
    """Seconds of a restart, measured; None = computed."""
    interval: float | None = None
    """Seconds between saves; None = the best."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """An answer in days and dollars."""

    answer: FailureAnswer
    days: float
    """Expected days until the work is done; infinite where none is."""
    usd: float | None
    """Dollars of all GPUs, spares too; None without a price."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.answer.to_dict(), "days": self.days if np.isfinite(self.days) else None, "usd": self.usd}


@dataclass(frozen=True, kw_only=True)
class Resilience:
    """What failures cost a plan."""

    job: ElasticJob
    asked: Asked
    interval: float
    """Seconds of training between two saves."""
    steps: int
    """The same in steps."""
    young: float
    """By Young's formula, for comparison."""
    failures: float
    """Expected in the days of the best answer."""
    lost: float
    """Expected seconds that one failure costs a job that restarts from its checkpoint."""
    spares: int
    """Nodes that leave a shortage less likely than asked."""
    shortage: float
    """Chance that the spares given do not suffice."""
    answers: tuple[Totals, ...]
    """Best first."""
    by_mtbf: tuple[dict[str, float], ...]
    """Goodput of every answer over the mean time between failures of a node, hours."""
    by_scale: tuple[dict[str, float], ...]
    """The same over the number of nodes, more replicas of the same."""
    assumptions: tuple[Assumption, ...]
    replay: Replay | None = None
    """A trace of machines, replayed."""

    @property
    def restart_parts(self) -> dict[str, float]:
        """Seconds of a restart, in parts."""
        return dict(restarted_in(self.job, self.asked.restart))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        job = self.job
        return {
            "job": {
                "gpus": job.plan.num_gpus, "nodes": job.nodes, "step_time_s": job.step_time, "node_mtbf_s": job.node_mtbf.seconds,
                "mtbf_s": job.mtbf, "spares": job.around.spares, "days": self.asked.days,
            },
            "checkpoint": {
                "bytes": job.saved.size, "interval_s": self.interval, "interval_steps": self.steps, "young_s": self.young,
                "stall_s": job.times.stall, "behind_s": job.times.behind, "load_s": job.times.load,
            },
            "restart_s": self.restart_parts,
            "failures": self.failures, "lost_by_failure_s": self.lost,
            "spares": {"needed": self.spares, "chance": self.asked.shortage, "shortage": self.shortage},
            "answers": [one.to_dict() for one in self.answers],
            "by_mtbf": list(self.by_mtbf), "by_scale": list(self.by_scale),
            "assumptions": [vars(one) for one in self.assumptions],
            **({} if self.replay is None else {"trace": self.replay.to_dict()}),
        }  # fmt: skip


def replica_groups(job: ElasticJob) -> tuple[int, float, str]:
    """Most groups of whole replicas whose states fit, seconds of a step then, and why there are none.

    A group keeps all states to itself: state sharding spans dp / G ranks. No group is smaller than a node.
    """
    plan, priced = job.plan, job_of(job.plan)
    dp, per_replica = int(plan.layout.dp), plan.num_gpus // int(plan.layout.dp)
    why = "needs two replicas on nodes of their own"
    for groups in sorted((n for n in range(2, dp + 1) if dp % n == 0), reverse=True):
        ranks = per_replica * (dp // groups)
        if ranks % job.node_ranks:
            continue
        layout = plan.layout.replace(dp_shard=dp // groups) if int(plan.layout.zero) else plan.layout
        found = estimate_of(priced, layout)
        if float(found.memory_needed[0]) <= found.usable_memory:
            return groups, float(found.step_time[0]), ""
        why = "the states of a group do not fit: they are sharded over all replicas"
    return 0, 0.0, why


def all_answers(
    job: ElasticJob, asked: Asked, groups: tuple[int, float, str], speed: Callable[[int], float]
) -> list[FailureAnswer]:
    """Every answer to failures of a job."""
    parts = restarted_in(job, asked.restart)
    restart = sum(parts.values())
    interval = asked.interval or interval_of(job)
    number, step_time, why_not = groups
    peer = job.times.size / max(number, 1) / job.nodes / job.node_ranks / job.hardware.network_bandwidth
    away = restart - (job.times.load - min(peer, job.times.load)) if asked.restart is None else restart
    replicas = FailureAnswer(key="replica_groups", shares={}, why_not=why_not)
    if number:
        replicas = replica_answer(job, asked.repair, away, number, step_time)
    return [
        restart_answer(job, asked.repair, restart, interval),
        shrink_answer(job, asked.repair, restart, interval, speed),
        replicas,
        reroute_answer(job, asked.repair, regrouped(job)),
    ]


def regrouped(job: ElasticJob) -> float:
    """Seconds until the ranks that are left know of a loss and have new process groups."""
    return constants().detect_node.value + job.start["communicators"]


def _totals(job: ElasticJob, asked: Asked, answer: FailureAnswer) -> Totals:
    days = asked.days / answer.goodput if answer.goodput > 0 else np.inf
    gpus = job.plan.num_gpus + job.around.spares * job.node_ranks
    price = job.usd_per_hour
    usd = None if price is None or not np.isfinite(days) else days * DAY / HOUR * gpus * price
    return Totals(answer=answer, days=float(days), usd=usd)


def resilience(
    job: ElasticJob, resolved: ResolvedJob, asked: Asked, progress: Callable[[str], None] = lambda _: None
) -> Resilience:
    """What failures cost a plan, and what to do about them. Raises PlannerError."""
    if not asked.days > 0:
        raise PlannerError(f"--days is {asked.days:g}; it must be above 0")
    said = _said(job, asked)
    asked = replace(asked, repair=asked.repair or repair_of(job))
    if asked.interval is not None and asked.interval < job.step_time:
        raise PlannerError(f"--interval is {asked.interval:g} s; a step takes {job.step_time:.3g} s, save no more often than that")
    progress("plans on fewer nodes")
    fewer = Fewer(resolved, job.node_ranks, job.nodes, job.step_time, int(job.plan.layout.dp))
    interval = asked.interval or interval_of(job)
    groups = replica_groups(job)
    answers = all_answers(job, asked, groups, fewer.speed)
    totals = sorted((_totals(job, asked, one) for one in answers), key=lambda one: -one.answer.goodput)
    missing = missing_nodes(job, asked.repair)
    restart = sum(restarted_in(job, asked.restart).values())
    progress("other rates of failure, other scales")
    return Resilience(
        job=job, asked=asked, interval=interval, steps=max(round(interval / job.step_time), 1),
        young=float(young(job.times.stall, job.mtbf)),
        failures=totals[0].days * DAY / job.mtbf if np.isfinite(totals[0].days) else np.inf,
        lost=lost_by_failure(interval, job.times, job.mtbf, restart),
        spares=spares_for(job.nodes, job.node_mtbf.seconds, asked.repair, asked.shortage),
        shortage=1.0 - float(missing[0]), answers=tuple(totals),
        by_mtbf=tuple(_by_mtbf(job, asked, groups, fewer.speed)), by_scale=tuple(_by_scale(job, asked, groups, fewer.speed)),
        assumptions=(*job.assumptions(), *said),
    )  # fmt: skip


def replayed(
    found: Resilience, trace: Trace, resolved: ResolvedJob, progress: Callable[[str], None] = lambda _: None
) -> Replay:
    """A trace of machines, each a node of the plan, and what each policy makes of it."""
    progress("replaying the trace")
    job = found.job
    fewer = Fewer(resolved, job.node_ranks, job.nodes, job.step_time, int(job.plan.layout.dp))
    groups, step_time, _ = replica_groups(job)
    return replay(trace, TracedJob(
        nodes=job.nodes, step_time=step_time or job.step_time, restart=sum(found.restart_parts.values()),
        save=job.times.stall + job.times.behind, interval=found.interval, behind=job.times.behind,
        group_nodes=job.nodes // groups if groups else 0, away=sum(found.restart_parts.values()), speed=fewer.speed,
        group_rate=min(job.step_time / step_time, 1.0) if step_time else 1.0, set_up=regrouped(job),
        reroute=None if why_no_reroute(job.plan.layout) else lambda missing: float(rerouted(job.plan.layout, missing)),
    ))  # fmt: skip


def repair_of(job: ElasticJob) -> float:
    """Seconds until a failed node is back, where the user does not say."""
    return (node_mtbf(job.hardware, spot=True).repair if job.around.spot else 0.0) or REPAIR


def _said(job: ElasticJob, asked: Asked) -> list[Assumption]:
    """What of the question was not said."""
    if asked.repair:
        return []
    repair = repair_of(job)
    why = "assumed: replaced within a day by the provider or the own team"
    if repair != REPAIR:
        why = f"mean time until a machine came back in that trace: {node_mtbf(job.hardware, spot=True).why}"
    return [Assumption("repair of a node", f"{repair / HOUR:.3g} h", why, "--repair")]


def _goodputs(answers: list[FailureAnswer]) -> dict[str, float]:
    return {one.key: one.goodput for one in answers if one.shares}


def _by_mtbf(
    job: ElasticJob, asked: Asked, groups: tuple[int, float, str], speed: Callable[[int], float]
) -> list[dict[str, float]]:
    """Goodput of every answer from a hundredth to ten times the mean time between failures."""
    found = []
    free = replace(asked, interval=None)
    for factor in np.logspace(-2.0, 1.0, POINTS):
        changed = job.with_mtbf(float(job.node_mtbf.seconds * factor))
        if job.nodes * asked.repair / changed.node_mtbf.seconds > job.nodes:
            continue  # more nodes in repair than there are
        found.append({"mtbf_h": changed.node_mtbf.seconds / HOUR, **_goodputs(all_answers(changed, free, groups, speed))})
    return found


def _by_scale(
    job: ElasticJob, asked: Asked, groups: tuple[int, float, str], speed: Callable[[int], float]
) -> list[dict[str, float]]:
    """Goodput over the number of nodes, replicas of the plan's pipeline added: step and times of a save stay, as each rank's part
    and the storage grow alike; spares stay the same part."""
    found = []
    for factor in (1, 2, 4, 8, 16, 32, 64):
        nodes = job.nodes * factor
        if nodes > 2**16:
            break
        around = replace(job.around, mtbf=job.node_mtbf.seconds / factor, spares=0)
        larger = ElasticJob(plan=job.plan, around=around)
        spares = spares_for(nodes, job.node_mtbf.seconds, asked.repair, asked.shortage)
        covered = replace(asked, interval=None, repair=1e-6)  # enough spares at every scale
        many = (groups[0] * factor, groups[1], groups[2])
        goodputs = _goodputs(all_answers(larger, covered, many, speed))
        found.append({"nodes": float(nodes), "spares": float(spares), **goodputs})
    return found
