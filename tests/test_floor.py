"""Floors of regret and tau: arithmetic on sweeps made by hand."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner import library
from planner.questions.accuracy.prediction import Pair, Predicted
from planner.runs import Run, read_rows, to_run
from tools.evidence.floor import contradictions, measured_again, polling, shares


@cache
def _row() -> Run:
    path = library.profiles_directory() / "runs" / "oss-hagemann2023-llama13b-2k-32gpu-seqpar.yaml"
    return next(run for row in read_rows([path]) if (run := to_run(row)).measured.step_time)


def _pair(micro: int, measured: float | None, predicted: float, chance: float = 0.0) -> Pair:
    """A layout of one job, told apart by its micro batch; measured None = it ran out of memory."""
    run = _row()
    assert run.layout
    layout = run.layout.replace(micro_batch_size=micro)
    found = replace(run.measured, step_time=measured, fits=measured is not None)
    return Pair(run=replace(run, layout=layout, measured=found), predicted=Predicted(step_time=predicted, out_of_memory=chance))


def test_times_that_repeat_leave_no_floor_and_scatter_leaves_one() -> None:
    generator = np.random.default_rng(1)
    assert measured_again(np.array([1.0, 2.0, 3.0]), np.zeros(4), generator) == (0.0, 1.0)
    # Two equal layouts, each drawn at 1 or e: the one that is picked loses e - 1 in one of four measurements.
    regret, tau = measured_again(np.array([1.0, 1.0]), np.array([0.0, 1.0]), generator, draws=4000)
    assert regret == pytest.approx((np.e - 1) / 4, rel=0.1) and tau == 0.0
    # Two that lie 20 % apart, each half as slow again or not: the order turns in one of four draws, at 1.5 to 1.2.
    regret, tau = measured_again(np.array([1.0, 1.2]), np.array([0.0, np.log(1.5)]), generator, draws=4000)
    assert regret == pytest.approx(0.25 / 4, rel=0.1) and tau == pytest.approx(0.5, abs=0.05)


def test_gate_and_times_each_have_their_share() -> None:
    """The gate refuses the fastest (1 s); of what it lets through our times take the slower one (2 s, not 1.5)."""
    sweep = [_pair(1, 1.0, 1.0, chance=0.9), _pair(2, 1.5, 1.4), _pair(4, 2.0, 1.2)]
    found = shares(sweep, [_pair(8, None, 0.5, chance=1.0)])
    assert found and (found.both, found.gate, found.times) == (1.0, 0.5, 0.0)
    assert shares(sweep, [_pair(8, None, 0.5)]) is None  # the pick ran out


def test_a_row_contradicts_its_sweep_only_where_the_others_are_met() -> None:
    met = [_pair(2**power, 1.0, 1.0) for power in range(4)]
    odd = _pair(16, 2.5, 1.0)
    assert contradictions([*met, odd]) == [odd]
    assert contradictions([*(_pair(2**power, 1.5, 1.0) for power in range(4)), odd]) == []


def test_a_pipeline_that_polls_is_told_by_its_sleeps() -> None:
    """Two stages, 10 microbatches: 10 x 0.6 s on top of 1 s; four stages have two neighbours; one stage has none."""

    def ran(pp: int, measured: float, family: str = "nanotron network normal") -> Pair:
        one = _pair(1, measured, 1.0)
        assert one.run.layout
        layout = one.run.layout.replace(pp=pp, num_microbatches=10)
        return replace(one, run=replace(one.run, layout=layout, family=family))

    for polls in (ran(2, 7.0), ran(2, 8.0), ran(4, 13.0)):
        assert polling([polls]) == [polls]
    assert not polling([ran(2, 13.0), ran(4, 7.0), ran(1, 7.0), ran(2, 1.9), ran(2, 7.0, "Hagemann")])
