"""What DeepSpeed alone does: ZeRO 3 gathers one unit more ahead."""

from dataclasses import dataclass

from planner.cost.own_terms import OwnTerms


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """ZeRO 3's prefetch."""

    units_ahead: float
    """Units whose gathered weights are alive in addition to the current one and the next."""

    def prefetched_units(self) -> float:
        """As the file says."""
        return self.units_ahead
