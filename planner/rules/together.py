"""Rules of what some trainers cannot do at the same time: each is legal alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import NAMES, Layout, Recompute, Schedule
from planner.rules.rule import Job, Rule


def _meshes_hold(job: Job, layout: Layout) -> Any:
    return (np.asarray(layout.tp) == 1) | (np.asarray(layout.cp) == 1) | job.trainer.legal.tp_with_cp


def _split_backward_holds(job: Job, layout: Layout) -> Any:
    """FSDP frees the weights after the input gradient and loses the weight gradient that comes later.

    Measured with torch 2.13, two pipeline ranks, gradient norm against the same job in one process: zbv with
    reshard_after_forward 0.966 for 1.372, dualpipe_v 1.301; without it, and with 1f1b or interleaved_1f1b either way, 1.372.
    """
    split = np.isin(np.asarray(layout.schedule), (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPE_V))
    return ~split | (np.asarray(layout.zero) < 3) | (job.trainer.stored.weight_sharding_level != 1)


def _late_weights_hold(job: Job, layout: Layout) -> Any:
    """What was computed again for the input gradient waits for the weight gradient too, in every microbatch in between.

    Fake run of torch 2.13 (planner.lab.run, 2026-11), Llama 3 8B, pp 2, zbv: 3.3 times the activations that full
    recompute leaves under 1f1b. That is not modelled.
    """
    split = np.isin(np.asarray(layout.schedule), (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPE_V))
    return ~split | (np.asarray(layout.recompute) != Recompute.FULL) | (not job.trainer.stored.gradients_on_demand)


def _experts_in_shards(job: Job, layout: Layout) -> Any:
    """FSDP takes the expert parallel ranks from those that shard the dense weights.  [torchtitan, ParallelDims]"""
    borrowed = np.asarray(layout.shard) * np.asarray(layout.cp) * np.asarray(layout.tp)
    return (job.trainer.stored.weight_sharding_level != 1) | (borrowed % np.maximum(np.asarray(layout.ep), 1) == 0)


def _experts_whole(job: Job, layout: Layout) -> Any:
    """Without expert parallelism, such trainers split every expert over tp.  [torchtitan, moe_sharding.py]"""
    splits = (not job.model.is_moe) | (job.trainer.legal.expert_parallel != "folded") | job.trainer.legal.etp
    return splits | (np.asarray(layout.ep) > 1) | (np.asarray(layout.tp) == 1)


def _tied_holds(job: Job, layout: Layout) -> Any:
    return (np.asarray(layout.pp) == 1) | (not job.model.tied_embeddings) | job.trainer.legal.tied_embeddings_with_pp


TOGETHER: tuple[Rule, ...] = (
    Rule(
        name="tp with cp",
        holds=_meshes_hold,
        sentence=lambda job, x: (
            f"tp {x.tp} with cp {x.cp}: trainer {job.trainer.name} has meshes of data and one of the two, none of all three; "
            "use one of them"
        ),
    ),
    Rule(
        name="split backward",
        holds=_split_backward_holds,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with zero {x.zero}: weights that FSDP frees between the two halves of "
            "the backward pass lose their gradient, without an error; use zero 2"
        ),
    ),
    Rule(
        name="recompute in split backward",
        holds=_late_weights_hold,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with full recompute: what is computed again waits for the weight "
            "gradients of later passes and takes more memory than it saves; use recompute none or selective, or schedule 1f1b"
        ),
    ),
    Rule(
        name="experts in shards",
        holds=_experts_in_shards,
        sentence=lambda job, x: (
            f"ep {x.ep} must divide dp_shard {int(x.shard)} x cp {x.cp} x tp {x.tp}, whose ranks trainer {job.trainer.name} "
            "takes for experts; choose a larger dp_shard"
        ),
    ),
    Rule(
        name="whole experts",
        holds=_experts_whole,
        sentence=lambda job, x: (
            f"ep 1 with tp {x.tp}: trainer {job.trainer.name} then splits every expert over tp, which is not priced; "
            "use ep > 1 or tp 1"
        ),
    ),
    Rule(
        name="tied embeddings",
        holds=_tied_holds,
        sentence=lambda job, x: (
            f"{job.model.name} ties its embeddings, and with pp {x.pp} they lie on two stages, which trainer "
            f"{job.trainer.name} does not keep equal; use pp 1"
        ),
    ),
)
