"""What the kernels of a traced step say: exposed communication, and how long the GPU works in each pass. No torch here.

A pass whose kernels run for less than it takes waits for the host, which asks for each of them: it says how fast eager modules
are, and nothing about the plan's compiled trainer. Kernels take as long under the profiler as without it; the host does not, so
that their seconds are held against those of the passes that were timed without it.
"""

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from planner.kineto.spans import covered, outside
from planner.kineto.step_parts import BUSY
from planner.units import MICRO

DIMENSIONS = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "replica": "data", "shard": "data",
    "expert_shard": "data", "flat": "data", "all": "data",
}  # fmt: skip
"""Dimension of a mesh (its name, or how it begins) -> kind of communication in a plan."""
HALVES = {"I": ("B",), "W": ("B", "W")}
"""Halves of a backward pass -> where their seconds count: B is the whole, W the part that is computed later."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]


def pass_name(kind: str, stage: int, microbatch: int) -> str:
    """What a pass is called in the trace."""
    return f"pass {kind} {stage} {microbatch}"


def busy_passes(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds in which a kernel of a pass runs, by virtual stage and kind (F, B, W): the median of its microbatches.

    A kernel belongs to the pass during which the host launched it: its backward pass is launched by a thread of its own, while
    the one that was annotated waits.
    """
    every = [event for event in events if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in every if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }  # fmt: skip
    passes = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"].split()[1:])
        for event in every if event.get("cat") == "user_annotation" and str(event.get("name")).startswith("pass ")
    )  # fmt: skip
    starts, spans = [one[0] for one in passes], defaultdict[tuple[int, str, int], list[Span]](list)
    for event in every:
        if event.get("cat") not in ON_DEVICE:
            continue
        at = launched.get(event.get("args", {}).get("correlation"), math.nan)
        number = bisect.bisect_right(starts, at) - 1
        if number < 0 or not passes[number][0] <= at <= passes[number][1]:
            continue
        kind, stage, microbatch = passes[number][2]
        for counted in HALVES.get(kind, (kind,)):
            spans[int(stage), counted, int(microbatch)].append(_span(event))
    found = defaultdict[tuple[int, str], list[float]](list)
    for (one, counted, _), kernels in sorted(spans.items()):
        found[one, counted].append(covered(kernels))
    return [{"stage": one, "kind": kind, "seconds": statistics.median(values)} for (one, kind), values in found.items()]


def host_bound(entries: Sequence[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Share of each pass in which the GPU works, by virtual stage and kind, of those below ``BUSY``. ``entries``: what ranks left,
    with ``busy`` of the traced step and ``steps`` timed without the profiler."""
    found = {}
    for one in entries:
        for row in one.get("busy") or ():
            key = row["stage"], row["kind"]
            timed = [
                action["median"][1] for step in one["steps"] for action in step["actions"]
                if (action["stage"], action["kind"]) == key
            ]  # fmt: skip
            share = row["seconds"] / statistics.median(timed) if timed else 1.0
            if share < BUSY:
                found[key] = share
    return found


def exposed(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds in which a collective runs and no kernel computes, by kind of communication; together under ``all``.

    exposed = |communication or computation| - |computation|. NCCL kernels carry the description of their group, which for meshes is
    mesh_ and the dimension. A time in which two kinds run counts for both, and once under ``all``.
    """
    computing: list[tuple[float, float]] = []
    by_kind: dict[str, list[tuple[float, float]]] = {"all": []}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ON_DEVICE:
            continue
        span = _span(event)
        if "nccl" in str(event.get("name", "")).lower():
            group = str(event.get("args", {}).get("Process Group Description", "")).removeprefix("mesh_")
            kind = DIMENSIONS.get(group) or DIMENSIONS.get(group.split("_")[0], "other")
            by_kind.setdefault(kind, []).append(span)
            by_kind["all"].append(span)
        elif event["cat"] == "kernel":
            computing.append(span)
    return {kind: outside(spans, computing) for kind, spans in sorted(by_kind.items())}


def _span(event: dict[str, Any]) -> Span:
    """Start and end, seconds."""
    return float(event["ts"]) * MICRO, (float(event["ts"]) + float(event["dur"])) * MICRO
