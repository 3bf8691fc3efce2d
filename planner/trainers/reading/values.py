"""What all readers do: a whole number or a sentence, an exact quotient, layers of stages in the plan's words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner import library
from planner.cost.pipeline.partition import stage_layers
from planner.errors import PlannerError, shown
from planner.layout import Layout

MOST = 100_000_000
"""Largest number that is read: above the tokens of a sequence or of a batch, and small enough to count up to."""
MOST_LAYERS = 4096


def whole_number(value: Any, where: str, least: int = 1, most: int = MOST) -> int:
    """A whole number of a range. Raises PlannerError with file and key."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlannerError(f"{where} is {shown(value)}; it must be a whole number from {least} to {most}")
    return value


def percent(value: Any, where: str) -> int:
    """A share from 0 to 1 as per cent. Raises PlannerError with file and key."""
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if isinstance(value, bool) or not 0.0 <= share <= 1.0:
        raise PlannerError(f"{where} is {shown(value)}; it must be a number from 0 to 1")
    return round(100 * share)


def json_mapping(path: Path, text: str, what: str) -> dict[str, Any]:
    """The mapping in a JSON file; ``what`` it should be. Raises PlannerError."""
    data = library.parse_json(text, str(path))
    if not isinstance(data, dict):
        raise PlannerError(f"{path}: {what} is a mapping of keys to values, and this is a {type(data).__name__}")
    return data


def quotient(number: int, divisor: int, what: str) -> int:
    """An exact quotient. Raises PlannerError with the sentence ``what`` when there is a remainder."""
    if divisor < 1 or number % divisor:
        raise PlannerError(f"{what}: {number} does not divide by {divisor}")
    return number // divisor


def uneven(layers: Sequence[int]) -> dict[str, int]:
    """first_stage_layers and last_stage_layers that give these layers per pipeline rank; {} when the split is even.

    Raises PlannerError when the planner has no word for the split.
    """
    pp, total = len(layers), sum(layers)
    tries = [(0, 0), (layers[0], 0), (0, layers[-1]), (layers[0], layers[-1])]
    for first, last in tries:
        try:
            partition = stage_layers(total, Layout(pp=pp, first_stage_layers=first, last_stage_layers=last))
        except (ValueError, ZeroDivisionError):
            continue
        if partition == list(layers):
            return {
                name: value for name, value in (("first_stage_layers", first), ("last_stage_layers", last)) if value
            }
    raise PlannerError(
        f"pipeline ranks with {', '.join(map(str, layers))} layers: a plan says how many the first and the last have, and the "
        "others share the rest evenly, the larger ones first"
    )


def not_priced(where: str, names: Sequence[str], settings: Sequence[str]) -> PlannerError:
    """What is raised for arguments that decide memory or degrees and that a plan cannot say; ``settings``: for --set."""
    decide = "decides memory or degrees and is" if len(names) == 1 else "decide memory or degrees and are"
    sets = " ".join(f"--set {one[:80]}=false" for one in settings)
    return PlannerError(f"{where}: {', '.join(one[:80] for one in names)} {decide} not priced; {sets} imports the job without")


def switch_of(name: str, data: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The setting that switches on what a setting belongs to, by their names, and whether it is on: slider_on or use_slider of
    slider_hidden. None = there is none."""
    parts = name.split("_")
    for length in range(len(parts) - 1, 0, -1):
        stem = "_".join(parts[:length])
        for one in (f"{stem}_on", f"{stem}_enable", f"{stem}_enabled", f"{stem}_active", f"use_{stem}", f"enable_{stem}"):
            if one != name and isinstance(data.get(one), bool | str):
                return one, str(data[one]).lower() not in ("false", "none", "null", "no", "off", "0", "")
    return None


def stage_ends(layers: Sequence[int], where: str) -> dict[str, int]:
    """first_stage_layers and last_stage_layers of these layers per pipeline rank, 0 where all are equal; both are said where one
    differs. Raises PlannerError where those between differ."""
    if len(set(layers[1:-1])) > 1:
        raise PlannerError(
            f"{where} gives the stages {list(layers)} layers; a plan knows a first and last stage that differ, the ones between "
            "are equal"
        )
    even = len(set(layers)) == 1
    return {"first_stage_layers": 0 if even else layers[0], "last_stage_layers": 0 if even else layers[-1]}


def left_over(data: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> list[str]:
    """Keys of a mapping that are not known, with their place."""
    return [f"{prefix}{key}" for key in data if key not in known]


def read_text(path: Path) -> str:
    """Text of a configuration. Raises PlannerError."""
    return getattr(path, "text", "") or library.read_text(path)


class Written(type(Path())):  # type: ignore[misc]  # of the system that it runs on
    """A text that stands in another file, under a name of its own."""

    text = ""
