"""The optimizer update and what surrounds it: accumulation, copies, transfers to the host."""

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.pipeline.partition import StageParameters, column, shard_groups
from planner.layout import Layout, Recompute
from planner.trainer import Trainer
from planner.workload import Workload

MUON_STEPS = 5.0
"""Newton-Schulz iterations of Muon, each 4 m^2 n + 2 m^3 FLOP on a matrix of m <= n: about 6 h per parameter at m = n = h.

[Jordan 2024, Muon; five iterations in bf16]
"""


def optimizer_traffic(workload: Workload, trainer: Trainer) -> float:
    """Bytes read and written per updated parameter: gradient in, states in and out, weight out.

    Megatron bf16 Adam: 4 + 2 * 12 + 2 = 30, and 4 more for the gradient norm. Other kernels: terms of the trainer.
    """
    states = trainer.stored.optimizer_bytes[workload.optimizer]
    around = sum(term.update_bytes(workload) for term in trainer.terms)
    return 2.0 * trainer.stored.gradient_bytes + 2.0 * states + trainer.stored.weight_bytes + around


def optimizer_seconds(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, parameters: StageParameters
) -> tuple[Floats, Floats]:
    """Seconds of the update on the GPU and, for offloaded states, beyond it on the host.

    GPU: bytes over memory bandwidth. Host: gradients out and weights back over PCIe, states streamed through host
    memory, whose bandwidth all GPUs of a node share; transfers and update run one after the other per chunk but overlap
    each other across chunks, so the slower counts.  [ZeRO-Offload, arXiv 2101.06840, section 4]
    """
    hardware = cluster.hardware
    updated = parameters.updated(workload, layout)
    bytes_each = optimizer_traffic(workload, trainer)
    host_share = column(layout.offload_optimizer) / 100.0
    on_gpu = hardware.memory_time(updated * (1.0 - host_share) * bytes_each, "optimizer")
    if workload.optimizer == "muon":
        on_gpu = on_gpu + updated * MUON_STEPS * 6.0 * workload.model.hidden_size / hardware.sustained_flops("bf16")
    if not np.any(host_share > 0):
        return on_gpu, np.zeros_like(on_gpu)
    moved = updated * host_share
    transfer = moved * (trainer.stored.gradient_bytes + trainer.stored.weight_bytes) / hardware.pcie_bandwidth
    per_gpu = (
        hardware.host_memory_bandwidth
        * hardware.cpu_adam_bandwidth_fraction
        / min(hardware.gpus_per_node, cluster.num_gpus)
    )
    return on_gpu, np.maximum(transfer, moved * (bytes_each + trainer.traffic.copied("offload")) / per_gpu)


def copy_seconds(cluster: Cluster, layout: Layout, parameters: StageParameters) -> Floats:
    """Seconds to move one byte for each parameter of a stage, where states are sharded.  [Trainer.gather_copy_bytes]"""
    dense_shard, expert_shard = shard_groups(layout)
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


def activation_offload(cluster: Cluster, layout: Layout, stored: Floats, forward: Floats, backward: Floats) -> Floats:
    """Seconds per microbatch and stage, (3, N), that activations wait for PCIe, out and back, beyond the computation."""
    used = (np.asarray(layout.offload_activations) == 1) & (np.asarray(layout.recompute) == int(Recompute.FULL))
    transfer = stored / cluster.hardware.pcie_bandwidth
    waiting = np.maximum(transfer - forward, 0.0) + np.maximum(transfer - backward, 0.0)
    return np.where(used, waiting, 0.0)
