"""Queues of serving against requests one by one, percentiles of short runs, and the clock of a busy device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from request_simulation import Loop
from test_serving_step import DENSE, closed_loop

from planner.serving import load
from planner.serving.engine import load_engine
from planner.serving.engine_passes import Engine
from planner.serving.lock_step import Bulk, bulk_of, train_of
from planner.serving.result import Flow
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Traffic

STEADY = replace(DENSE, hardware=replace(DENSE.hardware, sustained_clock=1.0))
"""A device that keeps its clock: the simulation's passes know no load."""


def lengths(tokens: float, low: float) -> Lengths:
    return Lengths.fixed(tokens) if low == 1.0 else Lengths.uniform(low * tokens, tokens)


@pytest.mark.parametrize("low", [1.0, 0.8])
@pytest.mark.parametrize(("prompt", "budget"), [(1024, 8192), (1024, 2560), (4096, 2048)])
@pytest.mark.parametrize("requests", [8, 48])
def test_the_closed_loop_is_that_of_requests_one_by_one(low: float, prompt: int, budget: int, requests: int) -> None:
    layout = ServingLayout(tp=2, max_batch=256, max_tokens=budget)
    traffic = Traffic(input=lengths(prompt, low), output=lengths(256, low), value=float(requests), waves=10.0)
    engine = Engine(STEADY, layout, traffic)
    batches, tokens = np.array([1e-6, 8.0, 48.0]), np.array([0.0, 1.0, 512.0, 2048.0, 8192.0])
    table = [
        step_time(
            STEADY, layout,
            Pass(batch=batches, context=engine.context, prompts=max(n / prompt, 1.0), prompt_tokens=min(n, prompt)),
        ).total
        for n in tokens
    ]  # fmt: skip
    rows = np.array(table).T

    def seconds(batch: int, new: float) -> float:
        return float(np.interp(batch, batches, [np.interp(new, tokens, row) for row in rows]))

    ttft, tpot = Loop(seconds, requests, budget, (prompt, 256), low).run()
    flow = load.closed(engine, traffic.value, 256.0)
    flow = load.with_burst(engine, flow, load.burst(engine, traffic.value, 256.0, flow), 10.0)
    assert float(flow.ttft) == pytest.approx(ttft, rel=0.35)
    assert float(flow.tpot) == pytest.approx(tpot, rel=0.06)


def test_a_train_of_equal_prompts_by_hand() -> None:
    """Two prompts fit a pass: a request waits for the other one in its own, and but for the first two of 8 for two in progress."""
    layout = ServingLayout(tp=8, max_batch=256, max_tokens=2 * 1024 + 8)
    equal = Engine(DENSE, layout, Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(256), value=8.0))
    train = train_of(equal, 8.0, 8.0)
    assert float(train.own) == pytest.approx(2.0) and float(train.ahead) == pytest.approx(2.0 * 6.0 / 8.0)
    assert float(train.share) == pytest.approx(6.0 / 8.0)
    alone = train_of(equal, 1.0, 1.0)
    assert float(alone.own) == 1.0 and float(alone.ahead) == float(alone.share) == 0.0
    spread = Engine(DENSE, layout, Traffic(input=Lengths.fixed(1024), output=Lengths.uniform(128, 384), value=8.0))
    assert float(spread.prompts_per_decode(8.0)) == pytest.approx(8.0 / 256.0)  # for ever: out of step
    short = Engine(DENSE, layout, replace(spread.traffic, output=Lengths.uniform(240, 272), waves=4.0))
    assert float(short.prompts_per_decode(64.0)) == pytest.approx((2.0 * 2.0 - 1.0) / 4.0 * 64.0 / 32.0)


def test_percentiles_of_the_first_token() -> None:
    """M/G/1: nobody waits with chance 1 - c; the first wave of a short run is its last percentiles and not its median."""
    flow = Flow(**dict.fromkeys(("tpot", "rate", "running", "waiting", "prompt", "decode"), 1.0), ttft=3.0, wait=1.0)
    assert float(flow.ttft_at(0.5)) == pytest.approx(2.0 + np.log(2.0))
    rare = replace(flow, chance=0.25)
    assert float(rare.ttft_at(0.5)) == pytest.approx(2.0)
    assert float(rare.ttft_at(0.99)) == pytest.approx(2.0 + 4.0 * np.log(25.0))
    engine = Engine(DENSE, ServingLayout(tp=8, max_batch=64), closed_loop(8.0))
    short = load.with_burst(engine, rare, 13.0, 10.0)
    assert float(short.ttft) == pytest.approx(3.0 + 10.0 / 10.0)
    assert float(short.ttft_at(0.5)) == pytest.approx(2.0)
    assert float(short.ttft_at(0.99)) == pytest.approx(2.0 * 13.0 * 0.9)  # nine tenths of the way through the wave
    assert float(short.rate) < float(rare.rate)


def test_a_busy_device_computes_at_its_sustained_clock() -> None:
    """Products of many rows at c of the burst's rate where prompts take all the time; decodes of few rows wait for weights."""
    layout = ServingLayout(tp=1, max_batch=256)
    engine = Engine(DENSE, layout, Traffic(input=Lengths.fixed(4096), output=Lengths.fixed(64)))
    clock = DENSE.hardware.sustained_clock
    assert float(engine.clock(8.0, 0.0)) == 1.0 and float(engine.clock(8.0, 1.0)) == pytest.approx(clock)
    assert float(engine.clock(512.0, 0.0)) == pytest.approx(clock)
    work = Pass(batch=1e-6, context=1.0, prompts=1.0, prompt_tokens=4096.0)
    fast, slow = (step_time(DENSE, layout, one) for one in (work, replace(work, clock=clock)))
    assert float(slow.linear) == pytest.approx(float(fast.linear) / clock, rel=1e-3)
    assert float(slow.memory_bound) == float(fast.memory_bound)
    assert float(engine.decode(8.0, 1.0)) == pytest.approx(float(engine.decode(8.0, 0.0)))


def test_a_short_run_has_empty_places_at_its_end() -> None:
    layout = ServingLayout(tp=8, max_batch=256)
    rates = [float(estimate(DENSE, layout, closed_loop(64.0, waves=waves)).requests_per_second) for waves in (2.0, 10.0, 1000.0)]
    assert rates[0] < rates[1] < rates[2]


def polled(requests: float, budget: int) -> tuple[Engine, Bulk]:
    """SGLang that looks for requests every 32 decodes, answers of 256 to 512 tokens."""
    layout = ServingLayout(tp=8, max_batch=256, max_tokens=budget, receive_interval=32)
    traffic = Traffic(input=Lengths.fixed(1024), output=Lengths.uniform(256, 512), value=requests, waves=10.0)
    engine = Engine(replace(STEADY, engine=load_engine("sglang@0.5.6")), layout, traffic)
    return engine, bulk_of(engine, requests)


def test_a_look_for_requests_finds_those_that_others_sent_meanwhile() -> None:
    """Each of 48 others ends between two looks with the chance 32 / 384: four, with one's own five, three of which fit a pass."""
    bulk = polled(49.0, 3 * 1024 + 512)[1]
    assert float(bulk.size) == pytest.approx(5.0) and float(bulk.packed) == pytest.approx(3.0)
    assert float(polled(1.0, 8192)[1].size) == 1.0


def test_prompts_of_a_pass_share_it_and_end_together() -> None:
    """S = T(0, p n) / p; nobody's first token waits for less than the whole pass, and the median not for less than the mean."""
    engine, bulk = polled(49.0, 8192)
    decode = engine.decode(49.0)
    together, own = engine.prompt(49.0, decode, 0.0, bulk.packed)
    whole = engine.time(Pass(batch=1e-6, context=engine.context, prompts=5.0, prompt_tokens=1024.0)).total
    assert float(bulk.packed) == pytest.approx(5.0) and float(own) == pytest.approx(float(whole), rel=1e-6)
    assert float(together) == pytest.approx(float(own) / 5.0) and float(together) < float(engine.prompt(49.0, decode)[0])
    flow = load.closed(engine, 49.0, 256.0)
    assert float(flow.ttft - flow.wait) == pytest.approx(float(engine.receive(49.0) * flow.decode + 5.0 * flow.prompt), rel=1e-6)
    assert float(flow.ttft_at(0.5)) >= float(flow.ttft - flow.wait)


def test_a_timer_holds_the_first_prompt_longest() -> None:
    """20 steps from the first that waits: it waits 20, and the two of 97 others that come meanwhile, 20 / 960 of them, 10 each."""
    layout = ServingLayout(tp=8, max_batch=256, max_tokens=8192, hold=21)
    held = Engine(DENSE, layout, Traffic(input=Lengths.fixed(1024), output=Lengths.uniform(640, 1280), value=97.0))
    plain = Engine(DENSE, replace(layout, hold=1), held.traffic)
    assert float(held.receive(97.0) - plain.receive(97.0)) == pytest.approx((20.0 + 2.0 * 10.0) / 3.0)
    assert float(held.receive(1.0) - plain.receive(1.0)) == 20.0
    train = train_of(held, 97.0, 97.0)
    assert float(train.own) == pytest.approx(3.0) and float(train.ahead) == 0.0


@pytest.mark.parametrize(("name", "packed"), [("trtllm@1.0", 7.0), ("vllm@0.11.0", 7.875)])
def test_prompts_that_stand_ready_share_a_pass(name: str, packed: float) -> None:
    """128 decodes leave 8,064 of 8,192 tokens: seven prompts of 1,024 where they are whole, 7.875 where they are cut; each costs
    its part of what the pass takes longer. Offline they stand ready; a client sends them one by one."""
    served = replace(STEADY, engine=load_engine(name))
    layout = ServingLayout(tp=8, max_batch=128, max_tokens=8192)
    engine = Engine(served, layout, Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(256), value=4096.0, load="offline"))
    assert float(train_of(engine, 128.0, 128.0).packed) == pytest.approx(packed)
    decode = engine.decode(128.0)
    added, own = engine.prompt(128.0, decode, 0.0, packed)
    _, whole = engine.passes(128.0, 0.0, packed)
    assert float(added) == pytest.approx((float(whole) - float(decode)) / packed)
    assert float(own) == pytest.approx(float(decode + added))
    alone, _ = engine.prompt(128.0, decode, 0.0)
    assert float(added) < 0.99 * float(alone)
    ready, sent = load.offline(engine, 4096.0, 128.0), load.closed(engine, 128.0, 128.0)
    assert float(ready.prompt) < 0.99 * float(sent.prompt) and float(ready.rate) > float(sent.rate)


def test_the_rate_of_a_closed_loop_is_exact_and_a_row_is_the_same_alone() -> None:
    """Random loads, many of them beside the pole at X = 1 / S: as eighty halvings find it, in a fifth of the evaluations."""
    draw, count = np.random.default_rng(7), 2000
    requests = np.exp(draw.uniform(0.0, 9.0, count)).round()
    base, added, decodes = (np.exp(draw.uniform(low, high, count)) for low, high in ((-6.0, 2.0), (-9.0, 1.0), (-2.0, 5.0)))
    held, least = draw.uniform(0.0, 1.0, count), np.exp(draw.uniform(-9.0, 1.0, count))
    whole, evaluated = np.minimum(requests / (base + decodes), (1.0 - 1e-6) / added), list[int]()

    def inside(rate: Any, rows: Any = slice(None)) -> Any:
        evaluated.append(1)
        wait = np.maximum(load.queue_wait(rate, added[rows], requests[rows]), least[rows])
        return rate * (base[rows] + wait + decodes[rows] / (1.0 - held[rows] * rate * added[rows]))

    found, few = load.reached(inside, requests, whole), len(evaluated)
    low, high = np.zeros(count), whole
    for _ in range(80):
        middle = 0.5 * (low + high)
        below = inside(middle) < requests
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    assert few <= 30 and found == pytest.approx(low, rel=1e-11)
    for row in range(0, count, 97):
        rows = slice(row, row + 1)
        assert load.reached(lambda rate, rows=rows: inside(rate, rows), requests[rows], whole[rows])[0] == found[row]
