"""The figures of a hardware profile, read off its curves, and everything that ``plan hardware show`` prints."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from planner import units
from planner.curves import bus_factor
from planner.errors import PlannerError
from planner.hardware import ASSUMED, HardwareProfile
from planner.hardware.links import LINKS
from planner.record import record

SIZES = (units.MIB, 16 * units.MIB, 256 * units.MIB)
"""Messages of the table: a small bucket, an activation, a large bucket."""
SQUARES = (256, 512, 1024, 2048, 4096, 8192)
"""Sizes of square products in the table: those that a profile measured about; of the library's, whose points are not in the
file, from 1024 on."""
LAYER_KEYS = ("hidden", "ffn", "heads", "seq", "batch", "dtype", "pass", "whole_us", "operators_us", "error_percent")
"""Entries shown of a whole layer that was measured besides its operators."""
FACTS = ("allocator_rounding",)
"""Memory facts that are measured and priced by nothing; shown where a profile has them."""


@record
class Figure:
    """One figure of a profile."""

    family: str
    """memory, gemm, attention, scale_up, scale_out, machine."""
    name: str
    """Quantity, with its shape or size."""
    value: float
    """In base units."""
    unit: str
    """bytes, bytes/s, FLOP/s, seconds, a share, or times (what takes so many times as long)."""


def figures(profile: HardwareProfile) -> list[Figure]:
    """The figures that decide prices, each read off the curves at a few sizes; what cannot be priced is left out."""
    return [*_machine(profile), *_compute(profile), *_collectives(profile), *_overlap(profile)]


_MACHINE = {
    "bytes": "usable_memory context_memory communicator_memory expert_communicator_memory workspace_memory",
    "bytes/s": "memory_bandwidth pcie_bandwidth host_memory_bandwidth scale_up_bandwidth network_bandwidth",
    "seconds": "launch_floor graph_launch_floor network_latency",
    "share": "sustained_clock cpu_adam_bandwidth_fraction",
}
"""Figures of the machine that are fields of a profile, by unit."""


def _machine(one: HardwareProfile) -> Iterator[Figure]:
    found = [(name, getattr(one, name), unit) for unit, names in _MACHINE.items() for name in names.split()]
    rows = [row for row in one.measurements.get("bytes", ()) if row.get("name") in FACTS]
    found += [(row["name"], row["bytes"], "bytes") for row in rows if isinstance(row.get("bytes"), int | float)]
    found += [(f"peak {dtype}", rate, "FLOP/s") for dtype, rate in one.peak_flops.items()]
    for name, value, unit in found:
        yield Figure(family="machine", name=name.replace("_", " "), value=value, unit=unit)


def _compute(one: HardwareProfile) -> Iterator[Figure]:
    for recipe in one.gemm:
        if {"fp8_block": "fp8", "nvfp4": "fp4"}.get(recipe, recipe) not in (*one.peak_flops, "bf16"):
            continue
        for size in _squares(one, recipe):
            rate = 2.0 * size**3 / float(one.gemm_time(size, size, size, recipe, quantised=True))
            yield Figure(family="gemm", name=f"{recipe} {size} x {size} x {size}", value=rate, unit="FLOP/s")
    for kernel, dtype, pass_ in one.attention:
        if kernel != "best":
            continue
        seq = _longest(one, dtype)
        time = float(one.attention_time(1, 32, 8, 128, seq, seq, True, pass_, dtype))
        flop = 2.0 * 32 * seq * seq * 128 * (2.5 if pass_ == "backward" else 1.0)
        name = f"{dtype} {pass_}, 32 heads of 128, {seq:.0f} tokens"
        yield Figure(family="attention", name=name, value=flop / time, unit="FLOP/s")
    for op, fraction in one.memory_fraction.items():
        yield Figure(family="memory", name=op, value=fraction * one.memory_bandwidth, unit="bytes/s")


def _squares(one: HardwareProfile, recipe: str) -> list[int]:
    """Sizes between the smallest and the largest product that was measured, by the cube root of m n k."""
    points = [row for row in one.measurements.get("gemm", ()) if row.get("dtype") == recipe]
    sizes: list[list[Any]] = [[row.get(name) for name in ("m", "n", "k")] for row in points]
    known = [size for size in sizes if all(isinstance(side, int) and side > 0 for side in size)]
    sides = [math.prod(size) ** (1.0 / 3.0) for size in known]
    if not sides:
        return [size for size in SQUARES if size >= 1024]
    return [size for size in SQUARES if 0.8 * min(sides) <= size <= 1.25 * max(sides)]


def _longest(one: HardwareProfile, dtype: str) -> float:
    """4096 tokens, or the longest sequence measured where that is shorter, to a power of two."""
    lengths = [row.get("seq") for row in one.measurements.get("attention", ()) if row.get("dtype") == dtype]
    longest = max((float(length) for length in lengths if isinstance(length, int) and length > 0), default=4096.0)
    return float(2.0 ** math.floor(math.log2(min(longest, 4096.0))))


def _collectives(one: HardwareProfile) -> Iterator[Figure]:
    for op, curve in one.scale_up.items():
        for group in curve.groups.tolist():
            for size in SIZES:
                rate = float(bus_factor(op, group)) * size / float(one.scale_up_time(op, size, group))
                name = f"{op} of {group:.0f}, {units.format_bytes(size)}"
                yield Figure(family="scale_up", name=name, value=rate, unit="bytes/s")
    for op in one.scale_out:
        for nodes in (2, 8):
            size, ranks = SIZES[-1], nodes * one.gpus_per_node
            rate = float(bus_factor(op, ranks)) * size / float(one.scale_out_time(op, size, ranks, one.gpus_per_node))
            name = f"{op} on {nodes} nodes, {units.format_bytes(size)}"
            yield Figure(family="scale_out", name=name, value=rate, unit="bytes/s")


def _overlap(one: HardwareProfile) -> Iterator[Figure]:
    """As measured: a ratio below one is priced as one."""
    sides = {"computation during a collective": "compute", "a collective during computation": "communication"}
    for link, found in one.overlap.items():
        for words, side in sides.items():
            yield Figure(family="overlap", name=f"{words}, {link}", value=getattr(found, side), unit="times")


def shown_profile(profile: HardwareProfile) -> dict[str, Any]:
    """Everything that ``plan hardware show`` prints, as plain data."""
    return {
        "name": profile.name, "device": profile.device, "vendor": profile.vendor, "arch": profile.arch,
        "measured": dict(profile.measured) | _unmeasured_overlap(profile),
        "provenance": profile.provenance.to_dict() if profile.provenance else None,
        "figures": [asdict(one) for one in figures(profile)],
        "collectives": list(_shown_collectives(profile)),
        "points": {family: len(rows) for family, rows in profile.measurements.items() if isinstance(rows, list)},
        "layers": [
            {key: row[key] for key in LAYER_KEYS} for row in profile.measurements.get("layer", ())
            if set(LAYER_KEYS) <= row.keys() and all(isinstance(row[key], int | float) for key in LAYER_KEYS[-3:])
        ],
        "notes": list(profile.notes), "unverified": list(profile.unverified),
    }  # fmt: skip


def _unmeasured_overlap(profile: HardwareProfile) -> dict[str, str]:
    """What the cost model takes for links whose overlap the profile has not measured."""
    missing = [link for link in LINKS if link not in profile.overlap]
    if not missing:
        return {}
    where = "" if len(missing) == len(LINKS) else f" {missing[0]}"
    said = f"assumed{where}: {float(np.asarray(ASSUMED.compute)):g} both ways, computation and collectives at the same time"
    return {"overlap": "; ".join(part for part in (profile.measured.get("overlap", ""), said) if part)}


def _shown_collectives(profile: HardwareProfile) -> Iterator[dict[str, Any]]:
    """One row per measured curve of collectives: latency, algorithm and bus bandwidth with their spread, and the fit.

    Rows that somebody wrote in another form are passed over.
    """
    for row in profile.measurements.get("collective", ()):
        with contextlib.suppress(ArithmeticError, KeyError, PlannerError, TypeError, ValueError):
            fits = [float(one["median_percent"]) for one in row.get("fits", ())]
            yield {
                **{key: str(row[key]) for key in ("op", "dtype")}, **{key: int(row[key]) for key in ("n", "stride", "nodes")},
                "sizes": len(str(row["sizes"]).split()), "latency_s": units.parse(row["latency"], "seconds"),
                **{key: units.parse(row[key], "bytes/s") for key in ("algorithm_bandwidth", "bus_bandwidth")},
                **{key: float(row[key]) for key in ("latency_percent", "bandwidth_percent", "confidence")},
                "outliers": sum(int(count) for count in str(row["outliers"]).split()),
                "fit_percent": min(fits, default=None),
            }  # fmt: skip
