"""Limits that trtllm-bench gives itself, by hand after its code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_serving_runs import run
from test_serving_step import DENSE

from planner.cost.parameters import total_parameters
from planner.serving.runs.bench_tuning import Limits, limits_of, tuned
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.predicted_runs import predict_runs
from planner.serving.traffic import Lengths, Traffic


@pytest.mark.parametrize(
    ("cached", "prompt", "output", "stages", "whole", "sequences", "tokens"),
    [
        (1e6, 1000.0, 1000.0, 1, True, 512, 2048),  # 500 sequences, 1,000 tokens
        (1e7, 128.0, 128.0, 1, True, 4096, 8192),  # 39,062: at most 4,096
        (1e7, 128.0, 128.0, 8, True, 512, 2048),  # of eight microbatches
        (1.1e6, 5000.0, 500.0, 1, False, 224, 2304),  # 200 sequences, 2,200 tokens
        (1.1e6, 5000.0, 500.0, 1, True, 224, 5224),  # a prompt and 224 decodes
        (1e5, 20000.0, 2000.0, 1, False, 64, 2048),  # 4.5: the least
        (3.2e7, 2048.0, 128.0, 1, False, 4096, 32768),
    ],
)
def test_limits_by_hand(
    cached: float, prompt: float, output: float, stages: int, whole: bool, sequences: int, tokens: int
) -> None:
    assert tuned(cached, prompt, output, stages, whole) == Limits(sequences=sequences, tokens=tokens)


def test_the_cache_is_what_even_weights_leave() -> None:
    """Every rank holds a head at least; more ranks than heads hold copies."""
    served = replace(DENSE, precision=replace(DENSE.precision, weights="bf16", attention="", cache="bf16"))
    model, traffic = served.model, Traffic(input=Lengths.fixed(1000.0), output=Lengths.fixed(1000.0))
    for tp in (4, 16):
        left = DENSE.hardware.usable_memory * tp - 2.0 * total_parameters(model)
        token = 2.0 * model.num_layers * max(tp, model.num_kv_heads) * model.head_dim * 2.0
        found = limits_of(served, Degrees(tp=tp), traffic)
        assert found == tuned(0.95 * left / token, 1000.0, 1000.0, 1, not DENSE.engine.chunked_prefill)


def test_pages_without_limits_take_them() -> None:
    """A cache that holds more than 4,096 short requests runs no more than these, so that a token takes less time.

    Answers are long: with 128 tokens the budget of a pass limits runs of one's own as well (``test_serving_offline``).
    """
    load = {"kind": "offline", "value": 60000.0, "isl": 128.0, "osl": 512.0, "range_ratio": None}
    titles = ("TensorRT-LLM performance overview, v0.20", "TensorRT-LLM performance overview, v1.0", "my runs")
    engine = {"name": "trtllm", "version": "1.0"}
    runs = [
        run(title=one, load=load, engine=engine, parallel={"tp": 8}, hardware={"gpu": "h200-sxm", "count": 8},
            measured={"tokens_per_s_total_output": 1.0, "tpot_ms": {"mean": 1.0}})
        for one in titles
    ]  # fmt: skip
    old, new, other = (one.quantities["tpot_ms.mean"] for one in predict_runs(runs))
    assert old == pytest.approx(new, rel=0.05) and new < 0.7 * other
