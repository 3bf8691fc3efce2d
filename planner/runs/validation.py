"""Files that ``plan validate`` writes: read with every key checked; what they measured, as documents of runs.

A file holds one validation (keys as docs/validate.md lists them), or under ``validations`` those of several finalists.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, shown
from planner.schema import mapping, one_of, value_of

VERSION = 1
"""Format of validation files."""
RUNGS = ("meta", "rank", "truncated", "full", "trainer")
"""What was run, from memory alone to the plan itself on its own trainer."""
OUTCOMES = ("completed", "out_of_memory", "hung", "lost_rank", "failed", "not_equal", "interrupted")
"""How it ended; all but the first are a failed validation. interrupted: the user stopped it, what was measured is kept."""
_NEEDED: dict[str, Any] = {
    "plan": str, "rung": Annotated[str, one_of(RUNGS)], "outcome": Annotated[str, one_of(OUTCOMES)],
    "run": dict[str, Any] | None,
}  # fmt: skip
"""Keys that every validation has; ``run`` is written last, so that a file that was cut off lacks it."""


def is_validation(data: Mapping[str, Any]) -> bool:
    """Whether a file's mapping says that it is a validation."""
    return "planner_validation" in data


def load_validations(path: Path) -> list[dict[str, Any]]:
    """The validations of a file. Raises PlannerError with file, line or key when it is damaged, or newer than this planner."""
    return validations_from_dict(library.read_yaml(path), where=str(path))


def validations_from_dict(data: Mapping[str, Any], *, where: str = "validation") -> list[dict[str, Any]]:
    """The validations in plain data. Raises PlannerError."""
    version = data.get("planner_validation")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PlannerError(
            f"{where}: not a validation: the key 'planner_validation' with its version number is missing"
        )
    if version > VERSION:
        raise PlannerError(
            f"{where}: the validation has version {version}, this planner reads up to {VERSION}; update planner to read it"
        )
    many = data.get("validations", [data])
    if not isinstance(many, list) or not many:
        raise PlannerError(f"{where}: validations is {shown(many)}; it must be a list of at least one")
    here = [f"{where}: validation {number}" for number in range(1, len(many) + 1)] if "validations" in data else [where]
    return [_checked(one, place) for one, place in zip(many, here, strict=True)]


def _checked(one: Any, where: str) -> dict[str, Any]:
    for key in _NEEDED:
        if key not in mapping(one, where):
            raise PlannerError(f"{where}: missing key '{key}'; the file is damaged or cut off")
    return {**one, **{key: value_of(kind, one[key], where, key) for key, kind in _NEEDED.items()}}


def documents(data: Mapping[str, Any], *, where: str) -> list[Mapping[str, Any]]:
    """What a file's validations measured, each in the schema of profiles/runs. Raises PlannerError when none did."""
    found = validations_from_dict(data, where=where)
    measured = [run for one in found for run in _runs(one, where)]
    if not measured:
        rungs = " and ".join(dict.fromkeys(str(one["rung"]) for one in found))
        why = next(
            (str(one["no_run"]) for one in found if one.get("no_run")), "nothing was measured that a plan predicts"
        )
        raise PlannerError(
            f"{where}: there is no run in it to learn from (rung {rungs}): {why}; validate on the plan's own hardware, with "
            "--rung full or --trainer"
        )
    return measured


def _runs(one: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The run of a validation, and of rung truncated that of its second depth."""
    depths = one.get("truncated") or []
    runs = [depth.get("run") for depth in depths if isinstance(depth, Mapping)] if isinstance(depths, list) else [depths]
    if any(run is not None and not isinstance(run, Mapping) for run in runs) or not isinstance(depths, list):
        raise PlannerError(f"{where}: truncated is {shown(depths)}; it must be a list of depths, each with a run or null")
    return [run for run in (one["run"], *runs) if run is not None]
