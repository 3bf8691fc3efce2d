"""Queues on top of steps: closed loop, open loop, offline and static loads of one engine, with steps as their clock.

Symbols: N requests in one engine, X requests/s, I prompt tokens that are computed, O output tokens, B sequences that decode, D(B)
seconds of a pass that only decodes, S seconds that one prompt adds to the passes, Q prompts waiting or in progress.

    decode      TPOT = D(B) / (1 - X S)              of each second X S goes to prompts
    in decode   B = X (O - 1) TPOT                   Little's law of the decode phase
    prompts     TTFT = residual + D + S (1 + Q - X S / 2), Q = X (TTFT - residual - D)    one queue, service S
    closed      N = X (TTFT + (O - 1) TPOT)          Little's law of the whole

The queue is that of mean value analysis with deterministic service: an arrival sees (N - 1)/N of the mean queue [Reiser and Lavenberg
1980; Schweitzer 1979], less half a service of the prompt in progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Traffic

ROUNDS = 6
"""Rounds of the fixed point: B settles within a thousandth after four."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Steady state of one engine; seconds, requests/s, sequences."""

    ttft: Floats
    tpot: Floats
    wait: Floats
    """The part of ttft that queues."""
    rate: Floats
    """X."""
    running: Floats
    """B."""
    waiting: Floats
    """Requests that are not admitted yet."""
    prompt: Floats
    """S."""
    decode: Floats
    """D(B)."""


class Engine:
    """One engine under a kind of requests: seconds of its passes as functions of the batch."""

    def __init__(self, served: Served, layout: ServingLayout, traffic: Traffic) -> None:
        self.served, self.layout, self.traffic = served, layout, traffic
        self.input = traffic.input.mean * (1.0 - traffic.prefix_hit)
        self.hit = traffic.input.mean * traffic.prefix_hit
        self.output = traffic.output.mean
        self.context = traffic.input.mean + traffic.output.squared / (2.0 * traffic.output.mean)
        """Mean over the time of a decode: what is generated grows from 0 to O, longer answers are seen longer."""
        self.dp = np.asarray(layout.attn_dp, dtype=np.float64)
        self.pp = np.asarray(layout.pp, dtype=np.float64)
        self.budget = np.asarray(layout.max_tokens, dtype=np.float64)
        self.speed = traffic.speculation.tokens_per_step if traffic.speculation else 1.0
        self.drafted = 1.0 + (traffic.speculation.depth if traffic.speculation else 0.0)

    def decode(self, batch: Any) -> Floats:
        """D(B): seconds of one pass over all stages that only decodes."""
        work = Pass(batch=np.maximum(batch, 1e-6), context=self.context)
        return np.asarray(step_time(self.served, self.layout, work).total)

    def chunks(self, batch: Any) -> tuple[Floats, Floats]:
        """Passes that one prompt takes, and its tokens in each."""
        room = self.budget
        if self.served.engine.mixes_prefill:
            room = np.maximum(self.budget - np.asarray(batch) / (self.dp * self.pp), 1.0)
        if not self.served.engine.chunked_prefill:
            room = np.maximum(room, self.input)
        number = np.ceil(self.input / room)
        return number, self.input / number

    def prompt(self, batch: Any, decode: Floats) -> tuple[Floats, Floats]:
        """S, what one prompt adds to the engine's time, and the seconds of its own passes.

        An engine that mixes runs the prompt beside the decodes: S = passes x (T(B, n) - D(B)); one that does not stops them:
        S = T(0, n). With attention data parallelism attn_dp prompts run at once; with pp stages pp passes are in flight.
        """
        number, tokens = self.chunks(batch)
        mixes = self.served.engine.mixes_prefill
        done = (number - 1.0) / 2.0 * tokens + self.hit
        work = Pass(
            batch=np.maximum(batch, 1e-6) if mixes else 1e-6,
            context=self.context,
            prompts=1.0,
            prompt_tokens=tokens,
            cached=done,
        )
        whole = np.asarray(step_time(self.served, self.layout, work).total)
        added = np.maximum(whole - decode, 0.0) if mixes else whole
        return number * added / (self.dp * self.pp), number * whole


def closed(engine: Engine, requests: Any, most: Any) -> Flow:
    """``requests`` in flight at one engine that runs ``most`` at once; the others wait for admission."""
    inside = np.minimum(np.asarray(requests, dtype=np.float64), most)
    batch = np.maximum(inside * 0.95, 1e-6)
    output = max(engine.output - 1.0, 1e-9)
    for _ in range(ROUNDS):
        decode = engine.decode(batch)
        added, own = engine.prompt(batch, decode)
        residual = 0.5 * decode
        # Time of a request without queueing, then Schweitzer's queue: X from N = X (base + S Q + output D / (1 - X S)).
        base = residual + own
        rate = inside / (base + output * decode / engine.speed + inside * added)
        for _ in range(ROUNDS):
            busy = np.minimum(rate * added, 0.98)
            tpot = decode / engine.speed / (1.0 - busy)
            seen = (inside - 1.0) / np.maximum(inside, 1.0)
            queue = np.clip(
                busy * (1.0 - 0.5 * busy * seen) / np.maximum(1.0 - busy * seen, 1.0 / np.maximum(inside, 1.0)),
                0.0,
                inside,
            )
            wait = added * np.maximum(queue * seen - 0.5 * busy, 0.0)
            rate = inside / (base + wait + output * tpot)
        batch = np.minimum(0.5 * (batch + rate * output * tpot), inside)
    ttft = base + wait
    outside = np.maximum(np.asarray(requests, dtype=np.float64) - inside, 0.0)
    ttft = ttft + outside / rate
    return Flow(
        ttft=ttft,
        tpot=tpot,
        wait=wait + outside / rate,
        rate=rate,
        running=batch,
        waiting=outside,
        prompt=added,
        decode=decode,
    )


def opened(engine: Engine, rate: Any, most: Any) -> Flow:
    """``rate`` requests/s arrive at one engine as a Poisson process: M/G/1 on prompts, Little's law on decodes."""
    rate = np.asarray(rate, dtype=np.float64)
    output = max(engine.output - 1.0, 1e-9)
    batch = np.ones_like(rate * np.ones_like(most))
    for _ in range(2 * ROUNDS):
        decode = engine.decode(batch)
        added, own = engine.prompt(batch, decode)
        busy = np.minimum(rate * added, 0.99)
        tpot = decode / engine.speed / (1.0 - busy)
        batch = np.clip(0.5 * (batch + rate * output * tpot), 1e-6, most)
    second = added**2 * (1.0 + engine.traffic.input.variation)
    wait = rate * second / (2.0 * (1.0 - busy))
    ttft = 0.5 * decode + own + wait
    return Flow(
        ttft=ttft,
        tpot=tpot,
        wait=wait,
        rate=rate * np.ones_like(ttft),
        running=batch,
        waiting=rate * wait,
        prompt=added,
        decode=decode,
    )


def burst(engine: Engine, requests: Any, most: Any, flow: Flow) -> Floats:
    """Mean time to first token of ``requests`` that arrive at once at an idle engine, of which ``most`` run at once.

    The k-th prompt waits for those before it, passes of packed prompts beside a batch that grows: S (N + 1) / 2 and the passes
    that the growing batch decodes meanwhile.
    """
    inside = np.minimum(np.asarray(requests, dtype=np.float64), most)
    half = engine.decode(np.maximum(inside / 2.0, 1.0))
    number, tokens = engine.chunks(inside)
    packed = np.maximum(np.floor(engine.budget / np.maximum(tokens, 1.0)), 1.0) * engine.dp
    passes = number * np.ceil(inside / packed)
    decodes = half if engine.served.engine.mixes_prefill else 0.0
    return flow.prompt * (inside + 1.0) / 2.0 + decodes * (passes + 1.0) / 2.0
