"""A plan over several kinds of nodes as a job that may be interrupted: what ``elastic_job`` is for one kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.assumption import Assumption
from planner.cluster_file import ClusterFile, NodeKind, Storage
from planner.elastic.checkpoints import SaveTimes, save_times, transfer_seconds
from planner.elastic.elastic_job import Surroundings, copy_rate, said_of, start_parts, storage_of_nodes, tensors_of
from planner.elastic.failing_job import FailingNodes, Failures, Groups, Rerouting, only
from planner.elastic.failure_rates import NodeMtbf, constants, node_mtbf, repair_of
from planner.elastic.shards import KINDS, Saved, saved_of
from planner.errors import PlannerError, listed
from planner.mixed.export.placement import Placement, StageRanks, place
from planner.mixed.local_updates import price_layout
from planner.mixed.mixed_changes import changed_plan
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_plan import MixedPlan
from planner.record import record
from planner.trainer import Trainer, load_trainer
from planner.units import format_days


def as_said_by(plan: MixedPlan, cluster: ClusterFile) -> MixedPlan:
    """The plan with what a cluster file says of its kinds: failures, prices, storage, spares. Raises PlannerError for a kind that
    it does not have. A kind that was split by speed is named after the kind, ``t4 node-5``."""
    kinds = []
    for one in plan.cluster.nodes:
        said = next((each for each in cluster.nodes if one.kind == each.kind or one.kind.startswith(f"{each.kind} ")), None)
        if said is None:
            names = listed([each.kind for each in cluster.nodes], "and")
            raise PlannerError(f"the plan runs on the kind {one.kind}, the cluster file has {names}; name the plan's kinds there")
        kinds.append(replace(one, mtbf=said.mtbf, price=said.price, spot=said.spot))
    cluster = replace(plan.cluster, nodes=tuple(kinds), storage=cluster.storage, spares=cluster.spares)
    return replace(plan, cluster=cluster)


@record
class MixedElasticJob:
    """A mixed plan with its surroundings."""

    plan: MixedPlan
    around: Surroundings
    """Failures and prices only where one number is meant for all kinds."""
    checkpoint_bytes: float | None = None
    """Bytes of weights and states in a checkpoint that was looked into; None = as computed."""
    searched: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Rate of the best plan without some nodes of each kind, each searched once."""

    @cached_property
    def placement(self) -> Placement:
        """Where its ranks are."""
        return place(self.plan.layout, self.plan.cluster)

    @cached_property
    def trainer(self) -> Trainer:
        """Of the plan, read once."""
        return load_trainer(self.plan.trainer)

    @cached_property
    def kinds(self) -> tuple[NodeKind, ...]:
        """That the plan uses, in rank order."""
        used = {one.kind for one in self.placement.nodes}
        return tuple(one for one in self.plan.cluster.nodes if one.kind in used)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.plan.workload.model.name

    @property
    def machines(self) -> str:
        """GPUs in words."""
        return ", ".join(f"{self.plan.layout.gpus_of(one.kind)} x {one.kind}" for one in self.kinds)

    @property
    def layout_in_words(self) -> str:
        """The layout."""
        return shape_text(self.plan.layout)

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return self.plan.layout.num_gpus

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""
        return self.plan.prediction.step_time_s

    def used(self, kind: str) -> int:
        """Nodes of a kind that the plan runs on."""
        return sum(one.kind == kind for one in self.placement.nodes)

    @cached_property
    def saved(self) -> Saved:
        """What a checkpoint holds; the size of one that was looked into replaces the computed one, its shares stay."""
        return saved_of(self.plan.workload, self.trainer).of_size(self.checkpoint_bytes)

    def storage(self, end: str = "") -> Storage:
        """Where checkpoints lie; ``end``: as ``constants`` takes it."""
        return self.around.storage or storage_of_nodes(len(self.placement.nodes), end)

    def stored_parts(self, stage: StageRanks, stream: str) -> float:
        """Parts of one tensor of a stage in a checkpoint: tensor parallel ranks, and replicas where the stream is sharded."""
        layout = self.plan.layout
        level = max(self.trainer.stored.weight_sharding_level, 1) if stream == "weights" else 1
        shared = layout.dp_shard or layout.replicas
        tp = layout.pipelines[stage.pipeline].stages[stage.stage].tp
        return float(tp * (shared * layout.cp if layout.zero >= level else 1))

    def held(self, stage: StageRanks, stream: str) -> float:
        """Bytes of a stream that all ranks of one stage need together: its layers, embedding and head with its first and last.
        Virtual stages hold as many layers, which count as neighbours; experts are shared out over ``ep`` ranks."""
        pipeline = self.plan.layout.pipelines[stage.pipeline]
        first = sum(one.layers for one in pipeline.stages[: stage.stage])
        some = np.zeros(self.saved.slots.shape[1], dtype=bool)
        some[first + 1 : first + 1 + pipeline.stages[stage.stage].layers] = True
        some[0], some[-1] = stage.stage == 0, stage.stage == len(pipeline.stages) - 1
        parameters = self.saved.slots[:, some].sum(axis=1)
        parameters[KINDS.index("experts")] /= self.plan.layout.ep
        return float(parameters.sum()) * self.saved.bytes_each[stream]

    def reads(self, more: Callable[[float, str], float] = lambda parts, stream: 1.0) -> Floats:
        """Bytes that every rank reads of a checkpoint of this layout: its own boxes; ``more``: so many times as much."""
        found = np.zeros(self.placement.world)
        for stage in self.placement.stages:
            parts = {name: self.stored_parts(stage, name) for name in self.saved.bytes_each}
            found[list(stage.ranks)] += sum(self.held(stage, name) / n * more(n, name) for name, n in parts.items())
        return found

    def writes(self) -> Floats:
        """Bytes that every rank writes: each layer once, shared out over the ranks of all replicas that hold it."""
        found, layout = np.zeros(self.placement.world), self.plan.layout
        for stage in self.placement.stages:
            each = sum(self.held(stage, one) for one in self.saved.bytes_each)
            found[list(stage.ranks)] += each / len(stage.ranks) / layout.replicas
        return found * (self.saved.size / float(found.sum()))  # experts of several ranks, each written by its own

    def by_node(self, ranks: Floats) -> Floats:
        """Sums over the ranks of each node."""
        return np.add.reduceat(ranks, [one.first_rank for one in self.placement.nodes])

    @cached_property
    def times(self) -> SaveTimes:
        """What a save and a load take; the slowest copy to host memory of all kinds holds the others up."""
        writes, reads, storage = self.writes(), self.reads(), self.storage()
        rates = {one.kind: copy_rate(one.profile) for one in self.kinds}
        stall = max(
            float(writes[one.first_rank : one.first_rank + one.gpus].max()) / rates[one.kind] for one in self.placement.nodes
        )  # fmt: skip
        found = save_times(
            self.saved.size, storage, of_node=self.by_node(writes), stall=stall, asynchronous=self.around.asynchronous
        )  # fmt: skip
        return replace(found, load=transfer_seconds(storage, float(reads.sum()), self.by_node(reads), storage.read))

    def start_from(self, stored: MixedElasticJob, end: str = "") -> dict[str, float]:
        """Seconds from the start of the processes until a checkpoint of another layout can be read, in parts."""
        layout = self.plan.layout
        tp = max(stage.tp for one in layout.pipelines for stage in one.stages)
        degrees = (tp, max(len(one.stages) for one in layout.pipelines), layout.replicas, layout.cp, layout.ep)
        parts = [stored.stored_parts(one, name) for one in stored.placement.stages for name in stored.saved.bytes_each]
        tensors = tensors_of(self.saved, self.plan.workload.model)
        return start_parts([*(one for one in degrees if one > 1), layout.num_gpus], tensors, float(np.mean(parts)), end)

    @cached_property
    def start(self) -> dict[str, float]:
        """Seconds of a new start on as many nodes, in parts; they sum to the restart."""
        parts = self.start_from(self)
        return {"detection": constants().detect_node.value, **parts, "load": self.times.load, "warm-up": self.step_time}

    def _mtbf(self, one: NodeKind) -> NodeMtbf:
        given = self.around.mtbf if self.around.mtbf is not None else one.mtbf
        if given is not None and given <= 0:
            raise PlannerError(f"the time between failures of {one.kind} is {given:g} s; it must be above 0")
        return NodeMtbf(seconds=given, why="given") if given else node_mtbf(one.profile, spot=one.spot or self.around.spot)

    def failures(self, repair: float | None = None) -> Failures:
        """How often its nodes fail; ``repair``: seconds until one is back, None = as published, else a day.

        Nodes of a kind that the plan leaves idle are spares of it; those that belong to no kind stand where they save most waiting.
        """
        found = []
        for one in self.kinds:
            price = self.around.price if self.around.price is not None else one.usd_per_hour()
            spot = one.spot or self.around.spot
            found.append(FailingNodes(
                kind=one.kind, count=self.used(one.kind), mtbf=self._mtbf(one), spares=one.count - self.used(one.kind), spot=spot,
                repair=repair_of(one.profile, spot) if repair is None else repair,
                usd_per_hour=None if price is None else price * one.gpus_per_node,
            ))  # fmt: skip
        for _ in range(min(self.around.spares, sum(one.count for one in found))):
            more = [replace(one, spares=one.spares + 1) for one in found]
            gain = [float(with_one.missing()[0] / one.missing()[0]) for with_one, one in zip(more, found, strict=True)]
            best = int(np.argmax(gain))
            found[best] = more[best]
        return Failures(kinds=tuple(found))

    def left(self, missing: tuple[int, ...]) -> ClusterFile | None:
        """The cluster without some nodes of each kind that the plan uses, and their idle ones; None where nothing is left."""
        gone = {one.kind: count for one, count in zip(self.kinds, missing, strict=True) if count}
        kinds = [
            replace(one, count=self.used(one.kind) - gone[one.kind]) if one.kind in gone else one for one in self.plan.cluster.nodes
            if one.kind not in gone or self.used(one.kind) > gone[one.kind]
        ]  # fmt: skip
        names = {name for one in kinds for name in (one.kind, one.site)}
        links = tuple(one for one in self.plan.cluster.links if set(one.between) <= names)
        return replace(self.plan.cluster, nodes=tuple(kinds), links=links) if kinds else None

    def searched_speed(self, missing: tuple[int, ...]) -> float:
        """Rate of the best plan on what is left, over that of the plan."""
        if missing not in self.searched:
            cluster, found = self.left(missing), None
            with suppress(PlannerError):  # nothing that is left may run the plan's options
                found = None if cluster is None else changed_plan(self.plan, "fewer nodes", cluster, cluster, lambda _: None)
            steps = [] if found is None else [
                one for one in (found.best and found.best.prediction.step_time_s, found.alone and found.alone.step_time_s) if one
            ]  # fmt: skip
            self.searched[missing] = min(self.step_time / min(steps), 1.0) if steps else 0.0
        return self.searched[missing]

    def speed(self, missing: tuple[int, ...]) -> float:
        """Rate without some nodes of each kind over that of all, 0 where nothing is left.

        Searched for the first node of each kind and for all of it; between them straight lines, and what several kinds lose adds
        up. At least that of the replicas without a lost node, whose batch is smaller.
        """
        if all(count == self.used(one.kind) for count, one in zip(missing, self.kinds, strict=True)):
            return 0.0 if len(self.kinds) == len(self.plan.cluster.nodes) else self.searched_speed(missing)
        lost = 0.0
        for number, (count, one) in enumerate(zip(missing, self.kinds, strict=True)):
            if count:
                all_of_it = self.used(one.kind)
                ends = [self.searched_speed(only(number, n, len(missing))) for n in (1, all_of_it)]
                lost += 1.0 - float(np.interp(count, [1, all_of_it], ends)) if all_of_it > 1 else 1.0 - ends[0]
        return max(1.0 - lost, self._replicas_left(missing))

    @cached_property
    def _of_replicas(self) -> dict[str, set[int]]:
        """Replicas that a node holds ranks of, by its name."""
        node = {rank: one.name for one in self.placement.nodes for rank in range(one.first_rank, one.first_rank + one.gpus)}
        found: dict[str, set[int]] = {one.name: set() for one in self.placement.nodes}
        for stage in self.placement.stages:
            for rank in stage.ranks:
                found[node[rank]].add(stage.replica)
        return found

    def _replicas_left(self, missing: tuple[int, ...]) -> float:
        """Part of the samples of replicas that lost no node, each failed node in other replicas than the rest."""
        layout = self.plan.layout
        sequences = [one.sequences for one in layout.pipelines for _ in range(one.count)]
        gone = 0.0
        for count, kind in zip(missing, self.kinds, strict=True):
            nodes = [one.name for one in self.placement.nodes if one.kind == kind.kind]
            gone += count * max(sum(sequences[number] for number in self._of_replicas[name]) for name in nodes)
        return max(1.0 - gone / layout.global_batch_size, 0.0)

    def groups(self) -> Groups:
        """Replicas that share no node with others, as groups; a group keeps all states to itself."""
        layout = self.plan.layout
        if len(layout.pipelines) > 1:
            return Groups(why_not="its pipelines have unlike shares of the batch, and all groups weigh alike")
        together = _components(list(self._of_replicas.values()))
        sizes = {len(one) for one in together}
        if len(together) < 2 or len(sizes) > 1:
            return Groups(why_not="needs two replicas on nodes of their own: here a node has ranks of several")
        [size] = sizes
        layout = replace(layout, dp_shard=size) if layout.zero else layout
        found = price_layout(self.plan.job(), layout)
        if not found.fits:
            return Groups(why_not="the states of a group do not fit: they are sharded over all replicas")
        nodes = {one.name: one for one in self.placement.nodes}
        network = min(one.profile.network_bandwidth for one in self.kinds)
        ranks = sum(one.gpus for one in nodes.values()) / len(together)
        return Groups(number=len(together), step_time=found.step_time, join=self.saved.size / ranks / network)

    def rerouting(self) -> Rerouting:
        """Not defined for unlike stages."""
        return Rerouting(why_not="defined for equal stages of one kind of node")

    def assumptions(self) -> tuple[Assumption, ...]:
        """What the user did not say."""
        found = []
        for one in self.kinds:
            mtbf = self._mtbf(one)
            if mtbf.why != "given":
                each = f"a node every {format_days(mtbf.seconds)}"
                found.append(Assumption(f"failures of {one.kind}", each, mtbf.why, "mtbf in the cluster file, --mtbf for all"))
        if idle := [f"{one.count - self.used(one.kind)} x {one.kind}" for one in self.kinds if one.count > self.used(one.kind)]:
            found.append(Assumption("spares", listed(idle, "and"), "nodes of the cluster that the plan leaves idle", "--cluster"))
        why = "searched without one node of a kind and without all; between them straight lines, and losses of kinds add up"
        found.append(Assumption("rate with fewer nodes", "by kind", why, ""))
        return (*found, *said_of(self.around, self.start["communicators"]))


def _components(sets: list[set[int]]) -> list[set[int]]:
    """Unions of the sets that meet each other."""
    found = list[set[int]]()
    for one in sets:
        apart = [each for each in found if not each & one]
        found = [*apart, one.union(*(each for each in found if each & one))]
    return found
