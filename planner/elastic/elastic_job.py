"""One plan as a job that may be interrupted: nodes, step, what is saved and how long a save, a load and a new start take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.assumption import Assumption
from planner.cluster_file import ClusterFile, Storage
from planner.elastic.best_layout import resolved_plan
from planner.elastic.checkpoints import SaveTimes, save_times, transfer_seconds
from planner.elastic.failing_job import FailingNodes, Failures, Groups, Rerouting
from planner.elastic.failure_answers import rerouting_of
from planner.elastic.failure_rates import NodeMtbf, constants, node_mtbf, repair_of
from planner.elastic.fewer_nodes import Fewer
from planner.elastic.shards import Places, Saved, items_of, places_of_plan, saved_of
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.record import record
from planner.timeline.priced_plan import estimate_of, job_of
from planner.units import GIGA, format_days, format_seconds

TENSORS_OF_LAYER = 9
"""Of a gated layer: four projections of attention, three of the MLP, two norms."""
COPIES = {"weights": 1, "optimizer_states": 3}
"""Tensors for each weight: itself; master weight and two moments."""


@record
class Surroundings:
    """What a plan file does not say: storage, failures, prices."""

    storage: Storage | None = None
    """None = each node reaches a share that is assumed."""
    mtbf: float | None = None
    """Seconds between failures of one node; None = the published rate of the hardware."""
    spares: int = 0
    """Nodes that wait."""
    price: float | None = None
    """Dollars per GPU-hour; None = of the profile."""
    spot: bool = False
    """Machines that may be taken away."""
    asynchronous: bool = True
    """Saves go on behind training."""


def surroundings_of(cluster: ClusterFile | None, hardware: HardwareProfile) -> Surroundings:
    """What a cluster file says of the nodes that a plan runs on. Raises PlannerError where it has none of that hardware."""
    if cluster is None:
        return Surroundings()
    kind = cluster.uniform or next((one for one in cluster.nodes if one.profile.name == hardware.name), None)
    if kind is None:
        kinds = ", ".join(one.profile.name for one in cluster.nodes)
        raise PlannerError(f"the plan runs on {hardware.name}, the cluster file has {kinds}; name the plan's hardware there")
    return Surroundings(
        storage=cluster.storage, mtbf=kind.mtbf, spares=cluster.spares, price=kind.usd_per_hour(), spot=kind.spot
    )


def load_seconds(storage: Storage, reads: Floats, node_ranks: int) -> float:
    """Seconds until every rank has read its bytes, ``reads`` by rank number: copies are read by each that holds one.
    [torch.distributed.checkpoint, default_planner.py: DefaultLoadPlanner plans for each rank alone]"""
    nodes = np.add.reduceat(reads, np.arange(0, len(reads), node_ranks))
    return transfer_seconds(storage, float(reads.sum()), nodes, storage.read)


def groups_of(layout: Layout) -> list[int]:
    """Ranks of every process group that a rank opens: one per degree above 1, and the world."""
    degrees = [int(getattr(layout, name)) for name in ("tp", "pp", "dp", "cp", "ep")]
    return [*(one for one in degrees if one > 1), int(layout.num_gpus)]


def start_parts(groups: Sequence[int], tensors: float, shards: float, end: str = "") -> dict[str, float]:
    """Seconds from the start of the processes until the checkpoint can be read, in parts; ``end``: as ``constants`` takes it.
    ``groups``: ranks of the process groups that a rank opens.

    communicators = sum over groups of n ranks of c + r n; planning = tensors (t + shards s): every rank reads the metadata of all
    stored shards and looks for those that meet its own.  [torch.distributed.checkpoint, state_dict_loader.py, load: read_metadata,
    create_local_plan]
    """
    known = constants(end)
    set_up = sum(known.communicator.value + known.communicator_rank.value * size for size in groups)
    return {
        "processes": known.process_start.value,
        "communicators": set_up if max(groups) > 1 else 0.0,
        "planning": tensors * (known.plan_tensor.value + shards * known.plan_shard.value),
    }


def copy_rate(hardware: HardwareProfile) -> float:
    """Bytes/s of one rank's copy to host memory: PCIe, or what ranks leave each other of host memory, read and written."""
    return min(hardware.pcie_bandwidth, hardware.host_memory_bandwidth / (2.0 * hardware.gpus_per_node))


def storage_of_nodes(nodes: int, end: str = "") -> Storage:
    """Where checkpoints lie where nothing says it: each node reaches ``storage_node``, all of them no less together."""
    each = constants(end).storage_node.value
    return Storage(read=each * nodes, write=each * nodes, per_node=each)


def tensors_of(saved: Saved, model: ModelSpec) -> float:
    """Tensors of a checkpoint."""
    return float(model.num_layers * TENSORS_OF_LAYER * sum(COPIES[name] for name, size in saved.bytes_each.items() if size > 0))


def said_of(around: Surroundings, communicators: float) -> list[Assumption]:
    """What the user did not say of saves and starts; ``communicators``: seconds to set them up."""
    known, found = constants(), []
    if around.storage is None:
        each = f"{known.storage_node.value / GIGA:g} GB/s per node"
        found.append(Assumption("storage", each, known.storage_node.source, "--cluster (storage)"))
    if around.asynchronous:
        why = "Megatron --async-save, torchtitan checkpoint.async_mode, torch async_save"
        found.append(Assumption("saves", "asynchronous", why, "--synchronous"))
    process = known.process_start
    each = f"{format_seconds(process.value)}, from {format_seconds(process.fast)} to {format_seconds(process.slow)}"
    found.append(Assumption("start of processes", each, process.source, "--restart"))
    found.append(Assumption("process groups", format_seconds(communicators), known.communicator.source, "--restart"))
    return found


@record
class ElasticJob:
    """A plan with its surroundings."""

    plan: Plan
    around: Surroundings
    checkpoint_bytes: float | None = None
    """Bytes of weights and states in a checkpoint that was looked into; None = as computed."""

    @cached_property
    def hardware(self) -> HardwareProfile:
        """The profile, read once."""
        return self.plan.cluster().hardware

    @property
    def node_ranks(self) -> int:
        """GPUs of a node that the job uses."""
        return min(int(self.hardware.gpus_per_node), self.plan.num_gpus)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.plan.num_gpus // self.node_ranks)

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""
        return self.plan.prediction.step_time_s

    @cached_property
    def saved(self) -> Saved:
        """What a checkpoint holds; the size of one that was looked into replaces the computed one, its shares stay."""
        return saved_of(self.plan.workload, self.plan.load_trainer()).of_size(self.checkpoint_bytes)

    @cached_property
    def places(self) -> Places:
        """Which rank holds what."""
        return places_of_plan(self.plan)

    @property
    def storage(self) -> Storage:
        """Where checkpoints of the plan lie."""
        return self.storage_of(self.plan.num_gpus)

    def storage_of(self, ranks: int, end: str = "") -> Storage:
        """Where checkpoints lie: as the cluster file says, else each node reaches ``storage_node`` and all nodes of so many ranks
        no less; ``end``: as ``constants`` takes it."""
        return self.around.storage or storage_of_nodes(-(-ranks // self.node_ranks), end)

    @property
    def tensors(self) -> float:
        """Tensors of a checkpoint."""
        return tensors_of(self.saved, self.plan.workload.model)

    @property
    def stored_shards(self) -> float:
        """Shards of a tensor in the checkpoint, mean of its streams."""
        tp = int(self.plan.layout.tp)
        return sum(tp * dense for dense, _ in self.places.shards.values()) / len(self.places.shards)

    @cached_property
    def times(self) -> SaveTimes:
        """What a save and a load take, the checkpoint shared out evenly."""
        of_rank = self.saved.size / self.plan.num_gpus
        saves = save_times(
            self.saved.size, self.storage, of_node=of_rank * self.node_ranks, stall=of_rank / copy_rate(self.hardware),
            asynchronous=self.around.asynchronous,
        )  # fmt: skip
        reads = np.asarray(sum(one.read() for one in items_of(self.saved, self.places, self.places)))
        return replace(saves, load=load_seconds(self.storage, reads, self.node_ranks))

    @cached_property
    def start(self) -> dict[str, float]:
        """Seconds of a new start on as many nodes, in parts; they sum to the restart."""
        parts = start_parts(groups_of(self.plan.layout), self.tensors, self.stored_shards)
        return {"detection": constants().detect_node.value, **parts, "load": self.times.load, "warm-up": self.step_time}

    @property
    def restart(self) -> float:
        """Seconds from a failure until the first new step."""
        return sum(self.start.values())

    @cached_property
    def node_mtbf(self) -> NodeMtbf:
        """Mean time between failures of one node."""
        if self.around.mtbf is not None:
            if self.around.mtbf <= 0:
                raise PlannerError(f"--mtbf is {format_seconds(self.around.mtbf)}; it must be above 0")
            return NodeMtbf(seconds=self.around.mtbf, why="given")
        return node_mtbf(self.hardware, spot=self.around.spot)

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the job: M_node / nodes."""
        return self.node_mtbf.seconds / self.nodes

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars of one GPU for an hour."""
        if self.around.price is not None:
            return self.around.price
        return self.hardware.prices[0].usd_per_hour if self.hardware.prices else None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.plan.workload.model.name

    @property
    def machines(self) -> str:
        """GPUs in words."""
        return f"{self.plan.num_gpus} x {self.plan.hardware}"

    @property
    def layout_in_words(self) -> str:
        """The layout."""
        return layout_text(self.plan.layout)

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return self.plan.num_gpus

    def failures(self, repair: float | None = None) -> Failures:
        """How often its nodes fail; ``repair``: seconds until one is back, None = as published, else a day."""
        price = self.usd_per_hour
        return Failures(kinds=(FailingNodes(
            kind=self.hardware.name, count=self.nodes, mtbf=self.node_mtbf, spares=self.around.spares,
            repair=repair_of(self.hardware, self.around.spot) if repair is None else repair,
            usd_per_hour=None if price is None else price * self.plan.num_gpus / self.nodes, spot=self.around.spot,
        ),))  # fmt: skip

    @cached_property
    def fewer(self) -> Fewer:
        """Plans on fewer nodes, each searched once."""
        return Fewer(resolved_plan(self.plan), self.node_ranks, self.nodes, self.step_time, int(self.plan.layout.dp))

    def speed(self, missing: tuple[int, ...]) -> float:
        """Rate without some nodes over that of all."""
        return self.fewer.speed(sum(missing))

    def rerouting(self) -> Rerouting:
        """What the peers of a stage can do."""
        return rerouting_of(self.plan.layout)

    def groups(self) -> Groups:
        """The most groups of whole replicas whose states fit; a new one gets them from a peer, each rank size G / ranks.

        A group keeps all states to itself: state sharding spans dp / G ranks. No group is smaller than a node.
        """
        plan, priced = self.plan, job_of(self.plan)
        dp, per_replica = int(plan.layout.dp), plan.num_gpus // int(plan.layout.dp)
        why = "needs two replicas on nodes of their own"
        for number in sorted((n for n in range(2, dp + 1) if dp % n == 0), reverse=True):
            ranks = per_replica * (dp // number)
            if ranks % self.node_ranks:
                continue
            layout = plan.layout.replace(dp_shard=dp // number) if int(plan.layout.zero) else plan.layout
            found = estimate_of(priced, layout)
            if float(found.memory_needed[0]) <= found.usable_memory:
                join = self.saved.size / ranks / self.hardware.network_bandwidth
                return Groups(number=number, step_time=float(found.step_time[0]), join=join)
            why = "the states of a group do not fit: they are sharded over all replicas"
        return Groups(why_not=why)

    def assumptions(self) -> tuple[Assumption, ...]:
        """What the user did not say."""
        found = []
        if self.around.mtbf is None:
            each = f"a node every {format_days(self.node_mtbf.seconds)}"
            found.append(Assumption("failures", each, self.node_mtbf.why, "--mtbf"))
        return (*found, *said_of(self.around, self.start["communicators"]))
