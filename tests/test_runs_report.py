"""The accuracy report: its statistics by hand, parts that add up, and runs priced together or alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.api import accuracy
from planner.questions.accuracy.accuracy_page import summary_rows
from planner.questions.accuracy.prediction import Pair, Predicted, predict
from planner.questions.accuracy.ranking import kendall_tau, ranking
from planner.questions.accuracy.summary import bias_interval
from planner.runs import Run

RUNS = Path(__file__).parent.parent / "profiles" / "runs"


def test_a_bias_is_as_certain_as_there_are_kinds_of_runs() -> None:
    three = [-0.1] * 30 + [0.0] * 30 + [0.2] * 30
    assert bias_interval(three, ["a"] * 30 + ["b"] * 30 + ["c"] * 30) == (-0.1, 0.2)  # two of three a: 7 of 27 draws
    low, high = bias_interval(three, list(range(90))) or (9, 9)
    assert (low, high) == (0.0, 0.0)  # 46 of 90 from one end: never in 400 draws
    assert bias_interval([0.1, 0.3], ["a", "b"]) is None
    assert bias_interval([0.05] * 7, list(range(7))) == (0.05, 0.05)


def test_kendall_tau() -> None:
    order = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(order, order) == pytest.approx(1.0)
    assert kendall_tau(order, -order) == pytest.approx(-1.0)
    assert kendall_tau(order, np.ones(4)) is None
    # Pairs: 5 of 6 agree, none tied: (5 - 1) / 6.
    assert kendall_tau(order, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)
    # One pair tied in the second: (5 - 0) / sqrt(6 x 5).
    assert kendall_tau(order, np.array([1.0, 2.0, 2.0, 4.0])) == pytest.approx(5 / 30**0.5)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    sources = ("nv-korthikanti-2022-table5", "oss-zero-bubble-1f1b", "oss-hagemann2023-llama13b-2k-64gpu",
               "oss-simumax-b200-v1p2", "nv-mlperf-v31-gpt3-h100", "nv-moe-folding-table4")  # fmt: skip
    return accuracy([RUNS / f"{source}.yaml" for source in sources]).to_dict()


def test_report_is_plain_data_and_counts_add_up(report: dict[str, Any]) -> None:
    json.dumps(report, allow_nan=False)
    summary = report["summary"]
    predicted = [run for run in report["runs"] if run["status"] == "predicted"]
    assert summary["coverage"]["rows"] == len(report["runs"])
    assert summary["coverage"]["predicted"] == len(predicted)
    assert sum(summary["coverage"]["unsupported"].values()) == len(report["runs"]) - len(predicted)
    timed = [run for run in predicted if run["step_time_s"]["measured"] is not None]
    assert sum(stats["n"] for stats in summary["families"].values()) == len(timed) == summary["all_predicted"]["n"]
    errors = [run["step_time_s"]["predicted"] / run["step_time_s"]["measured"] - 1 for run in timed]
    assert summary["all_predicted"]["median_signed"] == pytest.approx(float(np.median(errors)))
    assert all(run["reason"] for run in report["runs"] if run["status"] == "unsupported")


def test_report_judges_memory_and_ranking(report: dict[str, Any]) -> None:
    summary = report["summary"]
    verdict = summary["out_of_memory"]["families"]["Hagemann"]
    assert verdict["ran"] == 74 and verdict["ran_out"] == 67
    assert summary["memory"]["allocated"]["n"] == 23 + 28
    (sweep,) = [sweep for sweep in summary["ranking"]["sweeps"] if sweep["family"] == "Hagemann"]
    assert sweep["n"] == 74 and sweep["regret"] >= 0 and -1 <= sweep["tau"] <= 1
    tables = summary_rows(summary)
    assert [len(row) == len(table.headings) for table in tables.values() for row in table.rows].count(False) == 0
    assert {row[0] for row in tables["time"].rows} >= {"Hagemann", "zero-bubble", "overall"}


def test_pricing_together_equals_pricing_alone(runs: dict[str, Run]) -> None:
    chosen = [run for run in runs.values() if run.source == "oss-hagemann2023-llama13b-2k-64gpu" and run.layout][::9]
    together = predict(chosen)
    for run, answer in zip(chosen, together, strict=True):
        (alone,) = predict([run])
        assert alone.step_time == pytest.approx(answer.step_time, rel=1e-9)
        assert alone.memory == pytest.approx(answer.memory, rel=1e-9)


def test_repeated_layouts_and_ties_count_with_their_mean(runs: dict[str, Run]) -> None:
    """Of five layouts one is measured twice; two are predicted alike and fastest: whoever picks gets either of them."""
    source = [run for run in runs.values() if run.source == "oss-hagemann2023-llama13b-2k-64gpu" and run.measured.step_time]
    chosen = list({str(run.layout): run for run in source}.values())[:5]
    chosen = [dataclasses.replace(run, trainer=chosen[0].trainer) for run in chosen]
    predicted, measured = (10.0, 10.001, 20.0, 30.0, 40.0), (12.0, 14.0, 11.0, 30.0, 30.5)
    pairs = [
        Pair(
            run=dataclasses.replace(run, measured=dataclasses.replace(run.measured, step_time=seconds)),
            predicted=Predicted(step_time=time, memory=1e9, out_of_memory=0.0),
        )
        for run, time, seconds in zip(chosen, predicted, measured, strict=True)
    ]
    again = dataclasses.replace(pairs[2].run, measured=dataclasses.replace(pairs[2].run.measured, step_time=9.0))
    (sweep,) = ranking([*pairs, dataclasses.replace(pairs[2], run=again)])["sweeps"]
    assert sweep["n"] == 5 and sweep["regret"] == sweep["pick_regret"] == pytest.approx(13.0 / 10.0 - 1.0)
    # 9 of 10 pairs are measured 3 % apart; of these the two fastest are predicted as a tie, and both lie before the best one.
    assert sweep["tau_apart"] == pytest.approx((6 - 2) / 9)
