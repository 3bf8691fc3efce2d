"""torchtune."""

PLACE = 104
TITLE = "torchtune (YAML for its recipes, started with tune run)"
TRAINERS = ("torchtune",)
OPTIONS = ("compile", "optimizer_in_backward")
PACKAGE, VERSIONS = "torchtune", ">=0.6.1,<0.7"
LEVEL = "model built"
SOURCE = "torchtune 0.6.1: recipes/{full,lora}_finetune_{distributed,single_device}.py, models/*/_component_builders.py"
NO_WORD = ("paged_adam", "paged_adam_8bit", "adafactor", "lion", "adam_8bit")
FORM = (
    "yaml yml sh bash slurm sbatch txt ipynb",
    r"_component_:\s*[\"']?torchtune\.|^(?![^\S\n]*[\"{])[^\n]*\btune +run\b|!\s*+([^\n\"!]*\s)?tune +run\b"
    r"|torchtune\._cli\.tune"
    r"|\b(full|lora)_(finetune|dpo)_(distributed|single_device)\.py\b",
)
