"""A validation as it is written down: what was found, on which machine, with which versions, when and by which command."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VERSION = 1
"""Format of validation files."""


def record(found: dict[str, Any], plan: Path) -> dict[str, Any]:
    """The content of validation.yaml."""
    return {
        "planner_validation": VERSION,
        "plan": str(plan),
        "command": " ".join(["plan", *sys.argv[1:]]),
        **origin(),
        **found,
    }


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
