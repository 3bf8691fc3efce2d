"""Phases of a log beside those of an RL plan, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from planner.rl.rl_doctor import PhaseRow, RlComparison
from planner.terminal.tables import percent, seconds, table


def print_rl_comparison(console: Console, found: RlComparison) -> None:
    """Every phase that the log has, the largest gap in words."""
    counted, all_ = len(found.log.counted), len(found.log.steps)
    console.print(f"{found.log.framework}: median of {counted} of {all_} steps", markup=False)
    for note in found.notes:
        console.print(Text(f"{note[:1].upper()}{note[1:]}.", style="yellow"))
    rows = [_line(one) for one in (*found.rows, found.step)]
    console.print(table("phase", ">measured", ">predicted", ">gap", ">error", rows=rows))
    worst = found.largest
    if worst is not None:
        way = "longer" if worst.gap > 0 else "shorter"
        console.print(f"Largest gap: {worst.phase} takes {seconds(abs(worst.gap))} {way} than predicted.", markup=False)
    if found.cause:
        console.print(f"  Usual cause: {found.cause}.", markup=False)
    if found.unmeasured:
        console.print(f"The log does not print: {', '.join(found.unmeasured)}.", markup=False)
    console.print("Error: predicted over measured, less 1.")


def _line(one: PhaseRow) -> tuple[str, ...]:
    name = one.phase if one.covers in ((one.phase,), ("step",)) else f"{one.phase} ({', '.join(one.covers)})"
    error = "" if one.error is None else percent(one.error)
    return name.replace("_", " "), seconds(one.measured), seconds(one.predicted), f"{one.gap:+.2f} s", error
