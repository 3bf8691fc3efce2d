"""How often the model orders two plans of one job rightly, by the gap that it predicts between them: when to call them equal.

Two plans of one job share trainer, hardware and model, and with them most of the error of a prediction: intervals of single
runs say little about which is faster. So it was counted on the sweeps that were published: for every two measured layouts of
one job, was the one that is predicted to be faster the faster one? The share rises with the predicted gap. The table
``profiles/ties.yaml`` holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from planner import library
from planner.errors import PlannerError

RIGHT = 0.8
"""Plans are called equal where fewer than this share of measured pairs of such a gap were ordered rightly."""


@dataclass(frozen=True, kw_only=True)
class Ties:
    """Share of measured pairs whose order was predicted rightly, by the predicted gap."""

    gaps: tuple[float, ...]
    """Predicted ln(slower / faster), rising from 0."""
    right: tuple[float, ...]
    """Share of rightly ordered pairs at each gap, never falling; 0.5 is a coin."""
    pairs: int
    """Pairs of measured layouts behind it."""
    sweeps: int
    """Jobs of which several layouts were measured."""
    sources: int
    """Papers, tables and logs that they come from."""
    date: str
    """When it was counted."""

    def chance(self, gap: float) -> float:
        """Share of pairs with the predicted gap ln(slower / faster) that were ordered rightly: interpolated between steps."""
        return float(np.interp(abs(gap), self.gaps, self.right))

    @property
    def equal_gap(self) -> float:
        """Smallest predicted gap from which RIGHT of the pairs are ordered rightly: plans closer than that are equal."""
        if self.right[-1] < RIGHT:
            return self.gaps[-1]
        fine = np.linspace(0.0, self.gaps[-1], 5001)
        return float(fine[np.argmax(np.interp(fine, self.gaps, self.right) >= RIGHT)])

    @property
    def basis(self) -> str:
        """The pairs behind it, in words."""
        return (
            f"{self.pairs:,} pairs of layouts measured for one job, {self.sweeps} jobs of {self.sources} sources, "
            f"counted {self.date}"
        )


@cache
def shipped() -> Ties:
    """The table that comes with the planner."""
    return read(library.profiles_directory() / "ties.yaml")


def read(path: Path) -> Ties:
    """A table from a file. Raises PlannerError with what is wrong."""
    data = library.read_yaml(path)
    steps, counts = data.get("right"), ("pairs", "sweeps", "sources")
    if not isinstance(steps, Mapping) or not all(isinstance(data.get(name), int) for name in counts):
        raise PlannerError(
            f"{path}: needs the mapping 'right' of gaps to shares, and whole numbers {', '.join(counts)}"
        )
    gaps, right = tuple(float(gap) for gap in steps), tuple(float(share) for share in steps.values())
    if list(gaps) != sorted(gaps) or list(right) != sorted(right) or not 0.5 <= right[0] <= right[-1] <= 1.0:
        raise PlannerError(f"{path}: gaps and shares must rise, shares from 0.5 to 1")
    return Ties(gaps=gaps, right=right, date=str(data.get("date", "")), **{name: data[name] for name in counts})
