"""What a validation teaches: the mechanism that is likeliest behind a miss, and the run that calibration reads.

``learned`` adds to what a level found the keys ``likeliest``, ``no_run`` and ``run``; every level goes through it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.detect import profile_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.run.levels import Machine
from planner.layout import Layout
from planner.plan_file import Plan, predict
from planner.questions.doctor.numbers import Finding, diagnose
from planner.runs import Measured
from planner.runs.mapping import document_of_plan
from planner.timeline.priced_plan import estimate_of, job_of
from planner.units import GIB

RAN = ("full", "truncated", "trainer")
"""Levels whose step is one that all ranks of a job really ran: the plan's, or of the truncated plan, which is a job of its own."""
PARTS = {
    "meta": "level meta runs on fake tensors: nothing was measured on hardware",
    "rank": "level rank runs ranks alone: passes and memory are measured, communication is priced, and no step of a job was run",
}
"""Why the other levels are no run of a job."""
PEAKS = {"reserved": "reserved", "device": "device", "peak": "allocated", "allocated": "allocated"}
"""Rows of a rank's memory that are a peak, best for a comparison first, and what they are the peak of."""


def learned(plan: Plan, found: Mapping[str, Any], *, date: str = "", name: str = "plan") -> dict[str, Any]:
    """What a level found, with ``likeliest``, ``no_run`` and ``run``; ``plan`` is the one that was asked for."""
    if not found.get("layout"):  # it ended before there was anything to compare
        return {**found, "likeliest": None, "no_run": "nothing was run", "run": None}
    if found["rung"] != "truncated":
        return learned_of(plan, found, date=date, name=name)
    run = found.get("run")  # it has learned of its own plan, which is a smaller one (truncated.py)
    run = run and {**run, "rows": [{**run["rows"][0], "id": f"{name}-truncated"}]}
    return {"likeliest": None, "no_run": None, **found, "run": run}


def learned_of(plan: Plan, found: Mapping[str, Any], *, date: str = "", name: str = "plan") -> dict[str, Any]:
    """The same, of the plan that was run."""
    try:
        ran = as_run(plan, found)
        why_not = no_run(ran, found)
        run = None if why_not else document_of_plan(
            ran, measured_of(found), name=name, framework=f"plan validate, rung {found['rung']}, {found['trainer']}",
            date=date, notes="; ".join(found.get("changes") or ()), where=str(found.get("where") or ""),
            changes=(found.get("as_run") or {}).get("trainer"),
        )  # fmt: skip
        return {**found, "likeliest": likeliest(ran, found), "no_run": why_not or None, "run": run}
    except PlannerError as error:  # what was measured is kept, whatever the plan's files have become
        return {**found, "likeliest": None, "no_run": str(error), "run": None}


def as_run(plan: Plan, found: Mapping[str, Any]) -> Plan:
    """The plan as it was run and priced: with the trainer and the layout of ``found``, where they are others."""
    layout, own = Layout.from_dict(found["layout"]), found["trainer"] == plan.load_trainer().name
    if own and layout == plan.layout:
        return plan
    other = dataclasses.replace(plan, trainer=plan.trainer if own else found["trainer"], layout=layout)
    job = job_of(other)
    return dataclasses.replace(other, prediction=predict(estimate_of(job, layout), job, plan.kind()))


def measured_of(found: Mapping[str, Any]) -> Measured:
    """Step time, and the highest peak of all ranks in the best kind that was read."""
    if found["outcome"] == "out_of_memory":
        return Measured(step_time=None, memory=None, memory_kind="", fits=False)
    (kind, peak), step = peak_of(found), step_of(found)
    return Measured(step_time=None if step is None else step["measured_seconds"], memory=peak, memory_kind=kind, fits=True)


def step_of(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of the step among the times, where it is compared with the prediction; None where it is not, or was not measured."""
    row = time_of(found, "step")
    return row if row and row["predicted_seconds"] is not None and not row.get("note") else None


def time_of(found: Mapping[str, Any], what: str) -> Mapping[str, Any] | None:
    """A row of the times that was measured."""
    return next((row for row in found.get("times") or () if row["what"] == what and row.get("measured_seconds")), None)


def peak_of(found: Mapping[str, Any]) -> tuple[str, float | None]:
    """(kind, bytes) of the highest peak of the ranks; None where none was measured."""
    rows = [row for rank in found.get("ranks") or () for row in rank.get("memory") or () if row["measured_gib"]]
    for what, kind in PEAKS.items():
        sizes = [row["measured_gib"] * GIB for row in rows if row["what"] == what]
        if sizes:
            return kind, max(sizes)
    return "", None


def no_run(plan: Plan, found: Mapping[str, Any]) -> str:
    """Why nothing was measured that the plan predicts; '' = something was."""
    if found["rung"] not in RAN:
        return PARTS.get(found["rung"], f"level {found['rung']} measures a part of the plan and prices the rest")
    if found.get("unchecked"):
        return f"what ran is not the plan: {'; '.join(found['unchecked'])}"
    if found["outcome"] not in ("completed", "out_of_memory"):
        return f"the run ended as {found['outcome'].replace('_', ' ')}"
    other = other_device(plan.cluster().hardware, found.get("device") or {})
    if other:
        return other
    step = time_of(found, "step")
    if step is not None and step.get("note"):
        return str(step["note"])
    if found["outcome"] == "completed" and step is None and peak_of(found)[1] is None:
        return "neither a step time nor a peak of memory was measured"
    return ""


def other_device(hardware: HardwareProfile, device: Mapping[str, Any]) -> str:
    """Why a measurement on a device says nothing about a plan for a hardware profile; '' = it does."""
    kind, name = device.get("kind"), str(device.get("name") or "")
    if (kind == "cpu") != hardware.is_cpu:
        return f"it ran on {'CPUs' if kind == 'cpu' else name or 'GPUs'}, and the plan is for {hardware.device}"
    if kind == "cpu":
        return ""
    known = profile_of(name)
    arch = load_hardware(known).arch if known else hardware.arch
    return "" if arch == hardware.arch else f"it ran on {name} ({arch}), and the plan is for {hardware.device}"


def not_compared(hardware: HardwareProfile, machine: Machine) -> str:
    """Why times of this machine are not compared with a plan's; '' = they are."""
    why = other_device(hardware, {"kind": machine.device, "name": machine.name})
    return why and f"{why}: not compared"


def likeliest(plan: Plan, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What most plausibly explains a step or a peak outside of the plan's interval; None where both lie within.

    The answer of planner.questions.doctor.numbers. Nothing is said of times that another device gave.
    """
    device, hardware = found.get("device") or {}, plan.cluster().hardware
    if found["outcome"] != "completed" or (found["rung"] in RAN and other_device(hardware, device)):
        return None
    row, (kind, peak) = None if found.get("as_run") else step_of(found), peak_of(found)
    if not _ran_the_largest(plan, found):
        peak = None
    if peak is not None and kind == "allocated" and (found["rung"] == "meta" or device.get("kind") == "cpu"):
        peak += float(hardware.workspace_memory)  # of GPU libraries: a memory tracker without a GPU cannot see it
    step = None if row is None else float(row["measured_seconds"])
    if step is None and peak is None:
        return None
    try:
        findings = diagnose(plan, step, peak, kind or "device").findings
    except PlannerError as error:  # the plan's files changed since it was made
        return {"mechanism": None, "sentence": f"no mechanism can be named: {error}"}
    missed = [_miss(one) for one in findings if not one.inside]
    return {**missed[0], "also": missed[1:]} if missed else None


def _ran_the_largest(plan: Plan, found: Mapping[str, Any]) -> bool:
    """Whether a rank of the stage whose peak is the plan's was among those that ran: another one holds less, which is no miss."""
    where, ranks = plan.prediction.memory_stage, found.get("ranks") or ()
    return found["rung"] not in PARTS or any(
        one.get("priced_as") == where and (where != "middle" or one["stage"] == 1) for one in ranks
    )


def _miss(one: Finding) -> dict[str, Any]:
    """The first explanation of one quantity as plain data."""
    what = "step" if one.quantity == "step_time" else "peak of memory"
    far = f"{abs(one.gap):.1%} {'above' if one.gap > 0 else 'below'}"
    far = f"{1.0 + one.gap:.3g} times" if one.gap >= 1.0 else far
    gap = f"the {what} is {far} the prediction and outside of its interval"
    base = {"quantity": one.quantity, "gap": one.gap, "model_error_share": one.model_share}
    if not one.explanations:
        sentence = f"{gap}; nothing that is priced moves it that way: compare the job with the plan, input by input"
        return {**base, "mechanism": None, "share": None, "check": None, "others": [], "sentence": sentence}
    first = one.explanations[0]
    likely = f"likeliest: {first.name}, {first.size} ({first.share:.0%} of the explanations' weight)"
    if one.model_share > first.share:
        likely = f"the model's own error weighs most ({one.model_share:.0%}), then {first.name}, {first.size} ({first.share:.0%})"
    plain, *others = (
        {name: getattr(each, name) for name in ("name", "size", "share", "explains", "check")} for each in one.explanations[:3]
    )  # fmt: skip
    return {**base, "mechanism": first.key, **plain, "others": others, "sentence": f"{gap}; {likely}"}
