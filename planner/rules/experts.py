"""Rules of experts: how many, over which ranks, and in which order of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import Layout, Order
from planner.rules.rule import Job, Rule, divisors_text


def _ep_holds(job: Job, layout: Layout) -> Any:
    ep, etp, tp = np.asarray(layout.ep), np.asarray(layout.etp), np.asarray(layout.tp)
    if not job.model.is_moe:
        return (ep == 1) & (etp == 1)
    kind = job.trainer.legal.expert_parallel
    ranks = tp * np.asarray(layout.cp) * np.asarray(layout.dp)
    folded = ranks % np.maximum(ep * etp, 1) == 0
    if kind == "none":
        return (ep == 1) & (etp == tp)
    alone = (ep == 1) | (tp * np.asarray(layout.cp) == 1) | (kind != "alone")
    if kind in ("dp", "alone"):
        return alone & (np.asarray(layout.dp) % np.maximum(ep, 1) == 0) & (etp == tp)
    return folded & ((job.trainer.legal.etp & (not job.model.expert_bias)) | (etp == 1))


EXPERTS: tuple[Rule, ...] = (
    Rule(
        name="experts",
        holds=lambda job, x: (
            np.asarray(x.ep) * 0 == (job.model.num_experts % np.maximum(np.asarray(x.ep), 1) if job.model.is_moe else 0)
        ),
        sentence=lambda job, x: (
            f"ep {x.ep} does not divide the {job.model.num_experts} experts of {job.model.name}; ep may be "
            f"{divisors_text(job.model.num_experts)}"
        ),
    ),
    Rule(
        name="expert parallel",
        holds=_ep_holds,
        sentence=lambda job, x: (
            f"ep {x.ep} and etp {x.etp} with tp {x.tp}, cp {x.cp}, dp {x.dp}: "
            + (
                f"{job.model.name} has no experts, so both must be 1"
                if not job.model.is_moe
                else {
                    "folded": "ep x etp must divide tp x cp x dp"
                    + (" and etp must be 1" if not job.trainer.legal.etp or job.model.expert_bias else "")
                    + (", as its experts have biases" if job.model.expert_bias else ""),
                    "dp": "ep must divide dp and etp must equal tp",
                    "alone": "ep must divide dp, with tp 1 and cp 1 when it is above 1, and etp must equal tp",
                    "none": "this trainer has no expert parallelism: ep must be 1 and etp equal tp",
                }[job.trainer.legal.expert_parallel]
            )
        ),
    ),
    Rule(
        name="rank order",
        holds=lambda job, x: (
            (np.asarray(x.order) != Order.TP_CP_EP_PP_DP)
            | (np.asarray(x.pp) == 1)
            | np.where(
                job.model.is_moe,
                np.asarray(x.ep) * np.asarray(x.etp) == np.asarray(x.tp) * np.asarray(x.cp),
                np.asarray(x.cp) == 1,
            )
        ),
        sentence=lambda job, x: (
            f"order tp-cp-ep-pp-dp with pp {x.pp}: "
            + (
                f"ep {x.ep} x etp {x.etp} must equal tp {x.tp} x cp {x.cp}, "
                if job.model.is_moe
                else f"cp {x.cp} must be 1 without experts, "
            )
            + "so that experts and dense layers have the same data parallel groups; use order tp-cp-ep-dp-pp"
        ),
    ),  # fmt: skip
    Rule(
        name="experts with tp",
        holds=lambda job, x: (
            (not job.model.is_moe)
            | (np.asarray(x.tp) == 1)
            | (np.asarray(x.sequence_parallel) == 1)
            | (job.trainer.legal.sequence_parallel == "never")
        ),
        sentence=lambda job, x: f"a mixture of experts with tp {x.tp} needs sequence_parallel: true",
    ),  # fmt: skip
)
