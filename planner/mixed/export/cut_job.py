"""A job whose stages are cut as the mixed plan says, for exporters of one kind: they then write its words with its stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.errors import PlannerError
from planner.layout import Order
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.placement import UsedNode
from planner.trainers.bundle.target import ExportJob


@dataclass(frozen=True, kw_only=True)
class CutJob(ExportJob):
    """An ExportJob with layers per stage that no layout of one kind can say."""

    cut: tuple[int, ...] = ()
    """Layers of every stage."""

    def layers_per_chunk(self) -> list[list[int]]:
        """As they are given: one virtual stage per rank."""
        return [[layers] for layers in self.cut]


def cut_job(mixed: MixedExport, order: int = Order.TP_CP_EP_DP_PP) -> CutJob:
    """The layout of replicas that are all alike but for their kinds, as one of one kind with an uneven cut."""
    first = mixed.layout.pipelines[0]
    alike = mixed.alike(first, mixed.layout.replicas)
    plan = replace(alike.plan, layout=alike.plan.layout.replace(order=int(order)))
    return CutJob(plan=plan, cluster=alike.cluster, trainer=alike.trainer, cut=tuple(one.layers for one in first.stages))


def nodes_in_order(mixed: MixedExport, order: int = Order.TP_CP_EP_DP_PP) -> tuple[UsedNode, ...]:
    """The nodes in the order that puts every rank of a trainer on the GPU that the plan gives it.

    Ranks count tensor and context parallel ones first, then replicas and stages, or stages and replicas. Raises PlannerError where a
    node would hold ranks that do not follow each other.
    """
    placement = mixed.placement
    stages = sorted(
        placement.stages,
        key=lambda one: (one.stage, one.replica) if order == Order.TP_CP_EP_DP_PP else (one.replica, one.stage),
    )
    ranks = [rank for one in stages for rank in one.ranks]
    found = list[UsedNode]()
    for rank in ranks:
        node = next(one for one in placement.nodes if one.first_rank <= rank < one.first_rank + one.gpus)
        if not found or found[-1] is not node:
            if any(one is node for one in found):
                raise PlannerError(
                    f"{node.name} ({node.kind}) would hold ranks that do not follow each other; give each stage of each replica whole nodes"
                )
            found.append(node)
    starts = [sum(one.gpus for one in found[:number]) for number in range(len(found))]
    return tuple(replace(one, first_rank=start) for one, start in zip(found, starts, strict=True))
