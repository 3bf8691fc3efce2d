"""``plan validate``: a plan compared with what torch, or its own trainer, really does with it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import console, print_part, progress

if TYPE_CHECKING:
    from planner.lab.launch.state import State
    from planner.lab.run.levels import Task
    from planner.lab.run.top import Finalist
    from planner.lab.run.trainer_run import TrainerRun
    from planner.plan_file import Plan

TRACED = ("full", "truncated")
"""Levels that --trace is of."""


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
    """Compare a plan with what torch does with it. PLAN is a file written by --output of `plan` or `plan estimate`.

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
    asked = _Asked(plan=plan, file=file, rung=rung, device=device, flags=flags, output=output, as_json=as_json)
    if asked.by_trainer is not None and rung != "auto":
        raise PlannerError(
            f"--rung {rung} is of the model that is built here, --trainer runs its own: give one of them"
        )
    finalists = asked.finalists()
    if finalists:
        asked.validate_finalists(finalists)
        return
    found = asked.validate_plan()
    if found:
        asked.report(found)
        if found.get("outcome", "completed") != "completed":
            sys.exit(1)


@dataclasses.dataclass(kw_only=True)
class _Asked:
    """What the command line asks for."""

    plan: Plan
    file: Path
    rung: str
    device: str | None
    flags: dict[str, Any]
    output: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        from planner.units import parse

        self.timeout = parse(self.flags["timeout"], "seconds", what="--timeout")
        if self.timeout <= 0:
            raise PlannerError(f"--timeout {self.flags['timeout']}: it must be above zero")
        self.by_trainer = self._trainer_run()

    def _trainer_run(self) -> TrainerRun | None:
        """What --trainer and its fellows ask for; None without them. Raises PlannerError."""
        flags = self.flags
        name, command, log = flags["trainer"], flags["trainer_command"], flags["trainer_log"]
        if name is None:
            if command or log:
                raise PlannerError(
                    "--trainer-command and --trainer-log need --trainer torchtitan or --trainer megatron"
                )
            return None
        from planner.lab.run.trainer_run import LEAST_WARM_UP, TrainerRun
        from planner.trainers.reading.log_facts import LEAST_STEPS

        if command and log:
            raise PlannerError("--trainer-log reads a run that was made, --trainer-command makes one: give one of them")
        if flags["steps"] < LEAST_STEPS:
            raise PlannerError(f"--steps {flags['steps']}: a median of a trainer's steps needs at least {LEAST_STEPS}")
        if flags["trace"] is not None or flags["rank"]:
            raise PlannerError("--trace and --rank are of the other rungs; a trainer writes its own traces")
        return TrainerRun(
            trainer=name, steps=flags["steps"], warm_up=max(flags["warmup"], LEAST_WARM_UP), timeout=self.timeout,
            command=command or "", log=log, keep_log=None if self.output is None or log else self.output.with_suffix(".log"),
        )  # fmt: skip

    def task(self, plan: Plan, report: Callable[[dict[str, Any]], None] = lambda _: None) -> Task:
        """The flags, checked, and what there is to run on."""
        from planner.lab.run.levels import Task, machine_here
        from planner.lab.run.plan_question import question

        _require_torch()
        flags, trace = self.flags, self.flags["trace"]
        if trace is not None and not trace.resolve().parent.is_dir():
            raise PlannerError(f"--trace {trace}: there is no directory {trace.resolve().parent}")
        return Task(
            plan=plan, asked=question(plan), machine=machine_here(self.device, os.environ), ranks=flags["rank"],
            steps=flags["steps"], warmup=flags["warmup"], timeout=self.timeout, parity=not flags["no_parity"], trace=trace,
            report=report,
        )  # fmt: skip

    def validate_plan(self) -> dict[str, Any]:
        """What its trainer or a level found of the plan; {} on a rank that does not report."""
        if self.by_trainer is not None:
            _say_changed({str(self.file): self.plan})
            return self.run_with_trainer(self.plan, self.by_trainer)
        task = self.task(self.plan, self.report)
        if task.machine.place is None or task.machine.place.rank == 0:
            _say_changed({str(self.file): self.plan})
        return _run(task, self.rung)

    def run_with_trainer(
        self, plan: Plan, trainer: TrainerRun, shown: Callable[[State], State] = lambda state: state
    ) -> dict[str, Any]:
        """One plan with its trainer; limits are said before the start. ``shown`` is what a bar draws of a state."""
        from planner.lab.launch.state import Bar
        from planner.lab.run.trainer_run import run_trainer

        with ExitStack() as stack:

            def started(text: str) -> None:
                click.echo(text, err=True)
                stack.enter_context(bar)

            bar = Bar(through=shown)
            return run_trainer(plan, self.file, trainer, bar.show, started)

    def report(self, found: dict[str, Any]) -> None:
        """Writes and prints what was found and what it teaches; what is printed is all in the file."""
        from planner.lab.run.learn import learned
        from planner.lab.run.record import complete, head

        taught = learned(self.plan, complete(found), name=self.file.stem, date=datetime.date.today().isoformat())
        written = {**head(self.file), **complete(taught)}
        self.write(written)
        if not self.print_json(written):
            from planner.lab.run.show import learned_lines, validation_tables

            _print([*validation_tables(written), *learned_lines(written, self.output)])
        if written["failure"] is not None:
            click.echo(f"error: {written['failure']['sentence']}", err=True)

    def write(self, found: dict[str, Any]) -> None:
        """To --output, where it is given."""
        if self.output is not None:
            from planner import library

            library.write_whole(self.output, library.dump_yaml(found))

    def print_json(self, found: dict[str, Any]) -> bool:
        """With --json; whether it was."""
        if self.as_json:
            import json

            click.echo(json.dumps(found))
        return self.as_json

    def finalists(self) -> list[Finalist]:
        """The plan files of --finalist, or the best plans of the job for --top; [] without either. Raises PlannerError."""
        files, top = self.flags["finalist"], self.flags["top"]
        if files and top:
            raise PlannerError("--finalist says which plans are run, --top lets a search say it: give one of them")
        if files:
            from planner.lab.run.top import given
            from planner.plan_file import load_plan

            return given(self.plan, {file: load_plan(file) for file in files})
        if top is None:
            return []
        from planner.lab.run.top import finalists

        with progress("searching") as say:
            chosen = finalists(self.plan, top, say)
        if len(chosen) < 2:
            raise PlannerError("--top: the search finds no other plan of this job that fits; validate the one there is")
        return chosen

    def validate_finalists(self, chosen: list[Finalist]) -> None:
        """Every finalist by its trainer or on the level of the plan, what is known kept after each; exit code 1 when none could be
        measured."""
        from planner.lab.launch.state import Course
        from planner.lab.run.learn import learned
        from planner.lab.run.record import complete, head
        from planner.lab.run.top import validate_all
        from planner.units import format_seconds

        name = self._level_of_all(chosen)
        read = [one for one in chosen if one.own or self.flags["finalist"]]  # the others were priced just now
        _say_changed({str(self.file) if one.own else f"finalist {one.predicted_rank}": one.plan for one in read})
        course, today = Course("finalist", len(chosen)), datetime.date.today().isoformat()

        def one(finalist: Finalist) -> dict[str, Any]:
            number, plan = finalist.predicted_rank, finalist.plan
            what = f"finalist {number} of {len(chosen)}{', the plan' if finalist.own else ''}"
            click.echo(f"{what}: {format_seconds(plan.prediction.step_time_s)} per step predicted", err=True)
            course.next()
            if self.by_trainer is None:
                found = _run(replace(self.task(plan), shown=course.through), name)
            else:
                keep = self.by_trainer.keep_log
                log = keep and keep.with_name(f"{keep.stem}-{number}{keep.suffix}")
                found = self.run_with_trainer(plan, replace(self.by_trainer, keep_log=log), course.through)
            return learned(plan, complete(found), name=f"{self.file.stem}-{number}", date=today)

        ranked = validate_all(
            chosen, one, lambda found: self.write({**head(self.file), **found}), file=self.file, rung=name
        )
        if not self.print_json({**head(self.file), **ranked}):
            from planner.lab.run.show import finalist_tables

            _print(finalist_tables(ranked, self.output))
        if not any(row["measured_seconds"] for row in ranked["finalists"]):
            sys.exit(1)

    def _level_of_all(self, chosen: list[Finalist]) -> str:
        """On which level finalists are run. Raises PlannerError where they cannot be ranked."""
        for flag, what in (("trainer_log", "is the log"), ("trace", "writes the trace")):
            if self.flags[flag] is not None:
                raise PlannerError(f"--{flag.replace('_', '-')} {what} of one plan, and every finalist is run")
        if self.by_trainer is not None:
            return "trainer"
        from planner.lab.run.levels import choose

        task = self.task(next(one.plan for one in chosen if one.own))
        if task.machine.place is not None:
            raise PlannerError(
                "finalists are started one after the other from one process: no torchrun or srun around it"
            )
        level, why = choose(task, self.rung)
        if level.name == "meta":
            raise PlannerError(f"finalists are ranked by measured steps, and rung meta measures none ({why})")
        return level.name


def _run(task: Task, rung: str) -> dict[str, Any]:
    """What a level found; {} on a rank that does not report."""
    from planner.lab.run.levels import choose

    chosen, why = choose(task, rung)
    if task.trace is not None and chosen.name not in TRACED:
        raise PlannerError(
            f"--trace is of rungs {' and '.join(TRACED)}: rung {chosen.name} runs no step of all ranks ({why}); leave it out"
        )
    with nullcontext(lambda _: None) if chosen.shows_itself else progress(f"rung {chosen.name}") as say:
        found = chosen.run(replace(task, why=why), say)
    return {"rung": chosen.name, "why": why, **found} if found else {}


def _say_changed(plans: dict[str, Plan]) -> None:
    """Says before a run which plans, by name, no longer price as they say: what is measured of them is not compared with them."""
    from planner.timeline.priced_plan import price_plan

    for name, plan in plans.items():
        try:
            price_plan(plan, where=name)
        except PlannerError as error:
            click.echo(f"warning: {error}; without that nothing is learned from its run", err=True)


def _print(parts: Any) -> None:
    out = console()
    for part in parts:
        print_part(out, part)


def _commands(plan: Plan, nodes: int | None, device: str | None) -> str:
    """What to type on many machines. Raises PlannerError where the ranks cannot be shared out."""
    from planner.lab.launch.place import commands
    from planner.terminal.flags import this_program

    hardware = plan.cluster().hardware
    count = max(1, -(-plan.num_gpus // int(hardware.gpus_per_node))) if nodes is None else nodes
    if plan.num_gpus % count:
        raise PlannerError(
            f"--nodes {count}: the plan's {plan.num_gpus} GPUs cannot be shared out evenly; use a divisor"
        )
    program = this_program({"--print-commands"}, {"--nodes"})
    return commands("validate", count, plan.num_gpus // count, program, on_cpu=device == "cpu" or hardware.is_cpu)


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
