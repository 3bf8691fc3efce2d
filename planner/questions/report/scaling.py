"""Strong and weak scaling: the best plan at every size of the cluster, each searched, several sizes at once."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from planner.defaults import ResolvedJob
from planner.layout import Layout
from planner.plan_file import Plan
from planner.questions.best_plan import Best, best_of, on_cluster, resolved_of, with_batch

BEYOND = (2, 4)
"""Multiples of the cluster that are looked at in addition to the cluster itself."""
LARGEST = 2**21
"""GPUs that a cluster may have."""
BELOW = 4
"""Sizes below the cluster that are looked at, evenly in the logarithm."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best plan at one size; what was not found is None."""

    num_gpus: int
    num_nodes: int
    global_batch_size: int
    """Sequences per step."""
    fits: bool
    why_not: str
    """Why nothing fits or is legal; '' when something does."""
    step_time_s: float | None
    tokens_per_second: float | None
    """Of all GPUs."""
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_peak_gib: float | None
    efficiency: float | None
    """Throughput per GPU over that of the smallest size that fits."""
    layout: Layout | None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One job over sizes of the cluster."""

    strong: tuple[Point, ...]
    """The same global batch at every size."""
    weak: tuple[Point, ...]
    """The batch grows with the GPUs: as many sequences per GPU as in the job; at least one per step."""


def sizes(num_gpus: int, gpus_per_node: int) -> list[int]:
    """GPU counts: one node and its doublings below the cluster, the cluster, its multiples; within one node from 1 GPU."""
    one = gpus_per_node if num_gpus > gpus_per_node else 1
    found = []
    while one < num_gpus:
        found.append(one)
        one *= 2
    return [*found, num_gpus, *(num_gpus * times for times in BEYOND if num_gpus * times <= LARGEST)]


def looked_at(plan: Plan) -> list[int]:
    """Sizes of the cluster for the scaling picture: one node, the cluster, two and four times it, and BELOW - 1 between."""
    every = sizes(plan.num_gpus, int(plan.cluster().hardware.gpus_per_node))
    below = [count for count in every if count < plan.num_gpus]
    picked = sorted({round(number * (len(below) - 1) / (BELOW - 1)) for number in range(BELOW)}) if below else []
    return [*(below[number] for number in picked), *(count for count in every if count >= plan.num_gpus)]


def scaling(resolved: ResolvedJob, counts: Sequence[int] | None = None) -> Scaling:
    """The best plan at every count of GPUs, strong and weak; ``best_plan.resolved_of`` makes the job of a plan.

    Strong: the global batch of the job. Weak: B n / N sequences at n GPUs, rounded, at least 1. Each is a whole search of
    its own (0.1 to 3 s each, two per size).
    """
    job = resolved.job
    batch, own = job.workload.global_batch_size, job.cluster.num_gpus
    strong, weak = [], []
    for count in counts or sizes(own, int(job.cluster.hardware.gpus_per_node)):
        there = on_cluster(resolved, num_gpus=count)
        strong.append(point(best_of(there)))
        sequences = max(1, round(batch * count / own))
        weak.append(strong[-1] if sequences == batch else point(best_of(with_batch(there, sequences))))
    return Scaling(strong=_with_efficiency(strong), weak=_with_efficiency(weak))


def point(found: Best) -> Point:
    """One search as a point; its efficiency is filled in with the others'."""
    job, one = found.resolved.job, found.prediction if found.fits else None
    names = ("step_time_s", "tokens_per_second_per_gpu", "mfu", "memory_peak_gib")
    return Point(
        num_gpus=job.cluster.num_gpus, num_nodes=job.cluster.num_nodes, global_batch_size=job.workload.global_batch_size,
        fits=found.fits, why_not=found.why_not, tokens_per_second=found.tokens_per_second, efficiency=None,
        layout=found.layout if found.fits else None, **{name: None if one is None else getattr(one, name) for name in names},
    )  # fmt: skip


def joined(parts: Sequence[Scaling]) -> Scaling:
    """Sizes that were searched apart as one, smallest first."""
    strong, weak = ([one for part in parts for one in getattr(part, kind)] for kind in ("strong", "weak"))
    return Scaling(strong=_with_efficiency(strong), weak=_with_efficiency(weak))


def _with_efficiency(points: list[Point]) -> tuple[Point, ...]:
    ordered = sorted(points, key=lambda one: one.num_gpus)
    rates = [one.tokens_per_second_per_gpu for one in ordered]
    first = next(filter(None, rates), None)
    return tuple(
        replace(one, efficiency=rate / first if first and rate else None) for one, rate in zip(ordered, rates, strict=True)
    )  # fmt: skip


def one_size(plan: Plan, count: int) -> Scaling:
    """Both points at one size."""
    return scaling(resolved_of(plan), [count])


@contextmanager
def scaled(plan: Plan, processes: int) -> Iterator[Callable[[Callable[[str], None]], Scaling]]:
    """Begin to search other sizes of the cluster in ``processes``; in this one for 1, or where no other can be had.

    What is yielded waits for all sizes and says which one it waits for. Processes that are left are ended with the block.
    """
    counts, workers = looked_at(plan), min(os.cpu_count() or 1, processes)
    pool: ProcessPoolExecutor | None = None
    with suppress(OSError, ValueError):  # no semaphores, no other processes
        if workers > 1:
            pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    largest_first = sorted(counts, key=lambda count: -abs(count - plan.num_gpus // 8))
    begun = {count: pool.submit(one_size, plan, count) for count in largest_first} if pool else {}

    def result(progress: Callable[[str], None]) -> Scaling:
        parts = []
        for count in counts:
            progress(f"the best plan of {count:,} GPUs")
            parts.append(begun[count].result() if begun else one_size(plan, count))
        return joined(parts)

    try:
        yield result
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
