"""What is trained as a whole beside adapters: tables of the vocabulary, which are priced, and layers, which are not."""

import re

from planner.errors import PlannerError, shown
from planner.trainers.reading.layer_names import listed
from planner.trainers.reading.settings import Settings
from planner.workload import LORA_WHOLE

TRAINED_WHOLE = ("modules_to_save", "lora_modules_to_save", "additional_target")
"""Settings that name what is trained as a whole beside adapters."""
HEADS = r"lm_head|output_layer|embed_out|^output$"
"""Names of heads: embed_out is that of GPT-NeoX, output that of InternLM 2.  [transformers, models/gpt_neox]"""
LAYERS = re.compile(r".*(q|k|v|o|qkv|gate|up|down|gate_up|c|in|out)_(proj|attn|fc)|mlp|self_attn|query_key_value|dense\w*|fc\d?")
"""Names of linear layers, which modules_to_save trains as a whole."""


def trained_whole(given: Settings) -> str:
    """Which tables are trained as a whole together with adapters, one of LORA_WHOLE. Raises PlannerError for layers."""
    for name in TRAINED_WHOLE:
        said = given.get(name)
        words = said if isinstance(said, list) else re.split(r"[,\s]+", str(said or ""))
        if (layer := next((str(one) for one in words if LAYERS.fullmatch(str(one))), None)) is not None:
            what = f"{shown(layer)} is trained as a whole beside adapters, which is not priced"
            raise PlannerError(f"{given.where(name)}: {what}; --set {name}=null imports the job without")
        found = tuple(
            table for table, names in (("embedding", r"embed(?!_out)|wte"), ("head", HEADS))
            if any(re.search(names, str(one)) for one in words)
        )  # fmt: skip
        if found:
            return next(one for one, tables in LORA_WHOLE.items() if tables == found)
    return "none"


def of_no_layer(given: Settings) -> list[str]:
    """Note about names of what is trained as a whole beside adapters that are neither a table nor a layer known here."""
    words = {name: listed(given.get(name) or "") for name in TRAINED_WHOLE}
    table = re.compile(rf"embed|wte|{HEADS}")
    own = {name: [str(one) for one in some if one and not table.search(str(one))] for name, some in words.items()}
    what = "no layer known here, trained as a whole where the model has it: not in the plan, memory comes out too low by it"
    return [f"{name} {shown(', '.join(some[:8]))}: {what}" for name, some in own.items() if some]
