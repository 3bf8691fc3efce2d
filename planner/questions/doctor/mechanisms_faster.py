"""What makes a step take less time than planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.layout import Recompute
from planner.questions.calibrate.factors import FACTORS, highest
from planner.questions.doctor.mechanisms import (
    Change,
    Mechanism,
    batch,
    factor,
    layout_change,
    switch,
    times,
    trainer_change,
)
from planner.timeline.priced_plan import Priced
from planner.trainer_records import OVERLAPS
from planner.workload import LOW_PRECISIONS

BETTER = {
    "sustained_clock": ("matrix products at a higher clock", "'nvidia-smi -q -d CLOCK,POWER' during a step"),
    "memory_fraction": ("faster memory-bound kernels", "a profile: time in norms, activations and the optimizer"),
    "scale_up": ("faster link inside a node", "nccl-tests inside one node: 'all_reduce_perf -b 1G -e 1G'"),
    "scale_out": ("faster collectives between nodes", "nccl-tests between nodes; SHARP, or a newer NCCL"),
    "host_time": ("faster launches by the host", "a profile: gaps between kernels; CUDA graphs"),
    "step_overhead": ("less overhead per step", "what the trainer times: the passes only, or the whole step"),
}
"""Factors of calibration that can be better than planned: in words, and what tells."""


def faster(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step faster than planned."""
    job = base.job
    found = []
    for one in FACTORS:
        if one.key in BETTER:
            limit = highest(one, job.cluster.hardware, job.trainer) if one.of == "hardware" else 1.0 / one.low
            name, check = BETTER[one.key]
            found.append(
                Mechanism(
                    key=one.key, name=name, size=times("better"), sizes=(limit,), width=one.width, seen=0,
                    change=factor(one.key, worse=False), source=one.why, check=check,
                )
            )  # fmt: skip
    return [one for one in found if one.sizes[0] > 1.0] + [*_switches(base), *batch(base, (0.5, 0.25))]


def _switches(base: Priced) -> Iterator[Mechanism]:
    job, layout = base.job, base.layout
    trainer, workload = job.trainer, job.workload
    if trainer.traffic.overlap != frozenset(OVERLAPS) and job.cluster.num_gpus > 1:
        yield switch(
            "overlap", "more communication is overlapped", "all of it beside computation",
            trainer_change(overlap=frozenset(OVERLAPS)), seen=1, check="a profile: NCCL kernels beside GEMMs",
            source="releases that hide what earlier ones did not (Megatron-Bridge 26.06)",
        )  # fmt: skip
    if int(layout.recompute) != Recompute.NONE:
        yield switch(
            "recompute", "less recompute than planned", "none",
            layout_change(recompute=int(Recompute.NONE), recompute_layers=0, recompute_modules=0), seen=2,
            source="checkpoints that stop early or save projections (llm-foundry, DGX Cloud MaxText)",
            check="the arguments that the trainer prints; memory is then higher than planned",
        )  # fmt: skip
    if (
        workload.precision not in LOW_PRECISIONS
        and "fp8" in trainer.legal.precisions
        and "fp8" in job.cluster.hardware.peak_flops
    ):
        yield switch(
            "precision", "linear layers run in fp8", f"fp8 instead of {workload.precision}", _workload(precision="fp8"),
            seen=0, source="no published run is known for it", check="names of GEMM kernels in a profile",
        )  # fmt: skip
    if workload.document_length == 0 and workload.sequence_length >= 1024:
        yield switch(
            "documents", "attention inside packed documents only", "16 documents per sequence",
            _workload(document_length=workload.sequence_length // 16), seen=1,
            source="packed SQuAD of DGX Cloud fine-tuning, 11 to 30 % too slow before it was priced",
            check="the attention mask of the data loader",
        )  # fmt: skip
    if workload.model.is_moe and int(layout.ep) > 1 and trainer.kernels.expert_dispatch == "alltoall":
        yield switch(
            "dispatch", "a token is sent once per node and GPU", "DeepEP or HybridEP",
            trainer_change(expert_dispatch="deduplicated"), seen=1, check="the dispatcher in the arguments",
            source="DeepSeek-V3 and Qwen3 rows whose dispatcher was not stated (Megatron-Bridge)",
        )  # fmt: skip


def _workload(**changes: Any) -> Change:
    return lambda base, _: (replace(base.job, workload=base.job.workload.replace(**changes)), base.layout)
