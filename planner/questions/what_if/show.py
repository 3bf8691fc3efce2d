"""What-if tables for the terminal, the same numbers that --json prints, and the picture of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.costs import LEFT_OUT
from planner.explain import layout_text
from planner.questions.what_if.changed_rows import Row
from planner.questions.what_if.numbers import WhatIf
from planner.questions.what_if.show_cheapest import print_cheapest, print_price_lists
from planner.terminal.pictures import new_figure, write_picture
from planner.terminal.plan_tables import job_text
from planner.terminal.tables import percent, seconds, table
from planner.units import format_count, format_energy

LEAST_SWEEP = 3
"""Points of one flag from which a sweep is drawn."""


def print_what_if(console: Console, found: WhatIf) -> None:
    """The job, one row per change, totals, reasons, sweeps, and the sources of prices."""
    resolved, rows, tokens = found.asked.resolved, found.rows, found.asked.pricing.tokens
    job = resolved.job
    console.print(job_text(job.workload, job.cluster, job.trainer), markup=False)
    if resolved.assumptions:
        said = ", ".join(f"{one.what} {one.value} ({one.flag})" for one in resolved.assumptions)
        console.print(Text(f"Assumed: {said}", style="dim"))
    console.print()
    cards = [row for row in rows if row.by_price]
    changes = [row for row in rows if not row.by_price]
    alone = bool(cards) and len(changes) == 1  # the base's own row among the cards says it
    if not alone:
        console.print(rows_table(changes, narrow=console.width < 100))
    if cards:
        print_cheapest(console, cards, rows[0], money)
        console.print()
    if tokens is not None:
        console.print(costs_table([*([] if alone else changes), *(row for row in cards if row.costs is not None)], tokens))
    if found.warning:
        console.print(Text(found.warning, style="yellow"))
        console.print()
    print_price_lists(console, cards)
    if not alone:
        print_reasons(console, changes)
    for flag, members in found.sweeps(LEAST_SWEEP).items():
        _print_sweep(console, flag, members)
    if not alone:
        console.print()
    print_basis(console, rows, with_energy=tokens is not None)


def money(value: float | None) -> str:
    """Dollars: 1.81M, 23,450, 0.203; '-' where no price is known."""
    if value is None:
        return "-"
    if value >= 1e6:
        return format_count(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def rows_table(rows: Sequence[Row], narrow: bool) -> Table:
    """One row per change: step, throughput against the base, price of tokens, memory."""
    headings = (">step", ">tok/s/GPU" if narrow else ">tokens/s/GPU", ">of base", ">USD/1M tok", ">memory")
    found = table("change", *headings, *([] if narrow else [">runs out"]), title="Best plan each", least=20)
    for row in rows:
        one = row.prediction
        if one is None:
            found.add_row(escape(row.label), "no plan", *["-"] * (4 if narrow else 5), style="red")
            continue
        limit = "GiB" if narrow else f"of {one.memory_limit_gib:.1f} GiB"
        chance = [] if narrow else [percent(one.out_of_memory_probability)]
        found.add_row(
            escape(row.label), seconds(one.step_time_s), f"{one.tokens_per_second_per_gpu:,.0f}",
            "" if row.throughput is None else f"x{row.throughput:.3f}", money(row.usd_per_million_tokens),
            f"{one.memory_peak_gib:.1f} {limit}", *chance, style="bold" if row is rows[0] else "",
        )  # fmt: skip
    return found


def costs_table(rows: Sequence[Row], tokens: float) -> Table:
    """Totals for a number of tokens; energy is an upper bound where the share of the power limit is 1."""
    headings = ("change", ">GPUs", ">days", ">GPU-hours", ">USD/h", ">USD", ">energy")
    found = table(*headings, title=f"Training on {format_count(tokens)} tokens", least=20)
    for row in rows:
        if row.costs is None or row.rates is None:
            found.add_row(escape(row.label), f"{row.num_gpus:,}", *["-"] * 5, style="red")
            continue
        one, price = row.costs, row.rates.usd_per_gpu_hour
        found.add_row(
            escape(row.label), f"{row.num_gpus:,}", f"{one.days:,.1f}" if one.days >= 1 else f"{one.days:.2g}",
            format_count(one.gpu_hours), "-" if price is None else f"{price:.2f}", money(one.usd), format_energy(one.kwh),
            style="bold" if row is rows[0] else "",
        )  # fmt: skip
    return found


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


def _print_sweep(console: Console, flag: str, members: Sequence[tuple[float, Row]]) -> None:
    """Throughput per GPU over the numbers of a flag, as bars."""
    console.print()
    console.print(Text(f"Tokens/s/GPU over {flag.replace('_', ' ')}", style="italic"))
    rates = [0.0 if one.prediction is None else one.prediction.tokens_per_second_per_gpu for _, one in members]
    best = max(rates) or 1.0
    width = max(min(console.width, 110) - 34, 12)
    for (number, _), rate in zip(members, rates, strict=True):
        bar = "#" * round(width * rate / best)
        text = f"{rate:,.0f}" if rate else "no plan"
        console.print(Text.assemble(f"{number:>12,g}  ", (f"{bar:<{width}}", "cyan"), f"  {text}"))


def print_basis(console: Console, rows: Sequence[Row], with_energy: bool) -> None:
    """Where prices and power come from, one line per kind of hardware, and what is left out; the prices of cards that are
    compared have stood in their table."""
    documents: dict[str, list[str]] = {}
    listed = {row.hardware for row in rows if row.by_price}
    limits: dict[str, list[str]] = {}
    priced = {row.hardware: row.rates for row in reversed(rows) if row.rates is not None and row.fits}
    for name in dict.fromkeys(row.hardware for row in rows if row.hardware in priced and row.fits):
        price, power, share, pue = priced[name].basis
        date = f", {price.date}" if price.date else ""
        text = f"{name}: {price.value} per GPU-hour ({price.source}{date})"
        others = [one.usd_per_hour for one in priced[name].other_prices]
        if others:
            text += f"; other dated prices of the profile: {min(others):g} to {max(others):g} USD"
        if name not in listed:
            console.print(Text(text, style="dim"))
        if with_energy:
            factors = f"share of it {share.value} ({share.source}); PUE {pue.value} ({pue.source})"
            if name in listed:
                limits.setdefault(factors, []).append(f"{name} {power.value.partition(',')[0]}")
            else:
                console.print(Text(f"   {power.value}; {factors}", style="dim"))
            documents.setdefault(power.source, []).append(name)
    for factors, boards in limits.items():
        console.print(Text(f"Power limits of the boards: {', '.join(boards)}; {factors}", style="dim"))
    for source, names in documents.items():
        console.print(Text(f"Power of {', '.join(names)}: {source}", style="dim"))
    if with_energy:
        console.print(Text(f"Left out. {'; '.join(LEFT_OUT)}.", style="dim"))


def sweep_plot(found: WhatIf, path: Path) -> bool:
    """Write the picture as PNG, whole or not at all: left tokens/s of the job with the ideal line, right per GPU.

    Numbers at which nothing fits are crosses on the axis. False where fewer than two points were found. Raises PlannerError
    without matplotlib.
    """
    flag, resolved = next(iter(found.asked.sweeps), ""), found.asked.resolved
    rows = found.sweeps(least=2).get(flag)
    if rows is None:
        return False
    figure = new_figure(10.0, 4.2, dpi=120)
    left, right = figure.subplots(1, 2)
    fit = [(number, row.prediction, row.num_gpus) for number, row in rows if row.prediction is not None]
    numbers, per_gpu = [one[0] for one in fit], [one[1].tokens_per_second_per_gpu for one in fit]
    total = [rate * gpus for rate, (*_, gpus) in zip(per_gpu, fit, strict=True)]
    left.plot(numbers, total, "o-", color="C0", label="best plan")
    if flag == "gpus" and fit:
        left.plot(numbers, [total[0] * n / numbers[0] for n in numbers], ":", color="0.5", label="as the first per GPU")
        left.legend(frameon=False)
    right.plot(numbers, per_gpu, "o-", color="C1")
    missing = [number for number, row in rows if row.prediction is None]
    for axes, heading in ((left, "tokens/s of the job"), (right, "tokens/s per GPU")):
        axes.set_xscale("log", base=2)
        if axes is left and flag == "gpus" and fit:
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(0.0, 1.08 * max(per_gpu if axes is right else total, default=1.0))
        if missing:
            axes.plot(
                missing, [axes.get_ylim()[0]] * len(missing), "x", color="C3", label="nothing fits", clip_on=False
            )
            axes.legend(frameon=False)
        axes.set_xticks([number for number, _ in rows], [f"{number:,g}" for number, _ in rows], rotation=45)
        axes.minorticks_off()
        axes.set(xlabel=flag.replace("_", " "), ylabel=heading)
        axes.grid(alpha=0.25)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(f"{resolved.job.model.name}, {resolved.hardware}, {resolved.trainer}", fontsize=10)
    write_picture(figure, path)
    return True
