"""Tables and bars for the terminal: the same numbers that --json prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.cost.estimate import HIDDEN, PARTS
from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT, PART_TEXT, degrees_text, layout_text, memory_options
from planner.plan_file import Assumption, Plan, Prediction
from planner.search import SAFE

if TYPE_CHECKING:
    from planner.advice import Advice

COMPONENT_COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "bright_black", "red", "white")
WIDE = 110
"""Columns from which the table of plans is readable."""
COMPONENT_MARKS = "WGOAwfcx"
"""Letters of the memory bar, so that it reads without colours too."""


def seconds(value: float) -> str:
    """A duration for a table: 128 s, 5.32 s, 45.1 ms."""
    if value >= 1:
        return f"{value:.4g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms"


def percent(value: float) -> str:
    """A share: 46.4 %, 0.3 %, and < 0.1 % for what is not zero."""
    if value != 0 and abs(value) < 0.001:
        return "< 0.1 %"
    return f"{100 * value:.1f} %"


def assumptions_table(assumptions: tuple[Assumption, ...]) -> Table:
    """What was assumed, with the flag that changes it."""
    table = Table(title="Assumed", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("what", "value", "why"):
        table.add_column(heading, overflow="fold")
    table.add_column("change with", no_wrap=True)  # a flag in two halves cannot be copied
    for one in assumptions:
        table.add_row(one.what, escape(one.value), escape(one.why), escape(one.flag))
    return table


def plans_table(plans: list[Plan], fit: bool) -> Table:
    """The best plans, one row each."""
    title = "Best plans" if fit else "Closest attempts (none fits)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("layout", overflow="fold", min_width=16)
    table.add_column("to save memory", overflow="fold")
    for heading in ("step", "tokens/s/GPU", "MFU", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exposed comm.", overflow="fold")
    table.add_column("memory of worst stage", justify="right", overflow="fold")
    table.add_column("runs out", justify="right", no_wrap=True)
    for number, plan in enumerate(plans, 1):
        one = plan.prediction
        table.add_row(
            str(number), degrees_text(plan.layout), ", ".join(memory_options(plan.layout)) or "-",
            seconds(one.step_time_s), f"{one.tokens_per_second_per_gpu:,.0f}",
            percent(one.mfu), percent(one.bubble_share), exposed_text(one),
            f"{one.memory_peak_gib:.1f} of {one.memory_limit_gib:.1f} GiB",
            Text(percent(one.out_of_memory_probability), style="green" if one.out_of_memory_probability <= SAFE else "red"),
            style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def print_plans(console: Console, plans: list[Plan], fit: bool) -> None:
    """The plans as a table where it is wide enough, else as a few lines each."""
    if console.width >= WIDE:
        console.print(plans_table(plans, fit))
        return
    console.print("Best plans" if fit else "Closest attempts (none fits)", style="italic")
    for number, plan in enumerate(plans, 1):
        one = plan.prediction
        console.print(Text(f"{number}. {layout_text(plan.layout)}", style="bold" if number == 1 else ""))
        console.print(
            f"   step {seconds(one.step_time_s)}, {one.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {percent(one.mfu)}, "
            f"bubble {percent(one.bubble_share)}; exposed: {exposed_text(one)}; memory {one.memory_peak_gib:.1f} of "
            f"{one.memory_limit_gib:.1f} GiB, runs out {percent(one.out_of_memory_probability)}"
        )
    console.print()


def exposed_text(one: Prediction) -> str:
    """Exposed communication by kind, what is above 0.05 % of the step."""
    kinds = [
        (value / one.step_time_s, name) for name, value in one.exposed_s.items() if value > 0.0005 * one.step_time_s
    ]
    return ", ".join(f"{name} {percent(share)}" for share, name in sorted(kinds, reverse=True)) or "none"


def memory_bar(one: Prediction, width: int) -> Text:
    """One line for the card's memory: each component by its letter, free memory as dots; '|' is the card's limit where
    the peak is beyond it."""
    inner = max(width - 2, 10)
    whole = max(one.memory_limit_gib, one.memory_peak_gib)
    cells: list[tuple[str, str]] = []
    used = 0.0
    for mark, colour, name in zip(COMPONENT_MARKS, COMPONENT_COLOURS, COMPONENTS, strict=True):
        used += one.memory_gib[name]
        cells += [(mark, colour)] * (round(inner * used / whole) - len(cells))
    cells += [(".", "bright_black")] * (inner - len(cells))
    if one.memory_peak_gib > one.memory_limit_gib:
        cells[min(round(inner * one.memory_limit_gib / whole), inner - 1)] = ("|", "bold red")
    text = Text("[")
    for mark, colour in cells:
        text.append(mark, style=colour)
    return text + Text("]")


def memory_table(one: Prediction) -> Table:
    """Memory by component, the letters of the bar beside it."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    for mark, colour, name in zip(COMPONENT_MARKS, COMPONENT_COLOURS, COMPONENTS, strict=True):
        share = one.memory_gib[name] / one.memory_peak_gib
        table.add_row(Text(mark, style=colour), COMPONENT_TEXT[name], f"{one.memory_gib[name]:.2f} GiB", percent(share))
    table.add_row("", "peak of the device", f"{one.memory_peak_gib:.2f} GiB", f"on the {one.memory_stage} stage")
    table.add_row(
        "",
        "usable, as the driver reports",
        f"{one.memory_limit_gib:.2f} GiB",
        percent(one.memory_peak_gib / one.memory_limit_gib),
    )
    if one.host_memory_gib_per_gpu > 0:
        table.add_row("", "host memory for offloaded states", f"{one.host_memory_gib_per_gpu:.2f} GiB", "per GPU")
    return table


def time_table(one: Prediction) -> Table:
    """Step time by part, and the communication hidden behind computation."""
    table = Table(title="Step time", box=box.SIMPLE, show_header=False, title_justify="left", pad_edge=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    for part in PARTS:
        if one.time_s[part] > 0:
            table.add_row(PART_TEXT[part], seconds(one.time_s[part]), percent(one.time_s[part] / one.step_time_s))
    table.add_row("step", seconds(one.step_time_s), "100.0 %", style="bold")
    for kind in HIDDEN:
        if one.hidden_s[kind] > 0:
            table.add_row(
                f"hidden: {kind}",
                seconds(one.hidden_s[kind]),
                percent(one.hidden_s[kind] / one.step_time_s),
                style="dim",
            )
    return table


def advice_table(advice: list[Advice]) -> Table:
    """Changes that make the job fit."""
    table = Table(title="What would fit", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("change", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("USD per 1M tokens", justify="right")
    table.add_column("best layout", overflow="fold")
    for one in advice:
        price = "-" if one.usd_per_million_tokens is None else f"{one.usd_per_million_tokens:.3g}"
        table.add_row(one.change, seconds(one.step_time_s), f"{one.tokens_per_second:,.0f}", price, one.layout)
    return table


def print_prediction(console: Console, plan: Plan) -> None:
    """The whole breakdown of one layout."""
    one = plan.prediction
    low, high = one.step_time_range_s
    console.print(Text(layout_text(plan.layout), style="bold"))
    console.print(
        f"step {seconds(one.step_time_s)} (nine of ten runs: {seconds(low)} to {seconds(high)}), "
        f"{one.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {percent(one.mfu)}, bubble {percent(one.bubble_share)}"
    )
    console.print(time_table(one))
    print_memory(console, one)


def print_memory(console: Console, one: Prediction) -> None:
    """Memory bar and table."""
    console.print(Text("Memory of the worst stage", style="italic"))
    console.print(memory_bar(one, min(console.width, 100)))
    console.print(memory_table(one))
    low, high = one.memory_peak_range_gib
    chance = (
        f"peak {one.memory_peak_gib:.1f} GiB, nine of ten runs {low:.1f} to {high:.1f} GiB; "
        f"chance of running out of memory: {percent(one.out_of_memory_probability)}"
    )
    if one.memory_peak_gib > one.memory_limit_gib:
        over = one.memory_peak_gib - one.memory_limit_gib
        console.print(
            f"[bold red]does not fit:[/bold red] the peak is {over:.1f} GiB above what the card has; {chance}"
        )
    elif one.out_of_memory_probability > SAFE:
        console.print(
            f"[bold yellow]may not fit:[/bold yellow] {chance}, above the {percent(SAFE)} that counts as safe"
        )
    else:
        console.print(chance)
