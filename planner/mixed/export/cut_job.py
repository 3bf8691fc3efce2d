"""A job whose stages are cut as the mixed plan says, for exporters of one kind: they then write its words with its stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from planner.errors import PlannerError
from planner.layout import Order
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.placement import Placement, UsedNode, place
from planner.record import record
from planner.trainers.bundle.target import ExportJob


@record
class CutJob(ExportJob):
    """An ExportJob with layers per stage that no layout of one kind can say."""

    cut: tuple[int, ...] = ()
    """Layers of every stage."""

    def layers_per_chunk(self) -> list[list[int]]:
        """As they are given, each stage's layers in equal virtual stages."""
        vpp = int(self.layout.vpp)
        return [[layers // vpp] * vpp for layers in self.cut]


def cut_job(mixed: MixedExport, order: int = Order.TP_CP_EP_DP_PP) -> CutJob:
    """The layout of replicas that are all alike but for their kinds, as one of one kind with an uneven cut."""
    first = mixed.layout.pipelines[0]
    alike = mixed.alike(first, mixed.layout.replicas)
    plan = replace(alike.plan, layout=alike.plan.layout.replace(order=int(order)))
    return CutJob(
        plan=plan, cluster=alike.cluster, trainer=alike.trainer, cut=tuple(one.layers for one in first.stages)
    )


def in_order(mixed: MixedExport, order: int = Order.TP_CP_EP_DP_PP) -> Placement:
    """The placement with nodes and ranks in the order of a trainer that knows one kind of GPU.

    Ranks count tensor and context parallel ones first, then replicas and stages, or stages and replicas. Raises PlannerError
    where a
    node would hold ranks that do not follow each other.
    """
    wrong = PlannerError("")
    for apart in (False, True):
        try:
            return _renumbered(place(mixed.layout, mixed.cluster, apart=apart), order)
        except PlannerError as error:
            wrong = wrong if apart else error
    raise wrong


def _renumbered(placement: Placement, order: int) -> Placement:
    stages = sorted(
        placement.stages,
        key=lambda one: (one.stage, one.replica) if order == Order.TP_CP_EP_DP_PP else (one.replica, one.stage),
    )
    ranks = [rank for one in stages for rank in one.ranks]
    holds = {rank: one for one in placement.nodes for rank in range(one.first_rank, one.first_rank + one.gpus)}
    found, seen = list[UsedNode](), set[str]()
    for rank in ranks:
        node = holds[rank]
        if not found or found[-1] is not node:
            if node.name in seen:
                raise PlannerError(
                    f"{node.name} ({node.kind}) would hold ranks that do not follow each other; give the stages of a kind whole "
                    "nodes"
                )
            found.append(node)
            seen.add(node.name)
    starts = [0, *accumulate(one.gpus for one in found[:-1])]
    now = {rank: number for number, rank in enumerate(ranks)}
    return Placement(
        nodes=tuple(replace(one, first_rank=start) for one, start in zip(found, starts, strict=True)),
        stages=tuple(replace(one, ranks=tuple(now[rank] for rank in one.ranks)) for one in placement.stages),
    )
