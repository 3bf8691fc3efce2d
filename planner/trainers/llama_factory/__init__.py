"""LLaMA-Factory."""

PLACE = 90
TITLE = "LLaMA-Factory (YAML over DeepSpeed or FSDP)"
TRAINERS = ("llama-factory", "deepspeed", "fsdp")
OPTIONS = ("loss",)
PACKAGE, VERSIONS = "llamafactory", ">=0.9.5,<0.10"
NO_WORD = ("bf16_true",)
LEVEL = "parsed"
SOURCE = "llamafactory 0.9.5: hparams/parser.py, hparams/training_args.py, model/model_utils/checkpointing.py"
FORM = (
    "yaml yml json sh bash slurm",
    r"""llamafactory-cli\)?["']?\s+(?:train|sft|dpo|rm)\b|\blmf train\b|llamafactory[./](launcher|cli)\b|src/train(_bash)?\.py"""
    r"""|^[ \t]*+(?!"stage":\s*\d)["']?((top\.)?finetuning_type|cutoff_len|stage|(dist|kernel)_config)["']?\s*:""",
)
