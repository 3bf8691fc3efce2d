"""Factors of the phases of RL, on the terminal."""

from __future__ import annotations

from rich.console import Console

from planner.rl.phase_factors import PhaseFit
from planner.terminal.tables import percent, seconds, table


def print_phase_fit(console: Console, fit: PhaseFit) -> None:
    """Factors with their spread; every run before, after, and with its own log left out."""
    rows = [
        (name.replace("_", " "), f"{factor:.3f}", f"{fit.spread[name][0]:.3f} to {fit.spread[name][1]:.3f}")
        for name, factor in fit.found.factors.items()
    ]
    title = f"{fit.found.framework}, {fit.found.hardware}"
    console.print(table("phase", ">measured over predicted", "of the runs", rows=rows, title=title))

    def error(predicted: float, measured: float) -> str:
        return f"{seconds(predicted)} ({percent(predicted / measured - 1.0)})"

    lines = [
        (one.name, seconds(one.measured), *(error(each, one.measured) for each in (one.before, one.after, one.left_out)))
        for one in fit.runs
    ]
    console.print(table("run", ">step", ">predicted before", ">after", ">by the other runs", rows=lines))
