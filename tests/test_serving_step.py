"""The step of an engine and the queues on top of it: equations by hand, columns equal singles, invariants."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.arrays import only
from planner.serving import load, pools
from planner.serving.engine_passes import Engine
from planner.serving.lock_step import bulk_of
from planner.serving.serving_estimate import estimate, running_at_most
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Speculation, Traffic
from tests.serve_samples import served


def closed_loop(value: float, i: float = 1024, o: float = 256, **more: Any) -> Traffic:
    return Traffic(
        input=Lengths.uniform(0.8 * i, 1.2 * i), output=Lengths.uniform(0.8 * o, 1.2 * o), value=value, **more
    )


DENSE = served()
LAYOUTS = (
    ("llama-3.1-70b", ServingLayout(tp=4, max_batch=256)),
    ("llama-3.1-70b", ServingLayout(tp=2, pp=2, replicas=2, max_batch=256)),
    ("deepseek-v3", ServingLayout(tp=8, ep=1, moe_tp=8, max_batch=256)),
    ("deepseek-v3", ServingLayout(tp=1, attn_dp=8, ep=8, max_batch=512)),
    ("gpt-oss-120b", ServingLayout(tp=2, ep=2, max_batch=128)),
    ("qwen3-next-80b", ServingLayout(tp=4, ep=4, max_batch=128)),
)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_parts_are_the_total_and_columns_are_singles(model: str, layout: ServingLayout) -> None:
    one = served(model, "h200-sxm", "sglang")
    batches, tokens = np.array([1.0, 8.0, 40.0, 700.0]), np.array([0.0, 0.0, 512.0, 0.0])
    work = Pass(batch=batches, context=2048.0, prompts=(tokens > 0) * 1.0, prompt_tokens=tokens)
    many = step_time(one, layout, work)
    for j, (batch, new) in enumerate(zip(batches, tokens, strict=True)):
        single = step_time(one, layout, Pass(batch=batch, context=2048.0, prompts=float(new > 0), prompt_tokens=new))
        for part in fields(single):
            value = float(np.broadcast_to(getattr(many, part.name), batches.shape)[j])
            assert value >= 0.0
            assert value == pytest.approx(float(getattr(single, part.name)), rel=1e-9, abs=1e-12), part.name
        assert float(single.total) == pytest.approx(sum(float(getattr(single, part.name)) for part in fields(single)))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_step_grows_with_batch_context_and_prompt(model: str, layout: ServingLayout) -> None:
    one = served(model, "h100-sxm", "vllm")
    by_batch = [float(step_time(one, layout, Pass(batch=b, context=4096.0)).total) for b in (1, 4, 16, 64, 256)]
    by_context = [float(step_time(one, layout, Pass(batch=64.0, context=c)).total) for c in (128, 1024, 8192, 65536)]
    by_prompt = [
        float(step_time(one, layout, Pass(batch=16.0, context=1024.0, prompts=1.0, prompt_tokens=n)).total)
        for n in (256, 1024, 4096, 8192)
    ]
    for times in (by_batch, by_context, by_prompt):
        assert all(later >= earlier * (1.0 - 1e-9) for earlier, later in pairwise(times))


def test_decode_reads_the_weights_once() -> None:
    """B = 1: no layer is faster than its weights over the bandwidth, and one of a large model is not much slower."""
    layout = ServingLayout(tp=1, max_batch=8)
    time = step_time(DENSE, layout, Pass(batch=1.0, context=128.0))
    model, bandwidth = DENSE.model, DENSE.hardware.memory_bandwidth
    layer = (
        model.hidden_size * (2.0 * model.query_size + 2.0 * model.key_size) + 3.0 * model.hidden_size * model.ffn_size
    )
    floor = model.num_layers * layer / bandwidth
    assert floor < float(time.linear) < 1.5 * floor
    head = 2.0 * model.vocab_size * model.hidden_size / bandwidth
    assert head < float(time.head) < 1.5 * head + 50e-6


def test_prompts_are_computed_at_the_rate_of_large_products() -> None:
    time = step_time(
        DENSE, ServingLayout(tp=1, max_batch=8), Pass(batch=1e-6, context=1.0, prompts=1.0, prompt_tokens=8192.0)
    )
    model = DENSE.model
    layer = (
        model.hidden_size * (2.0 * model.query_size + 2.0 * model.key_size) + 3.0 * model.hidden_size * model.ffn_size
    )
    floor = 2.0 * 8192.0 * model.num_layers * layer / DENSE.hardware.peak("fp8")
    assert floor < float(time.linear) < 2.0 * floor


def test_graphs_pad_the_batch_and_end() -> None:
    layout = ServingLayout(tp=4, max_batch=64)
    linear = [float(step_time(DENSE, layout, Pass(batch=b, context=512.0)).linear) for b in (17.0, 24.0)]
    assert linear[0] == linear[1]  # both run as the captured 24
    assert not DENSE.engine.captured(4096.0, layout, DENSE.hardware)
    tiny = served("llama-3.2-1b", weights="bf16")
    graph, eager = (
        float(step_time(tiny, layout, Pass(batch=8.0, context=512.0, eager=eager)).host) for eager in (False, True)
    )
    assert eager > graph + 3e-4  # 16 layers of 13 kernels at 8 us take longer than the GPU


def test_closed_loop_keeps_littles_law() -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        one = served(engine=engine)
        for value in (1.0, 8.0, 64.0, 400.0):
            found = estimate(one, ServingLayout(tp=4, replicas=2, max_batch=128), closed_loop(value))
            inside = float(found.requests_per_second) * (
                float(found.e2e.mean) - one.engine.host["first_token"] - 1.024e-3
            )
            assert inside == pytest.approx(value, rel=0.02), (engine, value)


def test_more_in_flight_is_more_throughput_and_more_latency() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    for engine in ("vllm", "sglang"):
        found = estimate(served(engine=engine), ServingLayout(tp=4, max_batch=256), closed_loop(1.0), values)
        assert np.all(np.diff(np.asarray(found.output_tokens_per_second)) > 0)
        assert np.all(np.diff(np.asarray(found.tpot.mean)) > -1e-9)


def test_the_queue_by_hand() -> None:
    """A closed loop of one request never waits."""
    assert float(load.queue_wait(3.0, 0.05, 1.0)) == 0.0
    # Two requests: the other one is in service for a share u of the time, and half of its service is left on average.
    assert float(load.queue_wait(4.0, 0.05, 2.0)) == pytest.approx(0.05 * ((1 - 0.05) / (1 - 0.1) - 1.0))


def test_an_open_loop_saturates() -> None:
    layout = ServingLayout(tp=8, max_batch=64)
    light, heavy = (estimate(DENSE, layout, closed_loop(rate, load="rate")) for rate in (0.5, 1e4))
    assert not light.saturated and heavy.saturated
    assert float(light.requests_per_second) == pytest.approx(0.5)
    assert np.isinf(float(heavy.ttft.mean)) and float(heavy.requests_per_second) < 1e4
    full = estimate(DENSE, layout, closed_loop(64.0))
    assert float(heavy.output_tokens_per_second) == pytest.approx(float(full.output_tokens_per_second), rel=1e-6)


def test_equal_lengths_in_an_engine_whose_prompts_stop_the_decodes() -> None:
    """All N end in one step: their prompts wait for half of each other, and hold up nobody but each other."""
    one, layout = served(engine="sglang"), ServingLayout(tp=8, max_batch=64, max_tokens=8192)
    equal = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(256), value=32.0)
    spread = closed_loop(32.0)
    together, apart = estimate(one, layout, equal), estimate(one, layout, spread)
    assert float(together.ttft.mean) > 2.0 * float(apart.ttft.mean)
    assert float(together.tpot.mean) < float(apart.tpot.mean)
    assert bulk_of(Engine(one, layout, equal), 32.0).size == 32.0


def test_a_short_run_starts_with_a_burst() -> None:
    layout = ServingLayout(tp=8, max_batch=256)
    steady, short = (estimate(DENSE, layout, closed_loop(128.0, waves=waves)) for waves in (None, 4.0))
    engine = Engine(DENSE, layout, closed_loop(128.0))
    service = float(engine.prompt(128.0, engine.decode(128.0))[0])
    added = float(short.ttft.mean) - float(steady.ttft.mean)
    assert 0.5 * 64 * service / 4 < added < 1.5 * 64 * service / 4


def test_a_static_batch_is_its_prompts_and_its_decodes() -> None:
    layout, traffic = (
        ServingLayout(tp=4, max_batch=64),
        Traffic(input=Lengths.fixed(512), output=Lengths.fixed(128), load="static", value=16.0),
    )
    found = estimate(DENSE, layout, traffic)
    engine = Engine(DENSE, layout, traffic)
    assert float(found.e2e.mean) == pytest.approx(float(found.ttft.mean) + 127 * float(engine.decode(16.0)))
    one_pass = step_time(DENSE, layout, Pass(batch=1e-6, context=engine.context, prompts=16.0, prompt_tokens=512.0))
    assert float(found.ttft.mean) == pytest.approx(float(one_pass.total))


def test_speculation_divides_the_step() -> None:
    plain, drafted = (
        estimate(DENSE, ServingLayout(tp=8, max_batch=64), closed_loop(4.0, speculation=speculation))
        for speculation in (None, Speculation(depth=3, acceptance=0.7))
    )
    expected = 1 + 0.7 + 0.49 + 0.343
    assert Speculation(depth=3, acceptance=0.7).tokens_per_step == pytest.approx(expected)
    ratio = float(plain.tpot.mean) / float(drafted.tpot.mean)
    assert 0.7 * expected < ratio < expected


def test_a_cached_prefix_costs_room_but_no_time() -> None:
    layout = ServingLayout(tp=8, max_batch=1024)
    cold, warm = (estimate(DENSE, layout, closed_loop(32.0, i=8192, prefix_hit=hit)) for hit in (0.0, 0.75))
    assert float(warm.ttft.mean) < 0.5 * float(cold.ttft.mean)
    assert float(warm.max_concurrency) == float(cold.max_concurrency)


def test_pools_keep_littles_law_and_count_workers() -> None:
    one = served("deepseek-v3", "h200-sxm", "sglang")
    prefill = ServingLayout(tp=8, ep=8, replicas=np.array([1, 2, 4]), max_tokens=8192)
    decode = ServingLayout(tp=1, attn_dp=16, ep=16, replicas=1, max_batch=4096)
    traffic = closed_loop(512.0, i=4096, o=512)
    found = pools.estimate(one, prefill, decode, traffic)
    inside = np.asarray(found.requests_per_second) * (
        np.asarray(found.e2e.mean) - one.engine.host["first_token"] - 4.096e-3
    )
    np.testing.assert_allclose(inside, 512.0, rtol=0.02)
    assert np.all(np.diff(np.asarray(found.ttft.mean)) < 0)
    assert np.all(np.diff(np.asarray(found.output_tokens_per_second)) > 0)


def test_what_runs_at_once_is_bounded_by_batch_and_cache() -> None:
    layout = ServingLayout(tp=4, max_batch=np.array([8, 100_000]))
    traffic = closed_loop(1.0)
    found = estimate(DENSE, layout, traffic)
    most = np.asarray(running_at_most(DENSE, layout, traffic, found.memory))
    assert most[0] == 8.0 and most[1] < 100_000
    held = float(np.asarray(found.memory.capacity).ravel()[-1]) / most[1]
    assert traffic.input.mean < held < traffic.input.mean + traffic.output.longest


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(["vllm", "sglang", "trtllm"]),
    st.sampled_from(["concurrency", "rate", "offline", "static"]),
    st.floats(0.01, 1e5),
    st.floats(1, 1e5),
    st.floats(1, 1e4),
)
def test_every_answer_is_a_number(
    case: tuple[str, ServingLayout], engine: str, kind: str, value: float, i: float, o: float
) -> None:
    traffic = Traffic(input=Lengths.fixed(i), output=Lengths.fixed(o), load=kind, value=value)
    found = estimate(served(case[0], "b200-sxm", engine), case[1], traffic)
    for figure in (found.tpot.mean, found.output_tokens_per_second, found.running, found.step.total):
        assert np.all(np.isfinite(np.asarray(figure))) and np.all(np.asarray(figure) > 0)
    for latency in (found.ttft, found.e2e):
        assert float(latency.p50) <= float(latency.p90) <= float(latency.p99)
        assert not np.isnan(float(latency.mean))


def test_lengths_in_columns_are_singles() -> None:
    lengths = [(512.0, 128.0), (4096.0, 512.0)]
    columns = Traffic(
        input=Lengths(
            mean=np.array([512.0, 4096.0]), squared=np.array([512.0, 4096.0]) ** 2, longest=np.array([512.0, 4096.0])
        ),  # type: ignore[arg-type]
        output=Lengths(
            mean=np.array([128.0, 512.0]), squared=np.array([128.0, 512.0]) ** 2, longest=np.array([128.0, 512.0])
        ),  # type: ignore[arg-type]
    )
    many = estimate(DENSE, ServingLayout(tp=4, max_batch=256), columns, np.array([4.0, 32.0]))
    for j, (i, o) in enumerate(lengths):
        one = Traffic(input=Lengths.fixed(i), output=Lengths.fixed(o), value=(4.0, 32.0)[j])
        single = estimate(DENSE, ServingLayout(tp=4, max_batch=256), one)
        assert float(np.asarray(many.ttft.mean)[j]) == pytest.approx(float(single.ttft.mean))
        assert float(np.asarray(many.tpot.mean)[j]) == pytest.approx(float(single.tpot.mean))


def test_a_receive_interval_delays_the_first_token() -> None:
    layout = ServingLayout(tp=8, max_batch=64)
    at_once, seldom = (
        estimate(served(engine="sglang"), replace(layout, receive_interval=interval), closed_loop(1.0))
        for interval in (1, 21)
    )
    assert float(seldom.ttft.mean) - float(at_once.ttft.mean) == pytest.approx(10 * float(at_once.step.total), rel=0.05)


def test_context_parallel_decode_pays_for_its_exchanges() -> None:
    """Long contexts are worth them, short ones are not: the cache is read once instead of dcp times, but queries travel."""
    one = served("deepseek-v3", "h200-sxm", "vllm", "fp8_block")
    whole, split = (ServingLayout(tp=8, moe_tp=8, dcp=dcp, max_batch=64) for dcp in (1, 8))
    for context, better in ((256.0, whole), (131072.0, split)):
        times = {
            layout.dcp: float(step_time(one, layout, Pass(batch=32.0, context=context)).total)
            for layout in (whole, split)
        }
        assert min(times, key=lambda dcp: times[dcp]) == better.dcp
    moved = [float(step_time(one, layout, Pass(batch=32.0, context=4096.0)).communication) for layout in (whole, split)]
    assert moved[1] > moved[0] + 61 * 10e-6


def test_prompts_hold_up_all_groups_of_a_pipeline() -> None:
    """One stage: a prompt costs its time. p stages: rare prompts cost it too, prompts in every pass a p-th; so do equal lengths,
    whose prompts come together."""
    traffic = Traffic(input=Lengths.fixed(1024), output=Lengths.uniform(50, 150))
    one, four = (Engine(DENSE, ServingLayout(tp=2, pp=pp, max_batch=1024), traffic) for pp in (1, 4))
    assert float(one.together(50.0, 1.0)) == pytest.approx(1.0)
    assert float(four.together(0.01, 1.0)) == pytest.approx(1.0, rel=1e-3)
    assert float(four.together(400.0, 1.0)) == pytest.approx(0.25)
    assert float(four.together(200.0, 1.0)) == float(four.together(100.0, 2.0)) == pytest.approx((1 - 0.5**4) / 2.0)
    equal = Engine(DENSE, four.layout, replace(traffic, output=Lengths.fixed(100)))
    assert float(equal.together(8.0, 1.0)) == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_pass_at_several_clocks_is_that_of_each_clock(name: str) -> None:
    """Kernels are priced once; what a share of the time with prompts changes is the clock alone."""
    one = served("gpt-oss-120b", "h100-sxm", name)
    layout = ServingLayout(tp=np.array([1, 2, 4]), attn_dp=np.array([4, 2, 1]), ep=4, max_batch=256)
    engine = Engine(one, layout, closed_loop(64.0))
    decoding, prompting = engine.decoding(64.0), engine.prompting(64.0, 2.0)
    for busy in (0.0, 0.4, 1.0):
        work = Pass(batch=64.0, context=engine.context, clock=engine.clock(64.0, busy))
        decode = np.asarray(step_time(one, layout, work).total)
        assert np.asarray(decoding(busy).total) == pytest.approx(decode, rel=1e-12)
        for again, alone in zip(prompting(decode, busy), engine.prompt(64.0, decode, busy, 2.0), strict=True):
            assert again == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("model", "name"), [("gpt-oss-120b", "vllm"), ("deepseek-v3.2", "sglang"), ("qwen3-next-80b", "vllm")])
@pytest.mark.parametrize("batch", [64.0, np.array([1.0, 64.0, 3.5])])
def test_passes_priced_together_are_those_priced_alone(model: str, name: str, batch: Any) -> None:
    """Decodes and prompts are rows of one table in a search; a draft too."""
    one, layout = served(model, "h200-sxm", name), ServingLayout(tp=8, pp=np.array([1, 2, 1]), max_batch=256)
    traffic = replace(closed_loop(64.0), speculation=Speculation(depth=2, acceptance=0.7, draft_parameters=1e9))
    engine = Engine(one, layout, traffic)
    together = engine.both(batch, 2.0)
    for busy in (0.0, 0.7):
        decode = engine.decode(batch, busy)
        for found, alone in zip(together(busy), (decode, *engine.prompt(batch, decode, busy, 2.0)), strict=True):
            assert np.asarray(found) == pytest.approx(alone, rel=1e-12)


def test_rows_that_a_condition_leaves_out_are_not_priced() -> None:
    def price(size: Any, n: Any) -> Any:
        assert np.all(n > 1.0)
        return size / n

    column = np.array([1.0, 2.0, 4.0])
    assert only(column > 1.0, price, 8.0, column).tolist() == [0.0, 4.0, 2.0]
    assert only(column > 4.0, price, 8.0, column).tolist() == [0.0, 0.0, 0.0]
    assert [float(only(n > 1.0, price, 8.0, n)) for n in (np.float64(1.0), np.float64(2.0))] == [0.0, 4.0]
