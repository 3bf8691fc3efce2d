"""``plan estimate``: one explicit layout, priced with the whole breakdown."""

from pathlib import Path
from typing import Any

import click

from planner.layout import FIELDS
from planner.terminal.flags import emit, job_options, layout_options


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@job_options(required=False)
@layout_options(FIELDS)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this YAML file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def estimate(file: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Price one explicit layout, with the whole breakdown.

    FILE is a plan written by --output, or a YAML mapping of layout fields; flags replace what it says. What is left out:
    dp follows from the number of GPUs, the number of microbatches from the batch, sharding and sequence parallelism
    from the trainer.

    \b
    Examples:
      plan estimate --model llama-70b --gpus 64 --tp 4 --pp 4 --vpp 5
      plan estimate plan.yaml --micro-batch-size 2
      plan estimate layout.yaml --model llama-8b --gpus 8 --json
    """
    from planner import api

    plan = api.estimate(file, **flags)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json)
