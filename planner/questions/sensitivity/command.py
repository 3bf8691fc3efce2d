"""``plan sensitivity``: the measured numbers that the choice of a plan depends on, and the plans that count as equal."""

import sys
from pathlib import Path
from typing import Any

import click

from planner.terminal.flags import emit, job_options, layout_options, progress

PINS = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size", "zero", "schedule", "recompute")
INTERRUPTED = 130


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@job_options(required=False)
@layout_options(PINS)
@click.option(
    "--reach", type=float, default=2.0, show_default=True, metavar="X", help="Look from 1/X to X times each number."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def sensitivity(file: Path | None, reach: float, as_json: bool, **flags: Any) -> None:
    """Which measured number the choice hangs on: scale each, search again, find where another plan wins.

    FILE is a plan written by --output; without one, the flags of the job. The choice is the best plan of that job by the
    profile as it is; flags of a layout (--tp, ...) pin it. For each number of the hardware profile: the factor at which
    another plan wins, and what today's choice then costs over the best, if the number is off by as much as --reach. The
    number to measure first stands first. Plans whose predicted times the model cannot order are named as equal.

    \b
    Examples:
      plan sensitivity plan.yaml
      plan sensitivity --model llama-8b --gpus 8 --reach 1.5
      plan sensitivity plan.yaml --json
    """
    from planner import api

    with progress("looking at every number") as say:
        answer = api.sensitivity(file, reach=reach, progress=say, **flags)
    emit(answer, as_json)
    if not answer.found.complete:
        click.echo("interrupted: the numbers above were looked at, the others were not", err=True)
        sys.exit(INTERRUPTED)
