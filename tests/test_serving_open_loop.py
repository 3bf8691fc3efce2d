"""Open loops: requests that arrive as they like share passes, wait for these and for places."""

from __future__ import annotations

import numpy as np
import pytest
from test_serving_step import DENSE, served

from planner.serving import load
from planner.serving.engine_passes import Engine
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Lengths, Traffic


def _chat(rate: float) -> Traffic:
    return Traffic(input=Lengths.uniform(1638, 2458), output=Lengths.uniform(205, 307), load="rate", value=rate)


def _simulated(decode: float, first: float, more: float, rate: float, passes: int) -> tuple[float, float]:
    """(mean seconds of a pass, mean wait until the end of the own pass less a lone one) with Poisson arrivals."""
    random = np.random.default_rng(7)
    waits, total, coming = [], 0.0, np.empty(0)
    for _ in range(passes):
        own = first + (len(coming) - 1) * more if len(coming) else 0.0
        length = decode + own
        waits += list(coming + own - first)  # what was left of the pass before, and the others of this one
        arrived = np.sort(random.uniform(0.0, length, random.poisson(rate * length)))
        coming, total = length - arrived, total + length
    return total / passes, float(np.mean(waits))


@pytest.mark.parametrize("rate", [1.0, 4.0, 8.0])
def test_passes_and_waits_are_those_of_passes_one_by_one(rate: float) -> None:
    engine = Engine(DENSE, ServingLayout(tp=8, max_batch=4096), _chat(rate))
    flow = load.opened(engine, rate, 4096.0)
    step, decode, first, more, _ = load._passes(engine, np.asarray(flow.running), rate, 4096.0)
    length, wait = _simulated(float(decode), float(first), float(more), rate, 150_000)
    assert float(flow.tpot) == pytest.approx(length, rel=0.02)
    fit = float(engine.room(flow.running) / engine.input)
    used = rate * float(step) / fit
    budget = float(step) * used / (2.0 * fit * (1.0 - used))
    assert float(flow.wait) - budget + 0.5 * float(decode) == pytest.approx(wait, rel=0.1)


@pytest.mark.parametrize(("places", "used"), [(8, 0.8), (8, 0.95), (64, 0.95), (64, 0.99)])
def test_the_wait_for_a_place_is_that_of_requests_one_by_one(places: int, used: float) -> None:
    """Places that are held equally long: an M/D/c queue."""
    random, held, rate = np.random.default_rng(11), 4.0, used * places / 4.0
    count = 400_000
    arrivals, free, waits = np.cumsum(random.exponential(1.0 / rate, count)), np.zeros(places), np.empty(count)
    for i, now in enumerate(arrivals):  # served in turn, so that the place of c requests before is the next that is free
        start = max(now, free[i % places])
        waits[i], free[i % places] = start - now, start + held
    chance, wait = load.place_wait(rate, rate * held, places / held, float(places), 0.0)
    assert float(wait) == pytest.approx(waits.mean(), rel=0.25)
    assert float(chance) == pytest.approx((waits > 0.0).mean(), abs=0.12)


@pytest.mark.parametrize(("engine", "layout"), [
    ("vllm", ServingLayout(tp=8, max_batch=64)), ("vllm", ServingLayout(tp=4, pp=2, max_batch=64)),
    ("sglang", ServingLayout(tp=8, max_batch=64)), ("trtllm", ServingLayout(tp=2, pp=4, max_batch=64)),
    ("sglang", ServingLayout(tp=2, pp=4, max_batch=64)),
])  # fmt: skip
def test_more_that_arrives_waits_longer(engine: str, layout: ServingLayout) -> None:
    """Up to the capacity; with stages TTFT may fall by a few percent, as prompts then hold up fewer groups in vain."""
    one = served(engine=engine)
    whole = float(load.closed(Engine(one, layout, _chat(1.0)), 64.0, 64.0, queued=True).rate)
    found = [estimate(one, layout, _chat(part * whole)) for part in (0.02, 0.2, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99)]
    first, token = (np.array([float(getattr(each, name).mean) for each in found]) for name in ("ttft", "tpot"))
    assert np.all(first[1:] > (0.94 if layout.pp > 1 else 0.999) * first[:-1]) and first[-1] > 2.0 * first[0]
    assert np.all(token[1:] > 0.999 * token[:-1])
    inside = np.array([float(each.running + each.waiting) for each in found])
    assert np.all(np.array([float(each.running) for each in found]) <= 64.0 + 1e-9) and inside[-1] > 50.0


def test_percentiles_follow_the_lengths() -> None:
    """Of requests that wait for nobody: the percentile of the prompt, and of the answer."""
    layout = ServingLayout(tp=8, max_batch=64, max_tokens=65536)
    prompts = Traffic(input=Lengths.uniform(100, 15900), output=Lengths.fixed(64), load="rate", value=0.01)
    found = estimate(DENSE, layout, prompts)
    for level, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        alone = Traffic(input=Lengths.fixed(100 + level * 15800), output=Lengths.fixed(64), load="rate", value=0.01)
        assert found.ttft.of(name) == pytest.approx(float(estimate(DENSE, layout, alone).ttft.mean), rel=0.1)
    answers = Traffic(input=Lengths.fixed(1024), output=Lengths.uniform(10, 1990), load="rate", value=0.01)
    whole = estimate(DENSE, layout, answers)
    assert whole.e2e.p99 == pytest.approx(float(whole.ttft.mean) + 1970 * float(whole.tpot.mean), rel=0.02)
    same = estimate(DENSE, layout, Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(256), load="rate", value=0.01))
    assert float(same.e2e.p90) == pytest.approx(float(same.e2e.p50), rel=1e-3)


def test_answers_meet_unequal_numbers_of_prompts() -> None:
    """k prompts in the O steps of an answer, Poisson: sd of TPOT = sqrt(k) S / O."""
    found = estimate(DENSE, ServingLayout(tp=8, max_batch=64), _chat(4.0))
    each, tokens = float(found.flow.prompt), 256.0
    met = np.random.default_rng(3).poisson(4.0 * tokens * float(found.tpot.mean), 200_000) * each / tokens
    assert found.tpot.p99 - found.tpot.mean == pytest.approx(np.quantile(met, 0.99) - met.mean(), rel=0.15)
    assert found.tpot.p50 == found.tpot.mean
