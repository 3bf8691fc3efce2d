"""How one thing is timed: warm-up, the right clock, repetitions until the median is known, outliers counted.

The median of n samples lies between the k-th smallest and the k-th largest with probability
1 - 2 sum_{i<k} C(n, i) / 2^n, whatever the samples' distribution [order statistics; David and Nagaraja, 2003, 7.1];
the interval that is reported is the narrowest of these with at least the asked confidence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

from planner.errors import PlannerError
from planner.lab.profile.points import CLOCKS, Run, Taker, Timing

CONFIDENCE = 0.95  # Chance that the interval holds the median
PRECISION = 0.02  # Half the interval over the median at which measuring stops early
LEAST, MOST = 7, 2000  # Samples: fewer than six cannot give 95 percent; more are not taken however much time is left
OUTLIER = 5.0
"""Robust deviations (1.4826 x median absolute deviation) from the median beyond which a sample is called an outlier."""
SAME = 0.001  # Difference over the median below which samples are equal: equal samples have no deviation
SAMPLE_SECONDS = {"cuda_events": 50e-6, "wall": 20e-6, "cpu": 500e-6}
"""A sample repeats a shorter run until it lasts this long: events and clocks tick in 0.5 us to 1 us, processor time of the
kernel is charged in steps of some us."""
FEWEST = 3  # Of fewer ranks or groups none is an outlier


@dataclass(kw_only=True)
class Yardstick:
    """A short piece of work that runs before and after each sample on a processor whose core others use too.

    A neighbour on the same core or the same cache slows a sample down by up to two, for milliseconds or for minutes, and
    processor time does not leave it out. The piece is slowed as much: t = t_sample y_0 / y, y the mean of both its runs and
    y_0 what it took when measuring began. Operators and whole layers are then times of one and the same machine.
    """

    run: Run  # Product and addition of a layer's kind
    reference: float  # y_0, processor seconds: the quickest tenth of its first runs
    slowed: list[float] = field(default_factory=list)  # y / y_0 of each sample

    @classmethod
    def of(cls, run: Run, runs: int) -> Yardstick:
        """With the reference of so many first runs."""
        found = cls(run=run, reference=1.0)
        return replace(found, reference=sorted(found.seconds() for _ in range(runs))[runs // 10])

    def seconds(self) -> float:
        """Processor seconds of one run."""
        start = time.process_time()
        self.run()
        return time.process_time() - start


@cache
def interval_rank(count: int) -> tuple[int, float]:
    """(k, chance): the k-th smallest and k-th largest of ``count`` samples hold the median with that chance.

    chance = 1 - 2 sum_{i<k} C(n, i) / 2^n; k is the largest with chance >= CONFIDENCE, or 1 where none has it.
    """
    rank, term, below = 1, 1, 1  # whole numbers: 2^-n is no float from n = 1075 on
    while rank < (count + 1) // 2:
        term = term * (count - rank + 1) // rank
        if 1.0 - 2 * (below + term) / 2**count < CONFIDENCE:
            break
        rank, below = rank + 1, below + term
    return rank, max(1.0 - 2 * below / 2**count, 0.0)


def summarise(samples: Sequence[float], clock: str) -> Timing:
    """Median, its interval, and the outliers of samples in seconds. All samples count."""
    if not samples:
        raise PlannerError("nothing was timed: no sample was taken")
    ordered, middle = sorted(samples), median(samples)
    rank, chance = interval_rank(len(ordered))
    beyond = max(OUTLIER * 1.4826 * median(abs(sample - middle) for sample in ordered), SAME * middle)
    return Timing(
        median=middle, low=ordered[rank - 1], high=ordered[-rank], repetitions=len(ordered), clock=clock,
        outliers=sum(abs(sample - middle) > beyond for sample in ordered), confidence=chance,
    )  # fmt: skip


def precise(samples: Sequence[float], precision: float = PRECISION) -> bool:
    """Whether half the interval of the median is within ``precision`` of it, at CONFIDENCE."""
    if len(samples) < LEAST:
        return False
    found = summarise(samples, "wall")
    return found.confidence >= CONFIDENCE and found.spread <= precision


def measure(run: Run, *, device: str, budget_s: float, clock: str = "", yardstick: Yardstick | None = None) -> Timing:
    """Time ``run`` until its median is known to PRECISION or the budget is spent, at least LEAST times (three times where
    that takes more than three budgets). ``clock`` defaults to device events on a GPU and to wall time on a CPU. With a
    ``yardstick`` samples are what they would be at its reference, and the detail ``slowed`` is the median of y / y_0."""
    clock = clock or ("cuda_events" if device == "cuda" else "wall")
    if clock not in CLOCKS or (clock == "cuda_events") != (device == "cuda"):
        raise PlannerError(f"the clock '{clock}' does not fit the device '{device}'")
    take = taker(run, clock, yardstick=yardstick)
    begun = time.perf_counter()
    take(1, 1)
    first = max(time.perf_counter() - begun, 1e-9)
    inner = max(1, math.ceil(SAMPLE_SECONDS[clock] / max(take(1, 1)[0], 1e-9)))
    while time.perf_counter() - begun < min(0.1 * budget_s, 0.5):  # caches, clocks and lazy loading settle
        take(1, inner)
    samples: list[float] = []
    begun, slowed = time.perf_counter(), yardstick.slowed if yardstick else []
    slowed.clear()
    while len(samples) < MOST:
        one = inner * (samples[-1] if samples else first)
        block = int(5e-3 / max(one, 1e-9))  # so that asking costs little and events queue up
        samples += take(max(1, min(100, block, len(samples) or LEAST)), inner)
        spent = time.perf_counter() - begun
        enough = LEAST if spent <= 3.0 * budget_s else 3
        if precise(samples) or (spent > budget_s and len(samples) >= enough):
            break
    found = summarise(samples, clock)
    rate = median(slowed) if slowed else 1.0
    return replace(found, details=(("slowed", round(rate, 4)),)) if rate != 1.0 else found


def taker(run: Run, clock: str, before: Run | None = None, yardstick: Yardstick | None = None) -> Taker:
    """By a clock; ``before`` each sample, untimed. With a ``yardstick`` at the rate that it had at its reference."""
    if clock == "cuda_events":
        from planner.lab.profile.tensors import event_taker

        return event_taker(run, before)
    tick = time.process_time if clock == "cpu" else time.perf_counter

    def take(count: int, inner: int) -> list[float]:
        samples = []
        early = yardstick.seconds() if yardstick else 0.0
        for _ in range(count):
            if before:
                before()
            start = tick()
            for _ in range(inner):
                run()
            seconds = (tick() - start) / inner
            if yardstick:
                late = yardstick.seconds()
                yardstick.slowed.append(0.5 * (early + late) / yardstick.reference)
                seconds, early = seconds / yardstick.slowed[-1], late
            samples.append(seconds)
        return samples

    return take


def slowest_of(seconds: Sequence[float]) -> tuple[int, float]:
    """Place of the longest, and its ratio to the median of the others."""
    slowest = max(range(len(seconds)), key=lambda place: seconds[place])
    others = median([*seconds[:slowest], *seconds[slowest + 1 :]] or [0.0])
    return slowest, seconds[slowest] / others if others > 0 else 1.0


def slowest_group(groups: Sequence[Sequence[int]], seconds: Sequence[float]) -> tuple[str, float]:
    """The group with the longest time on any of its ranks, as text, and its ratio to the median of the other groups."""
    slowest, ratio = slowest_of([max(seconds[rank] for rank in group) for group in groups])
    return " ".join(map(str, groups[slowest])), ratio
