"""Serve plans: to YAML and back, and one sentence for whatever is wrong with a file."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.serving import serve_plan as files
from planner.serving.result import Flow, Quantiles, ServingEstimate, ServingMemory, StepTime
from planner.serving.serve_plan import EngineOptions, ServePlan, load_serve_plan, predict_serving
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Limits, Speculation, Traffic
from tests.serve_samples import sample_plan

GIB = 1024.0**3
STEADY = Flow(**dict.fromkeys(("ttft", "tpot", "wait", "rate", "running", "waiting", "prompt", "decode"), 0.0))


def estimate_of_two() -> ServingEstimate:
    """Columns of two deployments; the second has a queue without an end."""
    second = Quantiles(mean=np.array([0.2, math.inf]), p50=np.array([0.1, math.inf]), p90=0.3, p99=0.4)
    return ServingEstimate(
        ttft=second, tpot=second, itl=second, e2e=second, requests_per_second=np.array([1.0, 2.0]), output_tokens_per_second=3.0,
        total_tokens_per_second=4.0, running=5.0, waiting=np.array([0.0, math.inf]),
        step=StepTime(linear=1e-3, attention=2e-3, experts=0.0, memory_bound=0.0, communication=1e-4, head=0.0, host=0.0),
        memory=ServingMemory(
            weights=np.array([10 * GIB, 20 * GIB]), draft=0.0, activations=GIB, graphs=0.0, reserve=GIB, cache=2 * GIB,
            usable=79 * GIB, bytes_per_token=1e5, bytes_per_sequence=0.0, capacity=1e5,
        ),
        saturated=np.array([False, True]), fits=True, max_concurrency=7.0, preemption=0.0, flow=STEADY,
    )  # fmt: skip


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    pair = sample_plan(
        traffic=Traffic(
            input=Lengths.uniform(819, 1024), output=Lengths(mean=10, squared=300, longest=40), load="rate", value=2.5,
            speculation=Speculation(depth=3, acceptance=0.7), prefix_hit=0.25, waves=10,
        ),
        gpus=16, prefill=ServingLayout(tp=2, replicas=2, max_tokens=16384), limits=Limits(ttft=0.5, percentile="p99"),
        options=EngineOptions(memory_share=0.9, eager=True),
        prediction=predict_serving(estimate_of_two(), 1, {"tpot": (0.1, 0.3)}, "runs"),
        assumptions=(Assumption(what="price", value="2", why="the profile", flag="--price"),), why="fastest\nof all",
    )  # fmt: skip
    for plan in (pair, sample_plan()):
        plan.save(tmp_path / "serve.yaml")
        assert load_serve_plan(tmp_path / "serve.yaml") == plan
    assert set(pair.pools()) == {"prefill", "decode"} and pair.num_gpus == 4 + 8


def test_what_has_no_end_is_null_in_the_file() -> None:
    finite, endless = (predict_serving(estimate_of_two(), index) for index in (0, 1))
    assert (finite.ttft_s["mean"], finite.ttft_s["p99"], finite.latency("ttft")) == (0.2, 0.4, 0.2)
    assert endless.ttft_s["mean"] is None and endless.waiting is None and endless.latency("ttft") == math.inf
    assert (endless.saturated, finite.saturated) == (True, False)
    assert finite.memory_peak_gib == 14.0 and endless.memory_peak_gib == 24.0, "the parts add up"


@pytest.mark.parametrize(
    ("lengths", "data"),
    [(Lengths.fixed(128), 128), (Lengths.uniform(819.2, 1024), [819.2, 1024]), (Lengths.of([1, 1, 50]), None)],
)
def test_lengths_are_written_in_their_shortest_form(lengths: Lengths, data: Any) -> None:
    found = files.lengths_data(lengths)
    assert found == data or (data is None and set(found) == {"mean", "squared", "longest"})
    assert files.lengths_from(found, "x").squared == pytest.approx(lengths.squared)


BROKEN: list[tuple[str, Any, str]] = [
    ("planner_serve_plan", 9, "has version 9, this planner reads up to 1"),
    ("planner_serve_plan", None, "not a serve plan file"),
    ("engine", "vllm; rm -rf /", "engine is 'vllm; rm -rf /'; it must be one of vllm, sglang, trtllm"),
    ("engine", "tgi@3", "it must be one of vllm, sglang, trtllm"),
    ("hardware", "h100\n$(id)", "it must be a name"),
    ("gpus", 2, "the layout takes 8 GPUs, the plan has 2"),
    ("gpus", "8", "gpus is '8'; it must be a whole number from 1"),
    ("layout", {"tp": None}, "layout: tp is None; it must be a whole number"),
    ("layout", {"tp": [1, 2]}, "layout: tp is [1, 2]; it must be a whole number"),
    ("layout", {"tp": 0}, "layout: tp is 0"),
    ("layout", {"dp": 2}, "layout: unknown key 'dp'"),
    ("layout", None, "layout: expected a mapping"),
    ("precision", {"weights": "fp7"}, "weights is 'fp7'"),
    ("traffic", {"input": 5}, "traffic: missing key 'output'"),
    ("traffic", {"input": [9, 5], "output": 1}, "traffic: input: lengths go from 9 to 5"),
    ("traffic", {"input": "many", "output": 1}, "traffic: input: give a number of tokens"),
    ("traffic", {"input": True, "output": 1}, "traffic: input: give a number of tokens"),
    ("traffic", {"input": float("nan"), "output": 1}, "they must rise"),
    ("traffic", {"input": 1, "output": 1, "load": "poisson"}, "load is 'poisson'"),
    ("limits", {"percentile": "p95"}, "percentile is 'p95'"),
    ("limits", {"ttft": -1}, "ttft is -1"),
    ("options", {"memory_share": 1.5}, "memory_share is 1.5"),
    ("estimate", {"ttft_s": {}}, "estimate: missing keys"),
    ("why", "a\x1b[2Jb", "a text without control characters"),
    ("colour", "red", "unknown key 'colour'"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), BROKEN, ids=[f"{key}-{n}" for n, (key, *_) in enumerate(BROKEN)])
def test_a_damaged_file_is_one_sentence(key: str, value: Any, sentence: str, tmp_path: Path) -> None:
    data = copy.deepcopy(sample_plan().to_dict())
    data[key] = value
    (tmp_path / "serve.yaml").write_text(library.dump_yaml(data))
    with pytest.raises(PlannerError) as error:
        load_serve_plan(tmp_path / "serve.yaml")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_plan_holds_one_deployment() -> None:
    with pytest.raises(PlannerError, match="holds columns"):
        sample_plan(layout=ServingLayout(tp=np.array([1, 2])))


def test_the_longest_sequence_is_what_the_engine_is_told() -> None:
    assert sample_plan().longest == 1024 + 256
    assert sample_plan(options=EngineOptions(max_length=4096)).longest == 4096


def test_versions_of_engines_are_no_prose() -> None:
    for name in ("vllm", "vllm@0.33", "sglang@0.5.23.post1", "trtllm@1.3.0rc23"):
        assert sample_plan(engine=name).engine_name in files.ENGINES
        ServePlan.from_dict(sample_plan(engine=name).to_dict())
    assert sample_plan(precision=Precision(weights="fp8", cache="fp8")).precision.cache == "fp8"
