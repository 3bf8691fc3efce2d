"""Gaps between tokens: the mean of their distribution is TPOT, and requests one by one have the same percentiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from request_simulation import Loop
from serve_samples import served

from planner import arrays as npt
from planner.serving import load
from planner.serving.engine_passes import Engine
from planner.serving.result import Flow
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.token_gaps import token_gaps
from planner.serving.traffic import Lengths, Speculation, Traffic

LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LAYOUTS: list[dict[str, int]] = [{"tp": 8}, {"tp": 4, "pp": 2}]
LOADS = [
    ("concurrency", 1.0, 2048),
    ("concurrency", 16.0, 2048),
    ("concurrency", 500.0, 2048),
    ("concurrency", 8.0, 60_000),
    ("rate", 5.0, 2048),
    ("rate", 50.0, 2048),
]


def chat(value: float, prompt: float = 2048, load: str = "concurrency") -> Traffic:
    return Traffic(
        input=Lengths.uniform(0.8 * prompt, 1.2 * prompt), output=Lengths.uniform(205, 307), load=load, value=value
    )


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "value", "prompt"), LOADS)
def test_the_mean_of_all_gaps_is_the_time_per_token(
    name: str, layout: dict[str, int], kind: str, value: float, prompt: int
) -> None:
    traffic = chat(value, prompt, kind)
    what = served(engine=name, weights="bf16")
    engine = Engine(what, ServingLayout(**layout, max_batch=1024, max_tokens=8192), traffic)
    flow = (
        load.opened(engine, traffic.value, 600.0)
        if traffic.load == "rate"
        else load.closed(engine, traffic.value, 600.0)
    )
    values = _at_all(engine, flow)
    assert (np.diff(values) >= 0.0).all() and values[0] >= float(flow.decode) * (1.0 - 1e-9)
    assert values.mean() == pytest.approx(
        float(flow.tpot), rel=0.01, abs=values[-1] / 200.0
    )  # a share may end between two


def _at_all(engine: Engine, flow: Flow) -> npt.Floats:
    """The quantile function at the middles of 200 equal shares."""
    return np.array([float(token_gaps(engine, flow, {**LEVELS, "p50": (i + 0.5) / 200.0}).p50) for i in range(200)])


def test_no_percentile_of_a_busy_engine_is_below_its_mean_for_ever() -> None:
    """Where each step holds prompts, none is a step that only decodes: mean 247 ms had a median of 58 and a p99 of 146 ms."""
    what = served(engine="sglang", weights="bf16")
    found = estimate(what, ServingLayout(tp=8, max_batch=1024, max_tokens=8192), chat(500.0))
    assert float(found.itl.p99) > float(found.itl.mean) and float(found.itl.p50) > 2.0 * float(found.step.total)
    quiet = estimate(what, ServingLayout(tp=8, max_batch=1024, max_tokens=8192), chat(8.0))
    assert float(quiet.itl.p50) == pytest.approx(float(quiet.step.total), rel=0.02)


def test_a_long_prompt_holds_a_step_up_by_one_chunk() -> None:
    what = served(engine="vllm", weights="bf16")
    found = estimate(what, ServingLayout(tp=8, max_batch=1024, max_tokens=8192), chat(8.0, 60_000))
    whole = float(found.ttft.mean)
    assert float(found.itl.p99) < whole / 4.0


def test_drafted_tokens_share_their_step() -> None:
    what, layout = served(weights="bf16"), ServingLayout(tp=8, max_batch=64, max_tokens=8192)
    found = estimate(what, layout, replace(chat(1.0), speculation=Speculation(depth=3, acceptance=0.7)))
    assert float(found.itl.p50) == pytest.approx(float(found.tpot.mean), rel=0.02)


@pytest.mark.parametrize("requests", [16, 64])
def test_percentiles_are_those_of_requests_one_by_one(requests: int) -> None:
    what, layout = served(weights="bf16"), ServingLayout(tp=8, max_batch=256, max_tokens=8192)
    what = replace(what, hardware=replace(what.hardware, sustained_clock=1.0))
    traffic = Traffic(input=Lengths.uniform(1024, 2048), output=Lengths.uniform(128, 256), value=float(requests))
    engine = Engine(what, layout, traffic)
    batches, tokens = np.array([1e-6, 16.0, 64.0]), np.array([0.0, 1.0, 1024.0, 2048.0, 4096.0, 8192.0])
    passes = [
        Pass(batch=batches, context=engine.context, prompts=max(n / 1536, 1.0), prompt_tokens=min(n, 1536))
        for n in tokens
    ]
    rows = np.array([step_time(what, layout, one).total for one in passes]).T

    def seconds(batch: int, new: float) -> float:
        return float(np.interp(batch, batches, [np.interp(new, tokens, row) for row in rows]))

    loop = Loop(seconds, requests, 8192, (2048, 256), 0.5, waves=30)
    loop.run()
    found = token_gaps(engine, load.closed(engine, traffic.value, 256.0), LEVELS)
    for name, level in LEVELS.items():
        assert float(getattr(found, name)) == pytest.approx(loop.gap(level), rel=0.25), name
