"""Seconds of a change of layout, by the way that the state takes: through a checkpoint, or from the ranks that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cluster_file import Storage
from planner.elastic.checkpoints import transfer_seconds
from planner.elastic.elastic_job import ElasticJob, load_seconds, start_parts
from planner.elastic.failure_rates import constants
from planner.elastic.moves import Move
from planner.hardware import HardwareProfile
from planner.layout import Layout

WAYS = {
    "planned": "save, stop, start on the new layout, load",
    "failed": "start on the new layout from the last checkpoint",
    "live": "the ranks that hold the state send it to the new ones",
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of a move."""

    key: str
    """Of WAYS."""
    parts: dict[str, float]
    """Seconds; they sum to the move."""
    why_not: str = ""
    """Why it cannot be; '' when it can."""

    @property
    def seconds(self) -> float:
        """Of the whole move, without a step."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"way": self.key, "what": WAYS[self.key], "seconds": self.seconds, "parts_s": self.parts, "why_not": self.why_not}


def exchange_seconds(move: Move, hardware: HardwareProfile, node_ranks: int) -> float:
    """Seconds of sends between devices: the busiest node, all its network cards at work; inside a node what is fetched there.

    max_node(sent, received) / r by each of r cards, as ``send_recv`` across nodes; then max_node fetched / r over the link inside.
    """
    across = max(float(move.sent.max()), float(move.received.max())) / node_ranks
    inside = float(np.max(move.fetched - move.received, initial=0.0)) / node_ranks
    found = float(hardware.scale_out_time("send_recv", across, 2.0, 1.0)) if across > 0 else 0.0
    return found + (inside / hardware.scale_up_bandwidth if inside > 0 else 0.0)


def host_exchange_seconds(move: Move, node_bandwidth: float) -> float:
    """Seconds of an exchange through host memory, one store in each node (Tenplex): what the busiest network card carries, then one
    pass over what a node puts into place and one over what it cuts out of larger tensors, at the rate of one core's copy.

    max(sent, received) / b + max_node(fetched + cut) / c
    """
    network = max(float(move.sent.max()), float(move.received.max())) / node_bandwidth
    return network + float((move.fetched + move.cut).max()) / constants().host_copy.value


def to_devices(move: Move, hardware: HardwareProfile) -> float:
    """Seconds to copy each rank's state from host memory to its device."""
    return float(move.own.max()) / min(hardware.pcie_bandwidth, constants().host_copy.value)


def ways_of(
    job: ElasticJob, move: Move, layout: Layout, *, step_time: float, interval: float, shared_reads: bool
) -> list[Way]:
    """All ways of a move from a plan to another layout, whose steps take ``step_time``. ``shared_reads``: ranks with equal boxes
    read a part each and send it to the others (Megatron --ckpt-fully-parallel-load)."""
    node_ranks = job.node_ranks
    storage: Storage = job.storage
    start = start_parts(layout, job.tensors, job.stored_shards)
    if job.around.storage is None:  # as many nodes as the new layout has share what was assumed for each
        each = constants().storage_node.value * -(-int(layout.num_gpus) // node_ranks)
        storage = Storage(read=each, write=storage.write, per_node=storage.per_node)
    reads = move.shared if shared_reads else move.read
    load = {"load": load_seconds(storage, reads, node_ranks), "warm-up": step_time}
    if shared_reads:
        load["load"] += float((move.read - move.shared).max()) / job.hardware.network_bandwidth
    of_node = job.saved.size / job.plan.num_gpus * node_ranks
    save = {"save": transfer_seconds(job.storage, job.saved.size, of_node, job.storage.write)}
    lost = {"work done again": (interval + job.times.stall) / 2.0 + job.times.behind, "detection": constants().detect_node.value}
    live = {
        "communicators": start["communicators"], "exchange": exchange_seconds(move, job.hardware, node_ranks), "warm-up": step_time,
    }  # fmt: skip
    why_not = "" if move.complete else "the ranks that are left do not hold all of the state"
    found = [Way(key="planned", parts={**save, **start, **load}), Way(key="failed", parts={**lost, **start, **load})]
    return [*found, Way(key="live", parts=live, why_not=why_not)] if move.exchanged else found
