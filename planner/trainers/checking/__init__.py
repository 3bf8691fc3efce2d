"""Runs a trainer's own parser and validator on an exported folder, where the trainer is installed."""

from dataclasses import dataclass, field
from typing import Any

Request = dict[str, Any]
"""What a child has to know of an exported folder."""


@dataclass(kw_only=True)
class Checked:
    """How far the trainer's own code went; a child fills it step by step."""

    target: str = ""
    """Name of the target."""
    level: str = ""
    """Of target.LEVELS; empty: nothing was checked."""
    details: list[str] = field(default_factory=list)
    """What was compared."""
    missing: str = ""
    """Why nothing, or no more, was checked; empty when all that there is was done."""
    problem: str = ""
    """What the trainer said when it refused the files; empty when it accepted them."""

    def reached(self, level: str, *details: str) -> None:
        """The trainer's code has gone this far."""
        self.level = level
        self.details += details

    def same(self, what: str, found: object, expected: object) -> None:
        """The trainer's own answer is the planner's. Raises ValueError."""
        if found != expected:
            raise ValueError(f"{what}: the trainer says {found}, the plan {expected}")
        self.details.append(f"{what} as planned")

    def text(self) -> str:
        """For people."""
        if self.problem:
            return f"check: {self.target} REFUSES this: {self.problem}"
        if not self.level:
            return f"check: NOT CHECKED by {self.target}: {self.missing}"
        more = f"; not further: {self.missing}" if self.missing else ""
        return f"check: {self.target} reached '{self.level}'" + "".join(f"; {one}" for one in self.details) + more
