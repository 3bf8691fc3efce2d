"""Which model a configuration of torchtitan names, and how its registry builds it."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.model import ModelSpec, load_model
from planner.model_names import preset_of

FLAVORS = {
    ("deepseek_v3", "671b"): "deepseek-v3", ("deepseek_v3", "236b"): "deepseek-v2", ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("llama4", "17bx16e"): "llama-4-scout", ("llama4", "17bx128e"): "llama-4-maverick",
}  # fmt: skip
"""Families and flavours whose name is no preset's: sizes of torchtitan's own registry.  [models/*/__init__.py]"""


OF_INFRA = r"_(torch)?ft$|_(simple_fsdp|auto_?parallel|compiler_toolkit|graph_trainer)$"
"""Ends of families that name how it is trained."""
OF_KERNELS = r"(_(flex|varlen|sdpa|attn|flash\w*|fa\d|instruct|base|chat|sft|\d+k))+$"
"""Ends of flavours that name kernels, lengths or weights to begin with; others are those of layers or sizes of a project's own."""
ANY_MODEL = r"hf\w*|hugging_?face\w*|transformers\w*|auto\w*"
"""Families that build whatever model their assets name."""


USUAL_FLAVOR = "debugmodel (the default, for model.flavor is not said)"
"""What a table without a flavour builds.  [config_manager.py, Model]"""


def builds_by_flavor(name: str) -> bool:
    """Whether a family builds the layers of its flavour, not those of the model that its assets are of."""
    return re.fullmatch(ANY_MODEL, name.lower()) is None


def _fits(name: str, preset: str) -> bool:
    """Whether a family may be that of the model after which its assets are named: assets are a tokenizer, of other layers too."""
    family = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", preset).startswith(family) or re.fullmatch(ANY_MODEL, name.lower()) is not None


def model_named(paths: list[str], name: str, flavor: str) -> str:
    """The preset that a configuration trains, by its assets or by family and flavour; '' = not stated."""
    name = re.sub(r"(^|.*[._])(?=(llama\d|deepseek_v3|qwen3)$)", "", re.sub(OF_INFRA, "", name))
    flavor = re.sub(OF_KERNELS, "", flavor)
    for one in paths:
        tail = one.replace("\\", "/").rstrip("/").split("/")
        if preset := next((preset for part in reversed(tail[-3:]) if (preset := preset_of(part))), None):
            if _fits(name, preset) and (not flavor or flavor.lower() in preset.replace("-", "") + preset):
                return preset
            break
    family = {"llama3": "llama-3.1", "llama2": "llama-2", "deepseek_v3": "deepseek-v3"}.get(name, name)
    if (known := FLAVORS.get((name, flavor.lower().removesuffix("_irope")))) is not None:
        return known
    if name == "deepseek_v3":
        return ""
    return (preset_of(f"{family}-{flavor}") or "") if name and flavor else ""


def flavor_of(node: ast.expr | None) -> str | None:
    """The flavour in model_registry("8B"), '' where no model is given or its name is computed; None = a function of the project
    builds the model."""
    if not isinstance(node, ast.Call):
        return ""
    if ast.unparse(node.func).rpartition(".")[2] != "model_registry":
        return None
    named = node.args[0] if node.args else next((one.value for one in node.keywords if one.arg == "flavor"), None)
    return str(named.value) if isinstance(named, ast.Constant) else ""


def spec_of(other: Mapping[str, Any]) -> ModelSpec | None:
    """The model that is named; None = none is. While configurations were TOML, llama3 had a head of its own at every size: tying
    came in March 2026, a month after them.  [models/llama3/__init__.py, 8953d2e]"""
    if not other.get("model"):
        return other.get("spec")
    spec = load_model(other["model"])
    return replace(spec, tied_embeddings=False, published_parameters=0.0) if other.get("untied") and spec.tied_embeddings else spec
