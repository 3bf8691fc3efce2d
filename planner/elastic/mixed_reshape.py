"""``plan reshape`` of a plan over several kinds of nodes: the best plan on the nodes of a cluster file, the move counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.assumption import Assumption
from planner.cluster_file import ClusterFile
from planner.elastic.checkpoints import transfer_seconds
from planner.elastic.engine_recipes import Recipe, recipe_of
from planner.elastic.failure_answers import interval_of
from planner.elastic.mixed_elastic_job import MixedElasticJob
from planner.elastic.move_costs import Way, both_ways
from planner.elastic.reshape import PayBack, Wanted, carried_over, drain_of, pay_back_of, recipe_of_move, said_of_move
from planner.elastic.shards import read_factor
from planner.mixed.mixed_changes import MixedChange, changed_plan
from planner.mixed.mixed_plan import MixedPlan
from planner.record import record
from planner.units import format_seconds


@record
class MixedReshape:
    """The move of a mixed plan to other nodes."""

    job: MixedElasticJob
    """As it runs."""
    new: MixedElasticJob
    wanted: Wanted
    plan: MixedPlan
    """The new plan."""
    alone: str
    """A plan of one kind alone that is faster, in words; '' where none is."""
    ways: tuple[Way, ...]
    way: Way
    """The one that is taken."""
    reads: tuple[float, float]
    """Bytes that all new ranks need, and that they read."""
    pay_back: PayBack
    drain: tuple[float, bool] | None
    recipe: Recipe
    kept: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    checkpoint: str = ""
    """What was recognised of a folder; '' without one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        drain = None if self.drain is None else {
            "warning_s": self.wanted.drain, "needed_s": self.drain[0], "enough": self.drain[1],
        }  # fmt: skip
        return {
            "from": _side(self.job), "to": _side(self.new), "alone": self.alone, "way": self.way.to_dict(),
            "ways": [one.to_dict() for one in self.ways], "needed_bytes": self.reads[0], "read_bytes": self.reads[1],
            "pay_back": self.pay_back.to_dict(), "drain": drain, "recipe": self.recipe.to_dict(), "kept": list(self.kept),
            "checkpoint": self.checkpoint, "assumptions": [vars(one) for one in self.assumptions],
        }  # fmt: skip

    def recipe_document(self) -> dict[str, Any]:
        """What the new run needs to know of the old one."""
        batch = self.job.plan.layout.global_batch_size
        old, new = (
            {"gpus": one.num_gpus, "layout": one.plan.layout.to_dict(), "global_batch_size": batch} for one in (self.job, self.new)
        )  # fmt: skip
        return recipe_of_move(old, new, self.wanted.step, self.recipe, self.kept)


def _side(job: MixedElasticJob) -> dict[str, Any]:
    """A plan before or after the move."""
    nodes = {one.kind: job.used(one.kind) for one in job.kinds}
    return {"gpus": job.num_gpus, "nodes": nodes, "layout": job.plan.layout.to_dict(), "step_time_s": job.step_time}


def reads_of(new: MixedElasticJob, old: MixedElasticJob) -> tuple[Floats, Floats, Floats]:
    """Bytes that every new rank needs; that it reads of the old layout's checkpoint, whose shards are read whole; and that it gets
    from others, where ranks with equal parts read a part each.

    Each new part of a tensor meets so many old ones as ``read_factor`` says; old stages that are cut unlike count alike.
    """
    before = {
        name: [old.stored_parts(one, name) for one in old.placement.of_replica(0)] for name in old.saved.bytes_each
    }  # fmt: skip

    def more(parts: float, stream: str) -> float:
        every = before[stream]
        return sum(read_factor(round(parts), round(one)) for one in every) / len(every)

    needed, read = new.reads(), new.reads(more)
    if not recipe_of(old.trainer).shared_reads:
        return needed, read, np.zeros(len(read))
    shared = new.writes() * (float(read.sum()) / float(needed.sum()))
    return needed, shared, np.maximum(read - shared, 0.0)


def _ways(old: MixedElasticJob, new: MixedElasticJob) -> tuple[Way, ...]:
    """Save and start again, and start from the last checkpoint."""
    _, reads, others = reads_of(new, old)
    network = min(one.profile.network_bandwidth for one in new.kinds)

    def parts(end: str) -> dict[str, dict[str, float]]:
        written, read = old.storage(end), new.storage(end)
        save = transfer_seconds(written, old.saved.size, old.by_node(old.writes()), written.write)
        load = transfer_seconds(read, float(reads.sum()), new.by_node(reads), read.read) + float(others.max()) / network
        start = new.start_from(old, end)
        return {"planned": {"save": save, **start, "load": load}, "failed": {**start, "load": load}}

    return tuple(both_ways(parts, old.times, interval_of(old), new.step_time))


def mixed_reshape(
    old: MixedElasticJob, cluster: ClusterFile, wanted: Wanted, progress: Callable[[str], None] = lambda _: None
) -> MixedReshape | None:
    """The best plan on the nodes of a cluster file, its move counted; None where nothing fits. Raises PlannerError."""
    change = changed_plan(old.plan, "plans on the nodes that are there", cluster, cluster, progress)
    if change.best is None:
        return None
    new = MixedElasticJob(plan=change.best, around=old.around, checkpoint_bytes=old.checkpoint_bytes)
    ways = _ways(old, new)
    way = next(one for one in ways if one.key == ("failed" if wanted.lost else "planned"))
    batch, stays = old.plan.layout.global_batch_size, _stays(old, cluster)
    back = None if stays and not wanted.lost else next(one for one in ways if one.key == "planned").seconds
    against = f"staying on {old.machines}" if back is None else f"waiting until {old.machines} are there again"
    needed, read, _ = (float(one.sum()) for one in reads_of(new, old))
    rates = batch / old.step_time, batch / new.step_time
    said = f"planned again on {new.machines}, after a move of {format_seconds(way.seconds)}"
    return MixedReshape(
        job=old, new=new, wanted=wanted, plan=replace(change.best, why=said), alone=_alone(change, cluster), ways=ways, way=way,
        reads=(needed, read), pay_back=pay_back_of(rates, new.step_time, way, back, against),
        drain=drain_of(old, wanted.drain), recipe=recipe_of(old.trainer), assumptions=said_of_move(old, wanted),
        kept=carried_over(old.plan.workload, batch, wanted.step),
    )  # fmt: skip


def _stays(old: MixedElasticJob, cluster: ClusterFile) -> bool:
    """The plan could go on as it is: all of its nodes are among those of a cluster."""
    there = {one.kind: one.count for one in cluster.nodes}
    return all(there.get(one.kind, 0) >= old.used(one.kind) for one in old.kinds)


def _alone(change: MixedChange, cluster: ClusterFile) -> str:
    """The kind that is faster by itself with a plan of one kind of node, and how it is planned."""
    one = change.alone
    if one is None or one.step_time_s is None:
        return ""
    hardware = cluster.node_kind(one.kind).hardware
    return f"{one.kind} alone takes {format_seconds(one.step_time_s)} a step: plan --hardware {hardware} --gpus {one.gpus}"
