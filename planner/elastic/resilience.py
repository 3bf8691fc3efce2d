"""``plan resilience``: interval between checkpoints, goodput, days and dollars, spares, and the best answer to a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from planner.assumption import Assumption
from planner.costs import DAY, HOUR
from planner.elastic.availability import Replay
from planner.elastic.checkpoints import lost_by_failure, young
from planner.elastic.failing_job import FailingJob, FailingNodes, Failures, Groups, only
from planner.elastic.failure_answers import (
    FailureAnswer,
    interval_of,
    replica_answer,
    reroute_answer,
    restart_answer,
    shrink_answer,
)
from planner.elastic.failure_rates import REPAIR, constants
from planner.elastic.spares import spares_for
from planner.errors import PlannerError
from planner.record import record

SHORTAGE = 0.01
POINTS = 13
"""Points of a sweep."""


@record
class Asked:
    """What was asked beside the job."""

    days: float = 30.0
    """Days of training if nothing failed."""
    repair: float | None = None
    """Seconds until a failed node is back; None = as published rates of spot machines show it, else REPAIR."""
    shortage: float = SHORTAGE
    """Chance that spares do not suffice."""
    restart: float | None = None
    """Seconds of a restart, measured; None = computed."""
    interval: float | None = None
    """Seconds between saves; None = the best."""


@record
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


@record
class KindLoss:
    """What it costs that nodes of one kind fail."""

    nodes: FailingNodes
    failures: float
    """Expected in the days of the best answer."""
    spares: int
    """That leave a shortage of the kind less likely than asked."""
    without_one: float
    """Rate of the best plan with one node fewer, over that of the plan."""
    without_all: float
    """Rate of the best plan without the kind; 0 where nothing fits."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        one = self.nodes
        return {
            "kind": one.kind, "nodes": one.count, "spares": one.spares, "node_mtbf_s": one.mtbf.seconds, "repair_s": one.repair,
            "failures": self.failures, "spares_needed": self.spares, "rate_without_one": self.without_one,
            "rate_without_all": self.without_all,
        }  # fmt: skip


@record
class Resilience:
    """What failures cost a plan."""

    job: FailingJob
    nodes: Failures
    """How often its nodes fail."""
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
    kinds: tuple[KindLoss, ...]
    """By kind of node."""
    shortage: float
    """Chance that the spares given do not suffice."""
    answers: tuple[Totals, ...]
    """Best first."""
    by_mtbf: tuple[dict[str, float], ...]
    """Goodput of every answer over the mean time between failures of a node, hours."""
    by_scale: tuple[dict[str, float], ...]
    """The same over the number of nodes, more replicas of the same."""
    assumptions: tuple[Assumption, ...]
    advice: str = ""
    """Of several kinds: which to leave out, '' where all are worth their failures."""
    replay: Replay | None = None
    """A trace of machines, replayed."""

    @property
    def restart_parts(self) -> dict[str, float]:
        """Seconds of a restart, in parts."""
        return dict(restarted_in(self.job, self.asked.restart))

    @property
    def spares(self) -> int:
        """Nodes that leave a shortage of any kind less likely than asked."""
        return sum(one.spares for one in self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        job, nodes = self.job, self.nodes
        return {
            "job": {
                "gpus": job.num_gpus, "nodes": nodes.nodes, "step_time_s": job.step_time, "node_mtbf_s": nodes.node_mtbf,
                "mtbf_s": nodes.mtbf, "spares": nodes.spares, "days": self.asked.days,
            },
            "checkpoint": {
                "bytes": job.times.size, "interval_s": self.interval, "interval_steps": self.steps, "young_s": self.young,
                "stall_s": job.times.stall, "behind_s": job.times.behind, "load_s": job.times.load,
            },
            "restart_s": self.restart_parts,
            "failures": self.failures, "lost_by_failure_s": self.lost,
            "spares": {"needed": self.spares, "chance": self.asked.shortage, "shortage": self.shortage},
            "kinds": [one.to_dict() for one in self.kinds], "advice": self.advice,
            "answers": [one.to_dict() for one in self.answers],
            "by_mtbf": list(self.by_mtbf), "by_scale": list(self.by_scale),
            "assumptions": [vars(one) for one in self.assumptions],
            **({} if self.replay is None else {"trace": self.replay.to_dict()}),
        }  # fmt: skip


def restarted_in(job: FailingJob, seconds: float | None) -> Mapping[str, float]:
    """The parts of a restart, or one part where its time was measured."""
    return job.start if seconds is None else {"measured": seconds}


def all_answers(job: FailingJob, failures: Failures, asked: Asked, groups: Groups) -> list[FailureAnswer]:
    """Every answer to failures of a job."""
    restart = sum(restarted_in(job, asked.restart).values())
    interval = asked.interval or interval_of(job, failures)
    away = restart - (job.times.load - min(groups.join, job.times.load)) if asked.restart is None else restart
    return [
        restart_answer(job, failures, restart, interval), shrink_answer(job, failures, restart, interval),
        replica_answer(job, failures, away, groups), reroute_answer(job, failures, regrouped(job)),
    ]  # fmt: skip


def regrouped(job: FailingJob) -> float:
    """Seconds until the ranks that are left know of a loss and have new process groups."""
    return constants().detect_node.value + job.start["communicators"]


def _totals(failures: Failures, asked: Asked, answer: FailureAnswer) -> Totals:
    days = asked.days / answer.goodput if answer.goodput > 0 else np.inf
    price = failures.usd_per_hour
    usd = None if price is None or not np.isfinite(days) else days * DAY / HOUR * price
    return Totals(answer=answer, days=float(days), usd=usd)


def resilience(job: FailingJob, asked: Asked, progress: Callable[[str], None] = lambda _: None) -> Resilience:
    """What failures cost a plan, and what to do about them. Raises PlannerError."""
    if not asked.days > 0:
        raise PlannerError(f"--days is {asked.days:g}; it must be above 0")
    if asked.interval is not None and asked.interval < job.step_time:
        raise PlannerError(f"--interval is {asked.interval:g} s; a step takes {job.step_time:.3g} s, save no more often than that")
    progress("plans on fewer nodes")
    failures, groups = job.failures(asked.repair), job.groups()
    interval = asked.interval or interval_of(job, failures)
    answers = all_answers(job, failures, asked, groups)
    totals = sorted((_totals(failures, asked, one) for one in answers), key=lambda one: -one.answer.goodput)
    days = totals[0].days
    restart = sum(restarted_in(job, asked.restart).values())
    progress("other rates of failure, other scales")
    return Resilience(
        job=job, nodes=failures, asked=asked, interval=interval, steps=max(round(interval / job.step_time), 1),
        young=float(young(job.times.stall, failures.mtbf)),
        failures=days * DAY / failures.mtbf if np.isfinite(days) else np.inf,
        lost=lost_by_failure(interval, job.times, failures.mtbf, restart),
        kinds=_kinds(job, failures, asked, days), shortage=1.0 - failures.present(), answers=tuple(totals),
        by_mtbf=tuple(_by_mtbf(job, failures, asked, groups)), by_scale=tuple(_by_scale(job, failures, asked, groups)),
        assumptions=(*job.assumptions(), *_said(failures, asked)), advice=_advice(job, failures, asked, totals[0].answer),
    )  # fmt: skip


def _advice(job: FailingJob, failures: Failures, asked: Asked, best: FailureAnswer) -> str:
    """A kind without which more is done in the same time: its failures hold the others up for more than it adds. The plan without
    it starts again after each failure, the least that can be done."""
    found, kinds = list[tuple[float, str]](), failures.kinds
    for number, one in enumerate(kinds if len(kinds) > 1 else ()):
        rest = Failures(kinds=kinds[:number] + kinds[number + 1 :])
        rate = job.speed(only(number, one.count, len(kinds)))
        restart = sum(restarted_in(job, asked.restart).values())
        left = rate * restart_answer(job, rest, restart, asked.interval or interval_of(job, rest)).goodput
        if left > best.goodput:
            found.append((left, one.kind))
    if not found:
        return ""
    left, kind = max(found)
    return (
        f"Leave {kind} out: without it {100.0 * left:.1f} % of the planned work is done, with it {100.0 * best.goodput:.1f} %, "
        "as its failures hold the others up"
    )


def spares_by_kind(failures: Failures, shortage: float) -> list[int]:
    """Spares of each of K kinds with P(a kind is short) < 1 - (1 - P)^(1/K): of all together < P. Raises PlannerError."""
    if not 0.0 < shortage < 1.0:
        raise PlannerError(f"--shortage is {shortage:g}; it must be a chance between 0 and 1, like 0.01")
    each = shortage if len(failures.kinds) == 1 else float(-np.expm1(np.log1p(-shortage) / len(failures.kinds)))
    return [spares_for(one.count, one.mtbf.seconds, one.repair, each) for one in failures.kinds]


def _kinds(job: FailingJob, failures: Failures, asked: Asked, days: float) -> tuple[KindLoss, ...]:
    """What the failures of each kind cost."""
    found = []
    for number, (one, spares) in enumerate(zip(failures.kinds, spares_by_kind(failures, asked.shortage), strict=True)):
        lost, all_lost = (only(number, count, len(failures.kinds)) for count in (1, one.count))
        found.append(KindLoss(
            nodes=one, failures=days * DAY * one.rate if np.isfinite(days) else np.inf, spares=spares,
            without_one=job.speed(lost), without_all=job.speed(all_lost),
        ))  # fmt: skip
    return tuple(found)


def _said(failures: Failures, asked: Asked) -> list[Assumption]:
    """What of the question was not said."""
    found = []
    for one in failures.kinds if asked.repair is None else ():
        why = "assumed: replaced within a day by the provider or the own team"
        if one.repair != REPAIR:
            why = f"mean time until a machine came back in that trace: {one.mtbf.why}"
        what = "repair of a node" if len(failures.kinds) == 1 else f"repair of {one.kind}"
        found.append(Assumption(what, f"{one.repair / HOUR:.3g} h", why, "--repair"))
    return found


def _goodputs(answers: list[FailureAnswer]) -> dict[str, float]:
    return {one.key: one.goodput for one in answers if one.shares}


def _by_mtbf(job: FailingJob, failures: Failures, asked: Asked, groups: Groups) -> list[dict[str, float]]:
    """Goodput of every answer from a hundredth to ten times the mean time between failures."""
    found, free = [], replace(asked, interval=None)
    for factor in np.logspace(-2.0, 1.0, POINTS):
        changed = failures.scaled(mtbf=float(factor))
        if any(one.repair > one.mtbf.seconds for one in changed.kinds):
            continue  # more nodes in repair than there are
        found.append({"mtbf_h": changed.node_mtbf / HOUR, **_goodputs(all_answers(job, changed, free, groups))})
    return found


def _by_scale(job: FailingJob, failures: Failures, asked: Asked, groups: Groups) -> list[dict[str, float]]:
    """Goodput over the number of nodes, replicas of the plan's pipeline added: step and times of a save stay, as each rank's part
    and the storage grow alike; with enough spares at every scale."""
    found, free = [], replace(asked, interval=None)
    for factor in (1, 2, 4, 8, 16, 32, 64):
        larger = failures.scaled(nodes=factor)
        if larger.nodes > 2**16:
            break
        spares = sum(spares_by_kind(larger, asked.shortage))
        many = replace(groups, number=groups.number * factor)
        goodputs = _goodputs(all_answers(job, larger.covered(), free, many))
        found.append({"nodes": float(larger.nodes), "spares": float(spares), **goodputs})
    return found
