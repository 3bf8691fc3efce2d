"""``plan what-if``: the same job with one thing changed, the best plan each; and the other direction."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.errors import PlannerError
from planner.keywords import flag_of
from planner.questions.what_if.changes import INPUTS
from planner.terminal.flags import completed, emit, layout_options, progress

NOTHING_FITS, INTERRUPTED = 1, 130
"""Exit codes: no row fits; stopped with Ctrl-C, what was found is printed."""
PINS = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size", "zero", "schedule", "recompute")
"""Flags of a layout that hold for every row."""
PRICE_HELP = "Dollars per GPU-hour, of all or of one hardware. [of the profile]"
PUE_HELP = "Energy of the building over that of its machines. [1]"


def input_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of the job, each with any number of values."""
    for name, one in reversed(INPUTS.items()):
        flags = [flag_of(name), *(["--network-bandwidth"] if name == "network" else [])]
        complete = completed(name) if one.kind == "name" else None
        function = click.option(*flags, name, multiple=True, metavar=one.metavar, help=one.help, shell_complete=complete)(function)
    return function


@click.command(name="what-if")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@input_options
@layout_options(PINS)
@click.option("--together", is_flag=True, help="One more row: the first change of every flag at once.")
@click.option("--fewest-gpus", is_flag=True, help="The fewest GPUs that train it (and meet --days, --budget).")
@click.option("--longest-sequence", is_flag=True, help="The longest sequence that fits.")
@click.option("--largest-batch", is_flag=True, help="The most sequences per forward pass (micro batch) that fit.")
@click.option("--cheapest", is_flag=True, help="Hardware by cost: the values of --hardware, or all that have a price.")
@click.option("--without", multiple=True, metavar="KIND", help="Of a mixed plan: without the nodes of a kind.")
@click.option("--slowdown", multiple=True, metavar="NODE=X", help="Of a mixed plan: a node, or a kind, slower by a factor.")
@click.option("--link", multiple=True, metavar="A,B=RATE", help="Of a mixed plan: the link between two kinds or sites.")
@click.option("--tokens", metavar="N", help="Tokens to train on, like 15T: prints days, GPU-hours, dollars and energy.")
@click.option("--days", type=float, metavar="D", help="Deadline for --fewest-gpus and --cheapest.")
@click.option("--budget", metavar="USD", help="Budget for --fewest-gpus and --cheapest, like 2M.")
@click.option("--price", multiple=True, metavar="[NAME=]USD", help=PRICE_HELP)
@click.option("--power-share", type=float, default=1.0, metavar="X", help="Mean power of a GPU over its limit. [1]")
@click.option("--pue", type=float, default=1.0, metavar="X", help=PUE_HELP)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the sweep to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def what_if(file: Path | None, plot: Path | None, as_json: bool, **flags: Any) -> None:
    """The same job with one thing changed: the best plan each, next to the job as it is, and why it helps or does not.

    The base is FILE, a plan written by --output: then every value of a flag is a change, a row of its own. Without a
    file, the first value of each flag describes the base, further values are changes. A value like x2 multiplies what the
    base has and is a change wherever it stands. Several values: repeat the flag or separate them by commas; 64..4096
    doubles. Flags of a layout (--tp, --zero, ...) hold for every row.

    \b
    Examples:
      plan what-if plan.yaml --network x2 --hardware b200-sxm --precision fp8
      plan what-if plan.yaml --gpus 64..4096 --plot scaling.png
      plan what-if --model llama-70b --gpus 64 --network x2 --memory x1.5 --sequence-length 8192,32768
      plan what-if --model llama-70b --gpus 64 --fewest-gpus --longest-sequence --largest-batch
      plan what-if plan.yaml --tokens 15T --days 30 --fewest-gpus
      plan what-if mixed.yaml --without t4 --slowdown node-3=1.4
      plan what-if plan.yaml --tokens 1T --days 60 --cheapest --hardware h100-sxm,h200-sxm,b200-sxm --price h100-sxm=2.5
    """
    from planner import api

    mixed = {name: flags.pop(name) for name in ("without", "slowdown", "link")}
    if file is not None and api.plan_kind(file) == "mixed":
        _of_mixed(file, as_json, mixed, flags)
        return
    if given := next((name for name, value in mixed.items() if value), None):
        raise PlannerError(f"--{given} changes a mixed plan, as 'plan --cluster FILE --output' writes it; give one")
    if plot is not None and not plot.parent.is_dir():
        raise PlannerError(f"--plot {plot}: no such directory: {plot.parent}")
    with progress("searching") as say:
        answer = api.what_if(file, sweep=plot is not None, progress=say, **flags)
    found = answer.found
    if not found.rows:
        click.echo("interrupted before anything was found", err=True)
        sys.exit(INTERRUPTED)
    emit(answer, as_json)
    if plot is not None:
        drawn = answer.plot(plot)
        click.echo(f"wrote {plot}" if drawn else f"fewer than two points were found, so {plot} was not drawn", err=True)
    if not found.complete:
        click.echo(f"interrupted: {len(found.rows)} rows were found, the others were not looked at", err=True)
        sys.exit(INTERRUPTED)
    if not any(row.fits for row in found.rows):
        sys.exit(NOTHING_FITS)


def _of_mixed(file: Path, as_json: bool, mixed: dict[str, Any], flags: dict[str, Any]) -> None:
    """The changes of a mixed plan."""
    from planner import api

    usual = {"power_share": 1.0, "pue": 1.0}
    if given := next((name for name, value in flags.items() if value not in (None, (), False, usual.get(name))), None):
        can = "--without, --slowdown and --link change something"
        raise PlannerError(f"{file.name} is a mixed plan, of which {can}, not {flag_of(given)}")
    with progress("searching") as say:
        answer = api.mixed_what_if(file, **mixed, progress=say)
    emit(answer, as_json)
    if not any(one.best for one in answer.found.rows):
        sys.exit(NOTHING_FITS)
