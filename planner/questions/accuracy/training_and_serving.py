"""Accuracy of training, serving and all other runs together: files by what they hold, their reports, and what is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from planner import library
from planner.questions.accuracy.accuracy_page import Table, markdown, print_accuracy, write_page
from planner.questions.accuracy.beyond import TOPIC, answered, beyond_tables, shipped_beyond, summarise_beyond
from planner.questions.accuracy.bounds import BOUNDS, GENERIC
from planner.questions.accuracy.prediction import Pair, pairs_of
from planner.questions.accuracy.serving_errors import ServingPair
from planner.questions.accuracy.serving_page import serving_section, write_serving_page
from planner.questions.accuracy.serving_summary import serving_entry, serving_tables, summarise_serving, worst_serving
from planner.questions.accuracy.summary import report_of
from planner.runs import read_runs
from planner.runs.rows import files_of
from planner.serving.runs.predicted_runs import predict_runs
from planner.serving.runs.serving_run import read_serving_runs

_KEYS = re.compile(r"""^\{?\s*["']?(client|engine)["']?\s*:""", re.MULTILINE)
"""A key of the file itself, at the beginning of a line."""


def sorted_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Files of training runs, of serving runs and of a topic beyond them, among files and folders. Raises PlannerError."""
    training, serving, beyond = list[Path](), list[Path](), list[Path]()
    for file in files_of(paths):
        text = library.read_text(file)
        (beyond if TOPIC.search(text) else serving if _KEYS.search(text) else training).append(file)
    return training, serving, beyond


def shipped_serving() -> list[Path]:
    """The files of serving runs that come with planner."""
    return [library.profiles_directory() / "serving-runs" / f"{name}.yaml" for name in library.names("serving-runs")]


def serving_pairs(files: Sequence[Path], progress: Callable[[int], object] = lambda done: None) -> list[ServingPair]:
    """Every run of some files with its answer. Raises PlannerError."""
    runs = [run for file in files for run in read_serving_runs(file)]
    return [ServingPair(run=run, answer=one) for run, one in zip(runs, predict_runs(runs, progress), strict=True)]


def accuracy_of(
    paths: Sequence[Path] | None, *, sweeps: bool, worst: int, generic: bool
) -> tuple[dict[str, Any], Callable[..., None], tuple[Pair, ...], tuple[ServingPair, ...]]:
    """The report, what prints it, and both kinds of pairs; without paths of those that come with planner. Raises PlannerError."""
    training, files, beyond = (None, shipped_serving(), shipped_beyond()) if paths is None else sorted_files(paths)
    pairs = () if training == [] else tuple(pairs_of(read_runs(training, generic=generic)))
    report = report_of(pairs, bounded=() if paths is not None else GENERIC if generic else BOUNDS)
    serving, more = tuple(serving_pairs(files)), list[Table]()
    if serving:
        report["runs"] += [serving_entry(one) for one in serving]
        report["summary"]["serving"] = summarise_serving(serving)
        more = [*serving_tables(report["summary"]["serving"]), *([worst_serving(serving, worst)] if worst else [])]
    if rows := answered(beyond):
        report["runs"] += [one.to_dict() for one in rows]
        report["summary"]["beyond"] = summarise_beyond(rows)
        more += beyond_tables(report["summary"]["beyond"], rows, worst)
    return report, partial(print_accuracy, pairs=pairs, serving=more, sweeps=sweeps, worst=worst), pairs, serving


def write_both(pairs: Sequence[Pair], serving: Sequence[ServingPair], summary: Mapping[str, Any], path: Path) -> Path:
    """The page of training runs with serving behind it, or of serving alone; the path of its picture. Raises PlannerError."""
    if not pairs and serving:
        return write_serving_page(serving, summary["serving"], path)
    more = "\n" + serving_section(serving, summary["serving"]) if serving else ""
    more += "".join(f"\n## {one.title}\n\n{markdown(one)}\n" for one in beyond_tables(summary.get("beyond"), ()))
    return write_page(pairs, summary, path, more=more)
