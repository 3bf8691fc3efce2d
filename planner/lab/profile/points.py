"""What is measured (Point) and what came out (Timing, Measured): plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from planner.errors import PlannerError, shown

Value: TypeAlias = str | int | float | bool  # What a point's key holds
Identity: TypeAlias = tuple[str, tuple[tuple[str, Value], ...]]
Run: TypeAlias = Callable[[], object]  # What is timed
Taker: TypeAlias = Callable[[int, int], list[float]]
"""``take(count, inner)``: that many samples, each the mean of ``inner`` runs, in seconds."""

CLOCKS = {
    "cuda_events": "device events around the kernels",
    "wall": "monotonic clock of a synchronised host",
    "cpu": "processor time of the process, all its threads",
}
"""The clocks, and what each counts."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to measure, by name and shape; two points with equal family and key are the same."""

    family: str  # gemm, attention, collective, overlap, memory, layer, copy, ...
    key: tuple[tuple[str, Value], ...]  # (name, value) sorted by name
    weight: float = 0.0  # Share of the predicted step time that the point stands for, 0 where that is not known

    @classmethod
    def of(cls, family: str, *, weight: float = 0.0, **values: Any) -> Point:
        """``Point.of("gemm", m=4096, n=4096, k=8192, dtype="bf16", pass_="dgrad")``; ``pass_`` is the value ``pass``."""
        key = tuple(sorted((name.rstrip("_"), value) for name, value in values.items()))
        return cls(family=family, key=key, weight=weight)

    @property
    def values(self) -> dict[str, Any]:
        """The key as a mapping."""
        return dict(self.key)

    @property
    def identity(self) -> Identity:
        """What makes it the same point, whatever its weight."""
        return self.family, self.key

    @property
    def label(self) -> str:
        """For a person: ``gemm dtype=bf16 k=8192 m=4096 n=4096``."""
        return " ".join((self.family, *(f"{name}={value}" for name, value in self.key)))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def number(self, name: str) -> float:
        """A number of the key."""
        return float(self.values[name])

    def whole(self, name: str) -> int:
        """A whole number of the key."""
        return int(self.values[name])

    def text(self, name: str) -> str:
        """A text of the key."""
        return str(self.values[name])

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return {"family": self.family, "key": self.values, "weight": self.weight}

    @classmethod
    def from_dict(cls, data: Any, where: str = "point") -> Point:
        """Raises PlannerError."""
        with _reading(where):
            key = tuple(sorted((str(name), _value(value)) for name, value in data["key"].items()))
            return cls(family=str(data["family"]), key=key, weight=_number(data["weight"]))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and its confidence interval, in seconds (bytes for family "bytes")."""

    median: float  # Seconds; for a collective, of the slowest rank of each repetition
    low: float  # Lower end of the confidence interval of the median
    high: float  # Upper end
    repetitions: int  # Samples that the median is of; none was dropped
    outliers: int = 0
    """Samples further from the median than ``timing.OUTLIER`` deviations: counted, and still among the samples."""
    clock: str = "wall"  # One of CLOCKS
    confidence: float = 0.95  # Chance that low..high holds the median, from the order statistics; 0 for facts
    details: tuple[tuple[str, Value], ...] = ()  # Anything else a family wants to keep, sorted by name

    @property
    def spread(self) -> float:
        """Half the width of the interval over the median."""
        return 0.5 * (self.high - self.low) / self.median if self.median > 0 else 0.0

    @property
    def more(self) -> dict[str, Any]:
        """The details as a mapping."""
        return dict(self.details)

    def measured(self, point: Point, **details: Value) -> Measured:
        """The result for a point, with further details."""
        more = tuple(sorted({**self.more, **details}.items()))
        return Measured(**{**vars(self), "point": point, "details": more})


@dataclass(frozen=True, kw_only=True)
class Measured(Timing):
    """A measured point."""

    point: Point  # What

    @classmethod
    def fact(cls, point: Point, value: float, **more: Any) -> Measured:
        """A figure without an interval: bytes, or a reference; ``more`` are further fields."""
        return cls(point=point, median=value, low=value, high=value, **{"repetitions": 1, "confidence": 0.0, **more})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return (
            {"point": self.point.to_dict()}
            | {k: v for k, v in vars(self).items() if k != "point"}
            | {"details": self.more}
        )

    @classmethod
    def from_dict(cls, data: Any, where: str = "measured") -> Measured:
        """Raises PlannerError."""
        with _reading(where):
            if data["clock"] not in CLOCKS:
                raise ValueError(f"the clock {shown(data['clock'])} is none of {', '.join(CLOCKS)}")
            values: dict[str, Any] = {name: _number(data[name]) for name in ("median", "low", "high", "confidence")}
            values |= {name: int(_number(data[name])) for name in ("repetitions", "outliers")}
            details = tuple(sorted((str(name), _value(value)) for name, value in data["details"].items()))
            return cls(point=Point.from_dict(data["point"], where), clock=data["clock"], details=details, **values)


def unique(points: Iterable[Point]) -> list[Point]:
    """The first of equal points."""
    found: dict[Identity, Point] = {}
    for point in points:
        found.setdefault(point.identity, point)
    return list(found.values())


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """What is no point or result is a PlannerError that says where it stands."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise PlannerError(f"{where}: is not what a profile keeps: {error}") from error


def _value(value: Any) -> Value:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{shown(value)} is neither a text nor a number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{shown(value)} is not a number from zero")
    return float(value)
