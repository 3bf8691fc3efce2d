"""Mixed plan: a mixed layout with its cluster, its estimate and what was assumed; to YAML and back.

    planner_mixed_plan: 1
    workload: {...}                   # as in the plan of a training
    cluster: {nodes: [...], links: [...]}    # as a cluster file has it
    trainer: megatron
    layout: {pipelines: [{stages: [{kind: a100, layers: 20, tp: 8}, ...], count: 4, num_microbatches: 16}], zero: 1}
    estimate: {...}
    pins: {tp: 8}                         # what was fixed: another search keeps it
    why: ...
    assumptions: [...]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.assumption import Assumption
from planner.cluster_file import ClusterFile
from planner.cost.estimate import HIDDEN, PARTS
from planner.cost.memory.states import COMPONENTS
from planner.costs import HOUR
from planner.error_bars import error_bar, kind_of
from planner.errors import PlannerError
from planner.mixed.local_updates import loss_scales, price_layout
from planner.mixed.mixed_axes import NOTHING_FIXED, MixedPins
from planner.mixed.mixed_estimate import MixedEstimate, StageEstimate
from planner.mixed.mixed_job import MixedJob, split_by_speed
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.site_report import SiteReport, site_report
from planner.record import record
from planner.rules import NO_FLASH_ATTENTION
from planner.schema import Count, Name, Number, Positive, Text, check_keys, keys, plain, read
from planner.trainer import load_trainer
from planner.trainer_options import spell, spelled
from planner.units import GIB
from planner.workload import Workload

VERSION = 1
"""Format of mixed plans. A file of another format is refused."""
KIND = "mixed plan"
KEY = "planner_mixed_plan"


@record
class StagePrediction:
    """One stage of equal pipelines, in seconds per step and GiB per GPU."""

    pipeline: Count
    """Number of its group of equal pipelines, from 1."""
    kind: Name
    first_layer: Number
    layers: Number
    tp: Count
    gpus: Count
    """Of all equal pipelines."""
    recompute: str
    busy_s: Number
    """It computes or communicates."""
    imbalance_s: Number
    """It waits because another stage of its pipeline takes longer."""
    memory_gib: Annotated[dict[str, Number], keys(COMPONENTS)]
    memory_peak_gib: Positive
    memory_limit_gib: Positive
    out_of_memory_probability: Number


@record
class MixedPrediction:
    """An estimate of a mixed layout as plain numbers."""

    step_time_s: Positive
    """Seconds of one optimizer step."""
    step_time_range_s: tuple[Positive, Positive]
    """Nine of ten measured steps lie within, by the residuals of published runs on the kind that is known worst."""
    tokens_per_second: Positive
    """Of the job."""
    mfu: Positive
    """Model FLOP over the peak of all GPUs in use."""
    time_s: Annotated[dict[str, Number], keys(PARTS)]
    """Seconds by part; they sum to step_time_s."""
    hidden_s: Annotated[dict[str, Number], keys(HIDDEN)]
    lost_between_stages: Number
    """Part of the GPU time lost to unequal stages."""
    lost_between_replicas: Number
    """Part of the GPU time lost to unequal pipelines."""
    out_of_memory_probability: Number
    """Of the fullest card."""
    pipeline_s: tuple[Positive, ...]
    """Seconds of each group of equal pipelines, first forward to last backward pass."""
    loss_scales: tuple[Positive, ...]
    """What each group multiplies its mean loss with before an averaging all-reduce."""
    usd_per_step: Number | None = None
    """Of the nodes in use and of what leaves a site; None where the price of a kind is not known."""
    stages: tuple[StagePrediction, ...] = ()


def _stage(pipeline: int, one: StageEstimate) -> StagePrediction:
    return StagePrediction(
        pipeline=pipeline, kind=one.kind, first_layer=one.start, layers=one.layers, tp=one.tp, gpus=one.gpus,
        recompute=one.recompute, busy_s=one.busy, imbalance_s=one.imbalance,
        memory_gib={name: size / GIB for name, size in one.memory.items()}, memory_peak_gib=one.memory_peak / GIB,
        memory_limit_gib=one.usable_memory / GIB, out_of_memory_probability=one.out_of_memory,
    )  # fmt: skip


def usd_per_second(job: MixedJob, layout: MixedLayout) -> float | None:
    """Dollars of the GPUs in use, whole nodes; None where the price of a kind is not known."""
    total = 0.0
    for one in job.cluster.nodes:
        gpus, price = layout.gpus_of(one.kind), one.usd_per_hour()
        if gpus and price is None:
            return None
        nodes = -(-gpus // one.gpus_per_node)
        total += nodes * one.gpus_per_node * (price or 0.0) / HOUR
    return total


def predict_mixed(job: MixedJob, layout: MixedLayout, found: MixedEstimate) -> MixedPrediction:
    """Plain numbers of an estimate."""
    bars = [
        error_bar("step_time", job.trainers[kind], job.clusters[kind].hardware, kind_of(job.workload, job.trainers[kind]))
        for kind in job.kinds if layout.gpus_of(kind)
    ]  # fmt: skip
    step, price, crossing = found.step_time, usd_per_second(job, layout), site_report(job, layout, found)
    traffic = crossing.usd_per_step if crossing else 0.0
    return MixedPrediction(
        step_time_s=step, step_time_range_s=(step * min(one.low for one in bars), step * max(one.high for one in bars)),
        tokens_per_second=found.tokens_per_second, mfu=found.mfu, time_s=found.time, hidden_s=found.hidden,
        lost_between_stages=found.between_stages, lost_between_replicas=found.between_replicas,
        out_of_memory_probability=found.out_of_memory, pipeline_s=tuple(one.seconds for one in found.pipelines),
        loss_scales=loss_scales(job, layout), usd_per_step=None if price is None else price * step + traffic,
        stages=tuple(_stage(number, stage) for number, one in enumerate(found.pipelines, 1) for stage in one.stages),
    )  # fmt: skip


@record
class MixedPlan:
    """One mixed layout for one job, with everything needed to price or export it again."""

    workload: Workload
    cluster: ClusterFile
    """With one kind for every speed (``split_by_speed``): the kinds that stages name."""
    trainer: str
    """Library name or path of the trainer."""
    layout: MixedLayout
    prediction: MixedPrediction
    assumptions: tuple[Assumption, ...] = ()
    why: Text = ""
    """Why this layout, and what else the nodes are good for."""
    pins: MixedPins = NOTHING_FIXED
    """What the user fixed: ``what-if`` and the report search within it."""

    def job(self) -> MixedJob:
        """The job, its profiles and trainer read again."""
        return job_of(self.workload, self.cluster, self.trainer)

    def between_sites(self) -> SiteReport | None:
        """What crosses between its sites; None where it stays in one."""
        job = self.job()
        return site_report(job, self.layout, price_layout(job, self.layout))

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a mixed plan file."""
        return {
            KEY: VERSION, "workload": self.workload.to_dict(), "cluster": self.cluster.to_dict(), "trainer": self.trainer,
            "layout": self.layout.to_dict(), "estimate": plain(self.prediction),
            "pins": self.pins.to_dict(), "why": self.why, "assumptions": plain(self.assumptions),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the plan file, whole or not at all."""
        library.write_whole(path, library.dump_yaml(self.to_dict()))


def trainer_for(name: str, arch: str) -> str:
    """The trainer as a kind of GPU runs it: with the unfused attention kernel where its generation has no flash attention."""
    kernels = load_trainer(name).kernels
    if arch not in NO_FLASH_ATTENTION or kernels.attention != "flash":
        return name
    return spell(name, {"attention_kernel": "unfused"})


def job_of(workload: Workload, cluster: ClusterFile, trainer: str) -> MixedJob:
    """The job of a workload on a cluster. Raises PlannerError where the trainer cannot use a kind."""
    cluster = split_by_speed(cluster)
    names = {one.kind: trainer_for(trainer, one.profile.arch) for one in cluster.nodes}
    return MixedJob(workload=workload, cluster=cluster, trainers={kind: load_trainer(name) for kind, name in names.items()})


def priced_plan(
    job: MixedJob, trainer: str, layout: MixedLayout, assumptions: tuple[Assumption, ...] = (), why: str = "",
    pins: MixedPins = NOTHING_FIXED,
) -> MixedPlan:  # fmt: skip
    """The plan of a layout, priced now."""
    prediction = predict_mixed(job, layout, price_layout(job, layout))
    return MixedPlan(
        workload=job.workload, cluster=job.cluster, trainer=trainer, layout=layout, prediction=prediction,
        assumptions=assumptions, why=why, pins=pins,
    )  # fmt: skip


def load_mixed_plan(path: Path) -> MixedPlan:
    """Read a mixed plan. Raises PlannerError with file and key when it is damaged, or newer than this planner."""
    return mixed_plan_from_dict(library.read_yaml(path), where=str(path))


_KEYS = (KEY, "workload", "cluster", "trainer", "layout", "estimate", "why", "assumptions")
_OPTIONAL = ("pins",)
"""Files of before have none."""


def mixed_plan_from_dict(data: Mapping[str, Any], *, where: str = "plan") -> MixedPlan:
    """A mixed plan from plain data. Raises PlannerError."""
    if data.get(KEY) != VERSION:
        raise PlannerError(f"{where}: {KEY} is {data.get(KEY)!r}, this planner reads {VERSION}; make the plan again with --output")
    found = dict(check_keys(data, (*_KEYS, *_OPTIONAL), where, required=_KEYS, hint="; the file is damaged or cut off"))
    del found[KEY]
    found["prediction"] = read(MixedPrediction, found.pop("estimate"), f"{where}: estimate")
    plan = read(MixedPlan, found, where)
    spelled(plan.trainer)
    return plan
