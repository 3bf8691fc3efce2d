"""``plan hardware``: the profiles of the library, what one says, where two differ, and a picture of the curves."""

from pathlib import Path

import click

from planner.terminal.flags import completed, console, emit


class HardwareGroup(click.Group):
    """Without a word it lists; the name of a profile alone means ``show``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from planner import api

            api.show_profile(args[0])  # refuses what is neither a command nor a profile, by any of its names
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=HardwareGroup, invoke_without_command=True)
@click.pass_context
def hardware(ctx: click.Context) -> None:
    """List the hardware profiles, or look into them.

    \b
    Examples:
      plan hardware
      plan hardware show h100-sxm
      plan hardware diff h100-sxm my-cluster.yaml
      plan hardware plot h200-sxm -o h200.png
      plan hardware cluster nodes.json --output cluster.yaml
    """
    if ctx.invoked_subcommand is None:
        from planner.terminal.library_tables import hardware_table

        where = console()
        where.print(hardware_table(where.width))


@hardware.command()
@click.argument("name", shell_complete=completed("hardware"))
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw it too: a picture, .png, .svg or .pdf.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def show(name: str, output: Path | None, as_json: bool) -> None:
    """What a profile says: figures read off its curves, where they come from, and what is assumed. Of a cluster file its nodes and
    links.

    \b
    Examples:
      plan hardware show h100-sxm
      plan hardware show my-cluster.yaml --json
      plan hardware show cluster.yaml --output cluster.svg
    """
    from planner import api

    found = api.show_profile(name)
    if output is not None:
        api.plot_profile(name, output)
        click.echo(f"wrote {output}", err=True)
    emit(found, as_json)


@hardware.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Cluster file to write, YAML.")  # fmt: skip
@click.option("--hardware", "profiles", multiple=True, metavar="[TYPE=]PROFILE",
              help="Profile of GPUs that the list calls TYPE; without TYPE of nodes that do not say theirs. Repeat it.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def cluster(file: Path, output: Path | None, profiles: tuple[str, ...], as_json: bool) -> None:
    """Make a cluster file of a scheduler's node list: SLURM's sinfo or scontrol, or Kubernetes' nodes.

    Equal nodes of one zone become a kind; nodes that are down, drained or cordoned, and those without GPUs, are left out and said.

    \b
    Examples:
      sinfo -N -o "%N %G %T" > nodes.txt && plan hardware cluster nodes.txt --output cluster.yaml
      scontrol show nodes > nodes.txt && plan hardware cluster nodes.txt --output cluster.yaml
      kubectl get nodes -o json > nodes.json && plan hardware cluster nodes.json --output cluster.yaml
      plan hardware cluster nodes.txt --hardware h100-sxm
    """
    from planner import api

    found = api.cluster_of_nodes(file, hardware=profiles, output=output)
    if output is not None:
        click.echo(f"wrote {output}", err=True)
    emit(found, as_json)


@hardware.command()
@click.argument("first", shell_complete=completed("hardware"))
@click.argument("second", shell_complete=completed("hardware"))
@click.option("--all", "everything", is_flag=True, help="Show all differences, not the 30 largest.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def diff(first: str, second: str, everything: bool, as_json: bool) -> None:
    """Where two profiles differ by more than chance: a slow link, a throttled card, another driver.

    What both have measured is compared point by point, by family, group of ranks and curve, against the drift within each run
    and the scatter of points and curves; of twenty comparisons of two runs of one machine, one lists anything. Other figures
    count as different beyond their spread, at least 2 percent.

    \b
    Examples:
      plan hardware diff yesterday.yaml today.yaml
      plan hardware diff h100-sxm my-cluster.yaml --all
    """
    from planner import api

    emit(api.compare_profiles(first, second, everything=everything), as_json)


@hardware.command()
@click.argument("name", shell_complete=completed("hardware"))
@click.option("--output", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Picture to write: .png, .svg or .pdf.")  # fmt: skip
def plot(name: str, output: Path) -> None:
    """Draw the curves: bus bandwidth by size and group, GEMM rate by size, roofline.

    \b
    Examples:
      plan hardware plot h100-sxm -o h100.png
    """
    from planner import api

    api.plot_profile(name, output)
    click.echo(f"wrote {output}", err=True)
