"""Accuracy of runs beyond one job: files with a ``topic``, each answered by the package of that topic; tables of the errors."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.errors import PlannerError, listed, shown
from planner.published_rows import DOES_NOT_FIT, PREDICTED, AnsweredRow, Quantity
from planner.questions.accuracy.accuracy_page import Table, table

PACKAGES = {"heterogeneous": "mixed", "geo": "mixed", "elastic": "elastic", "rl": "rl"}
"""Topic of a file -> package of planner whose module ``published`` answers it."""
TOPIC = re.compile(r"""^\{?\s*["']?topic["']?\s*:""", re.MULTILINE)
"""A key of the file itself, at the beginning of a line."""
APART = 0.03
"""Pairs of a sweep that are nearer than this are ties."""


def shipped_beyond() -> list[Path]:
    """The files of such runs that come with planner."""
    return sorted((library.profiles_directory() / "beyond-runs").rglob("*.yaml"))


def answered(files: Iterable[Path]) -> list[AnsweredRow]:
    """Every row of some files with its answer. Raises PlannerError."""
    found = list[AnsweredRow]()
    for file in files:
        document = library.read_yaml(file)
        topic = document.get("topic")
        if topic not in PACKAGES:
            raise PlannerError(f"{file.name}: topic is {shown(topic)}; it must be one of {listed(PACKAGES)}")
        module = importlib.import_module(f"planner.{PACKAGES[topic]}.published")
        found += module.answers(document, file.name)
    return found


def judged(rows: Iterable[AnsweredRow]) -> dict[tuple[str, str], list[tuple[AnsweredRow, Quantity]]]:
    """Rows that count with what is compared, by topic and quantity."""
    found: dict[tuple[str, str], list[tuple[AnsweredRow, Quantity]]] = defaultdict(list)
    for row in rows:
        if row.counts and row.status in (PREDICTED, DOES_NOT_FIT):
            for name, one in row.quantities.items():
                found[row.topic, name].append((row, one))
    return found


def figures(compared: Sequence[tuple[AnsweredRow, Quantity]]) -> dict[str, float]:
    """Rows, sources, median, 90th percentile and largest of the sizes, bias, mean over sources of each one's median; the share that
    lies inside of its range."""
    errors = np.array([one.error for _, one in compared])
    sizes = np.abs(errors)
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, one in compared:
        by_source[row.source].append(abs(one.error))
    return {
        "n": len(errors),
        "sources": len(by_source),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
        "worst": float(np.max(sizes)),
        "bias": float(np.median(errors)),
        "held": float(np.mean([one.range[0] <= one.measured <= one.range[1] for _, one in compared])),
        "mean_over_sources": float(np.mean([np.median(one) for one in by_source.values()])),
    }


def sweeps(rows: Iterable[AnsweredRow], name: str = "step_s") -> dict[str, dict[str, float]]:
    """Of every sweep: rows, pairs that are told apart, the share in the right order, and the regret of what is predicted best."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.sweep and row.counts and row.status == PREDICTED and name in row.quantities:
            one = row.quantities[name]
            groups[row.sweep].append((one.measured, one.predicted))
    found = {}
    for sweep, times in groups.items():
        pairs = [(a, b) for a, b in combinations(times, 2) if abs(a[0] / b[0] - 1.0) > APART]
        if len(times) < 3 or not pairs:
            continue
        picked = min(times, key=lambda one: one[1])
        found[sweep] = {
            "n": len(times),
            "pairs": len(pairs),
            "right": sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs) / len(pairs),
            "regret": picked[0] / min(measured for measured, _ in times) - 1.0,
        }
    return found


def summarise_beyond(rows: Sequence[AnsweredRow]) -> dict[str, Any]:
    """``{"quantities": {topic: {name: figures}}, "sweeps": {...}, "statuses": {topic: {status: rows}}}``."""
    quantities: dict[str, dict[str, Any]] = defaultdict(dict)
    for (topic, name), errors in judged(rows).items():
        quantities[topic][name] = figures(errors)
    statuses: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        statuses[row.topic][row.status] += 1
    return {
        "quantities": dict(quantities),
        "sweeps": sweeps(rows),
        "statuses": {topic: dict(found) for topic, found in statuses.items()},
    }


def beyond_tables(summary: Mapping[str, Any] | None, rows: Sequence[AnsweredRow], worst: int = 0) -> list[Table]:
    """The tables of the errors by topic and quantity, of the sweeps, and of the worst rows; none without a summary."""
    if summary is None:
        return []
    lines = [{"topic": topic, "name": name, **one} for topic, names in summary["quantities"].items() for name, one in names.items()]
    tables = [table("beyond", lines), table("beyond_sweeps", [{"name": name, **one} for name, one in summary["sweeps"].items()])]
    if worst:
        errors: list[dict[str, Any]] = [
            {"source": row.source, "id": row.id, "name": key[1], "error": one.error}
            for key, some in judged(rows).items() for row, one in some
        ]  # fmt: skip
        tables.append(table("beyond_worst", sorted(errors, key=lambda one: -abs(one["error"]))[:worst]))
    return [one for one in tables if one.rows]
