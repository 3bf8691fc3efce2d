"""Several deployments compared on the terminal, and as plain data: splits, changes, plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from planner.questions.serve.show import change_data, money, number, print_notes, rows_table, time, title
from planner.serving.compared_splits import Compared
from planner.serving.serve_plan import ServePlan
from planner.serving.serving_changes import Change
from planner.serving.serving_question import Question
from planner.serving.serving_rows import rates_of_plan, row_data, row_of_plan
from planner.terminal.tables import assumptions_table, fitted, percent, table

HEADINGS = (
    ">GPUs", "=engine", "layout", ">load", ">tok/s", ">tok/s/GPU", ">user", ">TTFT", ">TPOT", ">$/h", ">$/M out",
)  # fmt: skip
"""What stands beside a change, as headings of ``table``."""
SPARE = (">tok/s/GPU", ">user", ">load", ">TTFT", ">$/h")
"""Columns that a narrow terminal does without, in turn."""


def printed(console: Console, found: ComparedSplits | Changed | ComparedPlans) -> None:
    """Print one of them."""
    found.show(console)


class ComparedSplits:
    """Splits of one question, compared."""

    def __init__(self, question: Question, rows: Sequence[Compared]) -> None:
        self.question, self.rows = question, list(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        rates = self.question.rates
        return {
            "model": self.question.model.name, "hardware": self.question.hardware_name, "gpus": self.question.gpus,
            "splits": [
                {"layout": one.text, "runs": one.plan is not None and not one.why_not, "why_not": one.why_not,
                 "row": None if one.plan is None else row_data(row_of_plan(one.plan, rates))}
                for one in self.rows
            ],
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """One line for each split that runs, then what cannot run and why."""
        question = self.question
        console.print(title(question))
        headings = (
            "=layout", ">load", ">tok/s", ">tok/s/GPU", ">user", ">TTFT", ">TPOT", ">weights, GiB", ">cache", ">comm.", ">$/M out",
        )  # fmt: skip
        shown = table(*headings, title=f"Splits, {question.engines[0].name} {question.engines[0].version}")
        shown.padding = (0, 1, 0, 0)
        for one in self.rows:
            if one.plan is None or one.why_not:
                continue
            row = row_of_plan(one.plan, question.rates)
            shown.add_row(
                escape(one.text), row.load, number(row.tokens_per_second), number(row.tokens_per_second_per_gpu),
                number(row.tokens_per_second_per_user), time(row.ttft_s), time(row.tpot_s),
                f"{_memory(one, 'weights'):.1f}", f"{_memory(one, 'cache'):.1f}",
                percent(row.communication_share), money(row.usd_per_million_output), style="" if shown.row_count else "bold",
            )  # fmt: skip
        console.print(shown)
        for one in self.rows:
            if one.why_not:
                console.print(f"[red]{escape(one.text)}[/red]: {escape(one.why_not)}")
        if not question.task.loaded:
            console.print(
                Text(
                    "Each at the load at which it answers most; --concurrency or --rate gives all the same.",
                    style="dim",
                )
            )
        console.print(assumptions_table(question.assumptions))
        print_notes(console, question.rates)


def _memory(one: Compared, part: str) -> float:
    """GiB of one part of the memory of the fullest GPU."""
    return one.plan.prediction.memory_gib[part] if one.plan and one.plan.prediction else 0.0


class Changed:
    """Changes of one question, each with its best plan."""

    def __init__(self, rows: Sequence[Change], complete: bool = True) -> None:
        self.rows, self.complete = list(rows), complete

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        return {"complete": self.complete, "changes": [change_data(one) for one in self.rows]}

    def show(self, console: Console) -> None:
        """One line for each change, with its price; then why some have none."""
        if not self.rows:
            console.print("Nothing was asked.")
            return
        console.print(title(self.rows[0].question))
        lines = [_change_line(one) for one in self.rows]
        columns = {heading: [line[heading] for line in lines] for heading in lines[0]}
        shown = fitted(columns, SPARE, console.width, "Best deployment each", least=12)
        console.print(shown)
        for one in self.rows:
            if one.why_not:
                console.print(f"[red]{escape(one.change)}[/red]: {escape(one.why_not)}")
        for text in dict.fromkeys(f"{one.question.hardware_name}: {_price(one.question)}" for one in self.rows):
            console.print(Text(text, style="dim"))


def _change_line(one: Change) -> dict[str, Text]:
    """Cells of a change by heading: bold where nothing changed, red where the limits are not kept."""
    row, rates = None if one.plan is None else row_of_plan(one.plan, one.question.rates), one.question.rates
    cells = {"change": one.change} | dict.fromkeys(HEADINGS, "-")
    if row is not None:
        usd = None if rates.usd_per_gpu_hour is None else rates.usd_per_gpu_hour * row.gpus
        values = (
            str(row.gpus), row.engine, row.layout, row.load, number(row.tokens_per_second),
            number(row.tokens_per_second_per_gpu), number(row.tokens_per_second_per_user), time(row.ttft_s), time(row.tpot_s),
            money(usd), money(row.usd_per_million_output),
        )  # fmt: skip
        cells = {"change": one.change} | dict(zip(HEADINGS, values, strict=True))
    style = "red" if not one.kept else ""
    return {heading: Text(cell, style=style) for heading, cell in cells.items()}


def _price(question: Question) -> str:
    basis = question.rates.basis[0]
    return f"{basis.value} per GPU-hour ({basis.source}{', ' + basis.date if basis.date else ''})"


class ComparedPlans:
    """Plans of files, compared."""

    def __init__(self, plans: Sequence[ServePlan]) -> None:
        self.plans = list(plans)
        self.rows = [
            row_of_plan(one, rates_of_plan(one), f"plan {number}")
            for number, one in enumerate(plans, 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        return {
            "plans": [
                {"row": row_data(row), "plan": plan.to_dict()} for row, plan in zip(self.rows, self.plans, strict=True)
            ]
        }

    def show(self, console: Console) -> None:
        """One line for each plan, and what differs in what they are about."""
        console.print(rows_table(self.rows, "Plans", console.width, purposes=True))
        for name in ("model", "hardware", "gpus", "traffic", "limits"):
            said = [_said(plan, name) for plan in self.plans]
            if len(set(said)) > 1:
                console.print(
                    escape(f"{name} differs: {'; '.join(f'plan {at} {text}' for at, text in enumerate(said, 1))}")
                )


def _said(plan: ServePlan, name: str) -> str:
    from planner.serving.serving_question import limits_text, traffic_text

    if name == "traffic":
        return traffic_text(plan.traffic, True)
    value = getattr(plan, name)
    return limits_text(value) or "none" if name == "limits" else str(getattr(value, "name", value))
