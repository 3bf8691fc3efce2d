"""Error bars: quantiles of residuals by class, and what they promise about sources they have not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import error_bars, library
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.trainer import load_trainer
from planner.workload import Workload
from tools.evidence import bars
from tools.evidence.bars import Residual


def made(
    sources: int, runs: int, spread: float, seed: int, *, code_base: str = "a", kind: str = "dense"
) -> list[Residual]:
    """Residuals with a shift per source and scatter inside it, both normal with the same spread."""
    rng = np.random.default_rng(seed)
    shifts = rng.normal(0.0, spread, sources)
    return [
        Residual(source=f"{code_base}{kind}{number}", code_base=code_base, arch="Hopper", kind=kind, value=float(value))
        for number, shift in enumerate(shifts)
        for value in rng.normal(shift, spread, runs)
    ]


def test_bars_hold_sources_they_have_not_seen() -> None:
    found = made(40, 20, 0.1, 1)
    bar = error_bars.choose(bars.build(found), "a", "Hopper", "dense")
    fresh = np.array([one.value for one in made(400, 20, 0.1, 2)])
    held = np.mean((np.log(bar.low) <= fresh) & (fresh <= np.log(bar.high)))
    assert 0.86 < held < 0.96
    assert bar.high / bar.low == pytest.approx(np.exp(2 * 1.645 * 0.1 * 2**0.5), rel=0.15)
    rows = bars.held_back(found)
    proof = bars.coverage(rows, 1.0)
    assert proof["n"] == 800 and abs(proof["runs"] - 0.9) < 0.06 and len(proof["by_source"]) == 40


def test_few_sources_and_unseen_kinds_get_wider_bars() -> None:
    found = [*made(30, 10, 0.05, 3), *made(2, 10, 0.01, 4, code_base="b"), *made(20, 10, 0.3, 5, kind="adapters")]
    table = bars.build(found)
    few, around = (error_bars.choose(table, name, "Hopper", "dense") for name in ("b", "never seen"))
    assert (few.sources, few.code_base, around.code_base) == (2, "b", "")
    assert few.low <= around.low and few.high >= around.high
    unseen = error_bars.choose(table, "never", "seen", "low precision")
    assert unseen.code_base == unseen.arch == unseen.kind == "" and unseen.high > around.high


def test_bars_are_stretched_until_they_hold_what_they_promise() -> None:
    found = [*made(6, 40, 0.1, 6), *made(6, 40, 0.4, 7, code_base="b")]
    rows = bars.held_back(found)
    proof = bars.calibrated(rows)
    assert min(proof["runs"], proof["sources"]) >= bars.COVERAGE and proof["widen"] >= 1.0
    assert proof["widen"] == 1.0 or bars.coverage(rows, proof["widen"] - 0.05)["runs"] < proof["runs"]
    plain, wide = (bars.build(found, widen)[0] for widen in (1.0, 1.5))
    assert wide.high == pytest.approx(plain.high**1.5) and wide.low == pytest.approx(plain.low**1.5)
    outside = [row for row in rows if row.needed > proof["widen"]]
    for row in outside[:5]:
        low, high = np.log(row.bar.low) * proof["widen"], np.log(row.bar.high) * proof["widen"]
        assert not low <= row.residual.value <= high


def test_one_source_with_many_runs_does_not_drown_the_others() -> None:
    loud = [Residual(source="loud", code_base="a", arch="Hopper", kind="dense", value=0.0)] * 5000
    quiet = [Residual(source=str(n), code_base="a", arch="Hopper", kind="dense", value=0.2) for n in range(20)]
    assert error_bars.choose(bars.build([*loud, *quiet]), "a", "Hopper", "dense").high == pytest.approx(np.exp(0.2))


def test_weighted_quantile_is_the_middle_of_equal_weights() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert bars.quantile(values, np.ones(3), 0.5) == 2.0
    assert bars.quantile(values, np.array([8.0, 1.0, 1.0]), 0.5) == pytest.approx(2.8, abs=0.2)


def test_kinds_of_runs() -> None:
    hardware = load_hardware("h100-sxm")

    def kind(model: str, usual: float = hardware.network_bandwidth, **changes: Any) -> str:
        work = Workload(model=load_model(model), sequence_length=4096, global_batch_size=8, **changes)
        return error_bars.kind_of(work, hardware, usual)

    assert kind("llama-8b") == "dense"
    assert kind("llama-8b", precision="fp8") == "low precision"
    assert kind("llama-8b", lora_rank=8) == "adapters"
    assert kind("deepseek-v3", precision="fp8") == "mixture of experts"
    assert kind("llama-8b", usual=3 * hardware.network_bandwidth) == "slow network"


def test_shipped_table_answers_every_trainer() -> None:
    hardware = load_hardware("h100-sxm")
    for name in library.names("trainers"):
        for quantity in error_bars.QUANTITIES:
            bar = error_bars.error_bar(quantity, load_trainer(name), hardware, "dense")
            low, high = bar.interval(10.0)
            assert low <= 10.0 <= high and str(bar.runs) in bar.basis and bar.sources >= bars.FEWEST


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step_time: []", "step_time: the last entry must stand for all runs"),
        ("step_time: 3", "step_time is 3; it must be a list"),
        ("step_time: [{low: 0.9}]", "missing keys 'high', 'runs', 'sources'"),
        ("step_time: [{low: 1.1, high: 1.2, runs: 1, sources: 1}]", "low is 1.1; it must be a number above 0"),
        ("step_time: [{low: 0.9, high: 0.95, runs: 1, sources: 1}]", "high is 0.95; it must be a number from 1"),
        (
            "step_time: [{kind: dense, low: 0.9, high: 1.2, runs: 1, sources: 1}]",
            "the last entry must stand for all runs",
        ),
    ],
)
def test_broken_tables(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bars.yaml"
    path.write_text(text)
    with pytest.raises(PlannerError, match=sentence):
        error_bars.read(path)
