"""How one thing is timed: warm-up, the right clock, repetitions until the median is known, outliers counted.

The median of n samples lies between the k-th smallest and the k-th largest with probability
1 - 2 sum_{i<k} C(n, i) / 2^n, whatever the samples' distribution [order statistics; David and Nagaraja, 2003, 7.1];
the interval that is reported is the narrowest of these with at least the asked confidence.

Before the first point a warm-up, then operators and whole layers in rounds: clocks and load are the same for both. A processor that
was idle, or whose core others use too, and a GPU that clocks up, run at another rate for seconds. Points of one operator are
therefore measured several times, a round apart, with all others in between.

Drift: heat, clocks, other jobs and the modes of a library move a median from minute to minute, which no interval shows; a later
profile differs by that. Some points, the references, are measured again until the end; the scatter of these rounds estimates it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from statistics import fmean, median, variance

from planner.errors import PlannerError
from planner.lab.profile.points import CLOCKS, Journal, Measured, Point, Run, Taker, Timing

CONFIDENCE = 0.95  # Chance that the interval holds the median
PRECISION = 0.02  # Half the interval over the median at which measuring stops early
LEAST, MOST = 7, 2000  # Samples: fewer than six cannot give 95 percent; more are not taken however much time is left
OUTLIER = 5.0
"""Robust deviations (1.4826 x median absolute deviation) from the median beyond which a sample is called an outlier."""
SAME = 0.001  # Difference over the median below which samples are equal: equal samples have no deviation
TRIES = 4  # Blocks that the device began too early are taken again with twice the spin, at most so often
SAMPLE_SECONDS = {"cuda_events": 50e-6, "wall": 20e-6, "cpu": 500e-6}
"""A sample repeats a shorter run until it lasts this long: events and clocks tick in 0.5 us to 1 us, processor time of the
kernel is charged in steps of some us."""
FEWEST = 3  # Of fewer ranks or groups none is an outlier
ROUNDS = {"cpu": 5, "cuda": 3}
"""Times that each point is measured where the budget lasts; the time of a visit leaves that much for the others."""
IN_ROUNDS = ("gemm", "grouped_gemm", "attention", "memory_bound", "layer")
"""Families that are measured in rounds; clocks, launches, copies and facts of the memory are measured once."""
WARM_UP_LIMIT = {"cpu": 6.0, "cuda": 15.0}  # Seconds after which measuring begins whether rates are steady or not
WARM_UP_SHARE = 0.1  # Part of the budget that the warm-up takes at most
BLOCK_SECONDS = 0.1
STEADY, WINDOW = 0.02, 5
"""Rates are steady when the medians of the last WINDOW blocks and of the WINDOW blocks before differ by less than STEADY."""
DRIFT_ROUNDS = 12  # Rounds of the references of a part that has its whole budget
DRIFT_SHARE = 0.1  # Part of the time that they may take: fewer are made where they are long against the budget
DRIFT_SECONDS = 0.02  # Budget of one point of a round; a run that is longer is still timed three times
LONGEST = 0.05  # Seconds: a reference must not eat the budget
ALONE = ("gemm", "attention", "memory_bound")  # Families whose first short points are references
EACH_ALONE = 3  # More average the scatter of single points out, which is no drift
TOGETHER = ("all_reduce", "all_gather", "all_to_all")
"""Collectives that are references at two sizes, in one group inside a node and one across."""
EACH = 2


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
    below = accumulate(
        math.comb(count, i) for i in range((count + 1) // 2)
    )  # whole numbers: 2^-n is no float from n = 1075 on
    chances = [1.0 - 2 * sum_ / 2**count for sum_ in below]
    rank = max((k for k, chance in enumerate(chances, 1) if chance >= CONFIDENCE), default=1)
    return rank, max(chances[rank - 1], 0.0)


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


def measure(
    run: Run, *, device: str, budget_s: float, clock: str = "", yardstick: Yardstick | None = None, ahead: bool = True
) -> Timing:
    """Time ``run`` until its median is known to PRECISION or the budget is spent, at least LEAST times (three times where
    that takes more than three budgets). ``clock`` defaults to device events on a GPU and to wall time on a CPU. With a
    ``yardstick`` samples are what they would be at its reference, and the detail ``slowed`` is the median of y / y_0. On a GPU
    runs are queued before the device begins, but not without ``ahead``; the detail ``queued`` is False where that failed."""
    clock = clock or ("cuda_events" if device == "cuda" else "wall")
    if clock not in CLOCKS or (clock == "cuda_events") != (device == "cuda"):
        raise PlannerError(f"the clock '{clock}' does not fit the device '{device}'")
    take = taker(run, clock, yardstick=yardstick, ahead=ahead)
    begun = time.perf_counter()
    take(1, 1)
    first = max(time.perf_counter() - begun, 1e-9)
    inner = max(1, math.ceil(SAMPLE_SECONDS[clock] / max(take(1, 1)[0], 1e-9)))
    inner = min(inner, int(getattr(run, "most_inner", inner)))
    while time.perf_counter() - begun < min(0.1 * budget_s, 0.5):  # caches, clocks and lazy loading settle
        take(1, inner)
    samples: list[float] = []
    full = True  # the queue
    begun, slowed = time.perf_counter(), yardstick.slowed if yardstick else []
    slowed.clear()
    while len(samples) < MOST:
        one = inner * (samples[-1] if samples else first)
        block = int(5e-3 / max(one, 1e-9))  # so that asking costs little and events queue up
        some = max(1, min(100, block, len(samples) or LEAST))
        new, full = ahead_of(take, some, inner) if full else (take(some, inner), False)
        samples += new
        spent = time.perf_counter() - begun
        enough = LEAST if spent <= 3.0 * budget_s else 3
        if precise(samples) or (spent > budget_s and len(samples) >= enough):
            break
    found = summarise(samples, clock)
    rate = median(slowed) if slowed else 1.0
    return replace(
        found, details=({"slowed": round(rate, 4)} if rate != 1.0 else {}) | ({} if full else {"queued": False})
    )


def ahead_of(take: Taker, count: int, inner: int, agree: Callable[[float], float] = float) -> tuple[list[float], bool]:
    """A block of samples that were all queued before the device began them, and whether they were: a run that waits for the
    device never is. ``agree`` makes one number of those of all ranks, so that they decide alike. Other clocks queue nothing."""
    samples: list[float] = []
    for _ in range(TRIES):
        samples = take(count, inner)
        if not agree(float(getattr(take, "late", 0))):
            return samples, True
        take.wider()  # type: ignore[attr-defined]  # what was late is an EventTaker
    return samples, False


def taker(
    run: Run, clock: str, before: Run | None = None, yardstick: Yardstick | None = None, *, ahead: bool = True
) -> Taker:
    """By a clock; ``before`` each sample, untimed. With a ``yardstick`` at the rate that it had at its reference. On a GPU the
    queue is full before a sample begins, but not without ``ahead``."""
    if clock == "cuda_events":
        from planner.lab.profile.device_timing import EventTaker

        return EventTaker(run, before or getattr(run, "before", None), ahead=ahead)
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


# ------------------------------------------------------------------------------------------------ rounds and drift


def steady(blocks: Sequence[float]) -> bool:
    """Whether the last two windows of seconds per run agree."""
    if len(blocks) < 2 * WINDOW:
        return False
    return abs(median(blocks[-WINDOW:]) / median(blocks[-2 * WINDOW : -WINDOW]) - 1.0) < STEADY


def warm_up(run: Callable[[], float], limit: float) -> tuple[list[float], float]:
    """Runs until rates are steady or the limit is over: seconds per run of each block, and how long it took."""
    begun = time.perf_counter()
    blocks: list[float] = []
    while not steady(blocks) and time.perf_counter() - begun < limit:
        start, samples = time.perf_counter(), []
        while time.perf_counter() - start < BLOCK_SECONDS:
            samples.append(run())
        blocks.append(median(samples))
    return blocks, time.perf_counter() - begun


class Rounds(dict[Point, list[Measured]]):
    """What each point gave in every round, and which round counts."""

    def add(self, found: Measured) -> Measured:
        """The round that counts so far: the middle one, with ``over_rounds``, the slowest median over the quickest less one."""
        every = self.setdefault(found.point, [])
        every.append(found)
        if len(every) == 1:
            return found
        ordered = sorted(every, key=lambda one: one.median)
        best, slowest = ordered[(len(ordered) - 1) // 2], round(ordered[-1].median / ordered[0].median - 1.0, 4)
        return best.measured(best.point, rounds=len(every), over_rounds=slowest)


def schedule(points: Sequence[Point], rounds: int) -> list[Point]:
    """Visits in their order: points up to the last whole layer, the weightiest, twice (operators and layers of one time come before
    shapes that no layout lives on); the others once; all again."""
    end = max((number + 1 for number, point in enumerate(points) if point.family == "layer"), default=0)
    parts = points[:end], points[end:]
    again = [[point for point in part if point.family in IN_ROUNDS] for part in parts]
    return [*parts[0], *again[0], *parts[1], *again[1], *(again[0] + again[1]) * (rounds - 2)]


def references_alone(journal: Journal) -> list[Point]:
    """References among what rank 0 has measured alone."""
    return [
        point for family in ALONE
        for point in [one.point for one in journal.of(family) if one.median <= LONGEST][:EACH_ALONE]
    ]  # fmt: skip


def references_together(points: Sequence[Point]) -> list[Point]:
    """References among the collectives, the same on every rank: two sizes of three operations in the largest group of a
    node, and in the first that leaves it. ``points`` start with those that are measured whatever the budget."""
    found: list[Point] = []
    for across in (False, True):
        mine = [one for one in points if one["op"] in TOGETHER and (one["nodes"] > 1) == across]
        n = mine[0]["n"] if across and mine else max((one["n"] for one in mine), default=0)
        for op in TOGETHER:
            alike = [one for one in mine if one["op"] == op and one["n"] == n]
            found += sorted(alike, key=lambda one: one["size"])[-EACH:]
    return found


def measure_again(references: Iterable[Point], journal: Journal, measure: Callable[[Point], Measured | None]) -> float:
    """Adds the next round of the references to the journal; the seconds that it took."""
    begun = time.monotonic()
    for point in references:
        if found := measure(point):
            turn = 1 + sum(_original(one.point) == point for one in journal.of("again"))
            again = Point.of("again", **point.values, of_family=point.family, turn=turn)
            journal.add(replace(found, point=again))
    return time.monotonic() - begun


def _original(point: Point) -> Point:
    key = tuple(pair for pair in point.key if pair[0] not in ("of_family", "turn"))
    return Point(family=point["of_family"], key=key)


class Due:
    """When the next round of the references is due: DRIFT_ROUNDS of them over the seconds of a part."""

    def __init__(self, seconds: float) -> None:
        self._each = max(seconds, 0.0) / DRIFT_ROUNDS
        self._next = time.monotonic() + self._each

    def now(self) -> bool:
        """Whether one is due."""
        return self._each > 0.0 and time.monotonic() >= self._next

    def done(self, seconds: float) -> None:
        """A round took so long: the next waits until it is due, and until rounds are DRIFT_SHARE of the time again."""
        self._next = time.monotonic() + max(self._each, seconds * (1.0 / DRIFT_SHARE - 1.0))


def drift(journal: Journal) -> dict[str, dict[str, float]]:
    """By family: ``percent``, the standard deviation of one round's common shift, and ``rounds``, its degrees of freedom.

    The shift of a round is the mean over its references of ln(t / t_mean): what moves all of a family alike. The scatter
    of single points about it is seen where two profiles are compared. The first measurement is round 0. A family of collectives
    is stated inside a node and across apart.
    """
    families: dict[str, dict[Point, dict[int, float]]] = {}
    first = {one.point: one for one in journal.of()}
    for one in journal.of("again"):
        family, reference = one.point["of_family"], _original(one.point)
        if family == "collective":
            family += " across" if one.point["nodes"] > 1 else " inside"
        series = families.setdefault(family, {}).setdefault(reference, {})
        series[one.point["turn"]] = math.log(one.median)
        if reference in first:
            series[0] = math.log(first[reference].median)
    found = {}
    for family, mine in sorted(families.items()):
        turns = sorted(set.intersection(*(set(values) for values in mine.values())))
        if len(turns) < 3:
            continue
        means = [(values, fmean(values[turn] for turn in turns)) for values in mine.values()]
        shifts = [fmean(values[turn] - mean for values, mean in means) for turn in turns]
        found[family] = {"percent": round(100.0 * math.sqrt(variance(shifts)), 2), "rounds": float(len(turns) - 1)}
    return found
