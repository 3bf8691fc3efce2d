"""Traffic of states, once per optimizer step: gradients reduced, weights gathered, and what hides behind computation."""

from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster, strides
from planner.cost.pipeline.partition import StageParameters, Stages
from planner.cost.price.sharding import column, gathered_bytes, shard_groups, trained_parameters
from planner.layout import Layout
from planner.trainer import Trainer
from planner.workload import Workload

TRAFFIC_FIELDS = (
    "tp", "pp", "cp", "dp", "dp_shard", "ep", "etp", "zero", "order", "first_stage_layers", "last_stage_layers",
    "offload_optimizer",
)  # fmt: skip
"""Fields that decide how many bytes of states a rank holds, reduces and gathers, and over which links."""
MATRICES = 4.0
"""Weights of a layer without its two norms: QKV, output, up with gate, down. A bucket holds at least one of them whole."""


@dataclass(frozen=True, kw_only=True)
class StateSeconds:
    """Seconds of the traffic of states of each stage of N candidates, (3, N)."""

    reduce: Floats
    """To reduce all gradients once."""
    gather: Floats
    """To gather all weights once."""
    copies: Floats
    """To move one byte for each parameter into or out of communication buffers."""
    reduced_last: Floats
    """Part of ``reduce`` that has nothing to hide behind: gradients that are ready last."""
    gathered_first: Floats
    """Part of ``gather`` that has nothing to hide behind: weights that are wanted first."""


@dataclass(frozen=True, kw_only=True)
class UpdateSeconds(StateSeconds):
    """Seconds per optimizer step of each stage of N candidates, (3, N)."""

    optimizer: Floats
    """Of the update on the GPU."""
    offload: Floats
    """Of transfers and update of offloaded states."""


def last_unit(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, parameters: StageParameters
) -> tuple[Floats, Floats]:
    """Dense and expert parameters that are gathered first and reduced last, where units are gathered one by one: a layer, or the
    unit of the embedding if larger, whose forward pass is no work and whose gradient is the last to be there.

    FSDP1 leaves embedding, final norm and head to the root, ``end_tables`` of 2; a tied table is there once.
    [torch, transformer_auto_wrap_policy; torchtitan models/llama3/parallelize.py, before and after 2025-07]
    """
    model = workload.model
    table = model.vocab_size * float(model.hidden_size) / column(layout.tp)
    heads = (trainer.traffic.root_units > 1 and not model.tied_embeddings) * np.minimum(stages.head, 1.0)
    ends = stages.embedding * (1.0 + heads) * table
    experts = parameters.largest_expert_unit * (stages.moe > 0)
    larger = ends > parameters.largest_dense_unit + experts
    return np.where(larger, ends, parameters.largest_dense_unit), np.where(larger, 0.0, experts)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The dense or the expert weights of a stage, (N, 3) each."""

    learned: Floats
    """Parameters with gradients."""
    resident: Floats
    """All parameters."""
    reduced_last: Floats
    """Those with gradients of the unit that is reduced last.  [last_unit]"""
    gathered_first: Floats
    """Those of the unit that is gathered first."""
    reductions: Floats
    """Collectives in which gradients are reduced once, one after the other."""
    gathers: Floats
    """Likewise in which weights are gathered once."""
    group: Floats
    """Ranks that share the states."""
    replicas: Floats
    """Groups that hold the same states (HSDP)."""
    distance: Floats
    """Between neighbours of the group."""
    largest_dense_unit: Floats
    """Parameters of a layer without its experts."""


def units(workload: Workload, trainer: Trainer, stages: Stages) -> Floats:
    """Collectives, without those of experts, in which the weights of a stage are gathered or its gradients reduced once, one after
    the other.

    1, or where units are gathered one by one (``end_tables``) a layer each, and the ends: one root, or embedding and head,
    which a tied table makes one. Each pays the latency of its ring, which grows with the ranks: on 512 H100 a unit of 50
    million parameters takes 3 ms.
    """
    if not trainer.traffic.root_units:
        return np.ones_like(stages.dense)
    head = np.minimum(stages.head, 1.0)
    together = trainer.traffic.root_units > 1 or workload.model.tied_embeddings
    ends = np.maximum(stages.embedding, head) if together else stages.embedding + head
    return np.maximum(stages.dense + stages.moe + ends, 1.0)


def _parts(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, parameters: StageParameters
) -> tuple[_Part, _Part]:
    """Dense and expert weights. Experts that are not spread over ranks lie in their layer's unit and are dense here.

    [torchtitan, distributed/fsdp.py: a mesh of their own with expert parallelism only] Of adapters no end is trained.
    """
    stride, shards = strides(layout), shard_groups(layout)
    near = np.where(column(layout.cp) > 1, column(stride["cp"]), column(stride["dp"])), column(stride["edp"])
    ones = np.ones_like(parameters.dense)
    learned, resident = list(trained_parameters(workload, parameters)), [parameters.dense, parameters.expert]
    last, pieces = [ones, ones], [ones, ones]
    if trainer.traffic.root_units:
        last = list(last_unit(workload, trainer, layout, stages, parameters))
        pieces = [units(workload, trainer, stages), np.maximum(stages.moe, 1.0)]
        inside = (column(layout.ep) == 1) & (column(layout.zero) >= 1) & (shards[0] == shards[1]) & (near[0] == near[1])
        for both in (learned, resident, last):
            both[0], both[1] = both[0] + inside * both[1], np.where(inside, 0.0, both[1])
    ends, reductions = list(last), list(pieces)
    if workload.lora_rank and trainer.traffic.root_units:
        reductions[0] = np.maximum(stages.dense + stages.moe, 1.0)
        ends = [learned[0] / reductions[0], learned[1]]
    dense, expert = (
        _Part(learned=learned[i], resident=resident[i], reduced_last=ends[i], gathered_first=last[i], reductions=reductions[i],
              gathers=pieces[i], group=shards[i], replicas=column(layout.dp) / column(layout.shard), distance=near[i],
              largest_dense_unit=parameters.largest_dense_unit)
        for i in range(2)
    )  # fmt: skip
    return dense, expert


def reduce_and_gather(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages, parameters: StageParameters
) -> tuple[Floats, Floats, tuple[Floats, Floats]]:
    """Seconds to reduce all gradients of a stage once, and to gather all its weights once, dense and expert parts, in as many
    collectives as there are ``units``; and the parts of both that have nothing to hide behind: of buckets one, of units
    the ``last_unit``.
    """
    zero = column(layout.zero)
    nothing = np.zeros_like(parameters.dense)
    gradients, weights, last, first = nothing, nothing, nothing, nothing
    for part in _parts(workload, trainer, layout, stages, parameters):
        if not np.any(part.resident):
            continue
        gradients = gradients + _reduced(cluster, trainer, layout, parameters, part)
        weights = weights + _gathered(workload, cluster, trainer, layout, part)
        if trainer.traffic.root_units:
            last = last + _scattered(cluster, trainer, part, part.reduced_last)
            first = first + _gathered_once(workload, cluster, trainer, layout, part, part.gathered_first)
    bucket = trainer.traffic.bucket_parameters / np.maximum(parameters.all, trainer.traffic.bucket_parameters)
    weights = np.where(zero == 0, 0.0, weights)
    if not trainer.traffic.root_units:
        return gradients, weights, (bucket, bucket)
    ends = (np.where(zero == 0, bucket, np.minimum(end / np.maximum(time, np.finfo(float).tiny), 1.0))
            for end, time in ((last, gradients), (first, weights)))  # fmt: skip
    reduced_last, gathered_first = ends
    return gradients, weights, (reduced_last, gathered_first)


def _scattered(cluster: Cluster, trainer: Trainer, part: _Part, parameters: Floats) -> Floats:
    """Seconds to reduce the gradients of so many parameters to the ranks that hold their states, over replicas as well."""
    size = parameters * trainer.traffic.gradient_reduce_bytes
    seconds = cluster.collective_time("reduce_scatter", size, part.group, part.distance)
    if np.any(part.replicas > 1):
        piece = size / part.group
        seconds = seconds + cluster.collective_time("all_reduce", piece, part.replicas, part.distance * part.group)
    return seconds


def _buckets(trainer: Trainer, layout: Layout, parameters: StageParameters, part: _Part) -> Floats:
    """Buckets of an all-reduce of whole gradients; 1 where they are scattered."""
    matrix = parameters.largest_dense_unit / MATRICES
    whole = np.ceil(part.learned / np.maximum(trainer.traffic.bucket_parameters, matrix))
    buckets: Floats = np.where(column(layout.zero) == 0, whole, 1.0)
    return np.maximum(buckets, 1.0) if bucket_bytes(trainer) else buckets


def bucket_bytes(trainer: Trainer) -> float:
    """Bytes per parameter of buckets that gradients are copied into where they have replicas; 0 = they lie in them."""
    return sum(term.bucket_bytes() for term in trainer.terms)


def _reduced(cluster: Cluster, trainer: Trainer, layout: Layout, parameters: StageParameters, part: _Part) -> Floats:
    """Seconds to reduce all gradients of a part once."""
    zero, group = column(layout.zero), part.group * part.replicas
    size, buckets = part.learned * trainer.traffic.gradient_reduce_bytes, _buckets(trainer, layout, parameters, part)
    replicated = cluster.collective_time("all_reduce", size, group, part.distance)
    if bucket_bytes(trainer):  # torch DDP reduces its buckets one by one
        one = cluster.collective_time("all_reduce", size / buckets, group, part.distance)
        replicated = np.where(zero == 0, buckets * one, replicated)
    whole = (zero == 0) | (trainer.traffic.zero1_all_reduces & (zero == 1))
    count = part.reductions
    scattered = count * _scattered(cluster, trainer, part, part.learned / count)
    seconds: Floats = np.where(whole, replicated, scattered)
    return seconds


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One all-gather of weights, as the terms of a trainer see it; (N, 3) or (N, 1)."""

    cluster: Cluster
    size: Floats
    """Bytes gathered."""
    group: Floats
    distance: Floats
    layers: Floats
    """Layers of a stage."""
    learned: Floats
    """Parameters with gradients."""
    largest_dense_unit: Floats
    """Parameters of a layer without its experts."""


def _gathered_once(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, part: _Part, parameters: Floats
) -> Floats:
    """Seconds of one gather of so many parameters."""
    gather = _gather(workload, cluster, layout, part, parameters)
    seconds = cluster.collective_time("all_gather", gather.size, part.group, part.distance)
    for term in trainer.terms:
        seconds = term.gather_seconds(gather, seconds)
    return seconds


def _gather(workload: Workload, cluster: Cluster, layout: Layout, part: _Part, parameters: Floats) -> Gather:
    return Gather(
        cluster=cluster, size=parameters * gathered_bytes(workload), group=part.group, distance=part.distance,
        layers=workload.model.num_layers / column(layout.pp), learned=part.learned, largest_dense_unit=part.largest_dense_unit,
    )  # fmt: skip


def _gathered(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, part: _Part) -> Floats:
    """Seconds to gather all weights of a part once; what is not trained only where resident weights are sharded."""
    wanted = np.where(column(layout.zero) >= trainer.stored.weight_sharding_level, part.resident, part.learned)
    count = part.gathers
    seconds = count * _gathered_once(workload, cluster, trainer, layout, part, wanted / count)
    for term in trainer.terms:
        seconds = seconds + term.gather_host_seconds(_gather(workload, cluster, layout, part, wanted))
    return seconds
