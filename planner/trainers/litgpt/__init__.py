"""LitGPT."""

PLACE = 108
FORM = (
    "yaml yml sh bash slurm sbatch",
    r"(?s)\A(?=.*^(checkpoint_dir|model_name):)(?=.*^train:)(?=.*^precision:)|^[^#\n]*\blitgpt +(pretrain|finetune)",
)
