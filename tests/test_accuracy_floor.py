"""Regret that a perfect model would have: scatter of repeated runs, and draws from it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from planner import library
from planner.questions.accuracy.prediction import Pair, pairs_of
from planner.questions.accuracy.ranking import deviations, floors, ranking, regrets, scatter_of, spread
from planner.runs import read_runs

RUNS = library.profiles_directory() / "runs"


def timed(pair: Pair, seconds: float, **layout: int) -> Pair:
    """The same run with another measured time and layout."""
    assert pair.run.layout is not None
    measured = dataclasses.replace(pair.run.measured, step_time=seconds)
    run = dataclasses.replace(pair.run, measured=measured, layout=pair.run.layout.replace(**layout))
    return Pair(run=run, predicted=pair.predicted)


def test_deviations_by_hand() -> None:
    """Two runs of 1 and e^2 seconds lie one unit each from their mean; sqrt(2) for the mean's own degree of freedom."""
    assert deviations(np.array([1.0, math.exp(2.0)])) == pytest.approx([-math.sqrt(2), math.sqrt(2)])
    assert spread(np.array([-0.6745, 0.6745, 50.0])) == pytest.approx(1.0)


def test_regret_of_two_equal_layouts_by_hand() -> None:
    """True times equal: one of two draws is the smaller; E[exp(s |z1 - z2|)] half of the time, its closed form at s = 0.1."""
    s = 0.1
    found = regrets([1.0, 1.0], s, np.random.default_rng(1), draws=200_000)
    normal = 0.5 * (1.0 + math.erf(s))  # Phi(s sqrt 2) for the difference of deviation s sqrt 2
    assert found.mean() == pytest.approx(math.exp(s * s) * normal - 0.5, rel=0.02)
    assert (found == 0).mean() == pytest.approx(0.5, abs=0.01)
    assert not regrets([1.0, 1.0], 0.0, np.random.default_rng(1)).any()
    assert regrets([1.0, 2.0], s, np.random.default_rng(1)).max() < 0.01  # twice as long is never drawn shorter


def test_what_counts_as_repeated() -> None:
    """One data-parallel rank: zero levels 0 and 1 are the same work. Two ranks: they are not."""
    nanotron = next(
        p for p in pairs_of(read_runs([RUNS / "oss-ultrascale-nanotron-1p34b.yaml"])) if p.time_error is not None
    )
    alone = [timed(nanotron, 1.0 + 0.1 * i, dp=1, cp=1, zero=i % 2) for i in range(6)]
    kind, found = scatter_of(alone)
    assert kind == "repeated" and len(found) == 6
    assert found == pytest.approx(deviations(np.array([1.0 + 0.1 * i for i in range(6)])))
    several = [timed(nanotron, 1.0 + 0.1 * i, dp=2, cp=1, zero=i % 2, micro_batch_size=1 + i // 2) for i in range(6)]
    assert scatter_of(several)[0] == ""
    many = [
        timed(nanotron, 1.0 + 0.1 * (i % 2), dp=2, cp=1, zero=i % 2, micro_batch_size=1 + i // 2) for i in range(100)
    ]
    assert scatter_of(many)[0] == "zero"


@pytest.mark.proof
def test_floors_stand_in_the_ranking() -> None:
    """Sweeps of a family with repeated runs have a floor, the same every time, below the worst; others have none."""
    runs = read_runs([RUNS / f"{name}.yaml" for name in ("oss-bloom-prequel-sweep", "oss-ultrascale-nanotron-80p0b")])
    pairs = pairs_of(runs)
    found, again = ranking(pairs), ranking(pairs)
    assert found == again
    bloom, nanotron = (found["families"][name] for name in ("BLOOM", "nanotron network checked"))
    assert bloom["with_floor"] == bloom["sweeps"] > 0 and 0 < bloom["mean_floor"] < bloom["worst_floor"] < 0.2
    assert nanotron["with_floor"] == 0 and nanotron["mean_floor"] is None
    assert found["scatter"]["BLOOM"]["kind"] == "repeated" and "nanotron network checked" not in found["scatter"]
    for sweep in found["sweeps"]:
        assert (sweep["floor"] is None) == (sweep["family"] != "BLOOM") and "times" not in sweep
    assert floors([], pairs) == ([], {})
