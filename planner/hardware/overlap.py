"""How much slower computation gets beside a running collective, and the collective while computation runs."""

from dataclasses import dataclass

from planner import arrays as npt
from planner.errors import PlannerError
from planner.schema import Positive, plain_fields

LINKS = ("inside", "across")
"""Groups inside a scale-up domain, and groups that leave it."""
SIDES = ("compute", "communication")
LARGEST = 16.0
"""What takes longer than this with the other running waited for it; no kernels share a device so badly."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Time with the other running over time alone: numbers, or columns where layouts use different links."""

    compute: npt.ArrayLike
    """Computation while a collective runs."""
    communication: npt.ArrayLike
    """A collective while computation runs."""


ASSUMED = Slowdown(compute=1.2, communication=1.2)
"""What stands in a profile that has not measured it.

Communication kernels take multiprocessors and memory bandwidth. Measured coefficients lie between 1.1 and 1.3
[Galvatron, overlap coefficient of its profiler]; the middle is taken, both ways.
"""


@dataclass(frozen=True, kw_only=True)
class MeasuredOverlap:
    """One link's slowdowns with what they may be off by."""

    compute: Positive
    """Time of computation while a collective runs over its time alone."""
    communication: Positive
    """Time of a collective while computation runs over its time alone."""
    compute_spread: float = 0.0
    """Percent: half the interval of the median over it."""
    communication_spread: float = 0.0
    """Percent likewise."""
    to_dict = plain_fields

    @property
    def slowdown(self) -> Slowdown:
        """What is priced: a ratio below one is the scatter of two equal times."""
        return Slowdown(compute=max(self.compute, 1.0), communication=max(self.communication, 1.0))

    def __post_init__(self) -> None:
        for what, other, value, spread in (
            ("computation", "a collective", self.compute, self.compute_spread),
            ("a collective", "computation", self.communication, self.communication_spread),
        ):
            if problem := impossible(value, spread):
                raise PlannerError(f"{what} beside {other} takes {value:.2f} times as long as alone, {problem}")


def impossible(value: float, spread: float) -> str:
    """Why a measured ratio cannot be, or nothing: below one by more than its spread (percent), or beyond LARGEST."""
    if value * (1.0 + spread / 100.0) < 1.0:
        return f"and its spread is {spread:.1f} %; nothing gets faster beside something else, it must be 1 or more"
    if value > LARGEST:
        return f"which is waiting, not sharing; at most {LARGEST:.0f}"
    return ""
