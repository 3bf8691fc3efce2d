"""The search of disaggregated deployments: a pool for prompts and one for answers, whole workers of each on the GPUs at hand.

Splits of both pools are chosen apart, those that no other beats in speed and in work per GPU; then all their pairs are priced
with every share of the GPUs, at every load. What comes out is compared with the best aggregated deployments under the same limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.serving import pools
from planner.serving.candidates import loads
from planner.serving.engine_passes import Engine
from planner.serving.priced_table import Choice, Priced, Task, broadcast, columns_of
from planner.serving.result import ServingEstimate
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_search import MOST_RUNNING, choices, front_of, starting
from planner.serving.traffic import Traffic

MOST_PREFILL, MOST_DECODE = 5, 6
"""Splits of each pool that are paired."""
SHARES = 12
"""Shares of the GPUs that the pool of answers may get."""
ENOUGH = 10**6
"""Workers that never make the other pool wait."""


def pool_pairs(one: Served, task: Task) -> Priced:
    """Pairs of pools of one engine and format that start, at the load of the task or at loads that their cache holds."""
    start = starting(one, task)
    layout, most = start.layout, start.most
    nothing = Priced.nothing(one, layout, {"looked_at": start.counts["looked_at"]})
    if not len(start) or task.gpus < 2:
        return nothing
    prefills = prefill_splits(one, task, layout)
    decodes = decode_splits(one, task, layout, most, layout.row(int(prefills[0])) if len(prefills) else None)
    rows = _whole_workers(task, layout, prefills, decodes, most)
    if not len(rows):
        return nothing
    prefill = replace(layout.take(rows[:, 0]), replicas=rows[:, 2])
    decode = layout.take(rows[:, 1])
    decode = replace(decode, replicas=rows[:, 3], max_batch=np.maximum(decode.max_batch, rows[:, 4]))
    value = np.full(len(rows), task.traffic.value) if task.loaded else (rows[:, 4] * rows[:, 3]).astype(np.float64)
    traffic = task.traffic if task.loaded else replace(task.traffic, load="concurrency")
    found = pools.compared(one, prefill, decode, traffic, value)
    return Priced.of(one, decode, columns_of(found, task, value), start.counts, prefill)


def prefill_splits(one: Served, task: Task, layout: ServingLayout) -> NDArray[np.intp]:
    """Rows that no other beats in time of a prompt and in prompts per GPU, those within the limit on TTFT."""
    service, own = (
        broadcast(value, int(np.size(layout.tp)))
        for value in pools.prompt_time(Engine(one, layout, task.traffic), 1.0)
    )
    each = 1.0 / (service * np.asarray(layout.engine_gpus))
    rows = front_of(1.0 / own, each)
    quick = rows[own[rows] <= task.limits.ttft]
    return _spread(quick if len(quick) else rows[:1], MOST_PREFILL)


def decode_splits(
    one: Served, task: Task, layout: ServingLayout, most: Floats, prefill: ServingLayout | None
) -> NDArray[np.intp]:
    """Rows that at some load no other beats in tokens/s of a user and of a GPU, where prompts never make them wait."""
    if prefill is None:
        return np.zeros(0, dtype=np.intp)
    grid = loads(float(np.max(most)), 8)
    rows, columns = np.nonzero(grid[None, :] <= most[:, None])
    found = pools.compared(
        one, replace(prefill, replicas=ENOUGH), replace(layout.take(rows),
        max_batch=np.maximum(np.asarray(layout.max_batch)[rows], grid[columns])),
        replace(task.traffic, load="concurrency"), grid[columns].astype(np.float64),
    )  # fmt: skip
    each = np.asarray(found.output_tokens_per_second) / np.asarray(layout.engine_gpus)[rows]
    speed = 1.0 / np.asarray(found.tpot.mean)
    kept = np.flatnonzero(np.asarray(found.tpot.of(task.limits.percentile)) <= task.limits.tpot)
    kept = kept if len(kept) else np.arange(len(rows))
    best = rows[kept[front_of(speed[kept], each[kept])]]
    _, first = np.unique(best, return_index=True)
    return _spread(best[np.sort(first)], MOST_DECODE)


def _spread(rows: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Some of many, both ends included."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.intp))]


def _whole_workers(
    task: Task, layout: ServingLayout, prefills: NDArray[np.intp], decodes: NDArray[np.intp], most: Floats
) -> NDArray[np.int64]:
    """Rows of (prefill split, decode split, prefill workers, decode workers, requests at a decode worker)."""
    size = np.asarray(layout.engine_gpus)
    rows = []
    for first, second in itertools.product(prefills, decodes):
        largest = (task.gpus - int(size[first])) // int(size[second])
        if largest < 1:
            continue
        counts = np.unique(np.linspace(1, largest, min(SHARES, largest)).round().astype(int))
        grid = [1] if task.loaded else loads(min(float(most[second]), task.pins.get("max_batch", MOST_RUNNING)), 2)
        for workers in counts:
            others = (task.gpus - workers * int(size[second])) // int(size[first])
            each = (
                [max(int(np.ceil(task.traffic.value / workers)), 1)]
                if task.loaded and task.traffic.load == "concurrency"
                else grid
            )
            rows += [(first, second, others, workers, load) for load in each]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def chosen_pools(table: Priced, task: Task, rows: Sequence[int]) -> list[Choice]:
    """Rows of ``pool_pairs``, priced again with all that an estimate says."""

    def price(one: Served, some: Priced, traffic: Traffic) -> ServingEstimate:
        assert some.prefill is not None
        return priced_pools(one, some.prefill, some.layout, traffic, some["load"])

    return choices(table, task, rows, price)


def priced_pools(
    one: Served, prefill: ServingLayout, decode: ServingLayout, traffic: Traffic, value: Any = None
) -> ServingEstimate:  # fmt: skip
    """Two pools priced; they start where both do. ``value`` replaces that of ``traffic``."""
    found = pools.estimate(one, prefill, decode, traffic, value)
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, prefill, traffic)
    return replace(found, fits=np.asarray(found.fits) & np.asarray(memory.fits))
