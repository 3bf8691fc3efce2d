"""PyTorch Lightning."""

PLACE = 72
TITLE = "Lightning (Trainer with ModelParallelStrategy around the PyTorch script)"
TRAINERS = ("torchtitan", "fsdp")
PACKAGE, VERSIONS = "lightning", ">=2.6,<2.7"
LEVEL = "model built"
SOURCE = "lightning 2.6.6: pytorch/strategies/model_parallel.py, fabric/strategies/model_parallel.py"
NO_WORD = ("bf16_true", "paged_adam", "paged_adam_8bit", "adafactor", "lion", "fp8", "fp8_row", "mxfp8", "fp16", "adam_8bit")
