"""The traces of a job, one for each rank that was recorded: which files, which rank waits for which, how fast collectives are."""

import glob
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.errors import PlannerError, shown
from planner.kineto.events import Tell
from planner.kineto.groups import kinds_of
from planner.kineto.kernel_names import COMMUNICATION, COMPUTING
from planner.kineto.rank_trace import Collective, read_rank
from planner.kineto.spans import union
from planner.kineto.step_parts import StepParts, parts_of
from planner.layout import Layout
from planner.record import record

MOST_FILES = 64
"""Traces that are read; a few ranks of each pipeline stage say what all would."""
SUFFIXES = (".json", ".json.gz")
LEAST_CALLS = 3
"""Calls of one collective and size behind a bandwidth."""
QUARTER = 25.0
"""Percentile of its durations that counts: the others waited longer for some rank."""


@record
class Bandwidth:
    """How fast one collective of one size ran where nothing else did."""

    kind: str
    op: str
    size: int
    """Ranks."""
    bytes: float
    """S of nccl-tests."""
    seconds: float
    calls: int
    """Calls behind it."""
    ranks: tuple[int, ...]


@record
class JobTraces:
    """All ranks of a job that were read."""

    parts: tuple[StepParts, ...]
    """By rank."""
    waits: dict[int, float]
    """Rank -> seconds per step that it waits in collectives for the last of the ranks that were read; empty with one rank."""
    bandwidths: tuple[Bandwidth, ...]
    notes: tuple[str, ...]

    @property
    def slowest(self) -> StepParts:
        """The rank that computes longest (of a pipeline its slowest stage); within a hundredth, the one with the longest step."""
        longest = max(sum(one.compute.values()) for one in self.parts)
        return max(
            (one for one in self.parts if sum(one.compute.values()) >= 0.99 * longest), key=lambda one: one.step_time
        )

    @property
    def step_time(self) -> float | None:
        """Seconds of the optimizer step: the longest of the ranks' means; None where no steps were found."""
        found = [one.step_time for one in self.parts if one.steps.how]
        return max(found) if found else None

    @property
    def device(self) -> str:
        """Name of the GPUs; '' = unknown."""
        return next((one.trace.device for one in self.parts if one.trace.device), "")

    @property
    def has_gpu(self) -> bool:
        """Whether kernels were recorded."""
        return any(one.trace.has_gpu for one in self.parts)


def trace_files(named: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files of paths, folders (their .json and .json.gz) and patterns such as 'traces/*.gz'. Raises PlannerError."""
    found: list[Path] = []
    for one in named:
        text = os.fspath(one)
        path = Path(text)
        try:
            if path.is_dir():
                inside = sorted(each for each in path.iterdir() if each.name.endswith(SUFFIXES))
            elif not os.path.lexists(path) and glob.has_magic(text):
                inside = sorted(map(Path, glob.glob(text)))
            else:
                inside = [path]
        except (OSError, ValueError) as error:
            raise PlannerError(
                f"--trace {shown(text)}: cannot be read ({getattr(error, 'strerror', error)})"
            ) from error
        if not inside:
            raise PlannerError(f"--trace {shown(text)}: no trace there (files that end in {' or '.join(SUFFIXES)})")
        found += [each for each in inside if each not in found]
    if len(found) > MOST_FILES:
        raise PlannerError(
            f"--trace: {len(found)} files are more than the {MOST_FILES} that are read; give some ranks of each stage"
        )
    return found


def read_traces(files: Sequence[Path], layout: Layout, tell: Tell = lambda _: None) -> JobTraces:
    """Read the traces of a job that ran in a layout. Raises PlannerError where they are not of one job of its size."""
    kind, gpus = kinds_of(layout), int(layout.num_gpus)
    parts: list[StepParts] = []
    for path in files:
        trace = read_rank(path, tell)
        if trace.world is not None and trace.world != gpus:
            raise PlannerError(
                f"{path} is of a job of {trace.world} ranks, and the plan is for {gpus} GPUs; give the plan of that job"
            )
        same = next((one.trace.path for one in parts if trace.rank is not None and one.trace.rank == trace.rank), None)
        if same is not None:
            raise PlannerError(f"{same} and {path} are both of rank {trace.rank}: give the traces of one run")
        parts.append(parts_of(trace, kind))
    parts.sort(key=lambda one: (one.trace.rank is None, one.trace.rank or 0))
    return JobTraces(
        parts=tuple(parts), waits=_waits([one for one in parts if one.trace.rank is not None]),
        bandwidths=_bandwidths(parts, kind), notes=tuple(_notes(parts)),
    )  # fmt: skip


def _notes(parts: Sequence[StepParts]) -> list[str]:
    """What a reader should know of how the steps were found."""
    found = []
    for one in parts:
        steps, name = one.steps, one.trace.name
        found += [f"{name}: {note}" for note in one.trace.notes]
        if not steps.how:
            found.append(
                f"{name}: no steps were found (no ProfilerStep, no optimizer): all of the trace counts as one piece of time"
            )
        elif steps.left_out:
            found.append(
                f"{name}: {steps.left_out} of {steps.left_out + len(steps.spans)} steps are left out: not steady"
            )
        elif steps.how == "a single ProfilerStep":
            found.append(
                f"{name}: a single step was recorded, which holds the start of the profiler: record three (schedule(active=3))"
            )
        if one.trace.has_gpu and not np.any(np.isfinite(one.trace.launched)):
            found.append(
                f"{name}: calls of the host were not recorded (ProfilerActivity.CPU): who waits for whom is not known"
            )
    if not any(one.trace.has_gpu for one in parts):
        found.append("no kernels: recorded on CPUs, or without ProfilerActivity.CUDA; only the step time is known")
    return found


Call = tuple[tuple[int, ...], str, int]


def _calls(one: StepParts) -> dict[tuple[tuple[int, ...], int], list[tuple[Collective, float]]]:
    """Collectives of the steady steps in order, with their seconds, by ranks of the group and number of the step."""
    trace, found = one.trace, defaultdict[tuple[tuple[int, ...], int], list[tuple[Collective, float]]](list)
    for number, (low, high) in zip(one.steps.numbers, one.steps.spans, strict=True):
        inside = (trace.spans[:, 0] >= low) & (trace.spans[:, 0] < high) & (trace.which >= 0)
        for place in np.flatnonzero(inside).tolist():
            collective = trace.collectives[trace.which[place]]
            ranks = collective.ranks
            if not ranks and trace.world and collective.size == trace.world:
                ranks = tuple(range(trace.world))
            if ranks and collective.op != "send_recv":
                found[ranks, number].append((collective, float(trace.spans[place, 1] - trace.spans[place, 0])))
    return found


def _waits(parts: Sequence[StepParts]) -> dict[int, float]:
    """Seconds per step that each rank spends in collectives beyond the rank that spends least in them, which came last.

    All ranks leave a collective together, as far as one kernel can tell: who is longest in it came first. Clocks of hosts do not
    matter, as only durations are compared. Counted where the calls of the ranks in a step are the same ones.
    """
    calls = {one.trace.rank: _calls(one) for one in parts}
    waits: dict[int, float] = {}
    for key in {key for each in calls.values() for key in each}:
        there = {rank: each[key] for rank, each in calls.items() if key in each and rank is not None}
        orders = {
            tuple((one.op, one.bytes if one.bytes == one.bytes else 0.0) for one, _ in each) for each in there.values()
        }
        if len(there) < 2 or len(orders) != 1:
            continue
        seconds = np.array([[length for _, length in each] for each in there.values()])
        beyond = np.sum(seconds - np.min(seconds, axis=0), axis=1)
        for rank, value in zip(there, beyond.tolist(), strict=True):
            steps = next(len(one.steps.spans) for one in parts if one.trace.rank == rank)
            waits[rank] = waits.get(rank, 0.0) + value / steps
    return dict(sorted(waits.items()))


def _bandwidths(parts: Sequence[StepParts], kind: object) -> tuple[Bandwidth, ...]:
    """Bandwidths of the collectives that ran with nothing else at the same time, from the faster quarter of their calls."""
    found: dict[tuple[str, Collective], list[float]] = defaultdict(list)
    for one in parts:
        trace = one.trace
        if not trace.has_gpu:
            continue
        computing = union(trace.spans[np.isin(trace.family, COMPUTING)])
        low, high = float(one.steps.spans[0, 0]), float(one.steps.spans[-1, 1])
        mine = np.flatnonzero((trace.which >= 0) & (trace.spans[:, 0] >= low) & (trace.spans[:, 1] <= high))
        others = union(trace.spans[trace.family == COMMUNICATION]) if len(mine) else computing
        for place in mine.tolist():
            start, end = trace.spans[place]
            collective = trace.collectives[trace.which[place]]
            if (
                collective.op
                and collective.size > 1
                and collective.bytes > 0
                and _alone(computing, start, end)
                and _alone_in(others, start, end)
            ):
                found[kind(collective), collective].append(float(end - start))  # type: ignore[operator]
    return tuple(
        Bandwidth(
            kind=of, op=one.op, size=one.size, bytes=one.bytes, ranks=one.ranks, calls=len(each),
            seconds=float(np.percentile(each, QUARTER)),
        )
        for (of, one), each in sorted(found.items(), key=lambda item: (item[0][0], item[0][1].op, item[0][1].bytes))
        if len(each) >= LEAST_CALLS and one.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )  # fmt: skip


def _alone(pieces: np.ndarray, start: float, end: float) -> bool:
    """Whether none of the disjoint pieces touches the time between."""
    place = int(np.searchsorted(pieces[:, 1], start, side="right"))
    return place >= len(pieces) or float(pieces[place, 0]) >= end


def _alone_in(pieces: np.ndarray, start: float, end: float) -> bool:
    """Whether the time between is a whole piece: nothing of the same kind overlaps it."""
    place = int(np.searchsorted(pieces[:, 0], start, side="right")) - 1
    return place >= 0 and float(pieces[place, 0]) >= start - 1e-9 and float(pieces[place, 1]) <= end + 1e-9
