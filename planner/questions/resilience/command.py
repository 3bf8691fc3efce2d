"""``plan resilience``: what failures cost, and what to do about them."""

from pathlib import Path

import click

from planner.terminal.flags import emit, progress


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--mtbf", metavar="TIME", help="Between two failures of one node. [of the cluster file, else published]")
@click.option("--days", type=float, default=30.0, metavar="N", help="Days of training if nothing failed. [30]")
@click.option("--spares", type=int, metavar="N", help="Nodes that wait for a failure. [of the cluster file, else 0]")
@click.option("--repair", metavar="TIME", help="Until a failed node is back. [24h]")
@click.option("--shortage", type=float, metavar="P", help="Chance that spares do not suffice. [0.01]")
@click.option("--restart", metavar="TIME", help="A restart as measured. [computed]")
@click.option("--interval", metavar="TIME", help="Training between two saves. [the best]")
@click.option("--synchronous", is_flag=True, help="Training stops for the whole of a save.")
@click.option("--spot", is_flag=True, help="Machines that the provider takes back: their published rates.")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the cluster file, else the profile]")
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Machines over time: milliseconds,add|remove,node or date,time,count; replayed minute by minute.",
)  # fmt: skip
@click.option(
    "--cluster", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Cluster file: storage, spares, price and failures of its nodes, by kind.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Picture (.png, .svg, .pdf), page (.html) or JSON (.json) to write.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def resilience(file: Path, as_json: bool, output: Path | None, **flags: object) -> None:
    """What failures cost a plan: when to save, goodput, days and dollars, spares, and the best answer to a failure.

    FILE is a plan of --output, of one kind of node or of several. The interval between saves is the exact optimum (Daly), also for
    asynchronous saves, where a checkpoint counts only once it is whole. Compared: restart from the checkpoint, shrink and continue,
    replica groups (torchft), micro batches re-routed to data-parallel peers.

    \b
    Examples:
      plan resilience plan.yaml
      plan resilience plan.yaml --mtbf 900h --days 30 --spares 2
      plan resilience plan.yaml --cluster cluster.yaml --output failures.png
      plan resilience plan.yaml --spot --trace p3-trace.csv
    """
    from planner import api

    with progress("pricing failures") as say:
        found = api.resilience(file, progress=say, **flags)
    if output is not None:
        found.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(found, as_json)
