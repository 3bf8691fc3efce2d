"""MaxText: a YAML file over its base.yml, one mesh whose axes are the plan's degrees, one JAX process per node.

The mesh is a plain reshape of the devices, slowest axis first: data, stage, fsdp, ..., context, tensor, tensor_sequence, expert
[mesh_axes in configs/base.yml]. With ``num_slices`` 1 all degrees are ici degrees, also across nodes.
"""

from typing import Any

from planner import library
from planner.layout import CpMethod, Module, Order, Recompute
from planner.model import ModelSpec
from planner.trainers.bundle.model_config import family
from planner.trainers.bundle.quoting import filled_yaml
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules

BLOCKS = {
    "llama": "llama2", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe", "deepseek_v2": "deepseek", "deepseek_v3": "deepseek",
}  # fmt: skip
"""Family of the model -> decoder_block."""
MATRICES = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj", "out_proj", "mla_q", "mla_kv")
"""Names that the layers give to what the backward pass needs; attention's inputs and output projection."""
NAMED = Module.CORE_ATTENTION | Module.MLP
"""Modules whose outputs have names that a remat policy can drop."""
ALWAYS_REPEATED = Module.NORM | Module.MLP_ACTIVATION
MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")


def refusals(job: ExportJob) -> list[str]:
    """What MaxText cannot run, with its rule."""
    layout, model, found = job.layout, job.model, []
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    if layout.pp > 1:
        found.append(
            f"pp {layout.pp}: MaxText's pipeline runs all microbatches forward, then all backward (a differentiated scan, "
            "layers/pipeline.py), not the schedule that was priced; use pp 1"
        )
    if layout.zero != 3 and layout.dp * cp > 1:
        found.append(
            f"zero {layout.zero}: the fsdp axis shards states and weights alike [logical_axis_rules]; use zero 3"
        )
    if ep > 1 and (tp > 1 or cp > 1):
        found.append(
            f"ep {ep} with tp {tp} and cp {cp}: the expert axis lies inside the tensor axis of the mesh, and experts are cut by "
            "both [mesh_axes, logical_axis_rules]; use tp 1 and cp 1, or ep 1"
        )
    if layout.etp > 1 and ep > 1:
        found.append(f"etp {layout.etp}: experts have no tensor parallel degree of their own; use etp 1")
    if ep > 1 and int(layout.shard) % ep:
        found.append(
            f"ep {ep} with shard group {int(layout.shard)}: the expert axis is a part of it; choose ep that divides it"
        )
    if cp > 1 and layout.cp_method != CpMethod.ALLGATHER:
        found.append(
            f"cp {cp}: on GPUs the priced strategy is context_parallel_strategy all_gather; use cp_method allgather"
        )
    if layout.order != Order.TP_CP_EP_DP_PP:
        found.append(
            "rank order: mesh_axes put tensor inside context inside fsdp; price the plan with --order tp-cp-ep-dp-pp"
        )
    if family(model) not in BLOCKS:
        found.append(
            f"{model.name}: no decoder_block of MaxText known here has its layers; known are {', '.join(BLOCKS)}"
        )
    if job.gpus_per_node * job.num_nodes != job.cluster.num_gpus:
        found.append(
            f"{job.cluster.num_gpus} GPUs on nodes of {job.gpus_per_node}: a JAX process takes a whole node; plan for whole nodes"
        )
    return found + _training_refusals(job)


def _training_refusals(job: ExportJob) -> list[str]:
    layout, work, found = job.layout, job.workload, unknown_choices(job, "MaxText", OPTIMIZERS, ("bf16", "fp8"))
    found += unknown_modules(job, "MaxText", NAMED | ALWAYS_REPEATED)
    if work.precision == "fp8" and layout.num_microbatches > 1:
        found.append(
            f"precision fp8 with {layout.num_microbatches} microbatches: MaxText refuses fp8 with gradient accumulation "
            "[configs/types.py]; choose a batch that fits in one, or bf16"
        )
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the pre-training script has no adapters; plan without --lora-rank")
    if layout.offload_optimizer or layout.offload_activations:
        found.append(
            "offload: optimizer_memory_host_offload moves states, but steps on the GPU, which was not priced; plan without"
        )
    if job.model.mtp_layers and family(job.model) != "deepseek_v3":
        found.append(
            f"{job.model.name} has prediction modules, which MaxText has for DeepSeek's block only; use another target"
        )
    return found


OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
"""opt_type by optimizer."""


def config(job: ExportJob) -> dict[str, Any]:
    """maxtext.yml."""
    layout, m = job.layout, job.model
    found: dict[str, Any] = filled_yaml(
        job, "maxtext", "maxtext.txt", replicas=layout.dp // job.shard, fsdp=job.shard // layout.ep,
        tensor=1 if layout.sequence_parallel else layout.tp, sequence=layout.tp if layout.sequence_parallel else 1,
        balance=layout.cp > 1, batch=layout.micro_batch_size / (layout.tp * layout.cp), block=BLOCKS[str(family(m))],
        mlp=m.expert_ffn_size if m.is_moe and not m.num_dense_layers else m.ffn_size,
        quantization="fp8" if job.workload.precision == "fp8" else "", optimizer=OPTIMIZERS[job.workload.optimizer],
        attention="cudnn_flash_te" if job.cluster.hardware.vendor == "NVIDIA" else "dot_product",
    )  # fmt: skip
    return {**found, **_more_sizes(m), **_remat(job)}


def _remat(job: ExportJob) -> dict[str, str]:
    """What stays on the device. Norms and element-wise products have no names: they are always computed again."""
    mask, mode = job.layout.recompute_modules, job.layout.recompute
    if mode == Recompute.FULL:
        return {"remat_policy": "full"}
    kept = {name: "device" for name in MATRICES}
    kept["context"] = "remat" if mask & Module.CORE_ATTENTION else "device"
    kept |= {name: "remat" if mask & Module.MLP else "device" for name in MLP}
    return {"remat_policy": "custom", "decoder_layer_input": "device", **kept}


def _more_sizes(m: ModelSpec) -> dict[str, Any]:
    """Windows, experts and latent attention in MaxText's words."""
    sizes: dict[str, Any] = {}
    if m.window and m.num_windowed_layers:
        sizes["sliding_window_size"] = m.window
    if m.is_moe:
        sizes |= {
            "num_experts": m.num_experts, "num_experts_per_tok": m.top_k, "base_moe_mlp_dim": m.expert_ffn_size,
            "shared_experts": m.num_shared_experts, "first_num_dense_layers": m.num_dense_layers,
            "megablox": False, "sparse_matmul": True, "capacity_factor": -1.0,
        }  # fmt: skip
    if m.is_mla:
        sizes |= {
            "attention_type": "mla", "q_lora_rank": m.q_lora_rank, "kv_lora_rank": m.kv_lora_rank,
            "qk_nope_head_dim": m.qk_nope_head_dim, "qk_rope_head_dim": m.qk_rope_head_dim, "v_head_dim": m.v_head_dim,
            "mtp_num_layers": m.mtp_layers,
        }  # fmt: skip
    return sizes


def render(job: ExportJob) -> Rendered:
    """maxtext.yml; data and output come from the command line."""
    note = (
        "Norms and element-wise products are always computed again: their outputs have no names that a remat policy could "
        "keep. Memory is a little below the plan's, time a little above."
    )
    notes = () if job.layout.recompute == Recompute.FULL else (note,)
    return run_of(job, "maxtext", {"maxtext.yml": library.dump_yaml(config(job))}, {"notes": notes})
