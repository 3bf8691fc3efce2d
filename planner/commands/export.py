"""``plan export``: a plan as a folder that a trainer runs."""

from __future__ import annotations

from pathlib import Path

import click

from planner.errors import PlannerError


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
    from planner.trainers.bundle.launchers import LAUNCHERS

    if list_:
        _list_targets(LAUNCHERS)
        return
    if file is None or to is None or output is None:
        raise click.UsageError(
            "give the plan file, --to and --output, like: plan export plan.yaml --to megatron --output run/"
        )
    if launcher not in LAUNCHERS:
        raise PlannerError(f"unknown launcher '{launcher}'; known: {', '.join(LAUNCHERS)}")
    from planner.plan_file import load_plan
    from planner.trainers.bundle.folder import make_bundle, write_bundle
    from planner.trainers.bundle.nearest import require_expressible
    from planner.trainers.bundle.target import ExportJob
    from planner.trainers.targets import load_target

    target = load_target(to)
    job = ExportJob.of(load_plan(file))
    require_expressible(target, job, file)
    bundle = make_bundle(target, job, launcher)
    write_bundle(bundle, output, force=force)
    for warning in bundle.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    _say(output, bundle.files, bundle.rendered.notes)
    if check:
        from planner.trainers.checking.child import check_folder

        click.echo(check_folder(to, job, output).text())


def _say(output: Path, files: dict[str, str], notes: tuple[str, ...]) -> None:
    click.echo(f"wrote {output}: {', '.join(sorted(files))}")
    for note in notes:
        click.echo(f"note: {note}")


def _list_targets(launchers: tuple[str, ...]) -> None:
    from planner.trainers.targets import TARGETS, load_target

    rows = [load_target(name) for name in TARGETS]
    width = max((len(one.name) for one in rows), default=0)
    for one in rows:
        click.echo(f"{one.name:{width}}  {one.title}; {one.package} {one.versions}; plans of {', '.join(one.trainers)}")
    click.echo(f"launchers: {', '.join(launchers)}")
