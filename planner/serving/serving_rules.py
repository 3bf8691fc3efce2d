"""What an engine may run: predicates on columns of layouts, each with a sentence for one layout, from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.rules import divisors
from planner.serving.engine import Engine
from planner.serving.serving_layout import Precision, ServingLayout


@dataclass(frozen=True, kw_only=True)
class ServingJob:
    """What the rules look at besides the layout."""

    model: ModelSpec
    hardware: HardwareProfile
    engine: Engine
    precision: Precision


@dataclass(frozen=True, kw_only=True)
class ServingRule:
    """A condition that every layout meets, of some engines."""

    name: str
    """Short name."""
    engines: tuple[str, ...]
    """Engines that have it; empty = all."""
    judge: Callable[[ServingJob, Any], Iterator[Any]]
    """Yields where the rule holds, a value or a column; then, of one layout that breaks it, the sentence."""


RULES: list[ServingRule] = []


def rule(name: str, *engines: str) -> Callable[[Callable[[ServingJob, Any], Iterator[Any]]], ServingRule]:
    """Makes a rule of the function below it and puts it into the table."""

    def enter(judge: Callable[[ServingJob, Any], Iterator[Any]]) -> ServingRule:
        RULES.append(ServingRule(name=name, engines=engines, judge=judge))
        return RULES[-1]

    return enter


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)[:16]))


@rule("vendor")
def _vendor(job: ServingJob, _: Any) -> Iterator[Any]:
    yield job.hardware.vendor in job.engine.vendors
    yield (
        f"{job.engine.name} runs on {' and '.join(job.engine.vendors)} GPUs, and {job.hardware.name} is from {job.hardware.vendor}; "
        "choose another engine or GPU"
    )


@rule("heads")
def _heads(job: ServingJob, at: Any) -> Iterator[Any]:
    heads = job.model.num_heads
    yield heads % at.tp == 0
    yield f"tp {at.tp} does not divide the {heads} heads of {job.model.name}; give a tp of {_divisors(heads)}"


@rule("key-value heads")
def _kv_heads(job: ServingJob, at: Any) -> Iterator[Any]:
    kv = job.model.num_kv_heads
    yield job.model.is_mla | (kv % at.tp == 0) | (at.tp % kv == 0)
    yield (
        f"tp {at.tp} neither divides the {kv} key-value heads of {job.model.name} nor is a multiple of them; give a tp of "
        f"{_divisors(kv)} or a multiple of {kv}"
    )


@rule("stages")
def _stages(job: ServingJob, at: Any) -> Iterator[Any]:
    yield at.pp <= job.model.num_layers
    yield f"pp {at.pp} is more than the {job.model.num_layers} layers of {job.model.name}; give at most that"


@rule("experts over ranks")
def _expert_ranks(job: ServingJob, at: Any) -> Iterator[Any]:
    yield (not job.model.is_moe) | (at.ep * at.moe_tp == at.tp * at.attn_dp)
    yield (
        f"ep {at.ep} x moe_tp {at.moe_tp} is not tp {at.tp} x attn_dp {at.attn_dp}: experts are spread over the ranks of a stage; "
        f"give ep x moe_tp = {at.tp * at.attn_dp}"
    )


@rule("experts of a dense model")
def _dense(job: ServingJob, at: Any) -> Iterator[Any]:
    yield (
        job.model.is_moe
        | ((at.ep == 1) & (at.moe_tp == 1) & (at.attn_dp == 1))
        | ((at.ep == 1) & (at.attn_dp == 1) & (at.moe_tp == at.tp))
    )
    yield (
        f"{job.model.name} has no routed experts: ep {at.ep} and attn_dp {at.attn_dp} must be 1; use replicas for more copies"
    )


def violations(
    model: ModelSpec, hardware: HardwareProfile, engine: Engine, precision: Precision, layout: ServingLayout
) -> list[str]:
    """Sentences of the rules that one layout breaks; none when it is legal."""
    job = ServingJob(model=model, hardware=hardware, engine=engine, precision=precision)
    found, at = [], _columns(layout)
    for one in _rules(engine):
        holds, sentence = one.judge(job, at)
        if not np.all(holds):
            found.append(str(sentence))
    return found


def legal(
    model: ModelSpec, hardware: HardwareProfile, engine: Engine, precision: Precision, layout: ServingLayout
) -> NDArray[np.bool_]:
    """Mask of the layouts that break no rule."""
    job = ServingJob(model=model, hardware=hardware, engine=engine, precision=precision)
    at = _columns(layout)
    mask = np.ones(np.broadcast_shapes(*(np.shape(getattr(at, one.name)) for one in fields(at))), dtype=bool)
    for one in _rules(engine):
        mask = mask & next(one.judge(job, at))
    return mask


def _rules(engine: Engine) -> list[ServingRule]:
    return [one for one in RULES if not one.engines or engine.name in one.engines]


def _columns(layout: ServingLayout) -> ServingLayout:
    return replace(layout, **{one.name: np.asarray(getattr(layout, one.name)) for one in fields(layout)})
