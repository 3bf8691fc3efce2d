"""How near two plans of one job may be predicted before they count as equal: counted on measured pairs."""

from functools import cache

import numpy as np

from planner import library
from planner.record import record

RIGHT = 0.8
"""Plans are called equal where fewer than this share of measured pairs of such a gap were ordered rightly."""


@record
class Ties:
    """Share of measured pairs of layouts of one job whose order was predicted rightly, by the predicted gap (profiles/ties.yaml).

    Two plans of one job share trainer, hardware and model, and with them most of the error of a prediction, so that intervals
    of single runs say little about which is faster.
    """

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
def shipped_ties() -> Ties:
    """The table that comes with the planner."""
    data = library.read_yaml(library.profiles_directory() / "ties.yaml")
    steps = data.pop("right")
    return Ties(gaps=tuple(steps), right=tuple(steps.values()), **data)
