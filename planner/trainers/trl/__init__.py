"""TRL, and the scripts that build its trainers or those of transformers and unsloth."""

PLACE = 105
FORM = (
    "yaml yml sh bash slurm sbatch txt py ipynb",
    r"^(model_name_or_path|per_device_train_batch_size)\s*:|\btrl\s+(sft|dpo)\b|\b(?=\w*+\.py\b)(\w*_)?(sft|dpo|cpt)(?=_\w|\.py)"
    r"|\b(SFT|DPO|GRPO|KTO|ORPO|UnslothTraining|Training|Seq2SeqTraining)(Config|Trainer|Arguments)\(|\bFast\w*Model\.from_pretrained"
    r"|^class \w+\((\w+\.)?(SFT|DPO|Training|Seq2SeqTraining)(Config|Trainer|Arguments)\b",
)
