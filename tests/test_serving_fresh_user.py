"""What a user types first of serving: versions as packages spell them, an engine said twice, small rates, full servers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from serve_samples import served

import planner
from planner.commands.main import main
from planner.errors import PlannerError
from planner.serving import load
from planner.serving.engine import load_engine
from planner.serving.engine_passes import Engine
from planner.serving.readback.serve_reading import ServeSaid, read_serving
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import ServeRequest, ask
from planner.serving.serving_search import priced
from planner.serving.traffic import Lengths, Traffic
from planner.trainers.reading.given import Given

ESTIMATE = ["serve", "estimate", "--model", "llama-8b", "--gpus", "1", "--hardware", "h100", "--tp", "1"]


def run(*words: str) -> str:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("said", "label"),
    [
        ("vllm@v0.11.0", "vllm@0.11.0"), ("vllm@0.11.0+cu128", "vllm@0.11.0"), ("vllm@0.9.2.dev15", "vllm@0.9.2"),
        ("sglang@v0.5.9.post1-cu126", "sglang@0.5.9.post1"), ("trtllm@1.2.0rc4", "trtllm@1.2.0rc4"),
    ],
)  # fmt: skip
def test_a_version_of_a_package_or_an_image_is_that_of_its_plans(said: str, label: str, tmp_path: Path) -> None:
    """A plan for vllm@v0.11.0 was written and then refused by the reader of plans."""
    assert load_engine(said).label == label
    file = str(tmp_path / "serve.yaml")
    run(*ESTIMATE, "--engine", said, "--output", file)
    assert label.replace("@", " ") in run("serve", "estimate", file)


def test_latest_is_the_newest_and_a_number_alone_is_no_version() -> None:
    assert load_engine("sglang@latest") == load_engine("sglang")
    with pytest.raises(PlannerError, match="'99' is none like 1.2; write vllm@"):
        load_engine("vllm@99")


def test_an_engine_said_twice_is_searched_once() -> None:
    once = run("serve", "--model", "llama-8b", "--gpus", "1", "--hardware", "h100", "--engine", "vllm", "--top", "9")
    twice = run(
        "serve", "--model", "llama-8b", "--gpus", "1", "--hardware", "h100", "--engine", "vllm,vLLM", "--top", "9"
    )
    assert once.count("offline") == twice.count("offline")


def test_a_rare_request_has_no_rate_of_zero_and_no_powers_of_ten() -> None:
    """5/h was "0 output tokens/s; $4.3e+04 per million"."""
    said = run(*ESTIMATE, "--rate", "5/h")
    assert "0.356 output tokens/s" in said and "e+0" not in said and "0 to 0" not in said


def test_a_change_takes_the_flags_that_the_question_has() -> None:
    """--network was a flag of ``plan serve`` and unknown to its what-if."""
    said = run(
        "serve",
        "what-if",
        "--model",
        "llama-8b",
        "--gpus",
        "2",
        "--engine",
        "vllm",
        "--network",
        "400 Gb/s",
        "--rate",
        "2/s",
    )
    assert "llama-3.1-8b on 2 x" in said


@pytest.mark.proof
def test_the_limit_that_aggregated_ones_miss_is_said_once() -> None:
    """Was "the best aggregated one, sglang tp 1 pp 2 x 19, does not: does not keep up"."""
    said = run(
        "serve",
        "--model",
        "llama-70b",
        "--gpus",
        "38",
        "--rate",
        "50/s",
        "--ttft",
        "1s",
        "--tpot",
        "50ms",
        "--hardware",
        "h100",
    )
    assert "does not: does not" not in said and "does not keep up with 50 requests/s" in " ".join(said.split())


def test_of_what_does_not_keep_up_the_nearest_comes_first_with_by_how_much() -> None:
    found = planner.serve(model="llama-70b", gpus=8, rate="11/s", disaggregated=False, top=100).found
    answered = [one.prediction.requests_per_second for one in found.best if one.prediction]
    assert not found.kept and len(answered) > 10 and answered == sorted(answered, reverse=True)
    asked = ask(ServeRequest(model="llama-70b", gpus=8, rate=11, disaggregated=False))
    every = [priced(one, asked.task)["requests"] for one in asked.served()]
    assert answered[0] == pytest.approx(max(float(np.max(one)) for one in every))
    few = 100.0 * (1.0 - answered[0] / 11.0)
    assert found.best[0].why == f"does not keep up with 11 requests/s: it answers {answered[0]:.3g}, {few:.2g} % too few."


def test_the_fewest_gpus_that_serve_a_load_are_a_way_out() -> None:
    asked: dict[str, Any] = {"model": "llama-70b", "engine": "vllm", "rate": "50/s"}
    ways = planner.serve(**asked, gpus=2).ways
    fewest = planner.serve(**asked, fewest_gpus=True).found.question.gpus
    assert fewest > 16 and f"--gpus {fewest}" in [one.flag for one in ways]


def test_two_pools_that_miss_a_limit_are_the_nearest_and_leave_room_for_each_other() -> None:
    """The quickest workers for prompts took all GPUs, and no split was "legal"."""
    words = ["serve", "--model", "llama-70b", "--gpus", "8", "--disaggregated", "--ttft", "100ms", "--tpot", "30ms"]
    result = CliRunner().invoke(main, words)
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and re.search(r"At the limits: TTFT [\d.]+ ms is [\d.]+ times the limit of 100 ms\.", said)


@pytest.mark.parametrize(("hardware", "model"), [("t4", "qwen2.5-1.5b"), ("v100", "llama-8b")])
def test_a_card_without_bf16_serves_in_fp16_as_the_engines_do(hardware: str, model: str) -> None:
    """vLLM and SGLang load bf16 weights as fp16 there and say so; the question ended in "does not run bf16 weights"."""
    said = run("serve", "--model", model, "--gpus", "1", "--hardware", hardware)
    assert "fp16" in said and "has no bf16" in said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_who_waits_for_a_place_of_a_closed_loop_waits_as_long_as_the_others(engine: str) -> None:
    """N requests for B places: each waits for the N - B ahead of it, (N - B) / X; it was spread as if it arrived at random."""
    what, layout = served(engine=engine, weights="bf16"), ServingLayout(tp=8, max_batch=64, max_tokens=8192)
    traffic = Traffic(input=Lengths.uniform(1638, 2458), output=Lengths.uniform(205, 307), value=256.0)
    full, found = (estimate(what, layout, replace(traffic, value=value)) for value in (64.0, 256.0))
    late = 192.0 / float(found.requests_per_second)
    for figure in ("mean", "p50", "p90", "p99"):
        assert float(found.ttft.of(figure)) == pytest.approx(float(full.ttft.of(figure)) + late, rel=1e-6)
    flow = load.closed(Engine(what, layout, traffic), 256.0, 64.0)
    assert float(flow.late) == pytest.approx(late)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("value", [1.0, 4.0, 64.0])
def test_the_law_of_little_holds_where_prompts_are_the_limit(engine: str, value: float) -> None:
    """N = X (TTFT + (O - 1) TPOT): with answers of 16 tokens 3.4 of 4 requests were in flight."""
    what, layout = (
        served("qwen3-32b", "h200-sxm", engine, "bf16"),
        ServingLayout(tp=1, max_batch=64, max_tokens=8192),
    )
    traffic = Traffic(input=Lengths.uniform(6554, 9830), output=Lengths.uniform(13, 19), value=value)
    engine = Engine(what, layout, traffic)
    flow = load.closed(engine, value, 64.0)
    assert float(flow.rate * (flow.ttft + engine.client + 15.0 * flow.tpot)) == pytest.approx(value, rel=0.02)


def test_a_config_of_drafts_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    """A shell takes the quotation marks of JSON that is not quoted, and the engine does not start with what is left."""
    script = tmp_path / "serve.sh"
    script.write_text(
        'vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config={"method":"eagle3","num_speculative_tokens":3}\n'
    )
    with pytest.raises(PlannerError, match="speculative_config .* is no mapping in JSON; quote it"):
        read_serving(script, ServeSaid(), Given(settings={}))
    script.write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config none\n")
    assert read_serving(script, ServeSaid(), Given(settings={})).plan.traffic.speculation is None


def test_what_one_deployment_assumes_is_listed() -> None:
    assumed = {one.what: one for one in planner.serve_estimate(model="llama-8b", gpus=2).file.assumptions}
    assert assumed["engine"].value.startswith("vllm ") and assumed["load"].value == "64 requests in flight"
    said = {one.what for one in planner.serve_estimate(model="llama-8b", gpus=2, engine="sglang", rate="5/s").file.assumptions}
    assert not said & {"engine", "load"}


def test_what_breaks_a_limit_is_not_among_the_best_where_something_keeps_it() -> None:
    """At 14 ms of TPOT sglang's 14.2 ms is no third of the best: it is left out, and is not what the first counts as equal to."""
    limits = {"rate": "2/s", "ttft": "300ms", "tpot": "14ms"}
    found = planner.serve(model="llama-70b", gpus=8, hardware="h100-sxm", **limits)
    assert [plan.file.keeps_limits for plan in found] == [True, True] and "The next counts as equal" in found[0].why
    with pytest.raises(PlannerError, match=r"the nearest: TPOT 12 ms is 11\.95 times the limit of 1 ms"):
        print(planner.serve(model="llama-70b", gpus=8, hardware="h100-sxm", **limits | {"tpot": "1ms"})[0].why)


def test_a_split_that_no_engine_runs_is_refused_once() -> None:
    with pytest.raises(PlannerError) as refused:
        planner.serve(model="llama-8b", gpus=8, hardware="h100-sxm", tp=3)
    said = str(refused.value)
    assert said.count("does not divide the 32 heads") == 1 and "sglang, trtllm, vllm: tp 3 does not divide the 32 heads" in said
