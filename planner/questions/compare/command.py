"""``plan compare``: plan files side by side, differences first, each with its effect."""

from pathlib import Path

import click

from planner.terminal.flags import emit, progress


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="A B [...]", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def compare(files: tuple[Path, ...], as_json: bool) -> None:
    """Plan files side by side: what differs, and what each difference does to the step time and to memory.

    Every other plan is compared with the first. The effect of a difference is the price with that one input changed, on
    top of the changes above it, so that all of them sum to the whole difference. Plans of different models are compared by
    their parts.

    \b
    Examples:
      plan compare today.yaml best.yaml
      plan compare tp8.yaml tp4.yaml tp2.yaml --json
    """
    from planner import api

    with progress("pricing what differs"):
        found = api.compare(*files)
    emit(found, as_json)
