"""Runs with other constants, and what the cost model then says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.arrays import Floats
from planner.hardware import HardwareProfile
from planner.questions.accuracy.prediction import predict
from planner.runs import Run
from planner.trainer import Trainer

Pair = tuple[HardwareProfile, Trainer]


def measured(run: Run, fits: str) -> float | None:
    """What the run measured: seconds per step, or bytes of peak memory; None = not measured."""
    return run.measured.step_time if fits == "time" else run.measured.memory


def changed(runs: Sequence[Run], change: Callable[[HardwareProfile, Trainer], Pair]) -> list[Run]:
    """The runs with another hardware and trainer; ``change`` is asked once per pair of them.

    Runs that shared both share them after, and are still priced in one call; where nothing changes the run stays.
    """
    known: dict[tuple[int, int], Pair] = {}
    result = []
    for run in runs:
        if run.cluster is None or run.trainer is None:
            result.append(run)
            continue
        before = (run.cluster.hardware, run.trainer)
        key = (id(before[0]), id(before[1]))
        if key not in known:
            known[key] = change(*before)
        hardware, trainer = known[key]
        if hardware is before[0] and trainer is before[1]:
            result.append(run)
        else:
            result.append(replace(run, cluster=replace(run.cluster, hardware=hardware), trainer=trainer))
    return result


def predicted(runs: Sequence[Run], fits: str) -> Floats:
    """Predicted seconds or bytes of every run; nan where it cannot be priced."""
    found = [one.step_time if fits == "time" else one.memory for one in predict(runs)]
    return np.array([value or math.nan for value in found])


def log_errors(runs: Sequence[Run], fits: str) -> Floats:
    """ln(predicted / measured) of runs that were measured and that the cost model can price (``usable``)."""
    return np.log(predicted(runs, fits)) - np.log([float(measured(run, fits) or math.nan) for run in runs])


def usable(runs: Sequence[Run], fits: str) -> list[Run]:
    """The runs that measured time or memory and that the cost model can price."""
    candidates = [run for run in runs if not run.unsupported and measured(run, fits)]
    good = np.isfinite(predicted(candidates, fits))
    return [run for run, ok in zip(candidates, good, strict=True) if ok]
