"""How to run a plan: the command line that makes the same plan, the search it stands in, its export and its check."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from planner import library
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.explicit import complete, usual_recompute
from planner.keywords import JOB, command_line, request_fields
from planner.layout import FIELDS, Layout
from planner.model import load_model
from planner.plan_file import Plan
from planner.questions.report.document import FILE
from planner.trainer_options import spelled
from planner.trainers.bundle.nearest import refusals_of, serves
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import TARGETS, load_target


def commands(plan: Plan, resolved: ResolvedJob, *, fits: bool) -> list[dict[str, str]]:
    """What each command does and the command, in the order in which they are run; an export of what fits."""
    found = []
    said = job_keywords(plan)
    if said is not None:
        whole = {**said, **layout_keywords(resolved, plan.layout), "output": FILE}
        found.append(("Make this plan again", command_line(whole, "plan estimate")))
        found.append(("Search all layouts of the job", command_line(said)))
    else:
        found.append(("Price it again; save the plan file from the page first", f"plan estimate {FILE}"))
    if fits and (target := target_of(plan)):
        found.append((f"Write it for {target}", f"plan export {FILE} --to {target} --output run/"))
    found.append(("Compare it with your own measured step", f"plan doctor {FILE} --measured {plan.prediction.step_time_s:.3g}s"))
    return [{"what": what, "command": command} for what, command in found]


def job_keywords(plan: Plan) -> dict[str, Any] | None:
    """The job of a plan as keywords, those left out that follow from the others; None where the model stands in the plan alone."""
    work = plan.workload
    if work.model.name not in library.names("models") or load_model(work.model.name) != work.model:
        return None
    rate = plan.network_bandwidth
    words: dict[str, Any] = {
        "model": work.model.name, "gpus": plan.num_gpus, "hardware": plan.hardware, "trainer": plan.trainer,
        "sequence_length": work.sequence_length, "global_batch_size": work.global_batch_size,
        "precision": work.precision, "optimizer": work.optimizer,
        "network_bandwidth": None if rate is None else f"{rate!r} B/s",
    }  # fmt: skip
    own = {name: getattr(work, name) for name in JOB if name in vars(work) and name not in words}
    for _ in range(2):  # what was said may change what is taken for the rest
        taken = resolve(Request(**request_fields(words))).job.workload
        words |= {name: value for name, value in own.items() if getattr(taken, name) != value}
    return words


def layout_keywords(resolved: ResolvedJob, layout: Layout) -> dict[str, Any]:
    """The fields of a layout from which ``plan estimate`` fills in the others."""
    whole, usual = {name: int(value) for name, value in layout.columns().items()}, Layout()
    values = {name: value for name, value in whole.items() if value != getattr(usual, name) and name != "num_microbatches"}
    if layout.dp * layout.cp > 1:
        values["zero"] = whole["zero"]
    filled = usual_recompute(resolved.job) if not {"recompute", "recompute_modules", "recompute_layers"} & set(values) else {}
    with suppress(PlannerError):
        other, _ = complete(resolved.job, values | filled)
        values |= {name: whole[name] for name in FIELDS if int(getattr(other, name)) != whole[name]}
    texts: Mapping[str, Any] = layout.to_dict()
    return {name: texts[name] for name in FIELDS if name in values and texts[name] != []}


def target_of(plan: Plan) -> str:
    """The target of ``plan export`` that can run a plan, that of its own trainer first; '' where none can."""
    own = spelled(plan.trainer)[0]
    for name in sorted(TARGETS, key=lambda one: one != own):
        target = load_target(name)
        if not serves(target):
            with suppress(PlannerError):
                if not refusals_of(target, ExportJob.of(plan)):
                    return name
    return ""
