"""One deployment, or columns of layouts, under one traffic: memory, steps and queues put together."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from planner.serving import load
from planner.serving.engine_passes import Engine
from planner.serving.result import Flow, Quantiles, ServingEstimate, ServingMemory, StepTime, apart
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import preemption_chance, serving_memory
from planner.serving.token_gaps import token_gaps
from planner.serving.traffic import Traffic

NO_PARTS = StepTime(**dict.fromkeys((one.name for one in fields(StepTime)), 0.0))
NORMAL = {"p50": 0.0, "p90": 1.2816, "p99": 2.3263}
"""Percentiles of a normal distribution, in standard deviations."""
LEVELS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def estimate(
    served: Served, layout: ServingLayout, traffic: Traffic, value: Any = None, parts: bool = True
) -> ServingEstimate:  # fmt: skip
    """Latencies, rates and memory; what does not fit is priced as if it did and says so in ``fits``.

    ``value`` replaces traffic.value, as a column where every layout has a load of its own (a sweep over concurrency); ``parts`` as
    in ``result``.
    """
    memory = serving_memory(served.model, served.hardware, served.engine, served.precision, layout, traffic)
    return estimate_of(Engine(served, layout, traffic), memory, value, parts)


def estimate_of(engine: Engine, memory: ServingMemory, value: Any = None, parts: bool = True) -> ServingEstimate:
    """The same of an engine and its memory, whatever they are computed from."""
    served, layout, traffic = engine.served, engine.layout, engine.traffic
    load_value = np.asarray(traffic.value if value is None else value, dtype=np.float64)
    most = running_at_most(served, layout, traffic, memory)
    each = load_value / np.asarray(layout.replicas, dtype=np.float64)
    room = np.maximum(most, 1.0)
    if traffic.load == "static":
        flow = load.static(engine, each, room)
    elif traffic.load == "rate":
        flow = load.opened(engine, each, room)
    elif traffic.load == "offline":
        flow = load.offline(engine, each, room)
    else:
        flow = load.closed(engine, each, room)
        if traffic.waves is not None:
            flow = load.with_burst(engine, flow, load.burst(engine, each, room, flow), traffic.waves)
    return result(engine, memory, most, flow, parts)


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
    engine: Engine, memory: ServingMemory, most: Any, flow: Flow, parts: bool = True
) -> ServingEstimate:  # fmt: skip
    """An estimate from the flow of one engine, with the client's part of the time to first token. ``parts``: with those of the
    mean step and the spread of gaps between tokens; a search compares rows without."""
    served, layout, traffic = engine.served, engine.layout, engine.traffic
    replicas = np.asarray(layout.replicas, dtype=np.float64)
    rate = flow.rate * replicas
    output, total = traffic.output.mean, traffic.input.mean + traffic.output.mean
    ttft, tpot, e2e = _latencies(engine, flow)
    saturated = np.isinf(flow.waiting) if traffic.load == "rate" else flow.waiting > 0.5
    found = ServingEstimate(
        ttft=ttft,
        tpot=tpot,
        itl=tpot,
        e2e=e2e,
        requests_per_second=rate,
        output_tokens_per_second=rate * output,
        total_tokens_per_second=rate * total,
        running=flow.running,
        waiting=flow.waiting,
        step=NO_PARTS,
        memory=memory,
        saturated=saturated,
        fits=np.asarray(memory.fits) & (np.asarray(most) >= 1.0),
        max_concurrency=most * replicas,
        preemption=preemption_chance(served.engine, layout, traffic, memory, flow.running),
        flow=flow,
    )
    return with_parts(engine, found) if parts else found


def _latencies(engine: Engine, flow: Flow) -> tuple[Quantiles, Quantiles, Quantiles]:
    """Time to first token, per token, and of the whole request.

    Waits and lengths of prompts spread the first, numbers of prompts that fall into its O steps the second, Poisson of mean
    k = X O TPOT with S seconds each: sqrt(k) S / O; the first and the lengths of answers the third.
    """
    traffic, output = engine.traffic, engine.traffic.output.mean
    met = np.sqrt(np.maximum(flow.rate * output * flow.tpot, 0.0)) * flow.prompt / engine.speed / np.maximum(output, 1.0)
    rest, waits = np.maximum(output - 1.0, 0.0) * flow.tpot, np.where(np.isinf(flow.ttft), 0.0, flow.ttft)
    first, whole = {}, {}
    for name, level in LEVELS.items():
        late = apart(flow.ttft_at(level) - waits, flow.own * traffic.input.beyond(level))
        first[name] = flow.ttft + engine.client + late
        whole[name] = flow.ttft + engine.client + rest + apart(late, rest * traffic.output.beyond(level))
    return (
        Quantiles(mean=flow.ttft + engine.client, **first),
        Quantiles(mean=flow.tpot, **{name: flow.tpot + NORMAL[name] * met for name in LEVELS}),
        Quantiles(mean=flow.ttft + engine.client + rest, **whole),
    )


def with_parts(engine: Engine, found: ServingEstimate) -> ServingEstimate:
    """An estimate with the parts of the mean step and the spread of gaps between tokens."""
    flow = found.flow
    step = engine.decode_step(flow.running, np.minimum(flow.rate * flow.prompt, 1.0))
    return replace(found, step=step, itl=token_gaps(engine, flow, LEVELS))
