"""Puts it together: the estimate of one optimizer step, time and memory, each with its parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.memory.allocator import stage_memory
from planner.cost.memory.peak_points import peak
from planner.cost.memory.states import ALLOCATED, COMPONENTS, RESERVED
from planner.cost.own_terms import flushes
from planner.cost.pipeline.schedules import interleave_waits, pipeline_time, sends_overlap
from planner.cost.price.compute import model_passes, stage_straggling
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.cost.price.layer_costs import ShapePrices
from planner.cost.price.stage_times import at_stage, largest_stage
from planner.cost.state_dtypes import stored_as
from planner.cost.unique_stages import Gathered, StageTable
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.record import record
from planner.trainer import Trainer
from planner.workload import Workload, peak_dtype

PARTS = (
    "compute", "recompute", "host", "tensor_communication", "context_communication", "expert_communication",
    "pipeline_communication", "bubble", "stragglers", "data_communication", "optimizer", "offload", "overhead",
)  # fmt: skip
"""Parts of the step time, in the order of the waterfall; they sum to it."""
HIDDEN = ("tensor", "context", "expert", "pipeline", "data")
"""Communication that overlaps with computation, in seconds per step; not part of the step time."""
CHUNK = 1 << 16
"""Candidates priced at once: their columns stay in the cache."""


@record
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
    reclaimed: Floats
    """Bytes of the peak that the allocator gives back before it lets an allocation fail."""
    first_reserved: Floats
    """Reserved memory of the first stage, bytes: what rank 0 logs."""
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
    def memory_needed(self) -> Floats:
        """Peak of the device without what the allocator gives back when it has to, bytes: decides whether it fits."""
        return self.memory_peak - self.reclaimed

    @property
    def out_of_memory_probability(self) -> Floats:
        """Chance that what is needed exceeds usable memory, ln(measured / predicted) being spread by ``memory_error``.

        Logistic approximation of the normal distribution, 1 / (1 + exp(-1.702 z)), within 0.01 of it everywhere.
        """
        z = np.log(self.memory_needed / self.usable_memory) / self.memory_error
        return 1.0 / (1.0 + np.exp(np.clip(-1.702 * z, -700.0, 700.0)))

    @property
    def tokens_per_second_per_gpu(self) -> Floats:
        """Throughput of one GPU."""
        return self.tokens / self.step_time

    @property
    def mfu(self) -> Floats:
        """Model FLOP over peak FLOP/s and step time."""
        return self.flop / (self.peak_flops * self.step_time)

    @property
    def slowed(self) -> Floats:
        """Part by which the slowest GPU of the job lengthens computation and idle time."""
        busy = self.time["compute"] + self.time["recompute"] + self.time["bubble"]
        return self.time["stragglers"] / np.maximum(busy, np.finfo(float).tiny)

    @property
    def bubble_share(self) -> Floats:
        """Idle time of the pipeline over the step time."""
        return self.time["bubble"] / self.step_time

    def row(self, index: int) -> Estimate:
        """The estimate of one candidate, as columns of length 1."""
        return self.take(np.array([index]))

    def take(self, rows: Any) -> Estimate:
        """The estimates of the chosen candidates."""

        def cut(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cut(part) for name, part in value.items()}
            return value[rows] if isinstance(value, np.ndarray) else value

        return Estimate(**{name: cut(value) for name, value in vars(self).items()})


def estimate(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, shapes: ShapePrices | None = None
) -> Estimate:
    """Price every candidate; no legality is checked here (planner.rules does). ``shapes``: those of the same job that were
    priced for other candidates."""
    rows, layout = len(layout), _every_row(layout)
    trainer = stored_as(workload, trainer)
    table = StageTable(workload, cluster, trainer, layout, shapes=shapes)
    if rows <= CHUNK:
        return _estimate_chunk(workload, cluster, trainer, layout, table.take(slice(0, rows)))
    pieces = (slice(start, start + CHUNK) for start in range(0, rows, CHUNK))
    return join((_estimate_chunk(workload, cluster, trainer, layout.take(one), table.take(one)) for one in pieces), rows)


def join(pieces: Iterable[Estimate], rows: int) -> Estimate:
    """Estimates of several batches of one job, of so many candidates in all, as one; each is copied as it comes."""
    whole: dict[str, Any] = {}
    start = 0
    for one in pieces:
        end = start + len(one.tokens)
        _put(whole, vars(one), slice(start, end), rows)
        start = end
    return Estimate(**whole)


def _put(whole: dict[str, Any], some: dict[str, Any], place: slice, rows: int) -> None:
    """The columns of some candidates into those of all, made when the first come; what is no column is the same of all."""
    for name, value in some.items():
        if isinstance(value, dict):
            _put(whole.setdefault(name, {}), value, place, rows)
        elif isinstance(value, np.ndarray):
            if name not in whole:
                whole[name] = np.empty(rows, value.dtype)
            whole[name][place] = value
        else:
            whole[name] = value


def _estimate_chunk(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, priced: Gathered
) -> Estimate:
    memory, given, short = _memory(trainer, priced, cluster.hardware)
    time, hidden, flop = _step_parts(workload, cluster, trainer, layout, priced)
    time["host"] = time["host"] + _allocation(trainer, layout, priced, short / cluster.hardware.usable_memory)
    context = cluster.hardware.context_memory
    worst = largest_stage(np.sum(list(memory.values()), axis=0) - given)
    waiting = priced.in_flight - np.minimum(priced.in_flight, priced.resident)
    return Estimate(
        time=time,
        hidden=hidden,
        memory={
            **{name: at_stage(part, worst) for name, part in memory.items()},
            "context": np.full(len(worst), context),
        },
        stage=worst.astype(float),
        host_memory=np.max(priced.host + waiting * priced.stored, axis=0),
        flop=flop,
        tokens=np.asarray(layout.global_batch_size, dtype=float)
        * workload.sequence_length
        * workload.sequences
        / np.asarray(layout.num_gpus),
        peak_flops=cluster.hardware.peak(_peak_dtype(workload.precision, cluster.hardware.peak_flops)),
        reclaimed=at_stage(given, worst),
        first_reserved=np.sum([memory[name][0] for name in RESERVED], axis=0),
        usable_memory=cluster.hardware.usable_memory,
        memory_error=trainer.stored.memory_error,
    )


def _every_row(layout: Layout) -> Layout:
    """With a value in every row of every column."""
    return Layout(**{n: np.broadcast_to(np.asarray(v), (len(layout),)) for n, v in layout.columns().items()})


def memory_by_stage(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, middle: int = 0
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Bytes on the first, a middle and the last stage, (3, N); ``middle`` is the number of the middle one, 0 stands for all.

    By component but for the context: what ``estimate`` takes the largest of. And the most bytes of each component that the
    allocator hands out, each at a program point of its own, and "peak", the most of all together.
    """
    layout, hardware = _every_row(layout), cluster.hardware
    priced = StageTable(workload, cluster, trainer, layout, middle).take(slice(0, len(layout)))
    found = _memory(trainer, priced, hardware)[0]
    largest = {name: found[name] for name in ALLOCATED} | {"gradients": priced.gradients}
    largest["activations"] = peak(trainer, priced, hardware).largest_activations
    return found, largest | {"peak": np.sum([found[name] for name in ALLOCATED], axis=0)}


def _memory(trainer: Trainer, priced: Gathered, hardware: HardwareProfile) -> tuple[dict[str, Floats], Floats, Floats]:
    return stage_memory(trainer, priced, hardware, priced.slowest["host_share"])


def _allocation(trainer: Trainer, layout: Layout, priced: Gathered, short: Floats) -> Floats:
    """Seconds of a step in which the allocator gives blocks back and allocates them anew, (N,).

    Where what collectives in flight want exceeds the room by more of the device (``short``) than predictions of memory are
    uncertain by; less than that cannot be distinguished from none.
    """
    seconds = sum((term.allocation_seconds(layout, priced.held_launched) for term in trainer.terms), 0.0 * short)
    return np.asarray(np.max(seconds * (short > trainer.stored.memory_error), axis=0))


def _peak_dtype(precision: str, known: Collection[str]) -> str:
    """Precision whose dense peak is the denominator of mfu; fp32 runs as tf32 where the device has it."""
    if precision == "fp32" and "tf32" in known:
        return "tf32"
    return peak_dtype(precision)


def _step_parts(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, priced: Gathered
) -> tuple[dict[str, Floats], dict[str, Floats], Floats]:
    """Step time by part: the slowest stage's own seconds times m, the idle time around them, then the step's end.

    Also hidden communication by kind, and model FLOP of one GPU: forward, that of a reference model too, and twice that
    backward (once when only adapters are trained), averaged over the stages.
    """
    m = np.asarray(layout.num_microbatches, dtype=float)
    slowest = priced.slowest
    sent = 2.0 * priced.send
    overlapped = sends_overlap(trainer, layout)
    exposed_send = sent * (1.0 - overlapped)
    forward, backward = slowest["forward"] + exposed_send / 2.0, slowest["backward"] + exposed_send / 2.0
    all_stages = slowest["all_stages"] + exposed_send * np.asarray(layout.pp)
    idle = pipeline_time(layout, forward, backward, slowest["weight"], all_stages) - m * (forward + backward)
    idle = flushes(trainer, layout) * (idle + interleave_waits(layout, priced.send * overlapped))
    window = (priced.forward + exposed_send / 2.0, priced.backward + exposed_send / 2.0)
    exposed, hidden = data_parallel(trainer, layout, priced, *window, data_slowdown(cluster, layout))
    offload = priced.on_host(m)
    end = largest_stage(exposed + priced.optimizer + offload)
    time = {name: m * slowest[name] for name in PARTS[:6]} | {
        "pipeline_communication": m * exposed_send,
        "bubble": idle,
        "data_communication": at_stage(exposed, end),
        "optimizer": at_stage(priced.optimizer, end),
        "offload": at_stage(offload, end) + m * slowest["waiting"],
        "overhead": np.full(len(m), trainer.host.step_overhead),
    }
    slowed = stage_straggling(
        layout.num_gpus, layout.pp, priced.forward + priced.backward, slowest["compute"] + slowest["recompute"]
    )
    time["stragglers"] = slowed * (time["compute"] + time["recompute"] + time["bubble"])
    concealed = {name: m * slowest[f"{name}_hidden"] for name in HIDDEN[:3]} | {
        "pipeline": m * (sent - exposed_send),
        "data": at_stage(hidden, end),
    }
    return time, concealed, slowest["flop"] * m * model_passes(workload)


__all__ = ["COMPONENTS", "HIDDEN", "PARTS", "Estimate", "estimate", "join"]
