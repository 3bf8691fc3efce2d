"""ms-swift: swift sft over transformers, and megatron sft over Megatron Core."""

PLACE = 107
READ_FIRST = True
FORM = (
    "sh bash slurm sbatch txt yaml yml json",
    r"\b(swift|megatron)\s+(sft|pt|rlhf)\b|swift/cli/(sft|rlhf|pt)\.py|^tuner_type\s*:|^train_type\s*:",
)
