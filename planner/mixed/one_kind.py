"""One kind of a cluster by itself: the ordinary search, and what else the kind is good for where it has no room for the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.cost.parameters import total_parameters
from planner.errors import PlannerError
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_search import search_mixed
from planner.record import record
from planner.search import search
from planner.space import Pins

LORA_RANK = 16
"""Rank of the adapters that are tried where a kind has no room for all weights' states."""
SERVED = 0.8
"""Part of the memory that weights may take in an engine, which needs the rest for its cache."""


@record
class Alone:
    """One kind, training the same job by itself."""

    kind: str
    gpus: int
    step_time_s: float | None
    """None where nothing fits."""
    tokens_per_second: float | None
    layout: str
    """In words; '' where nothing fits."""
    instead: str = ""
    """Where nothing fits: what the kind is good for."""


def alone_of(job: MixedJob, kind: str, pins: Mapping[str, int] | None = None) -> Alone:
    """One kind by itself: the ordinary search, with the schedules that it has, and equal pipelines where no degrees divide.

    ``pins``: fields of a layout that are fixed.
    """
    from planner.explain import layout_text

    tokens, gpus, uniform = float(job.workload.tokens), job.clusters[kind].num_gpus, job.uniform(kind)
    found = search(uniform, Pins(values=dict(pins or {})), top=1, only_fitting=True)
    step, text = None, ""
    if found.fit:
        step, text = float(found.estimates[0].step_time[0]) * job.slowdown[kind], layout_text(found.layouts[0])
    elif not pins:
        own = search_mixed(job.only(kind), top=1).best
        step, text = (own[0][1].step_time, shape_text(own[0][0])) if own else (None, "")
    return Alone(
        kind=kind, gpus=gpus, step_time_s=step, tokens_per_second=None if step is None else tokens / step, layout=text,
        instead="" if step is not None else _instead(job, kind),
    )  # fmt: skip


def _instead(job: MixedJob, kind: str) -> str:
    """What a kind without room for the job can do: train adapters, serve the model, or neither."""
    work, uniform, cluster = job.workload, job.uniform(kind), job.clusters[kind]
    if not work.lora_rank:
        light = replace(uniform, workload=replace(work, lora_rank=LORA_RANK))
        try:
            found = search(light, top=1, only_fitting=True)
        except PlannerError:
            found = None
        if found is not None and found.fit:
            rate = float(work.tokens) / (float(found.estimates[0].step_time[0]) * job.slowdown[kind])
            return f"could train adapters of it (--lora-rank {LORA_RANK}) at {rate:,.0f} tokens/s"
    if 2.0 * total_parameters(work.model) <= SERVED * cluster.num_gpus * cluster.hardware.usable_memory:
        node = job.cluster.node_kind(kind)
        return f"has no room to train it, but could serve it (plan serve --hardware {node.hardware} --gpus {node.num_gpus})"
    return "has no room for it: give it a smaller model"
