"""What published runs of a trainer and hardware show: how far predictions lay from measurements, source by source.

Predicting all published runs takes many seconds. Their errors are therefore stored in ``profiles/residuals.yaml``, written with
the error bars by ``tools/update_accuracy.py`` from the same residuals, so that the runs counted here are the runs behind the
interval that a plan carries.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from planner import library
from planner.error_bars import KEYS, QUANTITIES, ErrorBar, Kind, error_bar
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.record import record
from planner.schema import Rule, value_of
from planner.trainer import Trainer


def _errors(value: Any, where: str) -> tuple[float, ...]:
    """Errors as parts of 1 from percent with spaces between."""
    try:
        found = tuple(float(word) / 100.0 for word in str(value).split())
    except ValueError as error:
        raise PlannerError(f"{where} must be numbers with spaces between") from error
    if not found or not all(-1.0 < one < np.inf for one in found):
        raise PlannerError(f"{where} must hold finite errors above -100")
    return found


@record
class SourceErrors:
    """The errors on the runs of one source and class."""

    source: str
    """Name of its file in profiles/runs."""
    where: str
    """Where it was published."""
    user: str
    code_base: str
    model: str
    arch: str
    percent: Annotated[tuple[float, ...], Rule(reader=_errors)]
    """Predicted / measured - 1 of every run; percent in the file, parts of 1 here."""


@record
class Evidence:
    """The published runs most like a job, and how well they were predicted."""

    bar: ErrorBar
    """The interval that these runs give, and the class of runs: code, generation of GPU, kind."""
    sources: tuple[SourceErrors, ...]
    """Source by source, the one with most runs first, its errors in order of size."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted / measured - 1 of every run of every source."""
        return tuple(error for one in self.sources for error in one.percent)


def evidence(quantity: str, trainer: Trainer, hardware: HardwareProfile, kind: Kind) -> Evidence:
    """The published runs behind the interval of a job; ``kind`` of run as in ``error_bars.kind_of``."""
    bar = error_bar(quantity, trainer, hardware, kind)
    grouped: dict[str, SourceErrors] = {}
    for one in stored()[quantity]:
        if all(getattr(bar, key) in ("", getattr(one, key)) for key in KEYS):
            before = grouped[one.source].percent if one.source in grouped else ()
            grouped[one.source] = replace(one, percent=tuple(sorted((*before, *one.percent))))
    return Evidence(bar=bar, sources=tuple(sorted(grouped.values(), key=lambda one: (-len(one.percent), one.source))))


@cache
def stored() -> dict[str, tuple[SourceErrors, ...]]:
    """The errors that come with the planner, by quantity."""
    return read(library.profiles_directory() / "residuals.yaml")


def read(path: Path) -> dict[str, tuple[SourceErrors, ...]]:
    """Stored errors from a file. Raises PlannerError with the entry that is wrong."""
    data = library.read_yaml(path)
    return {name: value_of(tuple[SourceErrors, ...], data.get(name), str(path), name) for name in QUANTITIES}
