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
from planner.serving.result import Flow, normal_share
from planner.serving.step import Pass

ROUNDS = 3
"""Rounds of the fixed point: B settles within a thousandth."""
MOST_STEPS, EXACT = 60, 1e-12
"""Steps to a root at most, and how near to it they end, as a part of it."""
LOADS = 9
"""Loads that are looked at in one go on the way to that of an open loop."""
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
        own=own,
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
        own=own,
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
    """``rate`` requests/s x arrive at one engine as a Poisson process; Little's law on decodes, queues for passes and for places.

    Prompts that come during a pass share the next: T = D + (1 - e^-n)(A - B) + n B of n = x T prompts, A seconds for the first and
    B for each further. A request waits for the rest of the pass in progress, E[T^2] / (2 E[T]), for the others of its own, and
    where a budget of m prompts a pass is used to u = n / m for T u / (2 m (1 - u)), as bulk queues do [Bailey 1954]. Where more
    arrives than the engine finishes with ``most`` in flight, it runs at that capacity and the queue grows without bound.
    """
    full = closed(engine, most, most, queued=True)
    rate = np.minimum(np.asarray(rate, dtype=np.float64), full.rate)
    over = rate >= full.rate * SATURATED
    output = np.maximum(engine.output - 1.0, 0.0)
    batch = _decoding(engine, np.maximum(rate, 1e-12), most)
    step, decode, first, more, own = _passes(engine, batch, np.maximum(rate, 1e-12), most)
    step = np.clip(step, decode, np.maximum(full.tpot * engine.speed, decode))  # no slower than with all places taken
    n, tpot = rate * step, step / engine.speed
    batch = np.clip(rate * output * tpot, 1e-6, most)
    some = -np.expm1(-n)
    # E[T^2] of k prompts, Poisson of mean n: E[(D + a 1(k > 0) + k B)^2], a = A - B
    squared = (decode + n * more) ** 2 + n * more**2 + (first - more) * (some * (first - more + 2.0 * decode) + 2.0 * n * more)
    chained = 1.0 - np.minimum(rate * more, SATURATED) ** 2  # a long pass is followed by another: k hangs on the pass before
    squared = step**2 + np.maximum(squared - step**2, 0.0) / chained
    rest = np.maximum(squared / (2.0 * step), 0.5 * decode) - 0.5 * decode  # half of a decode is in what a request is received in
    fit = np.maximum(engine.room(batch) * engine.dp * engine.pp / engine.input, 1e-9)
    used = np.minimum(n / fit, SATURATED)
    wait = rest + rate * squared / step * more + step * used / (2.0 * fit * (1.0 - used))
    inside = rate * (engine.receive(batch) * decode + own + wait + output * tpot)
    chance, place = place_wait(rate, inside, full.rate, most, engine.traffic.output.variation)
    ttft = engine.receive(batch) * decode + own + wait + place
    return Flow(
        ttft=np.where(over, np.inf, ttft),
        tpot=np.where(over, full.tpot, tpot),
        wait=np.where(over, np.inf, wait + place),
        rate=rate,
        running=np.where(over, full.running, batch),
        waiting=np.where(over, np.inf, rate * place),
        prompt=np.where(rate > 0.0, (step - decode) / np.maximum(n, 1e-300), first),
        decode=np.where(over, full.decode, decode),
        chance=1.0 - decode / step * (1.0 - chance),
        own=own,
    )


def _passes(engine: Engine, batch: Any, rate: Any, most: Any) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """(T, D, A, B, seconds of a prompt's own passes) with ``batch`` requests that decode at ``rate`` requests/s."""
    packed = train_of(engine, most, batch).packed
    alone, shared = engine.both(batch), engine.both(batch, packed)
    step = batch * engine.speed / (rate * np.maximum(engine.output - 1.0, 1.0))
    busy = np.clip(1.0 - alone(0.0)[0] / np.maximum(step, 1e-300), 0.0, SATURATED)
    decode, first, own = alone(busy)
    more = (packed * shared(busy)[1] - first) / np.maximum(packed - 1.0, 1e-9)
    more = np.where(packed > 1.0, np.clip(more, 0.0, first), first)
    return np.maximum(step, decode), decode, first, more, own


def _decoding(engine: Engine, rate: Any, most: Any) -> Floats:
    """B of an open loop: B requests that decode take T = B s / (x (O - 1)) a pass, as long as the passes are with what comes in T.

    An iteration would swing between no prompts and nothing else: two looks at columns of loads find where both are equal."""
    high = np.asarray(most, dtype=np.float64) + 0.0 * (rate + engine.output + engine.input)
    low, steps = np.full_like(high, 1e-6), np.linspace(0.0, 1.0, LOADS).reshape(-1, *(1,) * np.ndim(high))
    for _ in range(2):
        batch = low * (high / low) ** steps
        whole = batch * engine.speed / (rate * np.maximum(engine.output - 1.0, 1.0))
        _, decode, first, more, _ = _passes(engine, batch, rate, most)
        needed = decode - np.expm1(-rate * whole) * (first - more) + rate * whole * more
        at = np.clip((whole < needed).sum(axis=0) - 1, 0, LOADS - 2)
        low, high = _picked(batch, at), _picked(batch, at + 1)
        below, above = (np.log(_picked(whole, i) / _picked(needed, i)) for i in (at, at + 1))
    share = np.clip(-below / np.maximum(above - below, 1e-12), 0.0, 1.0)
    return np.asarray(low * (high / low) ** share)


def _picked(values: Any, index: Any) -> Floats:
    """One value of each column."""
    return np.asarray(np.take_along_axis(values, index[None], axis=0)[0])


def place_wait(rate: Any, inside: Any, capacity: Any, most: Any, variation: Any) -> tuple[Floats, Floats]:
    """(chance, mean seconds) of an arrival to wait for one of ``most`` K places: x requests/s, n of them ``inside`` on average, the
    engine finishes C with all places taken.

    Requests inside spread around n with the variance s^2 = x (K - n) / (C - x), those that wait fall off with (C - x) / x = t: both
    densities meet at K, so that P = 1 / (1 + s t Phi(z) / phi(z)), z = (K - n) / s. The wait is P / (C - x), times (1 + c^2) / 2 as
    places are held almost equally long.  [Halfin and Whitt 1981, Operations Research 29, 567-588; Allen and Cunneen: Allen 1990]
    """
    left = np.maximum(capacity - rate, 1e-8 * np.maximum(capacity, 1e-8))
    free = np.maximum(most - inside, 0.0)
    spread = np.sqrt(np.maximum(rate * free / left, 1e-12))
    z = np.minimum(free / spread, 30.0)
    density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
    chance = density / (density + spread * left / np.maximum(rate, 1e-300) * normal_share(z))
    return np.asarray(chance), np.asarray(chance * (1.0 + variation) / (2.0 * left))


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
