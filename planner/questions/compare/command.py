"""``plan compare``: plan files side by side, differences first, each with its effect."""

from __future__ import annotations

import json
from pathlib import Path

import click

from planner.terminal.flags import console, progress


@click.command(short_help="Plan files side by side: what differs, and what each difference does.")
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
    from planner.plan_file import load_plan
    from planner.questions.compare.numbers import compare as compare_plans
    from planner.questions.compare.show import print_comparison

    with progress("pricing what differs"):
        found = compare_plans([load_plan(file) for file in files], [str(file) for file in files])
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_comparison(console(), found)
