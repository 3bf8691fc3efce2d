"""NeMo 1 and 2."""

PLACE = 62
READ_FIRST = True
FORM = (
    "py ipynb sh bash slurm sbatch yaml yml",
    r"\bnemo\s+llm\s+(pretrain|finetune)\b|from nemo\.collections(\.| import )|import nemo\.collections"
    r"|megatron_gpt_(pretraining|continue_training|finetuning|peft_tuning|sft)\.py|train_gpt_(sft|dpo)\.py"
    r"|launcher_scripts/main\.py|(?s:\A(?!.*(?:megatron\.bridge|run\.Script\b))(?=.*^(?:import|from) nemo_run\b))"
    r"|(?s:\A(?!.*^language_model:)(?=.*^[ \t]*+"
    r"(mcore_gpt|megatron_amp_O2|encoder_seq_length|activations_checkpoint_granularity)\s*:))",
)
