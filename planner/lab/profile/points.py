"""What the user asked (Settings), what is measured (Point) and what came out (Timing, Measured): plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from planner.errors import PlannerError, nearest_first

Value: TypeAlias = str | int | float | bool  # What a point's key holds
Run: TypeAlias = Callable[[], object]  # What is timed
Taker: TypeAlias = Callable[[int, int], list[float]]
"""``take(count, inner)``: that many samples, each the mean of ``inner`` runs, in seconds."""

PARTS = ("collectives", "compute", "memory")  # What ``--only`` may name
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
    details: dict[str, Any] = field(default_factory=dict)  # Anything else a family wants to keep

    @property
    def spread(self) -> float:
        """Half the width of the interval over the median."""
        return 0.5 * (self.high - self.low) / self.median if self.median > 0 else 0.0

    def measured(self, point: Point, **details: Value) -> Measured:
        """The result for a point, with further details."""
        return Measured(**{**vars(self), "point": point, "details": self.details | details})


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
        return vars(self) | {"point": self.point.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Measured:
        """What ``to_dict`` wrote."""
        return cls(**{**data, "point": Point.from_dict(data["point"])})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked of the profile; the same on every rank."""

    output: str  # Profile to write
    device: str  # "cpu" or "cuda"
    budget: float  # Seconds of measuring, start-up left out
    models: Sequence[str] = ()  # What the operators and sizes are taken from
    resume: bool = False  # Go on with the journal of an earlier run
    only: Sequence[str] = PARTS  # Parts to measure
    timeout: float = 30.0  # Seconds after which a step has hung
    largest: float | None = None  # Largest buffer of a collective, bytes; None = by the models
    base: str | None = None  # Library profile for what is not measured; None = by the device's name
    network_bandwidth: float | None = None
    """Line rate of the NICs per GPU, bytes/s; None = of the base, else the best that was measured."""
    command: str = ""  # As the user typed it

    def __post_init__(self) -> None:
        for part in self.only:
            if part not in PARTS:
                raise PlannerError(
                    f"unknown part '{part}' of a profile; known: {', '.join(nearest_first(part, PARTS))}"
                )
        for name in ("budget", "timeout"):
            if not getattr(self, name) > 0:
                raise PlannerError(f"--{name} is {getattr(self, name):g} s; it must be above zero")
        if not self.output.endswith((".yaml", ".yml")):
            raise PlannerError(f"--output {self.output}: a profile is a YAML file; give it a name that ends in .yaml")

    @property
    def journal(self) -> Path:
        """Where the measurements are kept while they run, next to the profile."""
        return Path(self.output).with_suffix(".journal.json")
