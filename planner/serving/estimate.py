"""One deployment, or columns of layouts, under one traffic: memory, steps and queues put together."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.serving import load
from planner.serving.result import Quantiles, ServingEstimate, ServingMemory
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Traffic

TAIL = float(np.log(100.0))
"""An exponential tail has its 99th percentile at ln(100) means."""


def estimate(served: Served, layout: ServingLayout, traffic: Traffic, value: Any = None) -> ServingEstimate:
    """Latencies, rates and memory; what does not fit is priced as if it did and says so in ``fits``.

    ``value`` replaces traffic.value, as a column where every layout has a load of its own (a sweep over concurrency).
    """
    load_value = np.asarray(traffic.value if value is None else value, dtype=np.float64)
    memory = serving_memory(served.model, served.hardware, served.engine, served.precision, layout, traffic)
    most = running_at_most(served, layout, traffic, memory)
    engine = load.Engine(served, layout, traffic)
    replicas = np.asarray(layout.replicas, dtype=np.float64)
    if traffic.load == "static":
        return _static(served, layout, traffic, load_value, memory, most, engine)
    if traffic.load == "rate":
        flow = load.opened(engine, load_value / replicas, np.maximum(most, 1.0))
        first = flow.ttft
    elif traffic.load == "offline":
        flow = load.closed(engine, np.minimum(load_value / replicas, most), np.maximum(most, 1.0))
        first = flow.ttft
    else:
        flow = load.closed(engine, load_value / replicas, np.maximum(most, 1.0))
        first = flow.ttft
        if traffic.waves is not None:
            initial = load.burst(engine, load_value / replicas, np.maximum(most, 1.0), flow)
            first = first + np.maximum(initial - flow.ttft, 0.0) / traffic.waves
    return result(served, layout, traffic, memory, most, flow, first)


def running_at_most(served: Served, layout: ServingLayout, traffic: Traffic, memory: ServingMemory) -> Any:
    """Requests that one engine runs at once: its batch limit, and what the cache holds as the engine admits."""
    grown = (
        traffic.output.mean if served.engine.admits == "all" else traffic.output.squared / (2.0 * traffic.output.mean)
    )
    held = (traffic.input.mean + grown) + np.asarray(memory.bytes_per_sequence) / np.maximum(
        memory.bytes_per_token, 1e-9
    )
    return np.minimum(np.asarray(layout.max_batch, dtype=np.float64), np.asarray(memory.capacity) / held)


def result(
    served: Served, layout: ServingLayout, traffic: Traffic, memory: ServingMemory, most: Any, flow: load.Flow, first: Any
) -> ServingEstimate:  # fmt: skip
    """An estimate from the flow of one engine; ``first`` is the mean time to first token without the client's part."""
    replicas = np.asarray(layout.replicas, dtype=np.float64)
    client = served.engine.host["first_token"]
    ttft = first + client
    plain = np.where(np.isinf(flow.wait), np.inf, ttft - np.where(np.isinf(flow.wait), 0.0, flow.wait))
    rate = flow.rate * replicas
    output, total = traffic.output.mean, traffic.input.mean + traffic.output.mean
    rest = np.maximum(output - 1.0, 0.0) * flow.tpot
    step = step_time(served, layout, Pass(batch=flow.running, context=load.Engine(served, layout, traffic).context))
    mixed = flow.decode + flow.prompt * np.asarray(layout.attn_dp) * np.asarray(layout.pp)
    share = np.minimum(flow.rate * flow.tpot, 1.0)
    return ServingEstimate(
        ttft=Quantiles(mean=ttft, p50=plain + flow.wait * np.log(2.0), p90=plain + flow.wait * np.log(10.0), p99=plain + flow.wait * TAIL),
        tpot=Quantiles(mean=flow.tpot, p50=flow.tpot, p90=flow.tpot, p99=flow.tpot),
        itl=Quantiles(mean=flow.tpot, p50=flow.decode, p90=np.where(share > 0.1, mixed, flow.decode), p99=np.where(share > 0.01, mixed, flow.decode)),
        e2e=Quantiles(mean=ttft + rest, p50=ttft + rest, p90=ttft + rest + flow.wait, p99=ttft + rest + flow.wait * (TAIL - 1.0)),
        requests_per_second=rate, output_tokens_per_second=rate * output, total_tokens_per_second=rate * total,
        running=flow.running, waiting=flow.waiting, step=step, memory=memory,
        saturated=flow.waiting > 0.5 if traffic.load != "rate" else np.isinf(flow.waiting),
        fits=np.asarray(memory.fits) & (np.asarray(most) >= 1.0), max_concurrency=most * replicas, preemption=np.zeros_like(np.asarray(most)),
    )  # fmt: skip


def _static(
    served: Served, layout: ServingLayout, traffic: Traffic, load_value: Any, memory: ServingMemory, most: Any, engine: load.Engine
) -> ServingEstimate:  # fmt: skip
    """One batch of ``value``: all prompts in full passes, then O - 1 decodes; what does not run at once follows in rounds."""
    replicas = np.asarray(layout.replicas, dtype=np.float64)
    batch = np.asarray(load_value / replicas)
    inside = np.minimum(batch, np.maximum(most, 1.0))
    rounds = batch / inside
    number, tokens = engine.chunks(0.0)
    packed = np.clip(np.floor(engine.budget / tokens), 1.0, np.maximum(inside / engine.dp, 1.0))
    work = Pass(
        batch=1e-6, context=engine.context, prompts=packed, prompt_tokens=tokens, cached=(number - 1.0) / 2.0 * tokens
    )
    passes = number * np.maximum(inside / (packed * engine.dp), 1.0)
    whole = np.asarray(step_time(served, layout, work).total)
    prompts = whole * (1.0 + (passes - 1.0) / engine.pp)
    decode = engine.decode(inside)
    ttft = prompts + served.engine.host["first_token"]
    latency = rounds * (ttft + (traffic.output.mean - 1.0) * decode / engine.speed)
    rate = batch * replicas / latency
    flow = load.Flow(
        ttft=ttft,
        tpot=decode / engine.speed,
        wait=0.0 * ttft,
        rate=rate / replicas,
        running=inside,
        waiting=batch - inside,
        prompt=prompts,
        decode=decode,
    )
    return result(served, layout, traffic, memory, most, flow, prompts)
