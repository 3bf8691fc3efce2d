"""The fastest layouts of a job on another number of GPUs, with its global batch or the nearest that can be shared out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cluster import Cluster
from planner.cost.estimate import Estimate
from planner.defaults import ResolvedJob
from planner.errors import PlannerError
from planner.layout import Layout
from planner.plan_file import Plan
from planner.record import record
from planner.rules import check_workload
from planner.search import search
from planner.space import Pins
from planner.timeline.priced_plan import job_of

OTHER_BATCH = 0.15
"""Part by which the batch may differ where the job's own cannot be shared out over all GPUs."""
TRIED = 12
"""Numbers of GPUs, and of sequences, that are tried."""


@record
class Found:
    """The best layouts on a number of GPUs, fastest first."""

    resolved: ResolvedJob
    """The job with that number and its batch."""
    layouts: tuple[Layout, ...]
    estimates: tuple[Estimate, ...]

    @property
    def step_time(self) -> float:
        """Seconds of the fastest, per global batch."""
        return float(self.estimates[0].step_time[0])

    @property
    def gpus(self) -> int:
        """GPUs that work."""
        return self.resolved.job.cluster.num_gpus

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.resolved.job.workload.global_batch_size

    @property
    def sequences_per_second(self) -> float:
        """Of the fastest layout."""
        return self.batch / self.step_time


def resolved_plan(plan: Plan) -> ResolvedJob:
    """The job of a plan, its profile and trainer read again."""
    return ResolvedJob(
        job=job_of(plan), hardware=plan.hardware, trainer=plan.trainer, kind=plan.kind(),
        network_bandwidth=plan.network_bandwidth, assumptions=plan.assumptions,
    )  # fmt: skip


def with_size(resolved: ResolvedJob, gpus: int, batch: int | None = None) -> ResolvedJob:
    """The job on another number of GPUs, with another batch where one is given."""
    old = resolved.job
    workload = old.workload if batch is None else old.workload.replace(global_batch_size=batch)
    cluster = Cluster(hardware=old.cluster.hardware, num_gpus=gpus)
    return replace(resolved, job=replace(old, workload=workload, cluster=cluster))


def fitting(resolved: ResolvedJob, top: int = 1, pins: Pins | None = None) -> Found | None:
    """The fastest layouts that fit; None where nothing is legal or fits."""
    job = resolved.job
    try:
        check_workload(job.workload, job.cluster, job.trainer)
        found = search(job, pins, top, only_fitting=True)
    except PlannerError:
        return None
    if not found.fit:
        return None
    return Found(resolved=resolved, layouts=tuple(found.layouts), estimates=tuple(found.estimates))


def _shared_out(resolved: ResolvedJob, gpus: int) -> bool:
    """Whether ``gpus`` may be a product of degrees: what neither batch, heads, experts nor sequence have a factor for must be
    pipeline stages. Cheap, so that numbers without a layout are not searched."""
    work = resolved.job.workload
    for number in (work.global_batch_size, work.model.num_heads, work.model.num_experts, work.sequence_length):
        while number > 1 and (common := math.gcd(gpus, number)) > 1:
            gpus //= common
    return gpus <= work.model.num_layers


def best_layout(resolved: ResolvedJob, gpus: int, *, least: int, top: int = 1) -> Found | None:
    """With the same batch, on the most GPUs from ``gpus`` down to ``least`` that have a layout that fits."""
    node = min(int(resolved.job.cluster.hardware.gpus_per_node), gpus)
    counts = (count for count in range(gpus, max(least - 1, 0), -node) if _shared_out(resolved, count))
    for count in itertools.islice(counts, TRIED):
        if found := fitting(with_size(resolved, count), top):
            return found
    return None


def _other_batches(batch: int, gpus: int) -> Iterator[int]:
    """Batches near the job's own that more of the GPUs can share out: multiples of the divisors of ``gpus``, nearest first."""
    sizes = {max(round(batch / n), 1) * n for n in range(1, gpus + 1) if gpus % n == 0} - {batch}
    yield from sorted((one for one in sizes if abs(one / batch - 1.0) <= OTHER_BATCH), key=lambda one: abs(one - batch))


def choices(resolved: ResolvedJob, gpus: int, old: Layout, top: int) -> list[Found]:
    """What to do with ``gpus`` GPUs: all with the same batch, the best and with the ``old`` degrees but for dp; fewer whole nodes,
    the rest idle; all with the nearest batch, where the same is not shared out over all, or only by a poor layout."""
    own = fitting(with_size(resolved, gpus), top)
    degrees = {name: int(getattr(old, name)) for name in ("tp", "pp", "cp", "ep")}
    same = fitting(with_size(resolved, gpus), 1, Pins(values=degrees))
    node = min(int(resolved.job.cluster.hardware.gpus_per_node), gpus)
    fewer = best_layout(resolved, (gpus - 1) // node * node, least=max(gpus // 2, 1), top=top) if gpus > node else None
    found = [one for one in (own, same, fewer) if one is not None]
    if own is not None and (fewer is None or own.sequences_per_second >= fewer.sequences_per_second):
        return found
    for number, size in enumerate(_other_batches(resolved.job.workload.global_batch_size, gpus)):
        other = fitting(with_size(resolved, gpus, size), top)
        if other is not None or number >= TRIED:
            return found + ([other] if other is not None else [])
    return found
