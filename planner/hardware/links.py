"""The node and the network of an accelerator: link figures, and the seconds of collectives inside and across nodes."""

import re
from dataclasses import field
from typing import Annotated

import numpy as np

from planner import arrays as npt
from planner.curves import COLLECTIVES, CollectiveCurve, Column, NetworkCurve, bus_factor, column, index, least_factor
from planner.errors import PlannerError, shown
from planner.record import record
from planner.schema import Bandwidth, Bytes, Positive, Rule, Seconds, check_keys, keys, mapping, plain_fields, value_of

LINKS = ("inside", "across")
"""Groups inside a scale-up domain, and groups that leave it."""
SIDES = ("compute", "communication")
LARGEST_SLOWDOWN = 16.0
"""What takes longer than this with the other running waited for it; no kernels share a device so badly."""


@record
class Slowdown:
    """Time with the other running over time alone: numbers, or columns where layouts use different links."""

    compute: npt.ArrayLike
    """Computation while a collective runs."""
    communication: npt.ArrayLike
    """A collective while computation runs."""


ASSUMED = Slowdown(compute=1.2, communication=1.2)
"""What stands in a profile that has not measured it.

Communication kernels take multiprocessors and memory bandwidth. Measured coefficients lie between 1.1 and 1.3
[Galvatron, overlap coefficient of its profiler]; the middle is taken, both ways.
"""


@record
class MeasuredOverlap:
    """One link's slowdowns with what they may be off by."""

    compute: Positive
    """Time of computation while a collective runs over its time alone."""
    communication: Positive
    """Time of a collective while computation runs over its time alone."""
    compute_spread: float = 0.0
    """Percent: half the interval of the median over it."""
    communication_spread: float = 0.0
    """Percent likewise."""
    to_dict = plain_fields

    @property
    def slowdown(self) -> Slowdown:
        """What is priced: a ratio below one is the scatter of two equal times."""
        return Slowdown(compute=max(self.compute, 1.0), communication=max(self.communication, 1.0))

    def __post_init__(self) -> None:
        for what, other, value, spread in (
            ("computation", "a collective", self.compute, self.compute_spread),
            ("a collective", "computation", self.communication, self.communication_spread),
        ):
            if problem := impossible(value, spread):
                raise PlannerError(f"{what} during {other} takes {value:.2f} times as long as alone, {problem}")


def impossible(value: float, spread: float) -> str:
    """Why a measured ratio cannot be, or nothing: below one by more than its spread (percent), or beyond LARGEST_SLOWDOWN."""
    if value * (1.0 + spread / 100.0) < 1.0:
        return f"and its spread is {spread:.1f} %; nothing gets faster during something else, it must be 1 or more"
    if value > LARGEST_SLOWDOWN:
        return f"which is waiting, not sharing; at most {LARGEST_SLOWDOWN:.0f}"
    return ""


def _collective_curves(data: object, where: str) -> dict[str, CollectiveCurve]:
    """One curve per collective. Raises PlannerError."""
    found = check_keys(data, COLLECTIVES, where, required=COLLECTIVES)
    return {op: CollectiveCurve.from_dict(op, found[op], f"{where} {op}") for op in COLLECTIVES}


def _link_shares(data: object, where: str) -> dict[str, float]:
    """Shares by size of a group, which is a whole number. Raises PlannerError."""
    found = mapping(data, where)
    for size in found:
        if not re.fullmatch(r"[1-9]\d{0,8}", str(size)):
            raise PlannerError(f"{where} has {shown(size)}; its keys must be numbers of GPUs, like 2 and 4")
    return {str(size): value_of(Positive, share, where, str(size)) for size, share in found.items()}


@record
class Links:
    """What joins accelerators, and their host. Bytes, bytes/s, seconds; bandwidths in one direction."""

    gpus_per_node: Positive
    """GPUs in one host."""
    scale_up_bandwidth: Bandwidth
    """NVLink or like, bytes/s per GPU; PCIe where there is none."""
    scale_up_domain: Positive
    """GPUs in one NVLink domain: 8 in a box, 72 in a rack, 2 with bridges, 1 where only PCIe joins them."""
    network_bandwidth: Bandwidth
    """Line rate of the NICs per GPU, bytes/s."""
    network_latency: Seconds
    """Smallest message between two nodes, seconds: the scale for the latencies of scale_out_time."""
    pcie_bandwidth: Bandwidth
    """Between one GPU and its host, bytes/s."""
    host_memory: Bytes
    """Per node, bytes; an assumption that a user should replace."""
    host_memory_bandwidth: Bandwidth
    """Per node, all sockets, bytes/s; an assumption likewise."""
    cpu_adam_bandwidth_fraction: Positive
    """Part of host_memory_bandwidth that an optimizer step on the CPU reaches (28 bytes per parameter)."""
    scale_up: Annotated[dict[str, CollectiveCurve], Rule(reader=_collective_curves)]
    """Measured collectives inside one domain."""
    scale_out: Annotated[dict[str, NetworkCurve], keys(COLLECTIVES)]
    """Constants of collectives across nodes."""
    link_shares: Annotated[dict[str, float], Rule(reader=_link_shares)] = field(default_factory=dict)
    """Share of a GPU's links that joins it to so many others of its group, by size of the group up to that; the whole domain has
    all. Empty where a switch joins them, or every pair alike."""
    overlap: Annotated[dict[str, MeasuredOverlap], keys(LINKS, required=False)] = field(default_factory=dict)
    """By link (inside a domain, across): what computation and collectives cost each other; empty where not measured."""

    def scale_up_time(self, op: str, size: npt.ArrayLike, n: npt.ArrayLike) -> Column:
        """Seconds of a collective of n GPUs inside one NVLink domain, or over PCIe in a box without one.

        ``op`` all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_recv; ``size`` is the full buffer S
        of nccl-tests: bytes of the reduced tensor, of the gathered result, of one rank's whole input to the exchange.
        n = 1 or size 0: 0. Equation: ``curves.CollectiveCurve``; never faster than the link.
        """
        curve = self.scale_up[COLLECTIVES[index(op, COLLECTIVES, "collective")]]
        size, n = np.broadcast_arrays(column(size), column(n))
        link = np.where(
            n <= self.scale_up_domain, self.scale_up_bandwidth, min(self.pcie_bandwidth, self.scale_up_bandwidth)
        )
        for most, share in sorted(((int(n), share) for n, share in self.link_shares.items()), reverse=True):
            link = np.where((n <= most) & (n < self.scale_up_domain), share * self.scale_up_bandwidth, link)
        floor = np.where(n > 1.0, least_factor(op, n) * size / link, 0.0)
        return np.maximum(curve.time(size, n), floor)[()]

    def scale_out_time(self, op: str, size: npt.ArrayLike, n: npt.ArrayLike, ranks_per_node: npt.ArrayLike) -> Column:
        """Seconds of a collective of n ranks, ``ranks_per_node`` of them in each node (in each rack of an NVL72).

        t = min over two protocols of a + x/e  (``curves.NetworkCurve``), x = F S / (r b) with r = ranks_per_node and b
        the NIC of one GPU: a strided group owns only its ranks' NICs, its neighbours use the others at the same time.
        all_to_all: x = S/n (n - r)/b. Never below the same transfer at the bus bandwidth inside a node. A group in one node:
        scale_up_time.
        """
        curve = self.scale_out[COLLECTIVES[index(op, COLLECTIVES, "collective")]]
        network = self.network_bandwidth
        size, n, r = np.broadcast_arrays(column(size), column(n), np.maximum(column(ranks_per_node), 1.0))
        many = np.maximum(n, 2.0)
        nodes = np.maximum(np.ceil(n / r), 2.0)
        if op == "all_to_all":
            transfer = size / many * np.maximum(many - r, 1.0) / network
        elif op == "send_recv":
            transfer = size / network
        else:
            transfer = bus_factor(op, many) * size / (r * network)
        whole = column((r >= self.gpus_per_node) & (self.gpus_per_node > 1))  # with a switch that reduces
        time = curve.time(transfer, self._inside_transfer(op, size, many, r), many, nodes, whole, 1.0)
        if np.any(inside := n <= r):
            time = np.where(inside, self.scale_up_time(op, size, np.minimum(n, r)), time)
        return np.where((n <= 1.0) | (size <= 0.0), 0.0, time)[()]

    def _inside_transfer(self, op: str, size: Column, n: Column, r: Column) -> Column:
        """What the same collective still moves inside a node, at the bus bandwidth of the link that its r ranks there share.

        A ring runs at the rate of its slowest hop: ranks beyond the scale-up link (a box of PCIe cards, or of NVLink pairs) at
        what a group of r reached over PCIe, all others at the best that was measured over the link.  [nccl-tests, PERFORMANCE.md]
        """
        curve = self.scale_up[op]
        linked = curve.groups <= self.scale_up_domain
        measured = curve.bus_bandwidth()
        bus = column(np.max(measured[linked] if np.any(linked) else measured))
        if not np.all(linked):
            shared = np.interp(np.log2(np.maximum(r, 2.0)), np.log2(curve.groups[~linked]), measured[~linked])
            bus = np.where(r > self.scale_up_domain, shared, bus)
        if op == "all_to_all":
            return size / n * (np.minimum(r, n) - 1.0) / bus
        if op == "send_recv":
            return np.zeros_like(size)
        ring = bus_factor(op, n) * size / bus
        return np.where(r > 1.0, ring, least_factor(op, n) * size / self.scale_up_bandwidth)
