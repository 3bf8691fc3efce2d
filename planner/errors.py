"""The one exception family shown to users: a sentence, never a traceback."""

import difflib
from collections.abc import Iterable


class PlannerError(Exception):
    """What was asked, why it cannot be, and what to change; the command line prints it and exits with code 2."""


class UnknownNameError(PlannerError):
    """A name that is not in the library; the message lists what exists, nearest first."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        said = f"'{name}'" if name.isprintable() and len(name) <= 200 else shown(name)
        super().__init__(f"unknown {kind} {said}; known, nearest first: {', '.join(nearest_first(name, known))}")


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut when long; some integers and nested data cannot be written."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more than 4300 digits
        return "too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Iterable[str]) -> str:
    """Names as alternatives: a, b or c."""
    *some, last = names
    return f"{', '.join(some)} or {last}" if some else last


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """The known names, sorted by likeness to ``name`` (most alike first, ties alphabetically)."""
    name = name[:100]  # the time to compare grows with the square of the length

    def distance(candidate: str) -> tuple[float, str]:
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return -ratio, candidate

    return sorted(known, key=distance)
