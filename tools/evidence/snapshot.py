"""Stored predictions: what CI compares a change with.

A change of the cost model moves predictions. The comparison prints old and new error by family; it fails a family whose
median worsens by more than TOLERANCE against the stored predictions, unless new ones come in the same commit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner import units
from planner.errors import PlannerError
from planner.questions.accuracy.prediction import Pair, grouped

TOLERANCE = 0.01
"""By how much the median error of a family may rise."""
COLUMNS = ("source", "id", "step_time_s", "memory_gib", "out_of_memory")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One family, by the stored predictions and by those of now."""

    family: str
    runs: int
    """Timed runs that both predict."""
    lost: int
    """Timed runs that only the stored predictions have."""
    moved: int
    """Runs whose step time moved by more than 0.1 %."""
    before: float
    """Median error of the stored predictions."""
    after: float

    @property
    def worse(self) -> bool:
        """The family's median rose by more than TOLERANCE, or runs are no longer predicted."""
        return self.after > self.before + TOLERANCE or self.lost > 0


def text(pairs: Sequence[Pair]) -> str:
    """The predictions as CSV, in the order of sources and ids; empty where there is none."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for pair in sorted(pairs, key=lambda one: (one.run.source, one.run.id)):
        one = pair.predicted
        if one.step_time is not None and one.memory is not None and one.out_of_memory is not None:
            writer.writerow((
                pair.run.source, pair.run.id, f"{one.step_time:.4g}", f"{one.memory / units.GIB:.4g}", f"{one.out_of_memory:.3f}",
            ))  # fmt: skip
    return stream.getvalue()


def read(path: Path) -> dict[tuple[str, str], float]:
    """Stored step times in seconds by (source, id). Raises PlannerError."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        return {(row["source"], row["id"]): float(row["step_time_s"]) for row in rows}
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise PlannerError(
            f"{path}: not a file of stored predictions ({error}); write it with tools/update_accuracy.py"
        ) from error


def compare(pairs: Sequence[Pair], stored: Mapping[tuple[str, str], float]) -> list[Change]:
    """Every family before and after."""
    timed = [pair for pair in pairs if pair.run.measured.step_time is not None]
    changes = []
    for family, members in grouped(timed, lambda pair: pair.run.family).items():
        known = [pair for pair in members if (pair.run.source, pair.run.id) in stored]
        both = [pair for pair in known if pair.predicted.step_time is not None]
        if both:
            measured = np.array([pair.run.measured.step_time for pair in both], dtype=float)
            now = np.array([pair.predicted.step_time for pair in both], dtype=float)
            old = np.array([stored[pair.run.source, pair.run.id] for pair in both], dtype=float)
            changes.append(
                Change(
                    family=family, runs=len(both), lost=len(known) - len(both),
                    moved=int(np.sum(np.abs(now / old - 1.0) > 1e-3)),
                    before=float(np.median(np.abs(old / measured - 1.0))), after=float(np.median(np.abs(now / measured - 1.0))),
                )
            )  # fmt: skip
    return changes


def report(changes: Sequence[Change]) -> list[str]:
    """One line per family that moved, for people."""
    lines = [
        f"{one.family}: median error {100 * one.before:.1f} % -> {100 * one.after:.1f} %, {one.moved} of {one.runs} moved"
        + (f", {one.lost} lost" if one.lost else "") + (" (WORSE)" if one.worse else "")
        for one in changes if one.moved or one.lost
    ]  # fmt: skip
    return lines or ["no prediction moved"]
