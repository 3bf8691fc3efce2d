"""What was measured of one rank compared with the cost model's same stage: memory by category, bytes in collectives.

Buffers of collectives count whole, as nccl-tests counts them. Small messages (norms' gradients, the loss, counts of tokens) are
left out on both sides: those below LEAST bytes, in a small model below a part of its largest one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from planner.cost.estimate import memory_by_stage
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Collective, Shard
from planner.cost.memory.states import ALLOCATED, RESERVED
from planner.cost.pipeline.partition import gathered_bytes, shard_groups, split_stages, stage_parameters
from planner.cost.price.compute import repeated
from planner.lab.run.levels import POSITIONS, Question
from planner.layout import Layout, Recompute
from planner.timeline.passes import stage_kind
from planner.units import GIB

NAMES = {**{name: name for name in ALLOCATED}, "workspace": "temporary"}
"""Component of the cost model -> category of the memory tracker."""
BOUNDS = {"weights": 0.001, "gradients": 0.001, "optimizer_states": 0.001, "activations": 0.03, "peak": 0.05, "host": 0.03}
"""Differences beyond which one of the two is wrong. Temporary memory has no bound of its own: it is in the peak."""
LEAST = 1 << 20
"""Bytes of the smallest buffer that is compared."""
SMALL = 0.01
"""Or this part of the largest buffer, where that is less."""
BOUND = 0.01
"""Difference of traffic beyond which the row says so."""
MADE_AGAIN = (
    "compiled layers in {} make norms and SwiGLU again and keep other inputs in 8 bits; the prediction has them in bf16 and is too "
    "large by that (docs/validate.md, The model that runs)"
)
"""Why activations and the peak are less than predicted."""
Key = tuple[str, str]
"""Operation and dimension."""


def predicted_memory(asked: Question, stage: int) -> dict[str, float]:
    """Bytes by category that torch's allocator hands out on one stage, and "peak", the most at one moment.

    Each category is at its own maximum: they do not sum to the peak. The workspace of GPU libraries, which is no tensor, is left
    out.
    """
    _, parts = memory_by_stage(asked.workload, asked.cluster, asked.trainer, asked.layout, max(stage, 1))
    where = stage_kind(stage, asked.split.pp)
    found = {NAMES.get(name, name): float(values[where, 0]) for name, values in parts.items()}
    for name in ("temporary", "peak"):
        found[name] -= asked.cluster.hardware.workspace_memory
    return found | {"host": predicted_host(asked, stage)}


def predicted_host(asked: Question, stage: int) -> float:
    """Bytes in host memory of one stage's optimizer states, with the copies of gradients and weights there."""
    return float(np.ravel(asked.priced().shared.host)[stage_kind(stage, asked.split.pp)]) if asked.split.host_states else 0.0


def device_memory(asked: Question, stage: int, *, alone: bool) -> dict[str, float]:
    """Predicted bytes of what a GPU's counters say of one rank: handed out by torch, held by it, in use on the device.

    ``alone``: there are no communicators. Receive buffers of microbatches that were not run are in the prediction.
    """
    parts, _ = memory_by_stage(asked.workload, asked.cluster, asked.trainer, asked.layout, max(stage, 1))
    size = {name: float(values[stage_kind(stage, asked.split.pp), 0]) for name, values in parts.items()}
    reserved = sum(size[name] for name in RESERVED)
    device = (reserved if alone else sum(size.values())) + asked.cluster.hardware.context_memory
    return {"allocated": sum(size[name] for name in ALLOCATED), "reserved": reserved, "device": device}


def attention_said(priced: str, ran: Iterable[str]) -> list[str]:
    """Which kernels of torch attention ran on a GPU; nothing where none did."""
    names = sorted(set(ran))
    return [f"attention ran as torch's {' and '.join(names)} kernel; it is priced as {priced}"] if names else []


def memory_row(what: str, predicted: float, measured: float, added: float = 0.0) -> dict[str, Any]:
    """One line of the table, GiB; the error is predicted / measured - 1, less bytes that were added to what was measured because
    they are known: of many receive buffers they would hide any error."""
    rest, seen = predicted - added, measured - added
    error = rest / seen - 1.0 if seen else (0.0 if abs(rest) < 1.0 else float("inf"))
    bound = BOUNDS.get(what)
    compared = error < 1e9 and what != "temporary"  # predicted as its part of the peak, measured at its own highest moment
    return {
        "what": what, "predicted_gib": predicted / GIB, "measured_gib": measured / GIB,
        "error": error if compared else None, "bound": bound, "inside": None if bound is None else abs(error) <= bound,
    }  # fmt: skip


def rank_memory(
    asked: Question, rank: int, stage: int, measured: dict[str, float], at_peak: dict[str, int], added: float = 0.0
) -> dict[str, Any]:
    """Memory of one rank as every level writes it; ``measured`` has bytes of the categories that were seen, and of the peak, in
    which ``added`` are those of microbatches that were not run."""
    predicted = predicted_memory(asked, stage)
    names = [name for name in (*NAMES.values(), "host", "peak") if name in measured]
    rows = [memory_row(name, predicted[name], measured[name], added * (name == "peak")) for name in names]
    split = asked.split
    if split.linear and split.fused and split.recompute != "selective":
        said = {"note": MADE_AGAIN.format(split.linear)}
        rows = [row | said if row["what"] in ("activations", "peak") else row for row in rows]
    return {
        "rank": rank, "stage": stage, "priced_as": POSITIONS[stage_kind(stage, asked.split.pp)],
        "memory": rows,
        "at_peak_gib": {name: size / GIB for name, size in at_peak.items()},
    }  # fmt: skip


def tracked_rank(asked: Question, measured: Any) -> dict[str, Any]:
    """Everything about a rank whose step was tracked (``meta.Measured``), as plain data."""
    most = measured.most
    seen = {**most.held, **({"host": measured.host_bytes} if measured.host_bytes else {}), "peak": most.total}
    return {
        **rank_memory(asked, measured.rank, measured.stage, seen, most.parts, measured.unseen_receive_bytes),
        "parameters": measured.parameters, "microbatches_run": measured.microbatches,
        "receive_buffers_added_gib": measured.unseen_receive_bytes / GIB,
        "layers_run": measured.layers_run, "traffic": compared_traffic(asked, measured),
        "collectives": measured.collectives, "seconds": round(measured.seconds, 1),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ collectives


def compared_traffic(asked: Question, measured: Any) -> list[dict[str, Any]]:
    """One row per operation and dimension, of the microbatches that were run."""
    least = min(LEAST, SMALL * max((one["bytes"] for one in measured.collectives), default=0.0))
    predicted = predicted_traffic(asked, measured.stage, measured.microbatches, least)
    seen = grouped(asked, measured.collectives, least)
    rows = []
    for operation, dimension in sorted({*predicted, *seen}):
        one, other = (found.get((operation, dimension), 0.0) for found in (predicted, seen))
        error = one / other - 1.0 if other else None
        rows.append({
            "operation": operation, "dimension": dimension, "predicted_bytes": one, "measured_bytes": other, "error": error,
            "inside": error is not None and abs(error) <= BOUND,
        })  # fmt: skip
    return rows


def grouped(asked: Question, collectives: list[dict[str, Any]], least: float = LEAST) -> dict[Key, float]:
    """Measured bytes by operation and dimension; a group is known by its ranks and their distance."""
    layout = asked.layout
    tp, cp, ep, pp, shard = (int(getattr(layout, name)) for name in ("tp", "cp", "ep", "pp", "shard"))
    inner = shard * cp * tp
    named = [
        ("tp", tp, 1), ("data", shard * cp, tp), ("cp", cp, tp), ("replicas", int(layout.dp) // shard, inner),
        ("ep", ep, 1), ("expert data", max(inner // ep, 1), ep),
    ]  # fmt: skip
    found: Counter[Key] = Counter()
    for one in collectives:
        if one["bytes"] < least:
            continue
        operation = one["operation"]
        groups = [named[4]] if operation == "all_to_all" else named
        same = (name for name, ranks, stride in groups if (ranks, stride) == (one["ranks"], one["stride"]))
        dimension = "pp" if pp > 1 and operation in ("send", "receive") else next(same, "other")
        if dimension == "data" and cp > 1 and shard == 1:
            dimension = "data or cp"
        found[operation, dimension] += one["bytes"] * one["times"]
    return dict(found)


def predicted_traffic(asked: Question, stage: int, microbatches: int, least: float = LEAST) -> dict[Key, float]:
    """Priced bytes of one pipeline stage in a step of so many microbatches."""
    layout = Layout.stack([asked.layout])
    where = stage_kind(stage, asked.split.pp)
    stages = split_stages(asked.workload.model, layout, max(stage, 1))
    shard = Shard(workload=asked.workload, trainer=asked.trainer, layout=layout, ep_stride=1.0)
    counts = {name: float(getattr(stages, name)[0, where]) for name in ("dense", "moe", "embedding", "head")}
    found: dict[Key, float] = defaultdict(float)
    for one, times in _of_layers(shard, counts):
        if _scalar(one.n) > 1 and _scalar(one.size) >= least:
            found[one.op, one.group] += microbatches * times * _scalar(one.size) * _scalar(one.count)
    for key, size in _states(asked, layout, stage, microbatches):
        found[key] += size
    if asked.split.pp > 1:
        whole = float((shard.tokens_split * asked.workload.model.hidden_size * shard.element)[0])
        virtual = int(asked.layout.vpp) if len(asked.split.stages) > asked.split.pp else 1
        for operation in ("send", "receive"):
            found[operation, "pp"] = microbatches * whole * (2 * virtual - counts["embedding"] - min(counts["head"], 1.0))
            if asked.split.model.mtp_layers and where != 1:  # the gradient of an embedding that both ends have
                table = asked.split.model.vocab_size * asked.split.model.hidden_size / asked.split.tp
                found[operation, "pp"] += 4.0 * table / (float(shard_groups(layout)[0][0, 0]) if asked.split.zero else 1.0)
    return {key: size for key, size in found.items() if size}


def _scalar(value: Any) -> float:
    return float(np.broadcast_to(value, 1)[0])


def _of_layers(shard: Shard, counts: dict[str, float]) -> Iterator[tuple[Collective, float]]:
    """Collectives of layers, embedding and head with how often each runs per microbatch."""
    made = {"embedding": layers.embedding(shard)[1], "head": layers.head(shard)[1]}
    if shard.model.num_plain_layers:
        made["dense"] = layers.layer(shard, moe=False)[1]
    if shard.model.num_moe_layers:
        made["moe"] = layers.layer(shard, moe=True)[1]
    recomputes = int(np.asarray(shard.layout.recompute)[0]) != Recompute.NONE
    for kind, collectives in made.items():
        for one in collectives:
            stops = one.ends and shard.trainer.stored.recompute_stops_early
            runs = recomputes and kind in ("dense", "moe") and not one.backward and not stops
            yield one, counts[kind] * (1.0 + (_scalar(repeated(int(one.module), shard)) if runs else 0.0))


def _states(asked: Question, layout: Layout, stage: int, microbatches: int) -> Iterator[tuple[Key, float]]:
    """Weights gathered and gradients reduced, as ``cost.price.state_traffic`` says."""
    stages, where = split_stages(asked.workload.model, layout, max(stage, 1)), stage_kind(stage, asked.split.pp)
    parameters = stage_parameters(asked.workload, layout, stages)
    sizes = (float(values[0, where]) for values in parameters.trained(asked.workload))
    shards = (float(one[0, 0]) for one in shard_groups(layout))
    replicas = int(asked.layout.dp) // int(asked.layout.shard)
    zero, pipelined = int(asked.layout.zero), int(asked.layout.pp) > 1
    passes = 1 if zero <= 1 or pipelined else microbatches
    gathers = passes * (1.0 if zero < 3 else microbatches + 1 if pipelined else 2)
    if pipelined and 0 < zero < 3:
        ran = layout.replace(num_microbatches=microbatches)
        gathers += sum(_scalar(term.gathered_again(ran)) for term in asked.trainer.terms)
    model, kept = asked.workload.model, asked.split.one_root and zero == 3 and not pipelined
    ends = (2.0 - model.tied_embeddings) * model.vocab_size * model.hidden_size / int(asked.layout.tp) + model.hidden_size
    roots = (kept * microbatches * ends, 0.0)  # not gathered again for the backward pass
    reduced = passes * asked.trainer.traffic.gradient_reduce_bytes
    for size, root, group, dimension in zip(sizes, roots, shards, ("data", "expert data"), strict=True):
        if group > 1:
            yield ("all_gather", dimension), (gathers * size - root) * gathered_bytes(asked.workload)
            yield ("reduce_scatter", dimension), size * reduced
        if replicas > 1:
            yield ("all_reduce", "replicas"), size / group * reduced
