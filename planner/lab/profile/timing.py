"""How one thing is timed: warm-up, the right clock, repetitions until the median is known, outliers counted.

The median of n samples lies between the k-th smallest and the k-th largest with probability
1 - 2 sum_{i<k} C(n, i) / 2^n, whatever the samples' distribution [order statistics; David and Nagaraja, 2003, 7.1];
the interval that is reported is the narrowest of these with at least the asked confidence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from planner.errors import PlannerError
from planner.lab.profile.points import CLOCKS, Measured, Point, Value

CONFIDENCE = 0.95
"""Chance that the interval holds the median."""
PRECISION = 0.02
"""Half the interval over the median at which measuring stops early."""
LEAST, MOST = 7, 2000
"""Samples: fewer than six cannot give 95 percent; more are not taken however much time is left."""
OUTLIER = 5.0
"""Robust deviations (1.4826 x median absolute deviation) from the median beyond which a sample is called an outlier."""
SAME = 0.001
"""Difference over the median below which samples are equal: equal samples have no deviation."""
SAMPLE_SECONDS = {"cuda_events": 50e-6, "wall": 20e-6, "cpu": 500e-6}
"""A sample repeats a shorter run until it lasts this long: events and clocks tick in 0.5 us to 1 us, processor time of the
kernel is charged in steps of some us."""


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A short piece of work that runs before and after each sample on a processor whose core others use too.

    A neighbour on the same core or the same cache slows a sample down by up to two, for milliseconds or for minutes, and
    processor time does not leave it out. The piece is slowed as much: t = t_sample y_0 / y, y the mean of both its runs and
    y_0 what it took when measuring began. Operators and whole layers are then times of one and the same machine.
    """

    run: Callable[[], object]
    """Product and addition of a layer's kind."""
    reference: float
    """y_0, processor seconds: the quickest tenth of its first runs."""

    def seconds(self) -> float:
        """Processor seconds of one run."""
        start = time.process_time()
        self.run()
        return time.process_time() - start


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median seconds of one run with what is known about it; ``Measured`` without the point."""

    median: float
    """Seconds."""
    low: float
    """Lower end of the interval of the median."""
    high: float
    """Upper end."""
    repetitions: int
    """Samples."""
    outliers: int
    """Samples beyond OUTLIER deviations, kept."""
    clock: str
    """One of points.CLOCKS."""
    confidence: float
    """Chance that low..high holds the median; below CONFIDENCE where there were fewer than six samples."""
    least: float
    """Shortest sample, seconds."""
    longest: float
    """Longest sample, seconds."""
    slowed: float = 1.0
    """Median of y / y_0 where a yardstick was used."""

    @property
    def spread(self) -> float:
        """Half the width of the interval over the median."""
        return 0.5 * (self.high - self.low) / self.median if self.median > 0 else 0.0

    def measured(self, point: Point, **details: Value) -> Measured:
        """The result for a point."""
        details |= {"slowed": round(self.slowed, 4)} if self.slowed != 1.0 else {}
        return Measured(
            point=point, median=self.median, low=self.low, high=self.high, repetitions=self.repetitions,
            outliers=self.outliers, clock=self.clock, confidence=self.confidence,
            details=tuple(sorted(details.items())),
        )  # fmt: skip


@cache
def interval_rank(count: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """(k, chance): the k-th smallest and k-th largest of ``count`` samples hold the median with that chance.

    chance = 1 - 2 sum_{i<k} C(n, i) / 2^n; k is the largest with chance >= confidence, or 1 where none has it.
    """
    rank, term, below = 1, 1, 1  # whole numbers: 2^-n is no float from n = 1075 on
    chance = 1.0 - 2 * below / 2**count
    while rank < (count + 1) // 2:
        term = term * (count - rank + 1) // rank
        below += term
        if 1.0 - 2 * below / 2**count < confidence:
            break
        rank, chance = rank + 1, 1.0 - 2 * below / 2**count
    return rank, max(chance, 0.0)


def middle(ordered: Sequence[float]) -> float:
    """Median of sorted numbers."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def summarise(samples: Sequence[float], clock: str, confidence: float = CONFIDENCE) -> Timing:
    """Median, its interval, and the outliers of samples in seconds. All samples count."""
    if not samples:
        raise PlannerError("nothing was timed: no sample was taken")
    if clock not in CLOCKS:
        raise PlannerError(f"unknown clock '{clock}'; known: {', '.join(CLOCKS)}")
    ordered = sorted(samples)
    median = middle(ordered)
    rank, chance = interval_rank(len(ordered), confidence)
    deviation = 1.4826 * middle(sorted(abs(sample - median) for sample in ordered))
    beyond = max(OUTLIER * deviation, SAME * median)
    return Timing(
        median=median, low=ordered[rank - 1], high=ordered[-rank], repetitions=len(ordered), clock=clock,
        outliers=sum(abs(sample - median) > beyond for sample in ordered), confidence=chance,
        least=ordered[0], longest=ordered[-1],
    )  # fmt: skip


def precise(samples: Sequence[float], precision: float = PRECISION, confidence: float = CONFIDENCE) -> bool:
    """Whether half the interval of the median is within ``precision`` of it, at the asked confidence."""
    if len(samples) < LEAST:
        return False
    found = summarise(samples, "wall", confidence)
    return found.confidence >= confidence and found.spread <= precision


def measure(
    run: Callable[[], object],
    *,
    device: str,
    clock: str = "",
    budget_s: float,
    precision: float = PRECISION,
    most: int = MOST,
    before: Callable[[], object] | None = None,
    yardstick: Yardstick | None = None,
) -> Timing:
    """Time ``run`` until its median is known to ``precision`` or the budget is spent, at least LEAST times.

    ``device`` is "cpu" or "cuda"; ``clock`` defaults to device events there and to wall time on a CPU. ``before`` runs
    untimed before each sample (to flush a cache); a sample is then one run, otherwise short runs are repeated within a
    sample (SAMPLE_SECONDS) and the sample is their mean. A run longer than the budget is still timed LEAST times only if
    that takes less than three budgets; never fewer than three times. With a ``yardstick`` samples are what they would be
    at its reference.
    """
    clock = clock or ("cuda_events" if device == "cuda" else "wall")
    if clock not in CLOCKS or (clock == "cuda_events") != (device == "cuda" and clock != "wall"):
        raise PlannerError(f"the clock '{clock}' does not fit the device '{device}'")
    slowed: list[float] = []
    take = _measured_taker(run, yardstick, slowed) if yardstick else _taker(run, before, clock, device)
    begun = time.perf_counter()
    take(1, 1)
    first = max(time.perf_counter() - begun, 1e-9)
    inner = 1 if before else max(1, math.ceil(SAMPLE_SECONDS[clock] / max(take(1, 1)[0], 1e-9)))
    while time.perf_counter() - begun < min(0.1 * budget_s, 0.5):  # caches, clocks and lazy loading settle
        take(1, inner)
    samples: list[float] = []
    begun = time.perf_counter()
    slowed.clear()
    while len(samples) < most:
        samples += take(_block(samples, inner, first), inner)
        spent = time.perf_counter() - begun
        if precise(samples, precision) or (spent > budget_s and len(samples) >= LEAST):
            break
        if spent > 3.0 * budget_s and len(samples) >= 3:
            break
    found = summarise(samples, clock)
    return replace(found, slowed=middle(sorted(slowed))) if slowed else found


def _measured_taker(
    run: Callable[[], object], yardstick: Yardstick, slowed: list[float]
) -> Callable[[int, int], list[float]]:
    """Processor time of each sample, at the rate that the yardstick had at its reference; ``slowed`` gets y / y_0."""

    def take(count: int, inner: int) -> list[float]:
        samples = []
        early = yardstick.seconds()
        for _ in range(count):
            start = time.process_time()
            for _ in range(inner):
                run()
            seconds = (time.process_time() - start) / inner
            late = yardstick.seconds()
            slowed.append(0.5 * (early + late) / yardstick.reference)
            samples.append(seconds / slowed[-1])
            early = late
        return samples

    return take


def _block(samples: Sequence[float], inner: int, first: float) -> int:
    """Samples to take before looking again: about 5 ms of them, so that asking costs little and events queue up."""
    one = inner * (samples[-1] if samples else first)
    return max(1, min(100, int(5e-3 / max(one, 1e-9)), LEAST if not samples else len(samples)))


def _taker(
    run: Callable[[], object], before: Callable[[], object] | None, clock: str, device: str
) -> Callable[[int, int], list[float]]:
    """``take(count, inner)``: that many samples, each the mean of ``inner`` runs, in seconds."""
    if clock == "cuda_events":
        return _event_taker(run, before)
    tick = time.process_time if clock == "cpu" else time.perf_counter
    wait = _synchroniser(device)

    def take(count: int, inner: int) -> list[float]:
        samples = []
        for _ in range(count):
            if before:
                before()
            wait()
            start = tick()
            for _ in range(inner):
                run()
            wait()
            samples.append((tick() - start) / inner)
        return samples

    return take


def _synchroniser(device: str) -> Callable[[], object]:
    if device != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _event_taker(run: Callable[[], object], before: Callable[[], object] | None) -> Callable[[int, int], list[float]]:
    """Device events around each sample; a block of samples is queued before the host waits, so that the device never
    idles between an event and its kernel (elapsed_time is in milliseconds)."""
    import torch

    from planner import units

    def take(count: int, inner: int) -> list[float]:
        pairs: list[tuple[Any, Any]] = []
        for _ in range(count):
            if before:
                before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / units.KILO / inner for start, end in pairs]

    return take
