"""The search of a deployment: every legal split of every engine and format at every load, and the best of them by what is asked.

Replicas are independent engines: one of each is priced, and as many as the GPUs hold share the requests. What may not start is
never
ranked above what does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.serving.candidates import DEGREES, at_loads, engine_layouts, row_of, take
from planner.serving.estimate import estimate, running_at_most
from planner.serving.result import ServingEstimate
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_rules import legal
from planner.serving.traffic import Limits, Traffic

OBJECTIVES = ("offline", "balanced", "interactive")
"""The two ends of the front and its knee: most tokens/s; largest product of tokens/s and tokens/s per user; most tokens/s per
user."""
NEAR_FASTEST = 0.95
"""Interactive: of what reaches this part of the highest speed per user, the highest throughput."""
COLUMNS = ("load", "total", "user", "ttft", "tpot", "e2e", "score", "requests")
FINALISTS = 8
"""Splits of every objective whose loads are looked at closely, of every engine and format."""
FEW = 8
"""Of the loads every so many-th is looked at of all splits: factors of four."""
MOST_RUNNING = 2**15
"""Sequences that an engine is asked to run at once at most."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a search is about; engines and formats come with ``Served``."""

    gpus: int
    """GPUs to use at most."""
    traffic: Traffic
    """Lengths; and the load where it is given, else None in ``loaded``."""
    loaded: bool
    """The load of ``traffic`` is asked for; else loads are varied."""
    limits: Limits
    pins: Mapping[str, int] = field(default_factory=dict)
    """Fields of a layout that stay, replicas too."""

    @property
    def limited(self) -> bool:
        """A limit is set."""
        return bool(np.isfinite(self.limits.ttft) or np.isfinite(self.limits.tpot))


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Columns of deployments, priced: all of COLUMNS for the whole deployment."""

    served: tuple[Served, ...]
    source: NDArray[np.intp]
    """Which of ``served``."""
    layout: ServingLayout
    """Columns, replicas included."""
    prefill: ServingLayout | None = None
    """Columns of the pool of prompts; None: aggregated."""
    columns: Mapping[str, Floats]
    """load: requests in flight, or requests/s; total: output tokens/s; user: output tokens/s of a request; ttft, tpot: the figure
    that
    the limits are about, seconds; e2e: mean; score: largest of ttft and tpot over their limits; requests: requests/s."""
    looked_at: int = 0
    """Layouts before rules and memory."""
    legal: int = 0
    fitting: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def take(self, rows: Any) -> Priced:
        """Some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        prefill = None if self.prefill is None else take(self.prefill, rows)
        return replace(self, source=self.source[rows], layout=take(self.layout, rows), prefill=prefill, columns=columns)

    @classmethod
    def of(
        cls, one: Served, layout: ServingLayout, columns: Mapping[str, Floats], counts: Mapping[str, int],
        prefill: ServingLayout | None = None,
    ) -> Priced:  # fmt: skip
        """Rows of one engine and format that start."""
        keep = np.flatnonzero(np.isfinite(columns["total"]))
        every = np.zeros(len(columns["total"]), dtype=np.intp)
        return cls(served=(one,), source=every, layout=layout, prefill=prefill, columns=columns, **counts).take(keep)

    @classmethod
    def nothing(cls, one: Served, layout: ServingLayout, counts: Mapping[str, int]) -> Priced:
        """No rows."""
        columns = {name: np.zeros(0) for name in (*COLUMNS, "split")}
        none = np.zeros(0, dtype=np.intp)
        return cls(served=(one,), source=none, layout=take(layout, none), columns=columns, **counts)

    @property
    def keys(self) -> NDArray[np.int64]:
        """A number for each deployment: engine, format and split; loads of one have the same."""
        pools = [self.layout] if self.prefill is None else [self.layout, self.prefill]
        names = [
            np.broadcast_to(getattr(one, name), self.source.shape) for one in pools for name in (*DEGREES, "replicas")
        ]
        return np.unique(np.stack([self.source, *names], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One deployment with its load."""

    served: Served
    layout: ServingLayout
    """Integers."""
    prefill: ServingLayout | None = None
    """The pool of prompts where there are two."""
    traffic: Traffic
    """With the load at which it is shown."""
    found: ServingEstimate
    """Scalars."""
    limits: Limits = field(default_factory=Limits)

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return int(self.layout.num_gpus) + (int(self.prefill.num_gpus) if self.prefill else 0)

    @property
    def score(self) -> float:
        """Largest of TTFT and TPOT over their limits; at most 1 where they are met."""
        return float(score_of(self.found, self.limits))

    @property
    def meets(self) -> bool:
        """It starts, keeps up, and keeps its limits."""
        kept_up = self.traffic.load != "rate" or not bool(np.all(self.found.saturated))
        return bool(np.all(self.found.fits)) and kept_up and self.score <= 1.0

    @property
    def total(self) -> float:
        """Output tokens/s."""
        return float(np.asarray(self.found.output_tokens_per_second))

    @property
    def user(self) -> float:
        """Output tokens/s of one request while it is answered."""
        return 1.0 / float(np.asarray(self.found.tpot.mean))


def score_of(found: ServingEstimate, limits: Limits) -> Any:
    """Largest of TTFT and TPOT over their limits; 0 without limits."""
    shares = [
        np.asarray(one.of(limits.percentile)) / limit if np.isfinite(limit) else 0.0
        for one, limit in ((found.ttft, limits.ttft), (found.tpot, limits.tpot))
    ]
    return np.maximum(*shares)


def splits(one: Served, task: Task) -> tuple[ServingLayout, int]:
    """Legal splits of one engine with its default batch and token budget where they are not pinned, and how many there were."""
    layout = engine_layouts(one.model, task.gpus // max(task.pins.get("replicas", 1), 1), task.pins)
    count = int(np.size(layout.tp))
    batch = one.engine.default_max_batch(one.hardware, layout)
    tokens = one.engine.default_max_tokens(one.hardware, layout)
    layout = replace(
        layout,
        max_batch=_column(task.pins.get("max_batch", batch), count),
        max_tokens=_column(task.pins.get("max_tokens", tokens), count),
    )
    if not count:
        return layout, 0
    return take(
        layout, np.flatnonzero(_broadcast(legal(one.model, one.hardware, one.engine, one.precision, layout), count))
    ), count


def _column(value: Any, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.asarray(value, dtype=np.int64), (count,)).copy()


def _broadcast(value: Any, count: int) -> NDArray[Any]:
    return np.broadcast_to(np.asarray(value), (count,))


def priced(one: Served, task: Task) -> Priced:
    """All splits of one engine and format that start, at the load of the task, or at every load that their cache holds.

    Loads are looked at in two rounds: of all splits a few, of those that may be among the best every one of ``loads``.
    """
    layout, looked_at = splits(one, task)
    counts = {"looked_at": looked_at, "legal": int(np.size(layout.tp)), "fitting": 0}
    if not counts["legal"]:
        return _table(one, task, layout, np.zeros(0), counts)
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, layout, task.traffic)
    most = _broadcast(
        running_at_most(one, replace(layout, max_batch=MOST_RUNNING), task.traffic, memory), counts["legal"]
    )
    starts = np.flatnonzero(_broadcast(memory.fits, counts["legal"]) & (most >= 1.0))
    counts["fitting"] = len(starts)
    layout, most = take(layout, starts), np.minimum(most[starts], task.pins.get("max_batch", MOST_RUNNING))
    layout = replace(layout, replicas=_replicas(task, layout))
    if task.loaded:
        return _table(one, task, _with_batch(layout, task), np.full(len(starts), task.traffic.value), counts)
    found = _at_loads(one, task, layout, at_loads(most, FEW), counts)
    close = np.unique(found["split"][finalists(found, task)].astype(np.intp))
    return _at_loads(one, task, take(layout, close), at_loads(most[close]), counts)


def _replicas(task: Task, layout: ServingLayout) -> NDArray[np.int64]:
    """As many engines as the GPUs hold; not more than requests in flight."""
    most = np.maximum(task.gpus // np.asarray(layout.engine_gpus), 1)
    if "replicas" in task.pins:
        return np.full_like(most, task.pins["replicas"])
    if task.loaded and task.traffic.load == "concurrency":
        most = np.minimum(most, max(int(task.traffic.value), 1))
    return most


def _with_batch(layout: ServingLayout, task: Task) -> ServingLayout:
    """The batch limit raised where more requests are in flight at an engine than its default runs."""
    if "max_batch" in task.pins or task.traffic.load != "concurrency":
        return layout
    each = np.ceil(task.traffic.value / np.asarray(layout.replicas)).astype(np.int64)
    return replace(layout, max_batch=np.maximum(layout.max_batch, each))


def _at_loads(
    one: Served,
    task: Task,
    layout: ServingLayout,
    rows_and_loads: tuple[NDArray[np.intp], NDArray[np.int64]],
    counts: dict[str, int],
) -> Priced:
    """Splits at several loads of an engine each."""
    rows, load = rows_and_loads
    layout = take(layout, rows)
    layout = replace(layout, max_batch=np.maximum(layout.max_batch, load))
    return _table(one, task, layout, load * np.asarray(layout.replicas), counts, split=rows)


def _table(
    one: Served, task: Task, layout: ServingLayout, load: Any, counts: dict[str, int], split: Any = None
) -> Priced:
    """Price rows; those that do not start are left out."""
    if not len(load):
        return Priced.nothing(one, layout, counts)
    found = estimate(one, layout, task.traffic if task.loaded else replace(task.traffic, load="concurrency"), load)
    return Priced.of(one, layout, columns_of(found, task, load, split), counts)


def columns_of(found: ServingEstimate, task: Task, load: Any, split: Any = None) -> dict[str, Floats]:
    """The columns of ``Priced`` from an estimate of rows; what does not start has none that is finite."""
    limits, count = task.limits, len(load)
    columns = {
        "load": load, "total": found.output_tokens_per_second, "user": 1.0 / np.asarray(found.tpot.mean),
        "ttft": found.ttft.of(limits.percentile), "tpot": found.tpot.of(limits.percentile), "e2e": found.e2e.mean,
        "score": score_of(found, limits), "requests": found.requests_per_second,
        "split": np.arange(count) if split is None else split,
    }  # fmt: skip
    columns = {name: np.array(_broadcast(value, count), dtype=np.float64) for name, value in columns.items()}
    if task.loaded and task.traffic.load == "rate":
        columns["score"] = np.where(_broadcast(found.saturated, count), np.inf, columns["score"])
    columns["total"] = np.where(_broadcast(found.fits, count), columns["total"], np.nan)
    return columns


def joined(tables: Sequence[Priced]) -> Priced:
    """Tables of several engines and formats as one."""
    sources = np.concatenate([one.source + at for at, one in enumerate(tables)])
    layout = _joined_layouts([(one.layout, len(one)) for one in tables])
    columns = {name: np.concatenate([one.columns[name] for one in tables]) for name in tables[0].columns}
    prefill = _joined_layouts([(one.prefill, len(one)) for one in tables if one.prefill is not None and len(one)])
    sums = {name: sum(getattr(one, name) for one in tables) for name in ("looked_at", "legal", "fitting")}
    assert layout is not None
    served = tuple(one.served[0] for one in tables)
    return Priced(served=served, source=sources, layout=layout, prefill=prefill, columns=columns, **sums)


def _joined_layouts(parts: Sequence[tuple[ServingLayout, int]]) -> ServingLayout | None:
    """Columns of several tables below each other; None without any."""
    if not parts:
        return None
    names = vars(ServingLayout())
    return ServingLayout(
        **{name: np.concatenate([_broadcast(getattr(one, name), count) for one, count in parts]) for name in names}
    )


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
    order = np.lexsort((np.asarray(_broadcast(table.layout.engine_gpus, len(table))), -worth))
    _, first = np.unique(table.keys[order], return_index=True)
    return order[np.sort(first)[:top]]  # type: ignore[no-any-return]


def finalists(table: Priced, task: Task) -> NDArray[np.intp]:
    """Rows of the splits that may be among the best once their loads are looked at closely.

    Under limits the last load that keeps them is somewhere below the first that does not: a split is worth at most what it
    does there.
    """
    found = [ranked(table, task, objective, FINALISTS) for objective in OBJECTIVES]
    if task.limited:
        order = np.lexsort((table["load"], table["split"]))
        split, kept = table["split"][order], table["score"][order] <= 1.0
        after = np.concatenate([[False], kept[:-1] & (split[1:] == split[:-1])])
        first_broken = order[~kept & after]
        bound = table["total"][first_broken]
        least = np.max(table["total"], initial=0.0, where=table["score"] <= 1.0)
        hopeful = first_broken[(bound >= least)]
        found.append(hopeful[np.argsort(-table["total"][hopeful])][: 2 * FINALISTS])
    return np.unique(np.concatenate([*found, front(table)]))


def front(table: Priced) -> NDArray[np.intp]:
    """Rows of the Pareto front: no other row has both more tokens/s and more tokens/s per user. From fast to many."""
    return front_of(table["user"], table["total"])


def front_of(speed: Floats, total: Floats) -> NDArray[np.intp]:
    """Rows that no other beats in both, from the fastest on."""
    order = np.lexsort((-total, -speed))
    total = total[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(total)[:-1]]) if len(total) else total
    return order[total > before]  # type: ignore[no-any-return]


def chosen(table: Priced, task: Task, rows: Sequence[int]) -> list[Choice]:
    """Rows of aggregated deployments, priced again with all that an estimate says."""
    found: dict[int, Choice] = {}
    for source in sorted({int(table.source[row]) for row in rows}):
        one, mine = table.served[source], [int(row) for row in rows if table.source[row] == source]
        layout, traffics = take(table.layout, np.array(mine)), [traffic_of(table, task, row) for row in mine]
        answers = estimate(one, layout, traffics[0], table["load"][mine])
        for at, (row, traffic) in enumerate(zip(mine, traffics, strict=True)):
            found[row] = Choice(
                served=one,
                layout=row_of(layout, at),
                traffic=traffic,
                found=estimate_row(answers, at),
                limits=task.limits,
            )
    return [found[int(row)] for row in rows]


def traffic_of(table: Priced, task: Task, row: int) -> Traffic:
    """The traffic of a row, its load included."""
    load = task.traffic.load if task.loaded else "concurrency"
    return replace(task.traffic, load=load, value=float(table["load"][row]))


def estimate_row(found: Any, row: int) -> Any:
    """One row of an estimate of columns, its fields numbers."""
    if is_dataclass(found) and not isinstance(found, type):
        return replace(found, **{one.name: estimate_row(getattr(found, one.name), row) for one in fields(found)})
    value = np.asarray(found)
    return found if value.ndim == 0 else value.reshape(-1)[row if value.size > 1 else 0]
