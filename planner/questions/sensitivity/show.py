"""The sensitivity of a choice for the terminal: the same numbers that --json prints."""

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.explain import layout_text
from planner.questions.sensitivity.numbers import BY_HAND, Flip, Reading, Sensitivity
from planner.terminal.tables import percent, seconds, table

WORTH = 0.01
"""Losses below this share of the step are not worth a measurement."""
ROOM = 120
"""Columns from which the table says how each number is known and how far was looked."""


def loss_text(one: Flip) -> str:
    """What the choice loses at the end of the reach."""
    if one.factor is None:
        return "-"
    if not one.fits:
        return "nothing fits"
    if one.loss is None:
        return f"no fit, {percent(one.forced or 0.0)}"
    return percent(one.loss)


def readings_table(found: Sensitivity, narrow: bool) -> Table:
    """One row per number, the largest loss first."""
    sides = (">flips at", ">then loses") if narrow else (">looked to", ">flips at", ">then loses")
    known = () if narrow else ("how it is known",)
    shown = table("=number of the profile", *known, *sides, *sides, title="What the choice hangs on")
    for one in found.readings:
        cells = [] if narrow else [escape(one.origin)]
        for flip in (one.down, one.up):
            cells += [] if narrow else [f"x{flip.reach:.2f}"]
            cells += ["-" if flip.factor is None else f"x{flip.factor:.3f}", loss_text(flip)]
        style = "bold" if one.stake >= WORTH else "" if one.nearest < math.inf else "dim"
        shown.add_row(one.quantity.text, *cells, style=style)
    return shown


def print_sensitivity(console: Console, found: Sensitivity) -> None:
    """The choice, the numbers that it depends on, and the plans that count as equal to it."""
    best = found.best
    assert best.layout is not None and best.prediction is not None
    console.print(Text.assemble("The choice: ", (layout_text(best.layout), "bold")))
    console.print(f"step {seconds(best.prediction.step_time_s)}\n")
    console.print(readings_table(found, console.width < ROOM))
    for one in found.readings:
        _print_flips(console, one)
    _print_advice(console, found)
    console.print()
    _print_equal(console, found)


def _print_advice(console: Console, found: Sensitivity) -> None:
    """What to measure first, where that could change the plan for the better."""
    legend = "'then loses': what the choice costs over the best plan where the number is as far off as was looked."
    if any(flip.forced is not None for one in found.readings for flip in (one.down, one.up)):
        legend += (
            " 'no fit, 4 %': it runs out of memory there, and what does not takes 4 % longer than the choice."
        )
    console.print(Text(legend, style="dim"))
    first = found.readings[0] if found.readings else None
    if first is not None and first.stake >= WORTH:
        console.print(Text(f"Measure first: {first.quantity.text}. How: {first.quantity.measure}.", style="bold"))
    elif first is not None and found.complete:
        console.print(
            f"No number is worth measuring for this choice: with any of them that far off it loses {percent(first.stake)} at most."
        )


def _print_flips(console: Console, one: Reading) -> None:
    for flip in (one.down, one.up):
        if flip.factor is None:
            continue
        wins = layout_text(flip.layout) if flip.layout is not None else "nothing that fits"
        console.print(Text(f"  {one.quantity.text} x{flip.factor:.3f}: {wins}"))


def _print_equal(console: Console, found: Sensitivity) -> None:
    gap = percent(math.expm1(found.ties.equal_gap))
    console.print(Text(f"Plans within the model's error of the choice (less than {gap} slower)", style="italic"))
    if not found.equal:
        console.print("None: the next plan is predicted further behind than that.")
    for one in found.equal:
        console.print(f"  {percent(one.behind)} behind, truly slower in {percent(one.right)} of such pairs:")
        console.print(Text(f"    {layout_text(one.layout)}"))
        console.print(Text(f"    {'; '.join(one.differs) or 'no part differs much'}", style="dim"))
    if found.equal:
        console.print(f"They count as equal. {BY_HAND}")
    basis = f"Share of pairs that were ordered rightly, by their predicted gap: {found.ties.basis}."
    console.print(Text(basis, style="dim"))
