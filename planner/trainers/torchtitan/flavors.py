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


def model_named(paths: list[str], name: str, flavor: str) -> str:
    """The preset that a configuration trains, by its assets or by family and flavour; '' = not stated."""
    name = re.sub(r"(^|.*[._])(?=(llama\d|deepseek_v3|qwen3)$)|(?<=llama\d)_(ft|simple_fsdp)$", "", name)
    flavor = re.sub(r"_(flex|varlen|sdpa)(_attn)?$", "", flavor)
    for one in paths:
        tail = one.replace("\\", "/").rstrip("/").split("/")
        if preset := next((preset for part in reversed(tail[-3:]) if (preset := preset_of(part))), None):
            if not flavor or flavor.lower().split("_")[0] in preset.replace("-", "") + preset:
                return preset
            break
    family = {"llama3": "llama-3.1", "llama2": "llama-2", "deepseek_v3": "deepseek-v3"}.get(name, name)
    if (known := FLAVORS.get((name, flavor.split("_")[0].lower()))) is not None:
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
        return None
    spec = load_model(other["model"])
    return replace(spec, tied_embeddings=False, published_parameters=0.0) if other.get("untied") and spec.tied_embeddings else spec
