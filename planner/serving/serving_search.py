"""The search of a deployment: every legal split of every engine and format at every load, and the best of them by what is asked.

Replicas are independent engines: one of each is priced, and as many as the GPUs hold share the requests. What may not start is
never ranked above what does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, unique
from planner.record import record
from planner.serving.candidates import at_loads, engine_layouts
from planner.serving.engine_passes import Engine
from planner.serving.priced_table import (
    COUNTS,
    Choice,
    Priced,
    Task,
    below,
    broadcast,
    columns_of,
    estimate_row,
    estimate_rows,
    traffic_of,
)  # fmt: skip
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate, running_at_most, with_parts
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_rules import fills_nodes, legal, most_sequences, usual_batch

NEAR_FASTEST = 0.95
"""Interactive: of what reaches this part of the highest speed per user, the highest throughput."""
FINALISTS = 8
"""Splits of every objective whose loads are looked at closely, of every engine and format."""
SEVERAL = 64
"""Rows that are looked at for every deployment that is wanted, and how many times as many where those are too few."""
FEW = 8
"""Of the loads every so many-th is looked at of all splits: factors of four."""
AT_ONCE = 512
"""Rows that are priced at once rather than in two rounds: a table of so few costs as much as one of none."""
CHUNKS, CHUNKS_WITHIN = (0.25, 0.5, 2.0), (512, 2**16)
"""Token budgets of a step that are tried in addition to the engine's default, as factors, and the least and the largest."""
MOST_RUNNING = 2**15
"""Sequences that an engine is asked to run at once at most."""


def splits(one: Served, task: Task) -> tuple[ServingLayout, int]:
    """Legal splits of one engine with its default batch and token budget where they are not pinned, and how many there were."""
    layout = engine_layouts(one.model, task.gpus // max(task.pins.get("replicas", 1), 1), task.pins)
    count = int(np.size(layout.tp))
    tokens = one.engine.default_max_tokens(one.hardware, layout)
    layout = replace(
        layout,
        max_tokens=_column(task.pins.get("max_tokens", tokens), count),
        gpu_weights=_column(task.pins.get("gpu_weights", 100), count),
    )
    batch = usual_batch(one.engine, one.hardware, layout)
    layout = replace(layout, max_batch=_column(task.pins.get("max_batch", batch), count))
    if not count:
        return layout, 0
    allowed = broadcast(legal(one.model, one.hardware, one.engine, one.precision, layout), count)
    if not task.pins.keys() & {"tp", "pp", "attn_dp"}:  # what is said is priced, though the exports may not start it
        allowed = allowed & fills_nodes(layout.engine_gpus, one.hardware.gpus_per_node)
    return layout.take(np.flatnonzero(allowed)), count


def _column(value: Any, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.asarray(value, dtype=np.int64), (count,)).copy()


@record
class Starting:
    """Legal splits of one engine and format that start, as columns."""

    layout: ServingLayout
    most: Floats
    """Requests of the task that run at once in one engine at most."""
    counts: dict[str, int]
    """Of ``Priced``: splits before rules and memory, legal ones, those that start."""

    def __len__(self) -> int:
        return len(self.most)

    def within(self, gpus: int) -> Starting:
        """Those with engines of at most so many GPUs."""
        rows = np.flatnonzero(np.asarray(self.layout.engine_gpus) <= gpus)
        return replace(self, layout=self.layout.take(rows), most=self.most[rows])


def starting(one: Served, task: Task) -> Starting:
    """The splits that an engine may run and that start."""
    layout, looked_at = splits(one, task)
    count = int(np.size(layout.tp))
    if not count:
        return Starting(layout=layout, most=np.zeros(0), counts={"looked_at": looked_at, "legal": 0, "fitting": 0})
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, layout, task.traffic)
    limit = np.minimum(MOST_RUNNING, most_sequences(one.engine, layout))
    most = broadcast(running_at_most(one, replace(layout, max_batch=limit), task.traffic, memory), count)
    rows = np.flatnonzero(broadcast(memory.fits, count) & (most >= 1.0))
    counts = {"looked_at": looked_at, "legal": count, "fitting": len(rows)}
    return Starting(layout=layout.take(rows), most=most[rows], counts=counts)


def priced(one: Served, task: Task, chunks: Sequence[float] = (), alone: str = "") -> Priced:
    """All splits of one engine and format that start, at the load of the task, or at every load that their cache holds.

    Loads are looked at in two rounds where there are many rows: of all splits a few, of those that may be among the best every one
    of ``loads``. ``chunks``: of the best split of every objective the token budget of a step is varied too, by these factors.
    ``alone``: only what is best for this objective is asked for.
    """
    found = starting(one, task)
    layout, counts = found.layout, found.counts
    if not len(found):
        return Priced.nothing(one, layout, counts)
    most = np.minimum(found.most, task.pins.get("max_batch", MOST_RUNNING))
    most = np.minimum(most, _with_its_batch(one, task, layout, most))
    layout = replace(layout, replicas=_replicas(task, layout))
    if task.loaded:
        return _table(one, task, with_batch(one, layout, task), np.full(len(most), task.traffic.value), counts)
    close, every = np.arange(len(most)), at_loads(most)
    if len(every[0]) > AT_ONCE:
        coarse = _at_loads(one, task, layout, at_loads(most, FEW), counts)
        close = unique(coarse["split"][finalists(coarse, task, alone)].astype(np.intp))
        every = at_loads(most[close])
    table = _at_loads(one, task, layout.take(close), every, counts)
    if not chunks or not len(table) or "max_tokens" in task.pins:
        return table
    best = {row for objective in task.objectives for row in ranked(table, task, objective, 1)}
    rows = np.array(sorted({int(close[int(table["split"][row])]) for row in best}))
    return below(table, _with_chunks(one, task, layout.take(rows), most[rows], chunks))


def _with_chunks(one: Served, task: Task, layout: ServingLayout, most: Floats, chunks: Sequence[float]) -> Priced:
    """Some splits with every token budget of a step, the engine's own times ``chunks``."""
    rows = np.repeat(np.arange(len(most)), len(chunks))
    varied = layout.take(rows)
    budget = (np.asarray(varied.max_tokens) * np.tile(chunks, len(most))).astype(np.int64)
    varied = replace(varied, max_tokens=np.clip(budget, *CHUNKS_WITHIN))
    if "max_batch" in task.pins:
        kept = np.flatnonzero(varied.max_batch <= most_sequences(one.engine, varied))
        rows, varied = rows[kept], varied.take(kept)
    held = np.minimum(most[rows], _with_its_batch(one, task, varied, most[rows]))
    return _at_loads(one, task, varied, at_loads(held), dict.fromkeys(COUNTS, 0))


def _with_its_batch(one: Served, task: Task, layout: ServingLayout, most: Any) -> Any:
    """What runs at once with the batch limit raised to ``most``: a larger batch takes room from the cache."""
    larger = raised(one, task, layout, most)
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, larger, task.traffic)
    return np.maximum(running_at_most(one, larger, task.traffic, memory), 1.0)


def raised(one: Served, task: Task, layout: ServingLayout, batch: Any) -> ServingLayout:
    """The batch limit raised to ``batch`` where that is more and it is not pinned, as far as the engine starts with its budget of
    a step."""
    if "max_batch" in task.pins:
        return layout
    wanted = np.maximum(layout.max_batch, np.asarray(batch).astype(np.int64))
    return replace(layout, max_batch=np.minimum(wanted, most_sequences(one.engine, layout)))


def _replicas(task: Task, layout: ServingLayout) -> NDArray[np.int64]:
    """As many engines as the GPUs hold; not more than requests in flight."""
    most = np.maximum(task.gpus // np.asarray(layout.engine_gpus), 1)
    if "replicas" in task.pins:
        return np.full_like(most, task.pins["replicas"])
    if task.loaded and task.traffic.load == "concurrency":
        most = np.minimum(most, max(int(task.traffic.value), 1))
    return most


def with_batch(one: Served, layout: ServingLayout, task: Task) -> ServingLayout:
    """The batch limit raised where more requests are in flight at an engine than its default runs."""
    if task.traffic.load != "concurrency":
        return layout
    return raised(one, task, layout, np.ceil(task.traffic.value / np.asarray(layout.replicas)))


def _at_loads(
    one: Served, task: Task, layout: ServingLayout, at: tuple[NDArray[np.intp], NDArray[np.int64]], counts: dict[str, int]
) -> Priced:
    """Splits at several loads of an engine each: ``at`` (rows, loads)."""
    rows, load = at
    layout = raised(one, task, layout.take(rows), load)
    return _table(one, task, layout, load * np.asarray(layout.replicas), counts, split=rows)


def _table(
    one: Served, task: Task, layout: ServingLayout, load: Any, counts: dict[str, int], split: Any = None
) -> Priced:
    """Price rows; those that do not start are left out."""
    found = estimate(one, layout, task.priced_traffic, load, parts=False)
    return Priced.of(one, layout, found, columns_of(found, task, load, split), counts)


def value_of(table: Priced, task: Task, objective: str, fastest: float = 0.0) -> Floats:
    """What is to be large, by row: what a row that keeps its limits is worth; below zero where it breaks them, by how much.

    ``fastest``: tokens/s of a user that another table reaches.
    """
    if task.loaded:
        worth = 1.0 / table["e2e"]
    elif task.limited or objective == "offline":
        worth = table["total"]
    elif objective == "balanced":
        worth = table["total"] * table["user"]
    else:
        fastest = np.max(table["user"], initial=fastest, where=table["score"] <= 1.0)
        near = table["user"] >= NEAR_FASTEST * fastest
        worth = np.where(near, table["total"], table["user"] / max(fastest, 1e-30) * np.finfo(float).eps)
    return np.where(table["score"] <= 1.0, worth, -table["score"])


def ranked(table: Priced, task: Task, objective: str, top: int) -> NDArray[np.intp]:
    """Rows of the ``top`` best deployments, each at its best load; where none keeps the limits, those that miss by the least."""
    if not len(table):
        return np.zeros(0, dtype=np.intp)
    worth = value_of(table, task, objective)
    order = np.lexsort((np.asarray(broadcast(table.layout.engine_gpus, len(table))), -worth))
    count, first = 0, np.zeros(0, dtype=np.intp)
    while len(first) < top and count < len(order):
        count = max(SEVERAL * top, SEVERAL * count)
        _, first = np.unique(table.deployments(order[:count]), axis=0, return_index=True)
    return order[np.sort(first)[:top]]


def finalists(table: Priced, task: Task, alone: str = "") -> NDArray[np.intp]:
    """Rows of the splits that may be among the best once their loads are looked at closely; ``alone`` as in ``priced``.

    Under limits the last load that keeps them is somewhere below the first that does not: a split is taken to be worth at most
    what it does there, though throughput does not grow with the load everywhere (docs/log/serving.md, 2026-11-29).
    """
    found = [ranked(table, task, objective, FINALISTS) for objective in ((alone,) if alone else task.objectives)]
    if task.limited:
        order = np.lexsort((table["load"], table["split"]))
        split, kept = table["split"][order], table["score"][order] <= 1.0
        after = np.concatenate([[False], kept[:-1] & (split[1:] == split[:-1])])
        first_broken = order[~kept & after]
        bound = table["total"][first_broken]
        least = np.max(table["total"], initial=0.0, where=table["score"] <= 1.0)
        hopeful = first_broken[(bound >= least)]
        found.append(hopeful[np.argsort(-table["total"][hopeful])][: 2 * FINALISTS])
    return unique(np.concatenate(found if alone else [*found, front(table)]))


def front(table: Priced) -> NDArray[np.intp]:
    """Rows of the Pareto front: no other row has both more tokens/s and more tokens/s per user. From fast to many."""
    return front_of(table["user"], table["total"])


def front_of(speed: Floats, total: Floats) -> NDArray[np.intp]:
    """Rows that no other beats in both, from the fastest on; differences of rounding beat nothing."""
    speed, total = _rounded(speed), _rounded(total)
    order = np.lexsort((-total, -speed))
    total = total[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(total)[:-1]]) if len(total) else total
    return order[total > before]


def _rounded(values: Floats) -> Floats:
    """To twelve digits: two ways to the same number differ by less."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa, 12), exponent)


def chosen(table: Priced, task: Task, rows: Sequence[int]) -> list[Choice]:
    """Rows of a table as deployments; what a search leaves out is priced, for those of one engine and format together."""
    found: dict[int, Choice] = {}
    for source in sorted({int(table.source[row]) for row in rows}):
        one, mine = table.served[source], [int(row) for row in rows if table.source[row] == source]
        some, traffics = table.take(np.array(mine)), [traffic_of(table, task, row) for row in mine]
        answers = with_parts(Engine(one, some.layout, traffics[0]), estimate_rows(table.estimates, some.place))
        for at, (row, traffic) in enumerate(zip(mine, traffics, strict=True)):
            found[row] = Choice(
                served=one, layout=some.layout.row(at), prefill=some.prefill and some.prefill.row(at), traffic=traffic,
                found=estimate_row(answers, at), limits=task.limits,
            )  # fmt: skip
    return [found[int(row)] for row in rows]
