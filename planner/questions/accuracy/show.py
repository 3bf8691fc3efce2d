"""The accuracy report for the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.questions.accuracy.page import worst_table
from planner.questions.accuracy.page_tables import summary_rows, sweeps_table
from planner.questions.accuracy.prediction import Pair
from planner.terminal.tables import table


def print_accuracy(
    console: Console, report: dict[str, Any], pairs: Sequence[Pair] = (), *, sweeps: bool = False, worst: int = 0
) -> None:
    """Coverage, errors by source and family, memory, ranking: one table each; every sweep, the ``worst`` rows of the pairs."""
    summary = report["summary"]
    found = [*summary_rows(summary)]
    found += [sweeps_table(summary["ranking"])] if sweeps else []
    found += [worst_table(pairs, worst)] if worst else []
    for one in found:
        first, *others = one.headings
        console.print(table(first, *(f"~{heading}" for heading in others), title=one.title, rows=one.rows))
