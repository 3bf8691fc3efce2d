"""What the texts of a row stand for: its framework and its family, by the table ``profiles/frameworks.yaml``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner import library
from planner.runs.row_schema import Row


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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A row with what the table knows about its framework and its release."""

    row: Row
    entry: Mapping[str, Any] = field(default_factory=dict)
    """The facts about the framework."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What the published recipe of the release, GPU and model says and the row does not."""
    notes: str = ""
    """The row's notes and what its recipe adds to them."""

    def get(self, path: str) -> Any:
        """A value of the row by its path, ``parallel.tp``; None when it is not there."""
        return self.row.get(path)

    def note(self, pattern: str) -> re.Match[str] | None:
        """The first match of an expression in the notes."""
        return re.search(pattern, self.notes)

    def fact(self, key: str, default: Any) -> Any:
        """What the recipe says, else the framework, else the default."""
        return self.recipe.get(key, self.entry.get(key, default))


def reading_of(row: Row) -> Reading:
    """The row with the first framework and the first recipe of the table that match it; every row matches a framework."""
    texts = {"framework": row.framework, "notes": row.notes, "id": row.id, "source": row.source}
    entry = next(one for one in frameworks()["trainers"] if one["match"].search(texts[one["in"]]))
    if entry.get("unknown") and row.framework in library.names(
        "trainers"
    ):  # the trainer's own name, as its log reader says it
        entry = {**entry, "trainer": row.framework, "unknown": False}
    recipes = _recipes(f"{row.source} {row.framework} {row.hardware.get('gpu', '')}")
    recipe: Mapping[str, Any] = next((one for one in recipes if re.search(one["id"], row.id)), {})
    notes = "; ".join(text for text in (row.notes, recipe.get("notes", "")) if text)
    return Reading(row=row, entry=entry, recipe=recipe, notes=notes)


@cache
def _recipes(text: str) -> tuple[Mapping[str, Any], ...]:
    """Recipes of a source, framework and GPU."""
    return tuple(recipe for recipe in frameworks().get("recipes", []) if recipe["match"].search(text))


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
