"""NeMo-RL."""

PLACE = 109
READ_FIRST = True
FORM = (
    "yaml yml sh bash slurm sbatch txt",
    r"^policy:|^defaults:\s*[\"']?[./\w-]+\.ya?ml|\bexamples/(\w+/)?run_(sft|dpo|grpo|distillation)\w*\.py\b",
)
