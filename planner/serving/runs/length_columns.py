"""Lengths of many rows as columns, so that one call of the model answers rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.record import record
from planner.serving.traffic import Lengths


@record
class LengthColumns(Lengths):
    """The fields of ``Lengths`` as columns; each was checked as the number of its own row."""

    def __post_init__(self) -> None:
        pass

    @property
    def variation(self) -> Any:
        """Var[x] / E[x]^2 of each column."""
        return np.maximum(self.squared / np.square(self.mean) - 1.0, 0.0)


def columns_of(lengths: Sequence[Lengths]) -> Lengths:
    """One column each."""
    columns: Any = {
        name: np.array([getattr(one, name) for one in lengths], dtype=np.float64)
        for name in ("mean", "squared", "longest")
    }
    return LengthColumns(**columns)
