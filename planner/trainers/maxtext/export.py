"""MaxText: a YAML file over its base.yml, one mesh whose axes are the plan's degrees, one JAX process per node.

The mesh is a plain reshape of the devices, slowest axis first: data, stage, fsdp, ..., context, tensor, tensor_sequence, expert
[mesh_axes in configs/base.yml]. With ``num_slices`` 1 all degrees are ici degrees, also across nodes.
"""

from __future__ import annotations

from typing import Any

from planner import library
from planner.layout import CpMethod, Module, Order, Recompute
from planner.model import ModelSpec
from planner.trainers.bundle.model_config import family
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target
from planner.trainers.transformers.fine_tuning import SMOKE_STEPS

BLOCKS = {
    "llama": "llama2", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe", "deepseek_v2": "deepseek", "deepseek_v3": "deepseek",
}  # fmt: skip
"""Family of the model -> decoder_block."""
MATRICES = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj", "out_proj", "mla_q", "mla_kv")
"""Names that the layers give to what the backward pass needs; attention's inputs and output projection."""
MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
PORT = 12345


def refusals(job: ExportJob) -> list[str]:
    """What MaxText cannot run, with its rule."""
    layout, model, found = job.layout, job.model, []
    tp, cp, ep = int(layout.tp), int(layout.cp), int(layout.ep)
    if int(layout.pp) > 1:
        found.append(
            f"pp {layout.pp}: MaxText's pipeline runs all microbatches forward, then all backward (a differentiated scan, "
            "layers/pipeline.py), not the schedule that was priced; use pp 1"
        )
    if int(layout.zero) != 3 and int(layout.dp) * cp > 1:
        found.append(
            f"zero {layout.zero}: the fsdp axis shards states and weights alike [logical_axis_rules]; use zero 3"
        )
    if ep > 1 and (tp > 1 or cp > 1):
        found.append(
            f"ep {ep} with tp {tp} and cp {cp}: the expert axis lies inside the tensor axis of the mesh, and experts are cut by "
            "both [mesh_axes, logical_axis_rules]; use tp 1 and cp 1, or ep 1"
        )
    if int(layout.etp) > 1 and ep > 1:
        found.append(f"etp {layout.etp}: experts have no tensor parallel degree of their own; use etp 1")
    if ep > 1 and int(layout.shard) % ep:
        found.append(
            f"ep {ep} with shard group {int(layout.shard)}: the expert axis is a part of it; choose ep that divides it"
        )
    if cp > 1 and int(layout.cp_method) != CpMethod.ALLGATHER:
        found.append(
            f"cp {cp}: on GPUs the priced strategy is context_parallel_strategy all_gather; use cp_method allgather"
        )
    if int(layout.order) != Order.TP_CP_EP_DP_PP:
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
    layout, work, found = job.layout, job.workload, []
    if work.precision == "fp8" and int(layout.num_microbatches) > 1:
        found.append(
            f"precision fp8 with {layout.num_microbatches} microbatches: MaxText refuses fp8 with gradient accumulation "
            "[configs/types.py]; choose a batch that fits in one, or bf16"
        )
    if work.precision not in ("bf16", "fp8"):
        found.append(f"precision {work.precision}: exported to MaxText are bf16 and fp8; use one of them")
    if work.optimizer not in OPTIMIZERS:
        found.append(
            f"optimizer {work.optimizer}: opt_type is exported as {', '.join(OPTIMIZERS.values())}; use {', '.join(OPTIMIZERS)}"
        )
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the pre-training script has no adapters; plan without --lora-rank")
    if int(layout.offload_optimizer) or int(layout.offload_activations):
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
    layout, work = job.layout, job.workload
    tp, cp, ep, shard = int(layout.tp), int(layout.cp), int(layout.ep), int(layout.shard)
    split = "tensor_sequence" if int(layout.sequence_parallel) else "tensor"
    axes = {
        "data": int(layout.dp) // shard,
        "fsdp": shard // ep,
        "context": cp,
        "tensor": 1,
        "tensor_sequence": 1,
        "expert": ep,
    }
    axes[split] = tp
    every = (
        "diloco", "data", "fsdp", "fsdp_transpose", "sequence", "context", "context_usp_ulysses", "context_autoregressive",
        "tensor", "tensor_sequence", "autoregressive", "pipeline", "expert",
    )  # fmt: skip
    return {
        "base_config": "base.yml",
        "run_name": "plan",
        "hardware": "gpu",
        **_model(job.model),
        **{f"ici_{axis}_parallelism": axes.get(axis, 1) for axis in every},
        **{f"dcn_{axis}_parallelism": 1 for axis in every},
        "num_slices": 1,
        "context_parallel_strategy": "all_gather",
        "context_parallel_load_balance": cp > 1,
        "per_device_batch_size": int(layout.micro_batch_size) / (tp * cp),
        "gradient_accumulation_steps": int(layout.num_microbatches),
        "max_target_length": work.sequence_length,
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "grad_dtype": "float32",
        "quantization": "fp8" if work.precision == "fp8" else "",
        "opt_type": OPTIMIZERS[work.optimizer],
        "mu_dtype": "float32",
        "attention": "cudnn_flash_te" if job.cluster.hardware.vendor == "NVIDIA" else "dot_product",
        "scan_layers": True,
        **_remat(job),
        "enable_dropout": False,
        "packing": True,
        "enable_checkpointing": True,
        "async_checkpointing": True,
    }


def _remat(job: ExportJob) -> dict[str, str]:
    """What stays on the device. Norms and element-wise products have no names: they are always computed again."""
    mask, mode = int(job.layout.recompute_modules), int(job.layout.recompute)
    if mode == Recompute.FULL:
        return {"remat_policy": "full"}
    kept = {name: "device" for name in MATRICES}
    kept["context"] = "remat" if mask & Module.CORE_ATTENTION else "device"
    kept |= {name: "remat" if mask & Module.MLP else "device" for name in MLP}
    return {"remat_policy": "custom", "decoder_layer_input": "device", **kept}


def _model(m: ModelSpec) -> dict[str, Any]:
    """Sizes of the model in MaxText's words."""
    block = BLOCKS[str(family(m))]
    sizes: dict[str, Any] = {
        "model_name": "default", "decoder_block": block, "base_emb_dim": m.hidden_size,
        "base_num_query_heads": m.num_heads, "base_num_kv_heads": m.num_kv_heads, "head_dim": m.head_dim,
        "base_mlp_dim": m.expert_ffn_size if m.is_moe and not m.num_dense_layers else m.ffn_size,
        "base_num_decoder_layers": m.num_layers, "vocab_size": m.vocab_size, "logits_via_embedding": m.tied_embeddings,
        "mlp_activations": ["silu", "linear"], "normalize_embedding_logits": False, "attention_bias": m.qkv_bias,
        "use_qk_norm": m.qk_norm,
    }  # fmt: skip
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
    common = ("python", "-m", "maxtext.trainers.pre_train.train", "maxtext.yml", "base_output_directory=$OUTPUT")
    notes = [
        "The training loop reads the batch of one gradient step as per_device_batch_size x devices x gradient_accumulation_steps; "
        "per_device_batch_size below 1 is a sequence shared by a tensor or context parallel group.",
        "One JAX process per node; all degrees are ici degrees of one slice, so that ranks lie where they were priced.",
    ]
    if int(job.layout.recompute) != Recompute.FULL:
        notes.append(
            "Norms and element-wise products are always computed again: their outputs have no names that a remat policy could "
            "keep. Memory is a little below the plan's, time a little above."
        )
    return Rendered(
        files={"maxtext.yml": library.dump_yaml(config(job))},
        entry=(*common, "steps=$STEPS", "dataset_type=$DATASET_TYPE", "${data[@]}"),
        smoke=(
            *common,
            "${data[@]}",
            f"steps={SMOKE_STEPS}",
            "dataset_type=synthetic",
            "enable_checkpointing=false",
            "run_name=smoke",
        ),
        prepare=(
            "# MaxText joins its processes by these.",
            f'export JAX_COORDINATOR_PORT="${{JAX_COORDINATOR_PORT:-{PORT}}}"',
            'export JAX_COORDINATOR_IP="$MASTER_ADDR" NNODES="$NUM_NODES"',
            'read -r -a data <<< "$DATA_OPTIONS"',
        ),
        start="node",
        environment={
            "XLA_PYTHON_CLIENT_MEM_FRACTION": Setting(
                value="0.92", why="JAX takes this part of the device at the start; the rest is for NCCL and cuDNN."
            ),
            "XLA_FLAGS": Setting(
                value="--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false",
                why="The plan counts on communication behind computation: XLA's scheduler has to be asked for it.",
            ),
            "NVTE_FUSED_ATTN": Setting(
                value="1", why="cudnn_flash_te takes cuDNN's fused attention, the kernel that was priced."
            ),
        },
        variables={
            "OUTPUT": Setting(value="output", why="Folder or bucket for logs and checkpoints."),
            "STEPS": Setting(value="1000", why="Optimizer steps."),
            "DATASET_TYPE": Setting(value="synthetic", why="grain, hf, tfds or synthetic."),
            "DATA_OPTIONS": Setting(value="", why="Further settings, like 'grain_train_files=/data/*.arrayrecord'."),
        },
        notes=tuple(notes),
        install=(f"pip install 'maxtext[cuda12]{TARGET.versions}'",),
    )


TARGET = Target(
    name="maxtext",
    title="MaxText (YAML over base.yml)",
    trainers=("maxtext",),
    versions=">=0.2.5,<0.3",
    package="maxtext",
    level="groups built",
    source="maxtext 0.2.5: configs/base.yml, configs/types.py, layers/nnx_decoders.py, utils/maxtext_utils.py",
    refusals=refusals,
    render=render,
)
