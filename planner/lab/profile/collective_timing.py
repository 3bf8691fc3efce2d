"""Times of collectives as a training job sees them: all groups of a pattern at once, the slowest rank counts; and overlap (torch).

A sample is a block of back-to-back runs between two readings of the clock, as in nccl-tests: on a GPU device events around the
block, on a CPU the monotonic clock; all ranks leave a barrier before each block. The sample is the longest over all ranks of
block / runs. The median, its interval and the outliers are of these samples.

Overlap: how much slower a GEMM gets while a collective runs, and the collective while GEMMs run. Both are timed alone first, on
all ranks at once, then together: the collective is started without waiting and GEMMs run until it has ended. On a CPU a thread
waits for the collective and reads the clock; the GEMMs are short against it (an eighth at most), so that the last one, which
outlasts it, counts little. On a GPU events are recorded on the stream of each.
"""

import contextlib
import math
import threading
import time
from statistics import median

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile.patterns import Pattern, collective_point, factor, in_words, pattern_of
from planner.lab.profile.points import Measured, Point, Run, Timing, Value
from planner.lab.profile.rank_groups import Buffers, Operation, Ranks
from planner.lab.profile.tensors import DTYPES
from planner.lab.profile.timing import FEWEST, measure, precise, slowest_group, slowest_of, summarise, taker

PRECISION = 0.05  # Half the interval of the median over the median at which a point is done
BLOCK_SECONDS = 2e-3
"""A block repeats a short collective until it lasts this long: leaving the barrier differs by tenths of a millisecond."""
LEAST, MOST = 7, 200
"""Samples of a point; a single run longer than a third of the budget is sampled at least three times."""
LONGEST_BLOCK = 500  # Runs in a block
CANNOT = (
    "not implemented", "not supported", "unsupported", "does not support", "invalid scalar type", "invalid data type",
)  # fmt: skip
"""Words in an exception that say that the library has no such collective: the same on every rank, before anything is sent."""
NONE_SUCH = "the library has none such"
SIDES = {"cpu": (64, 96, 128, 192, 256, 384, 512, 768, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of the square GEMMs to choose from for an overlap."""
JOINT, RUNS = 11, 8  # Joint runs; GEMMs in one of them where it is they that are timed
SHORTER = 8.0  # The collective lasts at least so many GEMMs
SIDE = {"cpu": 256, "cuda": 8192}
SECONDS = {"cpu": 0.2, "cuda": 2.0}  # Of the product that all ranks run at once, and of its budget


class NoSuchCollectiveError(PlannerError):
    """The library cannot run a collective with this type or backend; the others can still be measured."""


def measure_collective(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured | None:
    """One collective, on all ranks together; the result on every rank, None where the pattern leaves no group.

    Raises PlannerError on every rank where a result was wrong. What hangs or dies ends in ``ranks.watch``.
    """
    pattern = pattern_of(point)
    everyone = pattern.groups(ranks.world)
    if not everyone:
        return None
    op, size, dtype = point.each("op", "size", "dtype")
    with ranks.watch.doing(in_words(point), everyone[0]):
        group = ranks.group(pattern)
        operation = Operation(op, size, dtype, group, buffers) if group else None
        _check(operation, ranks, point)
        if operation:
            operation.calm()
        samples, own = _sample(operation, ranks, budget_s)
        ranks.watch.again()
        _check(operation, ranks, point)
        several: dict[str, Value] = {}
        if len(everyone) >= FEWEST and size >= units.MIB:  # a slow link shows in the group that it is in
            several["slowest_group"], several["over_median"] = slowest_group(everyone, ranks.collect(median(own)))
    found = summarise(samples, "cuda_events" if ranks.device == "cuda" else "wall")
    return found.measured(point, bus_bandwidth=size / found.median * factor(op, pattern.n), **several)


def _check(operation: Operation | None, ranks: Ranks, point: Point) -> None:
    """Runs it once on a known content and compares every element; the first run also makes the connections."""
    wrong = ""
    if operation:
        operation.fill()
        try:
            operation.run()
            if ranks.device == "cuda":
                torch.cuda.synchronize()
            wrong = operation.wrong()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            if not any(word in str(error).lower() for word in CANNOT):
                raise
            wrong = f"{NONE_SUCH}: {str(error).strip().splitlines()[0][:200]}"
    if ranks.slowest([float(bool(wrong))])[0]:
        texts = {rank: text for rank, text in enumerate(ranks.collect(wrong)) if text}
        rank, text = next(iter(texts.items()))
        if all(one.startswith(NONE_SUCH) for one in texts.values()):
            raise NoSuchCollectiveError(f"{in_words(point)}: {text}")
        raise PlannerError(
            f"{in_words(point)} returned wrong data on {ranks.watch.where(rank)}: {text}; "
            "the profile is void until the cause is found"
        )


def _sample(operation: Operation | None, ranks: Ranks, budget_s: float) -> tuple[list[float], list[float]]:
    """Samples of the slowest rank, and those of this one (0 where it only waits). All ranks leave a barrier before each block,
    and decide alike: by the slowest's.

    On a GPU the barrier is an all-reduce of one element queued before the first event, so that the devices start together and the
    host runs ahead of them; a collective makes the current stream wait for its own.
    """
    run: Run = operation.run if operation else lambda: None
    timed = taker(run, "wall", ranks.barrier)
    if ranks.device == "cuda":
        one, everyone = torch.zeros(1, device="cuda"), ranks.group(Pattern(n=ranks.world, stride=1))
        timed = taker(run, "cuda_events", lambda: torch.distributed.all_reduce(one, group=everyone))

    def take(count: int, inner: int) -> list[float]:
        return [one if operation else 0.0 for one in timed(count, inner)]

    pilot = ranks.slowest(take(2, 1))
    inner = max(1, min(LONGEST_BLOCK, math.ceil(BLOCK_SECONDS / max(min(pilot), 1e-9))))
    samples: list[float] = []
    own: list[float] = []
    spent = sum(pilot)
    while len(samples) < MOST:
        ranks.watch.again()
        mine = take(3 if len(samples) < LEAST else min(len(samples), 25), inner)
        new = ranks.slowest(mine)
        own += mine
        samples += new
        spent += inner * sum(new)
        enough = len(samples) >= (LEAST if 3.0 * max(new) * inner < budget_s else 3)
        if precise(samples, PRECISION) or (spent > budget_s and enough):
            break
    return samples, own


def rank_point(device: str) -> Point:
    """The same product on every rank at the same time."""
    return Point.of("ranks", m=SIDE[device], dtype="bf16" if device == "cuda" else "fp32")


def measure_ranks(point: Point, ranks: Ranks) -> Measured:
    """Seconds of one product on the slowest rank while all ranks run it; details name it and compare it with the median."""
    product = _square(point["m"], point["dtype"], ranks.device)
    budget, clock = SECONDS[ranks.device], "cpu" if ranks.device == "cpu" else "cuda_events"
    with ranks.watch.doing("a product on every rank", list(range(ranks.world)), ranks.timeout + 10.0 * budget):
        ranks.barrier()
        found = measure(product, device=ranks.device, clock=clock, budget_s=budget)
        all_ranks = ranks.collect(found.median)
    slowest, ratio = slowest_of(all_ranks)
    return summarise([all_ranks[slowest]], clock).measured(
        point, slowest=slowest, host=ranks.hosts[slowest], over_median=ratio, ranks=len(all_ranks)
    )


# ------------------------------------------------------------------------------------------------ overlap


def measure_overlap(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured:
    """``median`` is the time while the other runs; details hold the time alone and their ratio. All ranks together."""
    pattern, (of, op, size, dtype) = pattern_of(point), point.each("of", "op", "size", "dtype")
    alone = measure_collective(collective_point(op, pattern, size, dtype, ranks.local), ranks, buffers, budget_s / 3.0)
    group = ranks.group(pattern)
    if alone is None or group is None:
        raise PlannerError(f"overlap in groups of {pattern.n}: the ranks do not fill them")
    operation = Operation(op, size, dtype, group, buffers)
    operation.calm()
    with ranks.watch.doing(in_words(point), operation.ranks):
        gemm, gemm_alone, side = _gemm_within(alone.median, ranks, dtype)
        both = []
        for _ in range(JOINT):
            ranks.watch.again()
            if ranks.device == "cuda":
                both.append(_joint_on_gpu(operation, gemm, ranks, of, alone.median / gemm_alone.median))
            else:
                both.append(_joint_on_cpu(operation, gemm, ranks, of))
    timing, before = summarise(ranks.slowest(both), alone.clock), gemm_alone if of == "gemm" else alone
    return timing.measured(
        point, alone=before.median, slowdown=timing.median / before.median,
        spread=math.hypot(timing.spread, before.spread), gemm=side,
    )  # fmt: skip


def _gemm_within(collective_seconds: float, ranks: Ranks, dtype: str) -> tuple[Run, Timing, int]:
    """The largest GEMM of which SHORTER fit into the collective while every rank runs it; its time on the slowest, and its side."""
    found: tuple[Run, Timing, int] | None = None
    for side in SIDES[ranks.device]:
        gemm = _square(side, dtype, ranks.device)
        take = taker(gemm, "cuda_events") if ranks.device == "cuda" else taker(gemm, "wall", ranks.barrier)
        gemm()
        alone = summarise(ranks.slowest(take(7, RUNS)), "wall")
        if found and SHORTER * alone.median > collective_seconds:
            break
        found = gemm, alone, side
    assert found is not None
    return found


def _square(side: int, dtype: str, device: str) -> Run:
    a, b, out = (torch.ones(side, side, dtype=DTYPES[dtype], device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _joint_on_cpu(operation: Operation, gemm: Run, ranks: Ranks, of: str) -> float:
    """One collective with GEMMs until it has ended: seconds of the mean GEMM, or of the collective.

    A thread waits for the collective and reads the clock: not every work of gloo says that it is completed before somebody
    waits for it (reduce_scatter does not).
    """
    ranks.barrier()
    ends: list[float] = []
    count, start = 0, time.perf_counter()
    work = operation.start()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # raised again below, where the watch sees it
            work.wait()
        ends.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not ends and time.perf_counter() - start < ranks.timeout:
        gemm()
        count += 1
    seconds = time.perf_counter() - start
    waiting.join()
    work.wait()
    return seconds / max(count, 1) if of == "gemm" else ends[0] - start


def _joint_on_gpu(operation: Operation, gemm: Run, ranks: Ranks, of: str, ratio: float) -> float:
    """Enough collectives queued to cover some GEMMs, or the other way round; events around what is asked for. ``ratio`` is the time
    of a collective over that of a GEMM."""
    torch.cuda.synchronize()
    ranks.barrier()
    if of == "gemm":
        works = [operation.start() for _ in range(2 + int(2.0 * RUNS / ratio))]
        seconds = taker(gemm, "cuda_events")(1, RUNS)[0]
        for work in works:
            work.wait()
        return seconds
    for _ in range(4 + int(3.0 * ratio)):
        gemm()
    with torch.cuda.stream(torch.cuda.Stream()):
        # this stream waits for the collective, the host does not
        return taker(lambda: operation.start().wait(), "cuda_events")(1, 1)[0]
