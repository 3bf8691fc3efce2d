"""Tables of ``plan compare``: the plans, what differs, what each difference does, the parts side by side."""

import string
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT, PART_TEXT
from planner.questions.compare.numbers import Comparison, Effect
from planner.search import SAFE
from planner.terminal.plan_tables import risk
from planner.terminal.tables import percent, seconds, table
from planner.units import format_count

MOSTLY = 0.1
"""A part is named with an effect when it changes by more than this share of all that changes."""


def letter(number: int) -> str:
    """A, B, ... Z, then 27, 28, ...: how tables call a plan."""
    return string.ascii_uppercase[number] if number < len(string.ascii_uppercase) else str(number + 1)


NOTHING = 1e-7
"""Seconds below which a part is the rounding of others."""


def signed_seconds(value: float) -> str:
    """+1.23 s, -45.1 ms, or 0 where nothing changes."""
    if abs(value) < NOTHING:
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
    for number, effects in enumerate(found.ways, 1):
        if effects:
            console.print(effects_table(effects, letter(number)))
    if any(len(effects) > 1 for effects in found.ways):
        console.print(
            "[dim]One change after the other, each on top of those above it: they sum to the whole difference. In another "
            "order each may have another size. Inputs in one row cannot change alone.[/dim]\n"
        )
    console.print(parts_table(found))
    console.print(memory_table(found))


def plans_table(found: Comparison) -> Table:
    """One row for each plan: the results."""
    rows = []
    for number, (one, plan, usable) in enumerate(zip(found.names, found.plans, found.usable_gib, strict=True)):
        said = plan.prediction
        rate, memory = f"{said.tokens_per_second_per_gpu:,.0f}", f"{said.memory_peak_gib:.1f} of {usable:.1f} GiB"
        chance = risk(said.out_of_memory_probability)
        rows.append((letter(number), one, seconds(said.step_time_s), rate, percent(said.mfu), memory, chance))
    return table("", "plan", "~step", "~tokens/s/GPU", "~MFU", "~memory", "~runs out", title="Plans", rows=rows)


def differences_table(found: Comparison) -> Table:
    """Inputs that are not the same, one column for each plan."""
    rows, group = [], ""
    for one in (*found.differences, *found.only_assumed):
        marks = [" *" if assumed and one.group != "assumed" else "" for assumed in one.assumed]
        shown = one.group if one.group not in (group, one.field) else ""
        rows.append((shown, one.field, *(value + mark for value, mark in zip(one.values, marks, strict=True))))
        group = one.group
    return table("", "=input", *map(letter, range(len(found.plans))), title="What differs", rows=rows)


def effects_table(effects: Sequence[Effect], to: str) -> Table:
    """The effect of each change from the first plan to another, and the whole difference."""
    rows = (
        (", ".join(f"{field} {old} to {new}" for field, old, new in one.changes), signed_seconds(one.step_time_s),
         signed_gib(one.memory_peak_gib), mainly(one))
        for one in effects
    )  # fmt: skip
    shown = table("change", ">step", ">memory", "mainly", title=f"From A to {to}", rows=rows)
    step, memory = (sum(getattr(one, name) for one in effects) for name in ("step_time_s", "memory_peak_gib"))
    shown.add_row("all together", signed_seconds(step), signed_gib(memory), "", style="bold")
    return shown


def mainly(one: Effect) -> str:
    """The one or two parts of the step that change most."""
    whole = sum(abs(value) for value in one.parts_s.values())
    parts = sorted(one.parts_s.items(), key=lambda item: -abs(item[1]))[: 2 if whole > NOTHING else 0]
    large = (item for item in parts if abs(item[1]) > MOSTLY * whole)
    return ", ".join(f"{PART_TEXT[part]} {signed_seconds(value)}" for part, value in large)


def parts_table(found: Comparison) -> Table:
    """Step time by part, one column for each plan."""
    said = [plan.prediction for plan in found.plans]
    rows = [(PART_TEXT[part], [one.time_s[part] for one in said]) for part in PARTS]
    rows = [(name, values) for name, values in rows if max(values) > NOTHING]
    cells = [(name, *(seconds(value) if value > NOTHING else "-" for value in values)) for name, values in rows]
    return _side_by_side(found, "Step time by part", cells, ("step", *(seconds(one.step_time_s) for one in said)))


def memory_table(found: Comparison) -> Table:
    """Memory of the worst stage by component, one column for each plan, GiB."""
    said = [plan.prediction for plan in found.plans]
    rows = [(COMPONENT_TEXT[name], *(f"{one.memory_gib[name]:.2f}" for one in said)) for name in COMPONENTS]
    last = ("peak of the device", *(f"{one.memory_peak_gib:.2f}" for one in said))
    return _side_by_side(found, "Memory of the worst stage, GiB", rows, last)


def _side_by_side(found: Comparison, title: str, rows: Sequence[Sequence[str]], last: Sequence[str]) -> Table:
    shown = table("", *(f"~{letter(number)}" for number in range(len(found.plans))), title=title, rows=rows)
    shown.add_row(*last, style="bold")
    return shown
