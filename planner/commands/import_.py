"""``plan import``: what people run today, as a plan."""

from pathlib import Path
from typing import Any

import click

from planner.errors import listed
from planner.terminal.flags import emit
from planner.trainers import having

READERS = listed(having("readback"))


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "from_", metavar="NAME", help=f"{READERS}. [by its content]")
@click.option("--model", metavar="NAME", help="Model, where the file does not say it.")
@click.option("--gpus", type=int, metavar="N", help="GPUs of the job, where the file does not say.")
@click.option("--hardware", metavar="NAME", help="Profile or YAML file ('plan hardware').")
@click.option("--trainer", metavar="NAME", help="Trainer to price it for. [the one of the file]")
@click.option("--sequence-length", type=int, metavar="S", help="Tokens per sequence, where the file does not say.")
@click.option("--global-batch-size", type=int, metavar="B", help="Sequences per step, where the file does not say.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this YAML file.")
def import_(file: Path, from_: str | None, output: Path | None, **said: Any) -> None:
    """Read a trainer's configuration as a plan, and price it.

    FILE holds arguments of Megatron-LM (a script, a YAML mapping, or a training log with its dump of arguments), a
    configuration of torchtitan (Python, TOML, JSON or a command line), DeepSpeed's JSON, or nanotron's YAML. Settings that
    a plan does not hold are listed. What is said with flags goes before what is read.

    \b
    Examples:
      plan import train.sh --gpus 64 --hardware h100-sxm --output plan.yaml
      plan import slurm-1234.log --hardware a100-sxm-80gb
      plan import ds_config.json --model llama-8b --gpus 16 --sequence-length 4096
    """
    from planner import api

    plan = api.import_config(file, format=from_, **said)
    for one in plan.unread:
        click.secho(f"not in the plan: {one}", fg="yellow", err=True)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json=False)
