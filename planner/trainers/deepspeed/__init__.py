"""DeepSpeed."""

PLACE = 40
TITLE = "DeepSpeed with transformers' Trainer (JSON)"
TRAINERS = ("deepspeed",)
OPTIONS = ("loss",)
PACKAGE, VERSIONS = "deepspeed", ">=0.19.8,<0.20"
LEVEL = "validated"
SOURCE = (
    "DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, utils/groups.py, module_inject/auto_ep_folding.py"
)
NO_WORD = ("bf16_true",)
FORM = ("json", r"\"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)\"")
