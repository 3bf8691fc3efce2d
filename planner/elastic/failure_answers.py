"""Answers to a failure, each as shares of the wall time that sum to 1: what part is work that stays, and where the rest goes.

Failures come to the job every M = M_node / nodes; of several kinds of nodes 1 / M = sum n_k / M_k. N nodes are in repair
(``spares.in_repair``); j = (N - spares)+ of a kind are missing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from planner.arrays import Floats
from planner.elastic.checkpoints import SaveTimes, best_interval, wall_over_work
from planner.elastic.failing_job import FailingJob, Failures, Groups, Rerouting
from planner.elastic.failure_rates import constants
from planner.layout import Layout
from planner.record import record

PARTS = ("work", "saves", "lost_work", "restarts", "waiting", "slower")
"""Shares of the wall time: steps that stay; stalls by saves; steps that are done again; new starts; no nodes to run on; fewer
nodes, or a less even split, than planned."""
NAMES = {
    "restart": "restart from the checkpoint, wait for nodes",
    "shrink": "shrink and continue, grow when nodes return",
    "replica_groups": "replica groups (torchft): the others go on",
    "reroute": "re-route micro batches to data-parallel peers (ReCycle)",
}


@record
class FailureAnswer:
    """One way to answer failures."""

    key: str
    """Of NAMES."""
    shares: dict[str, float]
    """By PARTS, sum 1; empty where ``why_not``."""
    interval: float = 0.0
    """Seconds of training between two saves."""
    restart: float = 0.0
    """Seconds from a failure until training goes on."""
    why_not: str = ""
    """Why the plan cannot do it; '' when it can."""
    note: str = ""
    """What it needs."""

    @property
    def goodput(self) -> float:
        """Work that stays over what the same wall time would hold without failures and saves."""
        return self.shares.get("work", 0.0)

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {**vars(self), "name": NAMES[self.key], "goodput": self.goodput if self.shares else None}


def checkpointed(times: SaveTimes, mtbf: float, interval: float, restart: float) -> dict[str, float]:
    """Shares while nodes are there: work tau / E and saves delta / E of a cycle that takes E wall seconds (``wall_over_work``);
    in new starts 1 - e^{-R/M}, as failures come at any time and each begins a start that the next may cut short; the rest is work
    done again."""
    stretch = float(wall_over_work(
        interval, stall=times.stall, mtbf=mtbf, restart=restart, behind=times.behind
    ))  # fmt: skip
    work = 1.0 / stretch if math.isfinite(stretch) else 0.0
    saves = work * times.stall / interval
    starts = min(-math.expm1(-restart / mtbf), 1.0 - work - saves)
    return {"work": work, "saves": saves, "restarts": starts, "lost_work": max(1.0 - work - saves - starts, 0.0)}


def _shares(running: float, parts: dict[str, float], slower: float = 0.0) -> dict[str, float]:
    """Shares of all the wall time, from those of the part in which the job runs at all."""
    found = {name: running * parts.get(name, 0.0) for name in PARTS}
    found["slower"] = running * slower
    found["work"] -= running * slower
    found["waiting"] += 1.0 - running
    return found


def restart_answer(job: FailingJob, failures: Failures, restart: float, interval: float) -> FailureAnswer:
    """All nodes or none: runs while no node is missing, from the last checkpoint each time."""
    shares = _shares(failures.present(), checkpointed(job.times, failures.mtbf, interval, restart))
    return FailureAnswer(key="restart", shares=shares, interval=interval, restart=restart)


def shrink_answer(job: FailingJob, failures: Failures, restart: float, interval: float) -> FailureAnswer:
    """Goes on with the nodes that are left: rate ``job.speed(j)`` with j nodes missing, over that of all.

    Each failure without a spare costs a restart with the rendezvous's last call; each node that comes back a planned one, without
    lost work: rate P(j > 0) / M of both.
    """
    short, times, known = 1.0 - failures.present(), job.times, constants()
    each = restart + short * known.last_call.value
    planned = short * (restart - known.detect_node.value + times.stall + times.behind + known.last_call.value)
    parts = checkpointed(times, failures.mtbf, interval, each)
    grown = min(planned / failures.mtbf, 1.0) * parts["work"]
    rates = [(chance, job.speed(state) if any(state) else 1.0) for state, chance in failures.states()]
    running = sum(chance for chance, rate in rates if rate > 0.0)
    rate = sum(chance * rate for chance, rate in rates) / max(running, 1e-300)
    parts["restarts"] += grown
    parts["work"] -= grown
    shares = _shares(running, parts, parts["work"] * (1.0 - rate))
    return FailureAnswer(key="shrink", shares=shares, interval=interval, restart=each, note="torchrun --nnodes MIN:MAX")


def kept_steps(step_time: float, mtbf: float) -> float:
    """Share of steps without a failure inside: e^{-t/M}. A step that a failure falls into is given up by all groups.
    [torchft: quorum per step; an error before the commit drops the step]"""
    return math.exp(-step_time / mtbf)


def group_shares(*, step_time: float, mtbf: float, groups: int, away: float, missing: float = 0.0) -> dict[str, float]:
    """Shares of replica groups: steps kept e^{-t/M}, of them (1 - a) done, a the part of the groups that is away.

    A group is away for ``away`` seconds per failure of the job: (away / M) / G, Poisson and independent of the others; and for all
    the time that its nodes are ``missing`` (expected groups).
    """
    kept = kept_steps(step_time, mtbf)
    rejoining = -math.expm1(-away / mtbf / groups)
    waiting = min(missing / groups, 1.0)
    work = kept * (1.0 - waiting) * (1.0 - rejoining)
    return {
        "work": work, "restarts": kept * (1.0 - waiting) * rejoining, "waiting": kept * waiting, "lost_work": 1.0 - kept,
        "saves": 0.0, "slower": 0.0,
    }  # fmt: skip


def replica_answer(job: FailingJob, failures: Failures, away: float, groups: Groups) -> FailureAnswer:
    """Each of G groups holds all states; a failure takes its group out until it has started and has the states of a peer."""
    if not groups.number:
        return FailureAnswer(key="replica_groups", shares={}, why_not=groups.why_not)
    lacking = sum(chance * min(sum(state), groups.number) for state, chance in failures.states())
    shares = group_shares(
        step_time=groups.step_time, mtbf=failures.mtbf, groups=groups.number, away=away, missing=lacking
    )  # fmt: skip
    slower = shares["work"] * (1.0 - min(job.step_time / groups.step_time, 1.0))
    shares["slower"], shares["work"] = slower, shares["work"] - slower
    note = (
        f"{groups.number} groups, states in each: {groups.step_time / job.step_time:.2f} x step; the batch is smaller while one is "
        "away"
    )
    return FailureAnswer(key="replica_groups", shares=shares, restart=away, note=note)


def why_no_reroute(layout: Layout) -> str:
    """Why peers cannot do the microbatches of ranks that failed; '' where they can."""
    pp, dp = int(layout.pp), int(layout.dp)
    if pp == 1 or dp == 1:
        return f"needs stages and replicas; the plan has pp {pp} and dp {dp}"
    if int(layout.zero) > 0 and int(np.max(layout.shard)) == dp:
        return f"zero {int(layout.zero)} keeps only one copy of the optimizer states"
    return ""


def rerouted(layout: Layout, missing: npt.ArrayLike) -> Floats:
    """Rate with some nodes missing, each in another stage at best, over that of all; 0 where a stage has no peer left.

    Peers of a stage do m d / (d - j) microbatches: the step takes (m d / (d - j) + p - 1) / (m + p - 1) times as long; bubbles are
    not filled, which ReCycle does by a split backward pass.  [ReCycle, SOSP 2024, arXiv 2405.14009, section 3]
    """
    pp, dp, m = int(layout.pp), int(layout.dp), int(layout.num_microbatches)
    lost = np.minimum(np.ceil(np.asarray(missing, dtype=float) / pp), dp)
    slower = (m * dp / np.maximum(dp - lost, 1e-9) + pp - 1.0) / (m + pp - 1.0)
    return np.where(lost < dp, 1.0 / slower, 0.0)


def rerouting_of(layout: Layout) -> Rerouting:
    """What the peers of a stage can do for each other."""
    if why_not := why_no_reroute(layout):
        return Rerouting(why_not=why_not)
    return Rerouting(rate=lambda missing: float(rerouted(layout, missing)))


def reroute_answer(job: FailingJob, failures: Failures, away: float) -> FailureAnswer:
    """Peers of the same stage take the microbatches of ranks that failed: no state is lost where weights and states have copies."""
    peers = job.rerouting()
    if peers.rate is None:
        return FailureAnswer(key="reroute", shares={}, why_not=peers.why_not)
    kept, rejoining = kept_steps(job.step_time, failures.mtbf), -math.expm1(-2.0 * away / failures.mtbf)
    rate = sum(chance * peers.rate(sum(state)) for state, chance in failures.states())
    shares = dict.fromkeys(PARTS, 0.0)
    shares |= {
        "work": kept * (1.0 - rejoining) * rate, "restarts": kept * rejoining, "lost_work": 1.0 - kept,
        "slower": kept * (1.0 - rejoining) * (1.0 - rate),
    }  # fmt: skip
    return FailureAnswer(key="reroute", shares=shares, restart=away, note="research runtime; no trainer of planner has it")


def interval_of(job: FailingJob, failures: Failures | None = None) -> float:
    """The best interval between saves, in whole steps; ``failures``: others than the job's own."""
    return best_interval(job.times, (failures or job.failures()).mtbf, job.step_time)
