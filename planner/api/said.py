"""Values of keywords as flags write them."""

from typing import Any

from planner.units import parse


def texts(values: Any, kind: str = "") -> list[str]:
    """One value or several as flags write them; numbers are in base units."""
    unit = {"bytes/s": " B/s", "bytes": " B", "seconds": " s"}.get(kind, "")
    several = values if isinstance(values, (list, tuple)) else [] if values is None else [values]
    return [f"{one!r}{unit}" if isinstance(one, (int, float)) else str(one) for one in several]


def seconds_of(text: str) -> float:
    """A time with its unit, or seconds."""
    try:
        return float(text)
    except ValueError:
        return parse(text, "seconds", what="--measured", like="14.2s or 850ms")
