"""One plan as a job that may be interrupted: nodes, step, what is saved and how long a save, a load and a new start take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.cluster_file import ClusterFile, Storage
from planner.costs import DAY
from planner.elastic.checkpoints import SaveTimes, save_times, transfer_seconds
from planner.elastic.failure_rates import NodeMtbf, constants, node_mtbf
from planner.elastic.shards import Places, Saved, items_of, places_of_plan, saved_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.plan_file import Assumption, Plan
from planner.units import GIGA, format_seconds

TENSORS_OF_LAYER = 9
"""Of a gated layer: four projections of attention, three of the MLP, two norms."""
COPIES = {"weights": 1, "optimizer_states": 3}
"""Tensors for each weight: itself; master weight and two moments."""


@dataclass(frozen=True, kw_only=True)
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


def start_parts(layout: Layout, tensors: float, shards: float, end: str = "") -> dict[str, float]:
    """Seconds from the start of the processes until the checkpoint can be read, in parts; ``end``: as ``constants`` takes it.

    communicators = sum over groups of n ranks of c + r n; planning = tensors (t + shards s): every rank reads the metadata of all
    stored shards and looks for those that meet its own.  [torch.distributed.checkpoint, state_dict_loader.py, load: read_metadata,
    create_local_plan]
    """
    known, ranks = constants(end), int(layout.num_gpus)
    set_up = sum(known.communicator.value + known.communicator_rank.value * size for size in groups_of(layout))
    return {
        "processes": known.process_start.value,
        "communicators": set_up if ranks > 1 else 0.0,
        "planning": tensors * (known.plan_tensor.value + shards * known.plan_shard.value),
    }


@dataclass(frozen=True, kw_only=True)
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
        found = saved_of(self.plan.workload, self.plan.load_trainer())
        if self.checkpoint_bytes is None:
            return found
        ratio = self.checkpoint_bytes / found.size
        return replace(found, bytes_each={name: ratio * each for name, each in found.bytes_each.items()})

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
        if self.around.storage is not None:
            return self.around.storage
        each = constants(end).storage_node.value
        rate = each * -(-ranks // self.node_ranks)
        return Storage(read=rate, write=rate, per_node=each)

    @property
    def tensors(self) -> float:
        """Tensors of a checkpoint."""
        each = sum(COPIES[name] for name, bytes_ in self.saved.bytes_each.items() if bytes_ > 0)
        return float(self.plan.workload.model.num_layers * TENSORS_OF_LAYER * each)

    @property
    def stored_shards(self) -> float:
        """Shards of a tensor in the checkpoint, mean of its streams."""
        tp = int(self.plan.layout.tp)
        return sum(tp * dense for dense, _ in self.places.shards.values()) / len(self.places.shards)

    @cached_property
    def times(self) -> SaveTimes:
        """What a save and a load take. The copy to host memory runs at PCIe, or at what ranks leave each other of host memory."""
        hardware = self.hardware
        copy = min(hardware.pcie_bandwidth, hardware.host_memory_bandwidth / (2.0 * hardware.gpus_per_node))
        saves = save_times(
            self.saved.size, self.storage, ranks=self.plan.num_gpus, node_ranks=self.node_ranks, copy=copy,
            asynchronous=self.around.asynchronous,
        )  # fmt: skip
        reads = np.asarray(sum(one.read() for one in items_of(self.saved, self.places, self.places)))
        return replace(saves, load=load_seconds(self.storage, reads, self.node_ranks))

    @cached_property
    def start(self) -> dict[str, float]:
        """Seconds of a new start on as many nodes, in parts; they sum to the restart."""
        parts = start_parts(self.plan.layout, self.tensors, self.stored_shards)
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

    def with_mtbf(self, seconds: float) -> ElasticJob:
        """The same job on nodes that fail more or less often."""
        return replace(self, around=replace(self.around, mtbf=seconds))

    def assumptions(self) -> tuple[Assumption, ...]:
        """What the user did not say."""
        known, found = constants(), []
        if self.around.mtbf is None:
            each = f"a node every {self.node_mtbf.seconds / DAY:,.1f} days"
            found.append(Assumption("failures", each, self.node_mtbf.why, "--mtbf"))
        if self.around.storage is None:
            each = f"{known.storage_node.value / GIGA:g} GB/s per node"
            found.append(Assumption("storage", each, known.storage_node.source, "--cluster (storage)"))
        if self.around.asynchronous:
            why = "Megatron --async-save, torchtitan checkpoint.async_mode, torch async_save"
            found.append(Assumption("saves", "asynchronous", why, "--synchronous"))
        process = known.process_start
        each = f"{format_seconds(process.value)}, from {format_seconds(process.fast)} to {format_seconds(process.slow)}"
        found.append(Assumption("start of processes", each, process.source, "--restart"))
        groups = format_seconds(self.start["communicators"])
        found.append(Assumption("process groups", groups, known.communicator.source, "--restart"))
        return tuple(found)


def restarted_in(job: ElasticJob, seconds: float | None) -> Mapping[str, float]:
    """The parts of a restart, or one part where its time was measured."""
    return job.start if seconds is None else {"measured": seconds}
