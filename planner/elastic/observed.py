"""What a running job shows: times of ranks, states of GPUs, step times; read from logs, tables and endpoints."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner import library
from planner.elastic.prometheus import Metric, metrics_of
from planner.errors import PlannerError, shown
from planner.trainers.logs import read_log
from planner.trainers.reading.log_facts import steady
from planner.units import MILLI

MOST_BYTES = 256_000_000
KEPT = 200
"""Last steps of a table that are looked at."""
RANK = ("rank", "global_rank")
NODE = ("node", "host", "hostname", "nodename")
PARTS: dict[str, tuple[str, ...]] = {
    "step": ("seconds", "step_s", "step_time_s", "time_s", "duration_s", "step_seconds", "step_time_seconds"),
    "compute": ("compute_s", "busy_s", "compute_seconds", "compute_time_seconds"),
    "communication": ("comm_s", "communication_s", "comm_seconds", "comm_time_seconds"),
    "wait": ("wait_s", "wait_seconds", "wait_time_seconds"),
    "tokens": ("expert_tokens", "tokens"),
}
"""What is known of a rank and step, with the headings that say it; ``_ms`` in place of ``_s`` too."""
GPU_COLUMNS = {
    "clock": ("clocks.sm", "clocks.current.sm", "sm_clock", "smclk"), "power": ("power.draw", "power_usage"),
    "temperature": ("temperature.gpu", "gpu_temp", "tmptr"),
    "reasons": ("clocks_throttle_reasons.active", "clocks_event_reasons.active", "clock_throttle_reasons"),
}  # fmt: skip
"""Columns of nvidia-smi --query-gpu and names of DCGM, in small letters."""
REASONS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}  # fmt: skip
"""Bits of the reasons for a lower clock that are no idling.  [NVML, nvmlClocksEventReasons]"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver shows it, the last or the median of what was seen."""

    name: str
    """Node and number."""
    clock: float | None = None
    """MHz of the SMs."""
    power: float | None = None
    """Watts."""
    temperature: float | None = None
    """Degrees Celsius."""
    reasons: tuple[str, ...] = ()
    """Why its clock is low."""
    xid: int = 0
    """Last error of the driver; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that was read."""

    steps: tuple[float, ...] = ()
    """Seconds of steady steps, one number for each log."""
    ranks: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    """By part of PARTS and rank: one number for each step."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Node of a rank, where it was said."""
    gpus: tuple[Gpu, ...] = ()
    sources: tuple[str, ...] = ()

    def joined(self, other: Observed) -> Observed:
        """Both together; the other's ranks go over those that are there."""
        ranks = {name: {**self.ranks.get(name, {}), **other.ranks.get(name, {})} for name in PARTS}
        return Observed(
            steps=self.steps + other.steps, ranks={name: one for name, one in ranks.items() if one},
            nodes={**self.nodes, **other.nodes}, gpus=self.gpus + other.gpus, sources=self.sources + other.sources,
        )  # fmt: skip

    @property
    def step_time(self) -> float | None:
        """Seconds of a step: of the logs, else the slowest rank's median."""
        if self.steps:
            return float(np.median(self.steps))
        found = self.ranks.get("step")
        return max(float(np.median(one)) for one in found.values()) if found else None


def observe(files: Iterable[Path], url: str | None, step_batch: int, tokens: int, gpus: int) -> Observed:
    """What logs, tables and an endpoint show. ``step_batch``, ``tokens`` of a step and ``gpus`` turn rates of logs into seconds.
    Raises PlannerError."""
    found = Observed()
    for path in files:
        text = library.read_text(path, most=MOST_BYTES, errors="replace")
        rows = table_of(text)
        if rows is None:
            found = found.joined(_of_log(path, step_batch, tokens, gpus))
        else:
            found = found.joined(of_table(rows, path.name))
    if url is not None:
        found = found.joined(of_metrics(metrics_of(url), url))
    if not found.sources:
        raise PlannerError("nothing to watch: give logs, tables of ranks' times, CSV of nvidia-smi, or --url")
    return found


def _of_log(path: Path, batch: int, tokens: int, gpus: int) -> Observed:
    """The steady step of a training log."""
    one = steady(read_log(path), str(path))
    seconds = one.seconds
    if seconds is None and one.tokens_per_second_per_gpu:
        seconds = tokens / one.tokens_per_second_per_gpu / gpus
    if seconds is None and one.samples_per_second:
        seconds = batch / one.samples_per_second
    if seconds is None:
        raise PlannerError(f"{path}: the log says no time of a step")
    return Observed(steps=(seconds,), sources=(path.name,))


def table_of(text: str) -> list[dict[str, str]] | None:
    """The rows of a CSV with a heading that names ranks or GPUs, by heading in small letters; None where it is none."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    headings = [re.sub(r"\s*\[.*\]", "", one.strip().lower()) for one in next(csv.reader([first]), [])]
    known = {*RANK, *(name for names in GPU_COLUMNS.values() for name in names)}
    if len(headings) < 2 or not known & set(headings):
        return None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = csv.reader(io.StringIO("\n".join(lines[1:])))
    return [dict(zip(headings, (cell.strip() for cell in row), strict=False)) for row in rows]


def _number(cell: str | None, where: str) -> float | None:
    """The number that a cell begins with, its unit left out; None for an empty one. Raises PlannerError."""
    if cell is None or cell in ("", "[N/A]", "N/A", "[Not Supported]"):
        return None
    match = re.match(r"0x[0-9a-fA-F]+|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", cell)
    if match is None:
        raise PlannerError(f"{where}: {shown(cell)} is no number")
    return float(int(match[0], 16)) if match[0].lower().startswith("0x") else float(match[0])


def of_table(rows: Sequence[Mapping[str, str]], name: str) -> Observed:
    """What a table of ranks or of GPUs shows. Raises PlannerError."""
    if not rows:
        raise PlannerError(f"{name}: the table has a heading and no rows")
    if any(key in rows[0] for key in RANK):
        return _of_ranks(rows, name)
    return Observed(gpus=_gpus((_gpu_row(row, f"{name} line {n}") for n, row in enumerate(rows, 2))), sources=(name,))


def _of_ranks(rows: Sequence[Mapping[str, str]], name: str) -> Observed:
    """A table of ``rank`` and seconds of a step, or of its parts."""
    ranks: dict[str, dict[int, list[float]]] = {part: defaultdict(list) for part in PARTS}
    nodes: dict[int, str] = {}
    for number, row in enumerate(rows, 2):
        where = f"{name} line {number}"
        rank = _number(next((row[key] for key in RANK if key in row), None), where)
        if rank is None or rank < 0 or rank % 1:
            raise PlannerError(f"{where}: rank is {shown(row.get('rank'))}; it must be a whole number from 0")
        if node := next((row[key] for key in NODE if row.get(key)), None):
            nodes[int(rank)] = node[:100]
        for part, headings in PARTS.items():
            for heading in headings:
                for key, factor in ((heading, 1.0), (re.sub(r"_s$|_seconds$", "_ms", heading), MILLI)):
                    value = _number(row.get(key), where)
                    if value is not None and value >= 0.0 and (factor == 1.0 or key != heading):
                        ranks[part][int(rank)].append(value * factor)
    kept = {part: {rank: tuple(values[-KEPT:]) for rank, values in one.items()} for part, one in ranks.items() if one}
    if not kept:
        raise PlannerError(f"{name}: no column of times; name one of {', '.join(names[0] for names in PARTS.values())}")
    return Observed(ranks=kept, nodes=nodes, sources=(name,))


def _gpu_row(row: Mapping[str, str], where: str) -> tuple[str, dict[str, float]]:
    """Name of a GPU and its numbers."""
    node = next((row[key] for key in NODE if row.get(key)), "")
    index = next((row[key] for key in ("index", "gpu", "gpu_id", "uuid") if row.get(key)), "0")
    found = {
        what: value for what, names in GPU_COLUMNS.items()
        if (value := _number(next((row[one] for one in names if one in row), None), where)) is not None
    }  # fmt: skip
    return f"{node}{'/' if node else ''}GPU {index}", found


def of_metrics(metrics: Sequence[Metric], where: str) -> Observed:
    """What an endpoint shows: GPUs of DCGM by ``Hostname`` and ``gpu``, seconds of ranks by ``rank``."""
    rows: list[tuple[str, dict[str, float]]] = []
    ranks: dict[str, dict[int, tuple[float, ...]]] = defaultdict(dict)
    nodes: dict[int, str] = {}
    short = {"SM_CLOCK": "clock", "POWER_USAGE": "power", "GPU_TEMP": "temperature", "XID_ERRORS": "xid"}
    for one in metrics:
        node = one.labels.get("Hostname") or one.labels.get("instance") or ""
        if one.name.startswith("DCGM_FI_DEV_"):
            what = short.get(one.name.removeprefix("DCGM_FI_DEV_"), "reasons")
            rows.append((f"{node}{'/' if node else ''}GPU {one.labels.get('gpu', '0')}", {what: one.value}))
        elif re.fullmatch(r"\d{1,7}", one.labels.get("rank", "")):
            rank = int(one.labels["rank"])
            ends = [(len(name), part) for part, names in PARTS.items() for name in names if one.name.endswith(name)]
            if ends:
                ranks[max(ends)[1]][rank] = (one.value,)
                if node:
                    nodes[rank] = node
    return Observed(ranks=dict(ranks), nodes=nodes, gpus=_gpus(rows), sources=(where,))


def _gpus(rows: Iterable[tuple[str, dict[str, float]]]) -> tuple[Gpu, ...]:
    """One entry for each GPU: medians; reasons and errors that were seen at any time."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, numbers in rows:
        for what, value in numbers.items():
            seen[name][what].append(value)

    def middle(values: Sequence[float]) -> float | None:
        return float(np.median(values[-KEPT:])) if values else None

    found = []
    for name, values in seen.items():
        bits = 0
        for reason in values["reasons"][-KEPT:]:
            bits |= int(reason)
        found.append(Gpu(
            name=name, clock=middle(values["clock"]), power=middle(values["power"]), temperature=middle(values["temperature"]),
            reasons=tuple(text for bit, text in REASONS.items() if bits & bit), xid=int(max([0.0, *values["xid"]])),
        ))  # fmt: skip
    return tuple(found)
