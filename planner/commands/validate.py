"""``plan validate``: a plan against what torch really does with it."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.common import console, progress
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.validator.rungs import Task


@click.command(short_help="Run a plan, or its memory alone, and compare with the prediction.")
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rung", metavar="NAME", default="auto", help="full, meta, or auto: the highest possible. [auto]")
@click.option("--rank", type=int, multiple=True, metavar="R", help="meta: this rank, from 0; repeatable. [worst stage]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What runs it. [cuda where there is a GPU]")
@click.option("--steps", type=click.IntRange(1, 1000), default=5, metavar="N", help="Steps that are measured. [5]")
@click.option("--warmup", type=click.IntRange(0, 1000), default=2, metavar="N", help="Steps before them. [2]")
@click.option("--timeout", default="60s", metavar="TIME", help="A step that takes longer has hung. [60s]")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Trace one more step.")
@click.option("--no-parity", is_flag=True, help="Do not first check on a tiny model that the ranks train like one.")
@click.option("--print-commands", is_flag=True, help="Print the torchrun and SLURM commands for --nodes and stop.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Machines, for --print-commands. [by the plan]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write validation.yaml."
)
def validate(
    file: Path, rung: str, device: str | None, print_commands: bool, nodes: int | None, as_json: bool,
    output: Path | None, **flags: Any,
) -> None:  # fmt: skip
    """Hold a plan against what torch does with it. PLAN is a file written by --output of `plan` or `plan estimate`.

    Rung `full` runs the plan on all its ranks: on the GPUs of this machine, under torchrun or srun on many machines
    (--print-commands shows how), or with gloo on the CPU. Rung `meta` needs no GPU: the modules, the optimizer and one
    step of a rank, at full size, on fake tensors; memory and collectives are compared. Exit codes: 0 it ran, 1 it ran out of
    memory, hung, lost a rank or trains differently than one process (recorded in --output), 2 the input is wrong.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --trainer torchtitan --output plan.yaml
      plan validate plan.yaml --rung meta
      plan validate plan.yaml --rung meta --rank 63 --output validation.yaml
      plan validate plan.yaml --print-commands --nodes 8
      plan validate plan.yaml --steps 10 --output validation.yaml
    """
    from planner.plan import load_plan
    from planner.validator.rungs import choose, named

    named(rung)
    if output is not None and not output.resolve().parent.is_dir():  # found out before anything runs
        raise PlannerError(f"--output {output}: there is no directory {output.resolve().parent}")
    plan = load_plan(file)
    if print_commands:
        click.echo(_commands(*_per_node(plan, nodes)), nl=False)
        return

    def report(found: dict[str, Any]) -> None:
        _report(found, file, output, as_json)

    _require_torch()
    task = _task(plan, device, flags, report)
    chosen, why = choose(task, rung)
    task = replace(task, why=why)
    with nullcontext(lambda _: None) if chosen.shows_itself else progress(f"rung {chosen.name}") as say:
        found = chosen.run(task, say)
    if not found:
        return
    report({"rung": chosen.name, "why": why, **found})
    if found.get("outcome", "completed") != "completed":
        sys.exit(1)


def _task(plan: Any, device: str | None, flags: dict[str, Any], report: Any) -> Task:
    """The flags, checked, and what there is to run on."""
    from planner.units import parse
    from planner.validator.compare import question
    from planner.validator.rungs import Task, machine_here

    timeout = parse(flags["timeout"], "seconds", what="--timeout")
    if timeout <= 0:
        raise PlannerError(f"--timeout {flags['timeout']}: it must be above zero")
    trace = flags["trace"]
    if trace is not None and not trace.resolve().parent.is_dir():
        raise PlannerError(f"--trace {trace}: there is no directory {trace.resolve().parent}")
    return Task(
        plan=plan, asked=question(plan), machine=machine_here(device, os.environ), ranks=flags["rank"],
        steps=flags["steps"], warmup=flags["warmup"], timeout=timeout, parity=not flags["no_parity"], trace=trace,
        report=report,
    )  # fmt: skip


def _report(found: dict[str, Any], file: Path, output: Path | None, as_json: bool) -> None:
    """Writes and prints what was found; what is printed is all in the file."""
    from planner.validator.record import record

    written = record(found, file)
    if output is not None:
        from planner import library

        library.write_whole(output, library.dump_yaml(written))
    if as_json:
        import json

        click.echo(json.dumps(written))
    else:
        from planner.report.validation import validation_tables

        for part in validation_tables(written):
            console().print(part)
    if written["failure"] is not None:
        click.echo(f"error: {written['failure']['sentence']}", err=True)


def _per_node(plan: Any, nodes: int | None) -> tuple[int, int]:
    """Nodes and ranks on each. Raises PlannerError."""
    on_one = plan.cluster().hardware.gpus_per_node
    count = max(1, -(-plan.num_gpus // on_one)) if nodes is None else nodes
    if plan.num_gpus % count:
        raise PlannerError(
            f"--nodes {count}: the plan's {plan.num_gpus} GPUs cannot be shared out evenly; use a divisor"
        )
    return count, plan.num_gpus // count


def _commands(nodes: int, per_node: int) -> str:
    from planner.commands.common import this_program
    from planner.launch.place import commands

    return commands("validate", nodes, per_node, this_program({"--print-commands"}, {"--nodes"}))


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
