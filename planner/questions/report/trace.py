"""The predicted step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Trace Event Format, JSON object form: ``traceEvents`` with complete events (X), metadata (M: names and order of processes and
threads) and counters (C). One process for each pipeline rank, one thread for each of its streams, microseconds.
[Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU]
"""

import json
from collections.abc import Iterator
from typing import Any

from planner.explain import PART_TEXT, layout_text
from planner.timeline.passes import STREAMS, Slice
from planner.timeline.priced_plan import Priced
from planner.timeline.stage_memory import StageMemory, memory_of_ranks, memory_over_time
from planner.timeline.step_slices import Timeline, timeline_of
from planner.units import GIB, GIGA, KILO

STREAM_TEXT = {
    "compute": "compute", "host": "waits for host", "tensor": "tensor-parallel communication",
    "context": "context-parallel communication", "expert": "expert all-to-all", "pipeline": "pipeline sends",
    "data": "gradients and weights", "offload": "copies to and from host",
}  # fmt: skip
PASSES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "recompute": "recompute"}


def trace_of(priced: Priced) -> str:
    """The trace of one pipeline of a priced layout, all ranks."""
    step, memory = timeline_of(priced), memory_of_ranks(priced)
    slices = sorted(step.slices(), key=lambda one: (one.start, one.end))
    used = {(one.rank, one.stream) for one in slices}
    events = [*_names(memory, used), *_complete(slices), *_counters(priced, step)]
    job = priced.job
    about = {
        "what": f"predicted step of one pipeline of {job.model.name} on {job.cluster.num_gpus} x {job.cluster.hardware.name}",
        "layout": layout_text(priced.layout), "step_time_s": repr(step.step_time),
    }  # fmt: skip
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(document, separators=(",", ":"))


def _names(memory: tuple[StageMemory, ...], used: set[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """Names and order of ranks and of the streams that they use."""
    for one in memory:
        layers = f"{one.layers} layer" + ("s" if one.layers != 1 else "")
        name = f"pipeline rank {one.rank} ({one.kind} stage, {layers})"
        yield metadata_event("process_name", one.rank, 0, name=name)
        yield metadata_event("process_sort_index", one.rank, 0, sort_index=one.rank)
        for thread, stream in enumerate(STREAMS):
            if (one.rank, stream) in used:
                yield metadata_event("thread_name", one.rank, thread, name=STREAM_TEXT[stream])
                yield metadata_event("thread_sort_index", one.rank, thread, sort_index=thread)


def metadata_event(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    """A name or an order of a process or a thread."""
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": args}


def _complete(slices: list[Slice]) -> Iterator[dict[str, Any]]:
    """One event for each slice, in whole nanoseconds, so that neighbours touch and never overlap."""
    ends: dict[tuple[int, str], int] = {}
    for one in slices:
        lane = (one.rank, one.stream)
        start = max(round(one.start * GIGA), ends.get(lane, 0))
        end = ends[lane] = max(round(one.end * GIGA), start)
        args: dict[str, Any] = {"part": PART_TEXT[one.part]}
        if one.microbatch >= 0:
            args["microbatch"] = one.microbatch
        if one.stage >= 0:
            args["stage"] = one.stage
        yield {
            "name": _name(one), "cat": "hidden" if one.hidden else one.part, "ph": "X", "ts": start / KILO,
            "dur": (end - start) / KILO, "pid": one.rank, "tid": STREAMS.index(one.stream), "args": args,
        }  # fmt: skip


def _name(one: Slice) -> str:
    """'2F0' for actions, as schedules write them: stage, forward, microbatch; else its name."""
    if one.kind in ("F", "B", "I", "W"):
        return f"{one.stage}{one.kind}{one.microbatch}"
    return f"{PASSES.get(one.kind, one.kind)} {one.stage if one.stage >= 0 else ''}".strip()


def _counters(priced: Priced, step: Timeline) -> Iterator[dict[str, Any]]:
    """Device memory of every rank in GiB: the part that stays, activations, workspace."""
    for rank in range(step.ranks):
        memory = memory_over_time(priced, step, rank)
        fixed = sum(memory.static.values()) / GIB
        for one in memory.intervals:
            parts = {"static": fixed, "activations": one.activations / GIB, "workspace": one.workspace / GIB}
            yield {
                "name": "memory (GiB)", "ph": "C", "ts": round(one.start * GIGA) / KILO, "pid": rank, "tid": 0,
                "args": {name: round(value, 4) for name, value in parts.items()},
            }  # fmt: skip
