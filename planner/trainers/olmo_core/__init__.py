"""OLMo-core."""

PLACE = 74
FORM = (
    "py sh bash slurm sbatch",
    r"\bTransformer(Pipeline)?TrainModuleConfig\(|\bcookbook\.configure_train_module\(|--(train_module|data_loader)\.\w+"
    r"|^[ \t\"'(]*(train_module|data_loader)\.\w+="
    r"|\bolmo_core\.launch\.beaker\b",
)
PROGRAMS = True
TITLE = "OLMo-core (Python configuration script)"
TRAINERS = ("torchtitan", "fsdp")
PACKAGE, VERSIONS = "ai2-olmo-core", ">=3.0,<3.1"
LEVEL = "model built"
SOURCE = "ai2-olmo-core 3.0.0: nn/transformer/config.py, train/train_module/transformer/config.py, distributed/parallel"
NO_WORD = ("bf16_true", "paged_adam", "paged_adam_8bit", "adafactor", "lion", "sgd", "fp8", "fp8_row", "mxfp8", "fp16", "adam_8bit")
