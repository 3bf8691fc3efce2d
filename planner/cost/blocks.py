"""Priced building blocks: a dense layer, an expert layer, the embedding, the head; each one row of numbers per shape.

A search has millions of layouts but few distinct shapes of a layer. The blocks are priced once per shape and gathered;
a pipeline stage is then a sum of blocks, as every quantity here is additive.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster, strides
from planner.cost import operators as ops
from planner.cost.communication import collective_seconds, exposed_seconds
from planner.cost.compute import GRAPH_LAUNCHES, Work, price, repeated
from planner.cost.distinct import distinct
from planner.cost.operators import Collective, Number, Operator, Shard
from planner.layout import Layout, Recompute
from planner.trainer import Trainer
from planner.workload import Workload

GROUPS = ("tp", "cp", "ep")
QUANTITIES = (
    "forward", "dgrad", "wgrad", "recompute",
    "tp_forward", "tp_backward", "cp_forward", "cp_backward", "ep_forward", "ep_backward",
    "tp_hidden", "cp_hidden", "ep_hidden",
    "launches_forward", "launches_backward",
    "saved", "working", "input", "flop",
)  # fmt: skip
"""Columns of a block. Seconds of computation by pass (backward = dgrad + wgrad, and recompute); exposed seconds of
communication by group and pass, hidden ones by group; kernels launched; bytes saved per microbatch, bytes that recompute
brings back for one layer at a time, bytes of the block's input; FLOP forward."""
INDEX = {name: number for number, name in enumerate(QUANTITIES)}

SHAPE_FIELDS = (
    "tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "cp_method", "recompute", "recompute_modules",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of all candidates, each of shape (N, len(QUANTITIES))."""

    dense: Floats
    moe: Floats
    dense_stored: Floats
    """The layers that full recompute leaves out when it covers a part of each stage."""
    moe_stored: Floats
    embedding: Floats
    head: Floats


def price_blocks(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Blocks:
    """The blocks of every candidate: distinct shapes are priced once, then gathered."""
    shapes, inverse = distinct(layout, SHAPE_FIELDS, _ep_stride(layout))
    shard = Shard(workload=workload, trainer=trainer, layout=shapes, ep_stride=_ep_stride(shapes))
    stored = dataclasses.replace(shard, layout=shapes.replace(recompute=int(Recompute.NONE)))
    model = workload.model
    nothing = np.zeros((len(shapes), len(QUANTITIES)))
    has_dense, has_moe = model.num_plain_layers > 0, model.num_moe_layers > 0
    dense_priced = _price(*ops.layer(shard, moe=False), shard, cluster) if has_dense else None
    moe_priced = _price(*ops.layer(shard, moe=True), shard, cluster) if has_moe else None
    dense = dense_stored = _block(dense_priced, shard) if dense_priced else nothing
    moe = moe_stored = _block(moe_priced, shard) if moe_priced else nothing
    if np.any(np.asarray(layout.recompute_layers) > 0):
        dense_stored = _block(dense_priced, stored) if dense_priced else nothing
        moe_stored = _block(moe_priced, stored) if moe_priced else nothing
    return Blocks(
        dense=dense[inverse],
        moe=moe[inverse],
        dense_stored=dense_stored[inverse],
        moe_stored=moe_stored[inverse],
        embedding=_block(_price(*ops.embedding(stored), stored, cluster), stored)[inverse],
        head=_block(_price(*ops.head(stored), stored, cluster), stored)[inverse],
    )


def _ep_stride(layout: Layout) -> NDArray[Any]:
    return np.where(np.asarray(layout.ep) > 1, np.asarray(strides(layout)["ep"]), 1)


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """A block's operators and collectives with their seconds, which do not depend on what is recomputed."""

    operators: list[Operator]
    work: dict[str, Work]
    collectives: list[tuple[Collective, Floats]]
    """Each with its seconds when it runs alone."""


def _price(operators: list[Operator], collectives: list[Collective], shard: Shard, cluster: Cluster) -> _Priced:
    alone: dict[tuple[object, ...], Floats] = {}
    priced = []
    for one in collectives:  # a layer runs the same collective several times: equal ones are priced once
        key = (one.op, id(one.size), id(one.n), id(one.stride), id(one.count), one.copies)
        if key not in alone:
            alone[key] = collective_seconds(one, cluster)
        priced.append((one, alone[key]))
    work = {operator.name: price(operator, shard, cluster.hardware) for operator in operators}
    return _Priced(operators=operators, work=work, collectives=priced)


def _block(priced: _Priced, shard: Shard) -> Floats:
    """Sum a block's operators and collectives into the columns of QUANTITIES, shape (rows of the shard, columns)."""
    trainer, total, work = shard.trainer, np.zeros((len(shard.layout), len(QUANTITIES))), priced.work

    def add(name: str, value: Number) -> None:
        total[:, INDEX[name]] += value

    full = np.asarray(shard.layout.recompute) == Recompute.FULL
    for operator in priced.operators:
        again = repeated(int(operator.module), shard, operator.share)
        left_out = full & (operator.ends and trainer.recompute_stops_early)
        _add_operator(operator, work[operator.name], again, left_out, full, add)
    first_input = shard.tokens_split * shard.model.hidden_size * shard.element
    add("input", first_input)
    add("saved", np.where(full, first_input, 0.0))
    if trainer.cuda_graphs:
        total[:, INDEX["launches_forward"]] = total[:, INDEX["launches_backward"]] = GRAPH_LAUNCHES
    forward = total[:, INDEX["forward"]].copy()
    backward = total[:, INDEX["dgrad"]] + total[:, INDEX["wgrad"]]
    for collective, alone in priced.collectives:
        pass_seconds = backward if collective.backward else forward
        added = exposed_seconds(collective, alone, trainer, work, pass_seconds)
        repeats: Number = 0.0 if collective.backward else repeated(int(collective.module), shard)
        again = np.where(full & (collective.ends and trainer.recompute_stops_early), 0.0, repeats)
        add(f"{collective.group}_{'backward' if collective.backward else 'forward'}", added)
        add(f"{collective.group}_backward", again * added)
        add(f"{collective.group}_hidden", (1.0 + again) * (alone - added))
    return total


def _add_operator(
    operator: Operator, work: Work, freed: Floats, left_out: NDArray[np.bool_], full: NDArray[np.bool_], add: object
) -> None:
    """One operator's share of a block; ``freed`` is 1 where its tensors are dropped, it is computed twice there unless
    ``left_out``."""
    assert callable(add)
    add("forward", work.forward)
    add("dgrad", work.dgrad)
    add("wgrad", work.wgrad)
    again = np.where(left_out, 0.0, freed)
    add("recompute", again * work.forward)
    add("launches_forward", operator.launches[0])
    add("launches_backward", operator.launches[1] + again * operator.launches[0])
    add("saved", (1.0 - freed) * operator.saved + np.where(full, 0.0, operator.kept))
    add("working", freed * operator.saved + np.where(full, operator.kept, 0.0))
    add("flop", work.flop)
