"""Mechanisms that make a GPU hold more, or less memory, than planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.layout import Layout, Recompute, Schedule
from planner.questions.doctor.mechanisms import (
    WIDTHS,
    Mechanism,
    achieved_factor,
    can_recompute_more,
    flash_off,
    layout_fields,
    recomputed,
    trainer_facts,
    with_hardware,
)
from planner.rules import Job
from planner.timeline.priced_plan import Priced

EAGER_LOGITS = 14.0
"""Bytes per logit of a loss in plain torch: bf16, fp32 copy, log softmax, gradient (docs/log.md, torchtitan)."""
GATHERED_LOGITS = 20.0
"""The same where shards are gathered first (docs/log.md, Hagemann)."""
FP32 = 4.0
ARGUMENTS = "the arguments that the trainer prints"


def memory_mechanisms(base: Priced, more: bool) -> list[Mechanism]:
    """The mechanisms that could make a GPU of this plan hold more (or less) than planned."""
    return [*_fragmentation(base, more), *([*_more(base), *_more_states(base)] if more else _less(base))]


def _fragmentation(base: Priced, more: bool) -> Iterator[Mechanism]:
    if base.job.trainer.fragmentation > 0:
        yield Mechanism(
            key="fragmentation", name="fragmentation of the allocator" if more else "less fragmentation", sizes=(20.0,),
            size="{x:.3g} times the planned share" if more else "{x:.3g} times less", width=WIDTHS["fragmentation"],
            change=achieved_factor("fragmentation", worse=more), seen=2 if more else 1,
            source="0.03 to 0.21 of the peak between frameworks (calibration factors)",
            check="torch.cuda.memory_stats: reserved against allocated"
            + ("; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if more else " bytes"),
        )  # fmt: skip


def _more(base: Priced) -> Iterator[Mechanism]:
    """Activations and logits."""
    trainer, planned = base.job.trainer, base.job.trainer.logit_bytes
    snapshot = "torch.cuda.memory._record_memory_history and _dump_snapshot: what is alive at the peak"
    if larger := tuple(x for x in (EAGER_LOGITS, GATHERED_LOGITS) if x > planned):
        yield Mechanism(
            key="logits", name="logits and their copies in fp32", sizes=larger, seen=3, check=snapshot,
            size=lambda x: f"{x:.0f} instead of {planned:.0f} bytes per logit",
            change=trainer_facts(logit_bytes=lambda _, x: x),
            source="14 bytes in eager torch, 20 where shards are gathered (torchtitan, Hagemann, nanotron)",
        )  # fmt: skip
    if int(base.layout.recompute) != Recompute.NONE:
        yield Mechanism(
            key="recompute", name="recompute is off", size="all activations are kept", change=recomputed(Recompute.NONE),
            seen=1, source="recipes whose pages did not say what they recompute (AutoModel, DGX Cloud)",
            check=f"{ARGUMENTS}; the step is then faster than planned",
        )  # fmt: skip
    yield from flash_off(base, "score matrices are kept")
    if trainer.saved_norm_bytes < FP32 or "swiglu" not in trainer.unfused:
        yield Mechanism(
            key="saved", name="unfused kernels save what fused ones do not", seen=3, check=snapshot,
            size="fp32 inputs of norms, output of SiLU",
            change=trainer_facts(saved_norm_bytes=FP32, unfused=trainer.unfused | {"swiglu"}),
            source="norms on fp32 copies and a separate SiLU (Hagemann, nanotron, InternEvo)",
        )  # fmt: skip


def _more_states(base: Priced) -> Iterator[Mechanism]:
    """States, microbatches in flight, buffers."""
    trainer, layout = base.job.trainer, base.layout
    if int(layout.zero) >= 1 and base.estimate.memory["optimizer_states"][0] > 0:
        yield Mechanism(
            key="zero", name="optimizer states are not sharded", size="whole on every rank", change=layout_fields(zero=0),
            seen=1, source="states that were larger than stated (nanotron's flat buffers)",
            check=f"{ARGUMENTS} (Megatron: use_distributed_optimizer; DeepSpeed: stage)",
        )  # fmt: skip
    if trainer.gradient_bytes < FP32:
        yield Mechanism(
            key="gradients", name="gradients are kept in fp32", seen=1,
            size=f"4 instead of {trainer.gradient_bytes:.0f} bytes per parameter",
            change=trainer_facts(gradient_bytes=FP32, fp16_gradient_bytes=FP32),
            source="buckets and main gradients beside the states (nanotron: 20 bytes per parameter)",
            check=f"{ARGUMENTS} (Megatron: accumulate_allreduce_grads_in_fp32)",
        )  # fmt: skip
    if int(layout.pp) > 1:
        yield Mechanism(
            key="in_flight", name="all microbatches are in flight", size="forward passes of the whole step first", seen=0,
            change=layout_fields(schedule=int(Schedule.GPIPE), vpp=1), source="no published run is known for it",
            check="torch.cuda.max_memory_allocated after each microbatch: it must stop growing after the first few",
        )  # fmt: skip
    if base.job.cluster.num_gpus > 1:
        yield Mechanism(
            key="communicators", name="buffers of communicators", sizes=(20.0,), width=math.log(4.0) / 2.0, seen=0,
            size="{x:.3g} times the planned bytes", change=_communicators,
            source="a measured constant for each group; no published run is known that needed more",
            check="'nvidia-smi' minus what torch has reserved; NCCL_DEBUG=INFO lists communicators; NCCL_BUFFSIZE",
        )  # fmt: skip


def _communicators(base: Priced, x: float) -> tuple[Job, Layout]:
    hardware = base.job.cluster.hardware
    each, expert = hardware.communicator_memory * x, hardware.expert_communicator_memory * x
    return with_hardware(base, replace(hardware, communicator_memory=each, expert_communicator_memory=expert))


def _less(base: Priced) -> Iterator[Mechanism]:
    trainer, layout = base.job.trainer, base.layout
    if can_recompute_more(base):
        yield Mechanism(
            key="recompute", name="full recompute is on", size="only the inputs of layers are kept", seen=3,
            change=recomputed(Recompute.FULL),
            source="recipes recomputed what their pages did not say (AutoModel, DGX Cloud)",
            check=f"{ARGUMENTS}; the step is then slower than planned",
        )  # fmt: skip
    if trainer.logit_bytes > FP32:
        yield Mechanism(
            key="logits", name="the loss is compiled or done in pieces", change=trainer_facts(logit_bytes=FP32), seen=2,
            size=f"4 instead of {trainer.logit_bytes:.0f} bytes per logit",
            source="4 bytes where it is compiled (torchtitan)", check="a snapshot of memory at the loss",
        )  # fmt: skip
    if int(layout.zero) < max(trainer.zero) and int(layout.dp) * int(layout.cp) > 1:
        yield Mechanism(
            key="zero", name="more states are sharded", size=f"zero {max(trainer.zero)}", check=ARGUMENTS,
            change=layout_fields(zero=max(trainer.zero)), seen=1, source="runs whose sharding was not stated",
        )  # fmt: skip
    if not int(layout.offload_optimizer) and trainer.offload_optimizer:
        yield Mechanism(
            key="offload", name="optimizer states are on the host", size="all of them", seen=0,
            change=layout_fields(offload_optimizer=100, zero=max(int(layout.zero), 1)),
            source="no published run is known for it", check=f"host memory of a rank; {ARGUMENTS}",
        )  # fmt: skip
