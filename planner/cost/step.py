"""Puts it together: the estimate of one optimizer step, time and memory, each with its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cluster import Cluster, strides
from planner.cost.blocks import INDEX, QUANTITIES, Blocks, price_blocks
from planner.cost.memory import ALLOCATED, COMPONENTS, RESERVED, host_bytes, stage_memory
from planner.cost.operators import Floats, Shard
from planner.cost.schedule import pipeline_time
from planner.cost.stages import Stages, split_stages, stage_parameters
from planner.cost.traffic import activation_offload, column, step_traffic
from planner.layout import Layout, Recompute, Schedule
from planner.trainer import Trainer
from planner.workload import Workload

PARTS = (
    "compute", "recompute", "host", "tensor_communication", "context_communication", "expert_communication",
    "pipeline_communication", "bubble", "data_communication", "optimizer", "offload", "overhead",
)  # fmt: skip
"""Parts of the step time, in the order of the waterfall; they sum to it."""
HIDDEN = ("tensor", "context", "expert", "pipeline", "data")
"""Communication that runs beside computation, in seconds per step; not part of the step time."""
CHUNK = 16384
"""Candidates priced at once: their columns stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of every candidate; columns of length N."""

    time: dict[str, Floats]
    """Seconds by part (PARTS) of the slowest stage and what surrounds it."""
    hidden: dict[str, Floats]
    """Seconds of communication hidden behind computation (HIDDEN)."""
    memory: dict[str, Floats]
    """Bytes per GPU by component (memory.COMPONENTS) on the stage with the highest peak."""
    stage: Floats
    """Which of the three stages (0 first, 1 middle, 2 last) has that peak."""
    host_memory: Floats
    """Bytes of host memory per GPU for offloaded states."""
    flop: Floats
    """Model FLOP of the step on one GPU: causal attention halved, head counted, recompute not counted."""
    tokens: Floats
    """Tokens per step and GPU."""
    peak_flops: float
    """Dense peak of the precision, FLOP/s: the denominator of mfu."""
    usable_memory: float
    """Bytes that the driver reports."""
    memory_error: float
    """Standard deviation of ln(measured / predicted peak memory)."""

    @property
    def step_time(self) -> Floats:
        """Seconds of one optimizer step."""
        return np.sum([self.time[part] for part in PARTS], axis=0)

    @property
    def memory_allocated(self) -> Floats:
        """Peak of what the framework's allocator hands out, bytes."""
        return np.sum([self.memory[name] for name in ALLOCATED], axis=0)

    @property
    def memory_reserved(self) -> Floats:
        """Peak of what the allocator holds, fragmentation included, bytes."""
        return np.sum([self.memory[name] for name in RESERVED], axis=0)

    @property
    def memory_peak(self) -> Floats:
        """Peak of the device: reserved memory, communicators and context, bytes."""
        return np.sum([self.memory[name] for name in COMPONENTS], axis=0)

    @property
    def out_of_memory_probability(self) -> Floats:
        """Chance that the peak exceeds usable memory, when ln(measured / predicted) is spread by ``memory_error``.

        Logistic approximation of the normal distribution, 1 / (1 + exp(-1.702 z)), within 0.01 of it everywhere.
        """
        z = np.log(self.memory_peak / self.usable_memory) / self.memory_error
        return 1.0 / (1.0 + np.exp(np.clip(-1.702 * z, -700.0, 700.0)))

    @property
    def tokens_per_second_per_gpu(self) -> Floats:
        return self.tokens / self.step_time

    @property
    def mfu(self) -> Floats:
        """Model FLOP over peak FLOP/s and step time."""
        return self.flop / (self.peak_flops * self.step_time)

    @property
    def bubble_share(self) -> Floats:
        """Idle time of the pipeline over the step time."""
        return self.time["bubble"] / self.step_time

    def row(self, index: int) -> Estimate:
        """The estimate of one candidate, as columns of length 1."""
        return self.take(np.array([index]))

    def take(self, rows: object) -> Estimate:
        """The estimates of the chosen candidates."""

        def cut(value: object) -> object:
            if isinstance(value, dict):
                return {name: cut(part) for name, part in value.items()}
            return value[rows] if isinstance(value, np.ndarray) else value

        return Estimate(**{name: cut(value) for name, value in vars(self).items()})  # type: ignore[arg-type]


def estimate(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Estimate:
    """Price every candidate; no legality is checked here (rules.py does)."""
    rows = len(layout)
    layout = Layout(**{n: np.broadcast_to(np.asarray(v), (rows,)) for n, v in layout.columns().items()})
    pieces = [
        _estimate_chunk(workload, cluster, trainer, layout.take(slice(start, start + CHUNK)))
        for start in range(0, rows, CHUNK)
    ]
    return pieces[0] if len(pieces) == 1 else join(pieces)


def join(pieces: list[Estimate]) -> Estimate:
    """Estimates of several batches of one job as one."""

    def glue(values: list[object]) -> object:
        first = values[0]
        if isinstance(first, dict):
            return {name: glue([value[name] for value in values]) for name in first}  # type: ignore[index]
        return np.concatenate(values) if isinstance(first, np.ndarray) else first  # type: ignore[arg-type]

    return Estimate(**{name: glue([getattr(piece, name) for piece in pieces]) for name in vars(pieces[0])})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds per microbatch of each stage, shape (N, 3)."""

    totals: Floats
    """Sum of the stage's blocks, shape (N, 3, quantities)."""
    ends: Floats
    """The part of it that is embedding and head, shape (N, 3, quantities)."""
    host_forward: Floats
    host_backward: Floats
    pipeline_forward: Floats
    pipeline_backward: Floats
    pipeline_hidden: Floats

    def part(self, name: str) -> Floats:
        return self.totals[..., INDEX[name]]

    @property
    def forward(self) -> Floats:
        communication = self.part("tp_forward") + self.part("cp_forward") + self.part("ep_forward")
        return self.part("forward") + communication + self.host_forward + self.pipeline_forward

    @property
    def backward(self) -> Floats:
        communication = self.part("tp_backward") + self.part("cp_backward") + self.part("ep_backward")
        computation = self.part("dgrad") + self.part("wgrad") + self.part("recompute")
        return computation + communication + self.host_backward + self.pipeline_backward

    def of_ends(self, pass_: str) -> Floats:
        """Seconds of embedding and head in a pass: forward, backward or weight (gradients alone)."""
        names = {"forward": ("forward", "tp_forward"), "backward": ("dgrad", "wgrad", "tp_backward"), "weight": ("wgrad",)}
        return np.sum([self.ends[..., INDEX[name]] for name in names[pass_]], axis=0)


def stage_times(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> StageTimes:
    """Seconds per microbatch of the three stages of every candidate."""
    columns = Layout(**{name: np.atleast_1d(np.asarray(value)) for name, value in layout.columns().items()})
    stages = split_stages(workload.model, columns)
    blocks = price_blocks(workload, cluster, trainer, columns)
    totals, ends, _ = stage_totals(columns, stages, blocks)
    return _stage_times(workload, cluster, trainer, columns, totals, ends)


def stage_totals(layout: Layout, stages: Stages, blocks: Blocks) -> tuple[Floats, Floats, Floats]:
    """Sum of the blocks of each stage, the part of it that is embedding and head, both (N, 3, quantities), and the
    bytes that the stage's layers save, (N, 3)."""
    covered = column(layout.recompute_layers)
    layers = stages.dense + stages.moe
    partly = (covered > 0) & (column(layout.recompute) == Recompute.FULL)
    share = np.where(partly, np.minimum(covered / np.maximum(layers, 1.0), 1.0), 1.0)
    totals = (stages.dense * share)[..., None] * blocks.dense[:, None, :]
    totals += (stages.moe * share)[..., None] * blocks.moe[:, None, :]
    if np.any(partly):
        totals += (stages.dense * (1.0 - share))[..., None] * blocks.dense_stored[:, None, :]
        totals += (stages.moe * (1.0 - share))[..., None] * blocks.moe_stored[:, None, :]
    saved = totals[..., INDEX["saved"]].copy()
    ends = stages.embedding[..., None] * blocks.embedding[:, None, :]
    ends += stages.head[..., None] * blocks.head[:, None, :]
    totals += ends
    return totals, ends, saved


def _stage_times(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, totals: Floats, ends: Floats
) -> StageTimes:
    """Adds to the blocks what belongs to a stage: time the host needs beyond the GPU's, and sends to its neighbours."""
    computed_forward = totals[..., INDEX["forward"]]
    computed_backward = sum(totals[..., INDEX[name]] for name in ("dgrad", "wgrad", "recompute"))
    host = trainer.host_time
    host_forward = np.maximum(totals[..., INDEX["launches_forward"]] * host - computed_forward, 0.0)
    host_backward = np.maximum(totals[..., INDEX["launches_backward"]] * host - computed_backward, 0.0)
    send = _send_seconds(workload, cluster, trainer, layout)
    hides = "pipeline" in trainer.overlap
    added = np.zeros_like(send) if hides else send
    return StageTimes(
        totals=totals, ends=ends, host_forward=host_forward, host_backward=host_backward,
        pipeline_forward=added * np.ones((1, 3)), pipeline_backward=added * np.ones((1, 3)),
        pipeline_hidden=2.0 * (send - added) * np.ones((1, 3)),
    )  # fmt: skip


def _send_seconds(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Floats:
    """Seconds to hand one microbatch's activations to the next stage, once per virtual stage, shape (N, 1).

    T_s h elements with sequence parallelism; without it each tensor-parallel rank sends its 1/t and the receivers gather
    the whole inside the node.  [Narayanan 2021, section 4.1]
    """
    shard = Shard(workload=workload, trainer=trainer, layout=layout, ep_stride=1.0)
    pp = np.asarray(layout.pp, dtype=float)
    if np.all(pp == 1):
        return np.zeros((len(layout), 1))
    whole = shard.tokens * workload.model.hidden_size * shard.element
    two = np.where(pp > 1, 2.0, 1.0)
    send = cluster.collective_time("send_recv", whole / shard.tp, two, strides(layout)["pp"])
    split = np.asarray(layout.sequence_parallel) == 1
    gather = np.where(split, 0.0, cluster.collective_time("all_gather", whole, shard.tp, 1.0))
    schedule = np.asarray(layout.schedule)
    passes = np.where(schedule == Schedule.INTERLEAVED, np.asarray(layout.vpp, dtype=float), 1.0)
    passes = np.where((schedule == Schedule.ZBV) | (schedule == Schedule.DUALPIPE_V), 2.0, passes)
    return (np.where(pp > 1, send + gather, 0.0) * passes)[..., None]


def _estimate_chunk(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Estimate:
    stages = split_stages(workload.model, layout)
    blocks = price_blocks(workload, cluster, trainer, layout)
    totals, ends, saved = stage_totals(layout, stages, blocks)
    times = _stage_times(workload, cluster, trainer, layout, totals, ends)
    parameters = stage_parameters(workload, layout, stages)
    memory = stage_memory(workload, cluster, trainer, layout, stages, parameters, blocks, saved)
    time, hidden = _step_parts(workload, cluster, trainer, layout, stages, times, parameters, saved)  # type: ignore[arg-type]
    peak = sum(memory.values())
    worst = np.argmax(peak, axis=-1)
    rows = np.arange(len(layout))
    m = np.asarray(layout.num_microbatches, dtype=float)
    forward_flop = (totals[..., INDEX["flop"]] * stages.weight).sum(axis=-1) / np.asarray(layout.pp)
    dtype = workload.precision if workload.precision in ("fp32", "fp8_block", "nvfp4") else "bf16"
    if workload.precision in ("fp8", "mxfp8"):
        dtype = "fp8"
    return Estimate(
        time=time,
        hidden=hidden,
        memory={name: part[rows, worst] for name, part in memory.items()},
        stage=worst.astype(float),
        host_memory=host_bytes(workload, trainer, layout, parameters),
        flop=forward_flop * m * (3.0 if workload.lora_rank == 0 else 2.0),
        tokens=np.asarray(layout.global_batch_size, dtype=float) * workload.sequence_length / np.asarray(layout.num_gpus),
        peak_flops=cluster.hardware.peak(dtype),
        usable_memory=cluster.hardware.usable_memory,
        memory_error=trainer.memory_error,
    )


def _step_parts(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages, times: StageTimes,
    parameters: object, saved: Floats,
) -> tuple[dict[str, Floats], dict[str, Floats]]:  # fmt: skip
    """Step time by part: the slowest stage's own seconds times m, the idle time around them, then the step's end."""
    forward, backward = times.forward, times.backward
    waiting = activation_offload(cluster, layout, saved, forward, backward)
    both = forward + backward + waiting
    slowest = np.argmax(both, axis=-1)
    rows = np.arange(len(slowest))

    def at(values: Floats) -> Floats:
        return values[rows, slowest]

    m = np.asarray(layout.num_microbatches, dtype=float)
    whole = pipeline_time(
        layout, at(forward), at(backward + waiting), at(times.part("wgrad")), (both * stages.weight).sum(axis=-1)
    )
    traffic = step_traffic(workload, cluster, trainer, layout, parameters, forward, backward)  # type: ignore[arg-type]
    end = np.argmax(traffic.data_exposed + traffic.optimizer + traffic.offload, axis=-1)
    compute = at(times.part("forward") + times.part("dgrad") + times.part("wgrad"))
    parts = {
        "compute": m * compute,
        "recompute": m * at(times.part("recompute")),
        "host": m * at(times.host_forward + times.host_backward),
        "tensor_communication": m * at(times.part("tp_forward") + times.part("tp_backward")),
        "context_communication": m * at(times.part("cp_forward") + times.part("cp_backward")),
        "expert_communication": m * at(times.part("ep_forward") + times.part("ep_backward")),
        "pipeline_communication": m * at(times.pipeline_forward + times.pipeline_backward),
        "bubble": whole - m * at(both),
        "data_communication": traffic.data_exposed[rows, end],
        "optimizer": traffic.optimizer[rows, end],
        "offload": traffic.offload[rows, end] + m * at(waiting),
        "overhead": np.full(len(m), trainer.step_overhead),
    }
    hidden = {
        "tensor": m * at(times.part("tp_hidden")),
        "context": m * at(times.part("cp_hidden")),
        "expert": m * at(times.part("ep_hidden")),
        "pipeline": m * at(times.pipeline_hidden),
        "data": traffic.data_hidden[rows, end],
    }
    return parts, hidden


__all__ = ["COMPONENTS", "HIDDEN", "PARTS", "QUANTITIES", "Estimate", "StageTimes", "estimate", "join", "stage_times"]
