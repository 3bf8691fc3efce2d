"""Measured against predicted on the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from planner.serving.measure.bench_files import RATES
from planner.serving.measure.plan_comparison import Comparison, MeasuredQuantity
from planner.serving.serve_plan import FIGURES, LATENCIES
from planner.terminal.tables import percent, seconds, table

NAMES = {
    "ttft": "time to first token", "tpot": "time per output token", "itl": "gap between tokens", "e2e": "whole request",
    "requests_per_second": "requests/s", "output_tokens_per_second": "output tokens/s",
    "total_tokens_per_second": "tokens/s, in and out",
}  # fmt: skip
GOOD, FAIR = 0.1, 0.25
"""Errors up to these are green and yellow."""


def print_comparison(console: Console, found: Comparison) -> None:
    """All quantities in their own order, the largest deviations in words, causes."""
    result = found.result
    done = f", {result.completed} requests answered" if result.completed else ""
    console.print(f"{result.source}{done}{f', {result.failed} failed' if result.failed else ''}", markup=False)
    if result.stopped:
        console.print(Text(f"Stopped before its end: {result.stopped}. What was measured until then:", style="yellow"))
    for note in found.notes:
        console.print(Text(f"{note[:1].upper()}{note[1:]}.", style="yellow"))
    order = [f"{name}.{figure}" for name in LATENCIES for figure in FIGURES] + list(RATES)
    rows = sorted(found.rows, key=lambda one: order.index(one.quantity))
    lines = [
        (_name(one), _value(one, one.measured), _value(one, one.predicted), _error(one), _interval(one)) for one in rows
    ]
    console.print(table("quantity", ">measured", ">predicted", ">error", "nine of ten within", rows=lines))
    worst = found.rows[0]
    console.print(f"Largest deviation: {_name(worst)}, {_words(worst)}.", markup=False)
    for one in found.causes:
        share = "all" if one.explains > 0.995 else f"{100 * one.explains:.0f} %"
        console.print(f"  {share} of the gap would be explained if {escape(one.what)}: {escape(one.check)}.")
    if not found.causes and not found.result.stopped and abs(worst.error) > FAIR:
        console.print("  Nothing that was tried explains it.")
    console.print("Error: predicted over measured, less 1. TPOT leaves the first token out.")


def _name(one: MeasuredQuantity) -> str:
    name, _, figure = one.quantity.partition(".")
    return f"{NAMES[name]}, {figure}" if figure else NAMES[name]


def _value(one: MeasuredQuantity, value: float) -> str:
    if not math.isfinite(value):
        return "no end"
    return seconds(value) if "." in one.quantity else f"{value:,.4g}"


def _error(one: MeasuredQuantity) -> Text:
    if not math.isfinite(one.predicted):
        return Text("no end", style="red")
    style = "green" if abs(one.error) <= GOOD else "yellow" if abs(one.error) <= FAIR else "red"
    return Text(f"{100 * one.error:+.1f} %", style=style)


def _interval(one: MeasuredQuantity) -> str:
    if one.interval is None:
        return ""
    return f"{_value(one, one.interval[0])} to {_value(one, one.interval[1])}{'' if one.inside else ', outside'}"


def _words(one: MeasuredQuantity) -> str:
    if not math.isfinite(one.predicted):
        return "predicted without an end, as more arrives than leaves"
    if abs(one.error) < 0.005:
        return "as predicted"
    return f"predicted {percent(abs(one.error))} {'above' if one.error > 0 else 'below'} what was measured"
