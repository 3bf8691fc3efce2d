"""Megatron-Bridge."""

PLACE = 20
TITLE = "Megatron-Bridge (Python configuration)"
TRAINERS = ("megatron-bridge", "megatron", "nemo")
PACKAGE, VERSIONS = "megatron-bridge", ">=0.6,<0.7"
LEVEL = "validated"
SOURCE = "NVIDIA-NeMo/Megatron-Bridge 0.6.2: models/gpt_provider.py, training/config.py, training/mixed_precision.py"
WRITES = ("gradient_bytes", "gradient_reduce_bytes")
OPTIONS = (
    "expert_dispatch", "expert_overlap", "fused_experts", "router_dtype", "cuda_graphs", "tp_overlap", "gradient_overlap",
    "gradient_dtype", "loss_fusion", "attention_kernel", "dropout", "fp8_attention",
)  # fmt: skip
NO_WORD = ("muon",)
READ_FIRST = True
FORM = (
    "py sh bash slurm sbatch txt yaml yml",
    r"megatron\.bridge|run_recipe\.py|scripts/performance/\w+\.py|setup_experiment\.py|(?s:\A(?=.*^recipe:[ \t]*$)(?=.*^train:))"
    r"|(?s:\A(?!.*^(MODEL_ARGS|modules|system|trainer|defaults):)(?=.*^model:[ \t]*$)(?=.*^train:[ \t]*$)"
    r"(?=.*^  (train_iters|global_batch_size):))",
)
