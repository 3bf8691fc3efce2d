"""One layout on the exact timeline of its schedule: every stage with its own layers, first and last with what they carry.

What is printed is the walked idle time of this module; the closed form (``pipeline.schedules``) only chose the finalists.
"""

import dataclasses
import math
from functools import cache

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.estimate import PARTS, Estimate, estimate
from planner.cost.own_terms import flushes, until_flush
from planner.cost.pipeline.partition import Stages, assign_layers, stage_layers
from planner.cost.pipeline.schedule_walk import StageDurations, walked_time
from planner.cost.pipeline.schedules import EQUATIONS, pipeline_time, sends_overlap
from planner.cost.price.stage_times import StageTimes
from planner.cost.unique_stages import StageTable
from planner.layout import Layout, Schedule, is_v_shaped
from planner.trainer import Trainer
from planner.workload import Workload

BUSY = PARTS[:7]
"""Parts of the step time in which the slowest stage is not idle."""


def durations(workload: Workload, layout: Layout, stages: Stages, times: StageTimes) -> StageDurations:
    """Durations of all stages of one layout: a rank's layers in chunks (``_chunk_shares``), the embedding in the first chunk,
    the head in the last (in a V both there); each pass ends with the send to the next stage."""
    layers = np.array(stage_layers(workload.model.num_layers, layout), dtype=float)
    layers[-1] += workload.model.mtp_layers  # [partition.split_stages: prediction modules sit on the last stage]
    vpp, v_shaped = int(layout.vpp), is_v_shaped(layout.schedule)
    which = np.full(len(layers), 1)
    which[0], which[-1] = 0, 2
    counted = (stages.dense + stages.moe)[0][which]
    # No layers: what is left is the ends' own gradients, added up.
    share = np.where(counted == 0.0, 1.0, layers / np.maximum(counted, 1.0))

    chunks = _chunk_shares(layers, vpp)

    def spread(total: Floats, ends: Floats) -> Floats:
        body = (total - ends)[which, 0] * share
        every = np.concatenate([body, body[::-1]]) / vpp if v_shaped else np.ravel(chunks * body)
        every[-1 if v_shaped else 0] += ends[0, 0]  # a V's first rank has the head, and the embedding, which is little
        every[-1] += 0.0 if v_shaped else ends[2, 0]
        return every

    return StageDurations(
        forward=spread(times.forward, times.ends_forward),
        backward=spread(times.backward, times.ends_backward),
        weight=spread(times.weight, times.ends_weight),
    )


def _chunk_shares(layers: Floats, vpp: int) -> Floats:
    """Part of a rank's layers in each of its chunks, (vpp, p): equal, but what the first rank lacks to full chunks is missing in
    its first one and what the last rank lacks in its last one.

    There embedding and head take the place of layers.  [Megatron Core, transformer_block.py, get_num_layers_to_build:
    account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split]
    """
    shares = np.full((vpp, len(layers)), 1.0 / vpp)
    for rank, from_end in ((0, 1), (-1, -1)):
        if layers[rank] % vpp and layers[rank] > 0 and len(layers) > 1:
            full = np.ceil(layers[rank] / vpp)
            missing = full * vpp - layers[rank]
            sizes = full - np.clip(missing - full * np.arange(vpp), 0.0, full)
            shares[:, rank] = sizes[::from_end] / layers[rank]
    return shares


@cache
def check_closed_form(schedule: int, pp: int, vpp: int) -> None:
    """Raises AssertionError where closed form and walk of equal stages differ by more than ``Equations.spread``; m = 2 p."""
    layout, m = Layout(pp=pp, vpp=vpp, num_microbatches=2 * pp, schedule=schedule), 2 * pp
    forward, backward, weight = (np.full(1, seconds) for seconds in (1.0, 2.2, 0.9))
    closed = float(pipeline_time(layout, forward, backward, weight, pp * (forward + backward))[0])
    stages = StageDurations(*(np.full(pp * vpp, one / vpp) for one in (forward, backward, weight)))
    walked = walked_time(schedule, pp, vpp, m, stages)
    if not math.isclose(walked, closed, abs_tol=(pp - 1) * forward[0] * EQUATIONS[Schedule(schedule)].spread):
        raise AssertionError(
            f"{Schedule(schedule).name}, pp {pp}, vpp {vpp}: closed form {closed:g}, walked {walked:g}"
        )


def price_exactly(workload: Workload, cluster: Cluster, trainer: Trainer, layouts: list[Layout]) -> list[Estimate]:
    """The estimates of some layouts as plans show them: the closed forms, then ``refine``."""
    found = estimate(workload, cluster, trainer, Layout.stack(layouts))
    return refine(workload, cluster, trainer, layouts, [found.row(number) for number in range(len(layouts))])


def refine(
    workload: Workload, cluster: Cluster, trainer: Trainer, layouts: list[Layout], found: list[Estimate]
) -> list[Estimate]:
    """The estimates of some layouts with the idle time of the walked schedule in place of the closed form's, and what the
    slowest GPU adds to it.

    bubble = walked seconds - busy seconds of the slowest stage, at least 0.
    Raises AssertionError where closed form and walk of a schedule contradict each other (``check_closed_form``).
    """
    if all(int(layout.pp) == 1 for layout in layouts):
        return list(found)
    layouts = [assign_layers(workload.model, trainer, layout) for layout in layouts]
    table = StageTable(workload, cluster, trainer, Layout.stack(layouts))
    refined = list(found)
    for row, (layout, one) in enumerate(zip(layouts, found, strict=True)):
        schedule, pp, vpp, m = (int(n) for n in (layout.schedule, layout.pp, layout.vpp, layout.num_microbatches))
        if pp == 1:
            continue
        check_closed_form(schedule, min(pp, 8), vpp)
        shared = table.take(slice(row, row + 1))
        each, overlap = float(shared.send[0]) / vpp, float(sends_overlap(trainer, layout))
        stage, send = durations(workload, layout, *table.content(row)), each * (1.0 - overlap)
        passes = StageDurations(stage.forward + send, stage.backward + send, stage.weight)
        m_call = int(until_flush(trainer, layout).num_microbatches)
        walked = float(flushes(trainer, layout)) * walked_time(schedule, pp, vpp, m_call, passes, each * overlap)
        waiting = float(shared.slowest["waiting"][0])
        busy = sum(float(one.time[part][0]) for part in BUSY) + m * waiting
        bubble = np.array([max(walked - busy, 0.0)])
        stragglers = one.time["stragglers"] + one.slowed * (bubble - one.time["bubble"])
        refined[row] = dataclasses.replace(one, time={**one.time, "bubble": bubble, "stragglers": stragglers})
    return refined
