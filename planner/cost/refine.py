"""One layout on the exact timeline of its schedule: every stage with its own layers, first and last with what they carry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.estimate import Estimate, estimate
from planner.cost.pipeline.partition import Stages, deal_layers
from planner.cost.pipeline.schedule_walk import walked_time
from planner.cost.pipeline.schedules import sends_beside
from planner.cost.price.stage_times import StageTimes
from planner.cost.unique_stages import StageTable
from planner.layout import Layout, Schedule
from planner.trainer import Trainer
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StageDurations:
    """Seconds per microbatch of every (virtual) stage in model order, arrays of length p v."""

    forward: Floats
    backward: Floats
    weight: Floats


def chunks(layout: Layout) -> int:
    """Virtual stages per rank that the schedule runs."""
    v_shaped = int(layout.schedule) in (Schedule.ZBV, Schedule.DUALPIPE_V)
    return 2 if v_shaped else int(layout.vpp)


def stage_layers(num_layers: int, layout: Layout) -> list[int]:
    """Layers of every pipeline rank: given first and last, the rest as even as it goes, larger ones first."""
    pp, first, last = int(layout.pp), int(layout.first_stage_layers), int(layout.last_stage_layers)
    given = (first != 0) + (last != 0)
    share, extra = divmod(num_layers - max(first, 0) - max(last, 0), max(pp - given, 1))
    middle = [share + (i < extra) for i in range(pp - given)]
    return ([max(first, 0)] if first else []) + middle + ([max(last, 0)] if last else [])


def durations(workload: Workload, layout: Layout, stages: Stages, times: StageTimes) -> StageDurations:
    """Durations of all stages of one layout: a rank's layers in equal chunks, the embedding in the first chunk, the
    head in the last (in a V both there); each pass ends with the send to the next stage."""
    layers = np.array(stage_layers(workload.model.num_layers, layout), dtype=float)
    layers[-1] += workload.model.mtp_layers  # [stages.split_stages: prediction modules sit on the last stage]
    pp, vpp = int(layout.pp), chunks(layout)
    which = np.full(pp, 1)
    which[0], which[-1] = 0, 2
    counted = np.maximum((stages.dense + stages.moe)[0], 1.0)
    v_shaped = int(layout.schedule) in (Schedule.ZBV, Schedule.DUALPIPE_V)
    share = layers / counted[which]
    share[(stages.dense + stages.moe)[0][which] == 0.0] = (
        1.0  # no layers: what is left is the ends' own gradients, added up
    )

    def spread(total: Floats, ends: Floats) -> Floats:
        body = (total - ends)[which] * share / vpp
        every = np.concatenate([body, body[::-1]]) if v_shaped else np.tile(body, vpp)
        every[-1 if v_shaped else 0] += ends[0]  # a V's first rank has the head, and the embedding, which is little
        every[-1] += 0.0 if v_shaped else ends[2]
        return every

    return StageDurations(
        forward=spread(times.forward[:, 0], times.ends_forward[:, 0]),
        backward=spread(times.backward[:, 0], times.ends_backward[:, 0]),
        weight=spread(times.weight[:, 0], times.ends_weight[:, 0]),
    )


def price_exactly(workload: Workload, cluster: Cluster, trainer: Trainer, layouts: list[Layout]) -> list[Estimate]:
    """The estimates of some layouts as plans show them: the closed forms, then ``refine``."""
    found = estimate(workload, cluster, trainer, Layout.stack(layouts))
    return refine(workload, cluster, trainer, layouts, [found.row(number) for number in range(len(layouts))])


def refine(
    workload: Workload, cluster: Cluster, trainer: Trainer, layouts: list[Layout], found: list[Estimate]
) -> list[Estimate]:
    """The estimates of some layouts with the idle time of the walked schedule in place of the closed form's, and what the
    slowest GPU adds to it."""
    if all(int(layout.pp) == 1 for layout in layouts):
        return list(found)
    layouts = [deal_layers(workload.model, trainer, layout) for layout in layouts]
    stacked = Layout.stack(layouts)
    table = StageTable(workload, cluster, trainer, stacked)
    refined = []
    for row, (layout, one) in enumerate(zip(layouts, found, strict=True)):
        if int(layout.pp) == 1:
            refined.append(one)
            continue
        stage = durations(workload, layout, *table.content(row))
        shared = table.take(slice(row, row + 1))
        sends = float(shared.send[0])
        each, beside = sends / chunks(layout), float(sends_beside(trainer, layout))
        send = each * (1.0 - beside)
        walked = walked_time(
            int(layout.schedule), int(layout.pp), chunks(layout), int(layout.num_microbatches),
            stage.forward + send, stage.backward + send, stage.weight, each * beside,
        )  # fmt: skip
        waiting = float(shared.of_slowest("waiting")[0])
        busy = sum(float(one.time[part][0]) for part in _BUSY) + int(layout.num_microbatches) * waiting
        bubble = np.array([max(walked - busy, 0.0)])
        stragglers = one.time["stragglers"] + one.slowed * (bubble - one.time["bubble"])
        refined.append(dataclasses.replace(one, time={**one.time, "bubble": bubble, "stragglers": stragglers}))
    return refined


_BUSY = (
    "compute", "recompute", "host", "tensor_communication", "context_communication", "expert_communication",
    "pipeline_communication",
)  # fmt: skip
