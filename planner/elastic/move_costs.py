"""Seconds of a change of layout, by the way that the state takes: through a checkpoint, or from the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.elastic.checkpoints import SaveTimes, transfer_seconds
from planner.elastic.elastic_job import ElasticJob, groups_of, load_seconds, start_parts
from planner.elastic.failure_rates import constants, spread
from planner.elastic.moves import Move
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.record import record

WAYS = {
    "planned": "save, stop, start on the new layout, load",
    "failed": "start on the new layout from the last checkpoint",
    "live": "the ranks that hold the state send it to the new ones",
}


@record
class Way:
    """One way of a move."""

    key: str
    """Of WAYS."""
    parts: dict[str, float]
    """Seconds; they sum to the move."""
    range: tuple[float, float]
    """Seconds that the move lies between, by the intervals of profiles/elastic.yaml."""
    why_not: str = ""
    """Why it cannot be; '' when it can."""

    @property
    def seconds(self) -> float:
        """Of the whole move, without a step."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "way": self.key, "what": WAYS[self.key], "seconds": self.seconds, "range_s": list(self.range), "parts_s": self.parts,
            "why_not": self.why_not,
        }  # fmt: skip


def exchange_seconds(move: Move, hardware: HardwareProfile, node_ranks: int) -> float:
    """Seconds of sends between devices: the busiest node, all its network cards at work; inside a node what is fetched there.

    max_node(sent, received) / r by each of r cards, as ``send_recv`` across nodes; then max_node fetched / r over the link inside.
    """
    across = max(float(move.sent.max()), float(move.received.max())) / node_ranks
    inside = float(np.max(move.fetched - move.received, initial=0.0)) / node_ranks
    found = float(hardware.scale_out_time("send_recv", across, 2.0, 1.0)) if across > 0 else 0.0
    return found + (inside / hardware.scale_up_bandwidth if inside > 0 else 0.0)


def host_exchange_seconds(move: Move, node_bandwidth: float, end: str = "") -> float:
    """Seconds of an exchange through host memory, one store in each node (Tenplex): what the busiest network card carries, then one
    pass over what a node puts into place and one over what it cuts out of larger tensors, at the rate of one core's copy.

    max(sent, received) / b + max_node(fetched + cut) / c
    """
    network = max(float(move.sent.max()), float(move.received.max())) / node_bandwidth
    return network + float((move.fetched + move.cut).max()) / constants(end).host_copy.value


def to_devices(move: Move, hardware: HardwareProfile, end: str = "") -> float:
    """Seconds to copy each rank's state from host memory to its device."""
    return float(move.own.max()) / min(hardware.pcie_bandwidth, constants(end).host_copy.value)


def ways_of(
    job: ElasticJob, move: Move, layout: Layout, *, step_time: float, interval: float, shared_reads: bool
) -> list[Way]:
    """All ways of a move from a plan to another layout, whose steps take ``step_time``. ``shared_reads``: ranks with equal boxes
    read a part each and send it to the others (Megatron --ckpt-fully-parallel-load)."""
    why_not = "" if move.complete else "the ranks that are left do not hold all of the state"
    found = both_ways(lambda end: _parts(job, move, layout, shared_reads, end), job.times, interval, step_time)
    found = [replace(one, why_not=why_not) if one.key == "live" else one for one in found]
    return [one for one in found if one.key != "live" or move.exchanged]


def both_ways(
    parts_at: Callable[[str], dict[str, dict[str, float]]], times: SaveTimes, interval: float, step_time: float
) -> list[Way]:
    """Ways of a move from their parts, but for work and steps, at an end of what is known (as ``constants`` takes it)."""
    lost = {"work done again": (interval + times.stall) / 2.0 + times.behind, "detection": constants().detect_node.value}
    middle, fast, slow = (parts_at(end) for end in ("", "fast", "slow"))

    def whole(key: str, parts: dict[str, float]) -> dict[str, float]:
        return {**(lost if key == "failed" else {}), **parts, "warm-up": step_time}

    return [
        Way(key=key, parts=whole(key, parts), range=spread(*(whole(key, one[key]) for one in (middle, fast, slow))))
        for key, parts in middle.items()
    ]


def _parts(job: ElasticJob, move: Move, layout: Layout, shared_reads: bool, end: str) -> dict[str, dict[str, float]]:
    """Seconds of every way in parts, but for work and steps; ``end``: as ``constants`` takes it."""
    start = start_parts(groups_of(layout), job.tensors, job.stored_shards, end)
    written, read = (job.storage_of(ranks, end) for ranks in (job.plan.num_gpus, int(layout.num_gpus)))
    load = load_seconds(read, move.shared if shared_reads else move.read, job.node_ranks)
    if shared_reads:
        load += float((move.read - move.shared).max()) / job.hardware.network_bandwidth
    of_node = job.saved.size / job.plan.num_gpus * job.node_ranks
    save = transfer_seconds(written, job.saved.size, of_node, written.write)
    exchange = exchange_seconds(move, job.hardware, job.node_ranks)
    return {
        "planned": {"save": save, **start, "load": load}, "failed": {**start, "load": load},
        "live": {"communicators": start["communicators"], "exchange": exchange},
    }  # fmt: skip

