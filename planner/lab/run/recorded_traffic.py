"""Bytes that a rank hands to collectives beside what the cost model prices: by operation and dimension, per step.

Buffers count whole, as nccl-tests counts them. Small messages (norms' gradients, the loss, counts of tokens) carry nothing and are
left out on both sides: those below LEAST bytes, in a small model below a part of its largest one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Collective, Shard
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.compute import repeated
from planner.cost.price.sharding import gathered_bytes, shard_groups, trained_parameters
from planner.lab.run.predicted_ranks import Question, position
from planner.layout import Layout, Recompute

LEAST = 1 << 20
"""Bytes of the smallest buffer that is compared."""
SMALL = 0.01
"""Or this part of the largest buffer, where that is less."""
BOUND = 0.01
"""Difference beyond which the row says so."""
Key = tuple[str, str]
"""Operation and dimension."""


def compared(asked: Question, measured: Any) -> list[dict[str, Any]]:
    """One row per operation and dimension, of the microbatches that were run."""
    least = min(LEAST, SMALL * max((one["bytes"] for one in measured.collectives), default=0.0))
    told = predicted(asked, measured.stage, measured.microbatches, least)
    seen = grouped(asked, measured.collectives, least)
    rows = []
    for operation, dimension in sorted({*told, *seen}):
        one, other = told.get((operation, dimension), 0.0), seen.get((operation, dimension), 0.0)
        error = one / other - 1.0 if other else None
        rows.append({
            "operation": operation, "dimension": dimension, "predicted_bytes": one, "measured_bytes": other, "error": error,
            "inside": error is not None and abs(error) <= BOUND,
        })  # fmt: skip
    return rows


def grouped(asked: Question, collectives: list[dict[str, Any]], least: float = LEAST) -> dict[Key, float]:
    """Measured bytes by operation and dimension; a group is known by its ranks and their distance."""
    layout = asked.layout
    tp, cp, ep, pp = (int(getattr(layout, name)) for name in ("tp", "cp", "ep", "pp"))
    shard = int(layout.shard)
    inner = shard * cp * tp
    named = [
        ("tp", tp, 1), ("data", shard * cp, tp), ("cp", cp, tp), ("replicas", int(layout.dp) // shard, inner),
        ("ep", ep, 1), ("expert data", max(inner // ep, 1), ep),
    ]  # fmt: skip
    found: dict[Key, float] = {}
    for one in collectives:
        if one["bytes"] < least:
            continue
        operation = one["operation"]
        dimension = "pp" if pp > 1 and operation in ("send", "receive") else "other"
        order = named if operation != "all_to_all" else [named[4]]
        for name, ranks, stride in order if dimension == "other" else ():
            if (ranks, stride) == (one["ranks"], one["stride"]):
                dimension = name
                break
        if dimension == "data" and cp > 1 and shard == 1:
            dimension = "data or cp"
        found[operation, dimension] = found.get((operation, dimension), 0.0) + one["bytes"] * one["times"]
    return found


def predicted(asked: Question, stage: int, microbatches: int, least: float = LEAST) -> dict[Key, float]:
    """Priced bytes of one pipeline stage in a step of so many microbatches."""
    layout = Layout.stack([asked.layout])
    where = position(stage, int(asked.layout.pp))
    stages = split_stages(asked.workload.model, layout)
    shard = Shard(workload=asked.workload, trainer=asked.trainer, layout=layout, ep_stride=1.0)
    counts = {name: float(getattr(stages, name)[0, where]) for name in ("dense", "moe", "embedding", "head")}
    found: dict[Key, float] = {}

    def add(operation: str, dimension: str, size: float) -> None:
        if size:
            found[operation, dimension] = found.get((operation, dimension), 0.0) + size

    for collective, times in _of_blocks(shard, counts):
        n, size = (float(np.broadcast_to(value, 1)[0]) for value in (collective.n, collective.size))
        if n > 1 and size >= least:
            add(
                collective.op,
                collective.group,
                microbatches * times * size * float(np.broadcast_to(collective.count, 1)[0]),
            )
    _states(asked, layout, where, microbatches, add)
    pp, vpp = (int(np.ravel(value)[0]) for value in (layout.pp, layout.vpp))
    if pp > 1:
        whole = float((shard.tokens_split * asked.workload.model.hidden_size * shard.element)[0])
        virtual = vpp if len(asked.split.stages) > pp else 1
        each = microbatches * whole * (2 * virtual - (counts["embedding"] + min(counts["head"], 1.0)))
        add("send", "pp", each)
        add("receive", "pp", each)
    return found


def _of_blocks(shard: Shard, counts: dict[str, float]) -> list[tuple[Collective, float]]:
    """Collectives of layers, embedding and head with how often each runs per microbatch."""
    model, found = shard.model, []
    made = {"embedding": layers.embedding(shard)[1], "head": layers.head(shard)[1]}
    if model.num_plain_layers:
        made["dense"] = layers.layer(shard, moe=False)[1]
    if model.num_moe_layers:
        made["moe"] = layers.layer(shard, moe=True)[1]
    for block, collectives in made.items():
        for one in collectives:
            again = 0.0
            if block in ("dense", "moe") and not one.backward:
                stops = one.ends and shard.trainer.stored.recompute_stops_early
                again = 0.0 if stops else float(np.broadcast_to(repeated(int(one.module), shard), 1)[0])
            if int(np.asarray(shard.layout.recompute)[0]) == Recompute.NONE:
                again = 0.0
            found.append((one, counts[block] * (1.0 + again)))
    return found


def _states(asked: Question, layout: Layout, where: int, microbatches: int, add: Any) -> None:
    """Weights gathered and gradients reduced, as ``cost.traffic.data_parallel`` says."""
    parameters = stage_parameters(asked.workload, layout, split_stages(asked.workload.model, layout))
    dense, expert = (float(values[0, where]) for values in trained_parameters(asked.workload, parameters))
    shards = [float(one[0, 0]) for one in shard_groups(layout)]
    replicas = int(asked.layout.dp) // int(asked.layout.shard)
    zero, pipelined = int(asked.layout.zero), int(asked.layout.pp) > 1
    passes = 1 if zero <= 1 or pipelined else microbatches
    gathers = passes * (1 if zero < 3 else microbatches + 1 if pipelined else 2)
    trainer = asked.trainer
    for size, group, dimension in ((dense, shards[0], "data"), (expert, shards[1], "expert data")):
        if group > 1:
            add("all_gather", dimension, gathers * size * gathered_bytes(asked.workload, trainer))
            add("reduce_scatter", dimension, passes * size * trainer.traffic.gradient_reduce_bytes)
        if replicas > 1:
            add("all_reduce", "replicas", passes * size / group * trainer.traffic.gradient_reduce_bytes)
