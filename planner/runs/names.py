"""What the texts of a row stand for: its framework and its family, by the table ``profiles/frameworks.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from planner import library
from planner.runs.schema import Row


class UnsupportedError(Exception):
    """The reason why a row cannot be priced."""


@cache
def frameworks() -> dict[str, list[dict[str, Any]]]:
    """The table of frameworks, GPUs and families, its expressions compiled."""
    table = library.read_yaml(library.profiles_directory() / "frameworks.yaml")
    return {
        kind: [{**entry, "match": re.compile(_whole(kind, entry["match"]), re.IGNORECASE)} for entry in entries]
        for kind, entries in table.items()
    }


def _whole(kind: str, expression: str) -> str:
    """A GPU's number ends where the text says so: H100 is not the beginning of H1000."""
    return rf"(?:{expression})(?!\d)" if kind == "hardware" else expression


def entry_of(row: Row) -> Mapping[str, Any]:
    """The facts about the row's framework. Raises UnsupportedError."""
    texts = {"framework": row.framework, "notes": row.notes, "id": row.id, "source": row.source}
    for entry in frameworks()["trainers"]:
        if entry["match"].search(texts[entry["in"]]):
            return entry
    raise UnsupportedError(f"framework '{row.framework}' is not in profiles/frameworks.yaml")


def recipe_of(row: Row) -> Mapping[str, Any]:
    """What the published recipe of the row's release, GPU and model says and the row does not; {} when none is known."""
    for recipe in _recipes(f"{row.source} {row.framework} {row.hardware.get('gpu', '')}"):
        if re.search(recipe["id"], row.id):
            return recipe
    return {}


@cache
def _recipes(text: str) -> tuple[Mapping[str, Any], ...]:
    """Recipes of a source, framework and GPU."""
    return tuple(recipe for recipe in frameworks().get("recipes", []) if recipe["match"].search(text))


def notes_of(row: Row) -> str:
    """The row's notes and what its recipe adds to them."""
    more = recipe_of(row).get("notes", "")
    return f"{row.notes}; {more}" if more else row.notes


def family_of(row: Row, network: str) -> str:
    """Group of sources that the row belongs to; split by precision, model or network where the table says so."""
    found = _source_family(row.source)
    if found is None:
        return "other"
    split = found.get("split", "")
    low = "bf16" if row.get("precision") in (None, "bf16", "fp16") else "fp8"
    suffix = {"precision": low, "moe": "MoE" if row.get("model.experts") else low, "network": network}.get(split, "")
    return f"{found['family']} {suffix}".rstrip()


@cache
def _source_family(source: str) -> Mapping[str, Any] | None:
    return next((entry for entry in frameworks()["families"] if entry["match"].search(source)), None)
