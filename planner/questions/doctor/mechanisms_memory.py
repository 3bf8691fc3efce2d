"""What makes a GPU hold more or less memory than planned, each as a change of the plan's inputs that is priced again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.layout import Layout, Recompute, Schedule
from planner.questions.doctor.mechanisms import (
    WIDTHS,
    Mechanism,
    factor,
    flash_off,
    layout_change,
    switch,
    times,
    trainer_change,
    with_hardware,
    with_trainer,
)
from planner.rules import Job
from planner.timeline.priced_plan import Priced

EAGER_LOGITS = 14.0
"""Bytes per logit of a loss in plain torch: bf16, fp32 copy, log softmax, gradient (docs/log.md, torchtitan)."""
GATHERED_LOGITS = 20.0
"""The same where shards are gathered first (docs/log.md, Hagemann)."""
FP32 = 4.0


def memory_mechanisms(base: Priced, more: bool) -> list[Mechanism]:
    """The mechanisms that could make a GPU of this plan hold more (or less) than planned."""
    return list(_more(base) if more else _less(base))


def _more(base: Priced) -> Iterator[Mechanism]:
    trainer, layout = base.job.trainer, base.layout
    snapshot = "torch.cuda.memory._record_memory_history and _dump_snapshot: what is alive at the peak"
    if trainer.stored.fragmentation > 0:
        yield Mechanism(
            key="fragmentation", name="fragmentation of the allocator", sizes=(20.0,), width=WIDTHS["fragmentation"],
            size=times("the planned share"), change=factor("fragmentation", worse=True), seen=2,
            source="0.03 to 0.21 of the peak between frameworks (calibration factors)",
            check="torch.cuda.memory_stats: reserved against allocated; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )  # fmt: skip
    larger = tuple(x for x in (EAGER_LOGITS, GATHERED_LOGITS) if x > trainer.stored.logit_bytes)
    if larger:
        yield Mechanism(
            key="logits", name="logits and their copies in fp32", sizes=larger, width=0.0, seen=3, check=snapshot,
            size=lambda base, x: f"{x:.0f} instead of {base.job.trainer.stored.logit_bytes:.0f} bytes per logit",
            change=lambda base, x: with_trainer(base, base.job.trainer.replace(logit_bytes=x)),
            source="14 bytes in eager torch, 20 where shards are gathered (torchtitan, Hagemann, nanotron)",
        )  # fmt: skip
    if int(layout.recompute) != Recompute.NONE:
        yield switch(
            "recompute", "recompute is off", "all activations are kept",
            layout_change(recompute=int(Recompute.NONE), recompute_layers=0, recompute_modules=0), seen=1,
            source="recipes whose pages did not say what they recompute (AutoModel, DGX Cloud)",
            check="the arguments that the trainer prints; the step is then faster than planned",
        )  # fmt: skip
    yield from flash_off(base, "score matrices are kept")
    if trainer.kernels.saved_norm_bytes < FP32 or "swiglu" not in trainer.kernels.unfused:
        yield switch(
            "saved", "unfused kernels save what fused ones do not", "fp32 inputs of norms, output of SiLU",
            trainer_change(saved_norm_bytes=FP32, unfused=trainer.kernels.unfused | {"swiglu"}), seen=3, check=snapshot,
            source="norms on fp32 copies and a separate SiLU (Hagemann, nanotron, InternEvo)",
        )  # fmt: skip
    yield from _more_states(base)


def _more_states(base: Priced) -> Iterator[Mechanism]:
    """States, microbatches in flight, buffers."""
    trainer, layout, cluster = base.job.trainer, base.layout, base.job.cluster
    if int(layout.zero) >= 1 and base.estimate.memory["optimizer_states"][0] > 0:
        yield switch(
            "zero", "optimizer states are not sharded", "whole on every rank", layout_change(zero=0), seen=1,
            source="states that were larger than stated (nanotron's flat buffers)",
            check="the arguments that the trainer prints (Megatron: use_distributed_optimizer; DeepSpeed: stage)",
        )  # fmt: skip
    if trainer.stored.gradient_bytes < FP32:
        yield switch(
            "gradients", "gradients are kept in fp32", f"4 instead of {trainer.stored.gradient_bytes:.0f} bytes per parameter",
            trainer_change(gradient_bytes=FP32, fp16_gradient_bytes=FP32), seen=1,
            source="buckets and main gradients beside the states (nanotron: 20 bytes per parameter)",
            check="the arguments that the trainer prints (Megatron: accumulate_allreduce_grads_in_fp32)",
        )  # fmt: skip
    if int(layout.pp) > 1:
        yield switch(
            "in_flight", "all microbatches are in flight", "forward passes of the whole step first",
            layout_change(schedule=int(Schedule.GPIPE), vpp=1), seen=0, source="no published run is known for it",
            check="torch.cuda.max_memory_allocated after each microbatch: it must stop growing after the first few",
        )  # fmt: skip
    if cluster.num_gpus > 1:
        yield Mechanism(
            key="communicators", name="buffers of communicators", sizes=(20.0,), width=math.log(4.0) / 2.0, seen=0,
            size=times("the planned bytes"), change=_communicators,
            source="a measured constant for each group; no published run is known that needed more",
            check="'nvidia-smi' minus what torch has reserved; NCCL_DEBUG=INFO lists communicators; NCCL_BUFFSIZE",
        )  # fmt: skip


def _communicators(base: Priced, x: float) -> tuple[Job, Layout]:
    hardware = base.job.cluster.hardware
    each, expert = hardware.communicator_memory * x, hardware.expert_communicator_memory * x
    return with_hardware(base, replace(hardware, communicator_memory=each, expert_communicator_memory=expert))


def _less(base: Priced) -> Iterator[Mechanism]:
    trainer, layout = base.job.trainer, base.layout
    if trainer.stored.fragmentation > 0:
        yield Mechanism(
            key="fragmentation", name="less fragmentation", sizes=(20.0,), width=WIDTHS["fragmentation"],
            size=times("less"), change=factor("fragmentation", worse=False), seen=1,
            source="0.03 to 0.21 of the peak between frameworks (calibration factors)",
            check="torch.cuda.memory_stats: reserved against allocated bytes",
        )  # fmt: skip
    all_layers = int(layout.recompute) == Recompute.FULL and not int(layout.recompute_layers)
    if "full" in trainer.legal.recompute and not all_layers:
        yield switch(
            "recompute", "full recompute is on", "only the inputs of layers are kept",
            layout_change(recompute=int(Recompute.FULL), recompute_layers=0, recompute_modules=0), seen=3,
            source="recipes recomputed what their pages did not say (AutoModel, DGX Cloud)",
            check="the arguments that the trainer prints; the step is then slower than planned",
        )  # fmt: skip
    if trainer.stored.logit_bytes > FP32:
        yield switch(
            "logits", "the loss is compiled or done in pieces",
            f"4 instead of {trainer.stored.logit_bytes:.0f} bytes per logit", trainer_change(logit_bytes=FP32), seen=2,
            source="4 bytes where it is compiled (torchtitan)", check="a snapshot of memory at the loss",
        )  # fmt: skip
    if int(layout.zero) < max(trainer.legal.zero) and int(layout.dp) * int(layout.cp) > 1:
        yield switch(
            "zero", "more states are sharded", f"zero {max(trainer.legal.zero)}", layout_change(zero=max(trainer.legal.zero)),
            seen=1, source="runs whose sharding was not stated", check="the arguments that the trainer prints",
        )  # fmt: skip
    if not int(layout.offload_optimizer) and trainer.legal.offload_optimizer:
        yield switch(
            "offload", "optimizer states are on the host", "all of them",
            layout_change(offload_optimizer=100, zero=max(int(layout.zero), 1)), seen=0,
            source="no published run is known for it", check="host memory of a rank; the arguments that the trainer prints",
        )  # fmt: skip
