"""Files of runs by what they hold, training or serving; and the serving runs that come with planner."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from planner import library
from planner.questions.accuracy.serving_errors import ServingPair
from planner.runs.rows import files_of
from planner.serving.runs.predicted_runs import predict_runs
from planner.serving.runs.serving_run import read_serving_runs

_KEYS = re.compile(r"""^\{?\s*["']?(client|engine)["']?\s*:""", re.MULTILINE)
"""A key of the file itself, at the beginning of a line."""


def sorted_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files of training runs and of serving runs among files and folders. Raises PlannerError."""
    training, serving = list[Path](), list[Path]()
    for file in files_of(paths):
        (serving if _KEYS.search(library.read_text(file)) else training).append(file)
    return training, serving


def shipped_serving() -> list[Path]:
    """The files of serving runs that come with planner."""
    return [library.profiles_directory() / "serving-runs" / f"{name}.yaml" for name in library.names("serving-runs")]


def serving_pairs(files: Sequence[Path], progress: Callable[[int], object] = lambda done: None) -> list[ServingPair]:
    """Every run of some files with its answer. Raises PlannerError."""
    runs = [run for file in files for run in read_serving_runs(file)]
    return [ServingPair(run=run, answer=one) for run, one in zip(runs, predict_runs(runs, progress), strict=True)]
