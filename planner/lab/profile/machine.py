"""What is not an operator: clocks under load, launches, copies to the host, Adam on the CPU, and what memory there is."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile import rounds
from planner.lab.profile.definitions import number, text
from planner.lab.profile.extra_points import STREAM, YARDSTICK
from planner.lab.profile.layer_check import HOST_LAYER, host_layer
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.streams import adam
from planner.lab.profile.tensors import Run, in_turn, precision, values, whole
from planner.lab.profile.timing import Timing, Yardstick, measure, middle, summarise
from planner.lab.profile.whole_layer import layer

LAUNCHES = 200
"""Kernels in one sample of the launch floor: events and clocks see their sum."""
LEAST_SUSTAINED = 2.0
"""Seconds: shorter, and the first and the last second are the same one."""


def clock_of(device: str) -> str:
    """Events on a GPU; processor time on a CPU, whose cores may be shared with others."""
    return "cuda_events" if device == "cuda" else "cpu"


YARDSTICK_RUNS, STREAM_RUNS = 200, 60


@cache
def yardstick() -> Yardstick:
    """Of this process: a product with operands outside of the caches next to the core, and an addition."""
    m, n, k = (int(YARDSTICK[name]) for name in "mnk")

    def one() -> Run:
        x, w, y = values((m, k), "fp32", "cpu"), values((n, k), "fp32", "cpu"), values((m, n), "fp32", "cpu")
        return lambda: torch.add(torch.nn.functional.linear(x, w), y)

    found = Yardstick(run=in_turn(one, 4.0 * (m * k + n * k + m * n), "cpu"), reference=1.0)
    seconds = sorted(found.seconds() for _ in range(YARDSTICK_RUNS))
    return Yardstick(run=found.run, reference=seconds[len(seconds) // 10])


@cache
def stream_yardstick() -> Yardstick:
    """Of this process, for what only moves bytes: a sum of two arrays, far larger together than the caches."""
    count = int(STREAM["elements"])

    def one() -> Run:
        x, y, z = (values((count,), "fp32", "cpu") for _ in range(3))
        return lambda: torch.add(x, y, out=z)

    found = Yardstick(run=in_turn(one, 12.0 * count, "cpu"), reference=1.0)
    seconds = sorted(found.seconds() for _ in range(STREAM_RUNS))
    return Yardstick(run=found.run, reference=seconds[len(seconds) // 10])


def yardstick_of(point: Point) -> Yardstick:
    """The one that slows down as the point does."""
    return stream_yardstick() if point.values.get("op") == "optimizer" else yardstick()


def yardstick_fact(point: Point, _: str, __: float) -> Measured:
    """Processor seconds of a yardstick at the rate that every figure of a profile is given at: its reference."""
    stream = point["kind"] == "stream"
    taken, runs = (stream_yardstick().reference, STREAM_RUNS) if stream else (yardstick().reference, YARDSTICK_RUNS)
    return Measured(point=point, median=taken, low=taken, high=taken, repetitions=runs, clock="cpu", confidence=0.0)


def launch(point: Point, device: str, budget_s: float) -> Measured:
    """Seconds per kernel of one element back to back: in a stream, or inside a CUDA graph; or those of a layer of nothing."""
    kind, clock = text(point, "kind"), clock_of(device)
    by = yardstick() if device == "cpu" else None
    if kind in HOST_LAYER:
        tiny = layer(host_layer(kind), device)
        return measure(tiny, device=device, clock=clock, budget_s=budget_s, yardstick=by).measured(point)
    x = torch.zeros(1, device=device)

    def burst() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    run: Run = burst
    if kind == "graph":
        if device != "cuda":
            raise PlannerError("a CUDA graph needs a GPU; this is a CPU")
        burst()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            burst()
        run = graph.replay
    found = measure(run, device=device, clock=clock, budget_s=budget_s, yardstick=by)
    return _divided(found, LAUNCHES).measured(point)


def _divided(found: Timing, by: float) -> Timing:
    return replace(
        found, median=found.median / by, low=found.low / by, high=found.high / by, least=found.least / by,
        longest=found.longest / by,
    )  # fmt: skip


def warm_up(point: Point, device: str, budget_s: float) -> Measured:
    """A product and an addition until their time is steady (``rounds.steady``) or the limit is over; the last blocks' median."""
    m, n, k, dtype = whole(point, "m"), whole(point, "n"), whole(point, "k"), text(point, "dtype")
    precision(dtype)
    x, w, y = values((m, k), dtype, device), values((n, k), dtype, device), values((m, n), dtype, device)

    def run() -> float:
        start = time.perf_counter() if device == "cuda" else time.process_time()
        torch.add(torch.nn.functional.linear(x, w), y)
        if device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter() - start
        return time.process_time() - start

    blocks, lasted = rounds.warm_up(run, min(rounds.WARM_UP_LIMIT[device], budget_s))
    last = middle(sorted(blocks[-rounds.WINDOW :]))
    return Measured(
        point=point, median=last, low=last, high=last, repetitions=len(blocks), confidence=0.0,
        clock="wall" if device == "cuda" else "cpu",
        details=(("first", blocks[0]), ("lasted", round(lasted, 3)), ("steady", rounds.steady(blocks))),
    )  # fmt: skip


def host_copy(point: Point, device: str, budget_s: float) -> Measured:
    """A pinned buffer to the device or back, by events; only a GPU has the way between."""
    if device != "cuda":
        raise PlannerError("copies between host and device need a GPU; this is a CPU")
    count = whole(point, "bytes")
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    to_device = text(point, "direction") == "h2d"

    def run() -> object:
        return there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True)

    return measure(run, device=device, budget_s=budget_s).measured(point)


def cpu_adam(point: Point, _: str, budget_s: float) -> Measured:
    """A fused AdamW step of fp32 weights on the host, with all threads that torch has: wall time, as others wait for it."""
    run = adam(whole(point, "parameters"), "cpu")
    found = measure(run, device="cpu", clock="wall", budget_s=budget_s)
    return found.measured(point, threads=torch.get_num_threads())


def host_stream(point: Point, _: str, budget_s: float) -> Measured:
    """One large array copied in host memory with all threads that torch has: bytes read and written; wall time."""
    source = torch.zeros(whole(point, "bytes") // 2, dtype=torch.uint8)
    target = torch.ones_like(source)
    found = measure(lambda: target.copy_(source), device="cpu", clock="wall", budget_s=budget_s)
    return found.measured(point, threads=torch.get_num_threads())


def sustained(point: Point, device: str, budget_s: float) -> Measured:
    """One large GEMM without a pause until the time is over: the last second, against the first.

    The samples are those of the last second; ``first`` is the median of the first. A power limit or heat shows as a ratio
    below one, first / last. The time is the point's own ``seconds``, at most the budget.
    """
    m, n, k, dtype = whole(point, "m"), whole(point, "n"), whole(point, "k"), text(point, "dtype")
    seconds = min(number(point, "seconds"), budget_s)
    if seconds < LEAST_SUSTAINED:
        raise PlannerError(f"{point.label}: {seconds:.1f} s show no heat; give it {LEAST_SUSTAINED:.0f} s or more")
    precision(dtype)
    x, w = values((m, k), dtype, device), values((n, k), dtype, device)
    samples = _events(x, w, seconds) if device == "cuda" else _processor(x, w, seconds)
    begin, end = samples[0][0], samples[-1][0]
    first = [value for at, value in samples if at - begin <= 1.0]
    last = [value for at, value in samples if end - at <= 1.0]
    clock = clock_of(device)
    early = summarise(first, clock)
    return summarise(last, clock).measured(
        point, first=early.median, lasted=end - begin, ratio=early.median / summarise(last, clock).median
    )


def _processor(x: Any, w: Any, seconds: float) -> list[tuple[float, float]]:
    """(when, processor seconds) of each product."""
    torch.nn.functional.linear(x, w)
    begun = time.perf_counter()
    samples: list[tuple[float, float]] = []
    while time.perf_counter() - begun < seconds or len(samples) < 2:
        start = time.process_time()
        torch.nn.functional.linear(x, w)
        samples.append((time.perf_counter(), time.process_time() - start))
    return samples


def _events(x: Any, w: Any, seconds: float) -> list[tuple[float, float]]:
    """(when, seconds) of each product by device events; the host stays a few products ahead, so the device never idles."""
    torch.nn.functional.linear(x, w)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    marks: list[tuple[float, Any]] = []
    ahead = 16
    while time.perf_counter() - begun < seconds or len(marks) < 3:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append((time.perf_counter(), mark))
        torch.nn.functional.linear(x, w)
        if len(marks) > ahead:
            marks[-ahead][1].synchronize()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    return [(at, before.elapsed_time(after) / units.KILO) for (at, before), (_, after) in pairs]


# ---------------------------------------------------------------------------------------------------- memory


def memory_fact(point: Point, device: str, _: float) -> Measured:
    """Bytes, not seconds: usable memory, CUDA context, allocator rounding; family ``bytes``."""
    name = text(point, "name")
    if device != "cuda":
        if name != "usable":
            raise PlannerError(f"'{name}' is a fact of a GPU; this is a CPU")
        return _fact(point, _host_bytes(), source="MemTotal")
    if name == "usable":
        return _fact(point, float(torch.cuda.mem_get_info()[1]), source="cudaMemGetInfo")
    if name == "context":
        return _fact(point, _context_bytes(), source="used by the driver less what the allocator holds")
    if name == "allocator_rounding":
        return _fact(point, _rounding(), source="allocated for one byte")
    if name == "workspace":
        return _fact(point, _workspace(), source="allocated by the first bf16 product beyond its tensors")
    raise PlannerError(f"unknown memory fact '{name}'; known: usable, context, allocator_rounding, workspace")


def _fact(point: Point, value: float, source: str) -> Measured:
    return Measured(
        point=point, median=value, low=value, high=value, repetitions=1, clock="wall", confidence=1.0,
        details=(("source", source),),
    )  # fmt: skip


def _host_bytes() -> float:
    """Total memory as the kernel reports it."""
    import os

    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _context_bytes() -> float:
    """Used on the device beyond torch's own reserve, when no other process runs there; after the libraries are loaded.

    Other processes count too: the figure is an upper bound where the device is shared.
    """
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def _rounding() -> float:
    """What the allocator charges for one byte."""
    before = torch.cuda.memory_allocated()
    one = torch.empty(1, dtype=torch.uint8, device="cuda")
    charged = torch.cuda.memory_allocated() - before
    del one
    return float(charged)


def _workspace() -> float:
    """cuBLAS's workspace, which torch's allocator holds from the first product on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    x = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    before = torch.cuda.memory_allocated()
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    return float(torch.cuda.memory_allocated() - before)
