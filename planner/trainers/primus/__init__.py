"""Primus of AMD: configurations of Megatron-LM and torchtitan in one form."""

PLACE = 8
TITLE = "Primus (YAML with overrides, Megatron back end, AMD)"
TRAINERS = ("megatron",)
PACKAGE, VERSIONS = "primus", ">=26.5,<26.6"
LEVEL = "groups built"
SOURCE = (
    "AMD-AGI/Primus fd1eeabb (26.5): configs/modules/megatron, configs/models/megatron, core/launcher/parser.py, "
    "core/runtime/train_runtime.py, core/config/schema_check.py, examples/run_pretrain.sh"
)
WRITES = ("gradient_bytes", "gradient_reduce_bytes")
OPTIONS = ("router_dtype", "gradient_overlap", "gradient_dtype", "loss_fusion", "attention_kernel", "dropout")
NO_WORD = ("muon", "mxfp8", "nvfp4", "fp8_block", "adam_8bit")
FORM = (
    "yaml yml sh bash slurm sbatch",
    r"(?s)^modules:.*^[ \t]+framework:.*^[ \t]+overrides:|\bprimus-cli\b|\bprimus/(cli/main|train)\.py\b"
    r"|\A(?=.*\bEXP=)(?=.*\brun_(slurm_|local_|k8s_)?pretrain(_cli)?\.sh\b)(?=.*([Pp]rimus|PRIMUS|\bEXP=\S*\.ya?ml))",
)
