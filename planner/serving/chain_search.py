"""The best engine whose stages stand on several kinds of GPU: tensor ranks, stages of each kind, and the cut, at every batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.layout import divisors
from planner.record import record
from planner.serving.candidates import loads
from planner.serving.chain import Chain, ChainEngine, Hop, best_cut, chain_memory, placed, stage_of
from planner.serving.priced_table import Choice, Priced, Task, columns_of, estimate_row, traffic_of
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate_of, running_at_most
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import of_stage, scarcest
from planner.serving.serving_rules import legal, most_sequences
from planner.serving.serving_search import MOST_RUNNING, ranked, value_of
from planner.serving.serving_weights import stacked
from planner.serving.step import Pass

CUT_BY = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
"""Engines whose layers can be cut unevenly, and the variable that says it: layers of every stage, with commas."""
STAGES = (1, 2, 3, 4, 6)
"""Stages of one kind that are tried."""
MOST_STAGES = 8
"""Of one engine."""
FINALISTS, SPAN = 4, 4
"""Shapes that are looked at closely, at loads of a quarter to four times that of their best row."""
PINNED = ("tp", "pp", "replicas", "max_batch", "max_tokens")
"""Fields of a layout that a chain can be asked to have."""


@record
class Place:
    """One kind in a chain: what it serves with, and its GPUs."""

    served: Served
    gpus: int
    per_node: int


@record
class ChainChoice:
    """One deployment of equal engines with unlike stages."""

    choice: Choice
    chain: Chain
    """One row."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(int(one) for one in self.chain.layers[0] if one)


@record
class _Shapes:
    """Candidates before their cut, as columns."""

    layout: ServingLayout
    """With replicas and the batch that each is cut for as its limit where that is larger."""
    stages: NDArray[np.int64]
    """(N, kinds)."""
    batch: NDArray[np.int64]
    """Requests in flight at one engine for which it is cut."""

    def take(self, rows: Any) -> _Shapes:
        """Some rows."""
        return _Shapes(layout=self.layout.take(rows), stages=self.stages[rows], batch=self.batch[rows])


def best_chain(places: Sequence[Place], hops: Sequence[Hop], task: Task, objective: str) -> ChainChoice | None:
    """The best engine over kinds in this order, as many as their GPUs hold; None where none has room, or the engine or what is
    fixed leaves none.

    For every tensor degree, number of stages of each kind and batch the cut with the shortest mean pass that has room for the
    batch is exact (``best_cut``). The best shapes are cut again for every batch near their best; of the first of two kinds every
    number of layers is then priced in full.
    """
    engine = places[0].served.engine
    if engine.name not in CUT_BY or task.traffic.speculation is not None or set(task.pins) - set(PINNED):
        return None
    shapes = _shapes(places, task)
    if shapes is None:
        return None
    coarse = _Rows.of(places, hops, shapes, task)
    if coarse is None:
        return None
    close = _Rows.of(places, hops, coarse.around(task, objective), task)
    best = coarse if close is None else close
    row = best.first(task, objective)
    if row is None:
        return None
    if len(places) == 2:
        best = best.every_cut(row, task)
        row = best.first(task, objective)
        assert row is not None
    at = int(best.table["split"][row])
    choice = Choice(
        served=places[0].served, layout=best.shapes.layout.row(at), traffic=traffic_of(best.table, task, row),
        found=estimate_row(best.table.estimates[0], at), limits=task.limits,
    )  # fmt: skip
    return ChainChoice(choice=choice, chain=best.chain.take([at]))


@record
class _Rows:
    """Shapes with their cuts, priced."""

    chain: Chain
    shapes: _Shapes
    table: Priced
    """Rows that start; ``split`` is the row of the chain."""

    @classmethod
    def of(cls, places: Sequence[Place], hops: Sequence[Hop], shapes: _Shapes, task: Task) -> _Rows | None:
        """Each shape with its best cut; None where none has one."""
        chain, rows = _cut(places, hops, shapes, task)
        return cls.priced(chain, shapes.take(rows), task) if len(rows) else None

    @classmethod
    def priced(cls, chain: Chain, shapes: _Shapes, task: Task) -> _Rows:
        """Given cuts, at the load of the task, or at the batch that they are cut for."""
        layout = shapes.layout
        own = (shapes.batch * layout.replicas).astype(np.float64)
        value = np.full(len(own), task.traffic.value) if task.loaded else own
        traffic = task.priced_traffic
        found = estimate_of(ChainEngine(chain, layout, traffic), chain_memory(chain, layout, traffic), value)
        counts: Mapping[str, int] = {"looked_at": len(value), "legal": len(value), "fitting": len(value)}
        table = Priced.of(chain.kinds[0], layout, found, columns_of(found, task, value), counts)
        return cls(chain=chain, shapes=shapes, table=table)

    def first(self, task: Task, objective: str) -> int | None:
        """Row of the table of the best."""
        rows = ranked(self.table, task, objective, 1)
        return int(rows[0]) if len(rows) else None

    def around(self, task: Task, objective: str) -> _Shapes:
        """The best shapes at every load within a factor of SPAN of their best one."""
        order = np.argsort(-value_of(self.table, task, objective), kind="stable")
        at = self.table["split"].astype(np.intp)[order]
        known = np.column_stack([np.asarray(self.shapes.layout.tp)[at], self.shapes.stages[at]])
        _, first = np.unique(known, axis=0, return_index=True)
        rows, batches, engine = list[int](), list[int](), self.chain.kinds[0].engine
        for row in at[np.sort(first)[:FINALISTS]].tolist():
            own = int(self.shapes.batch[row])
            fixed = task.loaded and task.traffic.load == "concurrency"
            most = min(SPAN * own, int(np.min(most_sequences(engine, self.shapes.layout.row(row)))))
            near = [own] if fixed else [one for one in loads(most) if one * SPAN >= own]
            rows, batches = rows + [row] * len(near), batches + [int(one) for one in near]
        taken, batch = self.shapes.take(np.array(rows, dtype=np.intp)), np.array(batches, dtype=np.int64)
        limit = taken.layout.max_batch if "max_batch" in task.pins else np.maximum(taken.layout.max_batch, batch)
        return replace(taken, batch=batch, layout=replace(taken.layout, max_batch=limit))

    def every_cut(self, row: int, task: Task) -> _Rows:
        """The shape of a row of the table, of two kinds, with every number of layers on the first."""
        at = int(self.table["split"][row])
        every = _every_cut(self.chain.take([at]), self.chain.kinds[0].model.num_layers)
        chain = replace(self.chain, layers=every, kind=np.repeat(self.chain.kind[[at]], len(every), axis=0))
        return _Rows.priced(chain, self.shapes.take(np.full(len(every), at)), task)


def _shapes(places: Sequence[Place], task: Task) -> _Shapes | None:
    """Tensor degrees that are legal on all kinds, stages of each, batches."""
    model, pins = places[0].served.model, task.pins
    rows = []
    tps = [pins["tp"]] if "tp" in pins else [n for n in divisors(model.num_heads) if n <= min(one.per_node for one in places)]
    for tp, counts in itertools.product(tps, itertools.product(STAGES, repeat=len(places))):
        replicas = min(one.gpus // (tp * count) for one, count in zip(places, counts, strict=True))
        if replicas < 1 or not sum(counts) <= min(MOST_STAGES, model.num_layers) or pins.get("pp", sum(counts)) != sum(counts):
            continue
        replicas = min(replicas, pins.get("replicas", replicas))
        batches: Sequence[int] = loads(MOST_RUNNING, 4).tolist()
        if task.loaded and task.traffic.load == "concurrency":
            replicas = min(replicas, max(int(task.traffic.value), 1))
            batches = [int(np.ceil(task.traffic.value / replicas))]
        rows += [(tp, sum(counts), replicas, batch, *counts) for batch in batches]
    if not rows:
        return None
    table = np.array(rows, dtype=np.int64)
    layout = ServingLayout(tp=table[:, 0], pp=table[:, 1], replicas=table[:, 2], moe_tp=table[:, 0] ** int(model.is_moe))
    defaults = [(one.served.engine.default_max_batch(one.served.hardware, layout),
                 one.served.engine.default_max_tokens(one.served.hardware, layout)) for one in places]  # fmt: skip
    usual, tokens = (np.min([np.broadcast_to(one[n], table[:, 3].shape) for one in defaults], axis=0) for n in (0, 1))
    limit = np.full_like(usual, pins["max_batch"]) if "max_batch" in pins else np.maximum(usual, table[:, 3])
    tokens = np.full_like(tokens, pins["max_tokens"]) if "max_tokens" in pins else tokens
    layout = replace(layout, max_batch=limit.astype(np.int64), max_tokens=tokens.astype(np.int64))
    allowed = np.ones(len(table), dtype=bool)
    for one in places:
        each = one.served
        allowed &= legal(each.model, each.hardware, each.engine, each.precision, replace(layout, replicas=1))
    found = _Shapes(layout=layout, stages=table[:, 4:], batch=table[:, 3]).take(np.flatnonzero(allowed))
    return found if len(found.batch) else None


def _cut(places: Sequence[Place], hops: Sequence[Hop], shapes: _Shapes, task: Task) -> tuple[Chain, NDArray[np.intp]]:
    """The best cut of every shape that has one, and the shape of each row of the chain."""
    kinds, layers = tuple(one.served for one in places), places[0].served.model.num_layers
    kind = _kind_of_stage(shapes.stages)
    there = np.arange(kind.shape[1])[None, :] < np.sum(shapes.stages, axis=1)[:, None]
    open_chain = Chain(kinds=kinds, hops=tuple(hops), layers=there.astype(np.int64), kind=kind)
    engine = ChainEngine(open_chain, shapes.layout, task.traffic)
    per_layer, host, head = _mean_pass(engine, shapes.batch)
    most = _most_layers(kinds, shapes, task, layers)
    cuts, rows = list[tuple[int, ...]](), list[int]()
    for row, count in enumerate(np.sum(shapes.stages, axis=1)):
        mine = kind[row, :count]
        extra = host[row, mine] + np.where(np.arange(count) == count - 1, head[row], 0.0)
        ends = np.where(np.arange(count) == 0, 0, np.where(np.arange(count) == count - 1, 2, 1))
        groups = float(np.clip(shapes.batch[row], 1.0, count))
        cut = best_cut(layers, per_layer[row, mine].tolist(), extra.tolist(), most[mine, ends, row].tolist(), groups)
        if cut is not None:
            cuts.append(cut + (0,) * (kind.shape[1] - len(cut)))
            rows.append(row)
    held = np.array(cuts, dtype=np.int64).reshape(len(rows), kind.shape[1])
    return Chain(kinds=kinds, hops=tuple(hops), layers=held, kind=kind[rows]), np.array(rows, dtype=np.intp)


def _kind_of_stage(stages: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N, P): number of the kind of each stage; behind the last stage the last kind."""
    place = np.arange(int(np.max(np.sum(stages, axis=1))))
    ends = np.cumsum(stages, axis=1)
    return np.minimum(np.sum(place[None, :, None] >= ends[:, None, :], axis=2), stages.shape[1] - 1)


def _mean_pass(engine: ChainEngine, batch: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """(N, kinds) seconds of a layer and of the host, (N,) of the head: decodes, and the share of passes that have a prompt."""
    clock = engine.clock(batch, 0.0)
    plain = engine.by_kind(Pass(batch=batch, context=engine.context, queries=engine.drafted, clock=clock))
    number, tokens = engine.chunks(batch)
    work = Pass(
        batch=batch, context=engine.context, prompts=1.0, prompt_tokens=tokens, cached=(number - 1.0) / 2.0 * tokens + engine.hit,
        clock=engine.clock(batch, 1.0) * engine.prompt_rate(),
    )  # fmt: skip
    mixed = engine.by_kind(work)
    share = np.minimum(number * batch / engine.pp / max(engine.output, 1.0), 1.0)
    (first, host), (second, _) = engine.per_layer(plain), engine.per_layer(mixed)
    return first + share[:, None] * np.maximum(second - first, 0.0), host, np.broadcast_to(np.asarray(plain[-1].head), batch.shape)


def _most_layers(kinds: Sequence[Served], shapes: _Shapes, task: Task, layers: int) -> NDArray[np.int64]:
    """(kinds, 3 ends, N): layers of a first, middle and last stage with which its cards hold the cache of the batch."""
    rows = len(shapes.batch)
    held, row = np.repeat(np.arange(1, layers + 1), rows), np.tile(np.arange(rows), layers)
    layout = shapes.layout.take(row)
    found = np.zeros((len(kinds), 3, rows), dtype=np.int64)
    for number, one in enumerate(kinds):
        for at, end in enumerate(("first", "middle", "last")):
            stage = stacked([stage_of(one, held, end)], held.shape)
            memory = scarcest(of_stage(placed(one, layout, task.traffic), stage))
            running = np.asarray(running_at_most(one, layout, task.traffic, memory))
            fits = (running >= np.minimum(shapes.batch[row], layout.max_batch)) & np.asarray(memory.fits)
            found[number, at] = np.sum(fits.reshape(layers, rows), axis=0)
    return found


def _every_cut(chain: Chain, layers: int) -> NDArray[np.int64]:
    """Cuts of one chain of two kinds with every number of layers on the first, each kind's shared out evenly, and its own."""
    kind, stages = chain.kind[0], [int(chain.stages_of(number)[0]) for number in (0, 1)]
    found = [chain.layers[0]]
    for held in range(stages[0], layers - stages[1] + 1):
        cut = [*_even(held, stages[0]), *reversed(_even(layers - held, stages[1]))]
        found.append(np.array(cut + [0] * (len(kind) - len(cut)), dtype=np.int64))
    return np.stack(found)


def _even(layers: int, stages: int) -> list[int]:
    """Layers of each of some stages, the last ones with those that are left over."""
    return [layers // stages + (number < layers % stages) for number in reversed(range(stages))]
