"""Work that takes many searches, dealt over the processors of the machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from planner.plan_file import Plan
from planner.questions.best_plan import resolved_of
from planner.questions.report.scaling import Point, Scaling, scaling, sizes

WORKERS = 8
"""Processes at most."""
BELOW = 4
"""Sizes below the cluster that are looked at, evenly in the logarithm."""


def looked_at(plan: Plan) -> list[int]:
    """Sizes of the cluster for the scaling picture: one node, the cluster, two and four times it, and BELOW - 1 between."""
    hardware = plan.cluster().hardware
    every = sizes(plan.num_gpus, int(hardware.gpus_per_node))
    below = [count for count in every if count < plan.num_gpus]
    picked = sorted({round(number * (len(below) - 1) / (BELOW - 1)) for number in range(BELOW)}) if below else []
    return [*(below[number] for number in picked), *(count for count in every if count >= plan.num_gpus)]


def one_size(plan: Plan, count: int) -> Scaling:
    """Both points at one size."""
    return scaling(resolved_of(plan), counts=[count])


def joined(parts: list[Scaling]) -> Scaling:
    """Sizes that were searched apart as one, smallest first, each with its efficiency."""
    return Scaling(
        strong=_with_efficiency([one for part in parts for one in part.strong]),
        weak=_with_efficiency([one for part in parts for one in part.weak]),
    )


def _with_efficiency(points: list[Point]) -> tuple[Point, ...]:
    ordered = sorted(points, key=lambda one: one.num_gpus)
    first = next((one.tokens_per_second_per_gpu for one in ordered if one.tokens_per_second_per_gpu), None)
    return tuple(
        replace(one, efficiency=one.tokens_per_second_per_gpu / first)
        if first and one.tokens_per_second_per_gpu else replace(one, efficiency=None)
        for one in ordered
    )  # fmt: skip


class Scaled:
    """Searches at other sizes that run beside this process, or in it where no other can be had."""

    def __init__(self, plan: Plan, pool: ProcessPoolExecutor | None) -> None:
        self._plan, self._counts = plan, looked_at(plan)
        largest_first = sorted(self._counts, key=lambda count: -abs(count - plan.num_gpus // 8))
        self._futures: dict[int, Future[Scaling]] | None = (
            None if pool is None else {count: pool.submit(one_size, plan, count) for count in largest_first}
        )

    def result(self, progress: object = None) -> Scaling:
        """Every size, joined; ``progress`` is told which one is waited for."""
        parts = []
        for count in self._counts:
            if callable(progress):
                progress(f"the best plan of {count:,} GPUs")
            parts.append(one_size(self._plan, count) if self._futures is None else self._futures[count].result())
        return joined(parts)


@contextmanager
def scaled(plan: Plan) -> Iterator[Scaled]:
    """Begin to search other sizes of the cluster. Processes that are left are ended with the block."""
    workers = min(os.cpu_count() or 1, WORKERS)
    pool: ProcessPoolExecutor | None = None
    with suppress(OSError, ValueError):  # no semaphores, no other processes
        if workers > 1:
            pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield Scaled(plan, pool)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


__all__ = ["Scaled", "joined", "looked_at", "scaled"]
