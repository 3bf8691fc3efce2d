"""Several deployments next to each other: splits, changes, hardware by price, two pools."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_serving_search import SMALL, asked

import planner
from planner.errors import PlannerError
from planner.serving import fewest_gpus as fewest_gpus_module
from planner.serving import pool_search
from planner.serving.pool_search import pool_pairs
from planner.serving.serve_plan import load_serve_plan
from planner.serving.serving_question import ServeRequest, ask
from planner.serving.serving_search import chosen, splits

# ------------------------------------------------------------------------------------------------ several beside each other


def test_the_fewest_gpus_are_the_fewest() -> None:
    said = {**SMALL, "gpus": 8, "rate": "50/s", "ttft": "400ms", "tpot": "20ms", "weights": "bf16"}
    found = planner.serve(**said, fewest_gpus=True)
    number_of = found.found.question.gpus
    assert 1 < number_of < 8 and found[0].row.limits_kept and found[0].row.gpus == number_of
    assert not planner.serve(**{**said, "gpus": number_of - 1}, disaggregated=False)
    assert planner.serve(**{**said, "gpus": number_of + 1}, disaggregated=False)
    none = planner.serve(**{**said, "gpus": number_of - 1}, fewest_gpus=True)
    assert not none and f"--gpus {number_of}" in [one.flag for one in none.ways]
    assert none.found.question.assumptions[0].value == str(number_of - 1)


@pytest.mark.parametrize("said", [
    {"model": "llama-70b", "hardware": "l40s", "rate": "2/s", "ttft": "2s", "tpot": "100ms", "percentile": "p99"},
    {"model": "deepseek-v3", "hardware": "a100", "concurrency": 200, "ttft": "1s", "tpot": "60ms", "percentile": "p99"},
])  # fmt: skip
def test_no_smaller_number_of_gpus_serves_in_two_pools_and_every_larger_one_does(said: dict[str, Any]) -> None:
    """Workers of 64 GPUs that are a little faster took the place of those that fit: 64 to 72 served, 76 to 127 did not."""
    question = ask(ServeRequest(**said, engine="vllm", any_number=True))
    found = fewest_gpus_module.fewest_gpus(question)
    assert found is not None
    for gpus in range(2, found + 20):
        task = replace(question.task, gpus=gpus)
        kept = [np.any(pool_pairs(one, task)["score"] <= 1.0) for one in question.served()]
        assert any(kept) == (gpus >= found)


def test_how_far_the_cheapest_hardware_is_from_serving_is_said() -> None:
    found = planner.serve_cheapest("t4", model="llama-70b", rate="50/s", engine="vllm", disaggregated=False).found
    assert re.fullmatch(r"does not serve it on up to 1024 GPUs: does not keep up with 50 requests/s: it answers .* few\.",
                        found.rows[0].why_not)  # fmt: skip


@pytest.mark.parametrize(("limit", "said"), [(0.999, "0.1 % above the limit"), (0.5, "2.00 times the limit")])
def test_a_limit_that_is_all_but_kept_is_not_one_time_the_limit(limit: float, said: str) -> None:
    plan = planner.serve_estimate(**{**SMALL, "concurrency": 4})
    ttft = plan.file.prediction.latency("ttft")
    assert said in planner.serve_estimate(**{**SMALL, "concurrency": 4}, ttft=limit * ttft).why


def test_the_classic_comparison() -> None:
    """Llama 70B on 8 x A100: every split says what it does, and eight replicas why they cannot."""
    compared = planner.serve_compare(model="llama-70b", gpus=8, hardware="a100", engine="vllm")
    rows = {one["layout"]: one for one in compared.to_dict()["splits"]}
    assert {"tp 8", "tp 1 pp 4 x 2", "tp 4 pp 2", "tp 2 pp 4", "tp 1 x 8"} <= rows.keys()
    assert not rows["tp 1 x 8"]["runs"] and "GiB too much" in rows["tp 1 x 8"]["why_not"]
    running = [one["row"] for one in rows.values() if one["runs"]]
    assert len(running) == 9 and all(one["gpus"] == 8 for one in running)
    speeds = [one["tokens_per_second"] for one in running]
    assert speeds == sorted(speeds, reverse=True) and rows["tp 1 x 8"] == list(rows.values())[-1]
    shares = {name: rows[name]["row"]["communication_share"] for name in ("tp 8", "tp 4 pp 2", "tp 1 pp 8")}
    assert shares["tp 8"] > shares["tp 4 pp 2"] > shares["tp 1 pp 8"]
    text = str(compared)
    assert "tp 1 x 8: does not start" in text and all(name in text for name in rows)


def test_named_splits_and_those_that_break_a_rule() -> None:
    compared = planner.serve_compare(**{**SMALL, "gpus": 8}, splits=["tp=8", "tp 4 x2", "tp=3", "pp=40", "tp=8,pp=2"])
    rows = {one["layout"]: one for one in compared.to_dict()["splits"]}
    assert rows["tp 8"]["runs"] and rows["tp 4 x 2"]["runs"]
    assert "does not divide the 32 heads" in rows["tp 3 x 2"]["why_not"]
    assert rows["tp 8 pp 2"]["why_not"] == "takes 16 GPUs of 8" and not rows["tp 1 pp 40"]["runs"]
    for text in ("tp=", "height=3", "", "tp=2,tp=4"):
        with pytest.raises(PlannerError, match="split"):
            planner.serve_compare(**SMALL, splits=[text])


def test_one_thing_changed(tmp_path: Any) -> None:
    plan = planner.serve_estimate(**SMALL, tp=2, concurrency=16)
    plan.save(tmp_path / "serve.yaml")
    found = planner.serve_what_if(tmp_path / "serve.yaml", hardware="a100", weights="fp8", prefix_hit=0.5)
    rows = {one.change: one for one in found.found.rows}
    assert list(rows) == ["as it is", "hardware a100", "weights fp8", "prefix hit 0.5"]
    rate = {
        name: one.plan.prediction.output_tokens_per_second
        for name, one in rows.items()
        if one.plan and one.plan.prediction
    }
    assert rate["as it is"] > rate["hardware a100"] and rate["prefix hit 0.5"] > rate["as it is"]
    limited = planner.serve_what_if(**{**SMALL, "gpus": "1..2"}, tpot=["9ms", "20ms"]).found.rows
    assert [one.change for one in limited] == ["as it is", "gpus 2", "tpot 20ms"]
    with pytest.raises(PlannerError, match="objective is 'fast'"):
        planner.serve_what_if(plan, objective="fast")


@pytest.mark.proof
def test_quantised_formats_need_their_own_number_of_gpus() -> None:
    found = planner.serve(
        model="llama-70b", hardware="h100-sxm", engine="vllm", rate="10/s", tpot="60ms", fewest_gpus=True, top=1
    )
    others = found.found.others
    assert (
        others
        and all(one.gpus <= found[0].file.gpus for one in others)
        and min(one.gpus for one in others) < found[0].file.gpus
    )
    assert " GPUs " in str(found) and all(
        one.precision.weights != "bf16" or one.precision.cache == "fp8" for one in others
    )


@pytest.mark.proof
def test_the_cheapest_hardware_comes_first() -> None:
    said = {"model": "llama-8b", "engine": "vllm", "rate": "4/s", "tpot": "40ms", "disaggregated": False}
    rows = planner.serve_cheapest("h100-sxm", "l40s", **said).found.rows
    hourly = [one.question.rates.usd_per_gpu_hour * one.plan.gpus for one in rows if one.kept]
    assert len(hourly) == 2 and hourly == sorted(hourly) and rows[0].change == "l40s"
    with pytest.raises(PlannerError, match="which is cheapest for what"):
        planner.serve_cheapest("h100-sxm", model="llama-8b")


def test_what_would_serve_where_nothing_does(run: Any) -> None:
    flags = ("--model", "llama-70b", "--gpus", "1", "--hardware", "h100-sxm", "--engine", "vllm")
    done = run("serve", *flags, "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and not data["starts"] and not data["kept"]
    assert "does not start" in data["plans"][0]["plan"]["why"] and data["plans"][0]["row"]["tokens_per_second"] == 0
    assert {"fp8", "2 GPUs", "50 % on the host"} <= {one["change"] for one in data["would_serve"]}
    assert all(one["kept"] and one["row"]["usd_per_million_output"] > 0 for one in data["would_serve"])


# ------------------------------------------------------------------------------------------------ two pools


@pytest.mark.proof
def test_pools_are_set_beside_what_is_aggregated_under_the_same_limits() -> None:
    said = {**SMALL, "gpus": 8, "input": 8192, "ttft": "500ms", "tpot": "6.5ms", "weights": "bf16"}
    both, apart, none = (planner.serve(**said, disaggregated=value) for value in (None, True, False))
    assert apart[0].file.prefill is not None and none[0].file.prefill is None
    assert all(plan.file.num_gpus <= 8 for plan in both)
    best = max(one[0].row.tokens_per_second for one in (apart, none))
    assert both[0].row.tokens_per_second == best
    word = "wins" if apart[0].row.tokens_per_second > none[0].row.tokens_per_second else "loses"
    assert f"Disaggregated {word}" in str(both) and f"Disaggregated {word}" in str(apart)
    assert not none.found.pools_note


def test_pools_keep_littles_law_at_every_load() -> None:
    """Also where the pool of prompts is the bottleneck: what is in flight and in no pass waits for it."""
    question = asked(gpus=16, input=8192, disaggregated=True)
    table = pool_pairs(question.served()[0], question.task)
    output = question.task.traffic.output.mean
    inside = table["requests"] * (table["ttft"] + (output - 1.0) / table["user"])
    assert len(table) > 50 and inside == pytest.approx(table["load"], rel=0.02)
    for row in (0, len(table) // 2, len(table) - 1):
        [alone] = chosen(table, question.task, [row])
        assert alone.total == pytest.approx(table["total"][row], rel=1e-9) and alone.num_gpus <= 16


@pytest.mark.parametrize("limits", [{"ttft": "500ms", "tpot": "12ms"}, {"tpot": "8ms"}, {"ttft": "1s"}])
def test_pairs_that_are_left_out_are_no_better(monkeypatch: pytest.MonkeyPatch, limits: dict[str, str]) -> None:
    """Workers for prompts that would idle, and loads that they cannot keep up with, cost no throughput within the limits."""
    question = asked(gpus=16, input=4096, disaggregated=True, **limits)
    some = pool_pairs(question.served()[0], question.task)
    monkeypatch.setattr(pool_search, "_wanted", lambda busy: np.ones(busy.shape, dtype=bool))
    every = pool_pairs(question.served()[0], question.task)
    best, least = (float(np.max(one["total"], where=one["score"] <= 1.0, initial=0.0)) for one in (every, some))
    assert len(some) < 0.8 * len(every) and best > 0.0 and least == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize("limits", [{"ttft": "500ms", "tpot": "12ms"}, {"tpot": "8ms"}, {"ttft": "1s"}])
def test_pairs_that_cannot_reach_what_others_do_are_left_out(limits: dict[str, str]) -> None:
    """By what workers for prompts finish at most; no other pair."""
    question = asked(gpus=16, input=4096, disaggregated=True, **limits)
    one, task = question.served()[0], question.task
    every = pool_pairs(one, task)
    reached = np.sort(every["total"][every["score"] <= 1.0])
    for least in (0.8 * reached[-1], reached[-1]):
        some = pool_pairs(one, task, least)
        able = np.sort(some["total"][some["score"] <= 1.0])
        assert len(some) < 0.8 * len(every) and np.array_equal(able[able >= least], reached[reached >= least])
    none = pool_pairs(one, task, 100.0 * reached[-1])
    assert (len(none), none.fitting, none.legal) == (0, every.fitting, every.legal)


def test_a_stated_pair_of_pools(tmp_path: Any) -> None:
    said = {**SMALL, "gpus": 8, "tp": 2, "prefill": "tp=2,replicas=2", "rate": "2/s"}
    plan = planner.serve_estimate(**said)
    assert (plan.file.prefill.replicas, plan.file.layout.replicas, plan.file.num_gpus) == (2, 2, 8)
    plan.save(tmp_path / "pools.yaml")
    assert load_serve_plan(tmp_path / "pools.yaml") == plan.file and "tp 2 x 2 -> tp 2 x 2" in str(plan)
    with pytest.raises(PlannerError, match="the layout takes 8 \\+ 2 GPUs"):
        planner.serve_estimate(**{**said, "prefill": "tp=8"})


def test_a_load_that_the_search_chose_is_chosen_again() -> None:
    plan = planner.serve(**SMALL, weights="bf16", tpot="9ms", disaggregated=False)[0]
    assert plan.file.chosen_for == "limits"
    looser = planner.serve_what_if(plan, tpot=["20ms"]).found.rows
    first, second = (one.plan.prediction.output_tokens_per_second for one in looser if one.plan and one.plan.prediction)
    assert second > 1.2 * first
    stated = planner.serve_estimate(**SMALL, tp=2, concurrency=16)
    assert stated.file.chosen_for == "" and stated.file.traffic.value == 16
    assert [one.plan.traffic.value for one in planner.serve_what_if(stated, cache="fp8").found.rows if one.plan] == [
        16,
        16,
    ]


def test_an_interrupt_keeps_what_was_found(run: Any) -> None:
    def interrupted(text: str) -> None:
        if "8" in text:
            raise KeyboardInterrupt

    found = planner.serve_what_if(**{**SMALL, "weights": "bf16"}, cache=["bf16", "fp8"], progress=interrupted).found
    assert [one.change for one in found.rows] == ["as it is"] and not found.complete
    assert not planner.serve_cheapest(
        "h100-sxm", **{**SMALL, "gpus": 1, "hardware": None}, progress=lambda _: interrupted("8")
    ).found.complete


@pytest.mark.proof
@pytest.mark.parametrize("said", [
    {"rate": "150/s", "ttft": "1s"}, {"concurrency": 300, "tpot": "25ms"}, {"rate": "40/s", "layout": {"replicas": 3}},
    {"concurrency": 2, "layout": {"replicas": 5}},
])  # fmt: skip
def test_the_fewest_gpus_are_those_of_every_number_tried(said: dict[str, Any]) -> None:
    """Of each split alone, by trying one replica more at a time."""
    question = asked(model="qwen3-30b-a3b", hardware="h100-sxm", gpus=24, disaggregated=False, engine="vllm", **said)
    [one], task, tried = question.served(), question.task, list[int]()
    layout, _ = splits(one, task)
    for row in range(len(layout.tp)):
        size, pinned = int(np.asarray(layout.engine_gpus)[row]), task.pins.get("replicas")
        for copies in [pinned] if pinned else range(1, 24 // size + 1):
            if size * copies > 24:
                break
            single = replace(layout.take(np.array([row])), replicas=np.array([copies]))
            if fewest_gpus_module._serve(one, single, task)[0]:
                tried.append(size * copies)
                break
    assert tried and fewest_gpus_module.fewest_gpus(question) == min(tried)
