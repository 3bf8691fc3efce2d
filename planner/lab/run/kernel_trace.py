"""What the kernels of a traced step say: exposed communication, and how long the GPU works in each pass. No torch here.

A pass whose kernels run for less than it takes waits for the host, which asks for each of them: it says how fast eager modules
are, and nothing about the plan's compiled trainer. Kernels take as long under the profiler as without it; the host does not, so
that their seconds are held against those of the passes that were timed without it.
"""

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
STAND_IN = "stand-in"
"""What local copies of collectives are called in the trace: their kernels are left out, as their time is off the passes."""
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
    copies = sorted(_span(event) for event in every if event.get("cat") == "user_annotation" and event.get("name") == STAND_IN)
    begun = [one[0] for one in copies]
    starts, spans = [one[0] for one in passes], defaultdict[tuple[int, str, int], list[Span]](list)
    for event in every:
        if event.get("cat") not in ON_DEVICE:
            continue
        at = launched.get(event.get("args", {}).get("correlation"), math.nan)
        number = bisect.bisect_right(starts, at) - 1
        if number < 0 or not passes[number][0] <= at <= passes[number][1]:
            continue
        copy = bisect.bisect_right(begun, at * MICRO) - 1
        if copy >= 0 and at * MICRO <= copies[copy][1]:
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
    found: dict[tuple[int, str], float] = {}
    for one in entries:
        timed = defaultdict[tuple[int, str], list[float]](list)
        for action in (action for step in one["steps"] for action in step["actions"]):
            timed[action["stage"], action["kind"]].append(action["median"][1])
        found |= slow_hosts(one.get("busy") or (), timed)
    return found


def slow_hosts(
    busy: Iterable[dict[str, Any]], timed: Mapping[tuple[int, str], Sequence[float]]
) -> dict[tuple[int, str], float]:
    """The same of one rank: ``busy_passes``, and the seconds of its passes that were timed without the profiler."""
    shares = {
        (row["stage"], row["kind"]): row["seconds"] / statistics.median(values)
        for row in busy if (values := timed.get((row["stage"], row["kind"])))
    }  # fmt: skip
    return {key: share for key, share in shares.items() if share < BUSY}


def by_host(bound: Mapping[tuple[int, str], float]) -> str:
    """Why passes are not compared of which the host sets the pace; "" where the GPU does."""
    if not bound:
        return ""
    return (
        f"host-bound: kernels run in {min(bound.values()):.0%} of a pass, and below {BUSY:.0%} the host of "
        "eager modules sets the pace, which says nothing about the plan's trainer: not compared"
    )


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
