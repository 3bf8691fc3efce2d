"""NeMo AutoModel."""

PLACE = 85
TITLE = "NeMo AutoModel (YAML recipe)"
TRAINERS = ("automodel",)
OPTIONS = ("compile", "loss", "adapter_dropout", "expert_routing", "expert_dispatch", "tp_overlap")
PACKAGE, VERSIONS = "nemo-automodel", ">=0.7,<0.8"
LEVEL = "groups built"
SOURCE = (
    "nemo-automodel 0.7.0: recipes/llm/train_ft.py, recipes/_dist_utils.py, recipes/_typed_config.py, "
    "components/distributed/config.py, components/distributed/mesh_utils.py, components/models/common/utils.py"
)
NO_WORD = ("mxfp8",)
FORM = (
    "yaml yml sh",
    r"_target_:\s*[\"']?nemo_automodel\.|^step_scheduler:|^[^#\n]*\bautomodel +((finetune|pretrain|benchmark) +llm\b|\S+\.ya?ml\b)"
    r"|nemo_automodel[./](cli[./]app|recipes[./]llm)"
    r"|\bexamples/llm_(finetune|pretrain|benchmark)/(finetune|pretrain|train_ft|benchmark)\.py +(--config|-c)\b",
)
