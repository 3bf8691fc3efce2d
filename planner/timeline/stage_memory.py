"""Memory of every pipeline stage by component, and of the worst one over a step.

The cost model prices three kinds of stages: the first, a middle one (the largest) and the last, each with its microbatches in
flight. Here every rank has the bytes of its kind and its own microbatches in flight, so that the worst rank is the estimate's;
a middle rank with a layer less than the largest is shown as the largest.
"""

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cost.memory.allocator import stage_memory
from planner.cost.memory.states import COMPONENTS
from planner.cost.pipeline.partition import stage_layers
from planner.cost.pipeline.schedules import flight_columns
from planner.cost.unique_stages import Gathered
from planner.layout import Layout
from planner.plan_file import STAGE_NAMES
from planner.record import record
from planner.timeline.passes import rank_of_kind, stage_kind
from planner.timeline.priced_plan import Priced
from planner.timeline.step_slices import Timeline

STATIC = ("weights", "gradients", "optimizer_states", "fragmentation", "communication_buffers", "context")
"""Components that stay through the step; the allocator does not give fragmentation back."""


@record
class StageMemory:
    """Peak memory of one pipeline rank."""

    rank: int
    kind: str
    """How the model prices it: first, middle or last."""
    layers: int
    """Layers that it holds (a middle one is priced with those of the largest)."""
    in_flight: float
    """Microbatches, of all its layers, that wait for their backward pass at the peak."""
    uneven: float
    """Bytes that these hold beyond those of equal virtual stages."""
    memory: dict[str, float]
    """Bytes by component (cost.memory.COMPONENTS)."""
    given_back: float
    """Bytes of fragmentation that the allocator frees before an allocation fails: they need not fit."""

    @property
    def peak(self) -> float:
        """Bytes of the device."""
        return sum(self.memory.values())


@record
class MemoryInterval:
    """Memory from one time to the start of the next interval."""

    start: float
    """Seconds from the start of the step."""
    activations: float
    """Bytes that wait for a backward pass, and those that recompute or the loss adds."""
    workspace: float
    """Bytes of gradients of activations, gathered weights, libraries, and copies after the pipeline."""


@record
class MemoryTimeline:
    """Memory of one rank over a step, bytes."""

    rank: int
    static: dict[str, float]
    """Constant bytes (STATIC), by component."""
    intervals: tuple[MemoryInterval, ...]
    """In order of time; the first starts at 0, the last lasts to ``end``."""
    end: float
    """Seconds: the step time."""

    @property
    def peak(self) -> float:
        """The largest sum of static part, activations and workspace: the predicted peak."""
        return sum(self.static.values()) + max(one.activations + one.workspace for one in self.intervals)


def memory_of_ranks(priced: Priced) -> tuple[StageMemory, ...]:
    """Every pipeline rank of a priced layout."""
    pp = int(priced.assigned.pp)
    kinds = [stage_kind(rank, pp) for rank in range(pp)]
    counts = flight_columns(Layout.stack([priced.assigned]), np.arange(pp, dtype=float)[None, :])
    flights = counts["in_flight"][:, 0]
    ranks, hardware = _by_rank(priced.shared, kinds, counts), priced.job.cluster.hardware
    found, given, _ = stage_memory(priced.job.trainer, ranks, hardware, ranks.slowest["host_share"])
    layers = stage_layers(priced.job.model.num_layers, priced.assigned)
    return tuple(
        StageMemory(
            rank=rank, kind=STAGE_NAMES[kinds[rank]], layers=layers[rank], in_flight=float(flights[rank]),
            uneven=float(ranks.uneven[rank, 0]),
            memory={name: hardware.context_memory if name == "context" else float(found[name][rank, 0]) for name in COMPONENTS},
            given_back=float(given[rank, 0]),
        )
        for rank in range(pp)
    )  # fmt: skip


def _by_rank(shared: Gathered, kinds: list[int], counts: dict[str, Floats]) -> Gathered:
    """The three kinds of stages, (3, 1), spread over the ranks, (p, 1), each with its own microbatches in flight."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(shared):
        value = getattr(shared, field.name)
        if field.name in ("shape_parts", "state_parts"):
            columns[field.name] = {name: one[kinds] for name, one in value.items()}
        else:
            columns[field.name] = value if field.name in ("slowest", "send") else value[kinds]
    return Gathered(**{**columns, **counts})


def worst_rank(priced: Priced) -> int:
    """The rank whose peak the estimate reports."""
    return rank_of_kind(int(priced.estimate.stage[0]), int(priced.assigned.pp))


def memory_over_time(priced: Priced, step: Timeline, rank: int | None = None) -> MemoryTimeline:
    """Memory of a rank, the worst one unless another is asked for, as the microbatches of its timeline come and go.

    A forward pass stores from its start, a backward pass (I where weight gradients come later) frees at its end. While it
    runs, one recomputed layer, or the loss, is added. The workspace exists while a pass runs; after the pipeline, the model's
    bytes at the end of a step replace both. The largest count is the model's ``in_flight``: a schedule that the walk runs with
    fewer or more is scaled in proportion.

    With gradients on demand (``cost.memory.peak_points``) they are not static: everything at the largest peak point beyond the
    microbatches in flight, gradients included, is the workspace of every pass.
    """
    rank = worst_rank(priced) if rank is None else rank
    of_rank, kind = memory_of_ranks(priced)[rank], stage_kind(rank, step.ranks)
    shared = priced.shared
    stored, resident, transient, workspace, fresh, step_end = (
        float(getattr(shared, name)[kind, 0])
        for name in ("stored", "resident", "transient", "workspace", "fresh", "step_end")
    )
    workspace, step_end = max(workspace, fresh - stored - transient), max(step_end, fresh)
    static = {name: of_rank.memory[name] for name in STATIC}
    if priced.job.trainer.stored.gradients_on_demand:
        stored += float(shared.shape_parts["outputs"][kind, 0])
        largest = sum(of_rank.memory[name] for name in ("activations", "gradients", "workspace"))
        static["gradients"], transient, step_end = 0.0, 0.0, 0.0
        workspace = largest - min(of_rank.in_flight, resident) * stored - of_rank.uneven
    chunks, more = int(priced.assigned.vpp), float(shared.first_chunk_more[kind, 0]) / stored if of_rank.uneven else 0.0
    first = (1.0 + (chunks - 1) * more) / chunks  # of a microbatch's bytes, those of the first virtual stage
    events: list[tuple[float, int, float, float]] = []  # time, ends before starts, microbatches, passes that run
    for one in step.actions:
        if one.rank == rank:
            each = first if one.stage < step.ranks else first - more
            begins, ends = {"F": (each, 0.0), "W": (0.0, 0.0)}.get(one.kind, (0.0, -each))
            events.append((one.start, 1, begins, {"F": 1.0, "W": 1.0}.get(one.kind, 2.0)))
            events.append((one.end, 0, ends, 0.0))
    events.sort(key=lambda event: event[:2])
    counts = np.cumsum([event[2] for event in events])
    scale = (of_rank.in_flight + (of_rank.uneven / stored if of_rank.uneven else 0.0)) / float(counts.max())
    stays = np.minimum(np.maximum(counts, 0.0) * scale, resident) * stored
    at = {-1.0: (-1.0, -1.0), 0.0: (0.0, 0.0)}  # activations and workspace by time, the last of several; from nothing on
    for (time, _, _, running), waiting in zip(events, stays.tolist(), strict=True):
        at[time] = waiting + (transient if running == 2.0 else 0.0), workspace * (running > 0)
    at |= {step.pipeline_end: (0.0, step_end), step.step_time: (0.0, 0.0)}
    changes = [one for (_, before), one in pairwise(at.items()) if one[1] != before]
    return MemoryTimeline(
        rank=rank, static=static, end=step.step_time,
        intervals=tuple(MemoryInterval(start=time, activations=held, workspace=other) for time, (held, other) in changes),
    )  # fmt: skip
