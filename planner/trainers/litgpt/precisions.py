"""Words of LitGPT for precisions, bits and layers."""

from planner.cost.parameters import count_parameters
from planner.cost.state_dtypes import FROZEN_BYTES
from planner.model import ModelSpec
from planner.trainers.reading.fine_tuning import adapter_targets, adapters_on_tables, layers_beside
from planner.trainers.reading.settings import Settings
from planner.units import GIB

PRECISIONS = {
    "bf16-true": "bf16_true", "bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32", "bf16": "bf16", "16": "fp16",
    "32": "fp32",
}  # fmt: skip
"""The last three are Fabric's old names of the mixed ones and of the whole one."""
FROZEN = {
    "bnb.nf4": "nf4", "bnb.nf4-dq": "nf4_dq", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4_dq", "bnb.int8-training": "int8",
}  # fmt: skip
LORA_DEFAULTS = {"query": True, "key": False, "value": True, "projection": False, "mlp": False}
LAYERS = {
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
"""Linear layers by LitGPT's words."""


def adapters_on(given: Settings, adapters: bool) -> tuple[str, tuple[str, ...]]:
    """(One of LORA_TARGETS, what was taken for what); of a job without ``adapters`` all, and nothing."""
    layers = [one for part, on in LORA_DEFAULTS.items() if given.flag(f"lora_{part}", on) for one in LAYERS[part]]
    if not adapters:
        return "all", ()
    targets = adapter_targets(layers)
    return targets, (*layers_beside(layers, targets), *([adapters_on_tables(["lm_head"])] * given.flag("lora_head")))


def of_a_quantised_head(frozen: str | None, precision: str, model: ModelSpec | None) -> tuple[str, ...]:
    """Note about lm_head, which is a linear layer to BitsandbytesPrecision, as finetune/lora.py names none to be left out.
    [LitGPT 0.1 to 0.5.13, finetune/lora.py; lightning, fabric/plugins/precision/bitsandbytes.py, _convert_layers]"""
    if frozen not in FROZEN.values():
        return ()
    text = "--quantize lays lm_head in few bits too, which is priced as it was: memory comes out too high"
    if model is None:
        return (text,)
    each = (4.0 if precision == "fp32" else 2.0) - FROZEN_BYTES[str(frozen)]
    return (f"{text} by up to {count_parameters(model).head * each / GIB:.2f} GiB",)
