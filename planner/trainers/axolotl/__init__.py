"""axolotl."""

PLACE = 100
TITLE = "axolotl (YAML, FSDP2 or DeepSpeed)"
TRAINERS = ("axolotl", "fsdp", "deepspeed")
OPTIONS = ("loss", "adapter_dtype")
PACKAGE, VERSIONS = "axolotl", ">=0.19,<0.20"
NO_WORD = ("bf16_true",)
LEVEL = "validated"
SOURCE = (
    "axolotl 0.19.0: utils/schemas/config.py, utils/schemas/fsdp.py, utils/schemas/validation.py, utils/distributed.py"
)
FORM = (
    "yaml yml sh bash slurm",
    r"(?s:\A(?=(.*\n)?base_model\s*:)(?=(.*\n)?(datasets|sequence_len|micro_batch_size|num_epochs|val_set_size|adapter|rl)\s*:))"
    r"|\baxolotl(\.cli\.|\s+)train\b|\bscripts/finetune\.py[ \t]+[\w./-]+\.ya?ml\b",
)
