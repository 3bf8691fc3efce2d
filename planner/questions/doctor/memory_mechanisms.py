"""Mechanisms that make a GPU hold more, or less memory, than planned."""

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
    options,
    recomputed,
    trainer_facts,
    with_hardware,
)
from planner.rules import Job
from planner.timeline.priced_plan import Priced

EAGER_LOGITS = 14.0
"""Bytes per logit of a loss in plain torch: bf16, fp32 copy, log softmax, gradient (docs/log, torchtitan)."""
GATHERED_LOGITS = 20.0
"""The same where shards are gathered first (docs/log, Hagemann)."""
FP32 = 4.0
ARGUMENTS = "the arguments that the trainer prints"
SNAPSHOT = "torch.cuda.memory._record_memory_history and _dump_snapshot: what is alive at the peak"


def memory_mechanisms(base: Priced, more: bool) -> list[Mechanism]:
    """The mechanisms that could make a GPU of this plan hold more (or less) than planned."""
    return [*_sized(base, more), *([*_more(base), *_buffers(base)] if more else _less(base))]


def _sized(base: Priced, more: bool) -> Iterator[Mechanism]:
    """Fragmentation and logits, which have a size."""
    trainer, planned = base.job.trainer, base.job.trainer.stored.logit_bytes
    if trainer.stored.fragmentation > 0:
        yield Mechanism(
            key="fragmentation", name="fragmentation of the allocator" if more else "less fragmentation", sizes=(20.0,),
            size="{x:.3g} times the planned share" if more else "{x:.3g} times less", width=WIDTHS["fragmentation"],
            change=achieved_factor("fragmentation", worse=more), seen=2 if more else 1,
            source="0.03 to 0.21 of the peak between frameworks (calibration factors)",
            check="torch.cuda.memory_stats: reserved against allocated"
            + ("; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if more else " bytes"),
        )  # fmt: skip
    larger = tuple(x for x in (EAGER_LOGITS, GATHERED_LOGITS) if x > planned)
    if more and larger:
        yield Mechanism(
            key="logits", name="logits and their copies in fp32", sizes=larger, seen=3, check=SNAPSHOT,
            size=lambda x: f"{x:.0f} instead of {planned:.0f} bytes per logit",
            change=trainer_facts(logit_bytes=lambda _, x: x),
            source="14 bytes in eager torch, 20 where shards are gathered (torchtitan, Hagemann, nanotron)",
        )  # fmt: skip


def _buffers(base: Priced) -> Iterator[Mechanism]:
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


def _more(base: Priced) -> list[Mechanism]:
    """Activations, states, microbatches in flight."""
    trainer, layout = base.job.trainer, base.layout
    return options(
        (int(layout.recompute) != Recompute.NONE, "recompute", "recompute is off", "all activations are kept",
         recomputed(Recompute.NONE), 1, "recipes whose pages did not say what they recompute (AutoModel, DGX Cloud)",
         f"{ARGUMENTS}; the step is then faster than planned"),
        flash_off(base, "score matrices are kept"),
        (not {"norm", "swiglu"} <= trainer.kernels.unfused, "saved",
         "unfused kernels save what fused ones do not", "fp32 inputs of norms, output of SiLU",
         trainer_facts(unfused=trainer.kernels.unfused | {"norm", "swiglu"}), 3,
         "norms on fp32 copies and a separate SiLU (Hagemann, nanotron, InternEvo)", SNAPSHOT),
        (int(layout.zero) >= 1 and bool(base.estimate.memory["optimizer_states"][0] > 0), "zero",
         "optimizer states are not sharded", "whole on every rank", layout_fields(zero=0), 1,
         "states that were larger than stated (nanotron's flat buffers)",
         f"{ARGUMENTS} (Megatron: use_distributed_optimizer; DeepSpeed: stage)"),
        (trainer.stored.gradient_bytes < FP32, "gradients", "gradients are kept in fp32",
         f"4 instead of {trainer.stored.gradient_bytes:.0f} bytes per parameter",
         trainer_facts(gradient_bytes=FP32, fp16_gradient_bytes=lambda old, _: (FP32, old[1])), 1,
         "buckets and main gradients on top of the states (nanotron: 20 bytes per parameter)",
         f"{ARGUMENTS} (Megatron: accumulate_allreduce_grads_in_fp32)"),
        (int(layout.pp) > 1, "in_flight", "all microbatches are in flight", "forward passes of the whole step first",
         layout_fields(schedule=int(Schedule.GPIPE), vpp=1), 0, "no published run is known for it",
         "torch.cuda.max_memory_allocated after each microbatch: it must stop growing after the first few"),
    )  # fmt: skip


def _less(base: Priced) -> list[Mechanism]:
    trainer, layout = base.job.trainer, base.layout
    return options(
        (can_recompute_more(base), "recompute", "full recompute is on", "only the inputs of layers are kept",
         recomputed(Recompute.FULL), 3, "recipes recomputed what their pages did not say (AutoModel, DGX Cloud)",
         f"{ARGUMENTS}; the step is then slower than planned"),
        (trainer.stored.logit_bytes > FP32, "logits", "the loss is compiled or done in pieces",
         f"4 instead of {trainer.stored.logit_bytes:.0f} bytes per logit", trainer_facts(logit_bytes=FP32), 2,
         "4 bytes where it is compiled (torchtitan)", "a snapshot of memory at the loss"),
        (int(layout.zero) < max(trainer.legal.zero) and int(layout.dp) * int(layout.cp) > 1, "zero", "more states are sharded",
         f"zero {max(trainer.legal.zero)}", layout_fields(zero=max(trainer.legal.zero)), 1, "runs whose sharding was not stated",
         ARGUMENTS),
        (not int(layout.offload_optimizer) and trainer.legal.offload_optimizer, "offload", "optimizer states are on the host",
         "all of them", layout_fields(offload_optimizer=100, zero=max(int(layout.zero), 1)), 0,
         "no published run is known for it", f"host memory of a rank; {ARGUMENTS}"),
    )  # fmt: skip
