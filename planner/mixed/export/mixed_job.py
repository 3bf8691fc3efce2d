"""What an exporter of a mixed plan looks at: the job, the layout, the cluster, and one kind's part of it as a job of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.cluster_file import ClusterFile
from planner.layout import NAMES, Layout, Recompute, module_mask
from planner.mixed.export.placement import Placement, place
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.plan_file import Plan
from planner.trainer import load_trainer
from planner.trainers.bundle.target import ExportJob
from planner.workload import Workload

_NUMBERS = {field: {name: number for number, name in NAMES[field].items()} for field in ("recompute", "schedule")}


@dataclass(frozen=True, kw_only=True)
class MixedJob:
    """A mixed plan with what it names."""

    workload: Workload
    layout: MixedLayout
    cluster: ClusterFile
    trainer: str
    """What it was priced for."""

    @cached_property
    def placement(self) -> Placement:
        """Ranks of every stage. Raises PlannerError."""
        return place(self.layout, self.cluster)

    def alike(self, pipeline: Pipeline, trainer: str = "") -> ExportJob:
        """The job as one kind would run it: degrees of the first stage, replicas and microbatches of ``pipeline``, an even cut.

        For the words that follow from model, precision, optimizer and degrees; no price stands in it.
        """
        stage, name = pipeline.stages[0], trainer or self.trainer
        replicas, known = pipeline.count, load_trainer(name)
        recompute = _NUMBERS["recompute"][stage.recompute]
        modules = module_mask(known.legal.recompute_modules) if recompute == Recompute.SELECTIVE else 0
        layout = Layout(
            tp=stage.tp, pp=len(pipeline.stages), dp=replicas, cp=self.layout.cp, ep=self.layout.ep, zero=self.layout.zero,
            micro_batch_size=pipeline.micro_batch_size, num_microbatches=pipeline.num_microbatches,
            sequence_parallel=int(stage.tp > 1), recompute=recompute, recompute_modules=modules,
            recompute_layers=stage.recompute_layers, schedule=_NUMBERS["schedule"][self.layout.schedule],
        )  # fmt: skip
        kind = self.cluster.node_kind(stage.kind)
        plan = Plan(
            workload=self.workload, hardware=kind.hardware, num_gpus=stage.tp * self.layout.cp * len(pipeline.stages) * replicas,
            trainer=name, layout=layout, prediction=None,  # type: ignore[arg-type]
        )  # fmt: skip
        return ExportJob.of(plan)


def stages_text(layout: MixedLayout) -> str:
    """The pipelines in words: ``2 x [a100 tp 4: 20 layers, t4 tp 4: 12 layers], 8 microbatches of 1``."""

    def stage(one: Stage) -> str:
        more = "" if one.recompute == "none" else f", recompute {one.recompute}"
        return f"{one.kind} tp {one.tp}: {one.layers} layers{more}"

    return "; ".join(
        f"{one.count} x [{', '.join(map(stage, one.stages))}], {one.num_microbatches} microbatches of {one.micro_batch_size}"
        for one in layout.pipelines
    )
