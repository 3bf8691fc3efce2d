"""One deployment that a user states, checked and priced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.keywords import flag_of
from planner.serving.plan_pricing import priced_either, require_legal
from planner.serving.priced_table import Choice
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_inputs import read_split
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_reasons import binding, misses
from planner.serving.serving_rows import plan_of
from planner.serving.serving_rules import usual_batch

ENGINE = "vllm"
"""The engine of a deployment where none is said."""
SPLIT = ("tp", "pp", "replicas", "attn_dp", "ep", "moe_tp", "dcp", "max_batch", "max_tokens", "gpu_weights")
"""Fields of a layout that a user states."""
LOADS = {"concurrency", "rate", "offline", "static"}
EACH = 32
"""Requests in flight at every engine where no load is said."""


def one_plan(request: ServeRequest) -> ServePlan:
    """The plan of what a user states. Raises PlannerError where it is not legal, with every rule that it breaks."""
    request = replace(request, any_number=True) if request.gpus is None and request.nodes is None else request
    question = ask(replace(request, engine=request.engine or ENGINE))
    served = question.served()[0]
    choice = stated(question, served)
    assumed = list[Assumption]()
    if request.engine is None:
        assumed.append(Assumption("engine", f"{served.engine.name} {served.engine.version}", "none is said", "--engine"))
    if not question.task.loaded:
        load = f"{choice.traffic.value:,.0f} requests in flight"
        assumed.append(Assumption("load", load, "none is said", "--concurrency, --rate"))
    return priced_plan(replace(question, assumptions=(*assumed, *question.assumptions)), choice)


def stated(question: Question, served: Served) -> Choice:
    """The deployment that the fixed fields make, the others following from them. Raises PlannerError."""
    if len(question.engines) > 1:
        raise PlannerError("one deployment has one engine; give --engine vllm, or let 'plan serve' compare them")
    prefill = prefill_pool(question, served)
    layout = completed(question, served, 0 if prefill is None else int(prefill.num_gpus))
    require_legal(served, layout, prefill)
    traffic = question.task.traffic
    if not question.task.loaded:
        each = min(EACH, int(layout.max_batch))
        traffic = replace(traffic, load="concurrency", value=float(each * int(layout.replicas)))
    return Choice(
        served=served, layout=layout, prefill=prefill, traffic=traffic, limits=question.task.limits,
        found=priced_either(served, layout, prefill, traffic),
    )  # fmt: skip


def prefill_pool(question: Question, served: Served) -> ServingLayout | None:
    """The pool of prompts where one is stated, like 'tp=4,replicas=2'. Raises PlannerError."""
    text = question.request.prefill
    if text is None:
        return None
    alone = replace(question, task=replace(question.task, pins={"replicas": 1, **read_split(text)}))
    return completed(alone, served)


def completed(question: Question, served: Served, taken: int = 0) -> ServingLayout:
    """The layout with what was left out: replicas of the GPUs, experts over all ranks of a stage, the engine's own batch and
    budget."""
    pins = dict(question.task.pins)
    ranks = pins.get("tp", 1) * pins.get("attn_dp", 1)
    if question.model.is_moe:
        if "ep" in pins:
            pins.setdefault("moe_tp", max(ranks // pins["ep"], 1))
        else:
            pins.setdefault("moe_tp", 1 if pins.get("attn_dp", 1) > 1 else ranks)
            pins["ep"] = max(ranks // pins["moe_tp"], 1)
    if "replicas" not in pins:
        asked = question.request.gpus is not None or question.request.nodes is not None
        pins["replicas"] = max((question.gpus - taken) // (ranks * pins.get("pp", 1)), 1) if asked else 1
    plain = ServingLayout(**pins)
    tokens = int(served.engine.default_max_tokens(served.hardware, plain))
    plain = replace(plain, max_tokens=pins.get("max_tokens", tokens))
    return replace(plain, max_batch=pins.get("max_batch", int(usual_batch(served.engine, served.hardware, plain))))


def priced_plan(question: Question, one: Choice) -> ServePlan:
    """The deployment as a plan: of the GPUs that were given, or of those that it takes."""
    asked = question.request.gpus is not None or question.request.nodes is not None
    missing = misses(one)
    why = f"{missing[:1].upper()}{missing[1:]}." if missing else binding(one)
    return plan_of(question, one, why, gpus=question.gpus if asked else one.num_gpus)


def said_by(plan: ServePlan, changes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Assumption, ...]]:
    """What a plan says as keywords, those of ``changes`` in place of its own; and what of its assumptions still holds.

    Another degree or number of GPUs makes the replicas and the split of experts follow anew; another load replaces the plan's.
    """
    plan.require_one_kind("plan serve estimate")
    changes = {name: value for name, value in changes.items() if value is not None}
    traffic, limits = plan.traffic, plan.limits
    split = {name: int(value) for name, value in vars(plan.layout).items() if name in SPLIT}
    found: dict[str, Any] = {
        "model": plan.model, "hardware": plan.hardware, "gpus": plan.gpus, "engine": plan.engine, "input": traffic.input,
        "output": traffic.output, "prefix_hit": traffic.prefix_hit, "speculation": traffic.speculation,
        "percentile": limits.percentile, **split,
        **{name: value for name, value in (("ttft", limits.ttft), ("tpot", limits.tpot)) if math.isfinite(value)},
    }  # fmt: skip
    if plan.prefill is not None:
        found["prefill"] = ",".join(
            f"{name}={int(value)}" for name, value in vars(plan.prefill).items() if name in SPLIT
        )
    if not LOADS & changes.keys():
        found[traffic.load] = traffic.value
    if {"tp", "pp", "attn_dp", "gpus", "nodes"} & changes.keys():
        found = {name: value for name, value in found.items() if name not in ("replicas", "ep", "moe_tp")}
    if "ep" in changes or "moe_tp" in changes:
        found = {name: value for name, value in found.items() if name not in ("ep", "moe_tp")}
    if "engine" in changes:
        found = {name: value for name, value in found.items() if name not in ("max_batch", "max_tokens")}
    if "nodes" in changes:
        del found["gpus"]
    flags = {flag_of(name) for name in changes}
    kept = tuple(one for one in plan.assumptions if not flags & set(one.flag.replace(",", " ").split()))
    return {**found, **changes}, kept
