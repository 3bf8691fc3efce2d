"""How much slower a GEMM gets beside a running collective, and the collective beside GEMMs (torch).

Both are timed alone first, on all ranks at once, then together: the collective is started without waiting and GEMMs run until it
has ended. On a CPU a thread waits for the collective and reads the clock; the GEMMs are short against it (an eighth at most),
so that the last one, which outlasts it, counts little. On a GPU events are recorded on the stream of each.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile.collective_timing import measure_collective, synchronise
from planner.lab.profile.operations import DTYPES, Buffers, Operation, make
from planner.lab.profile.patterns import Pattern, collective_point, doubling, in_words, pattern_of
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.rank_groups import Ranks
from planner.lab.profile.timing import Timing, summarise

BESIDE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that trainers run beside computation."""
SIDES = {"cpu": (64, 96, 128, 192, 256, 384, 512, 768, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of the square GEMMs to choose from."""
SAMPLES = 11
"""Joint runs."""
SHORTER = 8.0
"""The collective lasts at least so many GEMMs."""


def overlap_points(world: int, local: int, largest: int, dtype: str, weight: float) -> list[Point]:
    """Both directions for each collective, in the largest group of a node and, on several, with one rank per node."""
    patterns = [Pattern(n=doubling(local)[-1], stride=1)] if local > 1 else []
    if world > local:
        patterns.append(Pattern(n=world // local, stride=local))
    return [
        Point.of("overlap", weight=weight, op=op, of=of, n=one.n, stride=one.stride, size=largest, dtype=dtype,
                 per_node=one.per_node(local), nodes=one.nodes(local))
        for one in patterns for op in BESIDE for of in ("gemm", "collective")
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A collective and a GEMM on this rank, and how long each takes alone on the slowest."""

    operation: Operation
    gemm: Callable[[], object]
    collective_seconds: float
    gemm_seconds: float
    gemm_spread: float
    side: int


def measure_overlap(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured:
    """``median`` is the time beside the other; details hold the time alone and their ratio. All ranks together."""
    pattern = pattern_of(point)
    op, size, dtype = str(point["op"]), int(point["size"]), str(point["dtype"])
    alone = measure_collective(
        collective_point(op, pattern, size, dtype, ranks.local), ranks, buffers, budget_s / 3.0
    )  # fmt: skip
    group = ranks.group(pattern)
    if alone is None or group is None:
        raise PlannerError(f"overlap in groups of {pattern.n}: the ranks do not fill them")
    operation = make(op, size, dtype, group, buffers)
    operation.calm()
    with ranks.watch.doing(in_words(point), group.ranks):
        pair = _pair(operation, alone.median, ranks, dtype)
        run = _joint_on_gpu if ranks.device == "cuda" else _joint_on_cpu
        both = [run(pair, ranks, str(point["of"])) for _ in range(SAMPLES)]
    timing: Timing = summarise(ranks.slowest(both), alone.clock)
    before = pair.gemm_seconds if point["of"] == "gemm" else alone.median
    scatter = math.hypot(timing.spread, pair.gemm_spread if point["of"] == "gemm" else alone.spread)
    return timing.measured(point, alone=before, slowdown=timing.median / before, spread=scatter, gemm=pair.side)


def _pair(operation: Operation, collective_seconds: float, ranks: Ranks, dtype: str) -> _Pair:
    """The largest GEMM of which SHORTER fit into the collective, on the slowest rank."""
    chosen: tuple[int, Callable[[], object], Timing] | None = None
    for side in SIDES[ranks.device]:
        a = torch.ones(side, side, dtype=DTYPES[dtype], device=ranks.device)
        b = torch.ones(side, side, dtype=DTYPES[dtype], device=ranks.device)
        out = torch.empty_like(a)

        def gemm(a: Any = a, b: Any = b, out: Any = out) -> object:
            return torch.mm(a, b, out=out)

        timing = summarise(ranks.slowest([_alone(gemm, ranks) for _ in range(7)]), "wall")
        if chosen and SHORTER * timing.median > collective_seconds:
            break
        chosen = (side, gemm, timing)
    assert chosen is not None
    return _Pair(
        operation=operation, gemm=chosen[1], collective_seconds=collective_seconds,
        gemm_seconds=chosen[2].median, gemm_spread=chosen[2].spread, side=chosen[0],
    )  # fmt: skip


def _alone(gemm: Callable[[], object], ranks: Ranks, runs: int = 8) -> float:
    """Seconds of one GEMM while every rank runs it."""
    gemm()
    if ranks.device == "cuda":
        return _events(gemm, runs)
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(runs):
        gemm()
    return (time.perf_counter() - start) / runs


def _events(run: Callable[[], object], runs: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / units.KILO / runs


def _joint_on_cpu(pair: _Pair, ranks: Ranks, of: str) -> float:
    """One collective with GEMMs until it has ended: seconds of the mean GEMM, or of the collective.

    A thread waits for the collective and reads the clock: not every work of gloo says that it is completed before somebody
    waits for it (reduce_scatter does not).
    """
    assert pair.operation.start is not None
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
    assert pair.operation.start is not None
    ranks.watch.again()
    synchronise(ranks.device)
    ranks.barrier()
    if of == "gemm":
        runs = 8
        cover = 2 + int(2.0 * runs * pair.gemm_seconds / pair.collective_seconds)
        works = [pair.operation.start() for _ in range(cover)]
        seconds = _events(pair.gemm, runs)
        for work in works:
            work.wait()
        return seconds
    for _ in range(4 + int(3.0 * pair.collective_seconds / pair.gemm_seconds)):
        pair.gemm()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(side)
        pair.operation.start().wait()  # the side stream waits for the collective, the host does not
        end.record(side)
    torch.cuda.synchronize()
    return start.elapsed_time(end) / units.KILO
