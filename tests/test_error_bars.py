"""Error bars: where the residuals of a class lie, and what that promises about campaigns that were never seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import error_bars, library
from planner.cost.refine import price_exactly
from planner.defaults import Request, resolve
from planner.error_bars import FINE_TUNING, OWN_RUN, PRE_TRAINING, ErrorBar, Kind, choose
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.options import unstated
from planner.questions.accuracy.prediction import grouped
from planner.trainer import load_trainer
from planner.workload import Workload
from tools.evidence import bars
from tools.evidence.bars import Residual


def made(campaigns: int, seed: int, between: float = 0.1, within: float = 0.1, **named: str) -> list[Residual]:
    """Residuals of campaigns with one to three sources: a shift per campaign and scatter inside it, both normal.

    One campaign in three is of fine-tuning, with twice the spread; there are two codes on two generations.
    """
    rng, found = np.random.default_rng(seed), []
    for number in range(campaigns):
        tuned = number % 3 == 0
        names = {
            "model": "dense",
            "user": FINE_TUNING if tuned else PRE_TRAINING,
            "code_base": "ab"[number % 2],
            "arch": "xy"[number // 2 % 2],
        }
        names |= named
        shift, spread = rng.normal(0.0, (1 + tuned) * between), (1 + tuned) * within
        for source in range(rng.integers(1, 4)):
            for value in rng.normal(shift, spread, rng.integers(1, 20)):
                found.append(
                    Residual(
                        source=f"{seed}-{number}-{source}", campaign=f"{seed}-{number}", value=float(value), **names
                    )
                )
    return found


def proof_of(found: list[Residual]) -> tuple[dict[str, Any], tuple[ErrorBar, ...]]:
    rows = bars.held_back(found)
    tails = bars.tails_of(rows)
    return bars.coverage(rows, tails), bars.build(found, tails)


@pytest.mark.proof
def test_bars_hold_campaigns_they_have_not_seen() -> None:
    """Known variances: nine of ten runs of new campaigns lie inside, and the proof on campaigns left out says so."""
    held, said, widths = [], [], []
    for seed in range(6):
        proof, table = proof_of(made(36, seed))
        said.append(proof["sources"])
        for members in grouped(made(120, 100 + seed), lambda one: one.classes[-1]).values():
            bar = choose(table, members[0].classes[-1])
            held += [bar.low <= np.exp(one.value) <= bar.high for one in members]
        bar = choose(table, (PRE_TRAINING, "a", "dense", "x"))
        widths.append(np.log(bar.high / bar.low))
    assert abs(np.mean(held) - 0.9) < 0.02 and abs(np.mean(said) - 0.91) < 0.01
    assert 1.0 < np.mean(widths) / (2 * 1.645 * 0.1 * 2**0.5) < 1.4  # drawn to the wider one of fine-tuning


def test_the_proof_has_no_leak() -> None:
    """What a campaign that is left out measured changes nothing of the bars that judge it."""
    found = made(12, 1)
    mine = found[0].campaign
    other = [dataclasses.replace(one, value=one.value + 3.0) if one.campaign == mine else one for one in found]
    before, after = ([row for row in bars.held_back(some) if row.residual.campaign == mine] for some in (found, other))
    assert [row.spread for row in before] == [row.spread for row in after] and before
    assert all(np.array_equal(a.others[0], b.others[0]) for a, b in zip(before, after, strict=True))
    (low,), (high,) = (ends[:, 0] for ends in bars.limits(after, [0.05]))
    assert not low <= after[0].residual.value <= high


def test_few_campaigns_lie_near_the_class_around_them() -> None:
    """One campaign that was met to a thousandth does not make a narrow bar; an unknown code has that of its kind."""
    exact = made(1, 7, 1e-3, 1e-3, user=PRE_TRAINING, code_base="new")
    _, table = proof_of([*made(30, 3), *exact])
    few, around = (choose(table, (PRE_TRAINING, code, "dense", "x")) for code in ("new", "never seen"))
    assert few.code_base == "new" and (around.user, around.code_base) == (PRE_TRAINING, "")
    assert np.log(few.high / few.low) > 0.7 * np.log(around.high / around.low)
    fine = choose(table, (FINE_TUNING, "never seen", "dense", "x"))
    assert fine.high / fine.low > 1.2 * around.high / around.low
    nobody = choose(table, ("another user", "a", "dense", "x"))
    assert (nobody.user, nobody.code_base, nobody.arch) == ("", "", "")


def test_spreads_are_those_of_the_equations() -> None:
    """Two campaigns at 0.1 and 0.3, one of them with code b: m and s^2 of all, of the kind and of the code by hand."""

    def one(campaign: str, code: str, value: float) -> Residual:
        return Residual(source=campaign, campaign=campaign, user="k", code_base=code, model="m", arch="x", value=value)

    spreads = bars.Evidence([one("1", "a", 0.1), one("2", "b", 0.2), one("2", "b", 0.4)]).spreads(frozenset())
    m, square = 0.2, ((0.1 - 0.2) ** 2 + (0.0**2 + 0.2**2) / 2) / 2
    assert spreads[()].centre == pytest.approx(m) and spreads[()].scale ** 2 == pytest.approx(square)
    kind = spreads["k",]
    assert kind.centre == pytest.approx(0.2) and kind.scale**2 == pytest.approx(square)
    centre = (0.3 + bars.POOL * 0.2) / (1 + bars.POOL)
    own = ((0.2 - centre) ** 2 + (0.4 - centre) ** 2) / 2
    assert spreads["k", "b"].centre == pytest.approx(centre)
    assert spreads["k", "b"].scale ** 2 == pytest.approx((own + bars.POOL * square) / (1 + bars.POOL))


def test_no_interval_leaves_out_three_percent() -> None:
    _, table = proof_of(made(20, 5, 1e-4, 1e-4))
    assert all(bar.low <= 0.97 + 1e-9 and bar.high >= 1.03 - 1e-9 for bar in table)


def test_what_is_not_stated_widens() -> None:
    bar = ErrorBar(low=0.8, middle=1.0, high=1.25, bulk=0.1, runs=1, sources=1)
    same = bar.widened([])
    assert (same.low, same.high) == (pytest.approx(bar.low), pytest.approx(bar.high))
    wide = bar.widened([1.25, 1.1, 0.9])
    assert wide.high == pytest.approx(
        np.exp(np.sqrt(np.log(1.25) ** 2 + 0.25 * 1.645**2 * (np.log(1.25) ** 2 + np.log(1.1) ** 2)))
    )
    assert wide.low == pytest.approx(np.exp(-np.hypot(np.log(0.8), 0.5 * 1.645 * np.log(0.9))))


def test_one_source_with_many_runs_does_not_drown_the_others() -> None:
    def one(name: str, value: float) -> Residual:
        return Residual(source=name, campaign=name, user="k", code_base="a", model="m", arch="x", value=value)

    spreads = bars.Evidence([*[one("loud", 0.0)] * 5000, *(one(str(n), 0.2) for n in range(19))]).spreads(frozenset())
    assert spreads["k",].centre == pytest.approx(0.19)


def test_weighted_quantile_is_the_middle_of_equal_weights() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert bars.quantiles(values, np.ones(3), [0.5]) == pytest.approx([2.0])
    assert bars.quantiles(values, np.array([8.0, 1.0, 1.0]), [0.5]) == pytest.approx([2.8], abs=0.2)


def test_kinds_of_runs() -> None:
    def kind(model: str = "llama-8b", user: str = "", trainer: str = "megatron", **changes: Any) -> Kind:
        work = Workload(model=load_model(model), sequence_length=4096, global_batch_size=8, **changes)
        return error_bars.kind_of(work, load_trainer(trainer), user)

    assert kind() == (PRE_TRAINING, "dense") and kind(lora_rank=8) == (FINE_TUNING, "dense")
    assert kind(trainer="torchtune") == (FINE_TUNING, "dense")
    assert kind("deepseek-v3", user=OWN_RUN) == (OWN_RUN, "mixture of experts")


def test_shipped_table_answers_every_trainer() -> None:
    hardware = load_hardware("h100-sxm")
    for name in library.names("trainers"):
        for quantity in error_bars.QUANTITIES:
            for user in error_bars.KINDS:
                bar = error_bars.error_bar(quantity, load_trainer(name), hardware, Kind(user, "dense"))
                low, high = bar.interval(10.0)
                assert low <= 9.7 and high >= 10.3 and str(bar.runs) in bar.basis and bar.low < bar.middle < bar.high
    held = error_bars.held_by_kind("step_time")
    assert set(held) == {"sources", *error_bars.KINDS} and 0.85 < held["sources"] < 0.96


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step_time: []", "step_time: the last entry must stand for all runs"),
        ("step_time: 3", "step_time is 3; it must be a list"),
        ("step_time: [{low: 0.9}]", "missing keys 'middle', 'high', 'bulk', 'runs', 'sources'"),
        (
            "step_time: [{low: 1.1, middle: 1.0, high: 1.2, bulk: 0.1, runs: 1, sources: 1}]",
            "low is 1.1; it must be a number above 0",
        ),
        (
            "step_time: [{low: 0.9, middle: 1.0, high: 0.95, bulk: 0.1, runs: 1, sources: 1}]",
            "high is 0.95; it must be a number from 1",
        ),
        (
            "step_time: [{user: pre-training, low: 0.9, middle: 1.0, high: 1.2, bulk: 0.1, runs: 1, sources: 1}]",
            "the last entry must stand for all runs",
        ),
    ],
)
def test_broken_tables(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bars.yaml"
    path.write_text(text)
    with pytest.raises(PlannerError, match=sentence):
        error_bars.read(path)


def test_options_that_nobody_stated_widen_the_interval_of_a_plan() -> None:
    """Priced with either value: stating all of them leaves the bar as it is; the bar of a mixture is never narrower."""
    found = resolve(Request(model="llama-8b", num_gpus=16, hardware="h100-sxm", global_batch_size=64))
    layout = Layout(tp=2, pp=2, dp=4, num_microbatches=16, sequence_parallel=1, zero=1)
    job = found.job
    (stated,) = unstated(job, [layout], set(job.trainer.choices.options)).ratios()
    (open_,) = found.unstated([layout]).ratios()
    assert not stated["step_time"] and any(abs(ratio - 1.0) > 0.01 for ratio in open_["step_time"])
    (price,) = price_exactly(job.workload, job.cluster, job.trainer, [layout])
    plain, wide = (found.plan(layout, price, "", ratios).prediction for ratios in (stated, open_))
    low, high = error_bars.error_bar("step_time", job.trainer, job.cluster.hardware, found.kind).interval(
        plain.step_time_s
    )
    assert plain.step_time_range_s == pytest.approx((low, high))
    assert wide.step_time_range_s[0] <= low and wide.step_time_range_s[1] >= high
    assert wide.step_time_range_s != pytest.approx((low, high), rel=1e-3)
    assert wide.first_runs_s == plain.first_runs_s and plain.first_runs_s is not None
