"""Runs a trainer's own parser and validator on an exported folder, where the trainer is installed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Checked:
    """How far the trainer's own code went."""

    target: str
    """Name of the target."""
    level: str = ""
    """Of target.LEVELS; empty: nothing was checked."""
    details: tuple[str, ...] = ()
    """What was compared."""
    missing: str = ""
    """Why nothing, or no more, was checked; empty when all that there is was done."""
    problem: str = ""
    """What the trainer said when it refused the files; empty when it accepted them."""

    def text(self) -> str:
        """For people."""
        if self.problem:
            return f"check: {self.target} REFUSES this: {self.problem}"
        if not self.level:
            return f"check: NOT CHECKED by {self.target}: {self.missing}"
        more = f"; not further: {self.missing}" if self.missing else ""
        return f"check: {self.target} reached '{self.level}'" + "".join(f"; {one}" for one in self.details) + more
