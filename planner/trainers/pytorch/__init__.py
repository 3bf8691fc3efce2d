"""PyTorch itself: one script, no framework; and loops that people write over it or over DeepSpeed's engine."""

PLACE = 70
TITLE = "PyTorch alone (a script with DeviceMesh, DTensor, fully_shard, pipelining)"
TRAINERS = ("torchtitan", "fsdp")
PACKAGE, VERSIONS = "torch", ">=2.13,<2.14"
LEVEL = "model built"
SOURCE = "torch 2.13.0: distributed/fsdp, distributed/tensor/parallel, distributed/pipelining"
NO_WORD = ("bf16_true", "paged_adam", "paged_adam_8bit", "adafactor", "lion", "fp8", "fp8_row", "mxfp8", "fp16", "adam_8bit")
FORM = (
    "py ipynb",
    r"^(?![ \t]*(#|(class|def)\b)).*\b(Fully\w+Parallel|FSDP|fully_shard|DistributedDataParallel|DDP|deepspeed\.initialize)\(",
)
READ_LAST = True
