"""What was taken where the user said nothing."""

from dataclasses import dataclass

from planner.schema import Text


@dataclass(frozen=True)
class Assumption:
    """Something the user did not say."""

    what: Text
    """Name of the input."""
    value: Text
    """What was taken."""
    why: Text
    """Where it comes from."""
    flag: Text
    """The flag that changes it."""
