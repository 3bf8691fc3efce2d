"""How well the planner chooses: layouts of one job that somebody measured, ranked and compared; and what a perfect model would
reach: scatter of repeated runs, and the regret that it leaves to whoever picks a layout."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.questions.accuracy.prediction import Pair, grouped
from planner.search import SAFE

TIE = 1e-3
"""Layouts predicted as near as this are one choice: whoever picks gets any of them, so that their mean counts."""
APART = 0.03
"""Measured times that differ by less say nothing about an order: runs that are repeated differ by as much."""
SWEEP = 5
"""Timed layouts that a sweep needs to say anything about ranking."""
DRAWS = 2000
"""How often the times of a sweep are drawn anew: its mean regret is then known to a fortieth of its spread."""
SEED = 20261121
"""The same draws on every page."""
LEAST = {"repeated": 6, "zero": 100}
"""Deviations that a family needs before its scatter says anything; more where other errors are among them."""
MEDIAN_OF_NORMAL = 0.6745
"""Median of the size of a standard normal variable."""
KINDS = {
    "repeated": "runs of the same work",
    "zero": "runs that differ in their zero level alone, less the predicted difference: at most",
}
"""Where a scatter comes from, best first. The last holds the errors of the predicted differences as well."""


def ranking(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How well the planner chooses in sweeps: layouts of one source for the same work on the same GPUs with the same trainer.

    A layout that was measured several times counts once, with the mean of its times.

    Per sweep: ``regret``, measured time of the layout predicted fastest over the best measured one, minus 1, the mean over ties;
    Kendall's ``tau``, and ``tau_apart`` over pairs whose measured times are APART; ``pick``, the layout chosen when those that ran
    out of memory are candidates too, memory first as in the search; ``pick_regret``, the mean over ties, None when all of them
    ran out; ``floor``, the mean regret of who knows the true times (``floors``).
    ``overall`` leaves out sweeps of runs that their source calls broken, or whose layout is not stated.
    """
    sweeps = [_sweep(key, members, failed) for key, members, failed in sweeps_of(pairs)]
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


def sweeps_of(pairs: Sequence[Pair]) -> list[tuple[tuple[Hashable, ...], list[Pair], list[Pair]]]:
    """Key (source, family, job), timed runs and runs out of memory of every job with SWEEP timed layouts or more."""
    timed: dict[tuple[Hashable, ...], list[Pair]] = defaultdict(list)
    failed: dict[tuple[Hashable, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.run.workload is None or pair.run.cluster is None or pair.predicted.step_time is None or not pair.run.stated:
            continue  # a layout that was filled in by what is fastest says nothing about an order
        if pair.time_error is not None:
            timed[(pair.run.source, pair.run.family, *_job(pair))].append(pair)
        elif pair.run.measured.fits is False:
            failed[(pair.run.source, pair.run.representative, *_job(pair))].append(pair)
    return [
        (key, members, failed[(key[0], members[0].run.representative, *key[2:])])
        for key, members in sorted(timed.items(), key=lambda item: str(item[0]))
        if len({pair.run.layout for pair in members}) >= SWEEP
    ]


def _job(pair: Pair) -> tuple[Hashable, ...]:
    workload, cluster = pair.run.workload, pair.run.cluster
    assert workload is not None and cluster is not None
    model = (workload.model.name, workload.model.num_layers, workload.model.num_kv_heads, workload.precision)
    job = (cluster.num_gpus, workload.global_batch_size, workload.sequence_length)
    return (*model, *job, pair.run.trainer.name if pair.run.trainer else "")


def _sweep(key: tuple[Hashable, ...], runs: Sequence[Pair], failed: Sequence[Pair]) -> dict[str, Any]:
    members, measured = averaged(runs)
    seconds = {id(pair): time for pair, time in zip(members, measured, strict=True)}
    predicted = np.array([pair.predicted.step_time for pair in members], dtype=float)
    candidates = [*members, *failed]
    chances = [pair.predicted.out_of_memory or 0.0 for pair in candidates]
    gate = max(SAFE, min(chances))
    picks = fastest([pair for pair, chance in zip(candidates, chances, strict=True) if chance <= gate])
    taken = [seconds[id(pair)] for pair in picks if id(pair) in seconds]
    first = [seconds[id(pair)] for pair in fastest(members)]
    name, layers, _, precision, gpus, batch, length, _ = key[2:]
    return {
        "source": key[0],
        "family": key[1],
        "job": f"{name} ({layers} layers), {precision}, {gpus} GPUs, batch {batch}, {length} tokens",
        "n": len(members),
        "times": measured,
        "representative": all(pair.counts for pair in runs),
        "regret": float(np.mean(first) / measured.min() - 1.0),
        "tau": kendall_tau(predicted, measured),
        "tau_apart": tau_apart(predicted, measured),
        "out_of_memory": len(failed),
        "best": members[int(np.argmin(measured))].run.id,
        "pick": picks[0].run.id,
        "pick_ran_out": any(pair.run.measured.fits is False for pair in picks),
        "pick_regret": float(np.mean(taken) / measured.min() - 1.0) if taken else None,
    }


def averaged(runs: Sequence[Pair]) -> tuple[list[Pair], Floats]:
    """One run for each layout, and the mean of what its repetitions measured."""
    groups: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in runs:
        groups[(str(pair.run.layout), id(pair.run.trainer))].append(pair)
    means = [np.mean([pair.run.measured.step_time for pair in group]) for group in groups.values()]
    return [group[0] for group in groups.values()], np.array(means, dtype=float)


def fastest(pairs: Sequence[Pair]) -> list[Pair]:
    """The pair that is predicted fastest, and those that are predicted as fast (TIE); the fastest first."""
    found = sorted(pairs, key=lambda pair: pair.predicted.step_time or 0.0)
    limit = (found[0].predicted.step_time or 0.0) * (1.0 + TIE)
    return [pair for pair in found if (pair.predicted.step_time or 0.0) <= limit]


def _statistics(found: list[tuple[dict[str, Any], Floats | None]]) -> dict[str, Any]:
    """Figures over sweeps, each with its drawn regrets of a perfect model."""
    sweeps = [sweep for sweep, _ in found]
    floor = [values for _, values in found if values is not None]
    regrets, taus, apart, picked = (
        [sweep[name] for sweep in sweeps if sweep[name] is not None]
        for name in ("regret", "tau", "tau_apart", "pick_regret")
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
        "mean_tau_apart": over(apart, np.mean),
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


def tau_apart(predicted: Floats, measured: Floats) -> float | None:
    """(C - D) / pairs over the pairs whose measured times differ by more than APART; a predicted TIE counts 0. None without any."""
    apart = np.triu(np.abs(np.log(np.divide.outer(measured, measured))) > np.log1p(APART), 1)
    said = np.log(np.divide.outer(predicted, predicted))
    order = np.where(np.abs(said) <= np.log1p(TIE), 0.0, np.sign(said))
    agree = order * np.sign(np.subtract.outer(measured, measured))
    return float(agree[apart].mean()) if apart.any() else None


# ------------------------------------------------------------------------------------------------ what a perfect model would reach


def scatter_of(pairs: Iterable[Pair]) -> tuple[str, Floats]:
    """Kind (KINDS) and deviations of ln(time) between runs of one family, of the first kind that has enough; or ('', none).

    Runs count where one source measured the same model, batch, layout, trainer and GPU; what a job's own benchmark said
    about its network may differ inside a family. With one data-parallel rank every zero level does the same work.
    """
    timed = [p for p in pairs if p.time_error is not None and p.run.workload and p.run.layout and p.run.trainer]
    for kind, least in LEAST.items():
        groups = grouped(timed, partial(_work, zero=kind == "repeated")).values()
        found = [deviations(_times(members, kind)) for members in groups if len(members) > 1]
        if sum(map(len, found)) >= least:
            return kind, np.concatenate(found)
    return "", np.zeros(0)


def _times(members: Sequence[Pair], kind: str) -> Floats:
    """Measured seconds; of runs that differ in their zero level over the predicted ones."""
    measured, predicted = (
        np.array(one, dtype=float)
        for one in zip(*((p.run.measured.step_time, p.predicted.step_time) for p in members), strict=True)
    )
    return measured if kind == "repeated" else measured / predicted


def _work(pair: Pair, *, zero: bool) -> Hashable:
    """What a run did; without its zero level where two runs are compared that differ in it."""
    run = pair.run
    assert run.workload and run.layout and run.cluster and run.trainer
    nothing_to_shard = int(run.layout.dp) * int(run.layout.cp) == 1
    layout = tuple(
        0 if name == "zero" and (nothing_to_shard or not zero) else int(value)
        for name, value in vars(run.layout).items()
    )
    trainer = list(vars(run.trainer).values())
    return run.source, run.cluster.hardware.name, layout, repr(run.workload), repr(trainer)


def deviations(times: Floats) -> Floats:
    """ln(time / geometric mean of its n repetitions), times sqrt(n / (n - 1)) for the degree of freedom of the mean."""
    logs = np.log(times)
    return np.asarray((logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1.0)))


def spread(scatter: Floats) -> float:
    """Standard deviation of the bulk: median of the sizes over 0.6745. One slow run of a pair would make the other a fast one."""
    return float(np.median(np.abs(scatter)) / MEDIAN_OF_NORMAL)


def regrets(
    times: Sequence[float] | Floats, deviation: float, generator: np.random.Generator, draws: int = DRAWS
) -> Floats:
    """Regret of a picker who knows the true times but not the luck of a single run: one value per draw.

    Measured times stand for the true ones, t; each draw is what another measurement would find, t exp(s z), z normal. The
    picker takes the smallest t: regret = drawn(pick) / smallest drawn - 1. The floor comes out low: measured times are
    scattered themselves, so that the best lie further apart than the true ones, and runs that go wrong are left out of s.
    """
    true = np.asarray(times, dtype=float)
    drawn = true * np.exp(deviation * generator.standard_normal((draws, len(true))))
    return np.asarray(drawn[:, int(np.argmin(true))] / drawn.min(axis=1) - 1.0)


def floors(sweeps: Sequence[tuple[str, Floats]], pairs: Iterable[Pair]) -> tuple[list[Floats | None], dict[str, Any]]:
    """For each sweep (family, measured times) its drawn regrets, None where its family has no scatter; and by family what its
    scatter is: kind, number of deviations, their standard deviation (``spread``) and the 90th percentile of their size."""
    members = grouped(pairs, lambda pair: pair.run.family)
    found = {family: scatter_of(members[family]) for family in dict.fromkeys(family for family, _ in sweeps)}
    generator = np.random.default_rng(SEED)
    drawn = [
        regrets(times, spread(found[family][1]), generator) if len(found[family][1]) else None
        for family, times in sweeps
    ]
    by_family = {
        family: {
            "kind": kind, "n": len(scatter), "deviation": spread(scatter),
            "p90": float(np.percentile(np.abs(scatter), 90)),
        }
        for family, (kind, scatter) in sorted(found.items()) if len(scatter)
    }  # fmt: skip
    return drawn, by_family
