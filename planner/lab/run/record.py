"""A validation as it is written down: what was found, on which machine, with which versions, when and by which command."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planner.runs.validation import VERSION

FOUND: dict[str, Any] = {
    "rung": "", "why": "", "trainer": "", "layout": {}, "num_gpus": 0, "changes": [], "outcome": "completed",
    "failure": None, "device": None, "limits": None, "times": [], "stages": [], "as_run": None, "ranks": [], "rates": None,
    "parity": None, "traces": [], "likeliest": None, "no_run": None, "run": None,
}  # fmt: skip
"""What rungs find, in the order of the file, and what stands there when a rung does not say.

``times``: rows of ``time_row``. ``stages``: the same by pipeline stage and kind of pass. ``ranks``: memory by rank.
``as_run``: what an uncompiled run was priced as, and how well (``full_notes``); None where the plan's own prediction stands.
``run``: what was measured as a document of profiles/runs, ``no_run``: why there is none (``learn``).
``failure``: rank, phase, sentence, allocated_gib. ``device``: name, kind, count, pressure before and after.
"""


def complete(found: dict[str, Any]) -> dict[str, Any]:
    """What a rung found with what it did not say, in the order of the file; keys of its own come last."""
    whole = {key: found.get(key, default) for key, default in FOUND.items()}
    return {**whole, **{key: value for key, value in found.items() if key not in FOUND}}


def time_row(
    what: str, predicted: float | None, measured: float | None, *, spread: float | None = None,
    interval: tuple[float, float] | None = None, currency: str = "wall", note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """One compared time. ``error`` = predicted / measured - 1; None where either is missing or the note says why not.

    ``spread``: half the distance of the 5th and the 95th percentile over the median. ``currency``: wall, processor (seconds
    of a core) or device (seconds by events of the GPU). A row with a note is shown and not compared.
    """
    compared = predicted is not None and measured is not None and measured > 0 and not note
    error = predicted / measured - 1.0 if compared and predicted is not None and measured else None
    inside = interval[0] <= measured <= interval[1] if compared and interval is not None and measured else None
    return {
        "what": what, "predicted_seconds": predicted, "measured_seconds": measured, "spread": spread, "error": error,
        "interval": list(interval) if interval is not None else None, "inside": inside, "currency": currency, "note": note,
    }  # fmt: skip


def head(plan: Path) -> dict[str, Any]:
    """What every validation file begins with."""
    return {
        "planner_validation": VERSION,
        "plan": str(plan),
        "command": " ".join(["plan", *sys.argv[1:]]),
        **origin(),
    }


def origin() -> dict[str, Any]:
    """Where and when something was measured, and with which versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "planner")}},
    }  # fmt: skip


def record(found: dict[str, Any], plan: Path) -> dict[str, Any]:
    """The content of validation.yaml."""
    return {**head(plan), **complete(found)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
