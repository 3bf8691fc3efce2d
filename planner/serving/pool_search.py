"""The search of disaggregated deployments: a pool for prompts and one for answers, whole workers of each on the GPUs at hand.

Splits of both pools are chosen apart, those that no other beats in speed and in work per GPU; then all their pairs are priced
with every share of the GPUs, at every load. What comes out is compared with the best aggregated deployments under the same limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, unique
from planner.serving import pools
from planner.serving.candidates import loads
from planner.serving.prefill_queue import Prefill
from planner.serving.priced_table import Priced, Task, broadcast, columns_of
from planner.serving.result import ServingEstimate
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_search import MOST_RUNNING, Starting, front_of, raised, starting
from planner.serving.traffic import Traffic

MOST_PREFILL, MOST_DECODE, MOST_LOADED = 5, 6, 16
"""Splits of each pool that are paired; of each where the load is given, so that pairs need not be priced at several."""
SHARES, SHARES_LOADED = 12, 32
"""Shares of the GPUs that the pool of answers may get; where the load is given."""
ENOUGH = 10**6
"""Workers that never make the other pool wait."""
IDLE, WAITED_FOR = 0.5, 3.0
"""Share of the time of the workers for prompts that the answers ask of them: up to the first, fewer workers do; above the second,
fewer requests in flight are answered as fast."""


def pool_pairs(one: Served, task: Task, least: float = 0.0) -> Priced:
    """Pairs of pools of one engine and format that start, at the load of the task or at loads that their cache holds; those whose
    workers for prompts may keep up with ``least`` tokens/s: with full passes, and none before, at the fastest clock."""
    start = starting(one, task)
    least_gpus = int(np.min(np.asarray(start.layout.engine_gpus), initial=task.gpus))
    for room in (task.gpus - least_gpus, task.gpus // 2):  # beside the smallest worker; of the same size, of which a pair fits
        found = _pairs_of(one, task, start.within(room), least)
        if found is not None:
            return found
    return Priced.nothing(one, start.layout, start.counts)


def _pairs_of(one: Served, task: Task, start: Starting, least: float) -> Priced | None:
    """The same of some splits; None where no two of those that are paired fit on the GPUs."""
    layout = start.layout
    if not len(start):
        return None
    prompts = pools.prefill_of(one, layout, task.priced_traffic)
    prefills = prefill_splits(prompts, task)
    decodes = decode_splits(one, task, start, prompts.take([next(iter(prefills))], ENOUGH))
    rows = _whole_workers(task, layout, prefills, decodes)
    if not len(rows):
        return None
    if least:
        rows = rows[rows[:, 2] * prompts.queue().capacity[rows[:, 0]] * task.traffic.output.mean >= least]
        if not len(rows):
            return Priced.nothing(one, layout, start.counts)
    prefill = prompts.take(rows[:, 0], rows[:, 2])
    decode = replace(raised(one, task, layout.take(rows[:, 1]), rows[:, 4]), replicas=rows[:, 3])
    value = np.full(len(rows), task.traffic.value) if task.loaded else (rows[:, 4] * rows[:, 3]).astype(np.float64)
    found = pools.compared(one, prefill, decode, task.priced_traffic, value)
    return Priced.of(one, decode, found, columns_of(found, task, value), start.counts, prefill.layout)


def prefill_splits(prompts: Prefill, task: Task) -> dict[int, float]:
    """Rows that no other beats in time of a prompt and in prompts per GPU, those within the limit on TTFT, and the seconds of a
    worker that a prompt takes in full passes."""
    queue, size = prompts.queue(busy=1.0), np.asarray(prompts.layout.engine_gpus)
    service, own = (broadcast(value, len(size)) for value in (1.0 / queue.capacity, queue.first))
    each = 1.0 / (service * size)
    rows = _front(1.0 / own, each, size, task)
    quick = rows[own[rows] <= task.limits.ttft]
    most = MOST_LOADED if task.loaded else MOST_PREFILL
    return {int(row): float(service[row]) for row in _spread(quick if len(quick) else rows[:1], most)}


def _front(speed: Floats, each: Floats, size: NDArray[np.int64], task: Task) -> NDArray[np.intp]:
    """Rows that no other beats in both; under a load none that takes no more GPUs: what is left must hold whole workers. From the
    fastest on."""
    if not task.loaded:
        return front_of(speed, each)
    found = []
    for most in unique(size):
        rows = np.flatnonzero(size <= most)
        front = rows[front_of(speed[rows], each[rows])]
        found.append(front[size[front] == most])
    rows = np.concatenate(found)
    return rows[np.argsort(-speed[rows], kind="stable")]


@dataclass(frozen=True)
class Answering:
    """A worker that decodes, where prompts never make it wait."""

    most: float
    """Requests that it runs at once."""
    loads: Floats
    """Requests in flight, some of those that it holds."""
    rates: Floats
    """Requests/s that it answers then."""

    def rate(self, load: Any) -> Floats:
        """Requests/s at other loads, along straight lines between logarithms."""
        return np.exp(np.interp(np.log(load), np.log(self.loads), np.log(self.rates)))


def decode_splits(one: Served, task: Task, start: Starting, prompts: Prefill) -> dict[int, Answering]:
    """Rows that at some load no other beats in tokens/s of a user and of a GPU, where ``prompts`` never make them wait."""
    layout, most = start.layout, start.most
    grid = loads(float(np.max(most)), 8)
    rows, columns = np.nonzero(grid[None, :] <= most[:, None])
    held = layout.take(rows)
    found = pools.compared(
        one, prompts, raised(one, task, held, grid[columns]),
        replace(task.traffic, load="concurrency"), grid[columns].astype(np.float64),
    )  # fmt: skip
    each = np.asarray(found.output_tokens_per_second) / np.asarray(held.engine_gpus)
    speed = 1.0 / np.asarray(found.tpot.mean)
    kept = np.flatnonzero(np.asarray(found.tpot.of(task.limits.percentile)) <= task.limits.tpot)
    kept = kept if len(kept) else np.arange(len(rows))
    best = rows[kept[_front(speed[kept], each[kept], broadcast(held.engine_gpus, len(rows))[kept], task)]]
    _, first = np.unique(best, return_index=True)
    rates = np.asarray(found.requests_per_second)
    return {
        int(row): Answering(float(most[row]), grid[columns[rows == row]].astype(np.float64), rates[rows == row])
        for row in _spread(best[np.sort(first)], MOST_LOADED if task.loaded else MOST_DECODE)
    }


def _spread(rows: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Some of many, both ends included."""
    return rows[unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.intp))]


def _whole_workers(
    task: Task, layout: ServingLayout, prefills: Mapping[int, float], decodes: Mapping[int, Answering]
) -> NDArray[np.int64]:
    """Rows of (prefill split, decode split, prefill workers, decode workers, requests at a decode worker)."""
    size, found = np.asarray(layout.engine_gpus), []
    for (first, service), (second, worker) in itertools.product(prefills.items(), decodes.items()):
        largest = (task.gpus - int(size[first])) // int(size[second])
        if largest < 1:
            continue
        shares = min(SHARES_LOADED if task.loaded else SHARES, largest)
        workers = unique(np.linspace(1, largest, shares).round().astype(np.int64))
        others = (task.gpus - workers * int(size[second])) // int(size[first])
        if task.loaded:
            share = task.traffic.value / workers if task.traffic.load == "concurrency" else np.ones(len(workers))
            each = np.maximum(np.ceil(share), 1.0).astype(np.int64)[:, None]
            wanted = np.ones(each.shape, dtype=bool)
        else:
            each = loads(min(worker.most, task.pins.get("max_batch", MOST_RUNNING)), 2)[None, :]
            wanted = _wanted(workers[:, None] * worker.rate(each) * service / others[:, None])
        at, load = np.nonzero(wanted)
        columns = (np.full(len(at), first), np.full(len(at), second), others[at], workers[at])
        found.append(np.column_stack([*columns, np.broadcast_to(each, wanted.shape)[at, load]]))
    return np.concatenate(found) if found else np.zeros((0, 5), dtype=np.int64)


def _wanted(busy: Floats) -> NDArray[np.bool_]:
    """By number of workers that decode and load, where ``busy`` is the share of the time of those for prompts that is asked of
    them: not with so few of the former that the next number leaves the others idle too, nor at loads above one that they cannot
    keep up with."""
    idle, late = np.zeros(busy.shape, dtype=bool), np.zeros(busy.shape, dtype=bool)
    idle[:-1] = busy[1:] <= IDLE
    late[:, 1:] = busy[:, :-1] > WAITED_FOR
    return ~(idle | late)


def priced_pools(
    one: Served, prefill: ServingLayout, decode: ServingLayout, traffic: Traffic, value: Any = None
) -> ServingEstimate:  # fmt: skip
    """Two pools priced; they start where both do. ``value`` replaces that of ``traffic``."""
    found = pools.estimate(one, prefill, decode, traffic, value)
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, prefill, traffic)
    return replace(found, fits=np.asarray(found.fits) & np.asarray(memory.fits))
