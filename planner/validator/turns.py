"""One rank that profiles its processor and trains in turns: each operator once, then a step, and again (torch)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional

from planner.profiler import operators
from planner.profiler.definitions import gemm, number, text
from planner.profiler.points import Point
from planner.reference.model import Place, turn
from planner.reference.split import Split, Stage
from planner.validator.clock import Clock
from planner.validator.training import Run


def operator(point: Point, split: Split) -> tuple[Callable[[], object], int]:
    """What to time for a point, and how many times it does the operator."""
    op, width = point.values.get("op"), split.model.head_dim
    if point.family == "gemm":
        return product(point, split), 1
    if op not in ("rope", "swiglu"):
        return operators.operator(point, "cpu"), 1
    rows, columns = int(number(point, "rows")), int(number(point, "columns"))
    if op == "swiglu":
        gate, up = (torch.randn(rows, columns, requires_grad=True) for _ in range(2))
        if point["pass"] == "forward":
            return lambda: functional.silu(gate.detach()) * up.detach(), 1
        out = functional.silu(gate) * up
        upstream = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (gate, up), upstream, retain_graph=True), 1
    heads = max(columns // width, 1)
    x = torch.randn(1, rows, heads, width, requires_grad=True)
    place = Place(cosine=torch.randn(1, rows, 1, width // 2), sine=torch.randn(1, rows, 1, width // 2))
    upstream = torch.randn_like(x)
    return lambda: torch.autograd.grad(turn(x, place, False), x, upstream), 2


def product(point: Point, split: Split) -> Callable[[], object]:
    """A product as the model has it: queries, keys and values apart, and gate and up; their input's gradients are added."""
    model, tp = split.model, split.tp
    heads = (model.query_size, model.key_size, model.value_size)
    whole: dict[int, tuple[int, ...]] = {sum(heads): heads}
    if model.gated:
        whole[2 * model.ffn_size] = (model.ffn_size, model.ffn_size)
    n, k = int(number(point, "n")), int(number(point, "k"))
    sizes = whole.get(n * tp, ()) if k == model.hidden_size else ()
    dtype, pass_, m = text(point, "dtype"), text(point, "pass"), number(point, "m")
    each = [size // tp for size in sizes] or [n]
    apart = [operators.operator(gemm(dtype, pass_, m, size, k), "cpu") for size in each]
    if pass_ != "dgrad":
        return lambda: [one() for one in apart]

    def gradient() -> object:
        first, *others = (one() for one in apart)
        for other in others:
            first = torch.add(first, other)
        return first

    return gradient


def filled(run: Run) -> Run:
    """Memory with small numbers in it."""
    run.allocate(fill=False)
    with torch.no_grad():
        for part in run.parts:
            for parameter in part.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).normal_(0.0, 0.02)
    return run


def small(split: Split, layers: int) -> Split:
    """Layers without work on one stage, split by as many ranks: what is left is the host's."""
    model = dataclasses.replace(
        split.model, name="small", num_layers=layers, hidden_size=8 * split.model.num_heads, head_dim=8, ffn_size=8 * split.tp,
        vocab_size=8 * split.tp,
    )  # fmt: skip
    rest = split.world // split.tp
    return dataclasses.replace(
        split, model=model, sequence_length=2 * split.tp, pp=1, dp=rest, dp_shard=rest, zero=1, num_microbatches=4,
        stages=(Stage(rank=0, layers=tuple(range(layers))),),
    )  # fmt: skip


Passes = dict[tuple[int, str, int], float]
"""Processor seconds by stage, kind and microbatch."""
Host = dict[str, tuple[float, float]]
"""Processor seconds of the host by kind of pass: for a layer, and for embedding and head together."""


def timed_step(run: Run, clock: Clock, number: int) -> Passes:
    """Takes a step."""
    with clock.span("step"):
        run.step(*run.data(number))
    return {(t.stage, t.kind, t.microbatch): t.thread for t in clock.take() if t.microbatch >= 0}


def keep_memory() -> None:
    """Memory that is freed stays with the process, as a GPU's allocator has it: else every microbatch meets its activations as
    new pages, 3 us of the kernel for 4 KiB. Without glibc nothing changes.  [man mallopt]"""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, LARGEST), (M_TOP_PAD, PAD)):
            libc.mallopt(option, value)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST, PAD = 2**31 - 1, 2**26
"""Bytes: a block that is given back to the kernel; what is asked of it at once."""


def on_rank(split: Split, points: Sequence[Point], rounds: int) -> tuple[list[list[float]], list[Passes], Host]:
    """Seconds of each point by round, of the passes by round, and of the host."""
    keep_memory()
    device = torch.device("cpu")
    runs = [operator(point, split) for point in points]
    host = host_seconds(split)
    run, clock = filled(Run(split, device)), Clock(device)
    clock.attach(run)
    clock.on = True
    samples: list[list[float]] = [[] for _ in points]
    steps = []
    for number_ in range(1 + rounds):  # the first round warms up
        for found, (work, times) in zip(samples, runs, strict=True):
            start = time.thread_time()
            work()
            found.append((time.thread_time() - start) / times)
        steps.append(timed_step(run, clock, number_))
        if number_ == 0:
            for found in samples:
                found.clear()
            steps.clear()
    return samples, steps, host


def host_seconds(split: Split) -> Host:
    """Passes over layers without work: one layer and three tell a layer from the ends."""
    device, found = torch.device("cpu"), {}
    for layers in (1, 3):
        run, clock = filled(Run(small(split, layers), device)), Clock(device)
        clock.attach(run)
        clock.on = True
        steps = [timed_step(run, clock, number_) for number_ in range(4)][1:]
        found[layers] = {kind: statistics.median(middle(steps, kind)) for kind in ("F", "B")}
    host = {}
    for kind in ("F", "B"):
        each = max(found[3][kind] - found[1][kind], 0.0) / 2.0
        host[kind] = (each, max(found[1][kind] - each, 0.0))
    return host


def middle(steps: Iterable[Passes], kind: str) -> list[float]:
    """Passes of all microbatches but the first, which gathers weights, and the last, which reduces gradients."""
    last = max(number_ for step in steps for _, _, number_ in step)
    return [t for step in steps for (_, k, number_), t in step.items() if k == kind and 0 < number_ < last]
