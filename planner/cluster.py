"""Cluster: a hardware profile times a number of GPUs, and which link a group of ranks uses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from planner.arrays import Floats, NDArray
from planner.curves import bus_factor
from planner.errors import PlannerError, shown
from planner.hardware import HardwareProfile
from planner.layout import Layout, Order
from planner.record import record

EVERY_NODE = 16
"""Up to this many nodes people order every number of them, beyond it eight per doubling."""
MOST_GPUS = 2**20


def usual_counts(hardware: HardwareProfile, least: float = 1.0) -> Iterator[int]:
    """Numbers of GPUs that people order, from ``least``: the divisors of a node, then whole nodes, every one up to
    EVERY_NODE of them and eight per doubling beyond."""
    node = int(hardware.gpus_per_node)
    nodes = [*range(1, EVERY_NODE), *(eighth << n for n in range(1, 21) for eighth in range(8, 16))]
    sizes = [*(n for n in range(1, node) if node % n == 0), *(n * node for n in nodes)]
    return (n for n in sizes if least <= n <= MOST_GPUS)


@record
class Cluster:
    """GPUs of one kind, numbered node by node: rank r sits in scale-up domain r // scale_up_domain."""

    hardware: HardwareProfile
    """Measured speeds and sizes of one GPU, its node and its network."""
    num_gpus: int
    """GPUs in the job."""

    def __post_init__(self) -> None:
        if isinstance(self.num_gpus, bool) or not isinstance(self.num_gpus, int) or not 1 <= self.num_gpus <= 2**21:
            raise PlannerError(
                f"the number of GPUs is {shown(self.num_gpus)}; it must be a whole number from 1 to {2**21}"
            )

    @property
    def num_nodes(self) -> int:
        """Hosts in the job; the last may be partly used."""
        return math.ceil(self.num_gpus / self.hardware.gpus_per_node)

    @property
    def domain(self) -> float:
        """GPUs that reach each other over the fast local link (NVLink domain; the node where there is only PCIe)."""
        linked = self.hardware.scale_up_domain
        return max(linked, self.hardware.gpus_per_node) if linked <= 2 else linked

    def of_rows(self, rows: NDArray[np.intp]) -> Cluster:
        """The same for some rows of what is priced: here for all alike."""
        return self

    @property
    def _has_pairs(self) -> bool:
        """Whether bridges join some GPUs of a domain and PCIe the others."""
        return 2 <= self.hardware.scale_up_domain < self.domain

    def ranks_per_domain(self, n: object, stride: object) -> Floats:
        """Ranks of a group of ``n``, ``stride`` apart, that share one scale-up domain: D / stride, from 1 to n."""
        inside = np.floor(self.domain / np.maximum(np.asarray(stride, dtype=float), 1.0))
        return np.clip(inside, 1.0, np.asarray(n, dtype=float))

    def collective_time(self, op: str, size: object, n: object, stride: object) -> Floats:
        """Seconds of one collective of ``n`` ranks ``stride`` apart; ``size`` bytes as nccl-tests counts them.

        The group uses the local link when it fits in a scale-up domain, else every domain's share of the network: the
        ``domain / stride`` members inside one domain own that many of its NICs. Zero for n = 1.
        """
        size, n = np.asarray(size, dtype=float), np.asarray(n, dtype=float)
        inside = self.ranks_per_domain(n, stride)
        near = inside >= n
        if np.all(near):
            return self._local_time(op, size, n, stride)
        found = np.asarray(self.hardware.scale_out_time(op, size, n, inside))  # of a group inside a domain: its local time
        return np.where(near, self._local_time(op, size, n, stride), found) if self._has_pairs else found

    def _local_time(self, op: str, size: Floats, n: Floats, stride: object) -> Floats:
        """Inside one domain. In a box with NVLink pairs only neighbours have the link: a pair further apart talks over
        PCIe, priced as the smallest group there that the profile has, for the bytes that the pair moves."""
        local = np.asarray(self.hardware.scale_up_time(op, size, n))
        if not self._has_pairs:
            return local
        linked = self.hardware.scale_up_domain
        apart = (n > 1) & (n <= linked) & (np.asarray(stride, dtype=float) * (n - 1) >= linked)
        if not np.any(apart):
            return local
        beyond = linked + 1.0
        same_bytes = size * bus_factor(op, np.maximum(n, 2.0)) / bus_factor(op, beyond)
        return np.where(apart, self.hardware.scale_up_time(op, same_bytes, np.full_like(n, beyond)), local)


def expert_stride(layout: Layout) -> NDArray[np.integer]:
    """That of experts alone, which is asked for wherever layers are priced."""
    ep_outside = np.asarray(layout.order) == Order.TP_CP_DP_PP_EP
    return np.where(ep_outside, layout.num_gpus // layout.ep, layout.etp)


def strides(layout: Layout) -> dict[str, object]:
    """Distance between neighbouring ranks of each parallel group, from the rank order.

    ``tp-cp-ep-dp-pp`` (Megatron): tp adjacent, then cp, then dp, pipeline stages outermost. Experts re-tile tp*cp*dp as
    etp, ep, edp from the inside out.
    """
    tp, cp, dp, pp = layout.tp, layout.cp, layout.dp, layout.pp
    pp_inside = np.asarray(layout.order) == Order.TP_CP_EP_PP_DP
    ep_outside = np.asarray(layout.order) == Order.TP_CP_DP_PP_EP
    return {
        "tp": 1,
        "cp": tp,
        "dp": np.where(pp_inside, tp * cp * pp, tp * cp),
        "pp": np.where(pp_inside, tp * cp, np.where(ep_outside, tp * cp * dp // layout.ep, tp * cp * dp)),
        "etp": 1,
        "ep": expert_stride(layout),
        "edp": np.where(ep_outside, layout.etp, layout.etp * layout.ep * np.where(pp_inside, pp, 1)),
    }
