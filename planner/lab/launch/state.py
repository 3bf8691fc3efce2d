"""How far a running profile is, for a person: a small file that rank 0 rewrites, and the bar that is drawn from it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from planner import library

REFRESH = 0.3
"""Seconds between two writings of the file, and between two drawings of the bar."""

OTHER_COLUMNS = 52
"""Columns of the line that the spinner, the bar, the time left and the time spent take."""


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
    """Seconds that it may take; 0 = nobody knows."""
    guessed: bool = False
    """The budget is what the steps so far promise, not a limit."""
    share: float | None = None
    """How much of all is done, 0 to 1, where this is one of several runs; None = by budget or points."""

    @property
    def remaining(self) -> float:
        """Seconds left at most."""
        return max(self.budget - self.spent, 0.0)

    @property
    def left(self) -> str:
        """In words. What a profile needs whatever the budget is measured when that is spent."""
        if not self.budget:
            return ""
        if self.guessed:
            return f"about {self.remaining:.0f} s left"
        return f"at most {self.remaining:.0f} s left" if self.remaining > 0 else "over the budget"


def same(state: State) -> State:
    """Nothing around it."""
    return state


class Pace:
    """The steps of a run, and what they promise of those that are left."""

    def __init__(self, part: str, points: int, skip: int = 0) -> None:
        """``points`` steps, of which the first ``skip`` are of another kind and promise nothing."""
        self._part, self._points, self._skip = part, points, skip
        self._begun = time.monotonic()
        self._counted: float | None = None
        self._done = -1

    def next(self, doing: str) -> State:
        """One more step begins."""
        return self.at(doing, self._done + 1)

    def at(self, doing: str, done: int) -> State:
        """A step begins, and ``done`` are done."""
        now, self._done = time.monotonic(), done
        if self._counted is None and done >= self._skip:
            self._counted = now
        spent, budget, counted = now - self._begun, 0.0, done - self._skip
        if self._counted is not None and counted > 0:
            budget = spent + (now - self._counted) / counted * max(self._points - done, 0)
        return State(
            part=self._part, doing=doing, done=done, points=self._points, spent=spent, budget=budget, guessed=True
        )


class Course:
    """Several runs, one after the other, as one: which it is, how much of all is done, and what that promises."""

    def __init__(self, word: str, count: int) -> None:
        """``word`` is what one of the ``count`` runs is called."""
        self._word, self._count = word, count
        self._begun = self._last = time.monotonic()
        self._took: list[float] = []
        self._number = 0

    def next(self) -> None:
        """The next one begins."""
        now = time.monotonic()
        if self._number:
            self._took.append(now - self._last)
        self._number, self._last = self._number + 1, now

    def through(self, state: State) -> State:
        """What one run says as a part of all."""
        now = time.monotonic()
        before = max(now - self._last - state.spent, 0.0)  # processes started, torch imported
        mine = before + max(state.budget, state.spent) if state.budget else 0.0
        known = [*self._took, *([mine] if mine else [])]
        spent, budget = now - self._begun, 0.0
        each = sum(known) / len(known) if known else 0.0
        if known:
            left = max((mine or each) - (now - self._last), 0.0)
            budget = spent + left + (self._count - self._number) * each
        inside = state.share if state.share is not None else state.done / state.points if state.points else 0.0
        part = f"{self._word} {self._number}/{self._count}" if self._count > 1 else self._word
        return replace(
            state, part=f"{part}, {state.part}" if state.part else part, spent=spent, budget=budget, guessed=True,
            share=(self._number - 1 + min(inside, 1.0)) / self._count,
        )  # fmt: skip


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

    def __init__(self, *, quiet: bool = False, through: Callable[[State], State] = same) -> None:
        """``quiet`` on all ranks but the first; ``through`` is put around every state."""
        self._through = through
        self._wanted = sys.stderr.isatty() and not quiet
        self._progress: Any = None
        self._task: Any = None
        self._begun = 0.0

    def __enter__(self) -> Bar:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            self._progress = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24),
                TextColumn("{task.fields[left]}"), TextColumn("{task.fields[spent]}"), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("starting", total=1.0, left="", spent="")
            self._progress.start()
            self._begun = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, state: State) -> None:
        """Draws a state."""
        if self._progress:
            state = self._through(state)
            count = f" {state.done}/{state.points}" if state.points else ""
            left = state.left
            done = state.share
            if done is None and state.budget and not state.guessed:
                done = min(state.spent / state.budget, 1.0)
            if done is None:
                done = state.done / state.points if state.points else 0.0
            spent = int(max(state.spent, time.monotonic() - self._begun))
            room = self._progress.console.width - OTHER_COLUMNS
            self._progress.update(
                self._task, description=f"{state.part}{count} {state.doing}"[: max(room, 20)], completed=done, left=left,
                spent=f"{spent // 60:.0f}:{spent % 60:02.0f}",
            )  # fmt: skip
