"""Sensitivity: every flip is where a search before it and one behind it disagree; ties are counted, not assumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from planner.cost.refine import price_exactly
from planner.defaults import Request, ResolvedJob, resolve
from planner.questions import best_plan as best
from planner.questions.best_plan import best_of
from planner.questions.sensitivity.numbers import Flip, Sensitivity, sensitivity
from planner.questions.sensitivity.quantities import QUANTITIES, relevant
from planner.questions.sensitivity.show import ROOM, readings_table
from planner.search import plan_key
from planner.ties import shipped_ties
from tests.samples import MODELS
from tools.evidence.ties import Ordered, build, isotonic


def step_times(job: Any, layouts: list[Any]) -> list[float]:
    """Seconds of some layouts, refined as the search's finalists are priced."""
    return [float(one.step_time[0]) for one in price_exactly(job.workload, job.cluster, job.trainer, layouts)]


def resolved(**changes: Any) -> ResolvedJob:
    request: dict[str, Any] = {"model": MODELS["gqa"], "hardware": "h100-sxm", "num_gpus": 32, "global_batch_size": 64}
    return resolve(Request(**{**request, **changes}))


def hanging() -> ResolvedJob:
    """A job whose best plan hangs on several numbers."""
    return resolved(model="llama-8b", num_gpus=4, global_batch_size=32, trainer="torchtitan")


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    return sensitivity(hanging())


def winner_takes(job: ResolvedJob, found: Sensitivity, key: str, factor: float) -> tuple[bool, float]:
    """Whether today's choice still wins at a factor, and how much longer it takes than the best plan there."""
    [quantity] = [one for one in QUANTITIES if one.key == key]
    moved = quantity.scale(job, factor)
    there = best_of(moved)
    assert there.layout is not None and there.prediction is not None and found.best.layout is not None
    [mine] = step_times(moved.job, [found.best.layout])
    same = plan_key(there.layout) == plan_key(found.best.layout)
    return same or mine <= there.prediction.step_time_s, mine / there.prediction.step_time_s - 1.0


@pytest.mark.proof
def test_flips_lie_between_two_searches_that_disagree(found: Sensitivity) -> None:
    job = hanging()
    flips = [
        (one.quantity.key, flip) for one in found.readings for flip in (one.down, one.up)
        if flip.factor is not None and flip.loss is not None
    ]  # fmt: skip
    assert len(flips) >= 3, "the job of this test should hang on something"
    for key, flip in flips:
        assert flip.factor is not None and flip.layout is not None
        outward = 1.02 if flip.factor > 1 else 0.98
        assert winner_takes(job, found, key, flip.factor / outward)[0], f"{key}: wins before its flip at {flip.factor}"
        kept, loss = winner_takes(job, found, key, flip.factor * outward)
        assert not kept and loss > 0, f"{key}: loses behind its flip at {flip.factor}"
        assert winner_takes(job, found, key, flip.reach)[1] == pytest.approx(flip.loss)
    stakes = [one.stake for one in found.readings]
    assert stakes == sorted(stakes, reverse=True)


@pytest.mark.proof
def test_what_does_not_flip_at_the_end_does_not_flip_on_the_way(found: Sensitivity) -> None:
    job, calm = hanging(), 0
    for one in found.readings:
        for flip in (one.down, one.up):
            if flip.factor is None and abs(math.log(flip.reach)) > 0.01 and one.quantity.key != "usable_memory":
                calm += 1
                assert winner_takes(job, found, one.quantity.key, math.sqrt(flip.reach))[0]
    assert calm >= 4


def test_only_what_can_matter_is_looked_at() -> None:
    inside = {one.key for one in relevant(resolved(num_gpus=8), offloads=False)}
    assert not {"network", "network_latency"} & inside and "scale_up" in inside
    assert "scale_up" not in {one.key for one in relevant(resolved(num_gpus=1), offloads=False)}
    assert {one.key for one in relevant(resolved(), offloads=True)} == {one.key for one in QUANTITIES}
    assert not any(one.offload for one in relevant(resolved(), offloads=False)) and any(
        one.offload for one in QUANTITIES
    )


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda one: one.key)
def test_every_quantity_moves_something_and_one_is_no_change(quantity: Any) -> None:
    job = resolved(num_gpus=64)
    layout = best_of(job).layout
    assert layout is not None
    layout = layout.replace(offload_optimizer=100) if quantity.offload else layout

    def step(factor: float) -> float:
        return step_times(quantity.scale(job, factor).job, [layout])[0]

    assert step(1.0) == pytest.approx(step_times(job.job, [layout])[0], rel=1e-12)
    if quantity.unit == "size":
        hardware = quantity.scale(job, 2.0).job.cluster.hardware
        assert getattr(hardware, quantity.key) == 2.0 * getattr(job.job.cluster.hardware, quantity.key)
    elif quantity.unit == "rate":
        assert step(0.05) > step(1.0) >= step(2.0)
    else:
        assert step(0.5) <= step(1.0) <= step(4.0)
    assert quantity.most(job.job.cluster.hardware) >= 1.0 and quantity.origin(job.job.cluster.hardware)


def test_neighbours_are_equal_below_the_gap_that_sweeps_resolve(found: Sensitivity) -> None:
    gap = shipped_ties().equal_gap
    assert 0.01 < gap < 0.2
    assert found.neighbours and found.best.prediction is not None
    for one in found.neighbours:
        assert one.behind == pytest.approx(one.step_time_s / found.best.prediction.step_time_s - 1.0)
        assert one.equal == (math.log1p(one.behind) < gap)
        assert one.right == pytest.approx(shipped_ties().chance(math.log1p(one.behind)), rel=1e-12)
    assert [one.right for one in found.neighbours] == sorted(one.right for one in found.neighbours)


# ------------------------------------------------------------------------------------------------ ties


def test_isotonic_pools_what_falls() -> None:
    flat = isotonic(np.array([0.0, 1.0, 0.0, 1.0]), np.ones(4))
    assert flat == pytest.approx([0.0, 0.5, 0.5, 1.0])
    assert isotonic(np.array([1.0, 0.0]), np.array([3.0, 1.0])) == pytest.approx([0.75, 0.75])
    assert isotonic(np.array([0.2, 0.3]), np.ones(2)) == pytest.approx([0.2, 0.3])


def test_ties_by_hand() -> None:
    """Two sources with the same weight, though one has many more pairs: right in 3 of 4 below 0.1, always above."""
    small = [Ordered(source="a", sweep="a1", gap=0.05, right=right) for right in (True, False)]
    many = [Ordered(source="b", sweep="b1", gap=0.05, right=True) for _ in range(50)]
    far = [Ordered(source=source, sweep=f"{source}1", gap=0.12, right=True) for source in "ab"]
    counted = build([*small, *many, *far], "2026-01-02")
    assert (counted.pairs, counted.sweeps, counted.sources, counted.date) == (54, 2, 2, "2026-01-02")
    # weights: a1 1/3 for each of three pairs, b1 1/51 for each of 51: (1/3 + 50/51) / (2/3 + 50/51)
    assert counted.chance(0.05) == pytest.approx((1 / 3 + 50 / 51) / (2 / 3 + 50 / 51))
    assert counted.chance(0.12) == 1.0 and counted.chance(-0.05) == counted.chance(0.05)
    share = (0.8 - counted.chance(0.08)) / (counted.chance(0.12) - counted.chance(0.08))
    assert counted.chance(0.08) == counted.chance(0.05)  # nothing was measured in between
    assert counted.equal_gap == pytest.approx(0.08 + 0.04 * share, abs=1e-4)


# ------------------------------------------------------------------------------------------------ the command


def test_json_holds_what_the_table_shows(run: Any) -> None:
    arguments = ("sensitivity", "--model", "llama-3.2-1b", "--gpus", "8", "--global-batch-size", "64", "--reach", "1.5")
    document = json.loads(run(*arguments, "--json").stdout)
    table = run(*arguments).stdout
    assert document["complete"] is True and document["layout"] in table.replace("\n", " ").replace("  ", " ")
    rows = {line.split("  ")[0].strip(): line for line in table.splitlines() if line.startswith(" ")}
    for reading in document["readings"]:
        for side in ("down", "up"):
            if reading[side]["factor"] is not None:
                assert f"x{reading[side]['factor']:.3f}" in rows[reading["what"]]
    for one in document["neighbours"]:
        assert (f"{100 * one['behind']:.1f} % behind" in table) == (one["equal"] and one["behind"] >= 0.001) or one[
            "behind"
        ] < 0.001
    assert "20 steps" in document["test"] or "plan validate" in document["test"]


def test_wrong_input_is_one_sentence(run: Any, tmp_path: Any) -> None:
    for arguments, sentence in (
        ((), "which job?"),
        (("--model", "llama-70b", "--gpus", "1"), "nothing fits, so there is no choice"),
        (("--model", "llama-8b", "--gpus", "8", "--reach", "1"), "--reach is 1; it must be a factor above 1"),
        (("--model", "llama-8b", "--gpus", "8", "--reach", "nan"), "--reach is nan"),
    ):
        result = run("sensitivity", *arguments)
        assert result.exit_code == 2 and sentence in result.stderr and not result.stdout
    path = tmp_path / "plan.yaml"
    run("--model", "llama-3.2-1b", "--gpus", "1", "--output", str(path))
    assert "says the whole job" in run("sensitivity", str(path), "--gpus", "2").stderr


def test_ctrl_c_prints_the_numbers_that_were_looked_at(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    search = best.search

    def interrupted(*arguments: Any, **more: Any) -> Any:
        asked.append("search")
        if len(asked) > 4:
            raise KeyboardInterrupt
        return search(*arguments, **more)

    monkeypatch.setattr(best, "search", interrupted)
    result = run("sensitivity", "--model", "llama-3.2-1b", "--gpus", "8", "--global-batch-size", "64")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert "bandwidth inside a node" in result.stdout and "attention" not in result.stdout.split("Plans within")[0]


@pytest.mark.parametrize("width", [80, 100, 119, 120, 140])
def test_no_column_is_cut(found: Sensitivity, width: int) -> None:
    """The widest cells of the table are those of a choice that no longer fits where it was looked."""
    one = replace(found.readings[0], **{side: Flip(factor=0.851, reach=0.8, layout=None, loss=None, forced=0.058, fits=True)
                                        for side in ("down", "up")})  # fmt: skip
    out = StringIO()
    Console(width=width, file=out).print(readings_table(replace(found, readings=(one,)), width < ROOM))
    assert out.getvalue().count("no fit, 5.8 %") == out.getvalue().count("then loses") == 2
