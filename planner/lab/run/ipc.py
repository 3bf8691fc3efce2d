"""What a rank that runs by itself tells the process that started it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Voice:
    """Called with a text it says how far the rank is. This one is heard by nobody."""

    def __call__(self, text: str) -> None:
        """How far the rank is."""

    def begin(self, phase: str, seconds: float) -> None:
        """What comes next, and after how long it has hung."""

    def keep(self, found: Any) -> None:
        """What has been found so far: it outlives the process."""


class Pipe(Voice):
    """Through a pipe, as pairs of a kind and its content."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __call__(self, text: str) -> None:
        self._pipe.send(("progress", text))

    def begin(self, phase: str, seconds: float) -> None:
        """What comes next, and after how long it has hung."""
        self._pipe.send(("begin", (phase, seconds)))

    def keep(self, found: Any) -> None:
        """What has been found so far."""
        self._pipe.send(("kept", found))


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank that did not come to its end."""

    rank: int
    """Of all ranks; -1 = none had been started."""
    kind: str
    """hung, died (its process ended), failed (an exception) or interrupted (by the user)."""
    phase: str
    """What it was doing."""
    sentence: str
    """All of it for the user."""
    kept: Any = None
    """What it had found until then; None = nothing."""
