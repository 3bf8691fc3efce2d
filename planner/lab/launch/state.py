"""How far a run is, for a person: a small file that rank 0 rewrites, and the bar that is drawn from it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner import library
from planner.record import record

REFRESH = 0.3
"""Seconds between two writings of the file, and between two drawings of the bar."""
OTHER_COLUMNS = 52
"""Columns of the line that the spinner, the bar, the time left and the time spent take."""


@record
class State:
    """Where a run is."""

    part: str = "starting"
    """compute, memory, collectives, fitting; a trainer; validate."""
    doing: str = ""
    """The point in words."""
    done: int = 0
    """Points measured."""
    points: int = 0
    """Points of the part."""
    spent: float = 0.0
    """Seconds of measuring."""
    budget: float = 0.0
    """Seconds that it may take; 0 = there is no limit."""
    expected: float | None = None
    """Seconds left, as the steps so far promise; None = nobody knows."""

    @property
    def left(self) -> str:
        """The time left in words. What a profile needs whatever the budget is measured when that is spent."""
        if self.budget:
            left = self.budget - self.spent
            return f"at most {left:.0f} s left" if left > 0 else "over the budget"
        return "" if self.expected is None else f"about {self.expected:.0f} s left"

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        done, all_ = (self.spent, self.budget) if self.budget else (self.done, self.points)
        return min(done / all_, 1.0) if all_ else 0.0


class Pace:
    """The steps of a run, and what they promise of those that are left."""

    def __init__(self, part: str, points: int, skip: int = 0) -> None:
        """``points`` steps, of which the first ``skip`` are of another kind and promise nothing."""
        self._part, self._points, self._skip, self._done = part, points, skip, -1
        self._counted = time.monotonic()

    def next(self, show: Callable[[State], object], doing: str) -> None:
        """One more step begins and is shown."""
        show(self.at(doing, self._done + 1))

    def at(self, doing: str, done: int) -> State:
        """A step begins, and ``done`` are done."""
        now, self._done = time.monotonic(), done
        expected = None
        if done > self._skip:
            expected = (now - self._counted) / (done - self._skip) * max(self._points - done, 0)
        else:
            self._counted = now
        return State(part=self._part, doing=doing, done=done, points=self._points, expected=expected)


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
    """A progress bar with the time left and spent on standard error; nothing when that is no terminal."""

    def __init__(self, *, quiet: bool = False, which: str = "") -> None:
        """``quiet`` on all ranks but the first; ``which`` run it is of several, said before every state."""
        self._which = which
        self._wanted = sys.stderr.isatty() and not quiet
        self._progress: Any = None

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
            left = f"{state.left} of this one" if self._which and state.left else state.left
            room = max(self._progress.console.width - OTHER_COLUMNS, 20)
            text = f"{self._which}{state.part}{count} {state.doing}"[:room]
            self._progress.update(self._task, description=text, completed=state.share, left=left)
