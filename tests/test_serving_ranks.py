"""Attention ranks in lock step: prompts of some, prompts that wait for all, rows that call a tensor group so; and first waves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.serving import load, pools
from planner.serving.engine import load_engine
from planner.serving.engine_passes import Engine
from planner.serving.runs.predicted_runs import predict_runs
from planner.serving.runs.run_schema import serving_rows
from planner.serving.runs.serving_run import ServingRun, runs_of
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Traffic
from tests.serve_samples import served
from tests.test_serving_runs import document, row

EXPERTS = served("minimax-m2", "b200-sxm", "vllm@0.19", "fp8_block")
SPREAD = ServingLayout(attn_dp=4, ep=4, max_batch=1024, max_tokens=16384)


def traffic(value: float, output: int = 1024, waves: float | None = None, prompt: int = 1024) -> Traffic:
    return Traffic(
        input=Lengths.fixed(prompt), output=Lengths.uniform(0.8 * output, output), value=value, waves=waves
    )


def test_a_prompt_of_one_rank_holds_up_all_but_its_tokens_alone_go_to_experts() -> None:
    """Products and attention of the rank with the prompt are those of all ranks with one each, its copies for experts a quarter."""
    decode = Pass(batch=64.0, context=1024.0)
    some, every = (replace(decode, prompts=1.0, prompt_tokens=2048.0, holders=n) for n in (1.0, np.inf))
    alone, filled = (step_time(EXPERTS, SPREAD, work) for work in (some, every))
    assert (alone.linear, alone.attention) == (filled.linear, filled.attention)
    assert float(alone.experts) < 0.8 * float(filled.experts) and float(alone.communication) < float(filled.communication)
    four = step_time(EXPERTS, SPREAD, replace(some, holders=4.0))
    assert vars(four) == vars(filled)


def test_rare_prompts_share_no_pass_and_many_fill_all_ranks() -> None:
    """One request in flight pays the whole pass that only it has a prompt in; of 4,096 each pays a quarter."""
    engine = Engine(EXPERTS, SPREAD, traffic(1.0))
    for requests, holders in ((1.0, 1.0), (4096.0, 4.0)):
        assert float(engine.holders(requests)) == pytest.approx(holders, rel=0.02)
        decode = engine.decode(requests)
        added, _ = engine.prompt(requests, decode)
        tokens = float(engine.chunks(requests)[1])
        work = Pass(batch=requests, context=engine.context, prompts=1.0, prompt_tokens=tokens, holders=holders)
        rate = engine.prompt_rate() * engine.clock(requests, 0.0)
        whole = float(step_time(EXPERTS, SPREAD, replace(work, clock=rate)).total)
        passes = float(engine.chunks(requests)[0])
        assert float(added) == pytest.approx(passes * (whole - float(decode)) / holders, rel=0.02)


@pytest.mark.parametrize(("requests", "limit"), [(64, 60), (256, 60), (128, 50), (1024, 50)])
def test_prompts_wait_until_every_rank_has_one(requests: int, limit: int) -> None:
    """Against prompts one by one: they come to ranks by chance, a pass takes all when no rank lacks one or the count is full."""
    layout = ServingLayout(attn_dp=4, ep=4, balance=limit, max_batch=1024, max_tokens=65536)
    engine = Engine(served("deepseek-v3", "b200-sxm", "trtllm@1.2", "nvfp4"), layout, traffic(float(requests)))
    rng, rate = np.random.default_rng(0), requests / engine.output / 4.0
    waiting: list[list[int]] = [[] for _ in range(4)]
    waits, cycles, count = [], [], 0
    for step in range(60_000):
        for rank, number in enumerate(rng.poisson(rate, 4)):
            waiting[rank] += [step] * number
        count += 1
        if all(waiting) or count >= limit:
            waits += [step + 0.5 - one for rank in waiting for one in rank]
            cycles.append(count)
            waiting, count = [[] for _ in range(4)], 0
    assert float(engine.seldom(float(requests))) == pytest.approx(np.mean(cycles), rel=0.04, abs=0.6)
    received = float(engine.receive(float(requests))) - 1.0  # the pass that is prepared ahead
    assert received == pytest.approx(np.mean(waits), rel=0.04, abs=0.6)


def test_where_a_pass_takes_one_prompt_of_a_rank_others_wait_for_half_of_the_limit() -> None:
    one = served("deepseek-v3", "b200-sxm", "trtllm@1.2", "nvfp4")
    small, large = (ServingLayout(attn_dp=4, ep=4, balance=60, max_batch=1024, max_tokens=n) for n in (1100, 65536))
    waits = [float(Engine(one, layout, traffic(256.0)).receive(256.0)) - 1.0 for layout in (small, large)]
    assert waits[0] == 30.0 and waits[1] < 20.0


def published(**changes: object) -> ServingRun:
    placed = {"hardware": {"gpu": "h100-sxm", "count": 4}, "model": "MiniMaxAI/MiniMax-M2.5", "engine": {"name": "vllm"}}
    table = document(row(**{**placed, "parallel": {"tp": 1, "pp": 1, "attn_dp": 4, "moe_tp": 1, "ep": 4}, **changes}))
    table["source"]["title"] = "SemiAnalysis InferenceX, MiniMax"
    return runs_of(serving_rows(table))[0]


@pytest.mark.parametrize(
    ("day", "engine", "found"), [("2026-03-28", "vllm", (4, 1)), ("2026-04-21", "vllm", (1, 4)), ("2026-03-28", "trtllm", (1, 4))]
)
def test_scripts_without_a_flag_for_data_parallelism_made_a_tensor_group(day: str, engine: str, found: tuple[int, int]) -> None:
    one = published(date=day, engine={"name": engine}).split.layouts[0]
    assert (one.tp, one.attn_dp, one.ep, one.replicas) == (*found, 4, 1)


def test_the_first_wave_waits_while_a_server_loads_kernels() -> None:
    """SGLang on MI325X, block-scaled fp8: 2.5 s, a tenth of it in the mean of ten waves, all of it in the last percentiles."""
    one, layout = served("deepseek-v3", "mi325x", "sglang@0.5.9", "fp8_block"), ServingLayout(tp=8, moe_tp=8, max_batch=256)
    warm = replace(one, engine=replace(one.engine, shortfall=replace(one.engine.shortfall, start={})))
    for requests in (4.0, 64.0):
        cold, plain = (estimate(here, layout, traffic(requests, waves=10.0)) for here in (one, warm))
        assert float(cold.ttft.mean - plain.ttft.mean) == pytest.approx(0.25, rel=1e-6)
        assert [float(cold.ttft.p50), float(cold.ttft.p90)] == pytest.approx([float(plain.ttft.p50), float(plain.ttft.p90)])
        assert float(cold.ttft.p99 - plain.ttft.p99) == pytest.approx(2.5, rel=0.01)
        steady = [float(estimate(here, layout, traffic(requests)).ttft.mean) for here in (one, warm)]
        assert steady[0] == steady[1]
    assert not load_engine("vllm").shortfall.start


@pytest.mark.parametrize(
    ("version", "hardware", "seconds"), [("0.5.3", "gb200-nvl72", 27.0), ("0.5.5", "gb200-nvl72", 0.0), ("0.5.3", "h100-sxm", 0.0)]
)
def test_a_slow_first_wave_lowers_the_rate_of_a_short_run_of_pools(version: str, hardware: str, seconds: float) -> None:
    """Two pools of SGLang: its runs of 5 waves of 128 took 27 s to the first tokens of the first; 5 (TTFT + O TPOT) and those."""
    one = served("deepseek-v3", hardware, f"sglang@{version}", "fp8_block")
    warm = replace(one, engine=replace(one.engine, shortfall=replace(one.engine.shortfall, start={})))
    prefill, decode = ServingLayout(attn_dp=8, ep=8, replicas=6, max_tokens=2048), ServingLayout(attn_dp=24, ep=24, max_batch=4096)
    cold, plain = (pools.estimate(here, prefill, decode, traffic(128.0, waves=5.0, prompt=8192)) for here in (one, warm))
    assert float(cold.ttft.mean - plain.ttft.mean) == pytest.approx(seconds / 5.0, abs=1e-9)
    whole = float(plain.e2e.mean)
    assert float(cold.requests_per_second / plain.requests_per_second) == pytest.approx(whole / (whole + seconds / 5.0), rel=0.02)


def test_an_engine_that_stands_for_another_does_not_lend_it_its_first_wave() -> None:
    place = {"hardware": {"gpu": "mi355x", "count": 8}, "parallel": {"tp": 8}, "model": "deepseek-ai/DeepSeek-R1"}
    means = []
    for name in ("sglang", "atom"):
        found = published(**{**place, "engine": {"name": name, "version": "0.5.9"}, "precision": {"weights": "fp8_block"}})
        engine = found.launch.started(load_engine("sglang@0.5.9"))
        means.append(bool(engine.shortfall.start))
        assert predict_runs([found])[0].quantities
    assert means == [True, False]


def test_what_no_kernel_explains_is_of_layers_with_experts() -> None:
    """SGLang 0.5.8 on MI325X: 241 us for each of the 58 of DeepSeek-V3, nothing of a dense model."""
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=64), Pass(batch=8.0, context=1024.0)
    for model, more in (("deepseek-v3", 58 * 241e-6), ("llama-3.1-70b", 0.0)):
        one = served(model, "mi325x", "sglang@0.5.8", "fp8_block")
        plain = replace(one, engine=replace(one.engine, shortfall=replace(one.engine.shortfall, layer=())))
        times = [float(step_time(here, layout, work).total) for here in (one, plain)]
        assert times[0] - times[1] == pytest.approx(more, abs=1e-9)


def test_vllm_gathers_quantised_tokens_of_nvfp4() -> None:
    one = replace(served("minimax-m2", "b200-sxm", "vllm@0.19", "nvfp4"))
    plain = replace(one, engine=replace(one.engine, fusion=replace(one.engine.fusion, gathered=())))
    work = Pass(batch=1e-6, context=64.0, prompts=1.0, prompt_tokens=4096.0)
    small, whole = (float(step_time(here, SPREAD, work).communication) for here in (one, plain))
    assert small < 0.8 * whole


def test_a_burst_fills_all_attention_ranks() -> None:
    """The first wave of a short run comes at once: a pass has a prompt of every rank, however rare prompts are later."""
    engine = Engine(EXPERTS, SPREAD, traffic(16.0, waves=10.0))
    flow = load.closed(engine, 16.0, 1024.0)
    first = float(load.burst(engine, 16.0, 1024.0, flow))
    assert float(engine.holders(16.0)) < 2.0 and first < 0.75 * float(flow.prompt) * 17.0 / 2.0 + 8.0 * float(flow.decode)
