"""LitGPT."""

PLACE = 108
FORM = (
    "yaml yml sh bash slurm sbatch py ipynb",
    r"(?s)\A(?=.*^(checkpoint_dir|model_name):)(?=.*^train:)(?=.*^(precision|devices|lora_r|data|eval):)"
    r"|^[^#\n]*\blitgpt +(pretrain|finetune)|^[^#\n]*\blitgpt/(pretrain|finetune/\w+|__main__)\.py\b|^(from|import) lit_?gpt\b"
    r"|^[^#\n]*\b(finetune/(lora|full|adapter\w*)|pretrain/(tinyllama\w*|redpajama|openwebtext))\.py\b",
)
