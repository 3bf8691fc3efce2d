"""Rules of the pipeline: layers over stages, virtual stages, schedules, microbatches."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.layout import Schedule, is_v_shaped
from planner.rules.rule import Job, chosen, divides, divisors_text, known, rule

MOST_STAGES = 512
"""Stages of a pipeline, virtual ones counted; the longest of profiles/runs has 128."""


def _given_stages(x: Any) -> Any:
    return (x.first_stage_layers > 0).astype(int) + (x.last_stage_layers > 0)


@rule("layers")
def _layers(job: Job, x: Any) -> Iterator[Any]:
    layers, given = job.model.num_layers, _given_stages(x)
    left, rest = layers - x.first_stage_layers - x.last_stage_layers, np.maximum(x.pp - given, 0)
    even = np.where(rest > 0, left % np.maximum(rest, 1) == 0, True) | (not job.legal.drops_remainder)
    some = np.where(rest > 0, left >= rest, left == 0) & (x.pp <= layers)
    ends = (given == 0) | ((x.pp > 1) & job.legal.uneven_stages)
    yield some & even & ends
    yield (
        f"{layers} layers do not split over {x.pp} pipeline stages with first_stage_layers {x.first_stage_layers} and "
        f"last_stage_layers {x.last_stage_layers} in trainer {job.trainer.name}; choose pp from {divisors_text(layers)}, or give "
        "the first and last stage layers so that the rest divides"
    )


@rule("virtual stages")
def _virtual_stages(job: Job, x: Any) -> Iterator[Any]:
    """Each virtual stage holds as many layers as the others; the first and last may lose one layer to what they carry."""
    layers = job.model.num_layers
    middle = (layers - x.first_stage_layers - x.last_stage_layers) // np.maximum(x.pp - _given_stages(x), 1)
    first, last = (np.where(end > 0, end, middle) for end in (x.first_stage_layers, x.last_stage_layers))
    equal = (middle % x.vpp == 0) & (first >= x.vpp - 1) & (last >= x.vpp - 1) & (middle >= x.vpp)
    yield (x.vpp == 1) | equal
    yield (
        f"vpp {x.vpp} does not divide the layers of each of the {x.pp} stages of {job.model.name} ({layers} layers); choose vpp so "
        "that every virtual stage has the same number"
    )


@rule("pipeline length")
def _length(job: Job, x: Any) -> Iterator[Any]:
    """Finalists are walked action by action (``cost.pipeline.schedule_walk``): seconds at this length, hours far beyond it."""
    yield x.pp * x.vpp <= MOST_STAGES
    yield f"pp {x.pp} x vpp {x.vpp} = {x.pp * x.vpp} stages; pipelines of up to {MOST_STAGES} are priced, choose smaller ones"


@rule("schedule")
def _schedule(job: Job, x: Any) -> Iterator[Any]:
    plain = (x.pp == 1) | (not job.legal.pp)  # without pipelines the rule of degrees says so
    one = x.schedule == Schedule.ONE_F_ONE_B
    v_shaped = is_v_shaped(x.schedule)
    virtual = np.where(x.schedule == Schedule.INTERLEAVED, x.vpp > 1, np.where(v_shaped, x.vpp == 2, x.vpp == 1))
    exists = np.isin(x.schedule, known("schedule", job.legal.schedules)) | (plain & one)
    yield exists & virtual & ((x.pp > 1) | one)
    yield (
        f"schedule {chosen('schedule', x.schedule)} with pp {x.pp} and vpp {x.vpp}: trainer {job.trainer.name} knows "
        f"{', '.join(job.legal.schedules) or '1f1b'}; interleaved_1f1b needs pp > 1 and vpp > 1, zbv and dualpipe_v need vpp 2, "
        "the others vpp 1"
    )


@rule("microbatches")
def _microbatches(job: Job, x: Any) -> Iterator[Any]:
    m, pp, multiple = x.num_microbatches, np.maximum(x.pp, 1), not job.legal.any_microbatches
    rounds = (x.schedule != Schedule.INTERLEAVED) | divides(pp if multiple else m // pp, m)
    yield rounds & ((x.schedule != Schedule.DUALPIPE_V) | (m >= 2 * x.pp))
    yield (
        f"{m} microbatches with schedule {chosen('schedule', x.schedule)} and pp {x.pp}: interleaved_1f1b needs a multiple of "
        f"{'pp' if multiple else 'm // pp rounds'}, dualpipe_v at least 2 pp; change micro_batch_size or the batch"
    )


@rule("batch")
def _batch(job: Job, x: Any) -> Iterator[Any]:
    batch, replicas = job.workload.global_batch_size, x.micro_batch_size * x.dp
    yield x.global_batch_size == batch
    yield (
        f"micro_batch_size {x.micro_batch_size} x {x.num_microbatches} microbatches x dp {x.dp} = {x.global_batch_size} sequences, "
        f"but the global batch is {batch}; it must be a multiple of {replicas}, the nearest is "
        f"{max(1, round(batch / int(replicas))) * replicas}"
    )


PIPELINE = (_layers, _virtual_stages, _length, _schedule, _microbatches, _batch)
