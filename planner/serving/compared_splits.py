"""Stated splits of one question compared at one load, and why some cannot run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.layout import divisors
from planner.record import record
from planner.serving.candidates import loads
from planner.serving.one_deployment import completed
from planner.serving.priced_table import Choice
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate
from planner.serving.serving_inputs import read_split
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_reasons import binding, misses
from planner.serving.serving_rows import layout_text, plan_of
from planner.serving.serving_rules import violations

MOST_COMPARED = 24
"""Splits that a comparison takes by itself at most."""


@record
class Compared:
    """One split of a comparison."""

    layout: ServingLayout
    text: str
    plan: ServePlan | None
    """None: not legal."""
    why_not: str = ""
    """Why it cannot run."""


def compare_splits(request: ServeRequest, texts: Sequence[str] = ()) -> tuple[Question, list[Compared]]:
    """Splits at one load, or each at the load at which it answers most; what runs first by tokens/s, then what cannot, with the
    reason.

    ``texts``: splits like 'tp=4,pp=2'; none: every one of tensor ranks, stages and replicas that takes all GPUs. Raises
    PlannerError.
    """
    question = ask(replace(request, engine=request.engine or "vllm", layout={}))
    if len(question.engines) > 1:
        raise PlannerError(
            "a comparison of splits is of one engine; give --engine vllm, or let 'plan serve' compare engines"
        )
    served = question.served()[0]
    common = {name: value for name, value in request.layout.items() if value is not None}
    pins = [{**common, **read_split(text)} for text in texts] or list(_all_splits(question, common))
    if not pins:
        raise PlannerError("no split takes all GPUs with the fixed degrees; name splits with --split tp=4,pp=2")
    rows = [_compared(question, served, one) for one in pins]
    rows.sort(key=lambda row: (row.plan is None, bool(row.why_not), -_total(row)))
    return question, rows


def _total(row: Compared) -> float:
    return row.plan.prediction.output_tokens_per_second if row.plan and row.plan.prediction else 0.0


def _all_splits(question: Question, common: Mapping[str, Any]) -> Iterable[dict[str, int]]:
    """Tensor ranks x stages x replicas that make all GPUs, small engines last; at most MOST_COMPARED."""
    gpus = question.gpus
    found = [
        (tp, pp) for tp, pp in itertools.product(divisors(gpus), divisors(gpus))
        if gpus % (tp * pp) == 0 and tp <= question.hardware.gpus_per_node and pp <= question.model.num_layers
        and common.get("tp", tp) == tp and common.get("pp", pp) == pp
    ]  # fmt: skip
    found.sort(key=lambda pair: (-pair[0] * pair[1], -pair[0]))
    for tp, pp in found[:MOST_COMPARED]:
        yield {**common, "tp": tp, "pp": pp, "replicas": gpus // (tp * pp)}


def _compared(question: Question, served: Served, pins: Mapping[str, int]) -> Compared:
    one = replace(question, task=replace(question.task, pins=dict(pins)))
    layout = completed(one, served)
    text = layout_text(layout)
    if int(layout.num_gpus) > question.gpus:
        why = f"takes {int(layout.num_gpus)} GPUs of {question.gpus}"
        return Compared(layout=layout, text=text, plan=None, why_not=why)
    broken = violations(served.model, served.hardware, served.engine, served.precision, layout)
    if broken:
        return Compared(layout=layout, text=text, plan=None, why_not="; ".join(broken))
    choice = _at_its_load(one, served, layout)
    missing = misses(choice)
    return Compared(
        layout=choice.layout, text=text, plan=plan_of(one, choice, missing or binding(choice)), why_not=missing
    )


def _at_its_load(question: Question, served: Served, layout: ServingLayout) -> Choice:
    """A split at the load of the question; without one at the load at which it answers most within the limits."""
    task = question.task
    traffic = task.traffic
    if not task.loaded:
        alone = estimate(served, layout, replace(traffic, load="concurrency", value=1.0))
        each = (
            max(float(np.asarray(alone.max_concurrency)) / int(layout.replicas), 1.0)
            if bool(np.all(np.asarray(alone.fits)))
            else 1.0
        )
        grid = loads(each)
        found = estimate(served, layout, replace(traffic, load="concurrency"), grid * int(layout.replicas))
        limits = task.limits
        kept = (np.asarray(found.ttft.of(limits.percentile)) <= limits.ttft) & (
            np.asarray(found.tpot.of(limits.percentile)) <= limits.tpot
        )
        total = np.where(kept, found.output_tokens_per_second, 0.0)
        best = int(np.argmax(total)) if kept.any() else 0
        traffic = replace(traffic, load="concurrency", value=float(grid[best]) * int(layout.replicas))
    return Choice(
        served=served, layout=layout, traffic=traffic, found=estimate(served, layout, traffic), limits=task.limits
    )
