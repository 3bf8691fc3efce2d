"""Deployments on the terminal: a line for each, then the first in parts; and the same as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.costs import Rates
from planner.serving.curve_basis import basis_text, curve_basis
from planner.serving.priced_table import OBJECTIVES
from planner.serving.published import QUALITY
from planner.serving.serve_plan import MEMORY_PARTS, STEP_PARTS, ServePlan, ServePrediction
from planner.serving.serving_answer import Answered
from planner.serving.serving_changes import Change
from planner.serving.serving_question import Question, limits_text, traffic_text
from planner.serving.serving_reasons import PART_TEXT
from planner.serving.serving_rows import DEFINITIONS, ServeRow, plan_layout_text, rates_of_plan, row_data, row_of_plan
from planner.terminal.tables import assumptions_table, percent, plain_table, seconds, table
from planner.terminal.whole_words import most_columns

MEMORY_TEXT = {
    "weights": "weights", "draft": "draft model", "activations": "activations of the largest step", "graphs": "CUDA graphs",
    "reserve": "context, buffers, left free by the engine", "cache": "cache of keys and values",
}  # fmt: skip
SPARE = (">holds", "weights", ">user", ">load")
"""Columns that a narrow terminal does without, in turn."""
LATENCY_TEXT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "e2e": "whole request",
}


def print_answer(console: Console, found: Answered, ways: Sequence[Change] = ()) -> None:
    """The question, the best deployments, why, alternatives, the front, the first in parts, assumptions."""
    question = found.question
    console.print(title(question))
    rates = question.rates
    rows = [row_of_plan(plan, rates, purpose) for plan, purpose in zip(found.best, found.purposes, strict=True)]
    console.print(rows_table(rows, _heading(found), console.width, purposes=len(set(found.purposes)) > 1))
    first = found.best[0] if found.best else None
    for text in _verdict(found):
        console.print(text, soft_wrap=not console.is_terminal)
    if found.pools_note:
        console.print(escape(found.pools_note), soft_wrap=not console.is_terminal)
    if not found.kept:
        console.print(ways_table(ways, console.width) if ways else "No single change of those that were tried serves it.")
    if found.others and found.kept:
        others = [row_of_plan(plan, rates) for plan in found.others]
        what = f", {found.purposes[0]}" if found.purposes[0] in OBJECTIVES else ""
        console.print(rows_table(others, f"In quantised formats{what}", console.width))
        console.print(Text(f"{QUALITY[:1].upper()}{QUALITY[1:]}.", style="yellow"))
    if len(found.front) > 1:
        front = [row_of_plan(one, rates) for one in found.front]
        console.print(rows_table(front, "Front: tokens/s of a user against tokens/s of a GPU", console.width))
    if first is not None:
        console.print(Text("The first in parts", style="italic"))
        print_parts(console, first)
    console.print(assumptions_table(question.assumptions))
    print_notes(console, rates)
    console.print(
        f"Looked at {found.looked_at:,} splits of engines: {found.legal:,} are legal, {found.fitting:,} start; priced "
        f"{found.priced:,} with "
        f"their loads in {seconds(found.seconds)}.",
        style="dim",
    )


def title(question: Question) -> str:
    """The question in one line."""
    task = question.task
    limits = f", {limits_text(task.limits)}" if task.limited else ""
    return (
        f"[bold]{escape(question.model.name)}[/bold] on {question.gpus} x {escape(question.hardware_name)}, "
        f"{traffic_text(task.traffic, task.loaded)}{limits}"
    )


def _heading(found: Answered) -> str:
    if not found.fit:
        return "Nothing starts; closest"
    late = not found.question.task.limited
    return "Best deployments" if found.kept else f"Nothing {'keeps up' if late else 'keeps the limits'}; closest"


def _verdict(found: Answered) -> list[str]:
    """Why the first of every purpose is the first."""
    seen: set[str] = set()
    lines = []
    for plan, purpose in zip(found.best, found.purposes, strict=True):
        if purpose not in seen and plan.why:
            lines.append(f"[bold]{escape(purpose[:1].upper() + purpose[1:])}:[/bold] {escape(plan.why)}")
        seen.add(purpose)
    return lines


def rows_table(
    rows: Sequence[ServeRow], heading: str, width: int, *, purposes: bool = False, without: Sequence[str] = ()
) -> Table:
    """One line for each deployment. In a narrow terminal the columns stand nearer to each other, and those that can be missed
    are left out."""
    figure = rows[0].figure if rows else "mean"
    mark = "" if figure == "mean" else f" {figure}"
    cells = {
        "=for": [row.purpose for row in rows] if purposes else [],
        "=engine": [row.engine for row in rows],
        "layout": [row.layout for row in rows],
        "weights": [row.precision for row in rows],
        ">load": [row.load for row in rows],
        ">tok/s/GPU": [number(row.tokens_per_second_per_gpu) for row in rows],
        ">user": [number(row.tokens_per_second_per_user) for row in rows],
        f">TTFT{mark}": [time(row.ttft_s) for row in rows],
        f">TPOT{mark}": [time(row.tpot_s) for row in rows],
        ">holds": [f"{row.holds:,.0f}" for row in rows],
        ">$/M out": [money(row.usd_per_million_output) for row in rows],
    }
    if len({row.gpus for row in rows}) > 1:
        cells = {"=for": cells["=for"], ">GPUs": [str(row.gpus) for row in rows], **cells}
    kept = {name: column for name, column in cells.items() if column and name not in without}
    spare, gap = [name for name in SPARE if name in kept and (name != "weights" or len(set(kept[name])) == 1)], 1
    while (found := _lines(rows, kept, heading, gap)) and most_columns(found) > width and (gap or spare):
        if gap:
            gap = 0
        else:
            kept.pop(spare.pop(0))
    return found


def _lines(rows: Sequence[ServeRow], columns: Mapping[str, Sequence[str]], heading: str, gap: int) -> Table:
    found = table(*columns, title=heading, least=min(22, max((len(row.layout) for row in rows), default=6)))
    found.padding = (0, gap, 0, 0)
    for number_, row in enumerate(zip(*columns.values(), strict=True)):
        found.add_row(*map(escape, row), style="bold" if number_ == 0 else "" if rows[number_].fits else "red")
    return found


def number(value: float | None) -> str:
    """A rate: 1,234, 45.6."""
    if not value:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def time(value: float | None) -> str:
    """A latency; '-' where the queue grows for ever."""
    return "-" if value is None else seconds(value)


def money(value: float | None) -> str:
    """Dollars of a million tokens."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_parts(console: Console, plan: ServePlan) -> None:
    """Latencies, the decode step and memory of one plan."""
    found = plan.prediction
    assert found is not None
    if not found.fits:  # what does not start has no times
        console.print(memory_table(plan, found))
        return
    console.print(latency_table(found))
    if found.ranges and (ends := found.ranges.get("output_tokens_per_second")):
        console.print(
            f"Output tokens/s: {number(found.output_tokens_per_second)}, {number(ends[0])} to {number(ends[1])} in nine of ten "
            f"runs, by {found.ranges_basis}.",
            soft_wrap=not console.is_terminal,
        )
    console.print(step_table(found))
    console.print(memory_table(plan, found))


def latency_table(found: ServePrediction) -> Table:
    """Mean and percentiles of every latency, with the interval of the mean where there is one."""
    headings = [">mean", ">p50", ">p90", ">p99", *([">nine of ten runs"] if found.ranges else [])]
    shown = table("latency", *headings)
    for name, text in LATENCY_TEXT.items():
        cells = [time(value) for value in getattr(found, f"{name}_s").values()]
        if found.ranges:
            low, high = found.ranges.get(name, (0.0, 0.0))
            cells.append(f"{seconds(low)} to {seconds(high)}" if high else "-")
        shown.add_row(text, *cells)
    return shown


def step_table(found: ServePrediction) -> Table:
    """The mean decode step by part; the parts add up."""
    total = sum(found.step_s.values())
    shown = plain_table("Decode step", "left", "right", "right")
    for name in STEP_PARTS:
        if found.step_s[name] > 0:
            shown.add_row(PART_TEXT[name], seconds(found.step_s[name]), percent(found.step_s[name] / total))
    shown.add_row("step", seconds(total), "", style="bold")
    return shown


def memory_table(plan: ServePlan, found: ServePrediction) -> Table:
    """Memory of the fullest GPU by part, and what the cache holds."""
    shown = plain_table("Memory of the fullest GPU", "left", "right", "right")
    for name in MEMORY_PARTS:
        if found.memory_gib[name] > 0:
            shown.add_row(
                MEMORY_TEXT[name],
                f"{found.memory_gib[name]:.2f} GiB",
                percent(found.memory_gib[name] / found.memory_limit_gib),
            )
    shown.add_row("together", f"{found.memory_peak_gib:.2f} GiB", f"of {found.memory_limit_gib:.2f} GiB", style="bold")
    shown.add_row("cache of one engine", f"{found.cache_tokens:,.0f} tokens", "")
    shown.add_row("requests of this length that run at once", f"{found.max_concurrency:,.0f}", "")
    if found.fits and found.preemption > 0.0005:
        shown.add_row("chance that a step finds it full", percent(found.preemption), "")
    return shown


def print_notes(console: Console, rates: Rates) -> None:
    """Definitions, and where price and power come from."""
    for text in DEFINITIONS:
        console.print(Text(text, style="dim"), soft_wrap=not console.is_terminal)
    for one in rates.basis[:2]:
        date = f", {one.date}" if one.date else ""
        console.print(
            Text(f"{one.what}: {one.value} ({one.source}{date})", style="dim"), soft_wrap=not console.is_terminal
        )


def print_plan(console: Console, plan: ServePlan, price: float | None = None) -> None:
    """One deployment with all its parts."""
    rates = rates_of_plan(plan, price)
    row = row_of_plan(plan, rates)
    limits = limits_text(plan.limits)
    console.print(
        f"[bold]{escape(plan.model.name)}[/bold] on {plan.gpus} x {escape(plan.hardware_text)}, {escape(row.engine)}, "
        f"{escape(plan_layout_text(plan))}, {escape(row.precision)}: "
        f"{traffic_text(plan.traffic, True)}{', ' + limits if limits else ''}"
    )
    console.print(rows_table([row], "This deployment", console.width))
    if plan.why:
        console.print(escape(plan.why))
    if row.fits:
        console.print(rates_line(row))
    print_parts(console, plan)
    console.print(escape(basis_text(curve_basis(plan))), soft_wrap=not console.is_terminal)
    if plan.assumptions:
        console.print(assumptions_table(plan.assumptions))
    print_notes(console, rates)


def ways_table(ways: Sequence[Change], width: int) -> Table:
    """Changes that serve, each with its best plan and its price; a format that changes is the change."""
    rows = [row_of_plan(one.plan, one.question.rates, one.change) for one in ways if one.plan is not None]
    return rows_table(rows, "What would serve", width, purposes=True, without=("weights", ">user"))


def rates_line(row: ServeRow) -> str:
    """Rates of the whole, dollars and energy in one line."""
    total = "" if row.usd_per_million_total is None else f", ${money(row.usd_per_million_total)} per million tokens in and out"
    output, kwh = row.usd_per_million_output, row.kwh_per_million_output
    out = "" if output is None else f"; ${money(output)} per million output tokens{total}"
    energy = "" if kwh is None else f", at most {number(kwh)} kWh per million output tokens"
    return f"{row.requests_per_second:.3g} requests/s, {number(row.tokens_per_second)} output tokens/s{out}{energy}."


# ------------------------------------------------------------------------------------------------ plain data


def plan_data(plan: ServePlan, price: float | None = None) -> dict[str, Any]:
    """One plan: the line of the table, where its curves come from, and the plan as its file holds it."""
    return {
        "row": row_data(row_of_plan(plan, rates_of_plan(plan, price))),
        "curves": curve_basis(plan),
        "plan": plan.to_dict(),
    }


def answer_data(found: Answered, ways: Sequence[Change] = ()) -> dict[str, Any]:
    """Everything that the tables show."""
    question, rates = found.question, found.question.rates
    task = question.task

    def lines(plans: Sequence[ServePlan], purposes: Sequence[str] | None = None) -> list[dict[str, Any]]:
        names = purposes or [""] * len(plans)
        return [
            {"row": row_data(row_of_plan(plan, rates, name)), "plan": plan.to_dict()}
            for plan, name in zip(plans, names, strict=True)
        ]

    return {
        "model": question.model.name, "hardware": question.hardware_name, "gpus": question.gpus,
        "disaggregated": found.pools_note, "traffic": traffic_text(task.traffic, task.loaded), "limits": limits_text(task.limits),
        "starts": found.fit,
        "kept": found.kept,
        "assumptions": [vars(one) for one in question.assumptions], "plans": lines(found.best, found.purposes),
        "quantised": lines(found.others), "front": [row_data(row_of_plan(one, rates)) for one in found.front],
        "would_serve": [change_data(one) for one in ways], "price": vars(rates.basis[0]), "power": vars(rates.basis[1]),
        "definitions": list(DEFINITIONS),
        "searched": {
            "splits": found.looked_at, "legal": found.legal, "start": found.fitting, "priced": found.priced,
            "seconds": found.seconds,
        },
    }  # fmt: skip


def change_data(one: Change) -> dict[str, Any]:
    """A change with its plan."""
    row = None if one.plan is None else row_data(row_of_plan(one.plan, one.question.rates, one.change))
    return {"change": one.change, "flag": one.flag, "kept": one.kept, "why_not": one.why_not, "row": row}
