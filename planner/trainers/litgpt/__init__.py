"""LitGPT."""

PLACE = 108
FORM = (
    "yaml yml sh bash slurm sbatch",
    r"(?s)\A(?=.*^(checkpoint_dir|model_name):)(?=.*^train:)(?=.*^(precision|devices|lora_r|data|eval):)"
    r"|^[^#\n]*\blitgpt +(pretrain|finetune)|^[^#\n]*\blitgpt/(pretrain|finetune/\w+)\.py\b",
)
