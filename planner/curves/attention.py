"""Time of one attention kernel by FLOP, keys and tiles, over the head sizes that were measured."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from planner.curves.reading import Column, checked, numbers
from planner.errors import PlannerError
from planner.record import record


@record
class AttentionCurve:
    """Time of one attention kernel: t = t0 + F / (P e) (1 + s0/S) max(1, c U / T), and never below F / P.

    F FLOP, S the keys that a query sees on average (s/2 when causal), U compute units, T = batch x heads x ceil(s/128)
    tiles: few heads leave units idle. The constants are columns over the head size (mean of that of keys and of values:
    160 is MLA's 192 and 128), interpolated linearly between the measured sizes.
    """

    head_dims: Column
    launch: Column
    """t0, seconds."""
    efficiency: Column
    s0: Column
    c: Column
    errors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: object, where: str) -> AttentionCurve:
        """From a mapping: head_dims and, per head size, launch_us, efficiency, s0 and c."""
        names = ("head_dims", "launch_us", "efficiency", "s0", "c")
        entry = checked(data, where, ("kernel", "dtype", "pass", *names), ("errors",))
        values = {name: np.atleast_1d(numbers(entry[name], f"{where} {name}", above=0.0)) for name in names}
        if len({value.size for value in values.values()}) != 1:
            raise PlannerError(f"{where}: {', '.join(names)} must have equal lengths")
        launch = values.pop("launch_us") * 1e-6
        return cls(launch=launch, errors=dict(entry.get("errors", {})), **values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back (kernel, dtype and pass are the caller's)."""
        data = {name: getattr(self, name).tolist() for name in ("head_dims", "efficiency", "s0", "c")}
        return {**data, "launch_us": (self.launch * 1e6).round(9).tolist(), "errors": self.errors}

    def time(self, flop: Column, span: Column, tiles: Column, head_dim: Column, peak: float, units: float) -> Column:
        """Seconds; the equation is in the class."""
        launch, efficiency, s0, c = (
            np.interp(head_dim, self.head_dims, values) for values in (self.launch, self.efficiency, self.s0, self.c)
        )
        idle = np.maximum(1.0, c * units / np.maximum(tiles, 1.0))
        return np.maximum(launch + flop / (peak * efficiency) * (1.0 + s0 / np.maximum(span, 1.0)) * idle, flop / peak)
