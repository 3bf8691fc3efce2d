"""What the user asked (Settings), what is measured (Point), what came out (Timing, Measured), and its file (Journal); no torch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, TypeAlias

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.record import record

Value: TypeAlias = str | int | float | bool  # What a point's key holds
Run: TypeAlias = Callable[[], object]  # What is timed
Taker: TypeAlias = Callable[[int, int], list[float]]
"""``take(count, inner)``: that many samples, each the mean of ``inner`` runs, in seconds."""

PARTS = ("collectives", "compute", "memory")  # What ``--only`` may name
LOST = "broke the device: "  # Begin of the reason of a point that is not tried again
WRITE_SECONDS = 1.0  # A result waits at most this long for the file, plus the time of one point
WORDS = {"world": "--ranks (of all nodes)", "local": "--ranks", "host": "the host", "name": "the device"}
"""Keys of the header, as a user knows them."""
CLOCKS = {
    "cuda_events": "device events around the kernels",
    "wall": "monotonic clock of a synchronised host",
    "cpu": "processor time of the process, all its threads",
}
"""The clocks, and what each counts."""


@record
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


@record
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


@record
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


@record
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
    health: bool = False  # Check the links between all ranks instead of measuring a profile

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


def digest(data: dict[str, Any]) -> str:
    """Of what a journal holds: nobody's edit or half a disk's failure becomes a measurement."""
    parts = {name: data[name] for name in ("header", "measured", "failed")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """Results of a running profile in one JSON file written whole: a header that says which machine and device they belong to, the
    points measured and those that failed with their reason. ``--resume`` measures only the rest. Use it as a context manager: it
    is written when the block ends, however it ends."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """A new journal; without a path it stays in memory (ranks other than the first)."""
        self.path = path
        self.header = header
        self._measured: dict[Point, Measured] = {}
        self._failed: dict[Point, str] = {}
        self._written = 0.0

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any]) -> Journal:
        """The journal of an earlier run, empty where there is none; what failed is tried again, unless it broke the device. Raises
        PlannerError where it is of another machine, or broken."""
        journal = cls.read(path, header) if path.exists() else cls(path, header)
        journal._failed = {point: reason for point, reason in journal.failed if reason.startswith(LOST)}
        return journal

    @classmethod
    def read(cls, path: Path, header: dict[str, Any] | None = None) -> Journal:
        """The journal of a finished or interrupted run with its failures, to make a profile of. Raises PlannerError."""
        if not path.exists():
            raise PlannerError(f"{path}: nothing was measured")
        journal = cls(path, header or {})
        data = library.parse_json(library.read_text(path), f"{path}: is not a journal of a profile")
        try:
            if data["digest"] != digest(data):
                raise PlannerError(f"{path}: was edited or damaged since it was written; run without --resume")
            measured = [Measured.from_dict(entry) for entry in data["measured"]]
            failed = {Point.from_dict(entry["point"]): entry["reason"] for entry in data["failed"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlannerError(f"{path}: is not a journal of a profile ({error}); run without --resume") from error
        for key, value in journal.header.items():
            before = data["header"].get(key)
            if before != value:
                raise PlannerError(
                    f"{path}: was measured with {WORDS.get(key, key)} {shown(before)}, now it is {shown(value)}; "
                    "run without --resume, which begins anew, or with another --output"
                )
        journal.header = {**data["header"], **journal.header}
        journal._measured = {found.point: found for found in measured}
        journal._failed = failed
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def __contains__(self, point: Point) -> bool:
        return point in self._measured

    def __len__(self) -> int:
        return len(self._measured)

    def of(self, *families: str) -> list[Measured]:
        """Everything measured in some families (all, without an argument), in the order measured."""
        return [found for found in self._measured.values() if not families or found.point.family in families]

    @property
    def failed(self) -> list[tuple[Point, str]]:
        """Points that could not be measured, with the reason."""
        return list(self._failed.items())

    def add(self, found: Measured) -> None:
        """Keep a result; the file follows within WRITE_SECONDS of further results, or when the block ends."""
        self._measured[found.point] = found
        self._failed.pop(found.point, None)
        self._write_sometimes()

    def fail(self, point: Point, reason: str) -> None:
        """Keep that a point could not be measured, and why."""
        self._failed[point] = reason
        self._write_sometimes()

    def _write_sometimes(self) -> None:
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """The file, whole."""
        if self.path is None:
            return
        data = {
            "header": self.header,
            "measured": [found.to_dict() for found in self._measured.values()],
            "failed": [{"point": point.to_dict(), "reason": reason} for point, reason in self._failed.items()],
        }
        data["digest"] = digest(data)
        library.write_whole(self.path, json.dumps(data, indent=0))
        self._written = time.monotonic()
