"""``plan validate``: a plan against what torch really does with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.common import console, progress
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.validator.compare import Question


@click.command(short_help="Run a plan, or its memory alone, and compare with the prediction.")
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--rung", metavar="NAME", default="meta", show_default=True, help="What to run: meta, memory on fake tensors."
)
@click.option("--rank", type=int, multiple=True, metavar="R", help="This rank, from 0; may be repeated. [worst stage]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write validation.yaml."
)
def validate(file: Path, rung: str, rank: tuple[int, ...], as_json: bool, output: Path | None) -> None:
    """Hold a plan against what torch does with it. PLAN is a file written by --output of `plan` or `plan estimate`.

    Rung `meta` needs no GPU: the modules, the optimizer and one step of a rank, at full size, on fake tensors. It
    prints the memory that torch would allocate beside the predicted one, and the collectives that the rank issues. Without
    --rank it runs the first, the second and the last pipeline stage and names the worst.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --trainer torchtitan --output plan.yaml
      plan validate plan.yaml --rung meta
      plan validate plan.yaml --rung meta --rank 63 --output validation.yaml
    """
    if rung != "meta":
        raise PlannerError(f"unknown rung '{rung}'; known: meta (memory on fake tensors, no GPU needed)")
    from planner.plan import load_plan

    plan = load_plan(file)
    _require_torch()
    from planner.validator.compare import question
    from planner.validator.record import record

    asked = question(plan)
    found = record(_measure(asked, rank), file)
    if output is not None:
        from planner import library

        library.write_whole(output, library.dump_yaml(found))
    if as_json:
        import json

        click.echo(json.dumps(found))
        return
    from planner.report.validation import validation_tables

    for part in validation_tables(found):
        console().print(part)


def _measure(asked: Question, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The ranks asked for, or one of each stage that may be the worst."""
    from planner.validator.compare import result
    from planner.validator.meta import stage_ranks
    from planner.validator.workers import measure_all

    for one in ranks:
        if not 0 <= one < asked.split.world:
            raise PlannerError(f"--rank {one}: the plan has ranks 0 to {asked.split.world - 1}")
    wanted = list(dict.fromkeys(ranks)) or stage_ranks(asked.split)
    with progress(f"running {len(wanted)} ranks of {asked.split.world} on fake tensors") as say:
        return result(asked, measure_all(asked.split, wanted, say))


def _require_torch() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("torch")
    except PackageNotFoundError:
        raise PlannerError("plan validate needs torch 2.13; install it with: pip install 'planner[torch]'") from None
    if tuple(found.split(".")[:2]) != ("2", "13"):
        raise PlannerError(
            f"plan validate was written for torch 2.13 and found {found}; install it with: pip install 'torch~=2.13.0'"
        )
