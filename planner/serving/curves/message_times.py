"""Messages of serving: all-reduces in the engines' own kernels, and what tokens on their way to experts put on the links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.curves import Column, bus_factor, numbers
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.schema import check_keys
from planner.serving.curves.kernel_laws import Sizes
from planner.serving.curves.time_mesh import Mesh
from planner.units import MICRO

EXCHANGES = ("latency", "throughput")
"""Kernels that send tokens to experts: a copy per expert straight away, or a copy per rank, sorted first.  [DeepEP]"""


@dataclass(frozen=True)
class SmallAllReduce:
    """Measured times of one engine's kernel, linear in bytes and ranks between the points, never falling with either."""

    mesh: Mesh
    """Seconds over ``ranks`` and ``bytes`` of the message."""

    @classmethod
    def from_dict(cls, data: object, where: str) -> SmallAllReduce:
        """``first_bytes``, and ``us``: text of microseconds per octave by number of ranks. Raises PlannerError."""
        entry = check_keys(data, ("from", "first_bytes", "us"), where, required=("first_bytes", "us"))
        rows: dict[int, object] = entry["us"] if isinstance(entry["us"], dict) else {}
        table = [numbers(text, f"{where} us {n}", above=0.1) for n, text in sorted(rows.items())]
        if not table or len({row.size for row in table}) != 1 or table[0].size < 2:
            raise PlannerError(f"{where}: us must map ranks to texts of equally many microseconds")
        seconds = np.stack(table) * MICRO
        # what a larger message or group takes bounds a smaller one: another kernel could have been chosen there
        for axis in range(2):
            seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)
        sizes: Column = float(entry["first_bytes"]) * np.exp2(np.arange(seconds.shape[1], dtype=np.float64))
        return cls(Mesh({"ranks": numbers(sorted(rows), f"{where} ranks", above=2.0), "bytes": sizes}, seconds))

    def with_link(self, ratio: float) -> SmallAllReduce:
        """The same kernel on a link of ``ratio`` times the bandwidth: all but the latency scales."""
        latency = self.mesh.seconds[:, :1]
        return SmallAllReduce(Mesh(self.mesh.axes, latency + (self.mesh.seconds - latency) / ratio))

    def time(self, num_bytes: Column, n: Column) -> Column:
        """Seconds; 0 for one rank or no bytes.

        Above the largest message at its bandwidth, above the most ranks with the volume per rank and, for the latency, one step
        more per doubling.
        """
        inside, beyond = self.mesh.inside({"bytes": num_bytes, "ranks": n})
        time = self.mesh.time(inside)
        if beyond:
            most_ranks, most_bytes = self.mesh.axes["ranks"][-1], self.mesh.axes["bytes"][-1]
            many = np.maximum(n, most_ranks)
            volume = bus_factor("all_reduce", many) / bus_factor("all_reduce", most_ranks)
            time = time * np.maximum(num_bytes / most_bytes, 1.0) * volume
            time = time + self.mesh.seconds[-1, 0] * np.log2(many / most_ranks)
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
