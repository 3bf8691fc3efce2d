"""Batch limit and token budget that trtllm-bench gives an engine where its user states neither.

[NVIDIA/TensorRT-LLM tensorrt_llm/bench/build/tuning.py, calc_engine_setting and finetune_setting]
"""

from __future__ import annotations

import math

from planner.cost.parameters import total_parameters
from planner.record import record
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.served import Served
from planner.serving.traffic import Traffic

CACHE_SHARE = 0.95
"""Of what the weights leave."""
MOST_SEQUENCES, LEAST_SEQUENCES = 4096.0, 64
MOST_TOKENS, LEAST_TOKENS = 32768.0, 2048
SEQUENCE_STEPS = ((256.0, 32), (1024.0, 128), (math.inf, 256))
TOKEN_STEPS = ((4096.0, 256), (8192.0, 512), (math.inf, 1024))
"""Up to which value it is rounded up to multiples of what."""
ELEMENT = {"nvfp4": 0.5, "fp8": 1.0, "fp8_block": 1.0}
"""Bytes of an element of weights or cache, without scales; all else 2."""


@record
class Limits:
    """Of one microbatch on one attention rank."""

    sequences: int
    tokens: int


def limits_of(served: Served, degrees: Degrees, traffic: Traffic) -> Limits:
    """What the benchmark estimates: weights of all layers spread evenly, the rest is cache, at least one head on each rank."""
    model, precision, ranks = served.model, served.precision, degrees.tp * degrees.attn_dp
    memory = served.hardware.usable_memory * ranks * degrees.pp
    cache = CACHE_SHARE * (memory - total_parameters(model) * ELEMENT.get(precision.weights, 2.0))
    element = ELEMENT.get(str(precision.cache), 2.0)
    token = 2.0 * model.num_layers * max(ranks, model.num_kv_heads) * model.head_dim * element
    whole = not served.engine.chunked_prefill
    return tuned(cache / token, traffic.input.mean, traffic.output.mean, degrees.pp, whole)


def tuned(cached: float, prompt: float, output: float, stages: int, whole: bool) -> Limits:
    """From the tokens that the cache holds and the mean lengths; ``whole``: prompts are not cut, one fits with all decodes."""
    raw = min(max(cached, 0.0) / (prompt + output), MOST_SEQUENCES) / stages
    sequences = max(_up(raw, SEQUENCE_STEPS), LEAST_SEQUENCES)
    tokens = max(_up(min(raw * (1.0 + prompt / output), MOST_TOKENS), TOKEN_STEPS), LEAST_TOKENS)
    return Limits(sequences=sequences, tokens=max(tokens, math.ceil(prompt) + sequences) if whole else tokens)


def _up(value: float, steps: tuple[tuple[float, int], ...]) -> int:
    step = next(step for below, step in steps if value < below)
    return step * math.ceil(value / step)
