"""How well the planner chooses: layouts of one job that somebody measured, ranked and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.accuracy.prediction import Pair
from planner.arrays import Floats

SWEEP = 5
"""Timed layouts that a sweep needs to say anything about ranking."""


def ranking(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How well the planner ranks layouts of one job: sweeps of one source with the same work on the same GPUs.

    Regret: measured time of the layout that the planner calls fastest, over the best measured time, minus 1. Kendall's
    tau-b: 1 = same order, 0 = no relation.
    """
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        workload, cluster = pair.run.workload, pair.run.cluster
        if pair.time_error is None or workload is None or cluster is None:
            continue
        model = (workload.model.name, workload.model.num_layers, workload.precision)
        job = (*model, cluster.num_gpus, workload.global_batch_size, workload.sequence_length)
        groups[(pair.run.source, pair.run.family, *job)].append(pair)
    sweeps = []
    for key, members in sorted(groups.items(), key=lambda item: str(item[0])):
        if len({p.run.layout for p in members}) < SWEEP:
            continue
        predicted = np.array([p.predicted.step_time for p in members], dtype=float)
        measured = np.array([p.run.measured.step_time for p in members], dtype=float)
        regret = float(measured[np.argmin(predicted)] / measured.min() - 1.0)
        tau = kendall_tau(predicted, measured)
        sweeps.append(
            {
                "source": key[0],
                "family": key[1],
                "job": " ".join(map(str, key[2:])),
                "n": len(members),
                "regret": regret,
                "tau": tau,
            }
        )
    families = {str(s["family"]) for s in sweeps}
    return {
        "overall": _ranking_statistics(sweeps),
        "families": {f: _ranking_statistics([s for s in sweeps if s["family"] == f]) for f in sorted(families)},
        "sweeps": sweeps,
    }


def _ranking_statistics(sweeps: list[dict[str, Any]]) -> dict[str, Any]:
    regrets = [sweep["regret"] for sweep in sweeps]
    taus = [sweep["tau"] for sweep in sweeps if sweep["tau"] is not None]
    return {
        "sweeps": len(sweeps),
        "best_found": float(np.mean([regret == 0 for regret in regrets])) if regrets else None,
        "median_regret": float(np.median(regrets)) if regrets else None,
        "p90_regret": float(np.percentile(regrets, 90)) if regrets else None,
        "mean_tau": float(np.mean(taus)) if taus else None,
    }


def kendall_tau(first: Floats, second: Floats) -> float | None:
    """Kendall's rank correlation tau-b: (C - D) / sqrt((pairs - ties_1) (pairs - ties_2)); None if all are tied."""
    a = np.sign(np.subtract.outer(first, first))
    b = np.sign(np.subtract.outer(second, second))
    scale = float(np.sqrt(np.sum(a * a) * np.sum(b * b)))
    return float(np.sum(a * b)) / scale if scale > 0 else None
