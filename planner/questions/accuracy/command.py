"""``plan accuracy``: published runs predicted, and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from planner.terminal.flags import console, progress


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every run and the summary as JSON.")
@click.option("--sweeps", is_flag=True, help="Also print every sweep of layouts: regret, rank correlation, the pick.")
@click.option("--worst", type=click.IntRange(1, 1000), metavar="N", help="Also print the N worst rows.")
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report as Markdown to this file, and the scatter plot beside it.",
)  # fmt: skip
def accuracy(paths: tuple[Path, ...], as_json: bool, sweeps: bool, worst: int | None, page: Path | None) -> None:
    """Predict runs that somebody made and published, and print the errors.

    PATHS are files or directories in the schema of profiles/runs/README.md; without any, all runs that come with
    planner. Errors are predicted / measured - 1.

    \b
    Examples:
      plan accuracy
      plan accuracy my-runs.yaml --worst 10
      plan accuracy my-runs.yaml --json
      plan accuracy my-runs.yaml --page report.md
    """
    from planner.questions.accuracy.numbers import report_of
    from planner.questions.accuracy.prediction import pairs_of
    from planner.runs import read_runs

    with progress("predicting"):
        pairs = pairs_of(read_runs(list(paths) or None))
        report = report_of(pairs)
    if page is not None:
        from planner.questions.accuracy.page import write_page

        click.echo(f"wrote {page} and {write_page(pairs, report['summary'], page)}", err=True)
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from planner.questions.accuracy.show import print_accuracy, print_sweeps, print_worst

    print_accuracy(console(), report)
    if sweeps:
        print_sweeps(console(), report["summary"])
    if worst:
        print_worst(console(), pairs, worst)
