"""Rules of what divides the sequence: context parallelism, its kernels, low precision, sequence parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import NAMES, CpMethod, Layout
from planner.rules.rule import Job, Rule
from planner.workload import LOW_PRECISIONS


def _cp_holds(job: Job, layout: Layout) -> Any:
    cp, method = np.asarray(layout.cp), np.asarray(layout.cp_method)
    numbers = [number for number, name in NAMES["cp_method"].items() if name in job.trainer.legal.cp_methods]
    per_rank = job.model.num_heads // np.maximum(np.asarray(layout.tp), 1)
    keys = np.maximum(job.model.num_kv_heads // np.maximum(np.asarray(layout.tp), 1), 1)
    divides = (per_rank % np.maximum(cp, 1) == 0) & (keys % np.maximum(cp, 1) == 0)
    a2a = (method != CpMethod.A2A) | divides
    return (cp == 1) | (np.isin(method, numbers) & a2a)


def _ring_holds(job: Job, layout: Layout) -> Any:
    """Transformer Engine's context parallelism: MLA only as a ring, sliding windows only without one."""
    method, cp = np.asarray(layout.cp_method), np.asarray(layout.cp)
    if not job.trainer.kernels.transformer_engine:
        return np.ones(cp.shape, dtype=bool)
    ring = method == CpMethod.RING
    return (cp == 1) | ((ring | (not job.model.is_mla)) & (~ring | (job.model.window == 0)))


def _low_precision_holds(job: Job, layout: Layout) -> Any:
    """Low-precision GEMMs want both sides of every matrix on one rank in multiples of 16, with mx scales of 32."""
    if job.workload.precision not in LOW_PRECISIONS:
        return np.ones(np.asarray(layout.tp).shape, dtype=bool)
    model, tp, split = job.model, np.asarray(layout.tp), np.asarray(layout.sequence_parallel)
    unit = low_precision_multiple(job.workload.precision)
    rows = job.workload.sequence_length * np.asarray(layout.micro_batch_size) // np.maximum(np.asarray(layout.cp), 1)
    holds = (model.hidden_size % unit == 0) & (model.attention_output_size % (tp * unit) == 0)
    holds &= rows % (np.where(split == 1, tp, 1) * unit) == 0
    if model.num_plain_layers:
        holds &= model.ffn_size % (tp * unit) == 0
    if model.is_moe:
        holds &= model.expert_ffn_size % (np.asarray(layout.etp) * unit) == 0
    return holds


def low_precision_multiple(precision: str) -> int:
    """Both sides of the matrices of a low-precision GEMM are multiples of this: the length of one row of scales for mx
    formats, else 16 bytes of alignment in fp8.  [TransformerEngine, pytorch/utils.py, assert_dim_for_fp8_exec]"""
    return 32 if precision == "mxfp8" else 16


def _sequence_holds(job: Job, layout: Layout) -> Any:
    s, cp, split = job.workload.sequence_length, np.asarray(layout.cp), np.asarray(layout.sequence_parallel)
    chunks = (cp == 1) | (s % np.maximum(job.trainer.legal.sequence_divisor * cp, 1) == 0)
    whole = s % np.maximum(cp, 1) == 0
    return chunks & whole & ((split == 0) | (s // np.maximum(cp, 1) % np.maximum(np.asarray(layout.tp), 1) == 0))


def _sp_holds(job: Job, layout: Layout) -> Any:
    tp, split = np.asarray(layout.tp), np.asarray(layout.sequence_parallel)
    if job.trainer.legal.sequence_parallel == "never":
        return split == 0
    if job.trainer.legal.sequence_parallel == "always":
        return split == (tp > 1)
    return (split == 0) | (tp > 1)


SEQUENCE: tuple[Rule, ...] = (
    Rule(
        name="context parallel",
        holds=_cp_holds,
        sentence=lambda job, x: (
            f"cp {x.cp} with method {NAMES['cp_method'][int(x.cp_method)]}: trainer {job.trainer.name} "
            f"knows {', '.join(job.trainer.legal.cp_methods) or 'no context parallelism'}; a2a also needs cp to divide the "
            f"{job.model.num_heads // max(1, int(x.tp))} heads of each tensor-parallel rank"
        ),
    ),
    Rule(
        name="context parallel kernels",
        holds=_ring_holds,
        sentence=lambda job, x: (
            f"cp {x.cp} with method {NAMES['cp_method'][int(x.cp_method)]}: Transformer Engine's context parallelism knows "
            f"{'MLA as a ring only' if job.model.is_mla else 'sliding windows with a2a or allgather only'}"
        ),
    ),
    Rule(
        name="low precision",
        holds=_low_precision_holds,
        sentence=lambda job, x: (
            f"{job.workload.precision} needs hidden size, attention width, MLP width (experts: over etp {x.etp}) and tokens of "
            f"each of the {x.tp} tensor-parallel ranks in multiples of {low_precision_multiple(job.workload.precision)}; "
            "choose a smaller tp, or bf16"
        ),
    ),
    Rule(
        name="sequence",
        holds=_sequence_holds,
        sentence=lambda job, x: (
            f"the sequence of {job.workload.sequence_length} tokens does not divide by "
            f"{job.trainer.legal.sequence_divisor} x cp {x.cp}, or the part of each rank not by tp {x.tp}; "
            "choose a length that does"
        ),
    ),
    Rule(
        name="sequence parallel",
        holds=_sp_holds,
        sentence=lambda job, x: (
            f"sequence_parallel {bool(x.sequence_parallel)} with tp {x.tp}: trainer {job.trainer.name} uses it "
            f"{job.trainer.legal.sequence_parallel}, and only with tp > 1"
        ),
    ),
)
