"""Disaggregated serving: workers that compute prompts, workers that decode, and the cache that moves between them.

Both pools use the step of ``step``; prompts that arrive during a pass of a prefill worker share the next (``prefill_queue``).

    X   = N / (TTFT + (O - 1) TPOT)                        Little's law of the whole, at most min(Wp n / P(n), Wd B / (O D(B)))
    TTFT = wait + own passes + transfer + D(B) + client    own passes with the prompts that share them
    transfer = I kv / (ranks x link) / L                   sent layer by layer behind the passes: the last layer is exposed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.record import record
from planner.serving import load
from planner.serving.engine_facts import by_card
from planner.serving.engine_passes import Engine
from planner.serving.prefill_queue import Prefill, Prompts
from planner.serving.result import Flow, ServingEstimate, ServingMemory
from planner.serving.served import Served
from planner.serving.serving_estimate import result, running_at_most
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.traffic import Traffic

CONNECTION = 2e-3
"""Seconds to agree on a transfer between two workers: metadata and registration of blocks, two round trips of the router."""


@record
class Across:
    """The link between workers for prompts and those that decode, on two kinds of GPU."""

    bandwidth: float
    """Bytes/s from prompts to decode, all transfers together."""
    latency: float = 0.0
    """Seconds, one way."""


def estimate(
    served: Served, prefill: ServingLayout, decode: ServingLayout, traffic: Traffic, value: Any = None
) -> ServingEstimate:  # fmt: skip
    """Two pools of workers (``replicas`` of each layout) under a closed loop or a rate; memory is that of a decode worker."""
    memory = serving_memory(served.model, served.hardware, served.engine, served.precision, decode, traffic)
    sent = transfer_time(served, prefill, decode, traffic, memory)
    return _estimate_of(_pair_of(served, prefill_of(served, prefill, traffic), decode, traffic, sent), memory, value, parts=True)


def prefill_of(served: Served, layout: ServingLayout, traffic: Traffic) -> Prefill:
    """Workers for the prompts of some requests."""
    return Prefill(Engine(served, layout, replace(traffic, speculation=None)))


def compared(
    served: Served, prefill: Prefill, decode: ServingLayout, traffic: Traffic, value: Any, across: Across | None = None
) -> ServingEstimate:  # fmt: skip
    """The same for columns that a search compares: without the parts of the step.

    ``across``: the prompts are computed on another kind, and their cache passes the link between, which all transfers share.
    """
    memory = serving_memory(served.model, served.hardware, served.engine, served.precision, decode, traffic)
    sent = across or transfer_time(served, prefill.layout, decode, traffic, memory)
    return _estimate_of(_pair_of(served, prefill, decode, traffic, sent), memory, value, parts=False)


def _estimate_of(pair: _Pair, memory: ServingMemory, value: Any, parts: bool) -> ServingEstimate:
    served, decode, traffic = pair.answers.served, pair.answers.layout, pair.answers.traffic
    load_value = np.asarray(traffic.value if value is None else value, dtype=np.float64)
    most = running_at_most(served, decode, traffic, memory)
    room = np.maximum(most, 1.0) * pair.decoders
    opened = traffic.load == "rate"
    inside = room if opened else np.minimum(load_value, room)
    found = pair.settled(load_value if opened else None, inside, np.maximum(most, 1.0))
    if opened:
        wait = found.queue.wait(found.rate, pair.workers, inside)
    else:  # Little's law: what is neither in a pass of its own nor in decode waits for a prefill worker
        wait = np.maximum(inside / found.rate - found.base - pair.answers.client - pair.output * found.tpot, 0.0)
    outside = np.zeros_like(wait) if opened else np.maximum(load_value - inside, 0.0) / found.rate
    flow = Flow(
        ttft=found.base + wait + outside,
        tpot=found.tpot,
        wait=wait + outside,
        late=outside,
        rate=found.rate / pair.decoders,
        running=found.batch,
        waiting=outside * found.rate,
        prompt=0.0 * wait,
        decode=found.seconds,
        own=found.queue.own(found.rate / pair.workers),
    )
    if traffic.waves is not None and traffic.load == "concurrency":
        burst = (inside + 1.0) / (2.0 * pair.workers * found.queue.capacity) + found.base
        flow = load.with_burst(pair.answers, flow, burst, traffic.waves)
    answer = result(pair.answers, memory, most, flow, parts)
    if not opened:
        return answer
    full = found.rate * pair.output * found.tpot / pair.decoders >= np.maximum(most, 1.0) * load.SATURATED
    return replace(answer, saturated=full | (load_value > found.rate * (1.0 + 1e-9)))


@record
class _Steady:
    """Steady state of both pools; seconds, requests/s."""

    queue: Prompts
    rate: Any
    seconds: Any
    """D(B) of a decode worker."""
    tpot: Any
    batch: Any
    """B."""
    base: Any
    """Time to first token without waits."""


@record
class _Pair:
    """Workers of both pools under a kind of requests."""

    prompts: Prefill
    answers: Engine
    workers: Any
    """Workers for prompts."""
    decoders: Any
    """Workers that decode."""
    sent: Callable[[Any, Any], Any]
    """Exposed seconds of a transfer, of requests/s and of the own passes of a prompt."""
    passing: Any
    """Requests/s whose caches pass the link and whose tokens the processes of the decode workers send."""
    stop: Any
    """Seconds that the decodes of a worker stop for each request."""

    @property
    def output(self) -> Any:
        """Tokens after the first."""
        return np.maximum(self.answers.output - 1.0, 0.0)

    def settled(self, arriving: Any, inside: Any, most: Any) -> _Steady:
        """At ``arriving`` requests/s, or with ``inside`` in flight where it is None; ``most``: requests of a decode worker."""
        batch, busy, rate = np.maximum(0.9 * inside / self.decoders, 1e-6), np.zeros(()), np.zeros(())
        for _ in range(load.ROUNDS):
            queue, seconds = self.prompts.queue(busy), self.answers.decode(batch)
            base = self.sent(rate, queue.own(rate / self.workers)) + seconds
            tokens = self.output * seconds / self.answers.speed
            if arriving is None:
                rate = self._closed(queue, inside, base + self.answers.client, tokens)
            else:
                rate = np.minimum(arriving, load.SATURATED * self.workers * queue.capacity)
            rate = np.minimum(rate, self.passing)
            busy = np.minimum(rate / self.workers / queue.capacity, 1.0)
            tpot = seconds / self.answers.speed * slowed(rate / self.decoders, self.stop)
            batch = np.clip(rate * self.output * tpot / self.decoders, 1e-6, most)
        return _Steady(queue=queue, rate=rate, seconds=seconds, tpot=tpot, batch=batch, base=queue.own(rate / self.workers) + base)

    def _closed(self, queue: Prompts, requests: Any, base: Any, tokens: Any) -> Any:
        """X that solves N = X (own passes + wait + base + decodes), at most what the workers finish: the rest waits for them."""
        high = np.minimum(
            requests / np.maximum(queue.first + base + tokens, 1e-12), (1.0 - 1e-6) * self.workers * queue.capacity
        )

        def inside(rate: Any) -> Any:
            prompts = queue.waited(rate, self.workers, requests)
            return rate * (prompts + base + tokens * slowed(rate / self.decoders, self.stop))

        return load.reached(inside, requests, high)


def _pair_of(
    served: Served, prefill: Prefill, decode: ServingLayout, traffic: Traffic, link: Across | Any
) -> _Pair:
    """Engines of both pools and what is between them: ``link``, or the exposed seconds of a transfer."""
    cache, far = cache_bytes(served, traffic), isinstance(link, Across)
    over = partial(time_across, link, cache, layers=served.model.num_layers)
    return _Pair(
        prompts=prefill,
        answers=Engine(served, decode, traffic),
        workers=np.asarray(prefill.layout.replicas, dtype=np.float64),
        decoders=np.asarray(decode.replicas, dtype=np.float64),
        sent=over if far else lambda rate, own: link,
        passing=np.minimum(load.SATURATED * link.bandwidth / cache if far else np.inf, sent_at_most(served, decode, traffic)),
        stop=arrival_time(served, decode, cache),
    )


def sent_at_most(served: Served, decode: ServingLayout, traffic: Traffic) -> Any:
    """Requests/s that the servers of all decode workers send: W / (O c / (k s) + I t), as one process of each makes all responses.

    c seconds a response of k steps, s tokens a step, t seconds a token of the prompt, which the same process cuts unless a front
    end does. Tokens that wait for it are late, not the steps: TTFT grows, TPOT does not.
    """
    host = served.engine.host
    if host["response"] <= 0.0 or traffic.stream <= 0.0:
        return np.inf
    cut = host["prompt_token"] * traffic.input.mean if traffic.client == "http" else 0.0
    return decode.replicas / (traffic.output.mean * host["response"] / (traffic.stream * traffic.tokens_per_step) + cut)


def slowed(rate: Any, stop: Any) -> Any:
    """How much longer decodes take that stop ``stop`` seconds for each of ``rate`` requests/s of a worker: 1 / (1 - X t)."""
    return 1.0 / (1.0 - np.minimum(rate * stop, load.SATURATED))


def arrival_time(served: Served, decode: ServingLayout, size: Any) -> Any:
    """Seconds for which the decodes of a worker stop while the cache of a prompt arrives; 0 where it arrives behind them."""
    bandwidth = by_card(served.engine.shortfall.arrivals, served.hardware, decode.ranks)
    return np.where(bandwidth > 0.0, size / np.maximum(bandwidth, 1.0), 0.0)


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
