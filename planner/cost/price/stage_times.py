"""Seconds per microbatch of each pipeline stage: its blocks, and what the host adds."""

import functools

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.cost.pipeline.partition import Stages, column
from planner.cost.price.layer_costs import INDEX, Blocks
from planner.cost.price.state_traffic import activation_offload
from planner.layout import Layout, Recompute
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import Trainer


@record
class StageSeconds:
    """Seconds per microbatch of the three stages of N candidates."""

    slowest: dict[str, Floats]
    """Of the slowest stage, (N,) each, both passes together where not named; backward includes waiting for offloaded activations;
    host_share is the host's time to launch over the GPU's; all_stages sums both passes over the pipeline; flop is the mean."""
    forward: Floats
    """Forward pass, (3, N): computation, exposed communication, host; without sends."""
    backward: Floats
    """Backward pass, (3, N): recompute and waiting for offloaded activations included; without sends."""


EXPOSED = (("tp_forward", "cp_forward", "ep_forward"), ("tp_backward", "cp_backward", "ep_backward"))
"""Quantities of exposed communication, by pass."""


@record
class StageTimes(StageSeconds):
    """What those are made of; arrays of shape (3, N), stages first."""

    weight: Floats
    """The part of backward that is weight gradients."""
    saved: Floats
    """Bytes that the layers save per microbatch."""
    first_chunk_more: Floats
    """Bytes that the layers of the first virtual stage save more than the mean of those behind it."""
    ends_forward: Floats
    """The part of forward that is embedding and head."""
    ends_backward: Floats
    """The part of backward that is embedding and head."""
    ends_weight: Floats
    """Weight gradients of embedding and head."""
    loss: Floats
    """Bytes alive at the peak of the loss."""
    embedding_saved: Floats
    """Bytes that the embedding saves per microbatch."""
    working: Floats
    """Bytes of one layer that recompute brings back."""
    last_layer: Floats
    """Bytes that the last layer saves per microbatch."""


def largest_stage(values: Floats) -> NDArray[np.intp]:
    """Which of the three stages has the largest value: (3, N) to (N,). Comparisons beat argmax over an axis of 3."""
    first, middle, last = values
    return np.where(last > np.maximum(first, middle), 2, (middle > first).astype(np.intp))


def at_stage(values: Floats, stage: NDArray[np.intp]) -> Floats:
    """The value of one stage for each candidate: (3, N) to (N,)."""
    return values.ravel().take(stage * values.shape[1] + np.arange(values.shape[1]))


def stages_first(values: Floats) -> Floats:
    """(K, 3) or (K, 1) as a contiguous (3, K)."""
    return np.ascontiguousarray(np.broadcast_to(values, (len(values), 3)).T)


def stage_times(
    model: ModelSpec, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages, blocks: Blocks, adding: Floats
) -> StageTimes:
    """Sum of the blocks of each stage; ``adding`` is seconds to accumulate gradients, part of the weight gradients."""
    totals, ends, saved = stage_totals(layout, stages, blocks)
    totals[INDEX["wgrad"]] += stages_first(adding)
    hooks = hook_seconds(trainer, layout, stages)
    busy, host = pass_seconds(trainer, layout, totals, hooks, cluster.hardware.serial_launches)
    forward, backward = busy[0] + host[0], busy[1] + host[1]
    waiting = activation_offload(cluster, layout, stages, saved, forward, backward)
    backward = backward + waiting
    both = forward + backward
    slowest = largest_stage(both)
    parts = {
        "compute": _sum_of(totals, "forward", "dgrad", "wgrad"), "recompute": _sum_of(totals, "recompute"),
        "host": host[0] + host[1], "waiting": waiting, "forward": forward, "backward": backward,
        "weight": _sum_of(totals, "wgrad"),
        "host_share": launch_seconds(trainer, layout, totals, hooks) / np.maximum(busy[0] + busy[1], np.finfo(float).tiny),
    }  # fmt: skip
    for name, group in (("tensor", "tp"), ("context", "cp"), ("expert", "ep")):
        parts[f"{name}_communication"] = _sum_of(totals, f"{group}_forward", f"{group}_backward")
        parts[f"{name}_hidden"] = _sum_of(totals, f"{group}_hidden")
    weights = stages_first(stages.weight)
    all_stages = functools.reduce(np.add, both * weights)
    flop = _model_flop(model, blocks) / np.asarray(layout.pp)
    working = np.maximum(
        blocks.dense[INDEX["working"]] * stages_first((stages.dense > 0).astype(float)),
        blocks.moe[INDEX["working"]] * stages_first((stages.moe > 0).astype(float)),
    )
    return StageTimes(
        forward=forward,
        backward=backward,
        weight=_sum_of(totals, "wgrad"),
        slowest={name: at_stage(part, slowest) for name, part in parts.items()}
        | {"all_stages": all_stages, "flop": flop},
        saved=saved,
        first_chunk_more=first_chunk_more(layout, stages, blocks, saved),
        ends_forward=_sum_of(ends, "forward", *EXPOSED[0]),
        ends_backward=_sum_of(ends, "dgrad", "wgrad", *EXPOSED[1]),
        ends_weight=_sum_of(ends, "wgrad"),
        loss=stages_first(np.minimum(stages.head, 1.0)) * blocks.head[INDEX["saved"]],
        embedding_saved=stages_first(stages.embedding) * blocks.embedding[INDEX["saved"]],
        working=working,
        last_layer=np.where(
            stages_first((stages.moe > 0).astype(float)) > 0, blocks.moe[INDEX["saved"]], blocks.dense[INDEX["saved"]]
        ),
    )


def _sum_of(table: Floats, *names: str) -> Floats:
    """Sum of some quantities of blocks."""
    return functools.reduce(np.add, [table[INDEX[name]] for name in names])


def _launch_time(trainer: Trainer, layout: Layout) -> Floats:
    """Seconds of host work per kernel, more where operations are dispatched through distributed tensors, or where layers are cut
    into nodes that run during the exchange of another microbatch's experts."""
    factor = np.where(np.asarray(layout.tp) > 1, trainer.host.tensor_parallel_factor, 1.0)
    if "ep" in trainer.traffic.overlap:
        factor = factor * np.where(np.asarray(layout.ep) > 1, trainer.host.expert_overlap_factor, 1.0)
    return np.asarray(trainer.host.host_time * factor)


def layer_hooks(trainer: Trainer, layout: Layout) -> Floats:
    """Seconds of host work around each layer in each pass, (N,) or a number: where its weights are gathered, from
    ``weight_sharding_level`` on, and more than one rank shares them."""
    gathered = np.asarray(layout.zero) >= trainer.stored.weight_sharding_level
    shared = np.asarray(layout.shard) * np.asarray(layout.cp) > 1
    return np.where(gathered & shared, trainer.host.unit_host_time, 0.0)


def hook_seconds(trainer: Trainer, layout: Layout, stages: Stages) -> Floats:
    """The same of all layers of each stage, (3, N)."""
    each = np.broadcast_to(layer_hooks(trainer, layout), (len(layout),))
    return stages_first((stages.dense + stages.moe) * each[:, None])


def launch_seconds(trainer: Trainer, layout: Layout, totals: Floats, hooks: Floats) -> Floats:
    """Seconds that the host needs to launch both passes of each stage, (3, N), hidden behind the GPU or not."""
    return _sum_of(totals, "launches_forward", "launches_backward") * _launch_time(trainer, layout) + 2.0 * hooks


def pass_seconds(
    trainer: Trainer, layout: Layout, totals: Floats, hooks: Floats, serial: bool = False
) -> tuple[list[Floats], list[Floats]]:
    """Seconds that the GPU is busy in the forward and the backward pass of each stage, and what the host adds, (3, N) each.

    The host launches kernels one after the other: a pass takes at least launches * host_time + hooks; what that exceeds the
    GPU's own time (computation and exposed communication, which the host does not wait for) is a part of its own; where
    launches are ``serial`` all of it. Forward at least what it falls behind in experts, see ``blocks``.
    """
    computed = (_sum_of(totals, "forward"), _sum_of(totals, "dgrad", "wgrad", "recompute"))
    busy = [alone + _sum_of(totals, *names) for alone, names in zip(computed, EXPOSED, strict=True)]
    each = _launch_time(trainer, layout)
    host = [
        np.maximum(_sum_of(totals, name) * each + hooks - (0.0 if serial else on_gpu), 0.0)
        for name, on_gpu in zip(("launches_forward", "launches_backward"), busy, strict=True)
    ]
    host[0] = np.maximum(host[0], totals[INDEX["behind"]])
    return busy, host


def block_counts(model: ModelSpec) -> dict[str, float]:
    """How many of each block the whole model has, prediction modules and their heads among them."""
    more = model.mtp_layers
    layers = more * model.layers_per_mtp
    return {
        "dense": model.num_plain_layers + layers * (not model.is_moe), "moe": model.num_moe_layers + layers * model.is_moe,
        "embedding": 1.0, "head": 1.0 + more,
    }  # fmt: skip


def _model_flop(model: ModelSpec, blocks: Blocks) -> Floats:
    """Forward FLOP of all the model's layers, embedding and heads on the ranks of one pipeline, per microbatch."""
    counts = block_counts(model).items()
    return functools.reduce(np.add, [count * getattr(blocks, name)[INDEX["flop"]] for name, count in counts])


def covered_share(layout: Layout, stages: Stages) -> Floats:
    """Part of a stage's layers that recompute covers, (N, 3): full recompute may be of so many layers."""
    covered, layers = column(layout.recompute_layers), stages.dense + stages.moe
    partly = (covered > 0) & (column(layout.recompute) == Recompute.FULL)
    return np.where(partly, np.minimum(covered / np.maximum(layers, 1.0), 1.0), 1.0)


def stage_totals(layout: Layout, stages: Stages, blocks: Blocks) -> tuple[Floats, Floats, Floats]:
    """Sum of the blocks of each stage, the part of it that is embedding and head, both (quantities, 3, N), and the
    bytes that the stage's layers save, (3, N)."""
    share = covered_share(layout, stages)

    def times(layers: Floats, block: Floats) -> Floats:
        return stages_first(layers) * block[:, None, :]

    totals = times(stages.dense * share, blocks.dense)
    if np.any(stages.moe):
        totals += times(stages.moe * share, blocks.moe)
    if np.any(share < 1.0):
        totals += times(stages.dense * (1.0 - share), blocks.dense_stored)
        totals += times(stages.moe * (1.0 - share), blocks.moe_stored)
    saved = totals[INDEX["saved"]].copy()
    ends = times(stages.embedding, blocks.embedding) + times(stages.head, blocks.head)
    totals += ends
    return totals, ends, saved


def first_chunk_more(layout: Layout, stages: Stages, blocks: Blocks, saved: Floats) -> Floats:
    """Bytes per microbatch that the first virtual stage saves more than the mean of the others; ``saved``: of all; (3, N)."""
    share, others, place = covered_share(layout, stages).T, np.asarray(layout.vpp) - 1.0, INDEX["saved"]
    dense, moe = (
        share * one[place] + (1.0 - share) * stored[place]
        for one, stored in ((blocks.dense, blocks.dense_stored), (blocks.moe, blocks.moe_stored))
    )
    first = stages.first_dense.T * dense + stages.first_moe.T * moe
    return np.where(others > 0, first - (saved - first) / np.maximum(others, 1.0), 0.0)
