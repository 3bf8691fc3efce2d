"""Disaggregated serving: workers that compute prompts, workers that decode, and the cache that moves between them.

Both pools use the step of ``step``; prompts that arrive during a pass of a prefill worker share the next (``prefill_queue``).

    X   = N / (TTFT + (O - 1) TPOT)                        Little's law of the whole, at most min(Wp n / P(n), Wd B / (O D(B)))
    TTFT = wait + own passes + transfer + D(B) + client    own passes with the prompts that share them
    transfer = I kv / (ranks x link) / L                   sent layer by layer behind the passes: the last layer is exposed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.serving import load
from planner.serving.engine_facts import by_card
from planner.serving.engine_passes import Engine
from planner.serving.prefill_queue import Prompts, prompts_of
from planner.serving.result import ServingEstimate
from planner.serving.served import Served
from planner.serving.serving_estimate import result, running_at_most
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.traffic import Traffic

CONNECTION = 2e-3
"""Seconds to agree on a transfer between two workers: metadata and registration of blocks, two round trips of the router."""


@dataclass(frozen=True, kw_only=True)
class Across:
    """Workers for prompts on another kind of GPU than those that decode, and the link between both kinds."""

    prompts: Served
    """The same model, format and engine on the GPUs that compute prompts."""
    bandwidth: float
    """Bytes/s from prompts to decode, all transfers together."""
    latency: float = 0.0
    """Seconds, one way."""


def estimate(
    served: Served, prefill: ServingLayout, decode: ServingLayout, traffic: Traffic, value: Any = None,
    across: Across | None = None,
) -> ServingEstimate:  # fmt: skip
    """Two pools of workers (``replicas`` of each layout) under a closed loop or a rate; memory is that of a decode worker.

    ``across``: the prompts are computed on another kind, and their cache passes the link between, which all transfers share.
    """
    load_value = np.asarray(traffic.value if value is None else value, dtype=np.float64)
    memory = serving_memory(served.model, served.hardware, served.engine, served.precision, decode, traffic)
    most = running_at_most(served, decode, traffic, memory)
    alone = replace(traffic, speculation=None)
    prompts, answers = Engine(across.prompts if across else served, prefill, alone), Engine(served, decode, traffic)
    workers, decoders = (np.asarray(one.replicas, dtype=np.float64) for one in (prefill, decode))
    sent, stop = transfer_time(served, prefill, decode, traffic, memory), arrival_time(served, decode, traffic)
    cache = cache_bytes(served, traffic) if across else 0.0
    passing = load.SATURATED * across.bandwidth / cache if across else np.inf
    rate: Any = 0.0
    output = np.maximum(answers.output - 1.0, 0.0)
    room = np.maximum(most, 1.0) * decoders
    inside = np.minimum(load_value, room) if traffic.load != "rate" else room
    batch, busy = np.maximum(0.9 * inside / decoders, 1e-6), np.zeros(())
    for _ in range(load.ROUNDS):
        queue = prompts_of(prompts, busy)
        seconds = answers.decode(batch)
        if across:
            sent = time_across(across, cache, rate, queue.own(rate / workers), served.model.num_layers)
        tokens = output * seconds / answers.speed
        if traffic.load == "rate":
            rate = np.minimum(load_value, load.SATURATED * workers * queue.capacity)
        else:
            rate = _closed(queue, inside, workers, lambda one, base=sent + seconds, own=tokens: base + own * slowed(one / decoders, stop))
        rate = np.minimum(rate, passing)
        busy = np.minimum(rate / workers / queue.capacity, 1.0)
        tpot = seconds / answers.speed * slowed(rate / decoders, stop)
        batch = np.clip(rate * output * tpot / decoders, 1e-6, np.maximum(most, 1.0))
    base = queue.own(rate / workers) + sent + seconds
    if traffic.load == "rate":
        wait = queue.wait(rate, workers, inside)
    else:  # Little's law: what is neither in a pass of its own nor in decode waits for a prefill worker
        wait = np.maximum(inside / rate - base - output * tpot, 0.0)
    outside = np.maximum(load_value - inside, 0.0) / rate if traffic.load != "rate" else np.zeros_like(wait)
    flow = load.Flow(
        ttft=base + wait + outside,
        tpot=tpot,
        wait=wait + outside,
        rate=rate / decoders,
        running=batch,
        waiting=outside * rate,
        prompt=0.0 * wait,
        decode=seconds,
    )
    if traffic.waves is not None and traffic.load == "concurrency":
        flow = load.with_burst(answers, flow, (inside + 1.0) / (2.0 * workers * queue.capacity) + base, traffic.waves)
    found = result(answers, memory, most, flow)
    if traffic.load != "rate":
        return found
    full = rate * output * tpot / decoders >= np.maximum(most, 1.0) * load.SATURATED
    return replace(found, saturated=full | (load_value > rate * (1.0 + 1e-9)))


def _closed(queue: Prompts, requests: Any, workers: Any, rest: Callable[[Any], Any]) -> Any:
    """X that solves N = X (own passes + wait + rest(X)), at most what the workers finish: what is left then waits for them."""
    high = np.minimum(requests / np.maximum(queue.first + rest(0.0), 1e-12), (1.0 - 1e-6) * workers * queue.capacity)

    def inside(rate: Any) -> Any:
        return rate * (queue.own(rate / workers) + queue.wait(rate, workers, requests) + rest(rate))

    return load.bisected(inside, requests, high)


def slowed(rate: Any, stop: Any) -> Any:
    """How much longer decodes take that stop ``stop`` seconds for each of ``rate`` requests/s of a worker: 1 / (1 - X t)."""
    return 1.0 / (1.0 - np.minimum(rate * stop, load.SATURATED))


def arrival_time(served: Served, decode: ServingLayout, traffic: Traffic) -> Any:
    """Seconds for which the decodes of a worker stop while the cache of a prompt arrives; 0 where it arrives behind them."""
    bandwidth = by_card(served.engine.shortfall.arrivals, served.hardware, decode.ranks)
    return np.where(bandwidth > 0.0, cache_bytes(served, traffic) / np.maximum(bandwidth, 1.0), 0.0)


def prompt_time(engine: Engine, busy: Any) -> tuple[Any, Any]:
    """Seconds that a prompt takes of a worker without decodes at full load, and of its own passes when it is alone on its rank.
    ``busy``: share of the time that the worker computes."""
    queue = prompts_of(engine, busy)
    return 1.0 / queue.capacity, queue.first


def transfer_time(served: Served, prefill: ServingLayout, decode: ServingLayout, traffic: Traffic, memory: Any) -> Any:
    """Exposed seconds of moving the cache of a prompt: its last layer over the links of one worker's ranks."""
    size = traffic.input.mean * np.asarray(memory.bytes_per_token)
    across = served.cluster.domain < np.asarray(prefill.engine_gpus) + np.asarray(decode.engine_gpus)
    link = np.where(across, served.hardware.network_bandwidth, served.hardware.scale_up_bandwidth)
    return CONNECTION + size / link / served.model.num_layers


def cache_bytes(served: Served, traffic: Traffic) -> Any:
    """Bytes of the cache of a mean prompt, all layers and heads: what moves from a pool to the other."""
    whole = serving_memory(served.model, served.hardware, served.engine, served.precision, ServingLayout(), traffic)
    return np.asarray(whole.bytes_per_token) * traffic.input.mean


def time_across(across: Across, size: Any, rate: Any, own: Any, layers: int) -> Any:
    """Exposed seconds of moving the cache of a prompt over the link between two kinds.

    Layer by layer behind the own passes: max(t - (L-1)/L own, t / L), t = S / B / (1 - rate S / B) where transfers share the link
    evenly (M/G/1 with processor sharing), and one latency; its set-up takes two round trips further. [Kleinrock 1976, sec. 4.4]
    """
    used = np.minimum(rate * size / across.bandwidth, load.SATURATED)
    seconds = size / across.bandwidth / (1.0 - used)
    behind = np.maximum(seconds - own * (layers - 1) / layers, seconds / layers)
    return CONNECTION + 5.0 * across.latency + behind
