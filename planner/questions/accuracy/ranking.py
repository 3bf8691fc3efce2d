"""How well the planner chooses: layouts of one job that somebody measured, ranked and compared."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.questions.accuracy.floor import floors
from planner.questions.accuracy.prediction import Pair
from planner.search import SAFE

SWEEP = 5
"""Timed layouts that a sweep needs to say anything about ranking."""


def ranking(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How well the planner chooses in sweeps: layouts of one source for the same work on the same GPUs.

    Per sweep: ``regret``, measured time of the layout predicted fastest over the best measured one, minus 1; Kendall's ``tau``;
    ``pick``, the layout chosen when those that ran out of memory are candidates too, memory first as in the search;
    ``pick_regret``, None when it ran out; ``floor``, the mean regret of who knows the true times (``accuracy.floor``).
    ``overall`` leaves out sweeps of runs that their source calls broken.
    """
    timed: dict[tuple[Hashable, ...], list[Pair]] = defaultdict(list)
    failed: dict[tuple[Hashable, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.run.workload is None or pair.run.cluster is None or pair.predicted.step_time is None:
            continue
        if pair.time_error is not None:
            timed[(pair.run.source, pair.run.family, *_job(pair))].append(pair)
        elif pair.run.measured.fits is False:
            failed[(pair.run.source, pair.run.representative, *_job(pair))].append(pair)
    sweeps = [
        _sweep(key, members, failed[(key[0], members[0].run.representative, *key[2:])])
        for key, members in sorted(timed.items(), key=lambda item: str(item[0]))
        if len({pair.run.layout for pair in members}) >= SWEEP
    ]
    drawn, scatter = floors([(str(sweep["family"]), sweep.pop("times")) for sweep in sweeps], pairs)
    found = list(zip(sweeps, drawn, strict=True))
    for sweep, regrets in found:
        sweep["floor"] = None if regrets is None else float(regrets.mean())
    families = sorted({str(sweep["family"]) for sweep in sweeps})
    return {
        "overall": _statistics([one for one in found if one[0]["representative"]]),
        "families": {name: _statistics([one for one in found if one[0]["family"] == name]) for name in families},
        "scatter": scatter,
        "sweeps": sweeps,
    }


def _job(pair: Pair) -> tuple[Hashable, ...]:
    workload, cluster = pair.run.workload, pair.run.cluster
    assert workload is not None and cluster is not None
    model = (workload.model.name, workload.model.num_layers, workload.model.num_kv_heads, workload.precision)
    return (*model, cluster.num_gpus, workload.global_batch_size, workload.sequence_length)


def _sweep(key: tuple[Hashable, ...], members: Sequence[Pair], failed: Sequence[Pair]) -> dict[str, Any]:
    predicted = np.array([pair.predicted.step_time for pair in members], dtype=float)
    measured = np.array([pair.run.measured.step_time for pair in members], dtype=float)
    candidates = [*members, *failed]
    chances = [pair.predicted.out_of_memory or 0.0 for pair in candidates]
    gate = max(SAFE, min(chances))
    safe = [pair for pair, chance in zip(candidates, chances, strict=True) if chance <= gate]
    pick = min(safe, key=lambda pair: pair.predicted.step_time or 0.0)
    taken = pick.run.measured.step_time
    name, layers, _, precision, gpus, batch, length = key[2:]
    return {
        "source": key[0],
        "family": key[1],
        "job": f"{name} ({layers} layers), {precision}, {gpus} GPUs, batch {batch}, {length} tokens",
        "n": len(members),
        "times": measured,
        "representative": all(pair.run.representative for pair in members),
        "regret": float(measured[np.argmin(predicted)] / measured.min() - 1.0),
        "tau": kendall_tau(predicted, measured),
        "out_of_memory": len(failed),
        "best": members[int(np.argmin(measured))].run.id,
        "pick": pick.run.id,
        "pick_ran_out": pick.run.measured.fits is False,
        "pick_regret": None if taken is None else float(taken / measured.min() - 1.0),
    }


def _statistics(found: list[tuple[dict[str, Any], Floats | None]]) -> dict[str, Any]:
    """Figures over sweeps, each with its drawn regrets of a perfect model."""
    sweeps = [sweep for sweep, _ in found]
    floor = [values for _, values in found if values is not None]
    regrets, taus, picked = (
        [sweep[name] for sweep in sweeps if sweep[name] is not None] for name in ("regret", "tau", "pick_regret")
    )

    def over(values: list[float], function: Callable[[list[float]], Any]) -> float | None:
        return float(function(values)) if values else None

    return {
        "sweeps": len(sweeps),
        "with_floor": len(floor),
        "mean_floor": float(np.mean(floor)) if floor else None,
        "worst_floor": float(np.mean(np.max(floor, axis=0))) if floor else None,
        "best_found": over([float(regret == 0) for regret in regrets], np.mean),
        "mean_regret": over(regrets, np.mean),
        "median_regret": over(regrets, np.median),
        "p90_regret": over(regrets, lambda values: np.percentile(values, 90)),
        "worst_regret": over(regrets, max),
        "mean_tau": over(taus, np.mean),
        "mean_pick_regret": over(picked, np.mean),
        "with_out_of_memory": sum(sweep["out_of_memory"] > 0 for sweep in sweeps),
        "picks_that_ran_out": sum(sweep["pick_ran_out"] for sweep in sweeps),
    }


def kendall_tau(first: Floats, second: Floats) -> float | None:
    """Kendall's rank correlation tau-b: (C - D) / sqrt((pairs - ties_1) (pairs - ties_2)); None if all are tied."""
    a = np.sign(np.subtract.outer(first, first))
    b = np.sign(np.subtract.outer(second, second))
    scale = float(np.sqrt(np.sum(a * a) * np.sum(b * b)))
    return float(np.sum(a * b)) / scale if scale > 0 else None
