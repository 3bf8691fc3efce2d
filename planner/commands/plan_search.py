"""``plan search``, the default command: every legal layout priced, the best plans printed."""

import sys
from pathlib import Path
from typing import Any

import click

from planner.layout import FIELDS
from planner.terminal.flags import emit, job_options, layout_options, progress

NOTHING_FITS = 1
"""Exit code when no layout of the space fits."""


@click.command()
@job_options(required=True)
@layout_options(tuple(name for name in FIELDS if name not in ("num_microbatches", "order", "offload_activations")))
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="Plans to show.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the best plan to this YAML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def search(top: int, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Search every legal layout and print the best plans (the default command).

    Any flag of a layout (--tp, --pp, --recompute, ...) pins that value; the search varies the others.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model qwen3-235b-a22b --gpus 256 --hardware b200-sxm --top 10
      plan --model llama-8b --gpus 8 --trainer torchtitan --sequence-length 32768 --json
      plan --model llama-70b --gpus 64 --tp 8 --micro-batch-size 1 --output plan.yaml
    """
    from planner import api

    with progress("searching") as say:
        plans = api.plan(top=top, progress=say, **flags)
    if output is not None and plans:  # before the tables, whose reader may have seen enough: plan ... | head
        plans[0].save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plans, as_json)
    if not plans:
        if output is not None:
            click.echo(f"nothing fits, so {output} was not written", err=True)
        sys.exit(NOTHING_FITS)
