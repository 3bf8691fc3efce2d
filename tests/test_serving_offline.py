"""Runs for throughput: what is not streamed, what the token budget feeds, what pipelines wait for, and steps without graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.hardware import load_hardware
from planner.serving import load
from planner.serving.curves.kernel_tables import Kernel, kernel_from
from planner.serving.engine_passes import Engine
from planner.serving.result import StepTime
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Traffic
from tests.serve_samples import served

DENSE = served()


def offline(prompt: float, answer: float, **more: str) -> Traffic:
    return Traffic(input=Lengths.fixed(prompt), output=Lengths.fixed(answer), load="offline", value=3000.0, **more)


def test_who_measures_throughput_inside_the_process_takes_whole_answers() -> None:
    """The host makes a response for each token of a stream; TensorRT-LLM sends one at the end of an answer otherwise."""
    one, layout = served(engine="trtllm@1.0"), ServingLayout(tp=2, max_batch=1024)
    whole = offline(128.0, 2048.0, client="process")
    streamed = float(Engine(one, layout, offline(128.0, 2048.0)).decode(600.0))
    assert streamed - float(Engine(one, layout, whole).decode(600.0)) == pytest.approx(600 * one.engine.host["streamed"])
    first = Engine(one, layout, replace(whole, load="rate"))  # times to first token need a stream
    assert float(first.decode(600.0)) == pytest.approx(streamed)


def test_a_budget_feeds_so_many_requests_and_the_rest_waits() -> None:
    """1,024 tokens in and 128 out, 2,304 a pass: 2,304 x 128 / 1,152 = 256 decode at once, whatever the cache holds."""
    traffic, one = offline(1024.0, 128.0), served(engine="trtllm@1.3")
    engine = Engine(one, ServingLayout(tp=2, max_batch=4096, max_tokens=2304), traffic)
    assert float(engine.fed()) == pytest.approx(256.0)
    few, many = (load.offline(engine, 3000.0, most) for most in (256.0, 2000.0))
    assert float(many.running) == pytest.approx(float(few.running), rel=0.01) and float(many.running) <= 256.0
    full = load.closed(engine, 256.0, 2000.0, queued=True)
    assert float(many.rate) == pytest.approx(float(full.rate))  # out of step, no waves
    stops = Engine(served(engine="sglang"), ServingLayout(tp=2, max_batch=4096, max_tokens=2304), traffic)
    assert np.isinf(stops.fed())  # prompts have passes of their own
    wide = Engine(one, ServingLayout(tp=1, pp=2, attn_dp=2, max_batch=4096, max_tokens=2304), traffic)
    assert float(wide.fed()) == pytest.approx(4 * 256.0)


def _parts(one: StepTime) -> tuple[float, float, float]:
    return float(one.total), float(one.head), float(one.communication)


@pytest.mark.parametrize(("batch", "prompts"), [(1.0, 0.0), (256.0, 0.0), (256.0, 1.0)])
def test_all_stages_wait_for_the_one_with_the_head(batch: float, prompts: float) -> None:
    """80 layers in 4 stages: 4 times a quarter of the layers and the head where four groups are in flight, T with one sequence;
    the longest of 6 stages has 14 layers."""
    one = served(engine="vllm")
    for stages in (4, 6):
        layout, alone = (ServingLayout(tp=2, pp=pp, max_batch=256) for pp in (stages, 1))
        work = Pass(batch=batch, context=1024.0, prompts=prompts, prompt_tokens=2048.0)
        total, head, communication = _parts(step_time(one, layout, work))
        plain, _, own = _parts(step_time(one, alone, replace(work, batch=batch / stages)))
        size = 2.0 * one.model.hidden_size * max(batch / stages + 2048.0 * prompts, 1.0)
        sends = (stages - 1) * float(one.cluster.collective_time("send_recv", size, 2, 2))
        groups = stages if prompts or batch > 1.0 else 1.0
        tau = np.ceil(80 / stages) / 80 * (plain - head) + head
        assert total == pytest.approx(max(plain + sends, groups * tau), rel=1e-9)
        assert communication - own == pytest.approx(total - plain, rel=1e-6)


def test_tokens_of_a_pipeline_are_relayed_by_the_hosts_of_all_stages() -> None:
    """TensorRT-LLM on 4 stages: 3 hops of each of 4 groups, 12 times 6 us for each of the 64 sequences of a group."""
    one, work = served(engine="trtllm@1.0"), Pass(batch=256.0, context=512.0)
    host = float(step_time(one, ServingLayout(tp=1, pp=4, max_batch=256), work).host)
    alone = float(step_time(one, ServingLayout(tp=1, max_batch=64), replace(work, batch=64.0)).host)
    assert host - alone == pytest.approx(12 * 64 * 6e-6)


def test_without_graphs_kernels_wait_for_their_launches() -> None:
    """TensorRT-LLM 0.20 captured none unless asked: 13 kernels in each of 80 layers, 5 us of each are seen."""
    layout, work = ServingLayout(tp=2, max_batch=512), Pass(batch=256.0, context=1024.0)
    before, after = (step_time(served(engine=f"trtllm@{version}"), layout, work) for version in ("0.20", "1.0"))
    assert float(before.host) - float(after.host) == pytest.approx(80 * 13 * 5e-6)


def test_a_product_walks_along_k_while_it_reads() -> None:
    """Where its file says so: launch + max(memory, depth) + compute, by hand; shapes of a mesh are as measured."""
    hardware = load_hardware("rtx-pro-6000")
    data = {"law": "launch 6 memory 1.2 depth 14 compute 0.5", "overlaps": True}
    both = [kernel_from(one, "linear", "nvfp4", hardware, "here") for one in (data, {**data, "overlaps": False})]
    for n, k in ((8192.0, 8192.0), (512.0, 8192.0)):
        sizes = {"m": np.array([64.0]), "n": np.array([n]), "k": np.array([k])}
        memory = 1.2 * (0.5625 * n * k + 2.0 * 64.0 * (n + k)) / hardware.memory_bandwidth
        depth, compute = 14e-6 * k / 4096.0, 0.5 * 2.0 * 64.0 * n * k / hardware.peak("fp4")
        found = [float(one.time(sizes)[0]) for one in both]
        assert found == pytest.approx([6e-6 + max(memory, depth) + compute, 6e-6 + memory + depth + compute])
    assert not Kernel("linear", "nvfp4", hardware, {}).overlaps
