"""All files of one target of ``plan export`` for an RL plan, held against the framework's own names before they are written."""

from __future__ import annotations

from pathlib import Path

from planner import library
from planner.errors import PlannerError, UnknownNameError, listed
from planner.rl.export.framework_job import FrameworkJob
from planner.rl.export.known_names import known, recorded, wrong
from planner.rl.export.rl_started import ESTIMATORS, HERE, RlTarget, Started
from planner.rl.export.rl_targets import TARGETS
from planner.rl.rl_plan import RlPlan
from planner.trainer_options import number_of
from planner.trainers.bundle.folder import NamedExport, write_bundle
from planner.trainers.bundle.quoting import shell_command, text_from

UNPRICED = "the plan was not priced: its phases and memory are not known"


def export_rl(plan: RlPlan, to: str, folder: Path, *, force: bool = False) -> NamedExport:
    """Write an RL plan for a framework. Raises PlannerError when it cannot run there, or the folder cannot be written."""
    made = make_export(plan, to)
    write_bundle(made, folder, force=force)
    return made


def make_export(plan: RlPlan, to: str) -> NamedExport:
    """The files of an RL plan for a framework. Raises PlannerError."""
    if to not in TARGETS:
        raise UnknownNameError("target of an RL plan", to, TARGETS)
    job, target = FrameworkJob.of(plan, to), TARGETS[to]
    problems = [*target.refusals(job), *_beyond(job, target)]
    if plan.workload.offline:
        problems = ["pairs that were recorded are learned without a rollout; plan --objective dpo plans that and exports it"]
    elif plan.workload.algorithm not in ESTIMATORS[to]:
        problems.append(f"algorithm {plan.workload.algorithm} has no word there; plan with one of {', '.join(ESTIMATORS[to])}")
    if problems:
        raise PlannerError(f"{job.framework.label} cannot run this plan: {'; '.join(problems)}")
    started, (names, checked) = target.render(job), known(to)
    if found := wrong(to, started.settings, names):
        raise PlannerError(f"{checked} would refuse what was written: {'; '.join(found)}")
    notes = (*started.notes, *_notes(job))
    files = {
        **started.files, "run.sh": _run(job, started), "environment.sh": text_from(
            "planner.serving.export/environment.sh.j2", variables=started.variables),
        "plan.yaml": library.dump_yaml(plan.to_dict()),
    }  # fmt: skip
    files["README.md"] = text_from(
        f"{HERE}/README.rl.md.j2", plan=plan, target=to, title=target.title, checked=checked, started=started,
        nodes=1 if started.once else job.nodes, layout=job.layout, rollout=job.rollout,
        trainer=plan.trainer, answers=job.answer_limit, notes=notes,
    )  # fmt: skip
    return NamedExport(target=to, files=files, notes=notes, warnings=tuple(_warnings(plan, job)), checked=checked)


def _beyond(job: FrameworkJob, target: RlTarget) -> list[str]:
    """Sentences on what the target's settings have no words for."""
    found, precision = list[str](), job.plan.layouts.rollout_precision
    if job.two_kinds and not target.kinds:
        able = listed([name for name, one in TARGETS.items() if one.kinds])
        found.append(
            f"{job.hardware.name} trains and {job.generate_hardware.name} generates: it does not say which nodes a pool gets; "
            f"{able} do"
        )
    for what, value, takes, flag in (
        ("weights", precision.weights, target.weights, "--weights"), ("keys and values", precision.cache, target.caches, "--cache"),
    ):  # fmt: skip
        if value not in takes:
            found.append(f"the rollout's {what} are {value}: its rollout takes {listed(takes)}; plan with {flag} {takes[0]}")
    return found


def _run(job: FrameworkJob, started: Started) -> str:
    """The script of every node."""
    words = [*started.entry, "$@"]
    command = shell_command(words)
    head = f"{job.work.algorithm} of {job.work.model.name} with {job.framework.label}, {job.plan.placement.mode} pools."
    waits = any("trap" in line for line in started.prepare)  # the shell must live to end what it started
    return text_from(
        f"{HERE}/run.sh.j2", what=head, nodes=1 if started.once else job.nodes, per_node=job.per_node, started=started,
        command=command if waits else f"exec {command}",
    )  # fmt: skip


def _notes(job: FrameworkJob) -> list[str]:
    """What the framework cannot say in its own words."""
    found = []
    if job.work.algorithm == "dapo" and job.framework.name in ("verl", "openrlhf", "slime", "areal", "trl"):
        found.append("The plan counts groups that are sampled again; the framework's own filter of groups is not switched on here.")
    if job.work.epochs > 1 and job.framework.name in ("nemo-rl", "slime", "areal", "prime-rl"):
        found.append(f"The plan has {job.work.epochs} epochs over the answers of a step; the framework makes one.")
    if job.work.reference and job.framework.name == "prime-rl":
        found.append("The plan counts log-probs of a frozen reference; prime-rl has none.")
    if job.framework.name == "slime" and job.staleness > 1:
        found.append(f"The plan is {job.staleness} steps ahead; slime's fully asynchronous rollout has no bound.")
    if job.work.speculation is not None:
        found.append("The plan counts drafted tokens: switch speculative decoding on in the engine's own settings.")
    if job.work.reward_model is not None:
        found.append("The plan counts a reward model on the actor's GPUs: its service is the user's to start.")
    if job.work.turns > 1:
        found.append("Turns with tools need an agent loop of the framework: the plan counts their tokens and time only.")
    return found


def _warnings(plan: RlPlan, job: FrameworkJob) -> list[str]:
    """Versions that the names were not read of; memory that does not suffice."""
    found = [job.framework.note] if job.framework.note else []
    record = recorded(job.framework.name)["version"].split(" ")[0]
    if number_of(record)[:2] != number_of(job.framework.version)[:2]:
        found.append(f"the plan is for {job.framework.label}, and names were read of {record}: look at them again")
    if plan.prediction is None:
        found.append(UNPRICED)
    elif not plan.prediction.fits:
        found.append("by the plan's own prediction its memory does not suffice")
    if job.framework.name != plan.framework.partition("@")[0]:
        found.append(f"the plan was priced for {plan.framework}, whose phases differ from those of {job.framework.name}")
    return found
