"""What the fits of a profile stand on: peaks, bandwidth and the constants that stay where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.curves import Column
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.lab.profile.points import Measured


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the fits stand on: peaks, bandwidth and constants before anything was fitted."""

    peak_flops: dict[str, float]
    """FLOP/s by dtype."""
    bandwidth: float
    """Bytes/s of the memory."""
    compute_units: float
    """Compute units of the device; threads of a CPU."""
    guess: HardwareProfile | None = None
    """The profile whose constants stay where nothing was measured; None = nothing stays (a CPU)."""
    notes: list[str] = field(default_factory=list)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype. Raises PlannerError."""
        stands = {"fp16": "bf16", "fp8_row": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
        key = stands.get(dtype, dtype) if dtype not in self.peak_flops else dtype
        if key not in self.peak_flops:
            raise PlannerError(f"no peak is known for {dtype}; known: {', '.join(self.peak_flops)}")
        return self.peak_flops[key]


def seconds(rows: Sequence[Measured]) -> Column:
    """Medians as a column."""
    return np.array([row.median for row in rows])
