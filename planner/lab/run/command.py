"""``plan validate``: a plan against what torch really does with it."""

from __future__ import annotations

import datetime
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.lab.run.command_top import (
    finalists_of,
    for_finalist,
    print_finalists,
    run_finalists,
    run_with_trainer,
    say_changed,
    trainer_run_of,
)
from planner.terminal.flags import console, print_part, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.lab.launch.state import State
    from planner.lab.run.levels import Task
    from planner.lab.run.top import Finalist
    from planner.lab.run.trainer_run import TrainerRun
    from planner.plan_file import Plan


TRACED = ("full", "truncated")
"""Rungs that --trace is of."""


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rung", metavar="NAME", default="auto", help="full, truncated, rank, meta or auto: the highest. [auto]")
@click.option(
    "--rank", type=int, multiple=True, metavar="R", help="Rungs rank, meta: this rank; repeatable. [of 3 stages]"
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What runs it. [cuda where there is a GPU]")
@click.option("--steps", type=click.IntRange(1, 1000), default=5, metavar="N", help="Steps that are measured. [5]")
@click.option("--warmup", type=click.IntRange(0, 1000), default=2, metavar="N", help="Steps before them. [2]")
@click.option(
    "--timeout",
    default="60s",
    metavar="TIME",
    help="A step that takes longer has hung; the first has 4 times it. [60s]",
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Trace one more step.")
@click.option("--no-parity", is_flag=True, help="Do not first check on a tiny model that the ranks train like one.")
@click.option("--trainer", metavar="NAME", help="Run its export in torchtitan or megatron and read the log.")
@click.option("--trainer-command", metavar="CMD", help="Started in the export's folder. [bash smoke.sh]")
@click.option(
    "--trainer-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="A log that exists already."
)
@click.option("--top", type=click.IntRange(2, 20), metavar="N", help="Run the N best plans of the job and rank them.")
@click.option(
    "--finalist", type=click.Path(dir_okay=False, path_type=Path), multiple=True, metavar="PLAN",
    help="Run and rank this plan too; repeatable, instead of --top.",
)  # fmt: skip
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
    (--print-commands shows how), or with gloo on the CPU. Rung `truncated` runs fewer layers and replicas with the same shards
    on a few devices, and scales up. Rung `rank` runs some ranks alone on one device: computation and memory are measured,
    communication is priced. Rung `meta` needs no GPU: the modules, the optimizer and one step of a rank, at full size, on
    fake tensors; memory and collectives are compared. All limits of time are said before the start. Exit codes: 0 it ran,
    1 it ran out of memory, hung, lost a rank, was stopped or trains differently than one process (recorded in --output, with
    what was measured before), 2 the input is wrong.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --trainer torchtitan --output plan.yaml
      plan validate plan.yaml --rung meta
      plan validate plan.yaml --rung meta --rank 63 --output validation.yaml
      plan validate plan.yaml --rung rank --rank 0 --rank 63
      plan validate plan.yaml --print-commands --nodes 8
      plan validate plan.yaml --steps 10 --output validation.yaml
      plan validate plan.yaml --trainer megatron --steps 10 --output validation.yaml
      plan validate plan.yaml --trainer torchtitan --trainer-log slurm-1234.log --output validation.yaml
      plan validate plan.yaml --top 3 --output finalists.yaml
      plan validate plan.yaml --finalist other.yaml --trainer megatron --output finalists.yaml
    """
    from planner.lab.run.levels import named
    from planner.plan_file import load_plan

    named(rung)
    if output is not None and not output.resolve().parent.is_dir():  # found out before anything runs
        raise PlannerError(f"--output {output}: there is no directory {output.resolve().parent}")
    plan = load_plan(file)
    if print_commands:
        click.echo(_commands(plan, nodes, device), nl=False)
        return

    def report(found: dict[str, Any]) -> None:
        _report(plan, found, file, output, as_json)

    by_trainer = trainer_run_of(flags, _timeout(flags), output)
    if by_trainer is not None and rung != "auto":
        raise PlannerError(
            f"--rung {rung} is of the model that is built here, --trainer runs its own: give one of them"
        )
    finalists = finalists_of(plan, flags)
    if finalists:
        _validate_finalists(finalists, file, rung, device, flags, by_trainer, output, as_json)
        return
    if by_trainer is not None:
        say_changed({str(file): plan})
        found = run_with_trainer(plan, file, by_trainer)
    else:
        _require_torch()
        task = _task(plan, device, flags, report)
        if task.machine.place is None or task.machine.place.rank == 0:
            say_changed({str(file): plan})
        found = _run(task, rung)
        if not found:
            return
    report(found)
    if found.get("outcome", "completed") != "completed":
        sys.exit(1)


def _run(task: Task, rung: str) -> dict[str, Any]:
    """What a rung found; {} on a rank that does not report."""
    from planner.lab.run.levels import choose

    chosen, why = choose(task, rung)
    if task.trace is not None and chosen.name not in TRACED:
        raise PlannerError(
            f"--trace is of rungs {' and '.join(TRACED)}: rung {chosen.name} runs no step of all ranks ({why}); leave it out"
        )
    task = replace(task, why=why)
    with nullcontext(lambda _: None) if chosen.shows_itself else progress(f"rung {chosen.name}") as say:
        found = chosen.run(task, say)
    return {"rung": chosen.name, "why": why, **found} if found else {}


def _validate_finalists(
    finalists: list[Finalist], file: Path, rung: str, device: str | None, flags: dict[str, Any], by_trainer: TrainerRun | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Every finalist by its trainer or on the rung of the plan; exit code 1 when none could be measured."""
    from planner.lab.run.levels import choose
    from planner.lab.run.record import complete, head

    for flag, what in (("trainer_log", "is the log"), ("trace", "writes the trace")):
        if flags[flag] is not None:
            raise PlannerError(f"--{flag.replace('_', '-')} {what} of one plan, and every finalist is run")
    name = "trainer"
    if by_trainer is None:
        _require_torch()
        task = _task(next(one.plan for one in finalists if one.own), device, flags, lambda _: None)
        if task.machine.place is not None:
            raise PlannerError(
                "finalists are started one after the other from one process: no torchrun or srun around it"
            )
        rung_of_all, why = choose(task, rung)
        name = rung_of_all.name
        if name == "meta":
            raise PlannerError(f"finalists are ranked by measured steps, and rung meta measures none ({why})")
    read = [one for one in finalists if one.own or flags["finalist"]]  # the others were priced just now
    say_changed({str(file) if one.own else f"finalist {one.predicted_rank}": one.plan for one in read})

    def run(one: Finalist, shown: Callable[[State], State]) -> dict[str, Any]:
        if by_trainer is not None:
            return complete(run_with_trainer(one.plan, file, for_finalist(by_trainer, one), shown))
        return complete(_run(replace(_task(one.plan, device, flags, lambda _: None), shown=shown), name))

    def keep(found: dict[str, Any]) -> None:
        if output is not None:
            from planner import library

            library.write_whole(output, library.dump_yaml({**head(file), **found}))

    found = {**head(file), **run_finalists(finalists, file, name, run, keep)}
    if as_json:
        import json

        click.echo(json.dumps(found))
    else:
        print_finalists(found, output)
    if not any(row["measured_seconds"] for row in found["finalists"]):
        sys.exit(1)


def _timeout(flags: dict[str, Any]) -> float:
    from planner.units import parse

    timeout = parse(flags["timeout"], "seconds", what="--timeout")
    if timeout <= 0:
        raise PlannerError(f"--timeout {flags['timeout']}: it must be above zero")
    return timeout


def _task(plan: Any, device: str | None, flags: dict[str, Any], report: Any) -> Task:
    """The flags, checked, and what there is to run on."""
    from planner.lab.run.levels import Task, machine_here
    from planner.lab.run.predicted_ranks import question

    trace = flags["trace"]
    if trace is not None and not trace.resolve().parent.is_dir():
        raise PlannerError(f"--trace {trace}: there is no directory {trace.resolve().parent}")
    return Task(
        plan=plan, asked=question(plan), machine=machine_here(device, os.environ), ranks=flags["rank"],
        steps=flags["steps"], warmup=flags["warmup"], timeout=_timeout(flags), parity=not flags["no_parity"], trace=trace,
        report=report,
    )  # fmt: skip


def _report(plan: Any, found: dict[str, Any], file: Path, output: Path | None, as_json: bool) -> None:
    """Writes and prints what was found and what it teaches; what is printed is all in the file."""
    from planner.lab.run.learn import learned
    from planner.lab.run.record import complete, record

    written = record(learned(plan, complete(found), name=file.stem, date=datetime.date.today().isoformat()), file)
    if output is not None:
        from planner import library

        library.write_whole(output, library.dump_yaml(written))
    if as_json:
        import json

        click.echo(json.dumps(written))
    else:
        from planner.lab.run.show import validation_tables
        from planner.lab.run.show_learned import learned_lines, trainer_tables

        out = console()
        for part in (trainer_tables if written["rung"] == "trainer" else validation_tables)(written):
            print_part(out, part)
        for line in learned_lines(written, None if output is None else str(output)):
            print_part(out, line)
    if written["failure"] is not None:
        click.echo(f"error: {written['failure']['sentence']}", err=True)


def _per_node(plan: Plan, nodes: int | None) -> tuple[int, int]:
    """Nodes and ranks on each. Raises PlannerError."""
    on_one = int(plan.cluster().hardware.gpus_per_node)
    count = max(1, -(-plan.num_gpus // on_one)) if nodes is None else nodes
    if plan.num_gpus % count:
        raise PlannerError(
            f"--nodes {count}: the plan's {plan.num_gpus} GPUs cannot be shared out evenly; use a divisor"
        )
    return count, plan.num_gpus // count


def _commands(plan: Plan, nodes: int | None, device: str | None) -> str:
    from planner.lab.launch.place import commands
    from planner.terminal.flags import this_program

    program, on_cpu = this_program({"--print-commands"}, {"--nodes"}), device == "cpu" or plan.cluster().hardware.is_cpu
    return commands("validate", *_per_node(plan, nodes), program, on_cpu=on_cpu)


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
