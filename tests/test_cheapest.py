"""The cheapest hardware: what is not searched cannot be the cheapest, and closest attempts are those of a whole search."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
from quick_cases import proofs_but
from rich.console import Console
from samples import HARDWARE

import planner
from planner.cost.estimate import estimate
from planner.cost.price.layer_costs import ShapePrices
from planner.defaults import Request, ResolvedJob, resolve
from planner.layout import Layout
from planner.memory_attempts import memory_bounds
from planner.priced_layouts import SearchedJob
from planner.questions.best_plan import best_of
from planner.questions.what_if.show import print_what_if
from planner.rules import Job, allowed
from planner.search import Pins, closest, least_fitting_step, least_step, search
from planner.space import base_layouts, recompute_options

CARDS = ["h100-sxm", "rtx-4090", "mi325x", "l4", "a100-sxm-40gb", "v100-sxm2-16gb"]
ASKED: dict[str, Any] = {"model": "llama-3.2-1b", "gpus": 8, "global_batch_size": 64}


def asked(model: str, gpus: int, hardware: str, **more: Any) -> ResolvedJob:
    return resolve(Request(model=model, num_gpus=gpus, hardware=hardware, **more))


def with_memory(one: Job, share: float) -> Job:
    """The job on cards with a part of their memory."""
    hardware = one.cluster.hardware.scaled(usable_memory=share, memory=share)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=hardware))


@pytest.mark.parametrize(
    ("model", "gpus", "more"),
    [("llama-8b", 8, {}), pytest.param("mixtral-8x7b", 16, {}, marks=pytest.mark.proof),
     ("deepseek-v2-lite", 8, {"trainer": "torchtitan"}),
     ("llama-8b", 4, {"trainer": "trl", "lora_rank": 16}), ("llama-8b", 8, {"precision": "fp8"}), ("qwen2.5-vl-7b", 8, {}),
     ("nemotron-h-8b", 8, {})],
)  # fmt: skip
def test_no_step_is_shorter_than_its_computation(model: str, gpus: int, more: dict[str, Any]) -> None:
    """Of every legal layout without a memory limit, and not far below the fastest of them where links are fast."""
    one = asked(model, gpus, "h100-sxm", **more).job
    layouts = base_layouts(one, Pins())
    found = estimate(one.workload, one.cluster, one.trainer, layouts.take(allowed(one, layouts)))
    least = least_step(one)
    assert 0.5 < least / float(np.min(found.step_time)) <= 1.0
    assert least <= float(np.min(found.time["compute"])) * (1 + 1e-12)
    best = search(one, top=1)
    assert least <= float(best.estimates[0].step_time[0])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "gpus", "hardware", "trainer", "closer"),
    [("mixtral-8x7b", 16, "h100-sxm", "megatron", 0.999),
     ("deepseek-v3", 256, "rtx-4090", "megatron", 5.0),
     ("llama-70b", 64, "rtx-4090", "megatron", 1.02), ("deepseek-v2-lite", 8, "l40s", "torchtitan", 0.999)],
)  # fmt: skip
def test_no_plan_that_fits_is_faster_than_what_its_passes_wait_for(
    model: str, gpus: int, hardware: str, trainer: str, closer: float
) -> None:
    """A closer bound than computation alone, far where experts are exchanged over PCIe; no layout that fits is below it, nor the
    best plan, which may be split unevenly."""
    one = SearchedJob.of(asked(model, gpus, hardware, trainer=trainer).job)
    least, fitting = least_step(one), least_fitting_step(one)
    best = search(one, top=1)
    assert fitting >= closer * least and best.fit
    assert fitting <= float(best.estimates[0].step_time[0])
    plain = base_layouts(one, Pins())
    plain = plain.take(allowed(one, plain) & memory_bounds(one, Pins(), plain)[1])
    assert fitting <= float(np.min(estimate(one.workload, one.cluster, one.trainer, plain).step_time))
    assert least_fitting_step(SearchedJob.of(asked("llama-405b", 1, "l4").job)) == np.inf


def test_the_least_step_of_one_layout_is_its_computation() -> None:
    """One GPU and one way to use it: t c sum(blocks) / (b s) times the tokens of a step is the part of it that computes."""
    one = asked("llama-3.2-1b", 1, "h100-sxm", global_batch_size=8).job
    pins = Pins(values={"micro_batch_size": 2})
    found = estimate(one.workload, one.cluster, one.trainer, Layout(micro_batch_size=2, num_microbatches=4))
    assert least_step(one, pins) == pytest.approx(float(found.time["compute"][0]), rel=1e-12)
    assert least_step(one, Pins(values={"tp": 2})) == np.inf  # no layout


@pytest.mark.parametrize("model", proofs_but(["mixtral-8x7b"], ["llama-8b", "mixtral-8x7b", "qwen2.5-vl-7b"]))
def test_shapes_priced_before_are_those_priced_alone(model: str) -> None:
    """Whichever batches came first, with recompute or without, to the last bit."""
    one = asked(model, 8, "h100-sxm").job
    plain = base_layouts(one, Pins())
    plain = plain.take(allowed(one, plain))
    batches = [option.apply(plain.take(np.arange(0, len(plain), 7)), one.model) for option in recompute_options(one, Pins())]
    shapes = ShapePrices(one.workload, one.cluster, one.trainer)
    for batch in [batches[-2], plain.take(np.arange(5)), plain, *batches]:
        alone = estimate(one.workload, one.cluster, one.trainer, batch)
        found = estimate(one.workload, one.cluster, one.trainer, batch, shapes)
        for ours, theirs in ((found.time, alone.time), (found.memory, alone.memory), (found.hidden, alone.hidden)):
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "gpus", "hardware", "trainer", "share"),
    [("llama-70b", 8, "l4", "megatron", 1.0),
     ("llama-8b", 2, "h100-sxm", "megatron", 0.3),
     ("llama-8b", 2, "h100-sxm", "fsdp", 0.05),
     ("mixtral-8x7b", 8, "l40s", "megatron", 0.8),
     ("deepseek-v2-lite", 2, "a100-sxm-80gb", "torchtitan", 0.1)],
)  # fmt: skip
def test_closest_attempts_are_those_of_a_whole_search(
    model: str, gpus: int, hardware: str, trainer: str, share: float
) -> None:
    resolved = asked(model, gpus, hardware, trainer=trainer)
    one = with_memory(resolved.job, share)
    for top in (1, 5):
        every = search(one, top=top)
        quick = closest(one, None, top, search(one, top=top, only_fitting=True))
        assert not every.fit and not quick.fit and quick.layouts == every.layouts and quick.priced <= every.priced
        assert [float(a.memory_needed[0]) for a in quick.estimates] == [float(a.memory_needed[0]) for a in every.estimates]
    best = best_of(dataclasses.replace(resolved, job=one))
    assert best.layout == every.layouts[0] and not best.fits and best.why_not


def test_few_layouts_are_priced_where_nothing_can_fit() -> None:
    one = asked("mixtral-8x7b", 8, "l4").job
    assert closest(one, None, 1, search(one, top=1, only_fitting=True)).priced < 0.5 * search(one, top=1).priced


def test_the_cheapest_is_that_of_searching_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, each card is searched; else those that computation alone makes dearer are not, and their bound holds."""
    monkeypatch.setattr("planner.questions.what_if.numbers._priced", lambda flags: CARDS)
    said: list[str] = []
    quick = planner.what_if(**ASKED, cheapest=True, progress=said.append).found
    every = planner.what_if(**ASKED, cheapest=True, hardware=CARDS).found
    named = {row.hardware: row for row in every.rows[1:]}
    assert all(row.searched for row in every.rows) and set(named) == set(CARDS)
    rows = quick.rows[1:]
    assert rows[0].prediction == named[rows[0].hardware].prediction and rows[0].label == every.rows[1].label
    for row in rows:
        full = named[row.hardware]
        if row.searched:
            assert (row.prediction, row.layout, row.fits) == (full.prediction, full.layout, full.fits)
        elif full.fits:
            assert full.usd_per_million_tokens is not None and full.prediction is not None
            assert row.least_usd_per_million_tokens is not None and row.least_step_time_s is not None
            assert row.least_usd_per_million_tokens <= full.usd_per_million_tokens
            assert row.least_step_time_s <= full.prediction.step_time_s
            assert row.least_usd_per_million_tokens >= (rows[0].usd_per_million_tokens or 0.0)
    assert 1 <= sum(not row.searched for row in rows) < len(rows) - 1 and rows[-1].hardware == "v100-sxm2-16gb"
    assert [row.searched for row in rows] == [*sorted([row.searched for row in rows[:-1]], reverse=True), True]
    assert len(said) == len(CARDS) + 1 and said[1].endswith(", 1 of 6")


def test_a_card_is_left_when_its_fastest_layout_is_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts over PCIe: computation alone would be cheap enough, the exchange is not."""
    monkeypatch.setattr("planner.questions.what_if.numbers._priced", lambda flags: ["mi325x", "rtx-3090"])
    said = {"model": "mixtral-8x7b", "gpus": 64, "cheapest": True, "price": {"mi325x": 1.95, "rtx-3090": 0.2}}
    rows = {row.hardware: row for row in planner.what_if(**said).found.rows[1:]}
    card, best = rows["rtx-3090"], rows["mi325x"]
    least = least_step(asked("mixtral-8x7b", 64, "rtx-3090").job)
    assert not card.searched and card.least_step_time_s is not None and card.least_step_time_s > least
    assert "with any layout it costs at least" in card.why and best.fits


def test_cards_are_searched_from_the_closer_bound_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By computation alone an RTX 4090 would be the cheapest for DeepSeek-V3; what its passes wait for says that it is not, before
    anything on it is searched."""
    monkeypatch.setattr("planner.questions.what_if.numbers._priced", lambda flags: ["rtx-4090", "l40s", "mi325x"])
    searched: list[str] = []

    def counted(resolved: ResolvedJob, *more: Any, **named: Any) -> Any:
        searched.append(resolved.hardware)
        return best_of(resolved, *more, **named)

    monkeypatch.setattr("planner.questions.what_if.cheapest.best_of", counted)
    said: list[str] = []
    found = planner.what_if(model="deepseek-v3", gpus=256, cheapest=True, progress=said.append).found
    rows = {row.hardware: row for row in found.rows[1:]}
    assert searched == ["mi325x"] and rows["mi325x"].fits and not rows["rtx-4090"].searched
    assert "with any layout it costs at least" in rows["rtx-4090"].why and said[1].endswith("h100-sxm, 1 of 4")


def test_what_was_not_searched_is_no_verdict_in_json(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr("planner.questions.what_if.numbers._priced", lambda flags: CARDS)
    result = run("what-if", "--model", "llama-3.2-1b", "--gpus", "8", "--cheapest", "--json")
    assert result.exit_code == 0
    rows = {row["hardware"]: row for row in json.loads(result.stdout)["rows"][1:]}
    left = [row for row in rows.values() if not row["searched"]]
    assert left and all(row["fits"] is None and row["least_usd_per_million_tokens"] > 0 for row in left)
    assert rows["v100-sxm2-16gb"]["fits"] is False and rows["h100-sxm"]["fits"] is True
    assert rows["h100-sxm"]["least_usd_per_million_tokens"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_the_answer_comes_first_and_no_line_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.questions.what_if.numbers._priced", lambda flags: CARDS)
    found = planner.what_if(**ASKED, cheapest=True, tokens="1T").found
    console = Console(width=width, file=io.StringIO())
    print_what_if(console, found)
    text = console.file.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines()) and "…" not in text
    best, flat = found.rows[1], " ".join(text.split())
    assert f"Cheapest: {best.label}, " in flat and flat.index("Cheapest: ") < flat.index("Hardware by cost")
    assert " times that" in flat and ">= " in flat and "not searched" in flat and "Best plan each" not in flat
    assert flat.count("AWS us-east-1 on-demand") == 1, "a list of prices stands once"
    assert "v100-sxm2-16gb x 8: (Volta) has no flash attention kernel" in flat
    assert HARDWARE["h100-sxm"].prices[0].source in flat and "2.69-3.50" in flat
