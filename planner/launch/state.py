"""How far a running profile is, for a person: a small file that rank 0 rewrites, and the bar that is drawn from it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner import library

REFRESH = 0.3
"""Seconds between two writings of the file, and between two drawings of the bar."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Where the measuring is."""

    part: str = "starting"
    """compute, memory, collectives, fitting."""
    doing: str = ""
    """The point in words."""
    done: int = 0
    """Points measured."""
    points: int = 0
    """Points of the part."""
    spent: float = 0.0
    """Seconds of measuring."""
    budget: float = 0.0
    """Seconds that it may take."""

    @property
    def remaining(self) -> float:
        """Seconds left at most."""
        return max(self.budget - self.spent, 0.0)


class Teller:
    """Rank 0 says where it is, into a file or to a bar, at most every REFRESH seconds."""

    def __init__(self, show: Callable[[State], object] | None) -> None:
        self.show = show
        self._last = 0.0

    def tell(self, state: State) -> None:
        """Shows the state if the last one was a while ago."""
        if self.show and time.monotonic() - self._last >= REFRESH:
            self._last = time.monotonic()
            self.show(state)


def to_file(path: Path) -> Callable[[State], object]:
    """A writer of states."""
    return lambda state: library.write_whole(path, json.dumps(asdict(state)))


def from_file(path: Path) -> State:
    """The last state that was written; a fresh one before."""
    try:
        return State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return State()


class Bar:
    """A progress bar with the remaining time on standard error; nothing when that is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        """``quiet`` on all ranks but the first."""
        self._wanted = sys.stderr.isatty() and not quiet
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24),
                TextColumn("{task.fields[left]}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("starting", total=1.0, left="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, state: State) -> None:
        """Draws a state."""
        if self._progress:
            count = f" {state.done}/{state.points}" if state.points else ""
            left = f"at most {state.remaining:.0f} s left" if state.budget else ""
            self._progress.update(
                self._task, description=f"{state.part}{count} {state.doing}"[:70], total=max(state.budget, 1.0),
                completed=min(state.spent, state.budget), left=left,
            )  # fmt: skip
