"""Rules of the degrees: their product, and what tensor parallelism divides."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import Layout
from planner.rules.rule import Job, Rule, divides, divisors_text


def _kv_heads_hold(job: Job, layout: Layout) -> Any:
    tp, kv = np.asarray(layout.tp), job.model.num_kv_heads
    if job.model.is_mla:
        return np.ones(tp.shape, dtype=bool)
    replicated = (tp % kv == 0) & job.trainer.legal.kv_replication
    return (kv % np.maximum(tp, 1) == 0) | replicated


DEGREES: tuple[Rule, ...] = (
    Rule(
        name="GPUs",
        holds=lambda job, x: np.asarray(x.num_gpus) == job.cluster.num_gpus,
        sentence=lambda job, x: (
            f"tp {x.tp} x pp {x.pp} x dp {x.dp} x cp {x.cp} = {x.num_gpus} GPUs, but the job has "
            f"{job.cluster.num_gpus}; choose degrees whose product is {job.cluster.num_gpus}"
        ),
    ),
    Rule(
        name="trainer degrees",
        holds=lambda job, x: (
            ((np.asarray(x.tp) == 1) | job.trainer.legal.tp) & ((np.asarray(x.pp) == 1) | job.trainer.legal.pp)
        ),
        sentence=lambda job, x: (
            f"trainer {job.trainer.name} has no {'tensor' if not job.trainer.legal.tp and x.tp > 1 else 'pipeline'} "
            "parallelism; set the degree to 1 or choose another trainer"
        ),
    ),
    Rule(
        name="heads",
        holds=lambda job, x: divides(x.tp, job.model.num_heads),
        sentence=lambda job, x: (
            f"tp {x.tp} does not divide the {job.model.num_heads} attention heads of {job.model.name}; "
            f"tp may be {divisors_text(job.model.num_heads)}"
        ),
    ),
    Rule(
        name="key-value heads",
        holds=_kv_heads_hold,
        sentence=lambda job, x: (
            f"tp {x.tp} does not fit the {job.model.num_kv_heads} key-value heads of {job.model.name}: "
            + (
                "it must divide them or be a multiple of them"
                if job.trainer.legal.kv_replication
                else f"trainer {job.trainer.name} does not replicate them, so tp must divide {job.model.num_kv_heads}"
            )
        ),
    ),
    Rule(
        name="MLP width",
        holds=lambda job, x: (
            divides(x.tp, job.model.ffn_size)
            & (divides(x.etp, job.model.expert_ffn_size) if job.model.is_moe else True)
        ),
        sentence=lambda job, x: (
            f"the MLP width ({job.model.ffn_size}, experts {job.model.expert_ffn_size}) does not divide by "
            f"tp {x.tp} (experts: etp {x.etp}); choose a smaller degree"
        ),
    ),  # fmt: skip
)
