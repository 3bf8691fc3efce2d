"""Traffic of states, once per optimizer step: gradients reduced, weights gathered, and what hides behind computation; the update
and what surrounds it: accumulation, copies, transfers to the host."""


import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster, strides
from planner.cost.pipeline.partition import (
    StageParameters,
    Stages,
    column,
    experts_outside,
    gathered_parameters,
    host_share,
    layer_bytes,
    shard_groups,
)  # fmt: skip
from planner.layout import Layout
from planner.record import record
from planner.trainer import Trainer
from planner.workload import PAGED, Workload

TRAFFIC_FIELDS = (
    "tp", "pp", "cp", "dp", "dp_shard", "ep", "etp", "zero", "order", "first_stage_layers", "last_stage_layers",
    "offload_optimizer", "offload_parameters",
)  # fmt: skip
"""Fields that decide how many bytes of states a rank holds, reduces and gathers, and over which links."""
MATRICES = 4.0
"""Weights of a layer without its two norms: QKV, output, up with gate, down. A bucket holds at least one of them whole."""
MUON_STEPS = 5.0
"""Newton-Schulz iterations of Muon, each 4 m^2 n + 2 m^3 FLOP on a matrix of m <= n: about 6 h per parameter at m = n = h.

[Jordan 2024, Muon; five iterations in bf16]
"""


@record
class UpdateSeconds:
    """Seconds per optimizer step of each stage of N candidates, (3, N)."""

    reduce: Floats
    """To reduce all gradients once."""
    gather: Floats
    """To gather all weights once."""
    copies: Floats
    """To move one byte for each parameter into or out of communication buffers."""
    reference: Floats
    """To gather all weights of a reference model once, where they are sharded."""
    reduced_last: Floats
    """Part of ``reduce`` that has nothing to hide behind: gradients that are ready last."""
    gathered_first: Floats
    """Part of ``gather`` that has nothing to hide behind: weights that are wanted first."""
    optimizer: Floats
    """Of the update on the GPU."""
    offload: Floats
    """Of transfers and update of offloaded states."""
    host_sum: Floats
    """To add the gradients of one further microbatch on the host."""

    def on_host(self, microbatches: Floats) -> Floats:
        """Of all that waits for the host, by the microbatches of a step."""
        return self.offload + (microbatches - 1.0) * self.host_sum


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


@record
class Part:
    """The dense or the expert weights of a stage, (N, 3) or (N, 1) each."""

    cluster: Cluster
    trainer: Trainer
    zero: Floats
    layers: Floats
    """Layers of a stage."""
    weight_bytes: Floats
    """Bytes per parameter gathered, (N, 3)."""
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

    def scattered(self, parameters: Floats) -> Floats:
        """Seconds to reduce the gradients of so many parameters to the ranks that hold their states, over replicas as well."""
        size = parameters * self.trainer.traffic.gradient_reduce_bytes
        seconds = self.cluster.collective_time("reduce_scatter", size, self.group, self.distance)
        if np.any(self.replicas > 1):
            piece, distance = size / self.group, self.distance * self.group
            seconds = seconds + self.cluster.collective_time("all_reduce", piece, self.replicas, distance)
        return seconds

    def reduced(self) -> Floats:
        """Seconds to reduce all gradients once."""
        group, traffic = self.group * self.replicas, self.trainer.traffic
        each = np.where(self.zero == 0, traffic.bucket_bytes, 0.0)  # as they lie in buckets
        size = self.learned * np.maximum(each, traffic.gradient_reduce_bytes)
        replicated = self.cluster.collective_time("all_reduce", size, group, self.distance)
        if traffic.bucket_bytes:  # torch DDP reduces its buckets one by one
            largest = np.maximum(traffic.bucket_parameters, self.largest_dense_unit / MATRICES)
            buckets = np.maximum(np.ceil(self.learned / largest), 1.0)
            one = self.cluster.collective_time("all_reduce", size / buckets, group, self.distance)
            replicated = np.where(self.zero == 0, buckets * one, replicated)
        whole = (self.zero == 0) | (traffic.zero1_all_reduces & (self.zero == 1))
        scattered = self.reductions * self.scattered(self.learned / self.reductions)
        return np.where(whole, replicated, scattered)

    def gathered_once(self, parameters: Floats) -> Floats:
        """Seconds of one gather of so many parameters."""
        size = parameters * self.weight_bytes
        seconds = self.cluster.collective_time("all_gather", size, self.group, self.distance)
        for term in self.trainer.terms:
            seconds = term.gather_seconds(self, size, seconds)
        return seconds

    def gathered(self) -> Floats:
        """Seconds to gather all weights once; what is not trained only where resident weights are sharded."""
        wanted = np.where(self.zero >= self.trainer.stored.weight_sharding_level, self.resident, self.learned)
        seconds = self.gathers * self.gathered_once(wanted / self.gathers)
        for term in self.trainer.terms:
            seconds = seconds + term.gather_host_seconds(self)
        return seconds


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
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages, parameters: StageParameters
) -> tuple[Part, Part]:
    """Dense and expert weights. Experts that are not spread over ranks lie in their layer's unit and are dense here.

    [torchtitan, distributed/fsdp.py: a mesh of their own with expert parallelism only] Of adapters no end is trained.
    """
    stride, shards = strides(layout), shard_groups(layout, trainer)
    near = np.where(column(layout.cp) > 1, column(stride["cp"]), column(stride["dp"])), column(stride["edp"])
    ones = np.ones_like(parameters.dense)
    learned, resident = list(parameters.trained(workload)), [parameters.dense, parameters.expert]
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
    tiny = np.finfo(float).tiny
    mean = gathered_parameters(workload, trainer, parameters) - parameters.expert * layer_bytes(workload, trainer)
    each = mean / np.maximum(parameters.dense, tiny), np.full_like(ones, layer_bytes(workload, trainer))
    whole = column(layout.dp) / column(layout.shard)
    replicas = whole, np.where(experts_outside(layout, trainer) > 0, column(layout.edp), whole)
    dense, expert = (
        Part(cluster=cluster, trainer=trainer, zero=column(layout.zero), layers=workload.model.num_layers / column(layout.pp),
             weight_bytes=each[i], learned=learned[i], resident=resident[i], reduced_last=ends[i],
             gathered_first=last[i], reductions=reductions[i], gathers=pieces[i], group=shards[i],
             replicas=replicas[i], distance=near[i],
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
    for part in _parts(workload, cluster, trainer, layout, stages, parameters):
        if not np.any(part.resident):
            continue
        gradients = gradients + part.reduced()
        weights = weights + part.gathered()
        if trainer.traffic.root_units:
            last = last + part.scattered(part.reduced_last)
            first = first + part.gathered_once(part.gathered_first)
    bucket = trainer.traffic.bucket_parameters / np.maximum(parameters.all, trainer.traffic.bucket_parameters)
    weights = np.where(zero == 0, 0.0, weights)
    if not trainer.traffic.root_units:
        return gradients, weights, (bucket, bucket)
    some = np.finfo(float).tiny  # where nothing is moved, the share is of nothing
    wholes = ((last, np.maximum(gradients, some)), (first, np.maximum(weights, some)))
    ends = (np.where(zero == 0, bucket, np.minimum(end, whole) / whole) for end, whole in wholes)
    reduced_last, gathered_first = ends
    return gradients, weights, (reduced_last, gathered_first)


def optimizer_traffic(workload: Workload, trainer: Trainer) -> float:
    """Bytes read and written per updated parameter: gradient in, states in and out, weight out.

    Megatron bf16 Adam: 4 + 2 * 12 + 2 = 30, and 4 more for the gradient norm. Other kernels: terms of the trainer.
    """
    states = trainer.states_of(workload.optimizer)
    around = sum(term.update_bytes(workload) for term in trainer.terms)
    return 2.0 * trainer.stored.gradient_bytes + 2.0 * states + trainer.stored.weight_bytes + around


def optimizer_seconds(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, parameters: StageParameters
) -> tuple[Floats, Floats]:
    """Seconds of the update on the GPU and, for offloaded states, beyond it on the host.

    GPU: bytes over memory bandwidth. Host: gradients out and weights back over PCIe, states streamed through host
    memory, whose bandwidth all GPUs of a node share; transfers and update run one after the other per chunk but overlap
    each other across chunks, so the slower counts.  [ZeRO-Offload, arXiv 2101.06840, section 4]
    Paged states are updated on the GPU; pages of the next weights come over PCIe while those before go back: S / B. Where the
    weights live on the host there are no pages, and the update runs there.
    [bitsandbytes, optim/optimizer.py: prefetch_state, get_state_buffer; CUDA unified memory]
    """
    hardware = cluster.hardware
    updated = parameters.updated(workload, layout, trainer)
    bytes_each = optimizer_traffic(workload, trainer)
    host = host_share(workload, layout)
    on_gpu = hardware.memory_time(updated * (1.0 - host) * bytes_each, "optimizer")
    if workload.optimizer == "muon":
        on_gpu = on_gpu + updated * MUON_STEPS * 6.0 * workload.model.hidden_size / hardware.sustained_flops("bf16")
    if not np.any(host > 0):
        return on_gpu, np.zeros_like(on_gpu)
    moved = updated * host
    away = column(layout.offload_parameters)
    each = (trainer.stored.gradient_bytes + trainer.stored.weight_bytes) * (1.0 - away)
    transfer = moved * each / hardware.pcie_bandwidth
    in_memory = moved * (bytes_each + trainer.traffic.copied("offload")) / host_bandwidth(cluster)
    on_host = np.maximum(transfer, in_memory)
    if workload.optimizer in PAGED:
        update, pages = hardware.memory_time(moved * bytes_each, "optimizer"), moved * trainer.states_of(workload.optimizer)
        return np.where(away > 0, on_gpu, update), np.where(away > 0, on_host, pages / hardware.pcie_bandwidth)
    return on_gpu, on_host


def host_copy_seconds(cluster: Cluster, layout: Layout, held: dict[str, Floats]) -> tuple[Floats, Floats]:
    """Seconds to copy the gradients of a rank to the host once, and its weights to the device once, where both live there.

    A unit's shard is copied before the unit is gathered and its gradient after it is reduced, on streams of their own: they hide
    behind computation as the collectives do, which they lengthen. Copies in both directions do not slow each other.
    [torch 2.13, _fsdp_param.py: all_gather_inputs; _fsdp_collectives.py: foreach_all_gather, foreach_reduce]
    """
    there = column(layout.offload_parameters) / cluster.hardware.pcie_bandwidth
    return held["gradients"] * there, held["weights"] * there


def host_sum_seconds(cluster: Cluster, trainer: Trainer, layout: Layout, held: dict[str, Floats]) -> Floats:
    """Seconds to add a microbatch's gradients to those on the host: read twice, written once. FSDP waits for their copy as well;
    ZeRO copies the sum to the GPU and back behind the backward pass. In a pipeline gradients are summed on the GPU.

    [torch 2.13, _fsdp_collectives.py: foreach_reduce, to_accumulate_grad; DeepSpeed, stage3.py: partition_grads]
    """
    waits = trainer.stored.gradients_on_demand * column(layout.offload_parameters) * (column(layout.pp) == 1)
    return waits * held["gradients"] * (3.0 / host_bandwidth(cluster) + 1.0 / cluster.hardware.pcie_bandwidth)


def host_bandwidth(cluster: Cluster) -> float:
    """What an update on the host reaches of the memory bandwidth, which all GPUs of a node share, bytes/s per GPU."""
    hardware = cluster.hardware
    whole = hardware.host_memory_bandwidth * hardware.cpu_adam_bandwidth_fraction
    return whole / min(hardware.gpus_per_node, cluster.num_gpus)


def copy_seconds(cluster: Cluster, trainer: Trainer, layout: Layout, parameters: StageParameters) -> Floats:
    """Seconds to move one byte for each parameter of a stage, where states are sharded.  [Trainer.gather_copy_bytes]"""
    dense_shard, expert_shard = shard_groups(layout, trainer)
    moved = parameters.dense * (dense_shard > 1) + parameters.expert * (expert_shard > 1)
    return cluster.hardware.memory_time(moved, "copy")


def accumulation_seconds(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, parameters: StageParameters
) -> Floats:
    """Seconds per microbatch to add a stage's fresh gradients to the accumulated ones, as kernels of their own.

    fp32 main gradients: read 2 and 4, write 4 bytes per parameter; half-precision ones: read 2 and 2, write 2. Nothing
    where the GEMM of the weight gradient accumulates.  [Trainer.accumulation_bytes]
    In a pipeline FSDP2 adds every microbatch's half-precision gradient to an unsharded fp32 sum, 2 + 4 + 4; the first is only
    cast, 2 + 4, but the reduction then reads 4 bytes instead of 2: 2 bytes per step are left out. Gradients in fp32 are added by
    autograd, 4 + 4 + 4.  [torch 2.13, _fsdp_param.py: to_accumulated_grad_if_needed, accumulate_unsharded_grad_if_needed]
    """
    dense, expert = parameters.trained(workload)
    in_pipeline = trainer.traffic.copied("accumulate_in_pipeline") + (2.0 if workload.element == 4 else 0.0)
    waiting = (
        (column(layout.pp) > 1) & (column(layout.zero) >= 1) & (trainer.traffic.copied("accumulate_in_pipeline") > 0)
    )
    each = trainer.traffic.copied("accumulate") + np.where(waiting, in_pipeline, 0.0)
    return cluster.hardware.memory_time((dense + expert) * each, "elementwise")


def offloaded_layers(layout: Layout, layers: Floats) -> Floats:
    """Of so many layers of a stage those whose activations are offloaded, (N, 3)."""
    some = column(layout.offload_layers)
    return column(layout.offload_activations) * np.where(some > 0, np.minimum(some, layers), layers)


def activation_offload(
    cluster: Cluster, layout: Layout, stages: Stages, stored: Floats, forward: Floats, backward: Floats
) -> Floats:
    """Seconds per microbatch and stage, (3, N), that activations wait for PCIe, out and back, beyond the computation:
    max(x - forward, 0) + max(x - backward, 0), x the time to copy what the offloaded layers save."""
    layers = np.maximum(stages.dense + stages.moe, 1.0)
    transfer = stored * (offloaded_layers(layout, layers) / layers).T / cluster.hardware.pcie_bandwidth
    waiting = np.maximum(transfer - forward, 0.0) + np.maximum(transfer - backward, 0.0)
    return np.where(transfer > 0, waiting, 0.0)
