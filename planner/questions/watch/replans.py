"""What could be done about what holds a job up: other nodes, fewer, uneven shares or stages, experts placed by load; each with its
gain, what it costs, and whether it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cluster_file import ClusterFile, NodeKind
from planner.elastic.best_layout import best_layout, resolved_plan
from planner.elastic.elastic_job import ElasticJob
from planner.elastic.expert_placement import placed, unevenness
from planner.elastic.failing_job import FailingJob
from planner.elastic.shards import Places
from planner.elastic.stragglers import LEAST, Straggler
from planner.errors import PlannerError, listed
from planner.mixed.export.who_runs import who_runs
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_plan import job_of, priced_plan
from planner.mixed.mixed_search import search_mixed
from planner.mixed.shares import Replicas, water_fill
from planner.record import record
from planner.units import plural

LEAST_GAIN = 1e-3
"""A change that wins less of the step does not pay."""
SPEEDS = 3
"""Speeds of slow nodes that are told apart: the search takes longer with each."""
SAME_SPEED = 0.05
"""Slowdowns are planned in such steps, rounded up: equal ones are one kind, and noise between two looks changes nothing."""


@record
class Action:
    """What could be done, and whether it pays."""

    what: str
    gain: float
    """Part of the step time that it wins."""
    cost: float
    """Seconds that training stands still for it."""
    pays_after: float | None
    """Seconds until it has repaid; None = never."""
    pays: bool
    """Within the training that is left."""
    how: str
    """The command, or setting."""
    plan: Mapping[str, Any] | None = None
    """The new plan as its file holds it, or the order of experts; None where there is none to write."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "gain_percent": 100.0 * self.gain}


@record
class Change:
    """A change before it is weighed."""

    what: str
    step: float
    """Seconds of a step with it."""
    how: str
    free: bool = False
    """Training does not stop for it."""
    plan: Mapping[str, Any] | None = None


def in_steps(level: float) -> float:
    """A slowdown in steps of SAME_SPEED, rounded up."""
    return round(SAME_SPEED * math.ceil(min(level, 100.0) / SAME_SPEED - 1e-6), 3)


@record
class Held:
    """A job as it is held up."""

    job: ElasticJob
    levels: Mapping[int, float]
    """Times as long as planned that slow ranks compute."""
    step_at: Callable[[float], float]
    """Seconds of a step in which all compute takes some times as long, what else holds the job up included."""

    @property
    def places(self) -> Places:
        """Where ranks stand."""
        return self.job.places

    @property
    def nodes(self) -> dict[int, float]:
        """Slow nodes, as slow as their slowest rank, in steps of SAME_SPEED and at most SPEEDS."""
        found: dict[int, float] = {}
        for rank, level in self.levels.items():
            node = rank // self.job.node_ranks
            found[node] = max(found.get(node, 1.0), in_steps(level))
        speeds = sorted({*found.values()})
        while len(speeds) > SPEEDS:  # the two that are nearest become the slower one
            at = min(range(len(speeds) - 1), key=lambda i: speeds[i + 1] - speeds[i])
            del speeds[at]
        return {node: min(speed for speed in speeds if speed >= level) for node, level in found.items()}


def replica_times(places: Places, levels: Mapping[int, float]) -> Floats:
    """Times as long as planned of every stage of every replica, (replicas, stages): a stage is as slow as its slowest rank."""
    layout = places.layout
    found = np.ones((int(layout.dp), int(layout.pp)))
    replica = places.inside // int(layout.tp * layout.cp)
    for rank, level in levels.items():
        at = int(replica[rank]), int(places.stage[rank])
        found[at] = max(found[at], level)
    return found


def stretch(times: Floats, microbatches: int) -> float:
    """Times as long as planned that a step of a pipeline takes: the slowest replica's sum_j x_j + (m - 1) max_j x_j, over
    p + m - 1."""
    steps = times.sum(axis=1) + (microbatches - 1) * times.max(axis=1)
    return float(steps.max()) / (times.shape[1] + microbatches - 1)


def move_seconds(job: FailingJob) -> float:
    """Seconds of a save and a new start."""
    return job.times.behind + job.times.stall + sum(value for name, value in job.start.items() if name != "detection")


def actions_of(changes: Sequence[Change], now: float, whole: float, remaining: float) -> list[Action]:
    """Changes with gain and cost, those that pay first. ``now``: seconds of a step as it is; ``whole``: of a move."""
    answers = []
    for one in changes:
        gain, cost = 1.0 - one.step / now, 0.0 if one.free else whole
        after = cost / gain if gain > 0 else None
        pays = after is not None and gain > LEAST_GAIN and after < remaining
        answers.append(
            Action(what=one.what, gain=gain, cost=cost, pays_after=after, pays=pays, how=one.how, plan=one.plan)
        )
    return sorted(answers, key=lambda one: (not one.pays, -one.gain))


def changes_of_nodes(held: Held, names: Mapping[int, str], progress: Callable[[str], None]) -> list[Change]:
    """Other nodes for the slow ones, none for them, less work for them with the same degrees. ``names``: of nodes."""
    job, slow = held.job, held.nodes
    who = listed([names.get(node, f"node-{node}") for node in sorted(slow)[:4]], "and") + (" and others" if len(slow) > 4 else "")
    there = f"{'a spare' if len(slow) == 1 else 'spares'}" if job.around.spares >= len(slow) else "other nodes, when they are there"
    found = [Change(
        what=f"replace {who} by {there}", step=held.step_at(1.0), how="drain the node, start again from a save",
    )]  # fmt: skip
    left = (job.nodes - len(slow)) * job.node_ranks
    if left >= 1:
        progress("without the slow nodes")
        fewer = best_layout(resolved_plan(job.plan), left, least=max(left // 2, 1))
        if fewer is not None:
            step = fewer.step_time * held.step_at(1.0) / job.step_time
            what = f"go on without {'that node' if len(slow) == 1 else 'those nodes'}, on {fewer.gpus} GPUs"
            found.append(Change(what=what, step=step, how=f"plan reshape PLAN --gpus {left}"))
    return found + uneven_shares(held)


def uneven_shares(held: Held) -> list[Change]:
    """The same degrees, fewer microbatches for slow replicas: by water-filling, exact."""
    layout, times = held.places.layout, replica_times(held.places, held.levels)
    dp, m = int(layout.dp), int(layout.num_microbatches)
    if dp == 1 or m == 1:
        return []
    rows, counts = np.unique(np.round(np.stack([times.sum(axis=1) - times.max(axis=1), times.max(axis=1)], axis=1), 3),
                             axis=0, return_counts=True)  # fmt: skip
    if len(rows) == 1:
        return []
    replicas = [Replicas(fixed=float(row[0]), each=float(row[1]), count=int(n)) for row, n in zip(rows, counts, strict=True)]
    shares = water_fill(replicas, dp * m)
    longest = max(one.fixed + max(share) * one.each for one, share in zip(replicas, shares, strict=True))
    least, slow = min(map(min, shares)), sum(int(n) for row, n in zip(rows, counts, strict=True) if row[1] > 1.0 + LEAST / 2.0)
    how = f"{least} to {max(map(max, shares))} instead of {m} microbatches for each replica, its loss weighted by its samples "
    step = held.step_at(longest / (times.shape[1] + m - 1))
    what = f"uneven shares of the batch, less for {plural(slow, 'slow replica')}"
    return [Change(what=what, step=step, how=f"{how}(own training loop)")]


def measured_cluster(job: ElasticJob, slow: Mapping[int, float]) -> ClusterFile:
    """The nodes of a plan, the slow ones with their slowdown."""
    hardware = job.plan.hardware
    name = hardware.rpartition("/")[2].removesuffix(".yaml")
    gpus = 0 if job.node_ranks == int(job.hardware.gpus_per_node) else job.node_ranks
    factors = {f"node-{node}": level for node, level in slow.items()}
    kind = NodeKind(
        kind=name, hardware=hardware, count=job.nodes, gpus=gpus, slowdown=factors, network=job.plan.network_bandwidth
    )
    return ClusterFile(nodes=(kind,), storage=job.around.storage, spares=job.around.spares)


def planned_again(held: Held) -> list[Change]:
    """The best plan of the same nodes with the speeds that were measured: uneven stages, uneven shares, or nodes left out; its step
    where nothing else holds the job up."""
    job, plan = held.job, held.job.plan
    if job.nodes == 1:
        return []
    try:
        mixed = job_of(plan.workload, measured_cluster(job, held.nodes), plan.trainer)
        best = search_mixed(mixed, top=1).best
        if not best:
            return []
        new = priced_plan(mixed, plan.trainer, best[0][0], plan.assumptions, "planned again with the speeds that were measured")
    except PlannerError:  # a trainer or a precision that mixed plans do not have
        return []
    runs = who_runs(new)[0].partition(";")[0]
    what = f"plan again with the measured speeds: {shape_text(new.layout)}"
    return [Change(what=what, step=new.prediction.step_time_s, how=f"{runs}; --output writes the plan", plan=new.to_dict())]


def changes_of_stage(held: Held, size: float, step_at: Callable[[float], float]) -> list[Change]:
    """Fewer layers on the stage that takes longest. ``step_at``: of ``held``, without what that stage costs."""
    pp = int(held.places.layout.pp)
    layers = held.job.plan.workload.model.num_layers
    if pp == 1 or layers <= pp:
        return []
    [[least], others] = water_fill([Replicas(fixed=0.0, each=size), Replicas(fixed=0.0, each=1.0, count=pp - 1)], layers)
    longest = max(least * size, max(others)) / (layers / pp)
    m = int(held.places.layout.num_microbatches)
    step = step_at(stretch(np.array([[longest] + [1.0] * (pp - 1)]), m))
    how = f"{least} instead of {layers // pp} layers there (Megatron: --pipeline-model-parallel-layout)"
    return [Change(what="fewer layers on the slow stage", step=step, how=how)]


def changes_of_experts(
    held: Held, loads: Floats | None, layers: Sequence[int], step_with: Callable[[float], float]
) -> list[Change]:
    """Experts placed by their load, where that is known of each; else the balancing of the router. ``step_with``: seconds of a step
    with some unevenness."""
    how = "a stronger balancing loss or bias; or tokens of each expert (layer, expert, tokens), which place them by load"
    if loads is None:
        return [Change(what="balance the experts", step=step_with(1.0), how=how, free=True)]
    ranks = int(held.places.layout.ep)
    order = placed(loads, ranks)
    plan = {
        "planner_expert_order": 1, "ranks": ranks,
        "layers": {int(layer): [int(one) for one in row] for layer, row in zip(layers, order, strict=True)},
    }  # fmt: skip
    size = unevenness(loads, ranks, order)
    what = f"place the experts by load: {size:.2f} instead of {unevenness(loads, ranks):.2f} times the mean"
    how = "--output writes the order of the experts: permute their tensors and the rows of the router in the checkpoint alike"
    return [Change(what=what, step=step_with(size), how=how, plan=plan)]


def slower_ranks(found: Sequence[Straggler]) -> dict[int, float]:
    """Times as long of every rank that was found to compute slowly, or whose clock is low."""
    levels: dict[int, float] = {}
    for one in found:
        if one.kind in ("slow_rank", "slow_node", "throttled"):
            for rank in one.ranks:
                levels[rank] = max(levels.get(rank, 1.0), one.size)
    return levels

