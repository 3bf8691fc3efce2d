"""One step under torch's profiler: the trace, and from the kernels of a GPU the communication that nothing hides (torch)."""

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from planner import library
from planner.lab.run.training import Run
from planner.units import MICRO

Spans = list[tuple[float, float]]
"""Pieces of time, start and end."""
DIMENSIONS = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "replica": "data", "shard": "data",
    "expert_shard": "data", "flat": "data", "all": "data",
}  # fmt: skip
"""Dimension of a mesh (its name, or how it begins) -> kind of communication in a plan."""


def traced_step(run: Run, device: torch.device, path: Path | None) -> dict[str, Any]:
    """Runs a step; writes the trace (Chrome format) where a path is given. On a GPU {kind: seconds} of exposed communication
    by ``exposed``, on a CPU, whose collectives run in threads that share its cores, {}."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    data = run.data(0)
    with profile(activities=activities) as trace:
        run.step(*data)
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="plan-validate-") as name:
        file = Path(name) / "trace.json"
        trace.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8")
    if path is not None:
        library.write_whole(path, text)
    return exposed(json.loads(text)["traceEvents"]) if device.type == "cuda" else {}


def exposed(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds in which a collective runs and no kernel computes, by kind of communication; together under ``all``.

    exposed = |communication or computation| - |computation|. NCCL kernels carry the description of their group, which for meshes is
    mesh_ and the dimension. A time in which two kinds run counts for both, and once under ``all``.
    """
    computing: Spans = []
    by_kind: dict[str, Spans] = {"all": []}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = (float(event["ts"]) * MICRO, (float(event["ts"]) + float(event["dur"])) * MICRO)
        if "nccl" in str(event.get("name", "")).lower():
            by_kind.setdefault(kind_of(event.get("args", {})), []).append(span)
            by_kind["all"].append(span)
        elif event["cat"] == "kernel":
            computing.append(span)
    return {kind: covered([*spans, *computing]) - covered(computing) for kind, spans in sorted(by_kind.items())}


def kind_of(arguments: dict[str, Any]) -> str:
    """Kind of communication of an NCCL kernel by the description of its group; ``other`` for groups of no mesh."""
    name = str(arguments.get("Process Group Description", "")).removeprefix("mesh_")
    return DIMENSIONS.get(name) or DIMENSIONS.get(name.split("_")[0], "other")


def covered(spans: Spans) -> float:
    """Seconds in which at least one of some pieces of time runs."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
