"""A validation as it is written down: what was found, on which machine, with which versions, when and by which command."""

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from planner.runs.rows import VERSION

FOUND: dict[str, Any] = {
    "rung": "", "why": "", "trainer": "", "layout": {}, "num_gpus": 0, "changes": [], "unchecked": [], "outcome": "completed",
    "failure": None, "device": None, "limits": None, "times": [], "stages": [], "as_run": None, "ranks": [], "rates": None,
    "parity": None, "traces": [], "likeliest": None, "no_run": None, "run": None,
}  # fmt: skip
"""What levels find, in the order of the file, and what stands there when a level does not say.

``times``: rows of ``time_row``. ``stages``: the same by pipeline stage and kind of pass. ``ranks``: memory by rank.
``as_run``: what an eager run was priced as, and how well (``eager_pricing``); None where the plan's own prediction stands.
``run``: what was measured as a document of profiles/runs, ``no_run``: why there is none (``learn``).
``failure``: rank, phase, sentence, allocated_gib. ``device``: name, kind, count, pressure before and after.
"""


def complete(found: dict[str, Any]) -> dict[str, Any]:
    """What a level found with what it did not say, in the order of the file; keys of its own come last."""
    return {**{key: found.get(key, default) for key, default in FOUND.items()}, **found}


def time_row(
    what: str, predicted: float | None, measured: float | None, *, interval: tuple[float, float] | None = None,
    currency: str = "wall", note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """One compared time. ``error`` = predicted / measured - 1; None where either is missing or the note says why not.

    ``currency``: wall, processor (seconds of a core) or device (seconds by events of the GPU). A row with a note is shown and not
    compared.
    """
    compared = predicted is not None and measured is not None and measured > 0 and not note
    error = predicted / measured - 1.0 if compared else None  # type: ignore[operator]
    inside = interval[0] <= measured <= interval[1] if compared and interval else None  # type: ignore[operator]
    return {
        "what": what, "predicted_seconds": predicted, "measured_seconds": measured, "spread": None, "error": error,
        "interval": list(interval) if interval is not None else None, "inside": inside, "currency": currency, "note": note,
    }  # fmt: skip


def spread(values: Sequence[float]) -> float | None:
    """Half the distance of the 5th and the 95th percentile over the median."""
    middle = statistics.median(values) if values else 0.0
    if len(values) < 2 or middle <= 0:
        return None
    low, high = np.percentile(values, [5, 95])
    return float((high - low) / 2 / middle)


def measured_row(
    what: str, predicted: float | None, values: Sequence[float], *, currency: str, note: str = "",
    interval: tuple[float, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``time_row`` of the median of some measurements, with their spread."""
    row = time_row(what, predicted, statistics.median(values), interval=interval, currency=currency, note=note)
    return {**row, "spread": spread(values)}


def rates(
    estimate: Any, num_gpus: int, predicted: float | None, measured: float, loss: Sequence[float] | None = None
) -> dict[str, Any]:
    """Throughput of the job and MFU of a step of so many seconds; not compared where nothing is predicted.

    MFU = model FLOP / (peak FLOP/s x step).
    """
    tokens, useful = float(estimate.tokens[0]) * num_gpus, float(estimate.flop[0]) / estimate.peak_flops
    compared = predicted is not None
    return {
        "tokens_per_second": {"predicted": tokens / predicted if predicted else None, "measured": tokens / measured},
        "mfu": {"predicted": useful / predicted if predicted else None, "measured": useful / measured if compared else None},
        "loss": loss,
    }  # fmt: skip


def head(plan: Path) -> dict[str, Any]:
    """What every validation file begins with."""
    command = " ".join(["plan", *sys.argv[1:]])
    return {"planner_validation": VERSION, "plan": str(plan), "command": command, **origin()}


def origin() -> dict[str, Any]:
    """Where and when something was measured, and with which versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "planner")}},
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
