"""How much slower computation gets beside a running collective, and the collective beside computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner import arrays as npt
from planner.errors import PlannerError, nearest_first, shown
from planner.hardware.vocabulary import mapping, number

LINKS = ("inside", "across")
"""Groups inside a scale-up domain, and groups that leave it."""
SIDES = ("compute", "communication")
LARGEST = 16.0
"""What takes longer than this beside the other waited for it; no kernels share a device so badly."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Time beside the other over time alone: numbers, or columns where layouts use different links."""

    compute: npt.ArrayLike
    """Computation beside a collective."""
    communication: npt.ArrayLike
    """A collective beside computation."""


ASSUMED = Slowdown(compute=1.2, communication=1.2)
"""What stands in a profile that has not measured it.

Communication kernels take multiprocessors and memory bandwidth. Measured coefficients lie between 1.1 and 1.3
[Galvatron, overlap coefficient of its profiler]; the middle is taken, both ways.
"""


@dataclass(frozen=True, kw_only=True)
class MeasuredOverlap:
    """One link's slowdowns with what they may be off by."""

    compute: float
    """Time of computation beside a collective over its time alone."""
    communication: float
    """Time of a collective beside computation over its time alone."""
    compute_spread: float = 0.0
    """Percent: half the interval of the median over it."""
    communication_spread: float = 0.0
    """Percent likewise."""

    @property
    def slowdown(self) -> Slowdown:
        """What is priced: a ratio below one is the scatter of two equal times."""
        return Slowdown(compute=max(self.compute, 1.0), communication=max(self.communication, 1.0))

    @classmethod
    def from_dict(cls, data: object, where: str) -> MeasuredOverlap:
        """From ``{compute: 1.3, communication: 1.1, compute_spread: 4, communication_spread: 2}``. Raises PlannerError."""
        entry = mapping(data, where)
        known = (*SIDES, *(f"{side}_spread" for side in SIDES))
        for key in entry:
            if key not in known:
                raise PlannerError(
                    f"{where}: unknown key {shown(key)}; did you mean {nearest_first(str(key), known)[0]}?"
                )
        for side in SIDES:
            if side not in entry:
                raise PlannerError(f"{where}: the key '{side}' is missing; give both directions")
        values = {side: number(entry[side], f"{where} {side}") for side in SIDES}
        for key in known[2:]:
            if key in entry and entry[key] != 0:
                values[key] = number(entry[key], f"{where} {key}")
        found = cls(**values)
        for side in SIDES:
            _check(values[side], values.get(f"{side}_spread", 0.0), side, where)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back; a spread of 0 is left out."""
        found = {name: getattr(self, name) for name in (*SIDES, *(f"{side}_spread" for side in SIDES))}
        return {name: value for name, value in found.items() if value}


def _check(value: float, spread: float, side: str, where: str) -> None:
    other = "a collective" if side == "compute" else "computation"
    problem = impossible(value, spread)
    if problem:
        what = "computation" if side == "compute" else "a collective"
        raise PlannerError(f"{where}: {what} beside {other} takes {value:.2f} times as long as alone, {problem}")


def impossible(value: float, spread: float) -> str:
    """Why a measured ratio cannot be, or nothing: below one by more than its spread (percent), or beyond LARGEST."""
    if value * (1.0 + spread / 100.0) < 1.0:
        return f"and its spread is {spread:.1f} %; nothing gets faster beside something else, it must be 1 or more"
    if value > LARGEST:
        return f"which is waiting, not sharing; at most {LARGEST:.0f}"
    return ""


def read_overlap(data: object, where: str) -> dict[str, MeasuredOverlap]:
    """The key ``overlap`` of a profile file, by link. Raises PlannerError."""
    entries = mapping(data, where)
    for key in entries:
        if key not in LINKS:
            raise PlannerError(f"{where}: unknown key {shown(key)}; did you mean {nearest_first(str(key), LINKS)[0]}?")
    return {link: MeasuredOverlap.from_dict(entries[link], f"{where} {link}") for link in LINKS if link in entries}
