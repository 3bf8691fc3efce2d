"""What is measured (Point) and what came out (Timing, Measured): plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Value: TypeAlias = str | int | float | bool  # What a point's key holds
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
    weight: float = field(default=0.0, compare=False)
    """Share of the predicted step time that the point stands for, 0 where that is not known."""

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
    def label(self) -> str:
        """For a person: ``gemm dtype=bf16 k=8192 m=4096 n=4096``."""
        return " ".join((self.family, *(f"{name}={value}" for name, value in self.key)))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def each(self, *names: str) -> list[Any]:
        """Several values of the key."""
        return [self.values[name] for name in names]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return {"family": self.family, "key": self.values, "weight": self.weight}

    @classmethod
    def from_dict(cls, data: Any) -> Point:
        """What ``to_dict`` wrote."""
        return cls.of(data["family"], weight=data["weight"], **data["key"])


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
        first = {"point": self.point.to_dict()}
        return first | {k: v for k, v in vars(self).items() if k != "point"} | {"details": self.more}

    @classmethod
    def from_dict(cls, data: Any) -> Measured:
        """What ``to_dict`` wrote."""
        details = tuple(sorted(data["details"].items()))
        return cls(**{**data, "point": Point.from_dict(data["point"]), "details": details})
