"""The format in which a model is published, and the quantised ones that it may be served in after an evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from planner import library
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.model_names import READ_AS, named, unknown_family
from planner.record import record
from planner.schema import check_keys, read
from planner.serving.serving_layout import Precision

SAID = (
    ("nvfp4", Precision(weights="nvfp4")), ("mxfp4", Precision(weights="bf16", experts="mxfp4")),
    ("4 bits", Precision(weights="int4")), ("8 bits", Precision(weights="int8")),
    ("fp8 per tensor", Precision(weights="fp8")), ("fp8", Precision(weights="fp8_block")),
)  # fmt: skip
"""Words of a config.json's quantization_config, and what they mean; the first that stands there counts. Plain "fp8" is DeepSeek's
form, one scale per 128 x 128: the bytes of one per tensor differ by 0.02 %."""
FP8_PRODUCTS = ("Hopper", "Ada", "Blackwell", "CDNA3", "CDNA4")
FP4_PRODUCTS = ("Blackwell",)
"""Architectures with tensor cores for these formats."""
QUALITY = "answers of quantised weights or cache differ from those of the published ones: evaluate them on your own tasks before"


@record
class Published:
    """How a model comes."""

    precision: Precision
    """With a 16-bit cache."""
    why: str
    """Where that stands."""


def published(model: ModelSpec) -> Published:
    """The format of the published weights: of the model's own config.json, of the table, else 16 bits."""
    for word, precision in SAID:
        if word in model.quantised:
            return Published(precision=precision, why=f"published in {model.quantised}")
    for names, found in _table().items():
        if named(model.name, names.split()):
            return found
    read_as = f"; {kind}{READ_AS}" if (kind := unknown_family(model.source)) else ""
    return Published(precision=Precision(), why=f"as published{read_as}")


@cache
def _table() -> dict[str, Published]:
    path = library.profiles_directory() / "published_weights.yaml"
    found: dict[str, Published] = {}
    for names, data in library.read_yaml(path).items():
        kept = dict(check_keys(data, ("weights", "experts", "attention", "source"), f"{path.name}: {names}"))
        source = str(kept.pop("source"))
        found[names] = Published(precision=read(Precision, kept, path.name), why=source)
    return found


def alternatives(precision: Precision, hardware: HardwareProfile) -> list[Precision]:
    """Further formats to serve a model in, fewer bytes than ``precision``: weights, cache, and both.

    8 and 4 bits where the device has products of them; weights of 4 bits that are unpacked on the way (AWQ, GPTQ) everywhere.
    Weights that are already quantised stay.
    """
    small = replace(precision, cache="fp8") if precision.cache != "fp8" else None
    found: list[Precision] = [small] if small and _has(hardware, FP8_PRODUCTS) else []
    if precision.weights not in ("bf16", "fp16") or precision.experts:
        return found
    if _has(hardware, FP8_PRODUCTS):
        found += [Precision(weights="fp8", cache=precision.cache), Precision(weights="fp8", cache="fp8")]
    if _has(hardware, FP4_PRODUCTS):
        found.append(Precision(weights="nvfp4", cache="fp8"))
    found.append(Precision(weights="int4", attention="", cache=precision.cache))
    return found


def _has(hardware: HardwareProfile, architectures: tuple[str, ...]) -> bool:
    return any(hardware.arch.startswith(one) for one in architectures)


def precision_text(precision: Precision) -> str:
    """A precision in a word for a table: bf16, fp8 + fp8 cache, mxfp4 experts."""
    words = [precision.weights]
    if precision.experts and precision.experts != precision.weights:
        words = [f"{precision.experts} experts"]
    return " + ".join(words + ([f"{precision.cache} cache"] if precision.cache not in ("bf16", "fp16") else []))
