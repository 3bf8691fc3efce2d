"""How one device measures a point of ``compute_points`` (torch): operators and layers, clocks under load, launches, copies to the
host, Adam on the CPU, and what memory there is."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median

import torch

from planner.errors import PlannerError
from planner.lab.profile import compute_points as planned
from planner.lab.profile import operator_runs as operators
from planner.lab.profile import timing
from planner.lab.profile.layer_check import HOST_LAYER
from planner.lab.profile.points import Measured, Point, Run, Timing
from planner.lab.profile.tensors import adam, keep_memory, precision, rotating, values
from planner.lab.profile.timing import Yardstick, measure, summarise, taker

LAUNCHES = 200  # Kernels in one sample of the launch floor: events and clocks see their sum
YARDSTICK_RUNS, STREAM_RUNS = 200, 60
LEAST_SUSTAINED = 2.0  # Seconds: shorter, and the first and the last second are the same one


def clock_of(device: str) -> str:
    """Events on a GPU; processor time on a CPU, whose cores may be shared with others."""
    return "cuda_events" if device == "cuda" else "cpu"


def measure_compute(point: Point, device: str, budget_s: float) -> Measured:
    """Measure one point of ``compute_points``. Raises PlannerError where the device cannot run it, with the reason."""
    planned.check_device(device)
    threads = torch.get_num_threads()
    facts: dict[str, Callable[[Point, str, float], Measured]] = {
        "launch": launch, "host_copy": host_copy, "cpu_adam": on_host, "warm_up": warm_up, "host_stream": on_host,
        "sustained": sustained, "bytes": memory_fact, "yardstick": yardstick_fact,
    }  # fmt: skip
    try:
        if device == "cpu":
            torch.set_num_threads(1)
            keep_memory()
        if point.family in facts:
            return facts[point.family](point, device, budget_s)
        run = operators.operator(point, device)
        found = _timed(run, device, budget_s, streams=point.values.get("op") == "optimizer").measured(point)
        if point.family == "grouped_gemm":
            return found.measured(point, kernel_of_groups=operators.grouped_kernel(point, device))
        return found
    except (RuntimeError, AttributeError, TypeError, KeyError) as error:  # torch: no kernel, no memory
        if device == "cuda":
            torch.cuda.empty_cache()
        reason = str(error).strip() or type(error).__name__
        raise PlannerError(f"{point.label}: {reason.splitlines()[0][:200]}") from error
    finally:
        torch.set_num_threads(threads)


def _timed(run: Run, device: str, budget_s: float, *, streams: bool = False) -> Timing:
    """By the clock of the device; on a CPU by the yardstick of products, or of what only ``streams`` bytes."""
    by = (stream_yardstick if streams else yardstick)() if device == "cpu" else None
    return measure(run, device=device, clock=clock_of(device), budget_s=budget_s, yardstick=by)


def layers(models: Sequence[str]) -> Run:
    """What the other ranks of a CPU do while rank 0 measures alone: a layer of the models forward and backward in one thread.

    They compute as they do in a step: a core whose neighbours sleep is up to twice as quick, and not equally for products,
    attention and what only moves bytes, so that no one factor makes up for it. GPUs share none of that.
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
    if point["kind"] in HOST_LAYER:
        return _timed(operators.operator(HOST_LAYER[point["kind"]], device), device, budget_s).measured(point)
    x = torch.zeros(1, device=device)

    def burst() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    run: Run = burst
    if point["kind"] == "graph":
        if device != "cuda":
            raise PlannerError("a CUDA graph needs a GPU; this is a CPU")
        burst()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            burst()
        run = graph.replay
    found = _timed(run, device, budget_s)
    each = {name: getattr(found, name) / LAUNCHES for name in ("median", "low", "high")}
    return replace(found, **each).measured(point)


def _product(point: Point, device: str) -> Run:
    """X[m, k] W[n, k]^T, always of the same operands."""
    m, n, k, dtype = point.each("m", "n", "k", "dtype")
    precision(dtype)
    x, w = values((m, k), dtype, device), values((n, k), dtype, device)
    return lambda: torch.nn.functional.linear(x, w)


def warm_up(point: Point, device: str, budget_s: float) -> Measured:
    """A product and an addition until their time is steady (``timing.steady``) or the limit is over; the last blocks' median."""
    product, y = _product(point, device), values((point["m"], point["n"]), point["dtype"], device)
    clock, tick = ("wall", time.perf_counter) if device == "cuda" else ("cpu", time.process_time)

    def run() -> float:
        start = tick()
        torch.add(product(), y)
        if device == "cuda":
            torch.cuda.synchronize()
        return tick() - start

    blocks, lasted = timing.warm_up(run, min(timing.WARM_UP_LIMIT[device], budget_s))
    return Measured.fact(
        point, median(blocks[-timing.WINDOW :]), repetitions=len(blocks), clock=clock,
        details={"first": blocks[0], "lasted": round(lasted, 3), "steady": timing.steady(blocks)},
    )  # fmt: skip


def host_copy(point: Point, device: str, budget_s: float) -> Measured:
    """A pinned buffer to the device or back, by events; only a GPU has the way between."""
    if device != "cuda":
        raise PlannerError("copies between host and device need a GPU; this is a CPU")
    host = torch.empty(point["bytes"], dtype=torch.uint8, pin_memory=True)
    there = torch.empty(point["bytes"], dtype=torch.uint8, device=device)
    source, target = (host, there) if point["direction"] == "h2d" else (there, host)
    return measure(lambda: target.copy_(source, non_blocking=True), device=device, budget_s=budget_s).measured(point)


def on_host(point: Point, _: str, budget_s: float) -> Measured:
    """A fused AdamW step of fp32 weights on the host, or one large array copied there (bytes read and written), with all threads
    that torch has: wall time, as others wait for it."""
    if point.family == "cpu_adam":
        run = adam(point["parameters"], "cpu")
    else:
        source = torch.zeros(point["bytes"] // 2, dtype=torch.uint8)
        run = partial(torch.ones_like(source).copy_, source)
    found = measure(run, device="cpu", clock="wall", budget_s=budget_s)
    return found.measured(point, threads=torch.get_num_threads())


def sustained(point: Point, device: str, budget_s: float) -> Measured:
    """One large GEMM for the point's own ``seconds``, whatever is left of the budget: the samples of the last second, against the
    median of the first. A power limit or heat shows as a ratio below one, first / last."""
    seconds = min(point["seconds"], max(budget_s, planned.SUSTAINED_SECONDS[device]))
    if seconds < LEAST_SUSTAINED:
        raise PlannerError(f"{point.label}: {seconds:.1f} s show no heat; give it {LEAST_SUSTAINED:.0f} s or more")
    clock, block = clock_of(device), 64 if device == "cuda" else 1  # products that a GPU has in its queue
    take = taker(_product(point, device), clock)
    take(1, 1)
    begun, samples = time.perf_counter(), [(0.0, take(1, 1)[0])]
    while samples[-1][0] < seconds:
        samples += [(time.perf_counter() - begun, one) for one in take(block, 1)]
    lasted = samples[-1][0]
    first = summarise([value for at, value in samples if at <= 1.0], clock)
    last = summarise([value for at, value in samples if at >= lasted - 1.0], clock)
    return last.measured(point, first=first.median, lasted=lasted, ratio=first.median / last.median)


def memory_fact(point: Point, device: str, _: float) -> Measured:
    """Bytes, not seconds: usable memory, CUDA context, allocator rounding; family ``bytes``."""
    name = point["name"]
    if device != "cuda":
        if name != "usable":
            raise PlannerError(f"'{name}' is a fact of a GPU; this is a CPU")
        total, source = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "MemTotal"
    else:
        total, source = _gpu_fact(name)
    return Measured.fact(point, total, confidence=1.0, details={"source": source})


def _gpu_fact(name: str) -> tuple[float, str]:
    """Bytes and where they are from. The context is what the device holds beyond torch's own reserve after the libraries are
    loaded: other processes count too, so it is an upper bound where the device is shared."""
    if name == "usable":
        return float(torch.cuda.mem_get_info()[1]), "cudaMemGetInfo"
    if name == "allocator_rounding":
        before = torch.cuda.memory_allocated()
        one = torch.empty(1, dtype=torch.uint8, device="cuda")
        charged = float(torch.cuda.memory_allocated() - before)
        del one
        return charged, "allocated for one byte"
    gc.collect()
    if name == "workspace":  # cuBLAS's: torch's allocator holds it from the first product on
        torch._C._cuda_clearCublasWorkspaces()
    x = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    before = torch.cuda.memory_allocated()
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    if name == "workspace":
        taken = float(torch.cuda.memory_allocated() - before)
        return taken, "allocated by the first bf16 product beyond its tensors"
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved()), "used by the driver less what the allocator holds"
