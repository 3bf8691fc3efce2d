"""Rules of experts: how many, over which ranks, and in which order of ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.layout import Module, Order, Recompute
from planner.rules.rule import Job, divides, divisors_text, rule


@rule("experts")
def _experts(job: Job, x: Any) -> Iterator[Any]:
    experts = job.model.num_experts
    yield divides(x.ep, experts) | (not job.model.is_moe)
    yield f"ep {x.ep} does not divide the {experts} experts of {job.model.name}; ep may be {divisors_text(experts)}"


@rule("expert parallel")
def _expert_parallel(job: Job, x: Any) -> Iterator[Any]:
    kind, biased = job.legal.expert_parallel if job.model.is_moe else "dense", job.model.expert_bias
    own_tp = job.legal.etp and not biased
    in_dp, same = divides(x.ep, x.dp), x.etp == x.tp
    holds, remedy = {
        "dense": ((x.ep == 1) & (x.etp == 1), f"{job.model.name} has no experts, so both must be 1"),
        "folded": (
            divides(x.ep * x.etp, x.tp * x.cp * x.dp) & (own_tp | (x.etp == 1)),
            "ep x etp must divide tp x cp x dp" + ("" if own_tp else " and etp must be 1")
            + (", as its experts have biases" if biased else ""),
        ),
        "dp": (in_dp & same, "ep must divide dp and etp must equal tp"),
        "outside": (in_dp & same, "ep must divide dp and etp must equal tp"),
        "alone": (
            in_dp & same & ((x.ep == 1) | (x.tp * x.cp == 1)),
            "ep must divide dp, with tp 1 and cp 1 when it is above 1, and etp must equal tp",
        ),
        "none": ((x.ep == 1) & same, "this trainer has no expert parallelism: ep must be 1 and etp equal tp"),
    }[kind]  # fmt: skip
    yield holds
    yield f"ep {x.ep} and etp {x.etp} with tp {x.tp}, cp {x.cp}, dp {x.dp}: {remedy}"


@rule("rank order")
def _rank_order(job: Job, x: Any) -> Iterator[Any]:
    moe = job.model.is_moe
    groups = np.where(moe, x.ep * x.etp == x.tp * x.cp, x.cp == 1)
    yield (x.order != Order.TP_CP_EP_PP_DP) | (x.pp == 1) | groups
    yield (
        f"order tp-cp-ep-pp-dp with pp {x.pp}: "
        + (
            f"ep {x.ep} x etp {x.etp} must equal tp {x.tp} x cp {x.cp}, "
            if moe
            else f"cp {x.cp} must be 1 without experts, "
        )
        + "so that experts and dense layers have the same data parallel groups; use order tp-cp-ep-dp-pp"
    )


@rule("experts with tp")
def _experts_with_tp(job: Job, x: Any) -> Iterator[Any]:
    split = (x.tp == 1) | (x.sequence_parallel == 1)
    yield split | (not job.model.is_moe) | (job.legal.sequence_parallel == "never")
    yield f"a mixture of experts with tp {x.tp} needs sequence_parallel: true"


@rule("expert overlap")
def _expert_overlap(job: Job, x: Any) -> Iterator[Any]:
    """[Megatron Core, transformer_config.py: overlap_moe_expert_parallel_comm; DualPipe has two chunks per rank as well]"""
    absent = not (job.model.is_moe and "ep" in job.trainer.traffic.overlap)
    repeats = (x.recompute == Recompute.FULL) | (x.recompute_modules & Module.MOE > 0)
    yield (x.ep == 1) | absent | (((x.pp == 1) | (x.vpp > 1)) & ~repeats)
    yield (
        f"option expert_overlap with pp {x.pp}, vpp {x.vpp}: the exchange hides behind another microbatch only where a "
        "pipeline has virtual stages (vpp 2) and experts are not recomputed; change them, or --option expert_overlap=off"
    )


EXPERTS = (_experts, _expert_parallel, _rank_order, _experts_with_tp, _expert_overlap)
