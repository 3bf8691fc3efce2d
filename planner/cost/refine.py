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
from planner.cost.pipeline.schedule_walk import StageDurations, stage_rank, walked_time
from planner.cost.pipeline.schedules import EQUATIONS, pipeline_time, sends_overlap
from planner.cost.price.layer_costs import ShapePrices
from planner.cost.price.stage_times import StageTimes
from planner.cost.unique_stages import StageTable
from planner.layout import Layout, Schedule, is_v_shaped
from planner.record import record
from planner.trainer import Trainer
from planner.workload import Workload

BUSY = PARTS[:7]
"""Parts of the step time in which the slowest stage is not idle."""
ENDS_BACKWARD = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""Schedules in which every rank ends with a backward pass of its first stage; in the others weight gradients come last."""
ALMOST = 0.999
"""A steady state that is added and not walked is exact to 0.01 % [schedule_walk.walked_time]: least times leave room for it."""


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
    walks = Walks(workload, cluster, trainer, layouts, found)
    return [walks.exact(row) for row in range(len(layouts))]


class Walks:
    """Some layouts on their timelines: how long a step is at the least, and how long it is, which only some may be asked for."""

    def __init__(
        self, workload: Workload, cluster: Cluster, trainer: Trainer, layouts: list[Layout], found: list[Estimate],
        shapes: ShapePrices | None = None,
    ) -> None:  # fmt: skip
        self._trainer, self._found = trainer, found
        self._layouts = [assign_layers(workload.model, trainer, layout) for layout in layouts]
        self._pipelines: dict[int, _Pipeline] = {}
        if all(int(layout.pp) == 1 for layout in layouts):
            return
        table = StageTable(workload, cluster, trainer, Layout.stack(self._layouts), shapes=shapes)
        for row, layout in enumerate(self._layouts):
            if int(layout.pp) == 1:
                continue
            shared = table.take(slice(row, row + 1))
            each, overlap = float(shared.send[0]) / int(layout.vpp), float(sends_overlap(trainer, layout))
            stage, send = durations(workload, layout, *table.content(row)), each * (1.0 - overlap)
            busy = sum(float(found[row].time[part][0]) for part in BUSY)
            self._pipelines[row] = _Pipeline(
                passes=StageDurations(stage.forward + send, stage.backward + send, stage.weight), hop=each * overlap,
                busy=busy + int(layout.num_microbatches) * float(shared.slowest["waiting"][0]),
            )  # fmt: skip

    def least(self, row: int) -> float:
        """Seconds of a step below which ``exact`` is not: every rank works off all of its passes one after the other, from when
        the first can have arrived until the last has gone back."""
        if row not in self._pipelines:
            return float(self._found[row].step_time[0])
        return float(self._with(row, ALMOST * self._least_walk(row)).step_time[0])

    def exact(self, row: int) -> Estimate:
        """The estimate with the idle time of the walk."""
        if row not in self._pipelines:
            return self._found[row]
        layout, pipeline = self._layouts[row], self._pipelines[row]
        schedule, pp, vpp = (int(n) for n in (layout.schedule, layout.pp, layout.vpp))
        check_closed_form(schedule, min(pp, 8), vpp)
        return self._with(row, walked_time(schedule, pp, vpp, self._microbatches(row), pipeline.passes, pipeline.hop))

    def _microbatches(self, row: int) -> int:
        return int(until_flush(self._trainer, self._layouts[row]).num_microbatches)

    def _least_walk(self, row: int) -> float:
        """max over ranks r of  sum_(s<r) F_s + m (F + B)_r + sum_(s<r) B_s, the last where the rank ends with a backward pass."""
        layout, (forward, backward, _) = self._layouts[row], self._pipelines[row].passes
        pp, m = int(layout.pp), self._microbatches(row)
        ranks = [stage_rank(stage, pp, int(layout.schedule)) for stage in range(len(forward))]
        work = m * np.bincount(ranks, forward + backward)
        around = forward + backward if layout.schedule in ENDS_BACKWARD else forward
        return float(np.max(work + np.cumsum(around)[:pp] - around[:pp]))

    def _with(self, row: int, seconds: float) -> Estimate:
        """The estimate where a flush takes so many seconds."""
        one, busy = self._found[row], self._pipelines[row].busy
        bubble = np.array([max(float(flushes(self._trainer, self._layouts[row])) * seconds - busy, 0.0)])
        stragglers = one.time["stragglers"] + one.slowed * (bubble - one.time["bubble"])
        return dataclasses.replace(one, time={**one.time, "bubble": bubble, "stragglers": stragglers})


@record
class _Pipeline:
    """What the walk of one layout takes."""

    passes: StageDurations
    """Seconds of every stage per microbatch, with what of the sends is not hidden."""
    hop: float
    """Seconds of a send that is hidden: it delays the next stage alone."""
    busy: float
    """Seconds of a step in which the slowest stage is not idle."""
