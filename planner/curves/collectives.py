"""Time of a collective: inside one domain as measured, across nodes by two straight lines."""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from planner import arrays as npt
from planner import units
from planner.curves.reading import Column, checked, column, numbers
from planner.errors import PlannerError
from planner.record import record
from planner.schema import Rule, Seconds, Text, plain_fields, within

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
RINGS = ("all_gather", "reduce_scatter", "broadcast")
"""Collectives that NCCL runs as rings across nodes as well; all-reduces have trees there, the others single messages."""
_SHARE = "a share of the line rate of the NICs, above 0 and at most 1"


def bus_factor(op: str, n: npt.ArrayLike) -> Column:
    """Bytes on the busiest link over the buffer size S.  [nccl-tests, PERFORMANCE.md]

    2 (n-1)/n all_reduce; (n-1)/n all_gather, reduce_scatter, all_to_all; 1 broadcast, send_recv.
    """
    n = np.maximum(column(n), 1.0)
    if op == "all_reduce":
        return 2.0 * (n - 1.0) / n
    if op in ("broadcast", "send_recv"):
        return np.ones_like(n)
    return (n - 1.0) / n


def least_factor(op: str, n: npt.ArrayLike) -> Column:
    """Bytes each GPU must receive over S, whatever the algorithm: the physical floor of the time is this x S / link.

    An all_reduce inside the switch (NVLS, SHARP) receives S once, so its *bus* bandwidth may reach 2 (n-1)/n times the
    link; every other operation receives what its bus factor counts.
    """
    return np.minimum(bus_factor(op, n), 1.0)


@record
class CollectiveCurve:
    """Measured times of one collective inside one domain, over (log2 size, log2 group)."""

    op: str
    sizes: Column
    """Buffer sizes S in bytes, increasing powers of two."""
    groups: Column
    """Group sizes that were measured, increasing, from 2."""
    seconds: Column
    """Shape (len(groups), len(sizes)), never decreasing along the size."""

    @classmethod
    def from_dict(cls, op: str, data: object, where: str) -> CollectiveCurve:
        """``us`` maps the group size to microseconds, one per octave from ``first_size``.

        Measured times that fall with the size are lifted to the longest before them: noise must not reward more bytes.
        """
        entry = checked(data, where, ("first_size", "us"))
        first = units.parse(entry["first_size"], "bytes", what=f"{where} first_size")
        rows = entry["us"]
        if not isinstance(rows, dict) or not rows:
            raise PlannerError(f"{where}: us must map group sizes to lists of microseconds")
        groups = numbers(sorted(rows), f"{where} group sizes", above=2.0)
        lists = [numbers(rows[key], f"{where} us {key}", above=1e-3) for key in sorted(rows)]
        if len({row.size for row in lists}) != 1 or lists[0].ndim != 1 or lists[0].size < 2:
            raise PlannerError(f"{where}: us must map group sizes to lists of equal length, two numbers or more")
        us = np.stack(lists)
        sizes: Column = first * np.exp2(np.arange(us.shape[1], dtype=np.float64))
        return cls(op=op, sizes=sizes, groups=groups, seconds=np.maximum.accumulate(us * 1e-6, axis=1))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        rows = (self.seconds * 1e6).round(6).tolist()
        us = {int(group): row for group, row in zip(self.groups, rows, strict=True)}
        return {"first_size": f"{float(self.sizes[0])!r} B", "us": us}

    def latency(self) -> Column:
        """Time of the smallest message per group size."""
        result: Column = self.seconds[:, 0]
        return result

    def bus_bandwidth(self) -> Column:
        """Bus bandwidth of the largest message per group size, bytes/s."""
        result: Column = bus_factor(self.op, self.groups) * self.sizes[-1] / self.seconds[:, -1]
        return result

    def with_link(self, ratio: float) -> CollectiveCurve:
        """The same curve on a link of ``ratio`` times the bandwidth: all but the latency scales."""
        latency = self.seconds[:, :1]
        return replace(self, seconds=latency + (self.seconds - latency) / ratio)

    def time(self, size: Column, n: Column) -> Column:
        """Seconds, log-log between the measured points; 0 for a group of one or no bytes.

        Above the largest size the last bus bandwidth holds, below the smallest the latency. Above the largest group the
        volume grows with the bus factor, the latency with n (all_reduce: with log2 n, it is a tree there).
        """
        n_in = np.clip(n, self.groups[0], self.groups[-1])
        number = self.sizes.size
        position = np.clip(np.log2(np.maximum(size, 1.0)) - np.log2(self.sizes[0]), 0.0, number - 1.0)
        below = np.minimum(position.astype(np.intp), number - 2)
        fraction = position - below
        if len(self.groups) == 1:
            log_time = self._log_time(below, fraction)
        else:
            places = np.arange(len(self.groups), dtype=np.float64)
            group_position = np.interp(np.log2(n_in), np.log2(self.groups), places)
            lower = np.minimum(group_position.astype(np.intp), len(self.groups) - 2)
            fewer, more = (self._log_time((lower + one) * number + below, fraction) for one in (0, 1))
            log_time = fewer + (group_position - lower) * (more - fewer)
        time = np.exp(log_time) * np.maximum(size / self.sizes[-1], 1.0)
        time = self._beyond(time, n, n_in)
        return np.where((n <= 1.0) | (size <= 0.0), 0.0, time)

    @cached_property
    def _logarithms(self) -> Column:
        """Of all seconds, group by group."""
        result: Column = np.log(self.seconds).ravel()
        return result

    def _log_time(self, place: npt.NDArray[np.intp], fraction: Column) -> Column:
        """Between an element of ``_logarithms`` and the next."""
        lower: Column = self._logarithms[place]
        return lower + fraction * (self._logarithms[place + 1] - lower)

    def _beyond(self, time: Column, n: Column, n_in: Column) -> Column:
        """Groups larger than measured (and, for one measured group, smaller): volume and latency by their laws."""
        latency = np.interp(n_in, self.groups, self.latency())
        n = np.maximum(n, 2.0)
        if np.array_equal(n, n_in):
            return np.maximum(time - latency, 0.0) + latency
        growth = np.log2(n) / np.log2(n_in) if self.op == "all_reduce" else n / n_in
        growth = np.ones_like(n) if self.op == "send_recv" else growth
        volume = bus_factor(self.op, n) / bus_factor(self.op, n_in)
        return np.maximum(time - latency, 0.0) * volume + latency * growth


@record
class Segment:
    """One protocol of a collective across nodes: a straight line in the bytes."""

    efficiency: Annotated[float, Rule(above=True, most=1.0, says=_SHARE)]
    """Bus bandwidth over the line rate of the NICs that the group has in a node."""
    latency: Seconds
    latency_per_rank: Seconds
    latency_per_doubling: Seconds

    def stretched(self, factor: float) -> Segment:
        """The line with its latencies multiplied."""
        return replace(self, latency=self.latency * factor, latency_per_rank=self.latency_per_rank * factor,
                       latency_per_doubling=self.latency_per_doubling * factor)  # fmt: skip

    def latency_of(self, n: Column, nodes: Column) -> Column:
        """a = latency + per_rank (n - 1) + per_doubling log2(nodes), seconds: rings grow with n, trees with log2."""
        return self.latency + self.latency_per_rank * (n - 1.0) + self.latency_per_doubling * np.log2(nodes)


@record
class NetworkCurve:
    """Time of one collective across nodes: t = min over two protocols of a + x / e, x = F S / line rate.

    NCCL switches from a protocol of low latency and low bandwidth (``fast``, LL) to one of high latency and bandwidth
    (``bulk``, Simple); two lines fit the measured sweeps to 4 percent (median), one line to 11.
    """

    fast: Segment
    bulk: Segment
    two_nodes: Annotated[float, within(0.01)] | None = None
    """Efficiency of bulk on exactly two whole nodes where measured (NVLS tree, may pass 1); never extrapolated."""
    inside: tuple[float, float, float] = (1.0, 0.0, 1.0)
    """Part of the bus bandwidth inside a rack that is left across racks: on two, loss per doubling, least."""
    source: Text = ""
    """Cluster the constants were fitted on."""
    errors: dict[str, Any] = field(default_factory=dict)
    to_dict = plain_fields

    def __post_init__(self) -> None:
        if self.inside[2] <= 0 or self.inside[0] < self.inside[2]:
            raise PlannerError("inside holds three numbers: share on two domains, loss per doubling, least share")

    def stretched(self, factor: float) -> NetworkCurve:
        """The curve with all latencies multiplied."""
        return replace(self, fast=self.fast.stretched(factor), bulk=self.bulk.stretched(factor))

    def simple(self) -> NetworkCurve:
        """The curve without its protocol of low latency.  [NCCL_PROTO=simple; aws-ofi-nccl sets it where bytes may be reordered]"""
        return replace(self, fast=self.bulk)

    def with_share(self, factor: float) -> NetworkCurve:
        """The curve with the shares of the line rate multiplied."""
        two = None if self.two_nodes is None else self.two_nodes * factor
        fast, bulk = (replace(line, efficiency=line.efficiency * factor) for line in (self.fast, self.bulk))
        return replace(self, fast=fast, bulk=bulk, two_nodes=two)

    def time(self, transfer: Column, floor: Column, n: Column, nodes: Column, whole: Column, stretch: float) -> Column:
        """Seconds. ``transfer`` x at line rate; ``floor`` the transfer inside the nodes, which bounds both protocols.

        ``whole`` is true where the group has every GPU of its nodes; ``stretch`` multiplies the latencies.
        """
        bulk = column(self.bulk.efficiency)
        if self.two_nodes is not None:
            bulk = np.where((nodes == 2.0) & (whole > 0), self.two_nodes, bulk)
        floor = floor / np.maximum(self.inside[0] - self.inside[1] * np.log2(nodes / 2.0), self.inside[2])
        slow_start = stretch * self.fast.latency_of(n, nodes) + np.maximum(transfer / self.fast.efficiency, floor)
        return np.minimum(slow_start, stretch * self.bulk.latency_of(n, nodes) + np.maximum(transfer / bulk, floor))
