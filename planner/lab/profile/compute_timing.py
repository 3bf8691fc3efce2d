"""How one device measures a point of ``compute_points`` (torch): operators and layers, clocks under load, launches, copies to the
host, Adam on the CPU, and what memory there is."""

import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile import compute_points as planned
from planner.lab.profile import operator_runs as operators
from planner.lab.profile import rounds
from planner.lab.profile.layer_check import HOST_LAYER
from planner.lab.profile.points import Measured, Point, Run
from planner.lab.profile.streams import adam
from planner.lab.profile.tensors import keep_memory, precision, rotating, values
from planner.lab.profile.timing import Yardstick, measure, middle, summarise

LAUNCHES = 200  # Kernels in one sample of the launch floor: events and clocks see their sum
YARDSTICK_RUNS, STREAM_RUNS = 200, 60
LEAST_SUSTAINED = 2.0  # Seconds: shorter, and the first and the last second are the same one


def clock_of(device: str) -> str:
    """Events on a GPU; processor time on a CPU, whose cores may be shared with others."""
    return "cuda_events" if device == "cuda" else "cpu"


def measure_compute(point: Point, device: str, budget_s: float) -> Measured:
    """Measure one point of ``compute_points``. Raises PlannerError where the device cannot run it, with the reason.

    GPU: device events. CPU: processor time of one thread, because its cores may be shared with others.
    """
    planned.check_device(device)
    threads = torch.get_num_threads()
    facts: dict[str, Callable[[Point, str, float], Measured]] = {
        "launch": launch, "host_copy": host_copy, "cpu_adam": cpu_adam, "warm_up": warm_up, "host_stream": host_stream,
        "sustained": sustained, "bytes": memory_fact, "yardstick": yardstick_fact,
    }  # fmt: skip
    try:
        if device == "cpu":
            torch.set_num_threads(1)
            keep_memory()
        if point.family in facts:
            return facts[point.family](point, device, budget_s)
        run = operators.operator(point, device)
        slowed_alike = stream_yardstick if point.values.get("op") == "optimizer" else yardstick
        by = slowed_alike() if device == "cpu" else None
        found = measure(run, device=device, clock=clock_of(device), budget_s=budget_s, yardstick=by)
        if point.family == "grouped_gemm":
            return found.measured(point, kernel_of_groups=operators.grouped_kernel(point, device))
        return found.measured(point)
    except (RuntimeError, AttributeError, TypeError, KeyError) as error:  # torch: no kernel, no memory
        if device == "cuda":
            torch.cuda.empty_cache()
        reason = str(error).strip() or type(error).__name__
        raise PlannerError(f"{point.label}: {reason.splitlines()[0][:200]}") from error
    finally:
        torch.set_num_threads(threads)


def layers(models: Sequence[str]) -> Run:
    """What the other ranks of a CPU do while rank 0 measures alone: a layer forward and backward in one thread, the first of the
    models' that is measured here.

    They compute as they do in a step. Cores of one processor share caches, memory and often a clock; two threads may share a core.
    A core whose neighbours sleep is up to twice as quick, and not equally for products, attention and what only moves bytes, so
    that no one factor makes up for it. GPUs share none of that.
    """
    torch.set_num_threads(1)
    named = (*models, *planned.MODELS["cpu"])
    points = [point for name in named for point in planned.layer_points(name, "cpu", planned.CPU_SEQUENCE)]
    points = planned.affordable(points, planned.CPU_RATE, planned.CPU_BANDWIDTH, planned.CPU_LONGEST_LAYER)
    forward, backward = (operators.operator(point, "cpu") for point in points[:2])
    return lambda: (forward(), backward())


@cache
def yardstick() -> Yardstick:
    """Of this process: a product with operands outside of the caches next to the core, and an addition."""
    m, n, k = (int(planned.YARDSTICK[name]) for name in "mnk")

    def one() -> Run:
        x, w, y = values((m, k), "fp32", "cpu"), values((n, k), "fp32", "cpu"), values((m, n), "fp32", "cpu")
        return lambda: torch.add(torch.nn.functional.linear(x, w), y)

    return Yardstick.of(rotating(one, 4.0 * (m * k + n * k + m * n), "cpu"), YARDSTICK_RUNS)


@cache
def stream_yardstick() -> Yardstick:
    """Of this process, for what only moves bytes: a sum of two arrays, far larger together than the caches."""
    count = int(planned.STREAM["elements"])

    def one() -> Run:
        x, y, z = (values((count,), "fp32", "cpu") for _ in range(3))
        return lambda: torch.add(x, y, out=z)

    return Yardstick.of(rotating(one, 12.0 * count, "cpu"), STREAM_RUNS)


def yardstick_fact(point: Point, _: str, __: float) -> Measured:
    """Processor seconds of a yardstick at the rate that every figure of a profile is given at: its reference."""
    made, runs = (stream_yardstick, STREAM_RUNS) if point["kind"] == "stream" else (yardstick, YARDSTICK_RUNS)
    return Measured.fact(point, made().reference, repetitions=runs, clock="cpu")


def launch(point: Point, device: str, budget_s: float) -> Measured:
    """Seconds per kernel of one element back to back: in a stream, or inside a CUDA graph; or those of a layer of nothing."""
    kind, clock = point["kind"], clock_of(device)
    by = yardstick() if device == "cpu" else None
    if kind in HOST_LAYER:
        tiny = operators.operator(HOST_LAYER[kind], device)
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
    median, low, high = (value / LAUNCHES for value in (found.median, found.low, found.high))
    return replace(found, median=median, low=low, high=high).measured(point)


def warm_up(point: Point, device: str, budget_s: float) -> Measured:
    """A product and an addition until their time is steady (``rounds.steady``) or the limit is over; the last blocks' median."""
    x, w = _operands(point, device)
    y = values((point["m"], point["n"]), point["dtype"], device)

    def run() -> float:
        start = time.perf_counter() if device == "cuda" else time.process_time()
        torch.add(torch.nn.functional.linear(x, w), y)
        if device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter() - start
        return time.process_time() - start

    blocks, lasted = rounds.warm_up(run, min(rounds.WARM_UP_LIMIT[device], budget_s))
    return Measured.fact(
        point, middle(sorted(blocks[-rounds.WINDOW :])), repetitions=len(blocks), clock="wall" if device == "cuda" else "cpu",
        details=(("first", blocks[0]), ("lasted", round(lasted, 3)), ("steady", rounds.steady(blocks))),
    )  # fmt: skip


def _operands(point: Point, device: str) -> tuple[Any, Any]:
    """X[m, k] and W[n, k] of a product."""
    m, n, k, dtype = point["m"], point["n"], point["k"], point["dtype"]
    precision(dtype)
    return values((m, k), dtype, device), values((n, k), dtype, device)


def host_copy(point: Point, device: str, budget_s: float) -> Measured:
    """A pinned buffer to the device or back, by events; only a GPU has the way between."""
    if device != "cuda":
        raise PlannerError("copies between host and device need a GPU; this is a CPU")
    count = point["bytes"]
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    to_device = point["direction"] == "h2d"

    def run() -> object:
        return there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True)

    return measure(run, device=device, budget_s=budget_s).measured(point)


def cpu_adam(point: Point, _: str, budget_s: float) -> Measured:
    """A fused AdamW step of fp32 weights on the host, with all threads that torch has: wall time, as others wait for it."""
    return _on_host(adam(point["parameters"], "cpu"), point, budget_s)


def host_stream(point: Point, _: str, budget_s: float) -> Measured:
    """One large array copied in host memory with all threads that torch has: bytes read and written; wall time."""
    source = torch.zeros(point["bytes"] // 2, dtype=torch.uint8)
    target = torch.ones_like(source)
    return _on_host(lambda: target.copy_(source), point, budget_s)


def _on_host(run: Run, point: Point, budget_s: float) -> Measured:
    found = measure(run, device="cpu", clock="wall", budget_s=budget_s)
    return found.measured(point, threads=torch.get_num_threads())


def sustained(point: Point, device: str, budget_s: float) -> Measured:
    """One large GEMM without a pause until the time is over: the last second, against the first.

    The samples are those of the last second; ``first`` is the median of the first. A power limit or heat shows as a ratio
    below one, first / last. The time is the point's own ``seconds``, whatever is left of the budget.
    """
    seconds = min(point["seconds"], max(budget_s, planned.SUSTAINED_SECONDS[device]))
    if seconds < LEAST_SUSTAINED:
        raise PlannerError(f"{point.label}: {seconds:.1f} s show no heat; give it {LEAST_SUSTAINED:.0f} s or more")
    x, w = _operands(point, device)
    samples = _events(x, w, seconds) if device == "cuda" else _processor(x, w, seconds)
    begin, end = samples[0][0], samples[-1][0]
    clock = clock_of(device)
    first = summarise([value for at, value in samples if at - begin <= 1.0], clock)
    last = summarise([value for at, value in samples if end - at <= 1.0], clock)
    return last.measured(point, first=first.median, lasted=end - begin, ratio=first.median / last.median)


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


def memory_fact(point: Point, device: str, _: float) -> Measured:
    """Bytes, not seconds: usable memory, CUDA context, allocator rounding; family ``bytes``."""
    name = point["name"]
    if device != "cuda":
        if name != "usable":
            raise PlannerError(f"'{name}' is a fact of a GPU; this is a CPU")
        total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return Measured.fact(point, total, confidence=1.0, details=(("source", "MemTotal"),))
    known: dict[str, tuple[Callable[[], float], str]] = {
        "usable": (lambda: float(torch.cuda.mem_get_info()[1]), "cudaMemGetInfo"),
        "context": (_context_bytes, "used by the driver less what the allocator holds"),
        "allocator_rounding": (_rounding, "allocated for one byte"),
        "workspace": (_workspace, "allocated by the first bf16 product beyond its tensors"),
    }
    if name not in known:
        raise PlannerError(f"unknown memory fact '{name}'; known: {', '.join(known)}")
    take, source = known[name]
    return Measured.fact(point, take(), confidence=1.0, details=(("source", source),))


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
