"""What a running job shows: times of ranks, tokens of experts, states of GPUs, step times; of logs, tables and endpoints."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TypeVar

import numpy as np

from planner import library
from planner.elastic.gpu_states import COLUMNS, FIELDS, KEPT, NODE, Gpu, gpus_of_metrics, gpus_of_table
from planner.elastic.prometheus import Metric, metrics_of
from planner.elastic.seen_tables import Table, table_of
from planner.errors import PlannerError, shown
from planner.record import record
from planner.trainers.logs import parse_log
from planner.trainers.reading.log_facts import steady
from planner.units import MILLI

Key = TypeVar("Key", bound=Hashable)
HEAD, TAIL = 1 << 20, 16 << 20
"""Bytes of a longer file that are read: settings and headings, and the last steps."""
RANK = ("rank", "global_rank")
PARTS: dict[str, tuple[str, ...]] = {
    "step": ("seconds", "step_s", "step_time_s", "time_s", "duration_s", "step_seconds", "step_time_seconds"),
    "compute": ("compute_s", "busy_s", "compute_seconds", "compute_time_seconds"),
    "communication": ("comm_s", "communication_s", "comm_seconds", "comm_time_seconds"),
    "wait": ("wait_s", "wait_seconds", "wait_time_seconds"),
    "tokens": ("expert_tokens", "tokens"),
}
"""What is known of a rank and step, with the headings that say it; ``_ms`` in place of ``_s`` too."""
KNOWN = {*RANK, "expert", *(name for names in COLUMNS.values() for name in names)}
"""Headings that make a file a table."""


@record
class Observed:
    """All that was read."""

    steps: tuple[float, ...] = ()
    """Seconds of steady steps, one number for each log."""
    ranks: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    """By part of PARTS and rank: one number for each step."""
    pairs: Mapping[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    """Seconds that one rank communicates with another."""
    experts: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Tokens by layer and expert."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Node of a rank, where it was said."""
    gpus: tuple[Gpu, ...] = ()
    at: int | None = None
    """Last step that was seen."""
    sources: tuple[str, ...] = ()

    def joined(self, other: Observed) -> Observed:
        """Both together; the other's ranks go over those that are there."""
        ranks = {name: {**self.ranks.get(name, {}), **other.ranks.get(name, {})} for name in PARTS}
        return Observed(
            steps=self.steps + other.steps, ranks={name: one for name, one in ranks.items() if one},
            pairs={**self.pairs, **other.pairs}, experts={**self.experts, **other.experts},
            nodes={**self.nodes, **other.nodes}, gpus=self.gpus + other.gpus, sources=self.sources + other.sources,
            at=max((one for one in (self.at, other.at) if one is not None), default=None),
        )  # fmt: skip

    @property
    def step_time(self) -> float | None:
        """Seconds of a step: of the logs, else the slowest rank's median; None where nothing said it."""
        each = self.steps or [float(np.median(one)) for one in self.ranks.get("step", {}).values()]
        found = float(np.median(self.steps) if self.steps else max(each, default=np.nan))
        return found if np.isfinite(found) else None


def observe(files: Sequence[Path], url: str | None, step_batch: int, tokens: int, gpus: int) -> Observed:
    """What logs, tables and an endpoint show. ``step_batch``, ``tokens`` of a step and ``gpus`` turn rates of logs into seconds.
    Of several tables of GPUs that name no node, each is a node with the name of its file. Raises PlannerError."""
    found, of_gpus = Observed(), list[Table]()
    for path in files:
        text = library.read_ends(path, HEAD, TAIL)
        if not text.strip():
            raise PlannerError(f"{path}: the file is empty; nothing is logged yet, or it is the log of another rank")
        table = table_of(text, path.name, KNOWN)
        if table is None:
            found = found.joined(_of_log(text, path, step_batch, tokens, gpus))
        elif not table.rows:
            raise PlannerError(f"{path.name}: the table has a heading and no rows")
        elif table.has(*RANK) or table.has("expert"):
            found = found.joined(of_ranks(table))
        else:
            of_gpus.append(table)
    for table in of_gpus:
        node = Path(table.name).stem if len(of_gpus) > 1 else ""
        found = found.joined(Observed(gpus=gpus_of_table(table, node), sources=(table.name,)))
    if url is not None:
        found = found.joined(of_metrics(metrics_of(url), url))
    if not found.sources:
        raise PlannerError("nothing to watch: give logs, tables of ranks' times, CSV of nvidia-smi, dcgmi dmon, or --url")
    return found


def _of_log(text: str, path: Path, batch: int, tokens: int, gpus: int) -> Observed:
    """The steady step of a training log, of its last steps."""
    log = parse_log(text, str(path))
    one = steady(dataclasses.replace(log, steps=log.steps[-KEPT:]), str(path))
    seconds = one.seconds
    if seconds is None and one.tokens_per_second_per_gpu:
        seconds = tokens / one.tokens_per_second_per_gpu / gpus
    if seconds is None and one.samples_per_second:
        seconds = batch / one.samples_per_second
    if seconds is None:
        raise PlannerError(f"{path}: the log says no time of a step")
    return Observed(steps=(seconds,), sources=(path.name,), at=log.steps[-1].number)


def of_ranks(table: Table) -> Observed:
    """A table of ``rank`` and seconds of a step or of its parts, of two ranks (``rank``, ``peer``) and their communication, or of
    ``layer``, ``expert`` and tokens. Raises PlannerError."""
    if table.has("expert"):
        return Observed(experts=_of_experts(table), sources=(table.name,))
    at = _whole(table, "rank", *RANK)
    nodes, peers = table.texts(*NODE), _whole(table, "peer", "peer") if table.has("peer") else None
    parts = {part: values for part, names in PARTS.items() if (values := _seconds(table, names)) is not None}
    if peers is not None:
        pairs = _by(zip(at, peers, strict=True), parts.get("communication", []))
        if not pairs:
            raise PlannerError(f"{table.name}: pairs of ranks have no column of times; name it {PARTS['communication'][0]}")
        return Observed(pairs=pairs, nodes=_names(at, nodes), sources=(table.name,))
    kept = {part: ranks for part, values in parts.items() if (ranks := _by(at, values))}
    if not kept:
        raise PlannerError(f"{table.name}: no column of times; name one of {', '.join(names[0] for names in PARTS.values())}")
    steps = [int(one) for one in table.numbers("step", "iteration") or [] if one is not None and 0 <= one < 2**53]
    return Observed(ranks=kept, nodes=_names(at, nodes), sources=(table.name,), at=max(steps, default=None))


def _names(ranks: Sequence[int], nodes: Sequence[str] | None) -> dict[int, str]:
    """Node by rank, where it was said."""
    return {rank: node[:100] for rank, node in zip(ranks, nodes, strict=True) if node} if nodes else {}


def _by(keys: Iterable[Key], values: Iterable[float | None]) -> dict[Key, tuple[float, ...]]:
    """The last KEPT values of every key, none that are missing or negative."""
    found: dict[Key, list[float]] = defaultdict(list)
    for key, value in zip(keys, values, strict=False):
        if value is not None and value >= 0.0:
            found[key].append(value)
    return {key: tuple(one[-KEPT:]) for key, one in found.items()}


def _seconds(table: Table, names: Sequence[str]) -> list[float | None] | None:
    """The first of some columns that is there, of its own name or in milliseconds."""
    for name in names:
        short = re.sub(r"_s$|_seconds$", "_ms", name)
        for heading, factor in ((name, 1.0), (short, MILLI)):
            if (factor == 1.0 or short != name) and (values := table.numbers(heading)) is not None:
                return [None if one is None else one * factor for one in values]
    return None


def _whole(table: Table, what: str, *names: str) -> list[int]:
    """A column of whole numbers from 0. Raises PlannerError."""
    texts, values = table.texts(*names) or [], table.numbers(*names) or []
    for line, (text, value) in enumerate(zip(texts, values, strict=True), 2):
        if value is None or value < 0 or value % 1 or value > 2**31:
            raise PlannerError(f"{table.name} line {line}: {what} is {shown(text)}; it must be a whole number from 0")
    return [int(value or 0) for value in values]


def _of_experts(table: Table) -> dict[tuple[int, int], float]:
    """Tokens by layer and expert, all lines of one added. Raises PlannerError."""
    experts, tokens = _whole(table, "expert", "expert"), table.numbers(*PARTS["tokens"])
    layers = _whole(table, "layer", "layer") if table.has("layer") else [0] * len(experts)
    if tokens is None:
        raise PlannerError(f"{table.name}: experts have no column of tokens; name it tokens")
    found: dict[tuple[int, int], float] = defaultdict(float)
    for layer, expert, value in zip(layers, experts, tokens, strict=True):
        found[layer, expert] += max(value or 0.0, 0.0)
    return dict(found)


def of_metrics(metrics: Sequence[Metric], where: str) -> Observed:
    """What an endpoint shows: GPUs of DCGM, seconds of ranks by ``rank``."""
    ranks: dict[str, dict[int, tuple[float, ...]]] = defaultdict(dict)
    nodes: dict[int, str] = {}
    for one in metrics:
        if one.name.startswith(FIELDS) or not re.fullmatch(r"\d{1,7}", one.labels.get("rank", "")):
            continue
        rank = int(one.labels["rank"])
        ends = [(len(name), part) for part, names in PARTS.items() for name in names if one.name.endswith(name)]
        if ends and np.isfinite(one.value):
            ranks[max(ends)[1]][rank] = (one.value,)
            if node := one.labels.get("Hostname") or one.labels.get("instance"):
                nodes[rank] = node
    return Observed(ranks=dict(ranks), nodes=nodes, gpus=gpus_of_metrics(metrics), sources=(where,))
