"""accelerate."""

PLACE = 50
TITLE = "accelerate with transformers' Trainer or TRL (YAML, FSDP2 and HSDP)"
TRAINERS = ("fsdp", "trl")
OPTIONS = ("loss",)
PACKAGE, VERSIONS = "accelerate", ">=1.15,<2"
LEVEL = "groups built"
SOURCE = (
    "accelerate 1.15.0: commands/launch.py, utils/launch.py, parallelism_config.py; transformers 5.23.0; TRL 1.16.0"
)
FORM = ("yaml yml json", r"^[ \t]*+[\"']?distributed_type[\"']?\s*:")
READ_FIRST = True
