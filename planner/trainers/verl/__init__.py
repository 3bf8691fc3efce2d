"""verl."""

PLACE = 110
TITLE = "verl (Hydra overrides, Megatron or FSDP2 actor)"
TRAINERS = ("megatron", "fsdp")
PACKAGE, VERSIONS = "verl", ">=0.9.1,<0.10"
LEVEL = "validated"
SOURCE = "verl 0.9.1: trainer/config, workers/config/engine.py, workers/config/actor.py, utils/config.py"
NO_WORD = ("bf16_true", "paged_adam", "paged_adam_8bit", "adafactor", "lion", "muon", "adam_8bit", "sgd", "nvfp4", "fp32", "fp8")
READ_FIRST = True
FORM = (
    "sh bash slurm sbatch txt yaml yml",
    r"\bverl\.trainer\.|\bfsdp_sft_trainer\b|^actor_rollout_ref\s*:|actor_rollout_ref\.|^  partial_pretrain\s*:"
    r"|\bmodel\.partial_pretrain=",
)
