"""How much slower a GEMM gets while a collective runs, and the collective while GEMMs run (torch).

Both are timed alone first, on all ranks at once, then together: the collective is started without waiting and GEMMs run until it
has ended. On a CPU a thread waits for the collective and reads the clock; the GEMMs are short against it (an eighth at most),
so that the last one, which outlasts it, counts little. On a GPU events are recorded on the stream of each.
"""

import contextlib
import math
import threading
import time
from dataclasses import dataclass

import torch

from planner.errors import PlannerError
from planner.lab.profile.collective_timing import measure_collective
from planner.lab.profile.operations import Buffers, Operation
from planner.lab.profile.patterns import collective_point, in_words, pattern_of
from planner.lab.profile.points import Measured, Point, Run, Timing
from planner.lab.profile.rank_groups import Ranks
from planner.lab.profile.tensors import DTYPES
from planner.lab.profile.timing import summarise, taker

SIDES = {"cpu": (64, 96, 128, 192, 256, 384, 512, 768, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of the square GEMMs to choose from."""
SAMPLES, RUNS = 11, 8  # Joint runs; GEMMs in one of them where it is they that are timed
SHORTER = 8.0  # The collective lasts at least so many GEMMs


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A collective and a GEMM on this rank, and how long each takes alone on the slowest."""

    operation: Operation
    gemm: Run
    collective_seconds: float
    alone: Timing  # Of the GEMM
    side: int


def measure_overlap(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured:
    """``median`` is the time while the other runs; details hold the time alone and their ratio. All ranks together."""
    pattern, (of, op, size, dtype) = pattern_of(point), point.each("of", "op", "size", "dtype")
    alone = measure_collective(collective_point(op, pattern, size, dtype, ranks.local), ranks, buffers, budget_s / 3.0)
    group = ranks.group(pattern)
    if alone is None or group is None:
        raise PlannerError(f"overlap in groups of {pattern.n}: the ranks do not fill them")
    operation = Operation(op, size, dtype, group, buffers)
    operation.calm()
    with ranks.watch.doing(in_words(point), group.ranks):
        pair = _pair(operation, alone.median, ranks, dtype)
        run = _joint_on_gpu if ranks.device == "cuda" else _joint_on_cpu
        both = [run(pair, ranks, of) for _ in range(SAMPLES)]
    timing = summarise(ranks.slowest(both), alone.clock)
    before = pair.alone if of == "gemm" else alone
    return timing.measured(
        point, alone=before.median, slowdown=timing.median / before.median,
        spread=math.hypot(timing.spread, before.spread), gemm=pair.side,
    )  # fmt: skip


def _pair(operation: Operation, collective_seconds: float, ranks: Ranks, dtype: str) -> _Pair:
    """The largest GEMM of which SHORTER fit into the collective, on the slowest rank, while every rank runs it."""
    found: _Pair | None = None
    for side in SIDES[ranks.device]:
        gemm = _gemm(side, dtype, ranks.device)
        take = taker(gemm, "cuda_events") if ranks.device == "cuda" else taker(gemm, "wall", ranks.barrier)
        gemm()
        alone = summarise(ranks.slowest(take(7, RUNS)), "wall")
        if found and SHORTER * alone.median > collective_seconds:
            break
        found = _Pair(operation=operation, gemm=gemm, collective_seconds=collective_seconds, alone=alone, side=side)
    assert found is not None
    return found


def _gemm(side: int, dtype: str, device: str) -> Run:
    a, b, out = (torch.ones(side, side, dtype=DTYPES[dtype], device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _joint_on_cpu(pair: _Pair, ranks: Ranks, of: str) -> float:
    """One collective with GEMMs until it has ended: seconds of the mean GEMM, or of the collective.

    A thread waits for the collective and reads the clock: not every work of gloo says that it is completed before somebody
    waits for it (reduce_scatter does not).
    """
    ranks.watch.again()
    ranks.barrier()
    ends: list[float] = []
    count, start = 0, time.perf_counter()
    work = pair.operation.start()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # raised again below, where the watch sees it
            work.wait()
        ends.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not ends and time.perf_counter() - start < ranks.timeout:
        pair.gemm()
        count += 1
    seconds = time.perf_counter() - start
    waiting.join()
    work.wait()
    return seconds / max(count, 1) if of == "gemm" else ends[0] - start


def _joint_on_gpu(pair: _Pair, ranks: Ranks, of: str) -> float:
    """Enough collectives queued to cover some GEMMs, or the other way round; events around what is asked for."""
    ranks.watch.again()
    torch.cuda.synchronize()
    ranks.barrier()
    if of == "gemm":
        cover = 2 + int(2.0 * RUNS * pair.alone.median / pair.collective_seconds)
        works = [pair.operation.start() for _ in range(cover)]
        seconds = taker(pair.gemm, "cuda_events")(1, RUNS)[0]
        for work in works:
            work.wait()
        return seconds
    for _ in range(4 + int(3.0 * pair.collective_seconds / pair.alone.median)):
        pair.gemm()
    with torch.cuda.stream(torch.cuda.Stream()):
        # this stream waits for the collective, the host does not
        return taker(lambda: pair.operation.start().wait(), "cuda_events")(1, 1)[0]
