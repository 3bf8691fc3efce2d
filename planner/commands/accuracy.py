"""``plan accuracy``: published runs predicted, and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from planner.commands.common import console, progress


@click.command(short_help="Predict published runs and print the errors.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every run and the summary as JSON.")
def accuracy(paths: tuple[Path, ...], as_json: bool) -> None:
    """Predict runs that somebody made and published, and print the errors.

    PATHS are files or directories in the schema of profiles/runs/README.md; without any, all runs that come with
    planner. Errors are predicted / measured - 1.

    \b
    Examples:
      plan accuracy
      plan accuracy my-runs.yaml --json
    """
    from planner import accuracy as runs

    with progress("predicting"):
        report = runs.accuracy(list(paths) or None)
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from planner.report.accuracy import print_accuracy

    print_accuracy(console(), report)
