"""How long the parts of a run may take before they count as hung: the same on every rung, said before the start. No torch here."""

from __future__ import annotations

from planner.units import format_seconds

START = 120.0
"""Seconds that ranks wait for each other."""
SETTING_UP = 300.0
"""Seconds for modules, weights and groups, and for the comparison with one process."""
FIRST = 4.0
"""The first steps may take so many times longer: kernels are chosen, communicators are made."""
FAKE = 20.0
"""A rank on fake tensors may take so many times the limit of a step: all its operations run on one core."""


def step_limits(timeout: float, steps: int) -> str:
    """The part of the sentence that all rungs with steps share."""
    return (
        f"{format_seconds(timeout)} for each of {steps} steps ({format_seconds(FIRST * timeout)} for the first, --timeout), then "
        "what hangs is named and ended"
    )
