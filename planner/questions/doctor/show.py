"""Tables of ``plan doctor``: measured against predicted, what would explain the gap, and the checks."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.explain import layout_text
from planner.questions.doctor.numbers import Diagnosis, Explanation, Finding
from planner.questions.doctor.show_traced import print_traced
from planner.terminal.tables import percent, seconds, table
from planner.units import GIB

SHOWN = 8
"""Explanations in the table, largest weight first."""
CHECKED = 3
"""Explanations whose check is printed; more where they are not unlikely."""
COLOURS = {"likely": "bold red", "possible": "yellow", "unlikely": "dim"}


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    """Everything that was found, one measured quantity after the other."""
    plan = found.plan
    title = f"{plan.workload.model.name} on {plan.num_gpus} x {plan.hardware}, trainer {plan.trainer}"
    console.print(Text(title, style="bold"))
    console.print(layout_text(plan.layout))
    if found.traced is not None:
        console.print()
        print_traced(console, found.traced)
    for one in found.findings:
        console.print()
        _print_finding(console, found, one)


def _print_finding(console: Console, found: Diagnosis, one: Finding) -> None:
    low, high = (_amount(one, bound) for bound in one.interval)
    name = "Step time" if one.quantity == "step_time" else f"Memory ({found.memory_kind})"
    gap = f"{abs(one.gap) * 100:.1f} % {'more' if one.gap > 0 else 'less'} than predicted"
    console.print(
        f"[bold]{name}[/bold]: measured {_amount(one, one.measured)}, predicted {_amount(one, one.predicted)} "
        f"(nine of ten runs: {low} to {high}): {gap}"
    )
    if one.quantity == "step_time":
        console.print(f"[dim]The interval is of {found.basis}.[/dim]")
    if one.inside:
        console.print(
            "[green]Inside the interval[/green]: the model is off by as much on other runs, so this shows nothing wrong. "
            "What would explain the difference, none of it proven:"
        )
    else:
        console.print("[bold red]Outside the interval.[/bold red] What would explain it, the most plausible first:")
    if not one.explanations:
        console.print("Nothing that is priced here moves it that way: compare the job with the plan, input by input.")
        return
    console.print(explanations_table(one))
    console.print(Text("How to check", style="italic"))
    for number, explanation in enumerate(one.explanations[:SHOWN], 1):
        if number <= CHECKED or explanation.verdict != "unlikely":
            _print_check(console, number, explanation)
    console.print(
        "[dim]Weight: of one cause at a time, by how well its price meets what was measured, how far published runs differed "
        "in it, and in how many sources it was the cause; the model's own error has "
        f"{percent(one.model_share)}. Several small causes together are not priced.[/dim]"
    )


def explanations_table(one: Finding) -> Table:
    """The mechanisms with the size each would have."""
    rows = (
        (str(number), e.name, e.size, _amount(one, e.would_be), f"{e.explains * 100:.0f} %",
         Text(percent(e.share), style=COLOURS[e.verdict]))
        for number, e in enumerate(one.explanations[:SHOWN], 1)
    )  # fmt: skip
    return table("~#", "mechanism", "size it would have", ">then", ">of the gap", ">weight", rows=rows)


def _print_check(console: Console, number: int, explanation: Explanation) -> None:
    console.print(Text(f"{number}. {explanation.name} ({explanation.verdict})"))
    seen = f"the cause in {explanation.seen} published sources" if explanation.seen > 1 else (
        "the cause in 1 published source" if explanation.seen else "in no published source the cause"
    )  # fmt: skip
    console.print(Padding(Text(f"check: {explanation.check}"), (0, 0, 0, 3)))
    console.print(Padding(Text(f"known: {seen}; {explanation.source}", style="dim"), (0, 0, 0, 3)))


def _amount(one: Finding, value: float) -> str:
    return seconds(value) if one.quantity == "step_time" else f"{value / GIB:.1f} GiB"
