"""Predicted against measured: every run priced, the errors summed up by source, family and kind.

An error is predicted / measured - 1: positive means predicted too slow, or too large.
"""

from collections.abc import Sequence
from typing import Any

from planner import units
from planner.error_bars import error_bar
from planner.questions.accuracy.prediction import Pair
from planner.questions.accuracy.summary import summarise
from planner.runs import Run


def report_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Runs, each with measured and predicted values, and their summary.

    ``{"runs": [{source, id, status, reason, step_time_s, memory_gib, fits}], "summary": {...}}``; ``status`` is
    'predicted' or 'unsupported'. ``reason`` says why not; of a predicted run it lists what was assumed. ``range`` is the
    interval of nine of ten runs, ``fits`` holds the chance that the run fits. Plain data: what ``--json`` prints.
    """
    return {"runs": [_entry(pair) for pair in pairs], "summary": summarise(pairs)}


def _entry(pair: Pair) -> dict[str, Any]:
    """One run as plain data."""
    run, predicted = pair.run, pair.predicted
    measured, chance = run.measured, predicted.out_of_memory
    assumed = "; ".join(run.assumptions)

    def gib(value: float | None) -> float | None:
        return None if value is None else value / units.GIB

    peak = gib(predicted.memory)
    return {
        "source": run.source, "id": run.id, "status": "unsupported" if predicted.refused else "predicted",
        "reason": predicted.refused or (f"assumed: {assumed}" if assumed else ""),
        "step_time_s": {"measured": measured.step_time, "predicted": predicted.step_time,
                        "range": _range(run, "step_time", predicted.step_time)},
        "memory_gib": {"measured": gib(measured.memory), "predicted": peak, "range": _range(run, "memory", peak),
                       "kind": measured.memory_kind or "allocated"},
        "fits": {"measured": measured.fits, "predicted": None if chance is None else chance < 0.5,
                 "probability": None if chance is None else 1.0 - chance},
    }  # fmt: skip


def _range(run: Run, quantity: str, predicted: float | None) -> list[float] | None:
    """The interval of nine of ten runs; None where nothing was predicted."""
    if predicted is None or run.cluster is None or run.trainer is None:
        return None
    return list(error_bar(quantity, run.trainer, run.cluster.hardware, run.kind).interval(predicted))
