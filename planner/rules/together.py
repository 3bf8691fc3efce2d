"""Rules of what some trainers cannot do at the same time: each is legal alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.layout import SPLIT_BACKWARD, Recompute
from planner.rules.rule import Job, chosen, divides, rule


@rule("tp with cp")
def _tp_with_cp(job: Job, x: Any) -> Iterator[Any]:
    yield (x.tp == 1) | (x.cp == 1) | job.legal.tp_with_cp
    yield (
        f"tp {x.tp} with cp {x.cp}: trainer {job.trainer.name} has meshes of data and one of the two, none of all three; use one "
        "of them"
    )


@rule("split backward")
def _split_backward(job: Job, x: Any) -> Iterator[Any]:
    """FSDP frees the weights after the input gradient and loses the weight gradient that comes later.

    Measured with torch 2.13, two pipeline ranks, gradient norm against the same job in one process: zbv with
    reshard_after_forward 0.966 for 1.372, dualpipe_v 1.301; without it, and with 1f1b or interleaved_1f1b either way, 1.372.
    """
    whole = ~np.isin(x.schedule, SPLIT_BACKWARD)
    yield whole | (x.zero < 3) | (job.trainer.stored.weight_sharding_level != 1)
    yield (
        f"schedule {chosen('schedule', x.schedule)} with zero {x.zero}: weights that FSDP frees between the two halves of the "
        "backward pass lose their gradient, without an error; use zero 2"
    )


@rule("recompute in split backward")
def _recompute_in_split_backward(job: Job, x: Any) -> Iterator[Any]:
    """What was computed again for the input gradient waits for the weight gradient too, in every microbatch in between.

    Fake run of torch 2.13 (planner.lab.run, 2026-11), Llama 3 8B, pp 2, zbv: 3.3 times the activations that full
    recompute leaves under 1f1b. That is not modelled.
    """
    whole = ~np.isin(x.schedule, SPLIT_BACKWARD)
    yield whole | (x.recompute != Recompute.FULL) | (not job.trainer.stored.gradients_on_demand)
    yield (
        f"schedule {chosen('schedule', x.schedule)} with full recompute: what is computed again waits for the weight gradients of "
        "later passes and takes more memory than it saves; use recompute none or selective, or schedule 1f1b"
    )


@rule("experts in shards")
def _experts_in_shards(job: Job, x: Any) -> Iterator[Any]:
    """FSDP takes the expert parallel ranks from those that shard the dense weights.  [torchtitan, ParallelDims]"""
    yield divides(x.ep, x.shard * x.cp * x.tp) | (job.trainer.stored.weight_sharding_level != 1)
    yield (
        f"ep {x.ep} must divide dp_shard {x.shard} x cp {x.cp} x tp {x.tp}, whose ranks trainer {job.trainer.name} takes for "
        "experts; choose a larger dp_shard"
    )


@rule("whole experts")
def _whole_experts(job: Job, x: Any) -> Iterator[Any]:
    """Without expert parallelism, such trainers split every expert over tp.  [torchtitan, moe_sharding.py]"""
    splits = job.model.is_moe and job.legal.expert_parallel == "folded" and not job.legal.etp
    yield (x.ep > 1) | (x.tp == 1) | (not splits)
    yield (
        f"ep 1 with tp {x.tp}: trainer {job.trainer.name} then splits every expert over tp, which is not priced; use ep > 1 or tp 1"
    )


@rule("tied embeddings")
def _tied_embeddings(job: Job, x: Any) -> Iterator[Any]:
    yield (x.pp == 1) | (not job.model.tied_embeddings) | job.legal.tied_embeddings_with_pp
    yield (
        f"{job.model.name} ties its embeddings, and with pp {x.pp} they lie on two stages, which trainer {job.trainer.name} does "
        "not keep equal; use pp 1"
    )


TOGETHER = (
    _tp_with_cp, _split_backward, _recompute_in_split_backward, _experts_in_shards, _whole_experts, _tied_embeddings,
)  # fmt: skip
