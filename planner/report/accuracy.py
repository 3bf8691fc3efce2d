"""The accuracy report for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from planner.accuracy import summary_rows


def print_accuracy(console: Console, report: dict[str, Any]) -> None:
    """Coverage, errors by source and family, memory, ranking: one table each."""
    for one in summary_rows(report["summary"]):
        table = Table(title=one.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for number, heading in enumerate(one.headings):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)
