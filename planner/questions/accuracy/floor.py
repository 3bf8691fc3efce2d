"""What a perfect model would reach: scatter of repeated runs, and the regret that it leaves to whoever picks a layout."""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.questions.accuracy.prediction import Pair, grouped

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
