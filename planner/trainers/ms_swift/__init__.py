"""ms-swift: swift sft over transformers, and megatron sft over Megatron Core."""

PLACE = 107
READ_FIRST = True
TITLE = "ms-swift (YAML for swift pt/sft and megatron pt/sft)"
TRAINERS = ("ms-swift", "ms-swift-megatron")
OPTIONS = ("loss", "expert_dispatch", "router_dtype", "gradient_overlap", "gradient_dtype", "attention_kernel", "loss_fusion")
PACKAGE, VERSIONS = "ms-swift", ">=4.6,<4.7"
WRITES = ("gradient_bytes",)
LEVEL = "validated"
SOURCE = (
    "ms-swift 4.6.0: arguments/sft_args.py, arguments/base_args, megatron/arguments/megatron_args.py, cli/main.py, "
    "config/fsdp2.json"
)
NO_WORD = ("muon", "fp8")
FORM = (
    "sh bash slurm sbatch txt yaml yml json",
    r"\b(swift|megatron)\s+(sft|pt|rlhf|dpo)\b|swift[/.]cli[/.](sft|rlhf|pt|main)\b|^tuner_type\s*:|^train_type\s*:"
    r"|^[ \t]*\"(tuner|train)_type\"\s*:|\bllm_(sft|pt|dpo|rlhf)\.py\b(?s:.{0,4000})--(sft_type|model_type|model_id_or_path)\b",
)
