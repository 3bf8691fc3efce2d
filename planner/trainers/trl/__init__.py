"""TRL."""

PLACE = 105
FORM = (
    "yaml yml sh bash slurm sbatch txt",
    r"^(model_name_or_path|per_device_train_batch_size)\s*:|\btrl\s+(sft|dpo)\b|\b(\w*_)?(sft|dpo)(_\w+)?\.py\b",
)
