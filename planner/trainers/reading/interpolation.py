"""Configurations of OmegaConf and Hydra: files that extend others, ${references}, overrides. Nothing is executed."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.settings import beside, file_settings, parsed

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 12
_SUMS = {"mul": lambda a, b: a * b, "div": lambda a, b: a // b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b}
"""Resolvers that NeMo's projects register: of whole numbers."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping over another, section by section."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def extended(path: Path, what: str, depth: int = 0, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """A file over those that its ``defaults`` name by path (NeMo-RL). Raises PlannerError where one is not there, unless it is
    ``known``: the trainer's own, whose settings a reader takes where nothing is said."""
    data = file_settings(path, what)
    named = data.pop("defaults", None)
    if named is None or depth > _DEEPEST:
        return data
    found: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        if name == "_self_" or isinstance(name, Mapping):
            continue
        base = beside(path, str(name)) or beside(path, f"{name}.yaml")
        if base is None and name in known:
            continue
        if base is None or base.resolve() == path.resolve():
            raise PlannerError(
                f"{path}: it extends {shown(name)}, which holds the rest of the settings and is not there; keep the folders "
                "as they are in the repository"
            )
        found = merged(found, extended(base, what, depth + 1, known))
    return merged(found, data)


def override(data: dict[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names over a mapping."""
    for name, value in words.items():
        place = data
        *sections, last = name.split(".")
        for one in sections:
            inner = place.get(one)
            place[one] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[one]
        place[last] = value
    return data


def _called(function: str, words: list[str], look: Callable[[str], Any]) -> Any:
    """What a resolver gives: of the environment and of a selection the default that is written; None = it cannot be told."""
    if function in _SUMS and len(words) == 2 and all(re.fullmatch(r"\d{1,12}", one) for one in words):
        return _SUMS[function](int(words[0]), int(words[1]) or 1)
    if function == "oc.decode" and len(words) == 1:
        return parsed(words[0])
    found = look(words[0]) if function == "oc.select" else None
    usual = words[1].strip("'\"") if function in ("oc.env", "oc.select") and len(words) == 2 else None
    return found if found is not None else None if usual in (None, "null") else usual


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with its references replaced; one that cannot be resolved stays as text."""

    def look(name: str, section: tuple[str, ...]) -> Any:
        steps = name.strip()
        at: Any = data
        if steps.startswith("."):
            ups = len(steps) - len(steps.lstrip("."))
            steps = ".".join((*section[: max(len(section) - ups + 1, 0)], steps.lstrip(".")))
        for step in steps.split("."):
            at = at.get(step) if isinstance(at, Mapping) else None
        return at

    def text(value: str, section: tuple[str, ...]) -> Any:
        for _ in range(_DEEPEST):
            reference = _REFERENCE.search(value)
            if reference is None or len(value) > 10000:
                return value
            function, colon, rest = reference[1].partition(":")
            if colon:
                one = _called(function, [str(one).strip() for one in rest.split(",")], lambda name: look(name, section))
            else:
                one = look(reference[1], section)
            if one is None:
                return None if reference.span() == (0, len(value)) else value
            if reference.span() == (0, len(value)):
                return text(one, section) if isinstance(one, str) else one
            value = value[: reference.start()] + str(one) + value[reference.end() :]
        return value

    def walk(value: Any, section: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(one, (*section, str(key))) for key, one in value.items()}
        if isinstance(value, str) and "${" in value:
            found = text(value, section[:-1])
            return parsed(found) if isinstance(found, str) and "${" not in found else found
        return value

    return {str(key): walk(value, (str(key),)) for key, value in data.items()}
