"""What dtype the SFT trainer of the verl around a script loads weights in: fp32, a key's, or what a fork wrote into it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import shown
from planner.trainers.reading.values import read_text

MODEL_DTYPE = "model.fsdp_config.model_dtype"
LOADED = re.compile(r"\.from_pretrained\((?:[^()]|\([^()]*\)){0,800}?\btorch_dtype\s*=\s*(torch\.\w+|\w+)")
CAST = re.compile(r"self\.model\s*=\s*self\.model\.to\((?:torch_dtype|torch\.(?:float16|bfloat16))\)")
"""Adapters, which peft makes in fp32 over weights of 16 bits, cast to the dtype of those."""
SHORT = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def loaded(program: Path | None, words: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings that stand whatever a command says of model_dtype, and notes; empty where the trainer reads that key or is not
    there."""
    text = read_text(program) if program is not None else ""
    found = LOADED.findall(text)
    if len(set(found)) != 1:
        return {}, ()
    own = {"model.cast_adapters": bool(CAST.search(text))}
    if found[0].startswith("torch."):
        return _stands(found[0], f"{program.name} loads {found[0]}", words, own) if program else ({}, ())
    source = re.search(rf"(?m)^[ \t]*{found[0]}\s*=\s*([^\n]*\.get\([^\n]*)", text)
    key = re.search(r"config\.model\.get\(\s*[\"'](\w+)[\"']", source[1]) if source else None
    if key is None:
        return own, ()
    model = data.get("model")
    value = words.get(f"model.{key[1]}", model.get(key[1]) if isinstance(model, Mapping) else None)
    return _stands(str(value), f"model.{key[1]} of the verl around: {shown(value)}", words, own) if value else (own, ())


def _stands(value: str, why: str, words: Mapping[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    short = SHORT.get(value.rpartition(".")[2].lower())
    if short is None:
        return own, ()
    said = words.get(MODEL_DTYPE)
    drops = f", and {MODEL_DTYPE} is not read" if said is not None and SHORT.get(str(said)) != short else ""
    as_bf16 = ", priced as bf16" if short == "fp16" else ""
    return {**own, MODEL_DTYPE: short}, ((f"{why}{drops}{as_bf16}",) if short != "fp32" or drops else ())
