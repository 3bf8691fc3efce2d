"""What-if tables for the terminal: the same numbers that --json prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.costs import LEFT_OUT
from planner.explain import layout_text
from planner.questions.what_if.numbers import Row
from planner.terminal.tables import percent, seconds
from planner.units import KILO, format_count

LEAST_SWEEP = 3
"""Points of one flag from which a sweep is drawn."""
OWN_NUMBERS = {"gpus": "num_gpus", "sequence_length": "sequence_length", "global_batch_size": "global_batch_size"}
"""Flags whose number the base has too: it is a point of the sweep."""


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, heading in enumerate(headings):
        if number:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold", min_width=20)
    return table


def money(value: float | None) -> str:
    """Dollars: 1.81M, 23,450, 0.203; '-' where no price is known."""
    if value is None:
        return "-"
    if value >= 1e6:
        return format_count(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def rows_table(rows: Sequence[Row], narrow: bool) -> Table:
    """One row per change: step, throughput against the base, price of tokens, memory."""
    headings = ("step", "tok/s/GPU" if narrow else "tokens/s/GPU", "of base", "USD/1M tok", "memory")
    table = _table("Best plan each", "change", *headings, *([] if narrow else ["runs out"]))
    for row in rows:
        one = row.prediction
        if one is None:
            table.add_row(escape(row.label), "no plan", *["-"] * (4 if narrow else 5), style="red")
            continue
        limit = "GiB" if narrow else f"of {one.memory_limit_gib:.1f} GiB"
        chance = [] if narrow else [percent(one.out_of_memory_probability)]
        table.add_row(
            escape(row.label), seconds(one.step_time_s), f"{one.tokens_per_second_per_gpu:,.0f}",
            "" if row.throughput is None else f"x{row.throughput:.3f}", money(row.usd_per_million_tokens),
            f"{one.memory_peak_gib:.1f} {limit}", *chance, style="bold" if row is rows[0] else "",
        )  # fmt: skip
    return table


def costs_table(rows: Sequence[Row], tokens: float) -> Table:
    """Totals for a number of tokens; energy is an upper bound where the share of the power limit is 1."""
    headings = ("GPUs", "days", "GPU-hours", "USD/h", "USD", "MWh")
    table = _table(f"Training on {format_count(tokens)} tokens", "change", *headings)
    for row in rows:
        if row.costs is None or row.rates is None:
            table.add_row(escape(row.label), f"{row.num_gpus:,}", *["-"] * 5, style="red")
            continue
        one, price = row.costs, row.rates.usd_per_gpu_hour
        table.add_row(
            escape(row.label), f"{row.num_gpus:,}", f"{one.days:,.1f}", format_count(one.gpu_hours),
            "-" if price is None else f"{price:.2f}", money(one.usd), f"{one.kwh / KILO:,.0f}",
            style="bold" if row is rows[0] else "",
        )  # fmt: skip
    return table


def price_warning(rows: Sequence[Row]) -> str:
    """A sentence where the rows' prices are of different kinds: then the order may be that of the price lists; else ''."""
    known = {row.hardware: row.rates.basis[0] for row in rows if row.rates is not None and row.prediction is not None}
    sources = {one.source for one in known.values() if one.value != "unknown"}
    if len(sources) < 2:
        return ""
    return (
        f"Prices come from {len(sources)} lists of different kinds and dates (below), which differ by a factor of 2 to 3 for the "
        "same GPU: compare kinds of hardware with your own, --price NAME=USD."
    )


def print_reasons(console: Console, rows: Sequence[Row]) -> None:
    """What changed and why, one paragraph per row."""
    console.print(Text("What changed, and why (in percent of the base's GPU time per token)", style="italic"))
    for row in rows:
        text = Text.assemble((row.label, "bold" if row.fits else "bold red"))
        if row.layout is not None and not row.same_layout:
            text.append(f": {layout_text(row.layout)}")
        elif row.layout is not None:
            text.append(": the same plan")
        console.print(text)
        console.print(Text(f"   {row.why}", style="" if row.fits else "red"))


def print_sweeps(console: Console, rows: Sequence[Row]) -> None:
    """Throughput per GPU over the numbers of each flag that was swept, as bars."""
    for flag, members in sweeps(rows).items():
        console.print()
        console.print(Text(f"Tokens/s/GPU over {flag.replace('_', ' ')}", style="italic"))
        rates = [0.0 if one.prediction is None else one.prediction.tokens_per_second_per_gpu for one in members]
        best = max(rates) or 1.0
        width = max(min(console.width, 110) - 34, 12)
        for row, rate in zip(members, rates, strict=True):
            bar = "#" * round(width * rate / best)
            said = f"{rate:,.0f}" if rate else "no plan"
            console.print(Text.assemble(f"{row.number:>12,g}  ", (f"{bar:<{width}}", "cyan"), f"  {said}"))


def sweeps(rows: Sequence[Row], least: int = LEAST_SWEEP) -> dict[str, list[Row]]:
    """Rows of flags with ``least`` numbers or more, the base's included, in the order of the numbers, each number once."""
    found: dict[str, dict[float, Row]] = {}
    for row in rows:
        if len(row.changed) == 1 and row.number is not None and ":" not in row.label:
            found.setdefault(row.changed[0], {})[row.number] = row
    for flag, field in OWN_NUMBERS.items():
        if flag in found and not rows[0].changed:
            number = float(getattr(rows[0], field))
            found[flag].setdefault(number, dataclasses.replace(rows[0], number=number))
    return {flag: [byn[n] for n in sorted(byn)] for flag, byn in found.items() if len(byn) >= least}


def print_basis(console: Console, rows: Sequence[Row], with_energy: bool) -> None:
    """Where prices and power come from, one line per kind of hardware, and what is left out."""
    seen: dict[str, Row] = {}
    documents: dict[str, list[str]] = {}
    for row in rows:
        if row.rates is not None and row.prediction is not None:
            seen.setdefault(row.hardware, row)
    for name, row in seen.items():
        if row.rates is None:
            continue
        price, power, share, pue = row.rates.basis
        date = f", {price.date}" if price.date else ""
        text = f"{name}: {price.value} per GPU-hour ({price.source}{date})"
        others = [one.usd_per_hour for one in row.rates.other_prices]
        if others:
            text += f"; other dated prices of the profile: {min(others):g} to {max(others):g} USD"
        console.print(Text(text, style="dim"))
        if with_energy:
            console.print(
                Text(
                    f"   {power.value}; share of it {share.value} ({share.source}); PUE {pue.value} ({pue.source})",
                    style="dim",
                )
            )
            documents.setdefault(power.source, []).append(name)
    for source, names in documents.items():
        console.print(Text(f"Power of {', '.join(names)}: {source}", style="dim"))
    if with_energy:
        console.print(Text(f"Left out. {'; '.join(LEFT_OUT)}.", style="dim"))


__all__ = [
    "costs_table",
    "money",
    "price_warning",
    "print_basis",
    "print_reasons",
    "print_sweeps",
    "rows_table",
    "sweeps",
]
