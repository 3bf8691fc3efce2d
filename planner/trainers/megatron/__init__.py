"""Megatron-LM and Megatron Core."""

PLACE = 10
TITLE = "Megatron-LM (arguments of pretrain_gpt.py)"
TRAINERS = ("megatron", "nemo", "megatron-fsdp")
PACKAGE, VERSIONS = "megatron-core", ">=0.18,<0.20"
LEVEL = "model built"
SOURCE = "NVIDIA/Megatron-LM, megatron-core 0.18.2 and 0.19.2: arguments.py, transformer_config.py, parallel_state.py"
WRITES = ("gradient_bytes", "gradient_reduce_bytes")
OPTIONS = (
    "expert_dispatch", "expert_overlap", "fused_experts", "router_dtype", "cuda_graphs", "tp_overlap", "gradient_overlap",
    "gradient_dtype", "loss_fusion", "attention_kernel", "dropout", "fp8_param_gather",
)  # fmt: skip
FORM = (
    "any",
    r"\A(?![\s\S]*^finetuning_type:)[\s\S]*?"  # LLaMA-Factory has names of Megatron's where it runs over it
    r"(tensor[-_]model[-_]parallel[-_]size|--num-layers|--yaml-cfg|\bpretrain_gpt2?\.py)",
)
