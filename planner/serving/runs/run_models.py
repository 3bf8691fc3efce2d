"""The model that a row served, and in which format: the name of a copy says what its maker changed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.model import ModelSpec, load_model
from planner.model_names import FORMATS, format_named, preset_like, preset_named, scales_blocks
from planner.serving.published import published
from planner.serving.runs.methods import methods
from planner.serving.runs.run_schema import ServingRow
from planner.serving.serving_layout import CACHES, WEIGHTS


@cache
def served_model(name: str) -> ModelSpec:
    """The model of a name on the hub, or the one that it is a copy or a tuned variant of. Raises PlannerError."""
    asked = name.strip()
    if own := methods()["models"].get(asked.lower()):
        return replace(load_model(own["preset"]), **own.get("changes", {}))
    preset = preset_named(asked) or preset_like(asked)
    if not preset:
        raise PlannerError(f"model '{name[:100]}' is no preset and no copy of one")
    return load_model(preset)


def weight_format(text: str, hardware: HardwareProfile) -> str:
    """A format by its name in a file; fp4 is that of the vendor; '' = none is named. Raises PlannerError."""
    plain = text.strip().lower()
    if plain in ("", "unset", "none", "auto", "float16", "bfloat16"):
        return {"float16": "fp16", "bfloat16": "bf16"}.get(plain, "")
    if plain in WEIGHTS:
        return plain
    found = next((kind for pattern, kind in FORMATS if re.search(pattern, plain)), None)
    if found is None:
        raise PlannerError(f"precision '{text[:40]}' is not known; known: {', '.join(WEIGHTS)}")
    return "mxfp4" if found == "nvfp4" and hardware.vendor == "AMD" else found


def formats(row: ServingRow, model: ModelSpec, hardware: HardwareProfile) -> dict[str, str]:
    """Formats of weights, experts, projections of attention and cache as ``Precision`` takes them; what is not known is absent.

    Named by the row, else by the model's name, else those of the published weights. Where these scale blocks or quantise experts
    alone, 'fp8' and '4 bits' mean them. Copies of mixtures in 4 bits leave attention in 16 [hf_quant_config.json of nvidia/].
    """
    name, own = str(row.get("model")), published(model).precision
    weights = weight_format(str(row.get("precision.weights") or ""), hardware) or weight_format(format_named(name), hardware)
    if own.experts == "mxfp4" or not weights:
        found = {key: getattr(own, key) for key in ("weights", "experts", "attention") if getattr(own, key)}
        if (
            found["weights"] == "bf16"
            and str(row.get("load.kind")).startswith("mlperf")
            and "fp8" in hardware.peak_flops
        ):
            found["weights"] = "fp8"  # submissions without a word on it quantise all that the rules allow
        return found | _cache(row)
    if weights == "fp8" and (own.weights == "fp8_block" or scales_blocks(name)):
        weights = "fp8_block"
    found = {"weights": weights}
    if said := weight_format(str(row.get("precision.experts") or ""), hardware):
        found["experts"] = said
    if said := weight_format(str(row.get("precision.attention") or ""), hardware):
        found["attention"] = said
    elif model.is_moe and weights in ("nvfp4", "mxfp4", "int4"):
        found["attention"] = "bf16"
    return found | _cache(row)


def _cache(row: ServingRow) -> dict[str, str]:
    said = str(row.get("precision.kv") or "").lower()
    said = {"auto": "", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "float16": "fp16"}.get(said, said)
    if said and said not in CACHES:
        raise PlannerError(f"precision of the cache '{said[:40]}' is not known; known: {', '.join(CACHES)}")
    return {"cache": said} if said else {}
