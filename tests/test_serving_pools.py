"""Two pools: the queue of prompts against requests one by one, and what it changes of an answer."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from test_serving_step import DENSE

from planner.serving import load, pools
from planner.serving.engine import load_engine
from planner.serving.engine_facts import Case
from planner.serving.engine_passes import Engine
from planner.serving.prefill_queue import Prefill, Prompts
from planner.serving.result import Flow
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Lengths, Speculation, Traffic
from tests.serve_samples import served

QUEUE = Prompts(first=0.2, more=0.05, most=4.0, ranks=2.0)
"""P(n) = 0.2 s and 0.05 s for each further one, up to four on each of two ranks: 8 / 0.35 = 22.9 requests/s."""


def one_by_one(requests: int, decode: float, rounds: int = 400) -> tuple[float, float]:
    """Requests/s and mean seconds to the end of its passes, of ``requests`` in flight at a worker like QUEUE: those that wait when
    a pass begins share it, and each comes back after 0.8 to 1.2 times ``decode``."""
    draw, waiting = random.Random(1), [0.0] * requests
    ends: list[float] = []
    now, spent, done = 0.0, 0.0, 0
    while done < rounds * requests:
        while ends and ends[0] <= now:
            waiting.append(heapq.heappop(ends))
        if not waiting:
            now = ends[0]
            continue
        taken, waiting = waiting[:8], waiting[8:]
        now += 0.2 + 0.05 * (-(-len(taken) // 2) - 1)
        spent += sum(now - since for since in taken)
        done += len(taken)
        for _ in taken:
            heapq.heappush(ends, now + decode * draw.uniform(0.8, 1.2))
    return done / now, spent / done


@pytest.mark.parametrize(("requests", "decode"), [(4, 8.0), (32, 8.0), (128, 8.0), (256, 8.0), (64, 1.0)])
def test_prompts_that_come_during_a_pass_share_the_next(requests: int, decode: float) -> None:
    """From a worker that is idle most of the time to one that is full."""
    rate, first = one_by_one(requests, decode)
    found = load.reached(
        lambda x: x * (QUEUE.own(x) + QUEUE.wait(x, 1.0, float(requests)) + decode), float(requests), float(QUEUE.capacity)
    )
    assert float(found) == pytest.approx(rate, rel=0.03)
    assert requests / float(found) - decode == pytest.approx(first, rel=0.2)


def test_a_pass_by_hand() -> None:
    """n = x (P(1) - p) / (R - x p): 16 requests/s are two on each rank, whose pass takes 0.25 s; below 10 each is alone."""
    assert float(QUEUE.own(16.0)) == pytest.approx(0.25) and float(QUEUE.own(9.0)) == pytest.approx(0.2)
    assert float(QUEUE.own(100.0)) == pytest.approx(0.35) and float(QUEUE.capacity) == pytest.approx(8.0 / 0.35)
    assert float(QUEUE.wait(16.0, 1.0, 1e9)) == pytest.approx(0.125)
    alone = replace(QUEUE, most=1.0, ranks=1.0)
    assert float(alone.wait(3.0, 1.0, 8.0)) == pytest.approx(float(load.queue_wait(3.0, 0.2, 8.0)))


@pytest.mark.parametrize(("name", "budget", "batch", "most"), [
    ("trtllm@1.0", 8192, 64, 8.0), ("trtllm@1.0", 8192, 4, 4.0), ("vllm@0.11.0", 8704, 64, 8.5), ("trtllm@1.0", 512, 64, 1.0),
])  # fmt: skip
def test_a_pass_takes_what_fits_its_budget_and_its_batch(name: str, budget: int, batch: int, most: float) -> None:
    """Whole prompts of 1,024 tokens, or cut ones; each further one costs less than the first, and none where one fills the pass."""
    layout = ServingLayout(tp=8, max_batch=batch, max_tokens=budget)
    queue = Prefill(Engine(replace(DENSE, engine=load_engine(name)), layout, TRAFFIC)).queue()
    assert float(queue.most) == most
    assert 0.0 < float(queue.more) < float(queue.first) if most > 1.0 else float(queue.more) == 0.0


@pytest.mark.parametrize("model", ["llama-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("priced", [False, True])
def test_rows_of_workers_for_prompts_are_those_rows(model: str, priced: bool) -> None:
    """Whether their passes are priced before or after they are taken, at clocks of their own."""
    layout = ServingLayout(
        tp=np.array([1, 2, 4, 8]), pp=np.array([2, 1, 1, 1]), ep=np.array([1, 2, 1, 8]), moe_tp=np.array([1, 1, 4, 1]),
        max_tokens=np.array([8192, 4096, 1024, 512]),
    )  # fmt: skip
    rows, busy = np.array([3, 0, 0, 2, 1, 2]), np.array([0.0, 0.2, 0.9, 1.0, 0.5, 0.1])
    one = served(model)
    every = Prefill(Engine(one, layout, TRAFFIC))
    if priced:
        every.queue(1.0)
    some, alone = every.take(rows, 3), Prefill(Engine(one, layout.take(rows), TRAFFIC))
    for name, value in vars(alone.queue(busy)).items():
        assert np.array_equal(getattr(some.queue(busy), name), value), name
    assert np.all(np.asarray(some.layout.replicas) == 3)
    assert some.layout.tp.tolist() == [8, 1, 1, 4, 2, 4]  # type: ignore[union-attr]


TRAFFIC = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(64), value=512.0)


def test_a_full_pool_of_prompts_is_faster_with_room_for_several() -> None:
    """512 requests in flight, short answers: the worker for prompts limits, by P(1) or by P(8) / 8."""
    decode = ServingLayout(tp=8, max_batch=512)
    one, eight = (ServingLayout(tp=8, max_tokens=tokens) for tokens in (1024, 8192))
    rates = [float(pools.estimate(DENSE, first, decode, TRAFFIC).requests_per_second) for first in (one, eight)]
    limits = [float(Prefill(Engine(DENSE, first, TRAFFIC)).queue(1.0).capacity) for first in (one, eight)]
    assert rates == pytest.approx(limits, rel=1e-3) and rates[1] > 1.1 * rates[0]


def test_decodes_stop_while_a_cache_arrives() -> None:
    """TPOT = D / (1 - X t), t = size / bandwidth, 1,024 tokens at 4 GB/s; where it is not said they arrive behind the decodes."""
    traffic, layout = replace(TRAFFIC, output=Lengths.fixed(1024), value=64.0), ServingLayout(tp=8, max_batch=64)
    shortfall = replace(DENSE.engine.shortfall, arrivals=(Case(value=4e9),))
    stops = replace(DENSE, engine=replace(DENSE.engine, shortfall=shortfall))
    found = pools.estimate(stops, layout, layout, traffic)
    seconds = float(found.requests_per_second) * float(pools.cache_bytes(DENSE, traffic)) / 4e9
    step = float(Engine(DENSE, layout, traffic).decode(found.running))
    assert 0.05 < seconds < 0.9 and float(found.tpot.mean) == pytest.approx(step / (1.0 - seconds), rel=1e-3)
    plain = pools.estimate(DENSE, layout, layout, traffic)
    assert float(plain.tpot.mean) == pytest.approx(float(Engine(DENSE, layout, traffic).decode(plain.running)), rel=1e-3)


@pytest.mark.parametrize(("stream", "acceptance", "share"), [(1.0, 0.0, 0.5), (2.0, 0.0, 1.0), (4.0, 0.0, 1.0), (1.0, 0.5, 0.75)])
def test_responses_of_a_server_pass_one_process(stream: float, acceptance: float, share: float) -> None:
    """A response takes twice the time of a token at full speed: X = W k s / (c O); what waits for it is in the first token only."""
    traffic = replace(TRAFFIC, output=Lengths.fixed(1024), value=512.0)
    layout = ServingLayout(tp=8, max_batch=512, max_tokens=16384)
    free = pools.estimate(DENSE, layout, layout, traffic)
    host = DENSE.engine.host | {"response": 2.0 / float(free.output_tokens_per_second)}
    slow = replace(DENSE, engine=replace(DENSE.engine, host=host))
    drafts = Speculation(depth=1, acceptance=acceptance) if acceptance else None
    asked = replace(traffic, stream=stream, speculation=drafts, client="frontend")
    found = pools.estimate(slow, layout, layout, asked)
    assert float(found.requests_per_second / free.requests_per_second) == pytest.approx(share, rel=1e-3)
    assert float(found.tpot.mean) <= float(free.tpot.mean)
    in_flight = found.requests_per_second * (found.ttft.mean + 1023.0 * found.tpot.mean)
    assert float(in_flight) == pytest.approx(512.0, rel=2e-2)
    assert float(pools.estimate(slow, layout, layout, traffic).requests_per_second) == float(free.requests_per_second)
    if share < 1.0:  # the same process cuts the prompts
        cut = pools.estimate(slow, layout, layout, replace(asked, client="http"))
        seconds = [float(1.0 / one.requests_per_second) for one in (found, cut)]
        assert seconds[1] - seconds[0] == pytest.approx(host["prompt_token"] * float(traffic.input.mean), rel=1e-6)


def test_the_last_wave_ends_over_the_time_that_the_first_one_s_prompts_took() -> None:
    """Five waves of equal lengths whose first tokens come over a fifth of a request's time: 5 e / (5 e + s), s = e / 5."""
    engine = Engine(DENSE, ServingLayout(tp=8), replace(TRAFFIC, output=Lengths.fixed(1001)))
    columns = {one: np.asarray(0.0) for one in ("wait", "running", "waiting", "prompt", "decode")}
    flow = Flow(ttft=np.asarray(1.0), tpot=np.asarray(9e-3), rate=np.asarray(1.0), **columns)
    late = load.with_burst(engine, flow, np.asarray(2.0), 5.0)
    assert float(late.ttft) == pytest.approx(1.2)
    assert float(late.rate) == pytest.approx(10.0 / 10.2 * 5.0 / (5.0 + 0.5 * 0.2))
