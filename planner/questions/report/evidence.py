"""What published runs of a trainer and hardware show: how far predictions lay from measurements, source by source.

Predicting all published runs takes many seconds. Their errors are therefore stored in ``profiles/residuals.yaml``, written with
the error bars by ``tools/update_accuracy.py`` from the same residuals, so that the runs counted here are the runs behind the
interval that a plan carries.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.error_bars import KEYS, QUANTITIES, ErrorBar, error_bar
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.trainer import Trainer

WITHIN = 0.1
"""Errors up to this count as close."""


@dataclass(frozen=True, kw_only=True)
class SourceErrors:
    """The errors on the runs of one source."""

    source: str
    """Name of its file in profiles/runs."""
    where: str
    """Where it was published."""
    errors: tuple[float, ...]
    """Predicted / measured - 1 of every run, in order of size."""

    @property
    def median(self) -> float:
        """Median of the errors without their sign."""
        return float(np.median(np.abs(self.errors)))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The published runs most like a job, and how well they were predicted."""

    quantity: str
    """step_time or memory."""
    bar: ErrorBar
    """The interval that these runs give, and the class of runs: code, generation of GPU, kind."""
    sources: tuple[SourceErrors, ...]
    """Source by source, the one with most runs first."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted / measured - 1 of every run of every source."""
        return tuple(error for one in self.sources for error in one.errors)

    @property
    def median(self) -> float:
        """Median over all runs of the error without its sign."""
        return float(np.median(np.abs(self.errors)))

    @property
    def bias(self) -> float:
        """Median over all runs of the error with its sign: positive = predicted too high."""
        return float(np.median(self.errors))

    @property
    def close(self) -> float:
        """Share of the runs predicted within WITHIN."""
        return float(np.mean(np.abs(self.errors) <= WITHIN))


def evidence(quantity: str, trainer: Trainer, hardware: HardwareProfile, kind: str) -> Evidence:
    """The published runs behind the interval of a job; ``kind`` of run as in ``error_bars.kind_of``."""
    bar = error_bar(quantity, trainer, hardware, kind)
    wanted = {key: getattr(bar, key) for key in KEYS}
    grouped: dict[str, tuple[str, list[float]]] = {}
    for entry, errors in stored()[quantity]:
        if all(value in ("", entry[key]) for key, value in wanted.items()):
            grouped.setdefault(entry["source"], (entry["where"], []))[1].extend(errors)
    sources = [
        SourceErrors(source=name, where=where, errors=tuple(sorted(errors)))
        for name, (where, errors) in grouped.items()
    ]
    return Evidence(
        quantity=quantity, bar=bar, sources=tuple(sorted(sources, key=lambda one: (-len(one.errors), one.source)))
    )


Entries = dict[str, tuple[tuple[dict[str, str], tuple[float, ...]], ...]]


@cache
def stored() -> Entries:
    """The errors that come with the planner, by quantity: source, where and class of the runs, and their errors."""
    return read(library.profiles_directory() / "residuals.yaml")


def read(path: Path) -> Entries:
    """Stored errors from a file. Raises PlannerError with the entry that is wrong."""
    data = library.read_yaml(path)
    found = {}
    for quantity in QUANTITIES:
        entries = data.get(quantity)
        if not isinstance(entries, list) or not entries:
            raise PlannerError(f"{path}: {quantity} must be a list of sources with their errors")
        found[quantity] = tuple(_entry(entry, f"{path}: {quantity}") for entry in entries)
    return found


_TEXTS = ("source", "where", *KEYS)


def _entry(entry: Any, where: str) -> tuple[dict[str, str], tuple[float, ...]]:
    if not isinstance(entry, Mapping) or set(entry) != {*_TEXTS, "percent"}:
        raise PlannerError(f"{where}: an entry must hold {', '.join(_TEXTS)} and percent")
    try:
        errors = tuple(float(word) / 100.0 for word in str(entry["percent"]).split())
    except ValueError as error:
        raise PlannerError(f"{where}: {entry['source']}: percent must be numbers with spaces between") from error
    if not errors or not all(math.isfinite(one) and one > -1.0 for one in errors):
        raise PlannerError(f"{where}: {entry['source']}: percent must hold finite errors above -100")
    return {key: str(entry[key]) for key in _TEXTS}, errors
