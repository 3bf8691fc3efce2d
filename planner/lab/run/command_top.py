"""``plan validate --trainer`` and ``--top``: the trainer's run, and finalists one after the other into one file."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import console, print_part, progress

if TYPE_CHECKING:
    from planner.lab.launch.state import State
    from planner.lab.run.top import Finalist
    from planner.lab.run.trainer_run import TrainerRun
    from planner.plan_file import Plan


def trainer_run_of(flags: dict[str, Any], timeout: float, output: Path | None) -> TrainerRun | None:
    """What --trainer and its fellows ask for; None without them. Raises PlannerError."""
    name, command, log = flags["trainer"], flags["trainer_command"], flags["trainer_log"]
    if name is None:
        if command or log:
            raise PlannerError("--trainer-command and --trainer-log need --trainer torchtitan or --trainer megatron")
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
        trainer=name, steps=flags["steps"], warm_up=max(flags["warmup"], LEAST_WARM_UP), timeout=timeout,
        command=command or "", log=log, keep_log=None if output is None or log else output.with_suffix(".log"),
    )  # fmt: skip


def say_changed(plans: dict[str, Plan]) -> None:
    """Says before a run which plans, by name, no longer price as they say: what is measured of them is not held against them."""
    from planner.timeline.priced_plan import price_plan

    for name, plan in plans.items():
        try:
            price_plan(plan, where=name)
        except PlannerError as error:
            click.echo(f"warning: {error}; without that nothing is learned from its run", err=True)


def run_with_trainer(
    plan: Plan, file: Path, asked: TrainerRun, shown: Callable[[State], State] | None = None
) -> dict[str, Any]:
    """One plan with its trainer; limits are said before the start. ``shown`` is what a bar draws of a state."""
    from planner.lab.launch.state import Bar, same
    from planner.lab.run.trainer_run import run_trainer

    with ExitStack() as stack:

        def started(text: str) -> None:
            click.echo(text, err=True)
            stack.enter_context(bar)

        bar = Bar(through=shown or same)
        return run_trainer(plan, file, asked, bar.show, started)


def finalists_of(plan: Plan, flags: dict[str, Any]) -> list[Finalist]:
    """The plan files of --finalist, or the best plans of the job for --top; [] without either. Raises PlannerError."""
    if flags["finalist"]:
        if flags["top"]:
            raise PlannerError("--finalist says which plans are run, --top lets a search say it: give one of them")
        from planner.lab.run.top import given
        from planner.plan_file import load_plan

        return given(plan, {file: load_plan(file) for file in flags["finalist"]})
    if flags["top"] is None:
        return []
    from planner.lab.run.top import finalists

    with progress("searching") as say:
        chosen = finalists(plan, flags["top"], say)
    if len(chosen) < 2:
        raise PlannerError("--top: the search finds no other plan of this job that fits; validate the one there is")
    return chosen


def run_finalists(
    chosen: list[Finalist], file: Path, rung: str,
    run: Callable[[Finalist, Callable[[State], State]], dict[str, Any]], keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:  # fmt: skip
    """Every finalist, what is known kept after each; ``run`` gets what its bar draws of a state: a part of all."""
    from planner.lab.launch.state import Course
    from planner.lab.run.learn import learned
    from planner.lab.run.top import validate_all
    from planner.units import format_seconds

    course = Course("finalist", len(chosen))
    count = len(chosen)

    def shown(finalist: Finalist) -> dict[str, Any]:
        course.next()
        return run(finalist, course.through)

    def one(finalist: Finalist) -> dict[str, Any]:
        what = f"finalist {finalist.predicted_rank} of {count}{', the plan' if finalist.own else ''}"
        click.echo(f"{what}: {format_seconds(finalist.plan.prediction.step_time_s)} per step predicted", err=True)
        name, today = f"{file.stem}-{finalist.predicted_rank}", datetime.date.today().isoformat()
        return learned(finalist.plan, shown(finalist), name=name, date=today)

    return validate_all(chosen, one, keep, file=file, rung=rung)


def for_finalist(asked: TrainerRun, finalist: Finalist) -> TrainerRun:
    """The same with a log of its own."""
    keep = asked.keep_log
    if keep is None:
        return asked
    return dataclasses.replace(asked, keep_log=keep.with_name(f"{keep.stem}-{finalist.predicted_rank}{keep.suffix}"))


def print_finalists(found: dict[str, Any], output: Path | None) -> None:
    """The ranking, and below it what each finalist teaches."""
    from planner.lab.run.show_finalists import finalist_tables
    from planner.lab.run.show_learned import learned_lines

    out = console()
    for part in finalist_tables(found):
        print_part(out, part)
    for one in found["validations"]:
        for line in learned_lines(one, None if output is None else str(output)):
            print_part(out, f"finalist {one['predicted_rank']}: {line}")
