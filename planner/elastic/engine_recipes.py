"""Who moves the state between layouts, by trainer: the engine that reads a checkpoint into another layout, and its flags."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from planner import library, schema
from planner.errors import PlannerError
from planner.record import record
from planner.schema import Line, Text
from planner.trainer import Trainer


@record
class Recipe:
    """How a trainer's checkpoint is read into another layout."""

    trainers: tuple[Line, ...]
    """Names of trainers of the library; a name ends in * for all that begin so."""
    engine: Line
    """dcp, torch_dist, universal, safetensors, orbax, or the trainer's own."""
    title: Text
    """The engine in words."""
    save: tuple[Text, ...]
    """Flags, or keys of the configuration, of the run that saves."""
    load: tuple[Text, ...]
    """Of the run that goes on."""
    steps: tuple[Text, ...] = ()
    """Commands between them."""
    notes: tuple[Text, ...] = ()
    """What it cannot do."""
    shared_reads: bool = False
    """Ranks with equal boxes read a part each and exchange the rest."""
    version: Text
    """Release or commit whose code was read for this."""
    source: Text
    """Document or file that says so."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return schema.plain(dict(vars(self)))


@cache
def recipes() -> tuple[Recipe, ...]:
    """All recipes. Raises PlannerError."""
    path = Path(__file__).with_name("engine_recipes.yaml")
    found: tuple[Recipe, ...] = schema.value_of(tuple[Recipe, ...], library.read_yaml(path).get("recipes"), path.name, "recipes")
    return found


def recipe_of(trainer: Trainer) -> Recipe:
    """The recipe of a trainer; PyTorch's own checkpoints for one that has none. Raises PlannerError."""
    name = trainer.name
    for one in recipes():
        if any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in one.trainers):
            return one
    raise PlannerError(f"engine_recipes.yaml has no recipe for {name}")
