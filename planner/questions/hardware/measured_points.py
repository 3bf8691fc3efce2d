"""The measured points of two profiles side by side: what was timed in both, by family, group and curve."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner import units
from planner.hardware import HardwareProfile

NORMAL = 1.96
"""Standard errors in half a 95 percent interval."""
RESULTS = ("repetitions", "outliers", "rounds", "threads", "clock", "kernel_of_groups", "source", "gemm", "interval")
"""Entries of a point that are results, or how it was run; all other texts and whole numbers say what was measured."""
PATHS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (("dtype",), (), ("pass",)), "grouped_gemm": (("dtype",), (), ("pass",)),
    "attention": (("dtype",), ("kernel",), ("pass",)), "memory_bound": ((), ("op",), ("pass", "dtype")),
    "layer": ((), (), ("pass", "dtype")), "launch": ((), (), ("kind",)), "host_copy": ((), (), ("direction",)),
    "host_stream": ((), (), ()), "cpu_adam": ((), (), ()), "sustained": ((), (), ()),
}  # fmt: skip
"""Family of points -> entries that name its root, its groups, and its curves."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One point that both profiles have."""

    path: tuple[str, str, str]
    """Root ("gemm fp32"), group ("in groups of 4 ranks, 1 apart") and curve ("all_reduce fp32") that it belongs to."""
    first: float
    """Seconds in the first profile; for overlaps the slowdown."""
    second: float
    """In the second."""
    error: float
    """Standard error of ln(second / first) by the intervals of the two medians."""
    unit: str

    @property
    def change(self) -> float:
        """ln(second / first)."""
        return math.log(self.second / self.first)


Point = tuple[object, tuple[str, str, str], float, float]
"""What was measured, its path, value and standard error of the logarithm."""


def shared_points(first: HardwareProfile, second: HardwareProfile) -> list[Shared]:
    """What was measured in both, point by point; entries that a file has in another form are passed over."""
    theirs = {key: (value, error) for key, _, value, error in _points(second)}
    found = []
    for key, path, mine, error in _points(first):
        other, its_error = theirs.get(key, (0.0, 0.0))
        if 0.0 < mine < math.inf and 0.0 < other < math.inf:
            unit = "times" if path[0].startswith("overlap") else "seconds"
            found.append(Shared(path=path, first=mine, second=other, error=math.hypot(error, its_error), unit=unit))
    return found


def _points(profile: HardwareProfile) -> Iterator[Point]:
    for family, rows in profile.measurements.items():
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, Mapping):
                continue
            try:
                if family == "collective":
                    yield from _collective(row)
                elif family == "overlap":
                    yield _overlap(row)
                elif family in PATHS:
                    yield _operator(family, row)
            except (ArithmeticError, KeyError, TypeError, ValueError):
                continue


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What was measured: texts and whole numbers of the row but for results."""
    return tuple(sorted((k, v) for k, v in row.items() if isinstance(v, str | int) and k not in RESULTS))


def _operator(family: str, row: Mapping[str, Any]) -> Point:
    value = float(row["whole_us"] if family == "layer" else row["us"]) * units.MICRO
    low, high = (float(end) * units.MICRO for end in row.get("interval", (0.0, 0.0)))
    names = [" ".join(str(row[name]) for name in part if name in row) for part in PATHS[family]]
    path = (f"{family} {names[0]}".strip(), names[1], names[2])
    return (family, _key(row)), path, value, _error(low, high)


def _error(low: float, high: float) -> float:
    return math.log(high / low) / (2.0 * NORMAL) if 0.0 < low < high else 0.0


def _group(row: Mapping[str, Any]) -> tuple[str, str]:
    """Root and group of a collective."""
    apart = f", {row['stride']} apart" if int(row["stride"]) != 1 else ""
    return "across nodes" if int(row["nodes"]) > 1 else "inside a node", f"groups of {row['n']}{apart}"


def _collective(row: Mapping[str, Any]) -> Iterator[Point]:
    where, group = _group(row)
    path = (f"collectives {where}", group, f"{row['op']} {row['dtype']}")
    columns = (str(row[name]).split() for name in ("sizes", "us", "low_us", "high_us"))
    for size, us, low, high in zip(*columns, strict=True):
        key = ("collective", *(str(row[name]) for name in ("op", "dtype", "n", "stride", "nodes")), size)
        yield key, path, float(us) * units.MICRO, _error(float(low), float(high))


def _overlap(row: Mapping[str, Any]) -> Point:
    side = "computation beside a collective" if row["of"] == "gemm" else "a collective beside computation"
    path = (f"overlap {_group(row)[0]}", "", side)
    names = ("op", "of", "dtype", "n", "stride", "nodes", "size")
    key = ("overlap", *(str(row[name]) for name in names))
    return key, path, float(row["slowdown"]), float(row.get("spread", 0.0)) / NORMAL
