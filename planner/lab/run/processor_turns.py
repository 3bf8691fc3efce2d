"""One rank that profiles its processor and trains in turns: each operator once, then a step, and again (torch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planner.lab.profile import operator_runs as operators
from planner.lab.profile.definitions import gemm
from planner.lab.profile.points import Point
from planner.lab.profile.tensors import keep_memory
from planner.lab.reference.split import Split
from planner.lab.run.clock import Clock
from planner.lab.run.eager_pricing import Host
from planner.lab.run.rate import Passes, Rate, filled, host_seconds, passes_of, taken_step
from planner.lab.run.training import Run


def operator(point: Point, split: Split) -> Callable[[], object]:
    """What to time for a point."""
    return product(point, split) if point.family == "gemm" else operators.operator(point, "cpu")


def product(point: Point, split: Split) -> Callable[[], object]:
    """A product as the model has it: queries, keys and values apart, and gate and up; their input's gradients are added."""
    model, tp = split.model, split.tp
    heads = (model.query_size, model.key_size, model.value_size)
    whole: dict[int, tuple[int, ...]] = {sum(heads): heads}
    if model.gated:
        whole[2 * model.ffn_size] = (model.ffn_size, model.ffn_size)
    n, k = point.whole("n"), point.whole("k")
    sizes = whole.get(n * tp, ()) if k == model.hidden_size else ()
    dtype, pass_, m = point.text("dtype"), point.text("pass"), point.whole("m")
    each = [size // tp for size in sizes] or [n]
    apart = [operators.operator(gemm(dtype, pass_, m, size, k), "cpu") for size in each]
    if pass_ != "dgrad":
        return lambda: [one() for one in apart]

    def gradient() -> object:
        first, *others = (one() for one in apart)
        assert isinstance(first, Tensor)
        for other in others:
            assert isinstance(other, Tensor)
            first = torch.add(first, other)
        return first

    return gradient


def on_rank(split: Split, points: Sequence[Point], rounds: int) -> tuple[list[list[float]], list[Passes], Host, float]:
    """Each point by round, the passes by round and the host, all as multiples of what the yardstick took beside them; and the
    seconds of this rank's yardstick."""
    keep_memory()
    device = torch.device("cpu")
    runs = [operator(point, split) for point in points]
    rate = Rate()
    host = host_seconds(split, 1.0)
    run, clock = filled(Run(split, device)), Clock(device)
    clock.attach(run)
    clock.on, clock.between = True, rate.look
    samples: list[list[float]] = [[] for _ in points]
    steps = []
    for number_ in range(1 + rounds):  # the first round warms up
        seconds = []
        for work in runs:
            start = time.thread_time()
            work()
            seconds.append(time.thread_time() - start)
            rate.look()
        beside = rate.take()[0]
        for found, took in zip(samples, seconds, strict=True):
            found.append(took / beside)
        passes = passes_of(taken_step(run, clock, number_))
        beside = rate.take()[0]
        steps.append({key: took / beside for key, took in passes.items()})
        if number_ == 0:
            for found in samples:
                found.clear()
            steps.clear()
    return samples, steps, host, rate.yardstick.reference
