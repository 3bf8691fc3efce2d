"""The software of a row: its trainer at a version, with the options that its recipe and the row say; its precision."""

import functools
import json
import re
from typing import Any

from planner.runs.hardware import gpu_profile
from planner.runs.rows import Row, UnsupportedError, frameworks
from planner.trainer import Trainer, load_trainer
from planner.trainer_options import Recipe, table

shipped_trainer = functools.cache(load_trainer)
"""A trainer of the library, read once."""


@functools.cache
def _variant(name: str, changes: str) -> Trainer:
    """A trainer with some facts replaced, as JSON, one after the other: equal changes give one object."""
    found = shipped_trainer(name)
    for one in json.loads(changes):
        found = found.with_facts(one)
    return found


def trainer_of(row: Row) -> Trainer:
    """The trainer at its version, with the options of its recipe and those that the row states."""
    base = shipped_trainer(row.entry["trainer"])
    meant = {name: {**one.values, **base.choices.options.get(name, {})} for name, one in table().items()}
    said = {**recipe_of(row).options, **row.options}
    unknown = [f"{name} {value}" for name, value in said.items() if value not in meant.get(name, {})]
    if unknown:
        raise UnsupportedError(f"option {unknown[0]} is not known")
    changes = [meant[name][value] for name, value in said.items()]
    if row.note(r"token-? ?drop"):
        graphs = functools.reduce(lambda now, one: one.get("cuda_graphs", now), changes, base.host.cuda_graphs)
        changes.append({"cuda_graphs": "layers_and_experts" if graphs.startswith("layers") else "static_experts"})
    changes += [one["facts"] for one in frameworks()["remarks"] if row.note(one["note"])]
    if row.get("facts") and not row.generic:
        changes.append(row.get("facts"))
    if row.get("optimizer_bytes"):
        changes.append({"optimizer_bytes": {**base.stored.optimizer_bytes, "adam": row.get("optimizer_bytes")}})
    return _variant(row.entry["trainer"], json.dumps(changes))


def recipe_of(row: Row) -> Recipe:
    """What the published recipe of its trainer's version says about a row."""
    if row.generic:
        return Recipe()
    gpu = str(row.hardware["gpu"])
    return _recipe(row.entry["trainer"], str(row.get("model.name") or ""), gpu, precision_of(row), is_lora(row))


@functools.cache
def _recipe(trainer: str, model: str, gpu: str, precision: str, adapters: bool) -> Recipe:
    """The recipe of a kind of row: a source has hundreds of one kind, and each is asked for several times."""
    return shipped_trainer(trainer).choices.recipe(model, f"{gpu} {gpu_profile(gpu)}", precision, adapters=adapters)


def default_of(row: Row, name: str, otherwise: Any) -> Any:
    """What the recipe takes where the row does not say, else what its trainer takes."""
    own = shipped_trainer(row.entry["trainer"]).choices.defaults
    return recipe_of(row).defaults.get(name, own.get(name, otherwise))


_PURE = r"(pure|true)[ _-]?bf16|bf16[ _-](true|states|adamw?)|adamw?[ _-]?bf16|bf16 adamw?"


def precision_of(row: Row) -> str:
    """Precision of the row; of fp8 the recipe in the notes, per-tensor scaling when they name none. Pure bf16 where the text says
    so: of the precision, of the optimizer's states, or of the framework."""
    precision = str(row.get("precision") or "bf16").lower().replace("-", "_")
    schemes = {"mxfp8": "mxfp8", "row-?wise": "fp8_row", "block-?wise|subchannel": "fp8_block", "": "fp8"}
    if precision == "fp8":
        return next(name for pattern, name in schemes.items() if row.note(pattern))
    if precision == "bf16" and (_says(row, _PURE) or shipped_trainer(row.entry["trainer"]).legal.precisions[0] == "bf16_true"):
        return "bf16_true"
    return precision


def _says(row: Row, pattern: str) -> bool:
    """The row's precision, optimizer or notes say it, in any case."""
    texts = (row.notes, str(row.get("precision") or ""), str(row.get("optimizer") or ""))
    return any(re.search(pattern, text, re.IGNORECASE) for text in texts)


def is_lora(row: Row) -> bool:
    """Adapters alone were trained."""
    return bool(row.get("lora_rank") or row.note(r"\b(?<![qk]-)(?<!kv-)q?lora\b"))
