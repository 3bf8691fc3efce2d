"""The accuracy report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from planner.questions.accuracy.page import worst_table
from planner.questions.accuracy.prediction import Pair
from planner.questions.accuracy.tables import summary_rows, sweeps_table


def print_accuracy(
    console: Console, report: dict[str, Any], pairs: Sequence[Pair] = (), *, sweeps: bool = False, worst: int = 0
) -> None:
    """Coverage, errors by source and family, memory, ranking: one table each; every sweep, the ``worst`` rows of the pairs."""
    summary = report["summary"]
    found = [*summary_rows(summary)]
    found += [sweeps_table(summary["ranking"])] if sweeps else []
    found += [worst_table(pairs, worst)] if worst else []
    for one in found:
        table = Table(title=one.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for number, heading in enumerate(one.headings):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)
