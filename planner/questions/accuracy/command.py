"""``plan accuracy``: published runs predicted, and the errors."""

from pathlib import Path

import click

from planner.terminal.flags import emit, progress


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every run and the summary as JSON.")
@click.option("--sweeps", is_flag=True, help="Also print every sweep of layouts: regret, rank correlation, the pick.")
@click.option("--worst", type=click.IntRange(1, 1000), metavar="N", help="Also print the N worst rows.")
@click.option("--generic", is_flag=True, help="Price each framework as the newest version of its trainer, without recipes.")
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report as Markdown to this file, and the scatter plot next to it.",
)  # fmt: skip
def accuracy(
    paths: tuple[Path, ...], as_json: bool, sweeps: bool, worst: int | None, generic: bool, page: Path | None
) -> None:
    """Predict runs that somebody made and published, training and serving, and print the errors.

    PATHS are files or directories in the schema of profiles/runs/README.md, or of profiles/serving-runs/README.md for serving (a
    file with a key ``client`` or ``engine``); without any, all runs that come with
    planner. Errors are predicted / measured - 1. --generic shows what a user gets who names the framework alone: neither its
    version, nor its published recipes, nor what a source says of its own cluster is used.

    \b
    Examples:
      plan accuracy
      plan accuracy --generic
      plan accuracy my-runs.yaml --worst 10
      plan accuracy my-runs.yaml --json
      plan accuracy my-serving-runs.yaml --worst 10
      plan accuracy my-runs.yaml --page report.md
    """
    from planner import api

    with progress("predicting"):
        answer = api.accuracy(paths or None, sweeps=sweeps, worst=worst or 0, generic=generic)
    if page is not None:
        click.echo(f"wrote {page} and {answer.write_page(page)}", err=True)
    emit(answer, as_json, indent=1)
