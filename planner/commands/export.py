"""``plan export``: a plan as a folder that a trainer runs."""

from pathlib import Path

import click


@click.command()
@click.argument("file", metavar="PLAN", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", "to", metavar="NAME", help="Trainer to write for; --list names them.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Folder to write.")
@click.option("--launcher", metavar="NAME", default="torchrun", show_default=True, help="How processes are started.")
@click.option("--check", is_flag=True, help="Run the trainer's own parser on the result, where it is installed.")
@click.option("--force", is_flag=True, help="Replace a folder that is not empty.")
@click.option("--list", "list_", is_flag=True, help="List the trainers and launchers, and stop.")
def export(
    file: Path | None, to: str | None, output: Path | None, launcher: str, check: bool, force: bool, list_: bool
) -> None:
    """Write a plan as a folder that a trainer runs: configuration, launch script, environment, smoke run, README.

    PLAN is a file written by --output of `plan` or `plan estimate`.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --output plan.yaml
      plan export plan.yaml --to megatron --output run/
      plan export plan.yaml --to megatron --output run/ --check
      plan export --list
    """
    if list_:
        from planner.terminal.library_tables import target_lines

        click.echo("\n".join(target_lines()))
        return
    if file is None or to is None or output is None:
        raise click.UsageError(
            "give the plan file, --to and --output, like: plan export plan.yaml --to megatron --output run/"
        )
    from planner import api

    written = api.load(file).export(to, output, launcher=launcher, force=force)
    for warning in written.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    click.echo(f"wrote {output}: {', '.join(written.files)}")
    for note in written.notes:
        click.echo(f"note: {note}")
    if check:
        click.echo(written.check())
