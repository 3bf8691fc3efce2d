"""Rules of the pipeline: layers over stages, virtual stages, schedules, microbatches."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import NAMES, Layout, Schedule, is_v_shaped
from planner.rules.rule import Job, Rule, divisors_text


def _given_stages(layout: Layout) -> Any:
    return (np.asarray(layout.first_stage_layers) > 0).astype(int) + (np.asarray(layout.last_stage_layers) > 0)


def _left_layers(job: Job, layout: Layout) -> Any:
    return job.model.num_layers - np.asarray(layout.first_stage_layers) - np.asarray(layout.last_stage_layers)


def _stages_hold(job: Job, layout: Layout) -> Any:
    pp, given, left = np.asarray(layout.pp), _given_stages(layout), np.asarray(_left_layers(job, layout))
    rest = np.maximum(pp - given, 0)
    some = np.where(rest > 0, left >= rest, left == 0)
    even = np.where(rest > 0, left % np.maximum(rest, 1) == 0, True)
    uneven_allowed = (given == 0) | job.trainer.legal.uneven_stages
    return (
        (pp <= job.model.num_layers)
        & some
        & (even | (not job.trainer.legal.drops_remainder))
        & uneven_allowed
        & ((pp > 1) | (given == 0))
    )


def _chunks_hold(job: Job, layout: Layout) -> Any:
    """Each virtual stage holds as many layers as the others; the first and last may lose one layer to what they carry."""
    pp, vpp, given = np.asarray(layout.pp), np.asarray(layout.vpp), np.asarray(_given_stages(layout))
    middle = np.asarray(_left_layers(job, layout)) // np.maximum(pp - given, 1)
    first = np.where(np.asarray(layout.first_stage_layers) > 0, layout.first_stage_layers, middle)
    last = np.where(np.asarray(layout.last_stage_layers) > 0, layout.last_stage_layers, middle)
    return (vpp == 1) | ((middle % vpp == 0) & (first >= vpp - 1) & (last >= vpp - 1) & (middle >= vpp))


def _schedule_holds(job: Job, layout: Layout) -> Any:
    schedule, pp, vpp = np.asarray(layout.schedule), np.asarray(layout.pp), np.asarray(layout.vpp)
    numbers = [number for number, name in NAMES["schedule"].items() if name in job.trainer.legal.schedules]
    plain = (pp == 1) | (not job.trainer.legal.pp)  # without pipelines the rule of degrees says so
    known = np.isin(schedule, numbers) | (plain & (schedule == Schedule.ONE_F_ONE_B))
    virtual = np.where(schedule == Schedule.INTERLEAVED, vpp > 1, np.where(is_v_shaped(schedule), vpp == 2, vpp == 1))
    return known & virtual & ((pp > 1) | (schedule == Schedule.ONE_F_ONE_B))


def _microbatches_hold(job: Job, layout: Layout) -> Any:
    schedule, pp, m = np.asarray(layout.schedule), np.asarray(layout.pp), np.asarray(layout.num_microbatches)
    interleaved = schedule == Schedule.INTERLEAVED
    group = np.maximum(pp, 1) if job.trainer.legal.interleaved_multiple else np.maximum(m // np.maximum(pp, 1), 1)
    return (~interleaved | (m % group == 0)) & ((schedule != Schedule.DUALPIPE_V) | (m >= 2 * pp))


def _batch_sentence(job: Job, layout: Layout) -> str:
    batch, replicas = job.workload.global_batch_size, int(layout.micro_batch_size) * int(layout.dp)
    nearest = max(1, round(batch / replicas)) * replicas
    return (
        f"micro_batch_size {layout.micro_batch_size} x {layout.num_microbatches} microbatches x dp {layout.dp} = "
        f"{layout.global_batch_size} sequences, but the global batch is {batch}; it must be a multiple of {replicas}, "
        f"the nearest is {nearest}"
    )


PIPELINE: tuple[Rule, ...] = (
    Rule(
        name="layers",
        holds=_stages_hold,
        sentence=lambda job, x: (
            f"{job.model.num_layers} layers do not split over {x.pp} pipeline stages with first_stage_layers "
            f"{x.first_stage_layers} and last_stage_layers {x.last_stage_layers} in trainer {job.trainer.name}; choose pp from "
            f"{divisors_text(job.model.num_layers)}, or give the first and last stage layers so that the rest divides"
        ),
    ),
    Rule(
        name="virtual stages",
        holds=_chunks_hold,
        sentence=lambda job, x: (
            f"vpp {x.vpp} does not divide the layers of each of the {x.pp} stages of {job.model.name} "
            f"({job.model.num_layers} layers); choose vpp so that every virtual stage has the same number"
        ),
    ),
    Rule(
        name="schedule",
        holds=_schedule_holds,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with pp {x.pp} and vpp {x.vpp}: trainer "
            f"{job.trainer.name} knows {', '.join(job.trainer.legal.schedules) or '1f1b'}; "
            "interleaved_1f1b needs pp > 1 and vpp > 1, zbv and dualpipe_v need vpp 2, the others vpp 1"
        ),
    ),
    Rule(
        name="microbatches",
        holds=_microbatches_hold,
        sentence=lambda job, x: (
            f"{x.num_microbatches} microbatches with schedule {NAMES['schedule'][int(x.schedule)]} and pp "
            f"{x.pp}: interleaved_1f1b needs a multiple of "
            f"{'pp' if job.trainer.legal.interleaved_multiple else 'm // pp rounds'}, dualpipe_v at least 2 pp; "
            "change micro_batch_size or the batch"
        ),
    ),
    Rule(
        name="batch",
        holds=lambda job, x: np.asarray(x.global_batch_size) == job.workload.global_batch_size,
        sentence=_batch_sentence,
    ),
)
