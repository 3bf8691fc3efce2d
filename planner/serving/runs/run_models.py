"""The model that a row served, and in which format: the name of a copy says what its maker changed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.model import ModelSpec, load_model
from planner.model_names import aliases, preset_named, repositories
from planner.serving.runs.methods import methods
from planner.serving.runs.run_schema import ServingRow
from planner.serving.serving_layout import CACHES, WEIGHTS

_FORMATS = (
    (r"nvfp4|\bfp4", "nvfp4"), (r"mxfp4", "mxfp4"), (r"fp8", "fp8"), (r"int4|w4a16|awq|gptq|uint4", "int4"), (r"int8|w8a8", "int8"),
)  # fmt: skip
"""What names of copies, and of formats in files, mean; the first that matches."""
_COPY = re.compile(
    r"[-_](nvfp4|mxfp4|fp4|fp8(-(dynamic|kv|block))?|awq|gptq(-int[48])?|int[48]|w4a16|w8a8|quantized|kv|preview|dynamic|v\d)$",
    re.IGNORECASE,
)
"""Endings of quantised copies."""
BLOCK_FP8 = ("deepseek-v3", "minimax", "kimi-k2")
"""Presets that are published in 8 bits with scales of blocks of 128 x 128 [quantization_config of their config.json]."""
BLOCK_FP8_COPIES = re.compile(r"(qwen|zai-org|deepseek-ai|minimaxai)/.*-fp8$", re.IGNORECASE)
"""Copies of other models in this format, by their own makers."""
MXFP4_EXPERTS = ("gpt-oss",)
"""Presets that are published with experts in mxfp4 and everything else in bf16."""


@cache
def served_model(name: str) -> ModelSpec:
    """The model of a name on the hub, or the one that it is a quantised copy of. Raises PlannerError."""
    base = name.strip()
    if own := methods()["models"].get(base.lower()):
        return replace(load_model(own["preset"]), **own["changes"])
    while (shorter := _COPY.sub("", base)) != base and not preset_named(base):
        base = shorter
    if preset_named(base):
        return load_model(base)
    of_others = base.rpartition("/")[2].lower()  # nvidia/DeepSeek-R1 is a copy of deepseek-ai/DeepSeek-R1
    alike = [one for one in _names() if one.rpartition("/")[2] == of_others]
    preset = preset_named(alike[0]) if alike else preset_named(of_others)
    if not preset:
        raise PlannerError(f"model '{name}' is no preset and no copy of one")
    return load_model(preset)


@cache
def _names() -> tuple[str, ...]:
    return tuple(one for one in (*repositories(), *aliases()) if "/" in one)


def weight_format(text: str, hardware: HardwareProfile) -> str:
    """A format by its name in a file; fp4 is that of the vendor; '' = none is named. Raises PlannerError."""
    plain = text.strip().lower()
    if plain in ("", "unset", "none", "auto", "float16", "bfloat16"):
        return {"float16": "fp16", "bfloat16": "bf16"}.get(plain, "")
    if plain in WEIGHTS:
        return plain
    found = next((kind for pattern, kind in _FORMATS if re.search(pattern, plain)), None)
    if found is None:
        raise PlannerError(f"precision '{text[:40]}' is not known; known: {', '.join(WEIGHTS)}")
    return "mxfp4" if found == "nvfp4" and hardware.vendor == "AMD" else found


def formats(row: ServingRow, model: ModelSpec, hardware: HardwareProfile) -> dict[str, str]:
    """Formats of weights, experts, projections of attention and cache as ``Precision`` takes them; what is not known is absent."""
    named, published = str(row.get("model")).rpartition("/")[2], model.name.lower()
    weights = weight_format(str(row.get("precision.weights") or ""), hardware) or _by_name(named, hardware)
    block = published.startswith(BLOCK_FP8) or BLOCK_FP8_COPIES.fullmatch(str(row.get("model")))
    if not weights:
        tuned = str(row.get("load.kind")).startswith("mlperf") and "fp8" in hardware.peak_flops
        weights = "fp8_block" if published.startswith(BLOCK_FP8[:2]) else "fp8" if tuned else "bf16"
    if weights == "fp8" and block:
        weights = "fp8_block"
    found = {"weights": weights}
    if published.startswith(MXFP4_EXPERTS):
        return {"weights": "bf16", "experts": "mxfp4", **_cache(row)}
    if said := weight_format(str(row.get("precision.experts") or ""), hardware):
        found["experts"] = said
    if said := weight_format(str(row.get("precision.attention") or ""), hardware):
        found["attention"] = said
    elif weights in ("nvfp4", "mxfp4", "int4") and model.is_moe:
        found["attention"] = (
            "bf16"  # copies of mixtures quantise experts and leave attention [hf_quant_config.json of nvidia/...-FP4]
        )
    return {**found, **_cache(row)}


def _by_name(name: str, hardware: HardwareProfile) -> str:
    found = next((kind for pattern, kind in _FORMATS if re.search(pattern, name, re.IGNORECASE)), "")
    return weight_format(found, hardware) if found else ""


def _cache(row: ServingRow) -> dict[str, str]:
    said = str(row.get("precision.kv") or "").lower()
    said = {"auto": "", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "float16": "fp16"}.get(said, said)
    if said and said not in CACHES:
        raise PlannerError(f"precision of the cache '{said[:40]}' is not known; known: {', '.join(CACHES)}")
    return {"cache": said} if said else {}
