"""Tables of measured kernels: rows as csv files have them, and the columns of one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from planner.curves import Column
from planner.hardware import HardwareProfile
from tools.tables import Row

FORMATS = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "int8_wo": "int8",
    "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4",
}  # fmt: skip
"""Names of the planner, by those of the tables."""
CACHED = {"l40s": 96e6, "rtx-pro-6000": 128e6}
"""Devices whose second-level cache holds what a benchmark reads again and again, bytes; a model's weights come from memory."""
Rows = list[Row]


@dataclass
class Data:
    """Rows of one kernel: sizes as the law names them, and seconds."""

    sizes: dict[str, Column]
    seconds: Column
    said: str = ""
    """Engines and versions."""
    keep: Column | None = None
    """Rows that a cache cannot have served (``from_memory``)."""

    def take(self, which: Any) -> Data:
        """Some of the rows."""
        return Data({name: values[which] for name, values in self.sizes.items()}, self.seconds[which], self.said)


def grouped(rows: Rows, *keys: str) -> Iterable[tuple[tuple[str, ...], Rows]]:
    """Rows by the values of some columns."""
    found: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return sorted(found.items())


def versions(rows: Rows) -> str:
    """Engines and versions that rows come from."""
    return ", ".join(sorted({f"{row['engine']} {row['version']}" for row in rows if "engine" in row}))


def from_memory(hardware: HardwareProfile, moved: Column, seconds: Column) -> Column | None:
    """Rows that a cache cannot have served, where a device has a large one: few bytes, whose launch counts, or more than it holds."""
    size = CACHED.get(hardware.name)
    if size is None:
        return None
    possible = seconds > moved / (0.95 * hardware.memory_bandwidth)
    return possible & ((moved > 1.2 * size) | (moved < 0.02 * size))
