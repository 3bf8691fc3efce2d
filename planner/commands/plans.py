"""Commands that are one call of the API each: search, estimate; and what the library holds."""

import sys
from pathlib import Path
from typing import Any

import click

from planner.keywords import SEARCHED
from planner.layout import FIELDS
from planner.terminal.flags import console, emit, job_options, layout_options, progress

NOTHING_FITS = 1
"""Exit code when no layout of the space fits."""
YAML_FILE = click.Path(dir_okay=False, path_type=Path)
OUTPUT = click.option("--output", type=YAML_FILE, help="Write the plan to this YAML file.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")


@click.command()
@job_options(required=True)
@layout_options(SEARCHED)
@click.option("--cluster", type=YAML_FILE, help="Nodes of several kinds and sites: a YAML file (docs/clusters.md).")
@click.option(
    "--outer", metavar="METHOD:N", help="Of a cluster of several sites: local updates, like diloco:100:8 (steps, bits)."
)
@click.option("--runnable", is_flag=True, help="Of a cluster: only plans that an export of the trainer runs as they are.")
@click.option("--tokens", metavar="N", help="Tokens to train on, like 15T: prints days, GPU-hours, dollars and energy.")
@click.option("--days", type=float, metavar="D", help="Deadline for them; without --gpus the fewest GPUs that meet it are planned.")
@click.option("--fewest-gpus", is_flag=True, help="The fewest GPUs that meet --days, whatever --gpus or --nodes say.")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the profile]")
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="Plans to show.")
@click.option("--output", type=YAML_FILE, help="Write the best plan to this YAML file.")
@JSON
def search(
    top: int, output: Path | None, as_json: bool, cluster: Path | None, outer: str | None, runnable: bool, **flags: Any
) -> None:  # fmt: skip
    """Search every legal layout and print the best plans (the default command).

    Any flag of a layout (--tp, --pp, --recompute, ...) pins that value; the search varies the others.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model qwen3-235b-a22b --gpus 256 --hardware b200-sxm --top 10
      plan --model llama-8b --gpus 8 --trainer torchtitan --sequence-length 32768 --json
      plan --model llama-70b --gpus 64 --tp 8 --micro-batch-size 1 --output plan.yaml
      plan --model llama-8b --hardware h100 --tokens 15T --days 30
      plan --model llama-70b --cluster cluster.yaml --output mixed.yaml
      plan --model llama-70b --cluster cluster.yaml --runnable --trainer megatron
      plan --model llama-70b --cluster cluster.yaml --outer diloco:100:8
    """
    from planner import api

    if flags.pop("fewest_gpus"):
        if None in (flags["tokens"], flags["days"]) or cluster is not None:
            what = "--fewest-gpus is of one kind of GPU and of a deadline"
            raise click.UsageError(f"{what}: add --tokens and --days, like --tokens 15T --days 30")
        flags |= {"gpus": None, "nodes": None}
    with progress("searching") as say:
        plans: Any
        if cluster is None:
            if outer is not None or runnable:
                name = "--outer" if outer is not None else "--runnable"
                raise click.UsageError(f"{name} is of a cluster of several kinds or sites; give its file with --cluster")
            plans = api.plan(top=top, progress=say, **flags)
        else:
            of_budget = {name: flags.pop(name) for name in ("tokens", "days", "price")}
            if given := next((name for name, value in of_budget.items() if value is not None), None):
                raise click.UsageError(f"--{given} is of one kind of GPU; the prices of a cluster stand in its file")
            plans = api.plan_mixed(cluster, outer=outer, top=top, progress=say, runnable=runnable, **flags)
    if output is not None and plans:  # before the tables, whose reader may have seen enough: plan ... | head
        plans[0].save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plans, as_json)
    if not plans:
        if output is not None:
            click.echo(f"nothing fits, so {output} was not written", err=True)
        sys.exit(NOTHING_FITS)


@click.command()
@click.argument("file", required=False, type=YAML_FILE)
@job_options(required=False)
@layout_options(FIELDS)
@OUTPUT
@JSON
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

    if file is not None and api.plan_kind(file) == "mixed":
        if given := next((name for name, value in flags.items() if value not in (None, ())), None):
            raise click.UsageError(f"--{given.replace('_', '-')}: a mixed plan is shown as it is; 'plan what-if' changes it")
        emit(api.load_mixed(file), as_json)
        return
    plan = api.estimate(file, **flags)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json)


@click.command()
@click.argument("words", nargs=-1)
def models(words: tuple[str, ...]) -> None:
    """List the model presets, or those whose names hold the WORDS."""
    from planner.errors import UnknownNameError
    from planner.terminal.library_tables import models_called, models_table

    names = models_called(words)
    if not names:
        raise UnknownNameError("model", " ".join(words), models_called(()))
    where = console()
    where.print(models_table(where.width, names))


@click.command()
@click.argument("words", nargs=-1)
def trainers(words: tuple[str, ...]) -> None:
    """List the trainers, or those whose names hold the WORDS."""
    from planner import library
    from planner.errors import UnknownNameError
    from planner.terminal.library_tables import trainers_called, trainers_table

    names = trainers_called(words)
    if not names:
        raise UnknownNameError("trainer", " ".join(words), library.names("trainers"))
    where = console()
    where.print(trainers_table(where.width, names))
