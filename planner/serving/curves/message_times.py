"""Messages of serving: all-reduces in the engines' own kernels, and what tokens on their way to experts put on the links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.curves import Column, bus_factor, numbers
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.schema import check_keys
from planner.serving.curves.kernel_laws import Sizes
from planner.units import MICRO

EXCHANGES = ("latency", "throughput")
"""Kernels that send tokens to experts: a copy per expert straight away, or a copy per rank, sorted first.  [DeepEP]"""


@dataclass(frozen=True)
class SmallAllReduce:
    """Measured times of one engine's kernel, linear in bytes and ranks between the points, never falling with either."""

    sizes: Column
    """Bytes of the message, increasing."""
    groups: Column
    """Ranks, increasing."""
    seconds: Column
    """Shape (groups, sizes)."""

    @classmethod
    def from_dict(cls, data: object, where: str) -> SmallAllReduce:
        """``first_bytes``, and ``us``: text of microseconds per octave by number of ranks. Raises PlannerError."""
        entry = check_keys(data, ("from", "first_bytes", "us"), where, required=("first_bytes", "us"))
        rows: Mapping[object, object] = entry["us"] if isinstance(entry["us"], dict) else {}
        table = [numbers(text, f"{where} us {n}", above=0.1) for n, text in sorted(rows.items())]
        if not table or len({row.size for row in table}) != 1 or table[0].size < 2:
            raise PlannerError(f"{where}: us must map ranks to texts of equally many microseconds")
        seconds = np.maximum.accumulate(np.maximum.accumulate(np.stack(table) * MICRO, axis=1), axis=0)
        sizes: Column = float(entry["first_bytes"]) * np.exp2(np.arange(seconds.shape[1], dtype=np.float64))
        return cls(sizes, numbers(sorted(rows), f"{where} ranks", above=2.0), seconds)  # type: ignore[type-var]

    def with_link(self, ratio: float) -> SmallAllReduce:
        """The same kernel on a link of ``ratio`` times the bandwidth: all but the latency scales."""
        latency = self.seconds[:, :1]
        return SmallAllReduce(self.sizes, self.groups, latency + (self.seconds - latency) / ratio)

    def time(self, num_bytes: Column, n: Column) -> Column:
        """Seconds; 0 for one rank or no bytes.

        Above the largest message at its bandwidth, above the most ranks with the volume per rank and, for the latency, one step
        more per doubling.
        """
        inside, group = np.clip(num_bytes, self.sizes[0], self.sizes[-1]), np.clip(n, self.groups[0], self.groups[-1])
        cell = np.clip(np.searchsorted(self.sizes, inside, side="right") - 1, 0, self.sizes.size - 2)
        share = (inside - self.sizes[cell]) / (self.sizes[cell + 1] - self.sizes[cell])
        row = np.clip(np.searchsorted(self.groups, group, side="right") - 1, 0, max(self.groups.size - 2, 0))
        next_row = np.minimum(row + 1, self.groups.size - 1)
        width = np.maximum(self.groups[next_row] - self.groups[row], 1.0)
        between = (group - self.groups[row]) / width
        low = (1.0 - share) * self.seconds[row, cell] + share * self.seconds[row, cell + 1]
        high = (1.0 - share) * self.seconds[next_row, cell] + share * self.seconds[next_row, cell + 1]
        time = (1.0 - between) * low + between * high
        time = time * np.maximum(num_bytes / self.sizes[-1], 1.0)
        many = np.maximum(n, self.groups[-1])
        volume = bus_factor("all_reduce", many) / bus_factor("all_reduce", self.groups[-1])
        time = time * volume + self.seconds[-1, 0] * np.log2(many / self.groups[-1])
        return np.where((n <= 1.0) | (num_bytes <= 0.0), 0.0, time)


def distinct(places: Column, copies: Column) -> Column:
    """Distinct ranks (or nodes) among the K places of a token: P (1 - (1 - 1/P)^K)."""
    places = np.maximum(places, 1.0)
    return places * (1.0 - (1.0 - 1.0 / places) ** copies)


def exchange_sizes(hardware: HardwareProfile, kernel: str, phase: str, sizes: Sizes) -> dict[str, Column]:
    """Bytes of ``exchange_law`` for ``tokens`` per rank, ``hidden``, ``top_k``, ``experts`` and ``ep``: fp8 there, bf16 back.

    latency: K copies, those of other domains over the network and the rest over the link. throughput: one copy per distinct domain
    over the network, and from there one per distinct rank over the link.
    """
    ep, top_k = sizes["ep"], sizes["top_k"]
    domains = np.maximum(ep / max(hardware.scale_up_domain, 1), 1.0)
    own = {"dispatch": 1.0, "combine": 2.0}[phase] * sizes["tokens"] * sizes["hidden"]
    if kernel == "latency":
        leaving, staying = top_k * (1.0 - 1.0 / domains), top_k * (1.0 / domains - 1.0 / ep)
    else:
        leaving, staying = distinct(domains, top_k) * (1.0 - 1.0 / domains), distinct(ep, top_k) * (1.0 - 1.0 / ep)
    slots = own * top_k * ep / np.maximum(sizes["experts"], ep)
    sent = own * np.maximum(staying, 0.0)
    return {"sent": sent, "across": own * leaving, "own": own, "slots": slots, "experts": sizes["experts"]}
