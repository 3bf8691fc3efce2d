"""What computation and collectives cost each other, from the measured pairs to the key ``overlap`` of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from planner.hardware.overlap import LINKS, SIDES, MeasuredOverlap, impossible
from planner.lab.profile.points import Measured
from planner.lab.profile.timing import summarise

OF = {"compute": "gemm", "communication": "collective"}
"""What the points call each side."""
VAGUE = 25.0
"""Percent of spread from which a note says so."""


def fit_overlap(measured: Sequence[Measured]) -> tuple[dict[str, Any], list[str]]:
    """(key of the file by link, notes). One ratio per link and direction: the median over the collectives.

    Its spread is half the interval of that median (order statistics over the collectives), or the scatter of the single
    ratios where that is more. A link with a ratio that cannot be is left out and said; the cost model then assumes one.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for link in LINKS:
        values: dict[str, float] = {}
        problems: list[str] = []
        for side in SIDES:
            ratios = [
                one for one in measured
                if one.point["of"] == OF[side] and (int(one.point["nodes"]) > 1) == (link == "across")
            ]  # fmt: skip
            if not ratios:
                continue
            over = summarise([float(dict(one.details)["slowdown"]) for one in ratios], "wall")
            own = median(float(dict(one.details).get("spread", one.spread)) for one in ratios)
            value, spread = round(over.median, 3), round(100.0 * max(over.spread, own), 2)
            values |= {side: value, f"{side}_spread": spread}
            problem = impossible(value, spread)
            if spread > VAGUE:
                notes.append(f"overlap {link}: {side} takes {value:.2f} times as long, known to {spread:.0f} % only")
            if problem:
                problems.append(f"overlap {link}: {side} takes {value:.2f} times as long, {problem}; not used")
        notes += problems
        if set(SIDES) <= values.keys() and not problems:
            found[link] = MeasuredOverlap(**values).to_dict()
    return found, notes
