"""Rules of what divides the sequence: context parallelism, its kernels, low precision, sequence parallelism."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.layout import CpMethod
from planner.rules.jobs import SPARSE_KERNELS
from planner.rules.rule import Job, chosen, divides, known, rule
from planner.workload import LOW_PRECISIONS


@rule("context parallel")
def _context_parallel(job: Job, x: Any) -> Iterator[Any]:
    heads, kv_heads = (n // np.maximum(x.tp, 1) for n in (job.model.num_heads, job.model.num_kv_heads))
    a2a = (x.cp_method != CpMethod.A2A) | (divides(x.cp, heads) & divides(x.cp, np.maximum(kv_heads, 1)))
    yield (x.cp == 1) | (np.isin(x.cp_method, known("cp_method", job.legal.cp_methods)) & a2a)
    yield (
        f"cp {x.cp} with method {chosen('cp_method', x.cp_method)}: trainer {job.trainer.name} knows "
        f"{', '.join(job.legal.cp_methods) or 'no context parallelism'}; a2a also needs cp to divide the {heads} heads of each "
        "tensor-parallel rank"
    )


@rule("context parallel kernels")
def _context_parallel_kernels(job: Job, x: Any) -> Iterator[Any]:
    """Transformer Engine's context parallelism: MLA only as a ring, sliding windows only without one. Sparse attention gathers
    all keys.  [dsa.py, DSAttention.forward]"""
    ring, mla = x.cp_method == CpMethod.RING, job.model.is_mla
    fits = np.where(ring, job.model.window == 0, not mla)
    free = not job.trainer.kernels.transformer_engine
    if job.model.is_sparse:
        free, fits = False, (x.cp_method == CpMethod.ALLGATHER) & (job.trainer.code_base in SPARSE_KERNELS)
    yield (x.cp == 1) | fits | free
    yield (
        f"cp {x.cp} with method {chosen('cp_method', x.cp_method)}: Transformer Engine's context parallelism knows "
        f"{'MLA as a ring only' if mla else 'sliding windows with a2a or allgather only'}"
        if not job.model.is_sparse
        else f"cp {x.cp} with method {chosen('cp_method', x.cp_method)}: sparse attention knows allgather in Megatron alone"
    )


def low_precision_multiple(precision: str) -> int:
    """Both sides of the matrices of a low-precision GEMM are multiples of this: the length of one row of scales for mx
    formats, else 16 bytes of alignment in fp8.  [TransformerEngine, pytorch/utils.py, assert_dim_for_fp8_exec]"""
    return 32 if precision == "mxfp8" else 16


@rule("low precision")
def _low_precision(job: Job, x: Any) -> Iterator[Any]:
    """Low-precision GEMMs want both sides of every matrix on one rank in multiples of 16, with mx scales of 32."""
    model, precision = job.model, job.workload.precision
    unit = low_precision_multiple(precision)
    rows = job.workload.sequence_length * x.micro_batch_size // np.maximum(x.cp, 1)
    holds = (model.hidden_size % unit == 0) & (model.attention_output_size % (x.tp * unit) == 0)
    holds &= rows % (np.where(x.sequence_parallel == 1, x.tp, 1) * unit) == 0
    holds &= (model.ffn_size % (x.tp * unit) == 0) | (not model.num_plain_layers)
    holds &= (model.expert_ffn_size % (x.etp * unit) == 0) | (not model.is_moe)
    holds &= (model.linear is None) or (model.linear.value_size % (x.tp * unit) == 0)
    yield holds | (precision not in LOW_PRECISIONS)
    yield (
        f"{precision} needs hidden size, attention width, MLP width (experts: over etp {x.etp}) and tokens of each of the {x.tp} "
        f"tensor-parallel ranks in multiples of {unit}; choose a smaller tp, or bf16"
    )


@rule("sequence")
def _sequence(job: Job, x: Any) -> Iterator[Any]:
    s, divisor = job.workload.sequence_length, job.legal.sequence_divisor
    chunks = (x.cp == 1) | divides(divisor * x.cp, s)
    split = (x.sequence_parallel == 0) | divides(x.tp, s // np.maximum(x.cp, 1))
    yield chunks & divides(x.cp, s) & split
    yield (
        f"the sequence of {s} tokens does not divide by {divisor} x cp {x.cp}, or the part of each rank not by tp {x.tp}; choose a "
        "length that does"
    )


@rule("sequence parallel")
def _sequence_parallel(job: Job, x: Any) -> Iterator[Any]:
    use, split, many = job.legal.sequence_parallel, x.sequence_parallel, x.tp > 1
    holds = {"never": split == 0, "always": split == many, "optional": (split == 0) | many, "usual": (split == 0) | many}[use]
    yield holds
    habit = {"never": "has none", "always": "uses it always, but only with tp > 1"}.get(use, "uses it only with tp > 1")
    yield f"sequence_parallel {bool(split)} with tp {x.tp}: trainer {job.trainer.name} {habit}"


SEQUENCE = (_context_parallel, _context_parallel_kernels, _low_precision, _sequence, _sequence_parallel)
