"""Queues on top of steps: closed loop, open loop, offline and static loads of one engine, with steps as their clock.

Symbols: N requests in one engine, X requests/s, I prompt tokens that are computed, O output tokens, B sequences that decode, D(B)
seconds of a pass that only decodes, S seconds that one prompt adds to the passes, Q prompts waiting or in progress.

    decode      TPOT = D(B) / (1 - h X S)            of each second X S goes to prompts, h = (N - 1) / N of it to those of others
    in decode   B = X (O - 1) TPOT                   Little's law of the decode phase
    prompts     TTFT = residual + D + S (1 + Q - X S / 2), Q = X (TTFT - residual - D)    one queue, service S
    closed      N = X (TTFT + (O - 1) TPOT)          Little's law of the whole

The queue is that of mean value analysis with deterministic service: an arrival sees (N - 1)/N of the mean queue [Reiser and
Lavenberg 1980; Schweitzer 1979], less half a service of the prompt in progress.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.serving.result import StepTime
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Traffic

ROUNDS = 3
"""Rounds of the fixed point: B settles within a thousandth."""
BISECTIONS = 30
SATURATED = 0.995
"""Share of the capacity above which an open loop has no steady state."""


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
        self.receive = 0.5 * np.asarray(layout.receive_interval, dtype=np.float64) + served.engine.overlap_scheduler
        """Decodes that a request waits before a pass can take it: half of the one in progress, and the next one too where the host
        prepares it while the GPU computes the one before."""
        self.budget = np.asarray(layout.max_tokens, dtype=np.float64)
        self.speed = traffic.speculation.tokens_per_step if traffic.speculation else 1.0
        self.drafted = 1.0 + (traffic.speculation.depth if traffic.speculation else 0.0)

    def decode(self, batch: Any) -> Floats:
        """D(B): seconds of one pass over all stages that only decodes."""
        work = Pass(batch=np.maximum(batch, 1e-6), context=self.context, queries=self.drafted)
        time = step_time(self.served, self.layout, work)
        return np.asarray(time.total) + self.draft(np.asarray(batch), time)

    def draft(self, batch: Floats, time: StepTime) -> Floats:
        """Seconds to propose the tokens of a step: by the model's own module of multi-token prediction a layer and the head each,
        by a draft model its weights in 16 bits once each; nothing by n-gram lookup."""
        one, model, hardware = self.traffic.speculation, self.served.model, self.served.hardware
        if one is None or not one.draft_parameters:
            return np.zeros_like(batch)
        if model.mtp_layers:
            layers = np.asarray(time.total - time.head - time.host) / model.num_layers
            return one.depth * (model.layers_per_mtp * layers + np.asarray(time.head))
        ranks = np.asarray(self.layout.ranks, dtype=np.float64)
        read = 2.0 * one.draft_parameters / (ranks * hardware.memory_bandwidth * hardware.memory_fraction["copy"])
        work = 2.0 * one.draft_parameters * batch / (ranks * hardware.sustained_flops("bf16"))
        return one.depth * np.maximum(read, work)

    def lock_step(self, requests: Any) -> LockStep:
        """Where prompts stop the decodes, all that waited decode on together and end within the spread of their lengths, which is
        sqrt(12 Var[O]) decodes wide: a decode ends g = N / (sqrt(12 Var[O])) requests, between 1 and N, whose next prompts come at
        once. A prompt holds up all but those of its own passes and of later ones of the same bulk."""
        requests = np.maximum(requests, 1.0)
        width = np.maximum(np.sqrt(12.0 * self.traffic.output.variation) * self.output, 1.0)
        bulk = np.clip(requests / width, 1.0, requests)
        packed = np.clip(np.floor(self.budget / self.input) * self.dp, 1.0, bulk)
        return LockStep(bulk=bulk, share=(requests - bulk + 0.5 * (bulk - packed)) / requests)

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
        S = T(0, n). With attention data parallelism attn_dp prompts run at once.
        """
        mixes = self.served.engine.mixes_prefill
        number, whole = self.passes(batch if mixes else 0.0)
        added = np.maximum(whole - decode, 0.0) if mixes else whole
        return number * added * self.together(batch) / self.dp, number * whole

    def passes(self, batch: Any) -> tuple[Floats, Floats]:
        """Passes of one prompt beside ``batch`` decodes, and the mean seconds of one."""
        number, tokens = self.chunks(batch)
        done = (number - 1.0) / 2.0 * tokens + self.hit
        work = Pass(
            batch=np.maximum(batch, 1e-6), context=self.context, prompts=1.0, prompt_tokens=tokens, cached=done
        )
        return number, np.asarray(step_time(self.served, self.layout, work).total)

    def together(self, batch: Any) -> Floats:
        """Part of a prompt's time that it costs an engine of p stages, whose p groups follow each other from stage to stage: a pass
        with a prompt holds up all of them, unless another has one too. (1 - (1 - f)^p) / (f p) where a pass has one with the
        chance f = B / (O p): from 1, when prompts are rare, to 1 / p."""
        chance = np.clip(np.asarray(batch) / (np.maximum(self.output, 1.0) * self.pp), 1e-6, 1.0 - 1e-12)
        return np.asarray(-np.expm1(self.pp * np.log1p(-chance)) / (chance * self.pp))


@dataclass(frozen=True, kw_only=True)
class LockStep:
    """How far requests of an engine whose prompts stop the decodes start and end together."""

    bulk: Any
    """g: requests that end in the same step."""
    share: Any
    """Part of the prompts' time that falls into decodes."""


def closed(engine: Engine, requests: Any, most: Any) -> Flow:
    """``requests`` in flight at one engine that runs ``most`` at once; the others wait for admission."""
    requests = np.asarray(requests, dtype=np.float64)
    inside = np.minimum(requests, most)
    flow = _mixing(engine, inside) if engine.served.engine.mixes_prefill else _stopping(engine, inside)
    outside = np.maximum(requests - inside, 0.0)
    late = outside / flow.rate
    return replace(flow, ttft=flow.ttft + late, wait=flow.wait + late, waiting=outside)


def _mixing(engine: Engine, requests: Any) -> Flow:
    """Prompts run beside the decodes, which they lengthen."""
    batch = np.maximum(requests * 0.95, 1e-6)
    output = np.maximum(engine.output - 1.0, 0.0)
    others = others_of(requests)
    for _ in range(ROUNDS):
        decode = engine.decode(batch)
        added, own = engine.prompt(batch, decode)
        base = engine.receive * decode + own
        rate = closed_rate(requests, base, added, output * decode / engine.speed, others)
        tpot = decode / engine.speed / (1.0 - others * rate * added)
        batch = np.clip(rate * output * tpot, 1e-6, requests)
    wait = queue_wait(rate, added, requests)
    return Flow(
        ttft=base + wait,
        tpot=tpot,
        wait=wait,
        rate=rate,
        running=batch,
        waiting=0.0 * wait,
        prompt=added,
        decode=decode,
    )


def _stopping(engine: Engine, requests: Any) -> Flow:
    """Prompts stop the decodes: all requests that are not prompts decode together, TPOT = D(N) + share N S / (O - 1)."""
    output = np.maximum(engine.output - 1.0, 0.0)
    decode = engine.decode(requests)
    added, own = engine.prompt(requests, decode)
    step = engine.lock_step(requests)
    tpot = decode / engine.speed + step.share * requests * added / np.maximum(output, 1.0)
    base = engine.receive * decode + own + 0.5 * (step.bulk - 1.0) * added
    at_random = (requests - step.bulk) / np.maximum(requests - 1.0, 1.0)
    wait = np.zeros_like(base)
    for _ in range(2 * ROUNDS):
        rate = requests / (base + wait + output * tpot)
        wait = 0.5 * (wait + at_random * queue_wait(np.minimum(rate, 0.95 / added), added, requests))
    wait = np.maximum(requests / rate - base - output * tpot, 0.0)  # Little's law, whatever is left of the iteration
    return Flow(
        ttft=base + wait,
        tpot=tpot,
        wait=wait + 0.5 * (step.bulk - 1.0) * added,
        rate=rate,
        running=requests,
        waiting=0.0 * wait,
        prompt=added,
        decode=decode,
    )


def others_of(requests: Any) -> Floats:
    """(N - 1) / N, the part of the prompts that are another request's: no request waits for its own while it decodes."""
    return np.asarray(np.maximum(requests - 1.0, 0.0) / np.maximum(requests, 1.0))


def queue_wait(rate: Any, added: Any, requests: Any) -> Floats:
    """Wait for the prompts ahead: R - S with R = S (1 - u / 2) / (1 - u (N - 1) / N), u = X S."""
    busy = rate * added
    others = others_of(requests)
    return np.asarray(np.maximum(added * ((1.0 - 0.5 * busy * others) / (1.0 - busy * others) - 1.0), 0.0))


def closed_rate(requests: Any, base: Any, added: Any, decodes: Any, held: Any) -> Floats:
    """X that solves N = X (base + wait(X) + O D / (1 - h X S)), by bisection: the right side grows with X up to X = 1 / S.

    ``held`` h: the part of the prompts that lengthens the decodes of a request; 0 where they are computed elsewhere.
    """
    low = np.zeros(np.broadcast_shapes(np.shape(requests), np.shape(base), np.shape(added)))
    high = np.minimum(requests / np.maximum(base + decodes, 1e-12), (1.0 - 1e-6) / np.maximum(added, 1e-12)) + low
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        inside = middle * (base + queue_wait(middle, added, requests) + decodes / (1.0 - held * middle * added))
        low, high = np.where(inside < requests, middle, low), np.where(inside < requests, high, middle)
    return 0.5 * (low + high)


def offline(engine: Engine, requests: Any, most: Any) -> Flow:
    """All ``requests`` at once, ``most`` of them in flight: waves of cycles C(B) = B / X(B), the last of what is left over.

    Decodes that started together end together, so a wave that is not full takes its own time: T = R / X + f (n C(B) + C(r) - R / X)
    for R = n B + r, f the part of a cycle that decodes; prompts, the rest, follow each other without gaps.
    """
    inside = np.minimum(requests, most)
    full = closed(engine, inside, most)
    whole = np.floor(requests / inside * (1.0 + 1e-12))
    left = np.maximum(requests - whole * inside, 0.0)
    last = closed(engine, np.maximum(left, 1.0), most)
    steady = requests / full.rate
    waves = whole * inside / full.rate + np.where(left >= 1.0, np.maximum(left, 1.0) / last.rate, 0.0)
    decodes = np.minimum(np.maximum(engine.output - 1.0, 0.0) * full.decode / engine.speed * full.rate / inside, 1.0)
    return replace(full, rate=requests / (steady + decodes * np.maximum(waves - steady, 0.0)))


def opened(engine: Engine, rate: Any, most: Any) -> Flow:
    """``rate`` requests/s arrive at one engine as a Poisson process: M/G/1 on prompts, Little's law on decodes.

    Where more arrives than the engine finishes with ``most`` in flight, it runs at that capacity and the queue grows without bound.
    """
    full = closed(engine, most, most)
    rate = np.minimum(np.asarray(rate, dtype=np.float64), full.rate)
    over = rate >= full.rate * SATURATED
    output = np.maximum(engine.output - 1.0, 0.0)
    batch = np.ones_like(full.rate)
    for _ in range(2 * ROUNDS):
        decode = engine.decode(batch)
        added, own = engine.prompt(batch, decode)
        busy = np.minimum(rate * added, SATURATED)
        tpot = decode / engine.speed / (1.0 - busy)
        batch = np.clip(0.5 * (batch + rate * output * tpot), 1e-6, most)
    second = added**2 * (1.0 + engine.traffic.input.variation)
    wait = rate * second / (2.0 * (1.0 - busy))
    ttft = engine.receive * decode + own + wait
    return Flow(
        ttft=np.where(over, np.inf, ttft),
        tpot=np.where(over, full.tpot, tpot),
        wait=np.where(over, np.inf, wait),
        rate=rate,
        running=np.where(over, full.running, batch),
        waiting=np.where(over, np.inf, rate * wait),
        prompt=added,
        decode=np.where(over, full.decode, decode),
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


def with_burst(flow: Flow, initial: Floats, waves: float) -> Flow:
    """The flow of a short run: the first of its ``waves`` takes ``initial`` to the first token, where that is longer."""
    return replace(flow, ttft=flow.ttft + np.maximum(initial - flow.ttft, 0.0) / waves)


def static(engine: Engine, requests: Any, most: Any) -> Flow:
    """One batch: all prompts in full passes, then O - 1 decodes; what does not run at once follows in rounds."""
    inside = np.minimum(requests, most)
    number, tokens = engine.chunks(0.0)
    packed = np.clip(np.floor(engine.budget / tokens), 1.0, np.maximum(inside / engine.dp, 1.0))
    work = Pass(
        batch=1e-6, context=engine.context, prompts=packed, prompt_tokens=tokens, cached=(number - 1.0) / 2.0 * tokens
    )
    passes = number * np.maximum(inside / (packed * engine.dp), 1.0)
    whole = np.asarray(step_time(engine.served, engine.layout, work).total)
    prompts = whole * (1.0 + (passes - 1.0) / engine.pp)
    decode = engine.decode(inside)
    latency = requests / inside * (prompts + np.maximum(engine.output - 1.0, 0.0) * decode / engine.speed)
    return Flow(
        ttft=prompts,
        tpot=decode / engine.speed,
        wait=0.0 * prompts,
        rate=requests / latency,
        running=inside,
        waiting=requests - inside,
        prompt=prompts,
        decode=decode,
    )
