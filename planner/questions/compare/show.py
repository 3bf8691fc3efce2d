"""Tables of ``plan compare``: the plans, what differs, what each difference does, the parts side by side."""

from __future__ import annotations

import string

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT, PART_TEXT
from planner.questions.compare.numbers import Comparison, Effect, Way
from planner.search import SAFE
from planner.terminal.tables import percent, seconds
from planner.units import format_count

MOSTLY = 0.1
"""A part is named beside an effect when it changes by more than this share of all that changes."""


def letter(number: int) -> str:
    """A, B, ... Z, then 27, 28, ...: how tables call a plan."""
    return string.ascii_uppercase[number] if number < len(string.ascii_uppercase) else str(number + 1)


def signed_seconds(value: float) -> str:
    """+1.23 s, -45.1 ms, or 0 where nothing changes."""
    if abs(value) < 1e-7:
        return "0"
    return ("+" if value > 0 else "-") + seconds(abs(value))


def signed_gib(value: float) -> str:
    """+1.23 GiB, or 0 where nothing changes."""
    return "0" if abs(value) < 0.005 else f"{value:+.2f} GiB"


def print_comparison(console: Console, found: Comparison) -> None:
    """All tables."""
    console.print(plans_table(found))
    risky = [letter(n) for n, plan in enumerate(found.plans) if plan.prediction.out_of_memory_probability > SAFE]
    if risky:
        console.print(f"[bold red]May not fit:[/bold red] {', '.join(risky)} (chance above {percent(SAFE)}).\n")
    tokens = [plan.workload.tokens for plan in found.plans]
    if len(set(tokens)) > 1:
        each = ", ".join(f"{letter(number)} {format_count(value)}" for number, value in enumerate(tokens))
        console.print(f"Tokens per step differ ({each}): steps of different length, compare tokens/s/GPU.\n")
    if found.differences or found.only_assumed:
        console.print(differences_table(found))
        if any(any(one.assumed) for one in found.differences):
            console.print("[dim]* assumed by the plan, not said by its user[/dim]\n")
    else:
        console.print("The plans are the same: no input differs.\n")
    if not found.same_model:
        console.print("The models differ, so no single input has an effect of its own; compare the parts.\n")
    for way in found.ways:
        if way.effects:
            console.print(effects_table(found, way))
    if any(len(way.effects) > 1 for way in found.ways):
        console.print(
            "[dim]One change after the other, each on top of those above it: they sum to the whole difference. In another "
            "order each may have another size. Inputs in one row cannot change alone.[/dim]\n"
        )
    console.print(parts_table(found))
    console.print(memory_table(found))


def plans_table(found: Comparison) -> Table:
    """One row for each plan: the results."""
    table = Table(title="Plans", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("plan", overflow="fold")
    for heading in ("step", "tokens/s/GPU", "MFU", "memory", "runs out"):
        table.add_column(heading, justify="right", overflow="fold")
    for number, (name, plan, usable) in enumerate(zip(found.names, found.plans, found.usable_gib, strict=True)):
        one = plan.prediction
        table.add_row(
            letter(number), escape(name), seconds(one.step_time_s), f"{one.tokens_per_second_per_gpu:,.0f}", percent(one.mfu),
            f"{one.memory_peak_gib:.1f} of {usable:.1f} GiB",
            Text(percent(one.out_of_memory_probability), style="green" if one.out_of_memory_probability <= SAFE else "red"),
        )  # fmt: skip
    return table


def differences_table(found: Comparison) -> Table:
    """Inputs that are not the same, one column for each plan."""
    table = Table(title="What differs", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("input", no_wrap=True)
    for number in range(len(found.plans)):
        table.add_column(letter(number), overflow="fold")
    group = ""
    for one in (*found.differences, *found.only_assumed):
        values = [
            value + (" *" if assumed and one.group != "assumed" else "")
            for value, assumed in zip(one.values, one.assumed, strict=True)
        ]
        shown = one.group if one.group not in (group, one.field) else ""
        table.add_row(shown, one.field, *(escape(value) for value in values))
        group = one.group
    return table


def effects_table(found: Comparison, way: Way) -> Table:
    """What each change from the first plan to another does, and the whole difference."""
    title = f"From A to {letter(way.to)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("change", overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("mainly", overflow="fold")
    for one in way.effects:
        text = ", ".join(f"{field} {old} to {new}" for field, old, new in one.changes)
        table.add_row(escape(text), signed_seconds(one.step_time_s), signed_gib(one.memory_peak_gib), mainly(one))
    step, memory = (sum(getattr(one, name) for one in way.effects) for name in ("step_time_s", "memory_peak_gib"))
    table.add_row("all together", signed_seconds(step), signed_gib(memory), "", style="bold")
    return table


def mainly(one: Effect) -> str:
    """The one or two parts of the step that change most."""
    whole = sum(abs(value) for value in one.parts_s.values())
    parts = sorted(one.parts_s.items(), key=lambda item: -abs(item[1]))[:2]
    return ", ".join(
        f"{PART_TEXT[part]} {signed_seconds(value)}"
        for part, value in parts
        if whole > 1e-7 and abs(value) > MOSTLY * whole
    )


def parts_table(found: Comparison) -> Table:
    """Step time by part, one column for each plan."""
    table = Table(title="Step time by part", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("", overflow="fold")
    for number in range(len(found.plans)):
        table.add_column(letter(number), justify="right")
    for part in PARTS:
        values = [plan.prediction.time_s[part] for plan in found.plans]
        if any(value > 0 for value in values):
            table.add_row(PART_TEXT[part], *(seconds(value) if value > 0 else "-" for value in values))
    table.add_row("step", *(seconds(plan.prediction.step_time_s) for plan in found.plans), style="bold")
    return table


def memory_table(found: Comparison) -> Table:
    """Memory of the worst stage by component, one column for each plan, GiB."""
    table = Table(title="Memory of the worst stage, GiB", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("", overflow="fold")
    for number in range(len(found.plans)):
        table.add_column(letter(number), justify="right")
    for name in COMPONENTS:
        table.add_row(COMPONENT_TEXT[name], *(f"{plan.prediction.memory_gib[name]:.2f}" for plan in found.plans))
    table.add_row(
        "peak of the device", *(f"{plan.prediction.memory_peak_gib:.2f}" for plan in found.plans), style="bold"
    )
    return table
