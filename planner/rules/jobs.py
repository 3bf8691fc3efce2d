"""Jobs that no layout can run: what a trainer or a GPU does not know at all."""

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.rules.rule import known_to
from planner.trainer import Trainer
from planner.workload import Workload, peak_dtype

SPARSE_KERNELS = ("Megatron Core",)
"""Code bases with kernels for chosen keys.  [megatron/core/transformer/experimental_attention_variant/dsa.py]"""
SPARSE_ATTENTION = (*SPARSE_KERNELS, "automodel")
"""Code bases with sparse attention at all: AutoModel masks full attention.  [components/models/deepseek_v32/layers.py]"""
LEAN_OPTIMIZERS = ("adam_bf16", "adam_8bit")
"""Optimizers whose moments have less than 32 bits."""
NO_FLASH_ATTENTION = ("Volta", "Turing")
"""Architectures without a flash attention kernel: FlashAttention 2 and cuDNN's need Ampere or newer."""
TORCH_ATTENTION = ("fsdp", "deepspeed", "torchtitan")
"""Code that calls torch's scaled_dot_product_attention, which has a memory-efficient kernel for older devices too."""


def runs_attention(trainer: Trainer, arch: str) -> bool:
    """Whether GPUs of an architecture have the attention kernel that a trainer calls."""
    return arch not in NO_FLASH_ATTENTION or trainer.kernels.attention != "flash" or trainer.code_base in TORCH_ATTENTION


def check_workload(workload: Workload, cluster: Cluster, trainer: Trainer) -> None:
    """Raise PlannerError when no layout at all could run this job: precision or optimizer unknown to trainer or GPU."""
    if workload.precision not in trainer.legal.precisions:
        raise PlannerError(
            f"trainer {trainer.name} does not train in {workload.precision}; it knows {', '.join(trainer.legal.precisions)}"
            f"{known_to(workload.precision, lambda legal: workload.precision in legal.precisions)}"
        )
    trainer.states_of(workload.optimizer)
    if trainer.kernels.transformer_engine and workload.precision == "fp16" and workload.optimizer in LEAN_OPTIMIZERS:
        raise PlannerError(
            f"optimizer {workload.optimizer} in fp16: trainer {trainer.name}'s optimizer with moments of less than 32 bits takes "
            "gradients in fp32 or bf16; use --precision bf16 or --optimizer adam"
        )
    if workload.frozen_weights not in trainer.legal.frozen_weights:
        raise PlannerError(
            f"trainer {trainer.name} has no frozen weights in {workload.frozen_weights}; it knows "
            f"{', '.join(trainer.legal.frozen_weights)}"
            f"{known_to(workload.frozen_weights, lambda legal: workload.frozen_weights in legal.frozen_weights)}"
        )
    peft = trainer.kernels.separate_projections and "int8" in trainer.legal.frozen_weights
    if workload.lora_whole != "none" and not (peft or trainer.legal.offload_frozen_tables):
        raise PlannerError(  # peft alone copies them, where Hugging Face's layers and bitsandbytes are
            f"trainer {trainer.name} trains adapters alone; tables beside them are modelled for trl, axolotl, llama-factory, "
            "ms-swift, unsloth, fsdp and deepspeed"
        )
    if workload.objective not in ("lm", *trainer.legal.fine_tuning.objectives):
        raise PlannerError(
            f"trainer {trainer.name} has no objective {workload.objective}; use --objective lm, or another trainer such as trl"
        )
    if workload.model.is_sparse and trainer.code_base not in SPARSE_ATTENTION:
        raise PlannerError(
            f"{workload.model.name} has sparse attention, of which trainer {trainer.name} has no kernel that is modelled; use "
            "--trainer megatron, megatron-bridge or automodel"
        )
    cluster.hardware.peak(peak_dtype(workload.precision))
