"""What an exporter of a mixed plan looks at: job and layout, their places, and the job as one kind would run it."""

from __future__ import annotations

from functools import cached_property

from planner.cluster_file import ClusterFile
from planner.mixed.export.placement import Placement, place
from planner.mixed.mixed_job import RECOMPUTES, SCHEDULES, MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.plan_file import Plan
from planner.record import record
from planner.trainers.bundle.target import ExportJob
from planner.units import plural
from planner.workload import Workload


@record
class MixedExport:
    """A mixed plan with what it names loaded."""

    job: MixedJob
    layout: MixedLayout
    trainer: str
    """What the plan was priced for, as it names it."""

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.job.workload

    @property
    def cluster(self) -> ClusterFile:
        """On which nodes."""
        return self.job.cluster

    @cached_property
    def placement(self) -> Placement:
        """Ranks of every stage. Raises PlannerError."""
        return place(self.layout, self.cluster)

    def alike(self, pipeline: Pipeline, replicas: int) -> ExportJob:
        """The job as GPUs of one kind run it: degrees and recompute of the first stage, so many replicas like ``pipeline``, an
        even cut.

        For the words that follow from model, precision, optimizer and degrees; no price stands in it.
        """
        stage = pipeline.stages[0]
        layout = self.job.layout(
            stage.kind, tp=stage.tp, pp=len(pipeline.stages), dp=replicas, cp=self.layout.cp, ep=self.layout.ep,
            zero=self.layout.zero, micro_batch_size=pipeline.micro_batch_size, num_microbatches=pipeline.num_microbatches,
            recompute=int(RECOMPUTES[stage.recompute]), recompute_layers=stage.recompute_layers,
            schedule=int(SCHEDULES[self.layout.schedule]), vpp=self.layout.vpp, dp_shard=self.layout.dp_shard,
            offload_optimizer=self.layout.offload_optimizer,
        )  # fmt: skip
        gpus = stage.tp * self.layout.cp * len(pipeline.stages) * replicas
        plan = Plan(
            workload=self.workload, hardware=self.cluster.node_kind(stage.kind).hardware, num_gpus=gpus, trainer=self.trainer,
            layout=layout, prediction=None,  # type: ignore[arg-type]
        )  # fmt: skip
        return ExportJob.of(plan)


def pipeline_text(one: Pipeline) -> str:
    """A pipeline in words: ``2 x [a100 tp 4: 20 layers, t4 tp 4: 12 layers], 8 microbatches of 1``."""

    def stage(held: Stage) -> str:
        more = "" if held.recompute == "none" else f", recompute {held.recompute}"
        return f"{held.kind} tp {held.tp}: {plural(held.layers, 'layer')}{more}"

    return f"{one.count} x [{'; '.join(map(stage, one.stages))}], {share_text(one.num_microbatches, one.micro_batch_size)}"


def share_text(count: int, size: int) -> str:
    """Microbatches of a replica in words."""
    return f"{plural(count, 'microbatch').replace('batchs', 'batches')} of {size}"


def stages_text(layout: MixedLayout) -> str:
    """All pipelines in words."""
    return " and ".join(map(pipeline_text, layout.pipelines))
