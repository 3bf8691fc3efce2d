"""How low regret and how high tau can get on the shipped sweeps, from the rows themselves: python -m tools.evidence.floor

Three answers, each a mean over the sweeps that count:

- **Repeats**: runs that state the same and took another time. Whoever knows the true time of every layout still misses by that much.
- **Memory gate**: regret of the true times behind our gate, and of our times behind a gate that knows what ran.
- **Contradictions**: rows that took over twice, or less than half, of what is predicted in a sweep that is otherwise met within
  NEAR. Nothing that such a row states tells it from its neighbours, which are met; regret and tau with and without them.
- **Pipelines that poll**: rows labelled as run after nanotron's pipeline was fixed that took what the code before it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.questions.accuracy.prediction import Pair, grouped, pairs_of
from planner.questions.accuracy.ranking import SEED, averaged, fastest, ranking, scatter_of, sweeps_of, tau_apart
from planner.runs import read_runs
from planner.search import SAFE

DRAWS = 1000
"""How often every sweep is measured anew."""
NEAR = 0.1
"""Median error of a sweep whose other rows are met."""
FAR = 2.0
"""Ratio of measured and predicted time beyond which a row contradicts its sweep, either way."""

POLLED = 0.6
"""Seconds per microbatch and neighbouring stage before the fix: six sleeps of 0.1 s.  [nanotron, p2p.py, before 67c5ebb6]"""
SAME = 0.25
"""How near a row is to a pipeline that polls."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Regret of one sweep by who knows what."""

    both: float
    """Our times behind our gate."""
    gate: float
    """True times behind our gate."""
    times: float
    """Our times of what ran."""


def measured_again(true: Floats, scatter: Floats, generator: np.random.Generator, draws: int = DRAWS) -> tuple[float, float]:
    """Mean regret and tau of who knows the true times when every layout is measured once, with deviations as repeated runs have.

    ``true`` (N,) seconds; ``scatter`` ln(time / true time) of repeated runs, drawn with their tails as they are.
    """
    drawn = true * np.exp(generator.choice(scatter, size=(draws, len(true))))
    regret = drawn[:, int(np.argmin(true))] / drawn.min(axis=1) - 1.0
    taus = [tau for row in drawn if (tau := tau_apart(true, row)) is not None]
    return float(regret.mean()), float(np.mean(taus)) if taus else 1.0


def shares(runs: Sequence[Pair], failed: Sequence[Pair]) -> Shares | None:
    """What the gate costs in one sweep, and what the times do; None where our pick ran out of memory."""
    members, measured = averaged(runs)
    seconds = {id(pair): float(time) for pair, time in zip(members, measured, strict=True)}
    candidates = [*members, *failed]
    chances = [pair.predicted.out_of_memory or 0.0 for pair in candidates]
    let_through = [one for one, chance in zip(candidates, chances, strict=True) if chance <= max(SAFE, min(chances))]
    ours = [seconds.get(id(pair), np.nan) for pair in fastest(let_through)]
    ran = [seconds[id(pair)] for pair in let_through if id(pair) in seconds]
    if not ran or not np.isfinite(ours).all():
        return None
    best = float(measured.min())
    time = np.mean([seconds[id(pair)] for pair in fastest(members)])
    return Shares(both=float(np.mean(ours)) / best - 1.0, gate=min(ran) / best - 1.0, times=float(time) / best - 1.0)


def contradictions(pairs: Sequence[Pair]) -> list[Pair]:
    """Rows FAR off in sweeps whose median error is within NEAR."""
    found = []
    for _, members, _ in sweeps_of(pairs):
        logs = np.abs([np.log1p(pair.time_error or 0.0) for pair in members])
        if np.median(logs) <= np.log1p(NEAR):
            found += [pair for pair, log in zip(members, logs, strict=True) if log > np.log(FAR)]
    return found


def polling(pairs: Sequence[Pair]) -> list[Pair]:
    """Runs of nanotron FAR slower than predicted that are within SAME of a pipeline that polls."""
    return [pair for pair in pairs if "nanotron" in pair.run.family and pair.time_error is not None and _polls(pair)]


def _polls(pair: Pair) -> bool:
    layout, measured, predicted = pair.run.layout, pair.run.measured.step_time, pair.predicted.step_time
    if layout is None or measured is None or predicted is None or int(layout.pp) == 1 or measured < FAR * predicted:
        return False
    neighbours = min(int(layout.pp) - 1, 2)
    return abs((predicted + POLLED * neighbours * int(layout.num_microbatches)) / measured - 1.0) <= SAME


def main() -> None:
    """Prints the floors."""
    pairs = [pair for pair in pairs_of(read_runs()) if pair.run.representative]
    sweeps = sweeps_of(pairs)
    members = grouped(pairs, lambda pair: pair.run.family)
    scatter = {family: found for family, group in members.items() if (found := scatter_of(group))[0] == "repeated"}
    pooled = np.concatenate([found for _, found in scatter.values()])
    generator = np.random.default_rng(SEED)
    again = [
        measured_again(averaged(runs)[1], scatter.get(str(key[1]), ("", pooled))[1], generator) for key, runs, _ in sweeps
    ]
    regret, tau = (float(np.mean(one)) for one in zip(*again, strict=True))
    known = [one for _, runs, failed in sweeps if (one := shares(runs, failed)) is not None]
    odd, poll = ({id(pair) for pair in found} for found in (contradictions(pairs), polling(pairs)))
    now, without, fixed = (
        ranking([pair for pair in pairs if id(pair) not in left_out])["overall"] for left_out in (set[int](), odd, poll)
    )
    print(f"{len(sweeps)} sweeps; {len(pooled)} deviations of repeated runs, {np.median(np.abs(pooled)):.1%} at the median, "
          f"{np.percentile(np.abs(pooled), 90):.1%} at the 90th percentile")  # fmt: skip
    print(f"now: regret {now['mean_pick_regret']:.1%}, tau {now['mean_tau_apart']:.2f}")
    print(f"measured again, true times known: regret {regret:.1%}, tau {tau:.2f}")
    for name, what in (("both", "our times, our gate"), ("gate", "true times, our gate"), ("times", "our times of what ran")):
        print(f"{what}: regret {np.mean([getattr(one, name) for one in known]):.1%}")
    for name, one in ((f"{len(odd)} rows that contradict their sweeps", without), (f"{len(poll)} pipelines that poll", fixed)):
        print(f"without {name}: {one['sweeps']} sweeps, regret {one['mean_pick_regret']:.1%}, tau {one['mean_tau_apart']:.2f}")


if __name__ == "__main__":
    main()
