"""Bytes per GPU of each pipeline stage: states, workspaces, buffers; shape (N, 3). What layers save is in blocks.py."""


import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.layer.linear_layer import backward_bytes
from planner.cost.layer.routing import busiest
from planner.cost.pipeline.partition import (
    StageParameters,
    Stages,
    base_bytes,
    column,
    experts_outside,
    gathered_bytes,
    gathered_parameters,
    host_share,
    layer_bytes,
    sequences,
    shard_groups,
)
from planner.cost.state_dtypes import frozen_other, whole_bytes
from planner.layout import Layout
from planner.record import record
from planner.trainer import Trainer
from planner.workload import PAGED, Workload

COMPONENTS = (
    "weights", "gradients", "optimizer_states", "activations", "workspace", "fragmentation", "communication_buffers",
    "context",
)  # fmt: skip
ALLOCATED = COMPONENTS[:5]
RESERVED = COMPONENTS[:6]


@record
class StageBytes:
    """Bytes of the first, a middle and the last stage of N candidates, (3, N), and counts that decide them."""

    stored: Floats
    """That wait for the backward pass, per microbatch in flight."""
    first_chunk_more: Floats
    """Of these, what the first virtual stage has more than the mean of the others."""
    first_chunk_least: Floats
    """Microbatches of the first virtual stage in flight beyond ``in_flight``, at their fewest in the steady state."""
    first_chunk_most: Floats
    """The same at their most."""
    resident: Floats
    """Most microbatches whose stored bytes stay on the GPU: infinite unless activations are offloaded."""
    transient: Floats
    """The larger of the loss and one layer that recompute brings back."""
    in_flight: Floats
    """Microbatches that wait for their backward pass at the peak."""
    accumulated_flight: Floats
    """The same when all gradients are there."""
    accumulated_share: Floats
    """Share of the gradients that is there when most microbatches are in flight."""
    logits_held: Floats
    """Microbatches whose logits wait on the last stage."""
    waiting_weights: Floats
    """Microbatches whose weight gradients come later."""
    shape_parts: dict[str, Floats]
    """Of ``peak_points.shape_parts``; none where gradients are buffered."""
    state_parts: dict[str, Floats]
    """Of ``peak_points.state_parts``, likewise."""
    workspace: Floats
    held_launched: Floats
    """Of what collectives read in all passes until most is alive (``OwnTerms.record_stream_bytes``)."""
    held_most: Floats
    """Most of it that is reserved at once."""
    held_waiting: Floats
    """What is reserved of it also where the host is never ahead."""
    held_busy: Floats
    """Part of the step in which the GPU does not wait for other stages."""
    fresh: Floats
    """Of gradients that take the place of a microbatch's activations when its backward pass has ended."""
    step_end: Floats
    """That take the place of all activations when the last backward pass has ended (``OwnTerms.end_bytes``)."""
    pooled: Floats
    """Of them that stay reserved, free, until an allocation would fail."""
    weights: Floats
    gradients: Floats
    optimizer_states: Floats
    host: Floats
    """In host memory."""
    buffers: Floats
    """Of communicators."""

    @property
    def uneven(self) -> Floats:
        """Bytes in flight beyond those of equal virtual stages: of a first one that saves more, when most of it is in flight, of
        one that saves less, when least is; 0 where activations wait on the host."""
        passes = np.where(self.first_chunk_more > 0, self.first_chunk_most, self.first_chunk_least)
        return np.where(np.isinf(self.resident), passes * self.first_chunk_more, 0.0)


def state_bytes(workload: Workload, trainer: Trainer, layout: Layout, parameters: StageParameters) -> dict[str, Floats]:
    """Weights, gradients and optimizer states, wherever they live.  [ZeRO, arXiv 1910.02054, section 3: what each level shards]

    The weights of a reference model count as weights: half precision, without states, whole on every rank below zero 3 (which
    keeps gathered, or never shards, what is not trained).  [TRL, models/utils.py: prepare_fsdp, prepare_deepspeed]
    """
    zero = column(layout.zero)
    dense_shard, expert_shard = shard_groups(layout, trainer)

    def per_rank(dense: Floats, expert: Floats, level: int) -> Floats:
        sharded = zero >= level
        return dense / np.where(sharded, dense_shard, 1.0) + expert / np.where(sharded, expert_shard, 1.0)

    gradient_bytes, optimizer_bytes = trainer.stored.gradient_bytes, trainer.states_of(workload.optimizer)
    if workload.precision == "fp16":
        gradient_bytes = trainer.stored.fp16_gradient_bytes[0]
        optimizer_bytes += trainer.stored.fp16_gradient_bytes[1]
    trained = parameters.trained(workload)
    dense, expert = base_bytes(workload, trainer, parameters)
    resident = per_rank(parameters.dense * dense, parameters.expert * expert, trainer.stored.weight_sharding_level)
    adapters = parameters.adapters - parameters.expert_adapters, parameters.expert_adapters
    extra = per_rank(*adapters, trainer.stored.weight_sharding_level) * trainer.stored.weight_bytes
    if workload.reference:
        extra = extra + per_rank(parameters.dense, parameters.expert, 3) * gathered_bytes(workload)
    held = {
        "weights": resident + extra,
        "gradients": per_rank(*trained, 2) * gradient_bytes + bucket_bytes(workload, trainer, layout, parameters),
        "optimizer_states": parameters.updated(workload, layout, trainer) * optimizer_bytes,
    }  # fmt: skip
    if workload.lora_whole == "none":
        return held
    moved = trainer.legal.offload_frozen_tables * column(layout.offload_activations) * frozen_other(workload)
    levels, others = (trainer.stored.weight_sharding_level, 2, 1), (moved, gradient_bytes, optimizer_bytes)
    for name, level, own, other in zip(held, levels, whole_bytes(workload, trainer), others, strict=True):
        held[name] = held[name] + per_rank(parameters.whole, np.zeros_like(parameters.expert), level) * (own - other)
    return held


def on_device(workload: Workload, layout: Layout, held: dict[str, Floats]) -> dict[str, Floats]:
    """Of ``state_bytes`` what lies in device memory: nothing where weights live on the host, else what of the optimizer states is
    not offloaded. [torch, FSDP CPUOffloadPolicy: sharded parameters, gradients and states; DeepSpeed, zero.offload_param]"""
    here = 1.0 - column(layout.offload_parameters)
    states = held["optimizer_states"] * (1.0 - host_share(workload, layout))
    return {"weights": held["weights"] * here, "gradients": held["gradients"] * here, "optimizer_states": states}


def host_bytes(
    workload: Workload, trainer: Trainer, layout: Layout, parameters: StageParameters, held: dict[str, Floats]
) -> Floats:
    """Host memory per GPU: of offloaded optimizer states these and a pinned copy of gradient and weight; where weights live on
    the host all of ``state_bytes``."""
    each = trainer.states_of(workload.optimizer)
    if workload.optimizer not in PAGED:  # whose pages are the states alone, without copies
        each += trainer.stored.gradient_bytes + trainer.stored.weight_bytes
    states = parameters.updated(workload, layout, trainer) * host_share(workload, layout) * each
    return np.where(column(layout.offload_parameters) > 0, sum(held.values()), states)


def workspace_bytes(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages,
    parameters: StageParameters,
) -> Floats:  # fmt: skip
    """Library workspaces, gradients of activations, gathered weights and their unsharded gradients.

    The widest gradient alive in a layer is that of the MLP's inner tensors, or what the backward pass of a scan holds. Sharded
    weights are gathered for the current and the prefetched unit under zero 3, for all the stage when they are not dropped after
    the forward pass (zero below 3, or a pipeline, whose schedule also accumulates unsharded gradients: they give way to the
    sharded ones, unit by unit).
    """
    model = workload.model
    element = workload.element
    tokens = sequences(workload, layout) * workload.sequence_length / column(layout.cp)
    inner = tokens * model.ffn_size * model.num_mlp_matrices / column(layout.tp) * (stages.dense > 0)
    if model.is_moe:
        rows = tokens * model.top_k / column(layout.tp) * busiest(workload, column(layout.ep))
        inner = np.maximum(inner, rows * model.expert_ffn_size * model.num_mlp_matrices * (stages.moe > 0))
    boundary = tokens * model.hidden_size * element
    scanned = tokens * backward_bytes(model.linear, element) / column(layout.tp) if model.linear else 0.0
    widest = np.maximum(np.maximum(inner * element, scanned), _score_gradients(workload, trainer, layout))
    transient = widest + 2.0 * boundary
    zero, pipelined = column(layout.zero), column(layout.pp) > 1
    dense_shard, expert_shard = shard_groups(layout, trainer)
    offloaded = column(layout.offload_parameters) > 0
    is_sharded = (zero >= trainer.stored.weight_sharding_level) & ((dense_shard > 1) | offloaded)
    unit = parameters.largest_dense_unit + parameters.largest_expert_unit * (expert_shard > 1) * (stages.moe > 0)
    table = model.vocab_size * float(model.hidden_size) / column(layout.tp)
    weight, whole = gathered_bytes(workload), float(workload.lora_rank == 0)
    tables = float(workload.trains("embedding") or workload.trains("head"))
    units = 2.0 + sum(term.prefetched_units() for term in trainer.terms)
    one_by_one = units * unit * layer_bytes(workload, trainer) + whole * unit * trainer.traffic.gradient_reduce_bytes
    one_by_one = one_by_one + 2.0 * copied_shard(workload, trainer, layout, unit)
    at_ends = table * (weight + tables * trainer.traffic.gradient_reduce_bytes)
    ends = np.maximum(stages.embedding, np.minimum(stages.head, 1.0))
    one_by_one = np.maximum(one_by_one, ends * at_ends)
    dense, expert = parameters.trained(workload)
    learned = dense + expert
    outside = experts_outside(layout, trainer) * parameters.expert * layer_bytes(workload, trainer)
    everything = gathered_parameters(workload, trainer, parameters) - outside + whole * unit * trainer.traffic.gradient_reduce_bytes
    reduced = np.where(zero >= 2, dense / dense_shard + expert / expert_shard, 0.0)  # comes when the unsharded ones go
    everything = everything + (learned - reduced) * trainer.stored.gradient_bytes * pipelined
    if trainer.stored.whole_table_gradient:  # ``learned`` holds 1 / t of it
        uncut = model.vocab_size * float(model.hidden_size) - table
        several = column(layout.num_microbatches) > 1
        everything = everything + stages.embedding * uncut * trainer.stored.gradient_bytes * (pipelined & several)
    gathered = np.where((zero >= 3) & ~pipelined, one_by_one, everything)
    total = cluster.hardware.workspace_memory + transient + np.where(is_sharded, gathered, 0.0)
    for term in trainer.terms:
        total = total + term.workspace_bytes(workload, layout, parameters)
    return total


def copied_shard(workload: Workload, trainer: Trainer, layout: Layout, parameters: Floats) -> Floats:
    """Shard of a unit that is copied from the host before the unit is gathered, (N, 3)."""
    each = layer_bytes(workload, trainer) if workload.lora_rank else trainer.stored.weight_bytes
    return column(layout.offload_parameters) * parameters / shard_groups(layout)[0] * each


def _score_gradients(workload: Workload, trainer: Trainer, layout: Layout) -> Floats:
    """Gradients of the softmax's output and input, b (a/t) (s/c) s each, where scores are a matrix in memory; (N, 1).

    As plain torch operations in fp32 with the cast to half precision: 4 + 4 + 2 bytes.
    """
    if trainer.kernels.attention == "flash":
        return np.zeros_like(column(layout.tp))
    length = workload.sequence_length
    rows = sequences(workload, layout) * workload.model.num_heads / column(layout.tp) * length / column(layout.cp)
    each = 10.0 if "softmax" in trainer.kernels.unfused else 2.0 * workload.element
    return rows * length * each


def stage_output_bytes(workload: Workload, layout: Layout) -> Floats:
    """Output of a stage, T_s h, (N, 1)."""
    split = np.where(column(layout.sequence_parallel) == 1, column(layout.tp), 1.0)
    tokens = sequences(workload, layout) * workload.sequence_length / column(layout.cp) / split
    return tokens * workload.model.hidden_size * workload.element


def communicator_bytes(cluster: Cluster, layout: Layout, trainer: Trainer | None = None) -> Floats:
    """Buffers of the communicators that a rank opens: one per group larger than one, the world's included, and those that a
    ``trainer`` opens beside them, (N, 1)."""
    hardware = cluster.hardware
    groups = sum((column(getattr(layout, name)) > 1).astype(float) for name in ("tp", "pp", "dp", "cp"))
    groups = groups + sum(term.communicators(layout) for term in (trainer.terms if trainer else ()))
    several = column(layout.num_gpus) > 1
    expert = (column(layout.ep) > 1).astype(float)
    return several * ((groups + 1.0) * hardware.communicator_memory + expert * hardware.expert_communicator_memory)


def bucket_bytes(workload: Workload, trainer: Trainer, layout: Layout, parameters: StageParameters) -> Floats:
    """Buckets of torch's DDP, (N, 3): as large as all gradients, there from the first step on.

    Measured on two ranks (torch 2.13, gloo, 384 MiB of gradients): 768 MiB more when a backward pass has ended, 384 after
    zero_grad; with gradient_as_bucket_view 384 and 384.  [torch, nn/parallel/distributed.py: gradient_as_bucket_view]
    """
    first = 2 if workload.precision == "bf16_true" else 1  # level without DDP, which nanotron keeps where gradients are not fp32
    replicas = shard_groups(layout, trainer)[0] * column(layout.dp) > 1
    dense, expert = parameters.trained(workload)
    return (dense + expert) * trainer.traffic.bucket_bytes * (replicas & (column(layout.zero) < first))


def update_bytes(workload: Workload, trainer: Trainer, layout: Layout, parameters: StageParameters) -> Floats:
    """What torch's foreach Adam makes beside the states on the device, (N, 3): the root of the second moment, half of them.

    [torch 2.13, optim/adam.py: _multi_tensor_adam, exp_avg_sq_sqrt]
    """
    if workload.optimizer != "adam" or "adam" not in trainer.kernels.unfused:
        return np.zeros_like(parameters.dense)
    each = parameters.updated(workload, layout, trainer)
    of_adam = trainer.stored.optimizer_bytes["adam"]
    shard = np.where(column(layout.zero) >= 1, shard_groups(layout, trainer)[0], 1.0)
    each = each + parameters.whole * (whole_bytes(workload, trainer)[2] / of_adam - 1.0) / shard  # tables with adapters
    on_host = (column(layout.offload_optimizer) > 0) | (column(layout.offload_parameters) > 0)
    return each * of_adam / 2.0 * ~on_host


def record_stream_held(launched: Floats, most: Floats, waiting: Floats, host_share: Floats) -> Floats:
    """Bytes of ``OwnTerms.record_stream_bytes`` for a host that needs ``host_share`` r of the GPU's time.

    max(waiting, min((1 - r) launched, most))

    Layouts of runs/oss-ultrascale-nanotron-* with one stage hold, beyond what is alive and fragmentation, in units of T h:
    r 0.10, 0.16, 0.31 and 0.44 with one microbatch of 64, 32, 32 and 32 tensors: 56, 36, 20 and 5; r 0.85 with 2 and with 32
    microbatches: 11 and 46; r 0.93 and above: none.
    """
    return np.maximum(waiting, np.minimum(np.maximum(1.0 - host_share, 0.0) * launched, most))
