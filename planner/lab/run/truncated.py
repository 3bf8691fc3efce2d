"""Level truncated: a smaller plan with the same shards on the devices here, with real collectives, scaled up by the cost model.

The smaller plan is made by ``shrink.py``, run by level full at two depths, and its ratios of measured to predicted time are
carried over to the whole plan, part by part:

    T = sum over parts of  predicted(whole) * measured(small) / predicted(small),  1 where the small run does not show a part

The ratio of the pipeline's bubble is that of the passes it is made of. The error is how far the ratios of two depths are
apart; what a few devices in one node do not show at all is listed, with its share of the step.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from planner.cost.estimate import PARTS
from planner.cost.refine import price_exactly
from planner.error_bars import error_bar
from planner.errors import PlannerError
from planner.lab.launch.state import Course
from planner.lab.run import full
from planner.lab.run.assembled_step import parts_as_run
from planner.lab.run.eager_pricing import host_of
from planner.lab.run.learn import learned_of, not_compared
from planner.lab.run.levels import Say, Task, question
from planner.lab.run.record import complete
from planner.lab.run.shrink import Truncated, shallower, shrink
from planner.plan_file import Plan, predict

ON_CPU = 2
"""Processes of a truncated run on a CPU: enough for every collective, few enough for a shared machine."""
OWN = ("compute", "recompute", "host")
"""Parts of the step that passes of one rank take without any other."""
INSIDE = ("tensor_communication", "context_communication", "expert_communication")
"""Parts that passes wait inside of: in their time by events of a GPU, not in a CPU's processor time."""
PASSES, UPDATE = "forward_backward", "optimizer"
"""Rows of a run's times that are scaled."""
UNSEEN = {
    "data_communication": "traffic of data parallelism over all replicas and nodes",
    "pipeline_communication": "sends between nodes",
    "tensor_communication": "tensor-parallel traffic of the whole group",
    "context_communication": "context-parallel traffic of the whole group",
    "expert_communication": "all-to-all of the whole group",
    "stragglers": "the slowest of all GPUs",
    "overhead": "fixed overhead of a step",
}  # fmt: skip
"""Parts that a truncated run does not show, in words."""


def obstacle(task: Task) -> str:
    """A launcher, one device, or a plan that cannot be made small enough."""
    if task.machine.place is not None:
        return "it starts its own ranks on one machine; start it without torchrun or srun"
    try:
        _small(task)
    except PlannerError as error:
        return str(error)
    return ""


def devices(task: Task) -> tuple[int, float]:
    """How many devices there are, and how many bytes of each a plan may need.

    A GPU: one standard deviation of the memory error below what is usable, so that about five of six runs get through. A
    CPU: an equal part of main memory.
    """
    hardware, trainer = task.asked.cluster.hardware, task.asked.trainer
    if task.machine.device == "cpu":
        return ON_CPU, task.machine.memory / ON_CPU - full.LIBRARIES
    return task.machine.gpus, hardware.usable_memory * math.exp(-trainer.stored.memory_error)


def _small(task: Task) -> Truncated:
    """The deepest truncated plan for this machine. Raises PlannerError."""
    count, memory = devices(task)
    return shrink(task.asked.job, task.asked.layout, count, memory)


def plan_of(task: Task, small: Truncated) -> Plan:
    """A truncated plan as a plan of its own, priced."""
    job = small.job
    [found] = price_exactly(job.workload, job.cluster, job.trainer, [small.layout])
    return Plan(
        workload=job.workload, hardware=task.plan.hardware, num_gpus=job.cluster.num_gpus,
        trainer=task.plan.trainer if not task.asked.changes else job.trainer.name, layout=small.layout,
        prediction=predict(found, job, task.plan.kind()), network_bandwidth=task.plan.network_bandwidth,
        why="truncated for a few devices",
    )  # fmt: skip


def run(task: Task, say: Say) -> dict[str, Any]:
    """Two depths of the truncated plan, the deeper first; a fault of the deeper one is the result."""
    deep = _small(task)
    less = shallower(task.asked.job, task.asked.layout, deep)
    course = Course("depth", 1 if less is None else 2)
    outer = task.shown
    task = dataclasses.replace(task, shown=lambda state: outer(course.through(state)))
    course.next()
    first = _run(task, deep, say, parity=task.parity)
    second = None
    if less is not None and first["outcome"] == "completed":
        course.next()
        second = _run(dataclasses.replace(task, trace=None), less, say, parity=False)
    return first | result(task, deep, first, less, second)


def _run(task: Task, small: Truncated, say: Say, *, parity: bool) -> dict[str, Any]:
    """One depth on all its ranks."""
    plan = plan_of(task, small)
    depth = f"truncated to {small.layers} {'layer' if small.layers == 1 else 'layers'} per stage"
    print(f"{depth}:", end=" ", file=sys.stderr, flush=True)
    return full.run(dataclasses.replace(task, plan=plan, asked=question(plan), ranks=(), parity=parity), say)


def result(
    task: Task, deep: Truncated, first: dict[str, Any], less: Truncated | None, second: dict[str, Any] | None
) -> dict[str, Any]:
    """What the two runs say of the whole plan, as plain data."""
    hardware = task.asked.cluster.hardware
    [found] = price_exactly(task.asked.workload, task.asked.cluster, task.asked.trainer, [task.asked.layout])
    prediction = predict(found, task.asked.job, task.plan.kind())
    seconds, interval = prediction.time_s, prediction.step_time_range_s
    rows = second["times"] if second is not None and second["outcome"] == "completed" else None
    elsewhere = not_compared(hardware, task.machine)
    if task.machine.device == "cpu" and not elsewhere:
        seconds = parts_as_run(task.asked, host_of(first.get("as_run")))
        bar = error_bar("step_time", task.asked.trainer, hardware, task.plan.kind())
        interval = bar.interval(sum(seconds.values()))
    parts = [] if elsewhere else scaled(seconds, first["times"], rows)
    changes = [
        *task.asked.changes, *(f"truncated: {one}" for one in deep.changes),
        f"times and memory of ranks are those of the truncated plan on {int(deep.layout.num_gpus)} devices",
    ]  # fmt: skip
    if elsewhere:
        changes.append(f"nothing is scaled up: {elsewhere.removeprefix('not compared: ')}")
    learned = _learned(task, deep, first)
    depths = [_one(deep, first)]
    if less is not None and second is not None:
        again = _learned(task, less, second)  # that of the first stands where other levels have theirs
        depths.append({**_one(less, second), "no_run": again["no_run"], "run": again["run"]})
    return {
        **{key: learned[key] for key in ("likeliest", "no_run", "run")},
        "rung": "truncated", "changes": changes, "layout": task.asked.layout.to_dict(),
        "num_gpus": int(task.asked.layout.num_gpus), "truncated": depths,
        "scaled": {"step": summary(parts, interval, rows is not None), "parts": parts} if parts else None,
    }  # fmt: skip


def _learned(task: Task, small: Truncated, found: dict[str, Any]) -> dict[str, Any]:
    """What the run of a truncated plan teaches: it is a run of a smaller job, with its own model and layout."""
    plan = plan_of(task, small)
    name = f"{plan.workload.model.num_layers}-layers-truncated"
    return learned_of(plan, complete({**found, "rung": "truncated"}), date=date.today().isoformat(), name=name)


def _one(small: Truncated, found: dict[str, Any]) -> dict[str, Any]:
    """One depth: what it was, and what its run gave."""
    model = small.job.model
    return {
        "layout": small.layout.to_dict(), "num_gpus": int(small.layout.num_gpus), "layers_per_stage": small.layers,
        "sequence_length": small.job.workload.sequence_length,
        "model": {name: getattr(model, name) for name in
                  ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "num_experts", "vocab_size")},
        **{name: found[name] for name in ("outcome", "failure", "times", "stages", "as_run", "rates")},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ scaling up


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Measured over predicted of the rows of a truncated run, by part of the step; {} where nothing was compared."""
    found: dict[str, float] = {}
    for row in rows:
        if row["error"] is not None and row["what"] in (PASSES, UPDATE):
            shown = (UPDATE,) if row["what"] == UPDATE else (*OWN, "bubble", *(INSIDE if row["currency"] == "device" else ()))
            found |= dict.fromkeys(shown, row["measured_seconds"] / row["predicted_seconds"])
    return found


def scaled(
    predicted: Mapping[str, float], deep: Sequence[Mapping[str, Any]], shallow: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The parts of the whole plan's step, those of 0 seconds left out; [] where the truncated run was not compared.

    ``predicted``: seconds by part (PARTS) of the whole plan. ``deep``, ``shallow``: rows of times of the truncated runs. ``ratio``:
    measured over predicted in the deeper one, None where it does not show the part.
    """
    first, second = ratios(deep), ratios(shallow or ())
    rows = []
    for part in PARTS if first else ():
        seconds, ratio, other = predicted[part], first.get(part), second.get(part)
        if seconds != 0.0:
            rows.append({
                "what": part, "predicted_seconds": seconds, "ratio": ratio, "shallow_ratio": other,
                "scaled_seconds": seconds * (1.0 if ratio is None else ratio),
                "depth_error_seconds": 0.0 if ratio is None or other is None else seconds * abs(ratio - other),
                "note": "" if ratio is not None else UNSEEN.get(part, "not shown by a truncated run"),
            })  # fmt: skip
    return rows


def summary(parts: Sequence[Mapping[str, Any]], interval: tuple[float, float], with_depths: bool) -> dict[str, Any]:
    """The whole step: predicted, scaled, its error by depth and the share of it that was priced alone."""
    names = ("predicted_seconds", "scaled_seconds", "depth_error_seconds")
    predicted, found, error = (sum(one[name] for one in parts) for name in names)
    unseen = sum(one["scaled_seconds"] for one in parts if one["ratio"] is None)
    return {
        "predicted_seconds": predicted, "scaled_seconds": found, "error": predicted / found - 1.0,
        "interval": list(interval), "inside": interval[0] <= found <= interval[1],
        "depth_error": error / found if with_depths else None, "priced_share": unseen / found,
    }  # fmt: skip
