"""Overlap: how much slower a GEMM gets while a collective runs, and the collective while GEMMs run (torch).

Both are timed alone, on all ranks at once, and together. On a CPU the collective is started without waiting, GEMMs run until it has
ended, and a thread waits for it and reads the clock; the GEMMs are short against it (an eighth at most), so that the last one,
which outlasts it, counts little.

On a GPU the two are on two streams, and neither the host's dispatch nor the skew between ranks is between two events:

    GEMMs       spin | GEMM | ------ GEMMs ------ | g1        g0 | --- GEMMs --- | g1
    collective       wait   | barrier | c0 ... c1         spin | barrier | c0 -- collectives -- c1
                     of the collective                    of the GEMM, which waits for c0

The device spins until the host has queued all of it; the barrier is an all-reduce of one element of all ranks. What is timed lies
inside of what overlaps it (c1 before g1, or g1 before c1): else the sample is taken again with more of it. The same is queued
without the other for the time alone, in turn with it, so that both have the same clock.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile.collective_timing import NotMeasuredError, measure_collective
from planner.lab.profile.device_timing import spin
from planner.lab.profile.patterns import Pattern, collective_point, in_words, pattern_of
from planner.lab.profile.points import Measured, Point, Run, Timing
from planner.lab.profile.rank_groups import Buffers, Operation, Ranks
from planner.lab.profile.tensors import DTYPES, values
from planner.lab.profile.timing import TRIES, summarise, taker

SIDES = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sides of the square GEMMs to choose from on a CPU."""
GPU_SIDE = 8192  # 1 to 2 ms: launches do not count
JOINT, RUNS = 11, 8  # Joint runs; GEMMs in one of them where it is they that are timed
SHORTER = 8.0  # On a CPU the collective lasts at least so many GEMMs
LEAST_SECONDS = 2e-3  # Collectives in one sample of a GPU last at least this long
MOST_RUNS = 64  # Collectives in one sample; the queue of a GPU has to hold them
LAUNCHES = 10.0  # A GEMM shorter than so many launches is the host's
COVER = 1.5  # What overlaps it lasts so much longer
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
START_SPIN = 5e-3  # Seconds of a spin; the host queues some hundred operations in it


def measure_overlap(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured:
    """``median`` is the time while the other runs; details hold the time alone and their ratio. All ranks together. Raises
    NotMeasuredError on all of them where it would not be an overlap."""
    pattern, (of, op, size, dtype) = pattern_of(point), point.each("of", "op", "size", "dtype")
    alone = measure_collective(collective_point(op, pattern, size, dtype, ranks.local), ranks, buffers, budget_s / 3.0)
    group = ranks.group(pattern)
    if alone is None or group is None:
        raise PlannerError(f"overlap in groups of {pattern.n}: the ranks do not fill them")
    operation = Operation(op, size, dtype, group, buffers)
    operation.calm()
    with ranks.watch.doing(in_words(point), operation.ranks):
        if ranks.device == "cuda":
            both, before, side = _on_gpu(point, operation, ranks)
        else:
            gemm, gemm_alone, side = _gemm_within(alone.median, ranks, dtype)
            joint = []
            for _ in range(JOINT):
                ranks.watch.again()
                joint.append(_joint_on_cpu(operation, gemm, ranks, of))
            both, before = summarise(ranks.slowest(joint), alone.clock), gemm_alone if of == "gemm" else alone
    return both.measured(
        point, alone=before.median, slowdown=both.median / before.median, spread=math.hypot(both.spread, before.spread),
        gemm=side,
    )  # fmt: skip


def square(side: int, dtype: str, device: str) -> Run:
    """A product of random operands."""
    a, b = (values((side, side), dtype, device) for _ in range(2))
    out = torch.empty(side, side, dtype=DTYPES[dtype], device=device)
    return lambda: torch.mm(a, b, out=out)


# ------------------------------------------------------------------------------------------------ on a GPU


@dataclass(kw_only=True)
class Streams:
    """A GEMM and a collective on two streams of one rank. A sample is: seconds of a run of what is timed; whether all was queued
    before the device began; whether the other, where it is ``together``, ran all the time."""

    gemm: Run
    collective: Run
    barrier: Run  # Of all ranks, queued on the current stream
    gemms: int = RUNS  # In a sample
    collectives: int = 1
    spin: float = START_SPIN  # Seconds that the device is kept waiting
    side: Any = field(default_factory=lambda: torch.cuda.Stream())
    """Of the collectives. GEMMs stay on the stream of the program: another one may be that of NCCL, which takes its own from the
    same few."""

    def of_collective(self, together: bool) -> tuple[float, bool, bool]:
        """A collective, alone or while GEMMs run."""
        main, (begun, c0, c1, g1) = torch.cuda.current_stream(), _events(4)

        def queue() -> None:
            if together:
                self.gemm()
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                self._collectives(c0, c1, self.collectives)
            for _ in range(self.gemms * together):
                self.gemm()
            g1.record()

        ahead = self._queued(queue, begun, main)
        return _seconds(c0, c1) / self.collectives, ahead, not together or _seconds(c1, g1) > 0.0

    def of_gemm(self, together: bool) -> tuple[float, bool, bool]:
        """A GEMM, alone or while collectives run."""
        begun, c0, c1, g0, g1 = _events(5)

        def queue() -> None:
            with torch.cuda.stream(self.side):
                self._collectives(c0, c1, self.collectives * together)
            torch.cuda.current_stream().wait_event(c0)
            g0.record()
            for _ in range(self.gemms):
                self.gemm()
            g1.record()

        ahead = self._queued(queue, begun, self.side)
        return _seconds(g0, g1) / self.gemms, ahead, not together or _seconds(g1, c1) > 0.0

    def _collectives(self, start: Any, end: Any, count: int) -> None:
        self.barrier()
        start.record()
        for _ in range(count):
            self.collective()
        end.record()

    def _queued(self, queue: Run, begun: Any, first: Any) -> bool:
        """Queues it behind a spin on the ``first`` stream and waits for all; whether the device was still spinning when the host
        had done."""
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            spin(self.spin)
            begun.record()
        queue()
        ahead = not begun.query()
        torch.cuda.synchronize()
        return ahead


def _events(count: int) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _seconds(start: Any, end: Any) -> float:
    """Between two events, negative where the second came first."""
    return float(start.elapsed_time(end)) / units.KILO


def _on_gpu(point: Point, operation: Operation, ranks: Ranks) -> tuple[Timing, Timing, int]:
    """Time together, time alone, and the side of the GEMM."""
    if os.environ.get(CONNECTIONS) == "1":  # the same on every rank: launchers hand the environment on
        raise NotMeasuredError(
            f"{in_words(point)}: {CONNECTIONS}=1 makes one queue of all streams; leave it out for a profile"
        )
    one, everyone = torch.zeros(1, device="cuda"), ranks.group(Pattern(n=ranks.world, stride=1))
    streams = Streams(
        gemm=square(GPU_SIDE, point["dtype"], "cuda"), collective=operation.run,
        barrier=lambda: torch.distributed.all_reduce(one, group=everyone),
    )  # fmt: skip
    gemm = _agreed(point, streams, ranks, streams.of_gemm, together=False)
    launch = ranks.slowest([_dispatch(streams.gemm)])[0]
    if gemm < LAUNCHES * launch:
        raise NotMeasuredError(
            f"{in_words(point)}: a product of side {GPU_SIDE} takes {units.format_seconds(gemm)} alone, less than "
            f"{LAUNCHES:g} times the {units.format_seconds(launch)} that the host needs to launch one: its ratio says nothing"
        )
    collective = _agreed(point, streams, ranks, streams.of_collective, together=False)
    if point["of"] == "gemm":
        streams.collectives = min(MOST_RUNS, math.ceil(COVER * RUNS * gemm / collective))
        streams.gemms = max(1, min(RUNS, int(streams.collectives * collective / gemm / COVER)))
        sample = streams.of_gemm
    else:
        streams.collectives = min(MOST_RUNS, math.ceil(LEAST_SECONDS / collective))
        streams.gemms = math.ceil(COVER * streams.collectives * collective / gemm) + 1
        sample = streams.of_collective
    both, alone = [], []
    for _ in range(JOINT):
        both.append(_agreed(point, streams, ranks, sample, together=True))
        alone.append(_agreed(point, streams, ranks, sample, together=False))
    return summarise(both, "cuda_events"), summarise(alone, "cuda_events"), GPU_SIDE


def _agreed(
    point: Point, streams: Streams, ranks: Ranks, sample: Callable[[bool], tuple[float, bool, bool]], *, together: bool
) -> float:
    """The slowest rank's seconds of a sample that was queued ahead and covered on all ranks; they try again together. Raises
    NotMeasuredError."""
    late, bare = 0.0, 0.0
    for _ in range(TRIES):
        ranks.watch.again()
        seconds, ahead, covered = sample(together)
        late, bare, slowest = ranks.slowest([float(not ahead), float(not covered), seconds])
        if not late and not bare:
            return slowest
        if late:
            streams.spin *= 2.0
        elif point["of"] == "gemm":
            streams.collectives *= 2
        else:
            streams.gemms *= 2
    why = "the device began before the host had queued it" if late else "what overlaps it ended before it"
    raise NotMeasuredError(f"{in_words(point)}: {why}, {TRIES} times; the ratio would be none of an overlap")


def _dispatch(run: Run) -> float:
    """Seconds that the host needs to queue it once."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(RUNS):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / RUNS


# ------------------------------------------------------------------------------------------------ on a processor


def _gemm_within(collective_seconds: float, ranks: Ranks, dtype: str) -> tuple[Run, Timing, int]:
    """The largest GEMM of which SHORTER fit into the collective while every rank runs it; its time on the slowest, and its side."""
    found: tuple[Run, Timing, int] | None = None
    for side in SIDES:
        gemm = square(side, dtype, "cpu")
        take = taker(gemm, "wall", ranks.barrier)
        gemm()
        alone = summarise(ranks.slowest(take(7, RUNS)), "wall")
        if found and SHORTER * alone.median > collective_seconds:
            break
        found = gemm, alone, side
    assert found is not None
    return found


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
