"""Finalists: the best plans of a job run one after the other, ranked anew by what they measured.

Plans that are within the model's error of each other are ranked by running them. One that goes out of memory, hangs or
loses a rank is a result, and the next is taken; what is known is written whole after each.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.explain import layout_text
from planner.lab.run.learn import other_device, step_of, time_of
from planner.plan_file import Plan, predict
from planner.questions.accuracy.ranking import kendall_tau
from planner.questions.best_plan import resolved_of
from planner.search import search
from planner.trainers.bundle.nearest import command
from planner.trainers.bundle.target import ExportJob

LEAST_TAU = 3
"""Measured finalists from which a rank correlation says anything."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """One plan of those that are run."""

    predicted_rank: int
    """From 1, by predicted step time."""
    plan: Plan
    own: bool
    """It is the plan of the file; the others are of a search of the same job."""


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
            plans.append(dataclasses.replace(plan, layout=layout, prediction=prediction, why=why))
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
    predicted, measured = (np.array([row[f"{name}_seconds"] for row in timed]) for name in ("predicted", "measured"))
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
    return {
        "predicted_rank": one.predicted_rank, "measured_rank": None, "own": one.own, "layout": layout_text(one.plan.layout),
        "predicted_seconds": one.plan.prediction.step_time_s, "measured_seconds": step["measured_seconds"] if step else None,
        "measured_as": step["what"] if step else None, "compared": bool(step and step["what"] == "step" and not step.get("note")),
        "outcome": result["outcome"], "sentence": failure["sentence"] if failure else None,
    }  # fmt: skip
