"""Points, timing and the journal of the profiler: no torch, no other process."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.lab.profile import timing as drift
from planner.lab.profile.journal import Journal, digest
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.timing import interval_rank, measure, summarise, taker

POINT = Point.of("gemm", m=8, n=16, k=32, dtype="bf16", weight=0.25)


def measured(point: Point = POINT, median: float = 2e-3) -> Measured:
    return Measured(point=point, median=median, low=0.9 * median, high=1.2 * median, repetitions=11, clock="cpu")


def test_interval_of_the_median_by_hand() -> None:
    assert interval_rank(5) == (1, 1 - 2 / 2**5), "five samples reach 93.75 percent at most"
    assert interval_rank(6) == (1, 1 - 2 / 2**6)
    assert interval_rank(9) == (2, 1 - 2 * (1 + 9) / 2**9), "the table of every textbook: second of nine"
    assert interval_rank(20)[0] == 6 and interval_rank(100)[0] == 40
    assert interval_rank(2000)[0] == pytest.approx(1000 - 1.96 * 2000**0.5 / 2, abs=1.5), "the normal limit"


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    random.seed(1)
    draws = [summarise([random.lognormvariate(0, 1) for _ in range(15)], "wall") for _ in range(2000)]
    share = statistics.mean(one.low <= 1.0 <= one.high for one in draws)
    assert share == pytest.approx(draws[0].confidence, abs=0.02) and draws[0].confidence >= 0.95


def test_outliers_are_counted_and_kept() -> None:
    found = summarise([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 9.0], "wall")
    assert (found.outliers, found.repetitions, found.high, found.median) == (1, 8, 9.0, 1.0)
    assert summarise([2.0] * 9, "wall").outliers == 0
    with pytest.raises(PlannerError, match="no sample"):
        summarise([], "wall")


def test_measure_sleeps_and_spins() -> None:
    slept = measure(lambda: time.sleep(2e-3), device="cpu", budget_s=0.1)
    assert 2e-3 <= slept.median < 20e-3 and slept.repetitions >= 7
    idle = measure(lambda: time.sleep(2e-3), device="cpu", clock="cpu", budget_s=0.1)
    assert idle.median < 0.5 * slept.median, "sleeping costs no processor time"
    calls: list[int] = []
    quick = measure(lambda: calls.append(1), device="cpu", budget_s=0.05)
    assert quick.median < 5e-6 and len(calls) > 10 * quick.repetitions, "short runs are repeated within a sample"
    flushed: list[int] = []
    alone = taker(lambda: None, "wall", lambda: flushed.append(1))(5, 3)
    assert len(flushed) == len(alone) == 5
    with pytest.raises(PlannerError, match="does not fit the device"):
        measure(lambda: None, device="cpu", clock="cuda_events", budget_s=1)


def test_points_and_results_survive_the_file() -> None:
    assert Point.from_dict(json.loads(json.dumps(POINT.to_dict()))) == POINT
    assert Measured.from_dict(json.loads(json.dumps(measured().to_dict()))) == measured()
    assert Point.of("gemm", k=32, n=16, m=8, dtype="bf16") == POINT, "order and weight do not matter"


def test_journal_keeps_everything_when_interrupted(tmp_path: Path) -> None:
    path, header = tmp_path / "x.journal.json", {"device": "CPU", "ranks": 2}
    other = Point.of("gemm", m=1)
    with pytest.raises(KeyboardInterrupt), Journal(path, header) as journal:
        journal.add(measured())
        journal.add(measured(Point.of("gemm", m=2)))
        journal.fail(other, "out of memory")
        raise KeyboardInterrupt
    again = Journal.resume(path, header)
    assert again.of()[0] == measured() and len(again) == 2
    assert POINT in again and other not in again, "what failed is tried again"
    assert not list(tmp_path.glob(".*")), "no temporary file is left"
    with pytest.raises(PlannerError, match=r"was measured with ranks 2, now it is 4"):
        Journal.resume(path, {**header, "ranks": 4})
    path.write_text('{"header": ')
    with pytest.raises(PlannerError, match="is not a journal"):
        Journal.resume(path, header)
    for measured_ in ({}, {"point": {"family": "gemm", "key": 3, "weight": 0}, "details": {}}):  # of another version
        data = {"header": header, "measured": [measured_], "failed": []}
        path.write_text(json.dumps(data | {"digest": digest(data)}))
        with pytest.raises(PlannerError, match=r"is not a journal of a profile .*; run without --resume"):
            Journal.resume(path, header)
    assert len(Journal.resume(tmp_path / "none.json", header)) == 0


def test_drift_is_the_scatter_of_rounds_by_hand(tmp_path: Path) -> None:
    """Two references that both move by 0, +10, -10 % of ln t: 10 %, whatever each scatters in the opposite direction."""
    journal = Journal(None, {})
    other = Point.of("gemm", m=9, n=16, k=32, dtype="bf16")
    for turn, (shift, own) in enumerate(((0.0, 0.05), (0.1, -0.05), (-0.1, 0.0))):
        for point, sign in ((POINT, 1), (other, -1)):
            found = measured(point, 2e-3 * math.exp(shift + sign * own))
            if turn:
                drift.measure_again([point], journal, {point: found}.get)
            else:
                journal.add(found)
    assert drift.drift(journal) == {"gemm": {"percent": 10.0, "rounds": 2.0}}
    assert drift.references_alone(journal) == [POINT, other] and drift.drift(Journal(None, {})) == {}
    due = drift.Due(1e-6)
    time.sleep(1e-3)
    assert due.now()
    due.done(10.0)
    assert not due.now(), "rounds are a tenth of the time at most"
