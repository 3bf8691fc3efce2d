"""``plan hardware diff`` of two runs: noise of one machine is not listed, a slow link or a throttled device is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, Provenance
from planner.questions.hardware.diff import CHANCE, Difference, differences
from planner.schema import read

H100 = HARDWARE["h100-sxm"]
SIZES = [2**power for power in range(10, 21)]
GROUPS = ((2, 1), (4, 1), (2, 2))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
ROUNDS = 8.0


def run_of(seed: int, *, compute: float = 0.02, curve: float = 0.06, point: float = 0.15, modes: float = 0.2) -> Any:
    """Measurements of one run of one machine: its drift, modes of the library, scatter; and what it says of its drift."""
    chance = np.random.default_rng(seed)

    def noisy(true: Any, sigma: float) -> Any:
        return true * np.exp(sigma * chance.standard_normal(np.shape(true)))

    def said(delta: float) -> dict[str, float]:
        return {"percent": 100 * delta * np.sqrt(chance.chisquare(ROUNDS) / ROUNDS), "rounds": ROUNDS}

    shift = noisy(1.0, compute)
    gemm = [
        {"dtype": "fp32", "pass": pass_, "m": m, "n": 512, "k": 512, "repetitions": 9,
         "us": float(noisy(shift * m / 10.0, 0.02)), "interval": [1.0, 1.005]}
        for pass_ in ("forward", "dgrad", "wgrad") for m in (64, 128, 256, 512, 1024)
    ]  # fmt: skip
    shift, rows = noisy(1.0, 0.1), []
    for n, stride in GROUPS:
        for op in OPS:
            us = noisy(shift * noisy(1.0, curve) * n * (50.0 + np.array(SIZES) / 2000.0), point)
            us = us * np.where(chance.random(len(SIZES)) < modes, 2.0, 1.0)
            rows.append({
                "op": op, "n": n, "stride": stride, "nodes": 1, "dtype": "fp32", "sizes": " ".join(map(str, SIZES)),
                **{name: " ".join(f"{value * end:.6g}" for value in us)
                   for name, end in (("us", 1.0), ("low_us", 0.97), ("high_us", 1.04))},
            })  # fmt: skip
    provenance = {
        "machine": "one", "device": "CPU", "date": "2026-11-21", "command": "plan profile",
        "drift": {"gemm": said(compute), "collective inside": said(0.1)},
    }  # fmt: skip
    return {"gemm": gemm, "collective": rows}, provenance


def profile_of(run: Any) -> HardwareProfile:
    measurements, provenance = run
    return replace(H100, measurements=measurements, provenance=read(Provenance, provenance, "run"))


def slower_group(run: Any, n: int, stride: int, factor: float) -> Any:
    rows = [
        {**row, "us": " ".join(str(factor * float(us)) for us in row["us"].split())}
        if (row["n"], row["stride"]) == (n, stride) else row for row in run[0]["collective"]
    ]  # fmt: skip
    return {**run[0], "collective": rows}, run[1]


def throttled(run: Any, rate: float) -> Any:
    return {**run[0], "gemm": [{**row, "us": row["us"] / rate} for row in run[0]["gemm"]]}, run[1]


def listed(first: Any, second: Any) -> list[Difference]:
    return differences(profile_of(first), profile_of(second))[0]


@pytest.mark.proof
def test_two_runs_of_one_machine_list_nothing_and_faults_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 pairs with heavy-tailed scatter at most twice the stated chance list anything. Where curves scatter by 4 percent
    a link of 2/3 of its rate, and beside a drift of 2 percent a device at 0.85, are found in nearly all."""
    monkeypatch.setattr(
        "planner.questions.hardware.diff.figures", lambda profile: []
    )  # they play no part, and take long
    alarms, links, cards, strangers = 0, 0, 0, 0
    pairs, faulty = 100, 40
    for pair in range(pairs):
        first, second = run_of(2 * pair), run_of(2 * pair + 1)
        alarms += bool(listed(first, second))
        if pair >= faulty:
            continue
        calm = [run_of(1000 + 2 * pair + which, curve=0.04, point=0.08, modes=0.05) for which in (0, 1)]
        found = listed(calm[0], slower_group(calm[1], 2, 2, 1.5))
        links += any(one.name.startswith("groups of 2, 2 apart") and one.verdict == "slower" for one in found)
        found = listed(first, throttled(second, 0.85))
        cards += any(one.family == "gemm fp32" and one.name.startswith("all of them") for one in found)
        strangers += any(one.family != "gemm fp32" for one in found)
    assert alarms <= 2 * CHANCE * pairs, alarms
    assert links >= 0.9 * faulty and cards >= 0.9 * faulty, (links, cards)
    assert strangers <= 0.15 * faulty, strangers


def test_a_slow_link_is_named_and_its_figure_is_right() -> None:
    first, second = run_of(1, modes=0.0), run_of(2, modes=0.0)
    found = listed(first, slower_group(second, 2, 2, 3.0))
    assert found[0].family == "collectives inside a node" and found[0].name == "groups of 2, 2 apart (55 points)"
    assert found[0].percent == pytest.approx(200.0, rel=0.3) and found[0].points == 55 and found[0].spread < 100.0
    curves = [one.name for one in found if one.name.startswith(OPS)]
    assert curves == [], "its curves say nothing more"
    assert found[0].second / found[0].first == pytest.approx(1 + found[0].percent / 100, rel=1e-3)


def test_without_rounds_a_drift_is_assumed_and_figures_of_points_are_not_judged_twice() -> None:
    first, second = run_of(1), run_of(2)
    for one in (first, second):
        one[1].pop("drift")
    assert listed(first, second) == []
    found, compared = differences(profile_of(first), profile_of(throttled(second, 0.5)))
    assert {one.family for one in found} == {"gemm fp32"} and compared > 30
    assert listed(first, first) == []


def test_measured_files_are_compared_by_the_command(run: Any, tmp_path: Any) -> None:
    paths = []
    for name, one in (("a", run_of(3)), ("b", throttled(run_of(4), 0.5))):
        paths.append(str(tmp_path / f"{name}.yaml"))
        (tmp_path / f"{name}.yaml").write_text(library.dump_yaml(profile_of(one).to_dict()))
    done = run("hardware", "diff", *paths)
    assert done.exit_code == 0 and "all of them (15 points)" in done.output and "slower" in done.output, done.output
    broken = profile_of(run_of(5))
    for rows in (
        {"gemm": [{"us": "x"}, {"dtype": "fp32"}, {"dtype": "fp32", "m": "x", "n": 1, "k": 2}]},
        {"collective": [{"sizes": "1 2", "us": "1"}]},
    ):
        differences(replace(broken, measurements=rows), profile_of(run_of(4)))
    with pytest.raises(
        PlannerError, match="mine: measurements gemm 1: expected a mapping of keys to values, found int"
    ):
        HardwareProfile.from_dict({**H100.to_dict(), "measurements": {"gemm": [3]}}, where="mine")
