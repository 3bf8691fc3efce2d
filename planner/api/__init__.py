"""The Python API: what commands and notebooks call. ``import planner`` offers the same names, and imports them when asked.

Keywords are the flags of the command line in Python spelling. Quantities are seconds and bytes; text with a unit
('400 Gb/s', '71GiB') is read where a flag reads it. What cannot be done is a PlannerError that says why.
"""

# ruff: noqa: F405
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from planner.api.cluster_calls import *  # noqa: F403
from planner.api.elastic_calls import *  # noqa: F403
from planner.api.mixed_calls import *  # noqa: F403
from planner.api.plan_kinds import *  # noqa: F403
from planner.api.results import Answer, Estimate, Exported, File, Imported, Plan, Plans, Progress, Result, silent
from planner.api.rl_calls import *  # noqa: F403
from planner.api.said import seconds_of, texts
from planner.api.serving_calls import *  # noqa: F403
from planner.errors import PlannerError, shown
from planner.keywords import (
    JOB,
    LOGGED,
    SEARCHED,
    JobKeywords,
    Keywords,
    flag_of,
    layout_values,
    request_fields,
    require_known,
)
from planner.layout import FIELDS
from planner.units import parse

if TYPE_CHECKING:
    from planner.assumption import Assumption
    from planner.questions.accuracy.prediction import Pair
    from planner.questions.accuracy.serving_errors import ServingPair
    from planner.questions.calibrate.output import Calibrated
    from planner.questions.compare.numbers import Comparison
    from planner.questions.doctor.numbers import Diagnosis
    from planner.questions.hardware.diff import ProfileDiff
    from planner.questions.sensitivity.numbers import Sensitivity
    from planner.questions.what_if.numbers import WhatIf

def plan(
    *,
    top: int = 5,
    tokens: str | float | None = None,
    days: float | None = None,
    price: float | None = None,
    progress: Progress = silent,
    **keywords: Unpack[Keywords],
) -> Plans:
    """The ``top`` best plans of a job: ``plan(model="llama-70b", gpus=8, tp=8)``. Fields of a layout that are given stay.

    ``tokens`` ('15T') asks what training on them takes with the best plan, at ``price`` USD per GPU-hour; with ``days`` and without
    ``gpus`` the job gets the fewest GPUs that do it in time. Empty when nothing fits. Raises PlannerError when the job cannot be
    read, or no layout of it is legal.
    """
    from planner.api.plans_of import plans_of
    from planner.api.token_budget import fewest, read_budget, training
    from planner.defaults import Request, resolve
    from planner.search import Pins

    require_known("plan", keywords, (*JOB, *SEARCHED))
    said = request_fields(keywords)
    budget, pins = read_budget(tokens, days, price), Pins(values=layout_values(keywords))
    sized = bool({"num_gpus", "nodes"} & said.keys())
    for missing, flag in (("model" not in said, "--model"), (not sized and days is None, "--gpus, or --nodes,")):
        if missing:
            raise PlannerError(f"which job? {flag} is missing")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise PlannerError(f"top is {top!r}; it must be a whole number from 1 to 100")
    counted: tuple[Assumption, ...] = ()
    if budget is not None and not sized:
        said, counted = fewest(budget, said, pins, progress)
        keywords = {**keywords, "gpus": said["num_gpus"]}
    resolved = resolve(Request(**said))
    resolved = replace(resolved, assumptions=(*counted, *resolved.assumptions))
    found = plans_of(resolved, pins, top, keywords, progress)
    if budget is None or not found:
        return found
    return replace(found, training=training(budget, found.resolved, found[0].estimate.step_time))


def plan_mixed(
    cluster: File, *, outer: str | None = None, runnable: bool = False, top: int = 3, progress: Progress = silent, **keywords: Any
) -> Plans | MixedPlans:  # fmt: skip
    """The best plans on the nodes of a cluster file: ``plan_mixed("cluster.yaml", model="llama-70b")``.

    A file with one kind at one speed is the ordinary question, and gives ``Plans``. ``outer``: local updates between sites,
    METHOD:EVERY[:BITS[:FRAGMENTS]]. ``runnable``: only what an export of the trainer runs. Raises PlannerError.
    """
    from planner.api.mixed_calls import mixed_plans

    found = mixed_plans(cluster, top, progress, keywords, outer, runnable)
    return found if isinstance(found, MixedPlans) else plan(top=top, progress=progress, **found)


def estimate(base: Plan | File | None = None, /, **keywords: Unpack[Keywords]) -> Plan:
    """One explicit layout, priced: ``estimate(model="llama-8b", gpus=8, tp=2, recompute="full")``.

    ``base`` is a plan, or a file of a plan or of layout fields; keywords replace what it says. What is left out follows from
    the rest. Raises PlannerError when something is missing or the layout is not legal.
    """
    from planner.explicit import explicit_plan

    require_known("estimate", keywords, (*JOB, *FIELDS))
    start = base.file if isinstance(base, Plan) else base if base is None else Path(base)
    return Plan(explicit_plan(start, layout_values(keywords), request_fields(keywords)))


def load(path: File) -> Plan:
    """The plan of a plan file. Raises PlannerError when it is damaged, or newer than this planner."""
    from planner.plan_file import load_plan

    return Plan(load_plan(Path(path)), name=str(path))


def loaded(one: Plan | File) -> Plan:
    """A plan, or that of a plan file."""
    return one if isinstance(one, Plan) else load(one)


def compare(*plans: Plan | File) -> Answer[Comparison]:
    """Plans, or plan files, with the first: what differs, and what each difference does to time and memory.

    Raises PlannerError for fewer than two plans, and for one that no longer prices as it says.
    """
    from planner.questions.compare.numbers import compare as compare_plans
    from planner.questions.compare.show import print_comparison

    read = [loaded(one) for one in plans]
    names = [one.name or f"plan {number}" for number, one in enumerate(read, 1)]
    return Answer(compare_plans([one.file for one in read], names), print_comparison)


@dataclass(frozen=True, repr=False)
class Changes(Answer["WhatIf"]):
    """The best plan per change of a job; ``found.rows`` hold seconds, tokens/s per GPU, GiB and USD per million tokens."""

    found: WhatIf

    def plot(self, picture: File) -> bool:
        """Draw the first sweep to a .png file: tokens/s of the job and per GPU. False where fewer than two points were found.

        Raises PlannerError.
        """
        from planner.questions.what_if.show import sweep_plot

        return sweep_plot(self.found, Path(picture))


def what_if(
    base: Plan | File | None = None, /, *, sweep: bool = False, progress: Progress = silent, **changes: Any
) -> Changes:
    """The same job with one thing changed, the best plan each: ``what_if(plan, network="x2", gpus=[64, 128])``.

    Keywords are the flags of ``plan what-if``: values or lists of values, in base units (bytes/s, bytes, seconds) or as text
    with a unit, factors like 'x2', ranges like '64..512'; ``fewest_gpus=True`` and the other questions; ``price`` a number or
    one by hardware. Without a base the first value of each describes the job. ``sweep`` requires several numbers of one flag,
    which ``plot`` draws. Raises PlannerError.
    """
    from planner.questions.best_plan import resolved_of
    from planner.questions.what_if.changes import INPUTS
    from planner.questions.what_if.numbers import QUESTIONS, ask
    from planner.questions.what_if.numbers import what_if as answer
    from planner.questions.what_if.show import print_what_if

    further = ("tokens", "days", "budget", "price", "power_share", "pue", "together")
    require_known("what_if", changes, (*INPUTS, *QUESTIONS, *further, *SEARCHED))
    flags: dict[str, Any] = {
        name: one if one is None else texts(one, INPUTS[name].kind) for name, one in changes.items() if name in INPUTS
    }
    flags |= {name: one for name, one in changes.items() if name in (*QUESTIONS, *further)}
    price = changes.get("price")
    flags["price"] = [f"{name}={one}" for name, one in price.items()] if isinstance(price, dict) else texts(price)
    for name in ("tokens", "budget"):
        flags[name] = None if changes.get(name) is None else str(changes[name])
    for name in ("days", "power_share", "pue"):
        value = changes.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise PlannerError(f"{name} is {shown(value)}; it must be a number")
    resolved = None if base is None else resolved_of(loaded(base).file)
    asked = ask(resolved, flags, layout_values(changes))
    if sweep and not asked.sweeps:
        raise PlannerError("--plot draws a sweep: give one flag several numbers, like --gpus 64..4096")
    return Changes(answer(asked, progress), print_what_if)


def sensitivity(
    base: Plan | File | None = None, /, *, reach: float = 2.0, progress: Progress = silent, **keywords: Unpack[Keywords]
) -> Answer[Sensitivity]:
    """Which measured number the choice of a plan hangs on, each looked at from 1/``reach`` to ``reach`` times its value.

    ``base`` is a plan or its file; without one, the keywords say the job. Fields of a layout hold. Raises PlannerError.
    """
    from planner.defaults import Request, resolve
    from planner.questions.best_plan import resolved_of
    from planner.questions.sensitivity.numbers import sensitivity as look
    from planner.questions.sensitivity.show import print_sensitivity
    from planner.search import Pins

    require_known("sensitivity", keywords, (*JOB, *SEARCHED))
    said = request_fields(keywords)
    if base is not None and said:
        flag = flag_of(next(iter(said)))
        name = base.name or "the plan" if isinstance(base, Plan) else base
        raise PlannerError(f"{name} says the whole job, and so does {flag}; to look at a changed job, plan it first")
    if base is None and not ("model" in said and {"num_gpus", "nodes"} & said.keys()):
        raise PlannerError("which job? give a plan file, or --model and --gpus")
    resolved = resolve(Request(**said)) if base is None else resolved_of(loaded(base).file)
    found = look(resolved, pins=Pins(values=layout_values(keywords)), reach=reach, progress=progress)
    return Answer(found, print_sensitivity)


def doctor(
    plan: Plan | File,
    *,
    measured: str | float | None = None,
    memory: str | float | None = None,
    memory_kind: str = "device",
    trace: File | Sequence[File] = (),
    progress: Progress = silent,
) -> Answer[Diagnosis]:
    """What was measured against a plan, and what would explain the gap.

    ``measured``: time of one optimizer step, '14.2s' or seconds. ``memory``: peak of one GPU, '71GiB' or bytes, of the
    ``memory_kind`` device, reserved or allocated. ``trace``: of torch.profiler, a file for each rank, or folders and patterns; its
    step time counts where none is given. Raises PlannerError.
    """
    from planner.kineto.job_traces import read_traces, trace_files
    from planner.kineto.plan_traces import step_time_of
    from planner.questions.doctor.numbers import diagnose
    from planner.questions.doctor.show import print_diagnosis
    from planner.questions.doctor.traced import plan_comparison

    seconds = seconds_of(measured) if isinstance(measured, str) else measured
    size = parse(memory, "bytes", what="--memory") if isinstance(memory, str) else memory
    file, files = loaded(plan).file, trace_files([trace] if isinstance(trace, (str, PathLike)) else trace)
    traced = None
    if files:
        traced = plan_comparison(file, read_traces(files, file.layout, progress))
        seconds = step_time_of(traced.job) if seconds is None else seconds
    return Answer(diagnose(file, seconds, size, memory_kind, traced), print_diagnosis)


@dataclass(frozen=True, repr=False)
class Accuracy(Answer[dict[str, Any]]):
    """Runs with measured and predicted seconds and GiB, and their errors: predicted / measured - 1."""

    pairs: tuple[Pair, ...]
    """Each training run with its prediction, in seconds and bytes."""
    serving: tuple[ServingPair, ...] = ()
    """Each serving run with its prediction."""

    def write_page(self, path: File) -> Path:
        """Write the report as Markdown, and its scatter plot next to it, whose path is returned. Raises PlannerError."""
        from planner.questions.accuracy.training_and_serving import write_both

        return write_both(self.pairs, self.serving, self.found["summary"], Path(path))


def accuracy(
    paths: Sequence[File] | None = None, *, sweeps: bool = False, worst: int = 0, generic: bool = False
) -> Accuracy:
    """Published runs, or those of files and folders, predicted: training and serving. The tables show every sweep of layouts with
    ``sweeps``, and the ``worst`` rows. ``generic``: each framework as the newest version of its trainer, without recipes. Raises
    PlannerError.
    """
    from planner.questions.accuracy.training_and_serving import accuracy_of

    files = None if paths is None else [Path(one) for one in paths]
    return Accuracy(*accuracy_of(files, sweeps=sweeps, worst=worst, generic=generic))


def calibrate(
    runs: Sequence[File],
    *,
    hardware: File,
    output: File,
    trainer: File | None = None,
    traces: Sequence[tuple[File, File]] = (),
    progress: Progress = silent,
    **said: Any,
) -> Answer[Calibrated]:
    """Correct a hardware profile with measured runs and write it to ``output``, a YAML file; then plan validated jobs again.

    ``runs``: files of ``plan validate``, tables of runs, or training logs; ``traces``: plans with the traces of their runs.
    Keywords say what a log does not: model, gpus, sequence_length, global_batch_size, precision, and fields of the layout.
    ``trainer``: of the runs; None = by the framework of each. Raises PlannerError, and then nothing is written.
    """
    from planner.hardware import load_hardware
    from planner.questions.calibrate.numbers import calibrate as fit
    from planner.questions.calibrate.output import Calibrated, replan, shared_trainer, write
    from planner.questions.calibrate.show import print_calibrated
    from planner.questions.calibrate.sources import given_of, read_measured
    from planner.questions.calibrate.traced_runs import read_traced
    from planner.trainer import load_trainer

    require_known("calibrate", said, ("model", "gpus", "sequence_length", "global_batch_size", "precision", *LOGGED))
    base, own = fspath(hardware), None if trainer is None else fspath(trainer)
    given = given_of(said)
    measured = read_measured([Path(one) for one in runs], base, trainer=load_trainer(own) if own else None, given=given)
    traced = read_traced(traces, base, progress)
    measured += [one.run for one in traced]
    shared = shared_trainer(measured)
    found = fit(measured, load_hardware(base), shared)
    files = write(found, base, shared, Path(output), trainer_base=own)
    progress("planning again")
    names = [str(path) for path in files]
    plans = replan(measured, load_hardware(names[0]), load_trainer(names[1]) if names[1:] else None, files=names)
    calibrated = Calibrated(base=base, calibration=found, files=tuple(files), plans=tuple(plans), traced=tuple(traced))
    return Answer(calibrated, print_calibrated)


def show_profile(name: File) -> Answer[dict[str, Any]]:
    """What a hardware profile says: figures read off its curves, where they come from, and what is assumed; of a cluster file its
    nodes and links.

    ``name``: of the library, or a YAML file. Raises PlannerError.
    """
    from planner.api.cluster_calls import is_cluster_file, show_cluster

    if is_cluster_file(name):
        return show_cluster(name)
    from planner.hardware import load_hardware
    from planner.questions.hardware.numbers import shown_profile
    from planner.questions.hardware.show import print_profile

    return Answer(shown_profile(load_hardware(fspath(name))), print_profile)


def compare_profiles(first: File, second: File, *, everything: bool = False) -> Answer[ProfileDiff]:
    """Where two hardware profiles differ by more than chance; the tables show the 30 largest, or ``everything``."""
    from planner.hardware import load_hardware
    from planner.questions.hardware.diff import profile_diff
    from planner.questions.hardware.show import print_diff

    names = fspath(first), fspath(second)
    found = profile_diff(load_hardware(names[0]), load_hardware(names[1]), names)
    return Answer(found, partial(print_diff, everything=everything))


def plot_profile(name: File, picture: File) -> None:
    """Draw the curves of a hardware profile, or the nodes of a cluster file, to a .png, .svg or .pdf file. Raises PlannerError."""
    from planner.api.cluster_calls import is_cluster_file, plot_cluster
    from planner.hardware import load_hardware
    from planner.questions.hardware.profile_plot import plot

    path = Path(picture)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise PlannerError(f"{path}: name a picture that ends in .png, .svg or .pdf")
    if is_cluster_file(name):
        plot_cluster(name, path)
        return
    plot(load_hardware(fspath(name)), path)


def import_config(
    file: File,
    *,
    format: str | None = None,
    settings: Mapping[str, str] | Sequence[str] = (),
    micro_batch_size: int | None = None,
    **said: Unpack[JobKeywords],
) -> Imported:
    """A trainer's configuration as a plan, priced. Keywords go before what is read: model, gpus, hardware, trainer,
    sequence_length, global_batch_size.

    ``format``: a trainer that has a reader; None = by the file's content. ``settings``: values of variables of a script and of
    keys of a configuration, {'PP_SIZE': '8'} or ['PP_SIZE=8']; ``micro_batch_size``: sequences per forward pass where the file
    leaves it to the command line. Raises PlannerError with what decides time or memory and is said nowhere.
    """
    from planner.trainers.reading import read
    from planner.trainers.reading.configuration import SAID, to_plan
    from planner.trainers.reading.given import Given, parse_settings
    from planner.trainers.reading.weight_layouts import noted

    require_known("import_config", said, ["gpus" if name == "num_gpus" else name for name in SAID])
    fields = {name: value for name, value in request_fields(said).items() if name in SAID}
    shape: dict[str, Any] = {name: fields.get(name) for name in ("num_gpus", "model", "sequence_length", "global_batch_size")}
    reading = read(Path(file), format, Given(**shape, micro_batch_size=micro_batch_size, settings=parse_settings(settings)))
    return Imported(plan := to_plan(reading, fields), unread=reading.unread, noise=reading.noise, notes=noted(reading.notes, plan))


__all__ = [
    "Accuracy", "Answer", "Changes", "Estimate", "Exported", "Imported", "MixedPlan", "MixedPlans", "Plan", "PlannerError",
    "Plans", "Reshaped", "Resilient", "Result", "RlPlan", "RlPlans", "ServePlan", "ServePlans", "accuracy", "calibrate",
    "cluster_of_nodes", "compare", "compare_profiles", "doctor", "estimate", "estimate_rl", "import_config", "load", "load_mixed",
    "load_rl", "load_serve", "mixed_what_if", "plan", "plan_kind", "plan_mixed", "plan_rl", "plot_profile", "reshape",
    "resilience", "sensitivity", "serve", "serve_cheapest", "serve_cluster", "serve_compare", "serve_estimate", "serve_what_if",
    "show_profile", "validate_mixed", "watch", "what_if",
]  # fmt: skip
