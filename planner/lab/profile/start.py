"""Starts the ranks of a profile on this machine and waits for them; no torch in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from planner.lab.launch.state import State
from planner.lab.launch.torchrun import run_here
from planner.lab.profile.settings import Settings


def profile_here(settings: Settings, ranks: int, show: Callable[[State], object]) -> float:
    """Measures with ``ranks`` processes of this machine; the journal holds the result. Seconds that it took.

    Raises what ``run_here`` raises.
    """
    with tempfile.TemporaryDirectory(prefix="plan-profile-") as name:
        return run_here("planner.lab.profile", settings.to_json(), ranks, Path(name), show)
