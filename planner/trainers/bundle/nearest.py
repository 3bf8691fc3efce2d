"""What a trainer cannot run is an error that says why, and names the nearest plan that it can run."""

import dataclasses
import shlex
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from planner import library
from planner.cost.estimate import estimate
from planner.errors import PlannerError
from planner.layout import FIELDS, Layout
from planner.plan_file import predict
from planner.rules import Job, allowed, check_workload
from planner.search import Pins, search
from planner.trainer import load_trainer
from planner.trainer_options import spelled
from planner.trainers.bundle.target import STORED, ExportJob, Target, library_trainer

LEAST_IMPORTANT = (
    ("num_microbatches", "order"), ("recompute", "recompute_modules", "recompute_layers"), ("dp_shard",),
    ("offload_activations", "offload_layers"), ("offload_parameters",), ("zero",), ("cp_method",), ("sequence_parallel",),
    ("first_stage_layers", "last_stage_layers"),
    ("schedule", "vpp"), ("etp",), ("offload_optimizer",), ("micro_batch_size",), ("ep",), ("cp",), ("dp",), ("pp",), ("tp",),
)  # fmt: skip
"""Fields of a plan, in the order in which the nearest plan may differ: what costs least to change first."""


def require_expressible(target: Target, job: ExportJob, file: Path) -> None:
    """Raise PlannerError with every reason why the target cannot run the plan as it was priced, and the nearest one it can."""
    reasons = refusals_of(target, job)
    if not reasons:
        return
    message = f"{target.name} cannot run this plan: {'; '.join(reasons)}"
    found = nearest(target, job)
    if found is None:
        raise PlannerError(f"{message}. No layout of this job is one that {target.name} runs; choose another target")
    raise PlannerError(
        f"{message}. The nearest plan that it runs {describe(job, found)}; to get it:\n  {command(job, found, file)}"
    )


def refusals_of(target: Target, job: ExportJob) -> list[str]:
    """Every reason why the target cannot run the plan as it was priced. Raises PlannerError where no layout would change that."""
    reasons = []
    if job.workload.image_tokens or job.workload.trains_images:
        raise PlannerError(
            f"{target.name}: what is exported trains on text, and the plan has {job.workload.image_tokens} image tokens per "
            f"sequence and an image encoder that is {job.workload.image_encoder}; export a plan of text alone"
        )
    if job.model.linear:
        raise PlannerError(
            f"{target.name}: what is exported builds transformer layers, and {job.model.name} has layers with linear attention "
            f"({job.model.linear.kind}); take the degrees of the plan to the trainer's own recipe of this model"
        )
    trainer = library_trainer(job.plan.trainer)
    if trainer not in target.trainers:
        runs = ", ".join(target.trainers) or "no training plans"
        reasons.append(f"the plan was priced for trainer {trainer}, and {target.name} runs plans of {runs}")
    reasons += target.refusals(job)
    if spelled(job.plan.trainer)[0] != trainer and trainer in library.names("trainers"):
        reasons += _unwritten(target, job, trainer)
    return reasons + _unwritten_options(target, job)


def _unwritten(target: Target, job: ExportJob, trainer: str) -> list[str]:
    """What a trainer file of the user's own says about memory and the target's configuration does not."""
    theirs = load_trainer(trainer)
    return [
        f"the plan was priced with {name} {job.trainer.fact(name)} of {job.plan.trainer}, and {target.name} runs with "
        f"{theirs.fact(name)} of trainer {trainer}; plan with the latter"
        for name in STORED if name not in target.writes and job.trainer.fact(name) != theirs.fact(name)
    ]  # fmt: skip


def _unwritten_options(target: Target, job: ExportJob) -> list[str]:
    """Options of the plan's trainer that the target's configuration does not say."""
    name, version, chosen = spelled(job.plan.trainer)
    usual = load_trainer(f"{name}@{version}" if version else name)
    return [
        f"the plan was priced with option {option}={value}, which an export to {target.name} does not write; plan with "
        f"--option {option}={usual.option(option)}"
        for option, value in chosen.items() if option not in target.options and usual.option(option) not in ("", value)
    ]  # fmt: skip


def serves(target: Target) -> bool:
    """Whether it runs the trained model, whoever trains it: then it asks for the model and the machines, not for the layout."""
    return target.trainers == tuple(library.names("trainers"))


def nearest(target: Target, job: ExportJob) -> ExportJob | None:
    """The plan that differs least: the search under the target's rules, with the plan's fields pinned; pins are dropped
    from the least important on until a layout fits that the target does not refuse. None when there is none."""
    if serves(target) and target.refusals(job):
        return None
    own = library_trainer(job.plan.trainer)
    for trainer in sorted(target.trainers, key=lambda one: one != own):
        rules = Job(workload=job.workload, cluster=job.cluster, trainer=load_trainer(trainer))
        try:
            check_workload(job.workload, job.cluster, rules.trainer)
        except PlannerError:
            continue
        for pins in _pins(job.layout):
            for layout in _candidates(rules, pins):
                found = _job(job, trainer, rules, layout)
                if not target.refusals(found):
                    return found
    return None


def _pins(layout: Layout) -> Iterator[dict[str, int]]:
    """All fields, then all but one group, then fewer and fewer."""
    values = {name: int(value) for name, value in layout.columns().items() if name != "num_microbatches"}  # of the batch
    for dropped in ((), *LEAST_IMPORTANT[1:], *accumulate(LEAST_IMPORTANT)):
        yield {name: value for name, value in values.items() if name not in dropped}


def _candidates(job: Job, pins: dict[str, int]) -> list[Layout]:
    """Layouts under these pins: the pinned one itself when nothing is left to vary, else what the search finds."""
    if set(pins) >= set(FIELDS) - {"num_microbatches"}:
        each = pins["dp"] * pins["micro_batch_size"]
        whole = Layout(**{**pins, "num_microbatches": max(job.workload.global_batch_size // each, 1)})
        return [whole] if bool(allowed(job, whole).all()) else []
    finding = search(job, Pins(values=pins), 3)
    return finding.layouts if finding.fit else []


def _job(job: ExportJob, trainer: str, rules: Job, layout: Layout) -> ExportJob:
    """The job with another trainer and layout, priced."""
    prediction = predict(estimate(rules.workload, rules.cluster, rules.trainer, layout), rules, job.plan.kind())
    plan = dataclasses.replace(job.plan, trainer=trainer, layout=layout, prediction=prediction)
    return ExportJob(plan=plan, cluster=job.cluster, trainer=rules.trainer)


def describe(job: ExportJob, found: ExportJob) -> str:
    """What changes, and what it costs."""
    before, after = job.layout.to_dict(), found.layout.to_dict()
    changes = [
        f"{name} {_shown(after[name])} instead of {_shown(before[name])}"
        for name in FIELDS
        if before[name] != after[name]
    ]
    if found.plan.trainer != job.plan.trainer:
        changes.insert(0, f"trainer {found.plan.trainer}")
    step, was = found.plan.prediction.step_time_s, job.plan.prediction.step_time_s
    return f"has {', '.join(changes)}, and takes {step:.3g} s per step instead of {was:.3g} s"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def command(job: ExportJob, found: ExportJob, file: Path) -> str:
    """The command line that writes the nearest plan: the plan file with what changes."""
    words = ["plan", "estimate", str(file)]
    if found.plan.trainer != job.plan.trainer:
        words += ["--trainer", found.plan.trainer]
    before, after = job.layout.to_dict(), found.layout.to_dict()
    for name in FIELDS:
        if before[name] == after[name] or name == "num_microbatches":
            continue
        flag, value = f"--{name.replace('_', '-')}", after[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, ",".join(value) if isinstance(value, list) else str(value)]
    output = file.with_name(f"{file.stem}-{Path(found.plan.trainer).stem}.yaml")
    return shlex.join([*words, "--output", str(output)])
