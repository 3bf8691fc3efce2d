"""How one device measures a point of ``compute_points`` (torch): operators and layers, clocks under load, launches, copies to the
host, Adam on the CPU, and what memory there is."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile import compute_points as planned
from planner.lab.profile import operator_runs as operators
from planner.lab.profile import timing
from planner.lab.profile.device_timing import GRAPH_RUNS, captured, lost
from planner.lab.profile.layer_check import HOST_LAYER
from planner.lab.profile.points import Measured, Point, Run, Timing, Value
from planner.lab.profile.tensors import Rotation, adam, keep_memory, precision, rotating, values
from planner.lab.profile.timing import Yardstick, measure, summarise, taker

LAUNCHES = 200  # Kernels in one sample of the launch floor: events and clocks see their sum
YARDSTICK_RUNS, STREAM_RUNS = 200, 60
SHORT, SHORT_BUDGET = 50e-6, 2e-3
"""Seconds: of a shorter run on a GPU two more figures are kept (``more_figures``), and the budget of each."""
LEAST_SUSTAINED = 2.0  # Seconds: shorter, and the first and the last second are the same one


class DeviceLostError(PlannerError):
    """The device gives no further results: every later point would fail too."""


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
        details = operators.which_kernel(point, device)
        if device == "cuda" and found.median < SHORT:
            details |= more_figures(run, point)
        return found.measured(point, **details)
    except PlannerError:
        raise
    except Exception as error:  # of torch, its compiler, a library: no kernel, no memory; other points may have theirs
        reason = f"{point.label}: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}"
        if device == "cuda" and (said := lost()):
            raise DeviceLostError(
                f"the GPU gives no further results after {point.label}: {said}; what was measured is kept, "
                "--resume leaves this point out and goes on with the next"
            ) from error
        if device == "cuda":
            torch.cuda.empty_cache()
        raise PlannerError(reason) from error
    finally:
        torch.set_num_threads(threads)


def more_figures(run: Run, point: Point) -> dict[str, Value]:
    """Microseconds of a short run without a full queue (``eager_us``: the device waits for the host) and from a CUDA graph
    (``graph_us``; not of gradients, whose kernels go to the stream of their forward pass, nor of layers, which ask the device)."""
    eager = measure(run, device="cuda", budget_s=SHORT_BUDGET, ahead=False)
    found: dict[str, Value] = {"eager_us": round(eager.median / units.MICRO, 3)}
    if point["pass"] == "backward" or point.family == "layer" or point.values.get("op") == "optimizer":
        return found
    with contextlib.suppress(RuntimeError):  # it cannot be captured
        replay = Rotation([captured(run)], getattr(run, "before", None))
        graph = measure(replay, device="cuda", budget_s=SHORT_BUDGET)
        found["graph_us"] = round(graph.median / GRAPH_RUNS / units.MICRO, 3)
    return found


def _timed(run: Run, device: str, budget_s: float, *, streams: bool = False, ahead: bool = True) -> Timing:
    """By the clock of the device; on a CPU by the yardstick of products, or of what only ``streams`` bytes."""
    by = (stream_yardstick if streams else yardstick)() if device == "cpu" else None
    return measure(run, device=device, clock=clock_of(device), budget_s=budget_s, yardstick=by, ahead=ahead)


def layers(models: Sequence[str]) -> Run:
    """What the other ranks of a CPU do while rank 0 measures alone: a layer of the models forward and backward in one thread.

    They compute as they do in a step: a core whose neighbours sleep is up to twice as quick, and not equally for products,
    attention and what only moves bytes, so that no one factor makes up for it. Of GPUs, which share air, power, the host's
    memory and PCIe switches, all ranks measure together what depends on those (``worker.all_at_once``).
    """
    torch.set_num_threads(1)
    named = (*models, *planned.MODELS["cpu"])
    points = [point for name in named for point in planned.layer_points(name, "cpu", planned.CPU_SEQUENCE)]
    points = planned.affordable(points, planned.CPU_LONGEST_LAYER)
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
    """Seconds per kernel of one element back to back: in a stream whose queue is full, or inside a CUDA graph; or those of a layer
    of nothing, which are the host's. ``eager_us``: per kernel of a stream whose queue is empty, what the host needs for one."""
    if point["kind"] in HOST_LAYER:
        layer = operators.operator(HOST_LAYER[point["kind"]], device)
        return _timed(layer, device, budget_s, ahead=False).measured(point)
    x = torch.zeros(1, device=device)

    def burst() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    def one() -> None:
        x.add_(1.0)

    run: Run = burst
    details: dict[str, Value] = {}
    if point["kind"] == "graph":
        if device != "cuda":
            raise PlannerError("a CUDA graph needs a GPU; this is a CPU")
        run = captured(one, LAUNCHES)
    elif device == "cuda":
        eager = measure(burst, device=device, budget_s=0.2 * budget_s, ahead=False)
        details["eager_us"] = round(eager.median / LAUNCHES / units.MICRO, 3)
    found = _timed(run, device, budget_s)
    each = {name: getattr(found, name) / LAUNCHES for name in ("median", "low", "high")}
    return replace(found, **each).measured(point, **details)


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
    take = taker(_product(point, device), clock, ahead=False)  # no pauses
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
    if device == "cuda":
        total, source = _gpu_fact(point["name"])
    elif point["name"] == "usable":
        total, source = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "MemTotal"
    else:
        raise PlannerError(f"'{point['name']}' is a fact of a GPU; this is a CPU")
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
