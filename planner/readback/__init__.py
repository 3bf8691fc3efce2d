"""Readers of what people run today: a trainer's configuration becomes a plan."""

from __future__ import annotations

import importlib
from pathlib import Path

from planner.errors import PlannerError, UnknownNameError
from planner.readback.reading import Reading

READERS: dict[str, str] = {
    "megatron": "megatron",
}
"""Name after --from -> module of planner.readback with ``read(text, where)`` and ``looks_like(text)``."""


def read(path: Path, name: str | None = None) -> Reading:
    """The configuration in a file, by the named reader or by the first that knows its form. Raises PlannerError."""
    if name is not None and name not in READERS:
        raise UnknownNameError("reader", name, READERS)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(f"{path}: cannot be read ({error})") from error
    for one in [name] if name else READERS:
        module = importlib.import_module(f"planner.readback.{READERS[one]}")
        if name or module.looks_like(text):
            found: Reading = module.read(text, str(path))
            return found
    raise PlannerError(f"{path}: looks like no configuration of {', '.join(READERS)}; say which with --from")
