"""The steps of a placement as a trace for Perfetto (ui.perfetto.dev): one process for each pool, phases as slices.

Trace Event Format, as of the trace of a training step (``questions.report.trace``). Three steps, so that what runs ahead is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from planner.rl.rl_answer import PART_TEXT
from planner.rl.rl_plan import PHASES, RlPlan, RlPrediction
from planner.units import MEGA

STEPS = 3


def slices(plan: RlPlan) -> list[tuple[str, str, float, float, int]]:
    """(pool, phase, start, end, step) in seconds."""
    assert plan.prediction is not None
    one, place, found = plan.prediction, plan.placement, []
    for step in range(STEPS):
        begin = step * one.step_s
        now = begin
        order = ("prepare", "generate", "reward", *(name for name in PHASES if name not in ("prepare", "generate", "reward")))
        for name in (*order, "wait"):
            length = one.parts_s[name]
            if length > 0.0:
                found.append(("train", name, now, now + length, step))
                now += length
        if place.mode != "colocated":
            ahead = 0.0 if not place.synchronous else one.parts_s["prepare"]
            until = one.step_s - one.parts_s["sync"]
            end = min(ahead + _sampled(plan, one), until)
            found.append(("generate", "generate", begin + ahead, begin + end, step))
            if one.parts_s["sync"] > 0.0:
                found.append(("generate", "sync", begin + until, begin + one.step_s, step))
    return found


def _sampled(plan: RlPlan, one: RlPrediction) -> float:
    """Seconds in which the pool that only generates samples: of hybrid pools that run ahead the engines that never train work
    while the others train, each at its share of the rate of all."""
    place, whole = plan.placement, one.phases_s["generate"]
    alone = place.rollout_only / place.generate_gpus
    return whole / alone if place.mode == "hybrid" and not place.synchronous else whole


def trace_of(plan: RlPlan) -> str:
    """The trace as JSON text."""
    what = f"predicted steps of {plan.workload.model.name} by {plan.workload.algorithm}"
    document = {
        "traceEvents": list(_events(plan)), "displayTimeUnit": "ms",
        "otherData": {"what": what, "placement": plan.placement.mode},
    }  # fmt: skip
    return json.dumps(document, separators=(",", ":"))


def _events(plan: RlPlan) -> Iterator[dict[str, Any]]:
    pools = {"train": f"{plan.placement.train_gpus} GPUs that train"}
    if plan.placement.mode != "colocated":
        pools["generate"] = f"{plan.placement.rollout_only} GPUs that generate"
    for number, name in enumerate(pools.values()):
        yield {"name": "process_name", "ph": "M", "ts": 0, "pid": number, "tid": 0, "args": {"name": name}}
    order = list(pools)
    for pool, phase, start, end, step in slices(plan):
        first, last = round(start * MEGA), round(end * MEGA)
        yield {
            "name": PART_TEXT[phase], "cat": phase, "ph": "X", "ts": first, "dur": last - first, "pid": order.index(pool), "tid": 0,
            "args": {"step": step},
        }  # fmt: skip
