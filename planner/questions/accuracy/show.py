"""The accuracy report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from planner.questions.accuracy import page_tables
from planner.questions.accuracy.page import worst_table
from planner.questions.accuracy.prediction import Pair


def print_accuracy(console: Console, report: dict[str, Any]) -> None:
    """Coverage, errors by source and family, memory, ranking: one table each."""
    for one in page_tables.summary_rows(report["summary"]):
        _print(console, one)


def print_sweeps(console: Console, summary: dict[str, Any]) -> None:
    """Every sweep with its regret."""
    _print(console, page_tables.sweeps_table(summary["ranking"]))


def print_worst(console: Console, pairs: Sequence[Pair], most: int) -> None:
    """The rows with the largest errors."""
    _print(console, worst_table(pairs, most))


def _print(console: Console, one: page_tables.Table) -> None:
    table = Table(title=one.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, heading in enumerate(one.headings):
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for row in one.rows:
        table.add_row(*row)
    console.print(table)
