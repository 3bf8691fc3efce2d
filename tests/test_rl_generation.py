"""Generation in an RL step: engines with the tail of lengths, places in their cache, hosts, columns as single layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from planner.model import load_model
from planner.rl.answer_lengths import AnswerLengths, read_answers
from planner.rl.generation import HostCost, Sampler, longest_stall, places_of
from planner.rl.rl_workload import RlWorkload
from planner.serving.engine import load_engine
from planner.serving.served import Served
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.step import Pass, step_time
from tests.rl_samples import H100, MODEL, job, workload


def test_places_of_a_cache_that_is_not_known() -> None:
    """A cache far above its error holds what it holds; one nearer to its error fewer; one below it more, of those that start."""
    layout = ServingLayout(tp=1, replicas=8, max_batch=256)
    memory = Sampler(job().served("colocated"), layout, workload()).memory
    wide = dataclasses.replace(memory, cache=64e9, capacity=64e4, spread=1e6)
    assert places_of(wide, 1e4, 2e4, np.array([256.0])) == pytest.approx(64.0, rel=1e-3)
    assert places_of(wide, 1e4, 2e4, np.array([16.0])) == pytest.approx(16.0)
    found = [float(places_of(dataclasses.replace(wide, spread=one), 1e4, 2e4, np.array([256.0]))[0]) for one in (1e9, 1e10, 3e10)]
    assert found == sorted(found, reverse=True) and found[-1] < 64.0
    edge = dataclasses.replace(wide, cache=1e9, capacity=1e4, spread=4e9)  # of those that start
    assert 1.0 < float(places_of(edge, 1e4, 2e4, np.array([256.0]))[0]) < 4.0


def sampler(work: RlWorkload, host: HostCost | None = None, **fields: Any) -> Sampler:
    """Engines that sample a step."""
    served = Served(model=MODEL, hardware=H100, engine=load_engine("vllm@0.11"))
    return Sampler(served, ServingLayout(**{"tp": 1, "replicas": 8, "max_batch": 256, **fields}), work, host)


def test_equal_answers_take_one_decode_a_token() -> None:
    """Fixed lengths in one wave: L decodes of the whole batch at the mean context."""
    work = workload(answers=read_answers("fixed:1000", 3968))
    found = sampler(work)
    layout = ServingLayout(tp=1, replicas=8, max_batch=256)
    clock = found.flow.engine.clock(32.0, 0.0)
    work_of = Pass(batch=32.0, context=128 + 500.0, clock=clock)
    decode = float(np.ravel(step_time(found.flow.served, layout, work_of).total)[0])
    assert float(found.seconds[0]) == pytest.approx(1000 * decode, rel=0.03)


def test_two_waves_take_twice_as_long() -> None:
    work = workload(answers=read_answers("fixed:1000", 3968), prompts=64)
    one, two = sampler(work, max_batch=64), sampler(work, max_batch=32)
    wave = float(sampler(workload(answers=work.answers), max_batch=32).seconds[0])
    assert float(one.seconds[0]) < float(two.seconds[0])
    assert float(two.seconds[0]) == pytest.approx(2 * wave, rel=0.05)


def test_a_longer_tail_costs_and_running_ahead_hides_it() -> None:
    short, long = workload(answers=read_answers("mean=1000,p99=1500", 3968)), workload()
    assert float(sampler(long).seconds[0]) > 1.5 * float(sampler(short).seconds[0])
    found = sampler(long)
    assert float(found.generation(2.0).steady[0]) < 0.8 * float(found.generation().seconds[0])
    assert float(found.even[0]) < float(found.seconds[0])


def test_a_group_is_in_flight_until_its_longest_answer_ends() -> None:
    """Slots of groups that are filled again as they end, sampled: so many answers run in the mean as the formula has them."""
    work = workload(prompts=16, samples=8)
    flow = sampler(work, replicas=1, max_batch=4096).flow
    lengths = np.array([work.answers.quantile(share) for share in (np.arange(1000) + 0.5) / 1000])
    groups = np.random.default_rng(0).choice(lengths, size=(20000, work.samples))
    running = 2 * 16 * groups.sum() / groups.max(axis=1).sum()  # the groups of two steps
    age = work.answers.squared / (2.0 * work.answers.mean)
    one = flow.decode(np.arange(1), np.array([running]), np.array([work.prompt_length + age]))
    seconds = 16 * 8 * work.answers.mean / running * float(one[0])
    assert running < 0.7 * 2 * 16 * 8 and float(flow.steady(1.0)[0]) == pytest.approx(seconds, rel=0.02)


def test_more_engines_are_never_slower_and_hosts_cost() -> None:
    times = [float(sampler(workload(), replicas=n).seconds[0]) for n in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    plain, costly = sampler(workload()), sampler(workload(), HostCost(sample=1e-4))
    each = workload().sampled / 8 * workload().answers.mean
    assert float(costly.seconds[0] - plain.seconds[0]) == pytest.approx(each * 1e-4, rel=0.1)


def test_columns_are_priced_as_single_layouts() -> None:
    tps, replicas = np.array([1, 2, 4]), np.array([8, 4, 2])
    many = sampler(workload(), tp=tps, replicas=replicas)
    for number, (tp, count) in enumerate(zip(tps, replicas, strict=True)):
        alone = sampler(workload(), tp=int(tp), replicas=int(count))
        assert float(many.seconds[number]) == pytest.approx(float(alone.seconds[0]), rel=1e-9)


def test_ranks_wait_for_the_slowest_host_where_graphs_are_cut() -> None:
    """H(n) - 1 by hand; vLLM 0.10 launches a decode layer by layer, 0.11 as one graph; a rank alone waits for nobody."""
    assert longest_stall([1, 2, 4]) == pytest.approx([0.0, 1 / 2, 1 / 2 + 1 / 3 + 1 / 4])
    work = workload(answers=AnswerLengths(lengths=(1000.0,), shares=(1.0,)))

    def longer(version: str, tp: int) -> float:
        served = Served(model=MODEL, hardware=H100, engine=load_engine(f"vllm@{version}"), precision=Precision())
        layout = ServingLayout(tp=tp, replicas=8 // tp, max_batch=256)
        with_stalls, without = (float(Sampler(served, layout, work, HostCost(stall=one)).seconds[0]) for one in (1e-3, 0.0))
        return with_stalls - without

    assert longer("0.10.0", 4) == pytest.approx(1000 * 1e-3 * 13 / 12, rel=0.01)
    assert longer("0.10.0", 1) == longer("0.11.2", 4) == 0.0


def test_a_bias_of_the_router_does_not_balance_answers_to_one_prompt() -> None:
    """Engines of RL serve related requests: DeepSeek-V3 touches fewer experts than behind an API."""
    one = job(workload=workload(model=load_model("deepseek-v3"))).served("split")
    assert one.related and one.skewed and not dataclasses.replace(one, related=False).skewed


def test_tools_and_speculation() -> None:
    waiting = sampler(workload(turns=4, tool_s=5.0, tool_tokens=100, max_length=8192))
    assert float(waiting.seconds[0]) > float(sampler(workload()).seconds[0]) + 10.0
    from planner.serving.traffic import Speculation

    drafted = sampler(workload(speculation=Speculation(depth=3, acceptance=0.8)))
    assert float(drafted.seconds[0]) < float(sampler(workload()).seconds[0])
