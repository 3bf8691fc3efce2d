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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.serving.engine_passes import Engine
from planner.serving.lock_step import bulk_of, train_of
from planner.serving.result import Flow
from planner.serving.step import Pass

ROUNDS = 3
"""Rounds of the fixed point: B settles within a thousandth."""
MOST_STEPS, EXACT = 60, 1e-12
"""Steps to a root at most, and how near to it they end, as a part of it."""
SATURATED = 0.995
"""Share of the capacity above which an open loop has no steady state."""


def closed(engine: Engine, requests: Any, most: Any, queued: bool = False) -> Flow:
    """``requests`` in flight at one engine that runs ``most`` at once; the others wait for admission.

    ``queued``: prompts stand ready, so that a pass takes all that fit; where clients send them one by one, each has its own pass.
    """
    requests = np.asarray(requests, dtype=np.float64)
    inside = np.minimum(requests, most)
    flow = _mixing(engine, inside, queued) if engine.served.engine.mixes_prefill else _stopping(engine, inside)
    outside = np.maximum(requests - inside, 0.0)
    late = outside / flow.rate
    return replace(flow, ttft=flow.ttft + late, wait=flow.wait + late, late=late, waiting=outside)


def _mixing(engine: Engine, requests: Any, queued: bool) -> Flow:
    """Prompts run in the passes of the decodes, which they lengthen."""
    batch = np.maximum(requests * 0.95, 1e-6)
    output = np.maximum(engine.output - 1.0, 0.0)
    busy = np.zeros(())
    for _ in range(ROUNDS):
        train = train_of(engine, requests, batch)
        decode, added, own = engine.both(batch, train.packed if queued else 1.0)(busy)
        base, least = engine.receive(requests) * decode + own, added * (train.own - 1.0 + train.ahead)
        rate = closed_rate(requests, base + engine.client, added, output * decode / engine.speed, train.share, least)
        busy = rate * added
        tpot = decode / engine.speed / (1.0 - train.share * rate * added)
        batch = np.clip(rate * output * tpot, 1e-6, requests)
    rest = requests / rate - base - engine.client - output * tpot  # of those whose prompts are more than the engine computes
    wait = np.maximum(np.maximum(queue_wait(rate, added, requests), least), np.where(busy > SATURATED, rest, 0.0))
    return Flow(
        ttft=base + wait,
        tpot=tpot,
        wait=wait,
        rate=rate,
        running=batch,
        waiting=0.0 * wait,
        prompt=added,
        decode=decode,
        chance=np.maximum(busy, -np.expm1(1.0 - train.own - train.ahead)),
        longest=np.maximum(wait, (requests - 1.0) * added),
    )


def _stopping(engine: Engine, requests: Any) -> Flow:
    """Prompts stop the decodes: all requests that are not prompts decode together, TPOT = D(N) + share N S / (O - 1)."""
    output = np.maximum(engine.output - 1.0, 0.0)
    step, busy = bulk_of(engine, requests), np.zeros(())
    priced = engine.both(requests, step.packed)
    for _ in range(ROUNDS):
        decode, added, own = priced(busy)
        busy = requests * added / (requests * added + output * decode / engine.speed)
    tpot = decode / engine.speed + step.share * requests * added / np.maximum(output, 1.0)
    ahead = 0.5 * (step.size - step.packed) * added
    base = engine.receive(requests) * decode + own + ahead
    at_random = (requests - step.size) / np.maximum(requests - 1.0, 1.0)
    wait = np.zeros_like(base)
    for _ in range(2 * ROUNDS):
        rate = requests / (base + engine.client + wait + output * tpot)
        wait = 0.5 * (wait + at_random * queue_wait(np.minimum(rate, 0.95 / added), added, requests))
    left = requests / rate - base - engine.client - output * tpot
    wait = np.maximum(left, 0.0)  # Little's law, whatever is left of the iteration
    return Flow(
        ttft=base + wait,
        tpot=tpot,
        wait=wait,
        rate=rate,
        running=requests,
        waiting=0.0 * wait,
        prompt=added,
        decode=decode,
        chance=busy,
        longest=np.maximum(wait, (requests - 1.0) * added),
    )


def others_of(requests: Any) -> Floats:
    """(N - 1) / N, the part of the prompts that are another request's: no request waits for its own while it decodes."""
    return np.asarray(np.maximum(requests - 1.0, 0.0) / np.maximum(requests, 1.0))


def queue_wait(rate: Any, added: Any, requests: Any) -> Floats:
    """Wait for the prompts ahead: R - S with R = S (1 - u / 2) / (1 - u (N - 1) / N), u = X S."""
    busy = rate * added
    others = others_of(requests)
    return np.asarray(np.maximum(added * ((1.0 - 0.5 * busy * others) / (1.0 - busy * others) - 1.0), 0.0))


def closed_rate(requests: Any, base: Any, added: Any, decodes: Any, held: Any, least: Any = 0.0) -> Floats:
    """X that solves N = X (base + wait(X) + O D / (1 - h X S)): the right side grows with X up to X = 1 / S.

    ``held`` h: the part of the prompts that lengthens the decodes of a request; 0 where they are computed elsewhere.
    """
    high = np.minimum(requests / np.maximum(base + decodes, 1e-12), (1.0 - 1e-6) / np.maximum(added, 1e-12))

    def inside(rate: Floats) -> Floats:
        wait = np.maximum(queue_wait(rate, added, requests), least)
        return np.asarray(rate * (base + wait + decodes / (1.0 - held * rate * added)))

    return reached(inside, requests, high)


def reached(grows: Callable[[Floats], Floats], aim: Any, high: Any) -> Floats:
    """x between 0 and ``high`` where f(x) = x R(x), that grows, reaches ``aim`` N; ``high`` where it never does.

    The root of g(x) = x / f(x) - x / N, whose first part is nearly straight where f has a pole, by regula falsi in the form that
    is called Illinois: the end that stays counts half. A row that is there stays, whatever others of its table need. [Dowell and
    Jarratt 1971, BIT 11, 168-174]
    """
    high = np.asarray(high) + np.zeros(np.broadcast_shapes(np.shape(grows(high)), np.shape(aim)))

    def distance(x: Floats) -> Floats:
        return np.asarray(x / np.maximum(grows(x), 1e-300) - x / aim)

    low = 2.0**-30 * high
    at_low, at_high = distance(low), distance(high)
    found, side = high, np.zeros(high.shape)
    done = at_high >= 0.0
    for _ in range(MOST_STEPS):
        if done.all():
            break
        span = np.where(done, 1.0, at_low - at_high)
        middle = np.where(done, found, low + (high - low) * np.clip(at_low / span, 0.0, 1.0))
        off = distance(middle)
        over = off < 0.0
        near = (np.abs(off) * aim <= EXACT * middle) | (np.abs(middle - found) <= 0.1 * EXACT * middle)
        at_low, at_high = (
            np.where(over, np.where(side > 0.0, 0.5 * at_low, at_low), off),
            np.where(over, off, np.where(side < 0.0, 0.5 * at_high, at_high)),
        )
        low, high = np.where(over, low, middle), np.where(over, middle, high)
        found, side, done = middle, np.where(over, 1.0, -1.0), done | near
    return np.asarray(found)


def offline(engine: Engine, requests: Any, most: Any) -> Flow:
    """All ``requests`` at once, ``most`` of them in flight: waves of cycles C(B) = B / X(B), the last of what is left over.

    Decodes that started together end together, so a wave that is not full takes its own time: T = R / X + f (n C(B) + C(r) - R / X)
    for R = n B + r, f the part of a cycle that decodes; prompts, the rest, follow each other without gaps.

    A request takes I + O tokens of the passes that it decodes in, O of them: a budget of C tokens a pass serves C O / (I + O)
    requests at once, and what more the cache has room for waits. Those that then run are out of step: there are no waves.
    """
    inside = np.minimum(requests, most)
    served = np.maximum(engine.fed(), 1.0)
    full = closed(engine, np.minimum(inside, served), most, queued=True)
    whole = np.floor(requests / inside * (1.0 + 1e-12))
    left = np.maximum(requests - whole * inside, 0.0)
    last = closed(engine, np.maximum(left, 1.0), most, queued=True)
    steady = requests / full.rate
    waves = whole * inside / full.rate + np.where(left >= 1.0, np.maximum(left, 1.0) / last.rate, 0.0)
    decodes = np.minimum(np.maximum(engine.output - 1.0, 0.0) * full.decode / engine.speed * full.rate / inside, 1.0)
    decodes = np.where(inside <= served, decodes, 0.0)
    return replace(full, rate=requests / (steady + decodes * np.maximum(waves - steady, 0.0)))


def opened(engine: Engine, rate: Any, most: Any) -> Flow:
    """``rate`` requests/s arrive at one engine as a Poisson process: M/G/1 on prompts, Little's law on decodes.

    Where more arrives than the engine finishes with ``most`` in flight, it runs at that capacity and the queue grows without bound.
    """
    full = closed(engine, most, most, queued=True)
    rate = np.minimum(np.asarray(rate, dtype=np.float64), full.rate)
    over = rate >= full.rate * SATURATED
    output = np.maximum(engine.output - 1.0, 0.0)
    batch, busy = np.ones_like(full.rate), np.zeros(())
    for _ in range(2 * ROUNDS):
        decode, added, own = engine.both(batch)(busy)
        busy = np.minimum(rate * added, SATURATED)
        tpot = decode / engine.speed / (1.0 - busy)
        batch = np.clip(0.5 * (batch + rate * output * tpot), 1e-6, most)
    second = added**2 * (1.0 + engine.traffic.input.variation)
    wait = rate * second / (2.0 * (1.0 - busy))
    ttft = engine.receive(batch) * decode + own + wait
    return Flow(
        ttft=np.where(over, np.inf, ttft),
        tpot=np.where(over, full.tpot, tpot),
        wait=np.where(over, np.inf, wait),
        rate=rate,
        running=np.where(over, full.running, batch),
        waiting=np.where(over, np.inf, rate * wait),
        prompt=added,
        decode=np.where(over, full.decode, decode),
        chance=busy,
    )


def burst(engine: Engine, requests: Any, most: Any, flow: Flow) -> Floats:
    """Mean time to first token of ``requests`` that arrive at once at an idle engine, of which ``most`` run at once.

    The k-th prompt waits for those before it, passes of packed prompts with a batch that grows: S (N + 1) / 2 and the passes
    that the growing batch decodes meanwhile.
    """
    inside = np.minimum(np.asarray(requests, dtype=np.float64), most)
    half = engine.decode(np.maximum(inside / 2.0, 1.0))
    number, tokens = engine.chunks(inside)
    packed = np.maximum(np.floor(engine.budget / np.maximum(tokens, 1.0)), 1.0) * engine.dp
    passes = number * np.ceil(inside / packed)
    decodes = half if engine.served.engine.mixes_prefill else 0.0
    prompt = flow.prompt
    if np.any(engine.dp > 1.0):  # all attention ranks have prompts
        prompt = np.where(engine.dp > 1.0, engine.prompt(inside / 2.0, half, flow.rate * flow.prompt, engine.dp)[0], prompt)
    return prompt * (inside + 1.0) / 2.0 + decodes * (passes + 1.0) / 2.0


def with_burst(engine: Engine, flow: Flow, initial: Floats, waves: float) -> Flow:
    """The flow of a short run of ``waves`` W: the first takes ``initial`` to the first token, where that is longer, and while the
    last ends places stay empty, half of the time over which its ends have spread: X N e2e / e2e' W / (W + spread / 2). Lengths
    spread them by w sqrt(W), and the first tokens of the first wave by 2 (first - TTFT), which every later wave keeps. A server
    that has had no such prompts keeps all of the first wave waiting while it loads their kernels."""
    served = engine.served
    start = served.engine.start(served.hardware, engine.layout, served.precision.weights)
    queued = np.maximum(initial, flow.ttft)
    first = queued + start
    ttft = flow.ttft + (first - flow.ttft) / waves
    decodes = np.maximum(engine.output - 1.0, 0.0) * flow.tpot
    lengths = np.sqrt(12.0 * engine.traffic.output.variation * waves)
    spread = np.minimum(np.hypot(lengths, 2.0 * (queued - flow.ttft) / (flow.ttft + decodes)), 1.0)
    rate = flow.rate * (flow.ttft + decodes) / (ttft + decodes) * waves / (waves + 0.5 * spread)
    return replace(flow, ttft=ttft, rate=rate, first=first, start=start, waves=waves)


def static(engine: Engine, requests: Any, most: Any) -> Flow:
    """One batch: all prompts in full passes, then O - 1 decodes; what does not run at once follows in rounds."""
    inside = np.minimum(requests, most)
    number, tokens = engine.chunks(0.0)
    packed = np.clip(np.floor(engine.budget / tokens), 1.0, np.maximum(inside / engine.dp, 1.0))
    work = Pass(
        batch=1e-6, context=engine.context, prompts=packed, prompt_tokens=tokens, cached=(number - 1.0) / 2.0 * tokens + engine.hit
    )
    passes = number * np.maximum(inside / (packed * engine.dp), 1.0)
    whole = np.asarray(engine.time(work).total)
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
