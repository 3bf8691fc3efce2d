"""Strong and weak scaling: the best plan at every size of the cluster, from one node to beyond it, each searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.defaults import ResolvedJob
from planner.explain import layout_text
from planner.layout import Layout
from planner.questions.best_plan import Best, best_of, on_cluster, with_batch
from planner.search import Pins

BEYOND = (2, 4)
"""Multiples of the cluster that are looked at beside the cluster itself."""
LARGEST = 2**21
"""GPUs that a cluster may have."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best plan at one size."""

    num_gpus: int
    num_nodes: int
    global_batch_size: int
    """Sequences per step."""
    fits: bool
    why_not: str
    """Why nothing fits or is legal; '' when something does."""
    step_time_s: float | None
    """Seconds; this and what follows None where nothing fits."""
    tokens_per_second: float | None
    """Of all GPUs."""
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_peak_gib: float | None
    efficiency: float | None
    """Throughput per GPU over that of the smallest size that fits."""
    layout: Layout | None
    """The best layout."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; the layout also as text."""
        text = None if self.layout is None else layout_text(self.layout)
        layout = None if self.layout is None else self.layout.to_dict()
        return {**vars(self), "layout": layout, "layout_text": text}


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One job over sizes of the cluster."""

    strong: tuple[Point, ...]
    """The same global batch at every size."""
    weak: tuple[Point, ...]
    """The batch grows with the GPUs: as many sequences per GPU as in the job; at least one per step."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"strong": [one.to_dict() for one in self.strong], "weak": [one.to_dict() for one in self.weak]}


def sizes(num_gpus: int, gpus_per_node: int, beyond: Sequence[int] = BEYOND) -> list[int]:
    """GPU counts: one node and its doublings below the cluster, the cluster, its multiples; within one node from 1 GPU."""
    one = gpus_per_node if num_gpus > gpus_per_node else 1
    found = []
    while one < num_gpus:
        found.append(one)
        one *= 2
    return [*found, num_gpus, *(num_gpus * times for times in beyond if num_gpus * times <= LARGEST)]


def scaling(
    resolved: ResolvedJob,
    *,
    pins: Pins | None = None,
    counts: Sequence[int] | None = None,
    weak: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Scaling:
    """The best plan at every count of GPUs, strong and weak; ``best.resolved_of`` makes the job of a plan.

    Strong: the global batch of the job. Weak: B n / N sequences at n GPUs, rounded, at least 1. Each is a whole search of
    its own (0.1 to 3 s each, two per size); ``progress`` is told what is being tried.
    """
    job = resolved.job
    tried = counts or sizes(job.cluster.num_gpus, int(job.cluster.hardware.gpus_per_node))
    batch, own = job.workload.global_batch_size, job.cluster.num_gpus
    strong, grown = [], []
    for count in tried:
        progress(f"{count} GPUs")
        found = best_of(on_cluster(resolved, num_gpus=count), pins)
        strong.append(point(found))
        if not weak:
            continue
        sequences = max(1, round(batch * count / own))
        if sequences != batch:
            progress(f"{count} GPUs, {sequences} sequences")
            found = best_of(with_batch(on_cluster(resolved, num_gpus=count), sequences), pins)
        grown.append(point(found))
    return Scaling(strong=_with_efficiency(strong), weak=_with_efficiency(grown))


def point(found: Best) -> Point:
    """One search as a point; its efficiency is filled in beside the others'."""
    job, one = found.resolved.job, found.prediction if found.fits else None
    return Point(
        num_gpus=job.cluster.num_gpus, num_nodes=job.cluster.num_nodes,
        global_batch_size=job.workload.global_batch_size, fits=found.fits, why_not=found.why_not,
        step_time_s=None if one is None else one.step_time_s,
        tokens_per_second=found.tokens_per_second,
        tokens_per_second_per_gpu=None if one is None else one.tokens_per_second_per_gpu,
        mfu=None if one is None else one.mfu,
        memory_peak_gib=None if one is None else one.memory_peak_gib,
        efficiency=None, layout=found.layout if found.fits else None,
    )  # fmt: skip


def _with_efficiency(points: list[Point]) -> tuple[Point, ...]:
    rates = [one.tokens_per_second_per_gpu for one in points]
    first = next((rate for rate in rates if rate is not None), None)
    return tuple(
        replace(one, efficiency=None if rate is None or first is None else rate / first)
        for one, rate in zip(points, rates, strict=True)
    )


__all__ = ["Point", "Scaling", "point", "scaling", "sizes"]
