"""What the command line of ``plan validate`` asks for, checked; it is run, written and printed.

Finalists: plans that are within the model's error of each other are run one after the other and ranked anew by what they measured.
One that goes out of memory, hangs or loses a rank is a result, and the next is taken; what is known is written whole after each.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.lab.launch.place import commands
from planner.lab.launch.state import Bar
from planner.lab.launch.torchrun import need_torch
from planner.lab.run.learn import learned, other_device, step_of, time_of
from planner.lab.run.levels import Task, choose, machine_here, other_size, question
from planner.lab.run.record import complete, head
from planner.lab.run.show import finalist_tables, learned_lines, validation_tables
from planner.lab.run.trainer_run import LEAST_WARM_UP, TrainerRun, run_trainer
from planner.plan_file import Plan, load_plan, predict
from planner.questions.accuracy.ranking import kendall_tau
from planner.questions.best_plan import resolved_of
from planner.record import record
from planner.search import search
from planner.terminal.flags import console, print_part, progress, this_program
from planner.timeline.priced_plan import price_plan
from planner.trainers.bundle.nearest import command
from planner.trainers.bundle.target import ExportJob
from planner.trainers.reading.log_facts import LEAST_STEPS
from planner.units import format_seconds, parse

TRACED = ("full", "truncated")
"""Levels that --trace is of."""
LEAST_TAU = 3
"""Measured finalists from which a rank correlation says anything."""


@record
class Finalist:
    """One plan of those that are run."""

    predicted_rank: int
    """From 1, by predicted step time."""
    plan: Plan
    own: bool
    """It is the plan of the file; the others are of a search of the same job."""


@dataclass(kw_only=True)
class Request:
    """What is to be run of which plan, and where the result goes. Raises PlannerError for flags that contradict each other."""

    plan: Plan
    file: Path
    rung: str
    device: str | None
    flags: dict[str, Any]
    """The others by name."""
    output: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        self.timeout = parse(self.flags["timeout"], "seconds", what="--timeout", like="90s")
        if self.timeout <= 0:
            raise PlannerError(f"--timeout {self.flags['timeout']}: it must be above zero")
        self.by_trainer = self._trainer_run()

    def _trainer_run(self) -> TrainerRun | None:
        """What --trainer and its fellows ask for; None without them."""
        flags = self.flags
        name, command, log = flags["trainer"], flags["trainer_command"], flags["trainer_log"]
        if name is None:
            if command or log:
                raise PlannerError(
                    "--trainer-command and --trainer-log need --trainer torchtitan or --trainer megatron"
                )
            return None
        if command and log:
            raise PlannerError("--trainer-log reads a run that was made, --trainer-command makes one: give one of them")
        if flags["steps"] < LEAST_STEPS:
            raise PlannerError(f"--steps {flags['steps']}: a median of a trainer's steps needs at least {LEAST_STEPS}")
        if flags["trace"] is not None or flags["rank"]:
            raise PlannerError("--trace and --rank are of the other levels; a trainer writes its own traces")
        if self.rung != "auto":
            raise PlannerError(
                f"--rung {self.rung} is of the model that is built here, --trainer runs its own: give one of them"
            )
        return TrainerRun(
            trainer=name, steps=flags["steps"], warm_up=max(flags["warmup"], LEAST_WARM_UP), timeout=self.timeout,
            command=command or "", log=log, keep_log=None if self.output is None or log else self.output.with_suffix(".log"),
        )  # fmt: skip

    def task(self, plan: Plan) -> Task:
        """The flags, checked, and what there is to run on."""
        need_torch("plan validate", "2.13")
        flags, trace = self.flags, self.flags["trace"]
        if trace is not None and not trace.resolve().parent.is_dir():
            raise PlannerError(f"--trace {trace}: there is no directory {trace.resolve().parent}")
        return Task(
            plan=plan, asked=question(plan), machine=machine_here(self.device, os.environ), ranks=flags["rank"],
            steps=flags["steps"], warmup=flags["warmup"], timeout=self.timeout, parity=not flags["no_parity"], trace=trace,
            report=self.report,
        )  # fmt: skip

    def validate(self) -> bool:
        """Runs the plan with its trainer or on a level; whether it came to its end, True on a rank that does not report."""
        task = None if self.by_trainer else self.task(self.plan)
        if task is None or task.machine.place is None or task.machine.place.rank == 0:
            _say_changed({str(self.file): self.plan})
            if task is not None and (sentence := other_size(task)):
                print(f"warning: {sentence}", file=sys.stderr, flush=True)
        found = _run(task, self.rung) if task else self.run_with_trainer(self.plan, self.by_trainer)
        if found:
            self.report(found)
        return bool(found.get("outcome", "completed") == "completed")

    def run_with_trainer(self, plan: Plan, trainer: TrainerRun | None, which: str = "") -> dict[str, Any]:
        """One plan with its trainer; ``which`` it is of several."""
        assert trainer is not None
        with Bar(which=which) as bar:
            return run_trainer(plan, self.file, trainer, bar.show)

    def report(self, found: dict[str, Any]) -> None:
        """Writes and prints what was found and what it teaches; what is printed is all in the file."""
        taught = learned(self.plan, complete(found), name=self.file.stem, date=date.today().isoformat())
        written = {**head(self.file), **complete(taught)}
        self.write(written)
        self.show(written, [*validation_tables(written), *learned_lines(written, self.output)])
        if written["failure"] is not None:
            print(f"error: {written['failure']['sentence']}", file=sys.stderr, flush=True)

    def write(self, found: dict[str, Any]) -> None:
        """To --output, where it is given."""
        if self.output is not None:
            library.write_whole(self.output, library.dump_yaml(found))

    def show(self, found: dict[str, Any], tables: list[Any]) -> None:
        """Tables, or JSON with --json."""
        if self.as_json:
            print(json.dumps(found), flush=True)
            return
        out = console()
        for part in tables:
            print_part(out, part)

    # -------------------------------------------------------------------------------------------- finalists

    def finalists(self) -> list[Finalist]:
        """The plan files of --finalist, or the best plans of the job for --top; [] without either. Raises PlannerError."""
        files, top = self.flags["finalist"], self.flags["top"]
        if files and top:
            raise PlannerError("--finalist says which plans are run, --top lets a search say it: give one of them")
        if files:
            return given(self.plan, {file: load_plan(file) for file in files})
        if top is None:
            return []
        with progress("searching") as say:
            chosen = finalists(self.plan, top, say)
        if len(chosen) < 2:
            raise PlannerError("--top: the search finds no other plan of this job that fits; validate the one there is")
        return chosen

    def validate_finalists(self, chosen: list[Finalist]) -> bool:
        """Every finalist by its trainer or on the level of the plan, what is known kept after each; whether one was measured."""
        name = self._level_of_all(chosen)
        read = [one for one in chosen if one.own or self.flags["finalist"]]  # the others were priced just now
        _say_changed({str(self.file) if one.own else f"finalist {one.predicted_rank}": one.plan for one in read})
        today = date.today().isoformat()

        def one(finalist: Finalist) -> dict[str, Any]:
            number, plan = finalist.predicted_rank, finalist.plan
            what = f"finalist {number} of {len(chosen)}{', the plan' if finalist.own else ''}"
            print(f"{what}: {format_seconds(plan.prediction.step_time_s)} per step predicted", file=sys.stderr, flush=True)
            if self.by_trainer is None:
                found = _run(replace(self.task(plan), which=f"{what}: "), name)
            else:
                keep = self.by_trainer.keep_log
                log = keep and keep.with_name(f"{keep.stem}-{number}{keep.suffix}")
                found = self.run_with_trainer(plan, replace(self.by_trainer, keep_log=log), f"{what}: ")
            return learned(plan, complete(found), name=f"{self.file.stem}-{number}", date=today)

        def keep(found: dict[str, Any]) -> None:
            self.write({**head(self.file), **found})

        ranked = validate_all(chosen, one, keep, file=self.file, rung=name)
        self.show({**head(self.file), **ranked}, [*finalist_tables(ranked, self.output)])
        return any(row["measured_seconds"] for row in ranked["finalists"])

    def _level_of_all(self, chosen: list[Finalist]) -> str:
        """On which level finalists are run. Raises PlannerError where they cannot be ranked."""
        for flag, what in (("trainer_log", "is the log"), ("trace", "writes the trace")):
            if self.flags[flag] is not None:
                raise PlannerError(f"--{flag.replace('_', '-')} {what} of one plan, and every finalist is run")
        if self.by_trainer is not None:
            return "trainer"
        task = self.task(next(one.plan for one in chosen if one.own))
        if task.machine.place is not None:
            raise PlannerError(
                "finalists are started one after the other from one process: no torchrun or srun around it"
            )
        level, why = choose(task, self.rung)
        if level.name == "meta":
            raise PlannerError(f"finalists are ranked by measured steps, and level meta measures none ({why})")
        return level.name


def _run(task: Task, rung: str) -> dict[str, Any]:
    """What a level found; {} on a rank that does not report."""
    chosen, why = choose(task, rung)
    if task.trace is not None and chosen.name not in TRACED:
        raise PlannerError(
            f"--trace is of levels {' and '.join(TRACED)}: level {chosen.name} runs no step of all ranks ({why}); leave it out"
        )
    found = chosen.code.run(replace(task, why=why))
    return {"rung": chosen.name, "why": why, **found} if found else {}


def _say_changed(plans: dict[str, Plan]) -> None:
    """Says before a run which plans, by name, no longer price as they say: what is measured of them is not compared with them."""
    for name, plan in plans.items():
        try:
            price_plan(plan, where=name)
        except PlannerError as error:
            print(f"warning: {error}; without that nothing is learned from its run", file=sys.stderr, flush=True)


def many_machines(plan: Plan, nodes: int | None, device: str | None) -> str:
    """What to type on many machines. Raises PlannerError where the ranks cannot be shared out."""
    hardware = plan.cluster().hardware
    count = max(1, -(-plan.num_gpus // int(hardware.gpus_per_node))) if nodes is None else nodes
    if plan.num_gpus % count:
        raise PlannerError(
            f"--nodes {count}: the plan's {plan.num_gpus} GPUs cannot be shared out evenly; use a divisor"
        )
    program = this_program({"--print-commands"}, {"--nodes"})
    return commands("validate", count, plan.num_gpus // count, program, on_cpu=device == "cpu" or hardware.is_cpu)


# ------------------------------------------------------------------------------------------------ finalists


def finalists(plan: Plan, top: int, say: Callable[[str], object] = lambda _: None) -> list[Finalist]:
    """The plan and the fastest others of the same job that fit, ``top`` in all, fastest prediction first.

    The search is free: what the user pinned when the plan was made is not in its file. Raises PlannerError.
    """
    say("searching the other finalists")
    resolved = resolved_of(plan)
    finding = search(resolved.job, None, top)
    plans = [plan]
    for layout, found in zip(finding.layouts, finding.estimates, strict=True):
        if finding.fit and layout != plan.layout and len(plans) < top:
            prediction = predict(found, resolved.job, resolved.kind)
            why = "a finalist of plan validate"
            plans.append(replace(plan, layout=layout, prediction=prediction, why=why))
    return _ordered(plans)


def given(plan: Plan, others: Mapping[Path, Plan]) -> list[Finalist]:
    """The plan and plan files that the user chose. Raises PlannerError where one is of another job."""
    for file, other in others.items():
        for name, what in (("workload", "workload"), ("num_gpus", "number of GPUs"), ("hardware", "hardware")):
            if getattr(plan, name) != getattr(other, name):
                raise PlannerError(
                    f"--finalist {file}: its {what} is not that of the plan; finalists are plans of one job"
                )
    return _ordered([plan, *others.values()])


def _ordered(plans: list[Plan]) -> list[Finalist]:
    """Numbered by prediction; the first of the list is the user's plan."""
    ranked = sorted(plans, key=lambda one: one.prediction.step_time_s)
    return [Finalist(predicted_rank=n, plan=one, own=one is plans[0]) for n, one in enumerate(ranked, 1)]


def validate_all(
    chosen: Sequence[Finalist], run: Callable[[Finalist], dict[str, Any]], keep: Callable[[dict[str, Any]], object],
    *, file: Path, rung: str,
) -> dict[str, Any]:  # fmt: skip
    """Run every finalist and rank them; ``keep`` is given all that is known after each. What a run refuses is its result."""
    found: list[dict[str, Any]] = []
    for one in chosen:
        try:
            result = run(one)
        except PlannerError as error:
            result = refused(one.plan, rung, str(error))
        name = str(file) if one.own else f"{file}, finalist {one.predicted_rank}"
        found.append({"plan": name, "predicted_rank": one.predicted_rank, **result} | {"plan": name})
        keep(ranked(chosen, found, file=file))
        if result["outcome"] == "interrupted":
            break
    return ranked(chosen, found, file=file)


def refused(plan: Plan, rung: str, sentence: str) -> dict[str, Any]:
    """The result of a finalist that could not be run at all."""
    failure = {"rank": None, "phase": "before the start", "sentence": sentence, "allocated_gib": None}
    return {
        "rung": rung, "trainer": plan.load_trainer().name, "layout": plan.layout.to_dict(), "num_gpus": plan.num_gpus,
        "changes": [], "outcome": "failed", "failure": failure, "times": [], "ranks": [], "likeliest": None,
        "no_run": "it was not run", "run": None,
    }  # fmt: skip


def ranked(chosen: Sequence[Finalist], found: Sequence[Mapping[str, Any]], *, file: Path) -> dict[str, Any]:
    """The finalists that were run by measurement, those without one last, with Kendall's tau of the two orders."""
    rows = [_row(one, result) for one, result in zip(chosen, found, strict=False)]
    timed = sorted((row for row in rows if row["measured_seconds"]), key=lambda row: row["measured_seconds"])
    for place, row in enumerate(timed, 1):
        row["measured_rank"] = place
    predicted = np.array([row["predicted_replay_seconds"] or row["predicted_seconds"] for row in timed])
    measured = np.array([row["measured_seconds"] for row in timed])
    tau = kendall_tau(predicted, measured) if len(timed) >= LEAST_TAU else None
    hardware = chosen[0].plan.cluster().hardware
    others = [other_device(hardware, one["device"]) for one in found if one.get("device")]
    caveat = next((f"{why}: this order is of this machine" for why in others if why), None)
    chooses, plans = None, {one.predicted_rank: one for one in chosen}
    if timed and not caveat and not (winner := plans[timed[0]["predicted_rank"]]).own:
        first = next(one for one in chosen if one.own)
        chooses = command(ExportJob.of(first.plan), ExportJob.of(winner.plan), file)
    ordered = [*timed, *(row for row in rows if row not in timed)]
    return {"finalists": ordered, "kendall_tau": tau, "choose": chooses, "caveat": caveat, "validations": list(found)}


def _row(one: Finalist, result: Mapping[str, Any]) -> dict[str, Any]:
    step = None
    if result["outcome"] == "completed":  # compared with the prediction; on cores that others use too replayed; else by the wall
        step = step_of(result) or time_of(result, "replayed_step") or time_of(result, "step")
    failure = result.get("failure")
    compared = bool(step and not step.get("note") and step["predicted_seconds"])
    replayed = step["predicted_seconds"] if step and compared and step["what"] == "replayed_step" else None
    return {
        "predicted_rank": one.predicted_rank, "measured_rank": None, "own": one.own, "layout": layout_text(one.plan.layout),
        "predicted_seconds": one.plan.prediction.step_time_s, "predicted_replay_seconds": replayed,
        "measured_seconds": step["measured_seconds"] if step else None,
        "measured_as": step["what"] if step else None, "compared": compared,
        "outcome": result["outcome"], "sentence": failure["sentence"] if failure else None,
    }  # fmt: skip
