"""``plan import``: what people run today, as a plan."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import", short_help="Read a trainer's configuration as a plan.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "from_", metavar="NAME", help="Trainer whose form it is. [found by its content]")
@click.option("--gpus", type=int, metavar="N", help="GPUs of the job, where the file does not say.")
@click.option("--hardware", metavar="NAME", help="Profile or YAML file ('plan hardware').")
@click.option("--trainer", metavar="NAME", help="Trainer to price it for. [the one of the file]")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this YAML file.")
def import_(
    file: Path, from_: str | None, gpus: int | None, hardware: str | None, trainer: str | None, output: Path | None
) -> None:
    """Read a trainer's configuration as a plan, and price it: the arguments of Megatron-LM (a script, a YAML mapping, or a
    training log with its dump of arguments).

    Settings that a plan does not hold are listed.

    \b
    Examples:
      plan import train.sh --gpus 64 --hardware h100-sxm --output plan.yaml
      plan import slurm-1234.log --hardware a100-sxm-80gb
      plan import run/arguments.sh
    """
    from planner.commands.common import console
    from planner.readback import read
    from planner.readback.reading import to_plan
    from planner.report import table

    reading = read(file, from_)
    plan = to_plan(reading, num_gpus=gpus, hardware=hardware, trainer=trainer)
    for one in reading.unread:
        click.secho(f"not in the plan: {one}", fg="yellow", err=True)
    for note in reading.notes:
        click.echo(f"note: {note}", err=True)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    out = console()
    if plan.assumptions:
        out.print(table.assumptions_table(plan.assumptions))
    table.print_prediction(out, plan)
