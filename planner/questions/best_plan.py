"""The best plan of a job that was changed, or the sentence that says why there is none."""

import dataclasses
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.defaults import ResolvedJob
from planner.errors import PlannerError
from planner.explain import misses_by
from planner.layout import Layout
from planner.plan_file import Plan, Prediction, predict
from planner.priced_layouts import SearchedJob
from planner.record import record
from planner.rules import check_workload
from planner.search import Finding, Pins, closest, search
from planner.timeline.priced_plan import job_of


@record
class Best:
    """What a search of one job found."""

    resolved: ResolvedJob
    """The job with the names of its files."""
    why_not: str
    """Why nothing fits or nothing is legal; '' when something does."""
    finding: Finding | None
    """The search; None when no layout at all could run the job."""
    prediction: Prediction | None
    """Of the first layout; of the closest attempt when nothing fits; None when nothing is legal."""

    @property
    def fits(self) -> bool:
        """A layout was found that is legal and fits."""
        return self.finding is not None and self.finding.fit

    @property
    def layout(self) -> Layout | None:
        """The best layout, or the closest attempt when nothing fits; None when nothing is legal."""
        return self.finding.layouts[0] if self.finding is not None and self.finding.layouts else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole job; None when nothing fits."""
        if not self.fits or self.prediction is None:
            return None
        return self.resolved.job.workload.tokens / self.prediction.step_time_s


def resolved_of(plan: Plan) -> ResolvedJob:
    """The job of a plan file, with its profile and trainer read again."""
    return ResolvedJob(
        job=job_of(plan), hardware=plan.hardware, trainer=plan.trainer, kind=plan.kind(),
        network_bandwidth=plan.network_bandwidth, assumptions=plan.assumptions,
    )  # fmt: skip


def with_job(resolved: ResolvedJob, **changes: Any) -> ResolvedJob:
    """The job with another workload, cluster or trainer."""
    return dataclasses.replace(resolved, job=dataclasses.replace(resolved.job, **changes))


def on_cluster(resolved: ResolvedJob, **changes: Any) -> ResolvedJob:
    """The job on another number of GPUs (``num_gpus``), or on a profile that was changed (``hardware``)."""
    old = resolved.job.cluster
    return with_job(resolved, cluster=Cluster(**{"hardware": old.hardware, "num_gpus": old.num_gpus, **changes}))


def best_of(resolved: ResolvedJob, pins: Pins | None = None, top: int = 1, rate: float = 0.0) -> Best:
    """Search a job. A job that cannot be trained is an answer here, not an error: its reason is in ``why_not``; nor is one that
    cannot reach a ``rate``, tokens per second of all GPUs."""
    job = resolved.job
    try:
        check_workload(job.workload, job.cluster, job.trainer)
        within = job.workload.tokens / rate if rate else np.inf
        job = SearchedJob.of(job)
        finding = search(job, pins, top, within, only_fitting=rate < np.inf)
        if not finding.fit and finding.too_slow is None:
            finding = closest(job, pins, top, finding)
    except PlannerError as error:
        return Best(resolved=resolved, why_not=str(error), finding=None, prediction=None)
    if finding.too_slow is not None:
        why_not = f"at most {job.workload.tokens / finding.too_slow:,.0f} tokens per second, {rate:,.0f} are asked for"
        return Best(resolved=resolved, why_not=why_not, finding=finding, prediction=None)
    if not finding.layouts:
        gpus, batch = job.cluster.num_gpus, job.workload.global_batch_size
        refused = ", ".join(f"{name} ({count})" for name, count in list(finding.refused.items())[:3])
        why_not = f"no layout of {gpus} GPUs is legal; rules that refuse most: {refused or 'the pinned degrees leave none'}"
        if not finding.searched:
            odd = pins.indivisible(gpus) if pins is not None else ""
            why_not = odd or f"no layout of {gpus} GPUs shares out {batch} sequences per step"
        return Best(resolved=resolved, why_not=why_not, finding=finding, prediction=None)
    why_not = ""
    if not finding.fit:
        why_not = misses_by(finding.estimates[0])
    prediction = predict(finding.estimates[0], job, resolved.kind)
    return Best(resolved=resolved, why_not=why_not, finding=finding, prediction=prediction)
