"""The memory of an engine by its own accounting: by hand, as servers print it, column by column."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.hardware import load_hardware
from planner.model import ModelSpec, load_model
from planner.serving.engine import engine_names, load_engine
from planner.serving.host_weights import experts_seconds, products_seconds
from planner.serving.result import ServingMemory, normal_share
from planner.serving.served import Served
from planner.serving.serving_layout import WEIGHT_BYTES, Precision, ServingLayout
from planner.serving.serving_memory import preemption_chance, serving_memory
from planner.serving.serving_rules import legal, violations
from planner.serving.serving_weights import stages, weight_bytes
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Speculation, Traffic
from planner.units import GIB, KIB, MIB

H100, H200 = (load_hardware(name) for name in ("h100-sxm", "h200-sxm"))
ASK = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(1024))
DEGREES = ("tp", "pp", "replicas", "attn_dp", "ep", "moe_tp", "dcp", "max_batch", "max_tokens")


def memory_of(
    model: ModelSpec | str, hardware: str, engine: str, precision: Precision | None = None, **layout: Any
) -> ServingMemory:
    """Memory of a layout under ASK."""
    spec = load_model(model) if isinstance(model, str) else model
    found = ServingLayout(**layout)
    return serving_memory(spec, load_hardware(hardware), load_engine(engine), precision or Precision(), found, ASK)


def test_llama_70b_on_eight_h100_by_hand() -> None:
    """70.55e9 parameters, all but norms over 8 ranks; the peak is sampling: 38 B x 256 x 128,256 logits."""
    found = memory_of("llama-70b", "h100-sxm", "vllm@0.15", tp=8, max_batch=256)
    norms = (2 * 80 + 1) * 8192
    weights = 2.0 * ((70_553_706_496 - norms) / 8 + norms)
    peak, graphs, total = 38.0 * 256 * 128256, 0.75 * MIB * (3 + 31 + 17) * 80, 79.2 * GIB
    assert found.weights == pytest.approx(weights, rel=1e-6)
    assert found.activations == peak and found.graphs == graphs
    assert found.cache == pytest.approx(0.90 * total - weights - peak - 1.3 * GIB)
    assert found.bytes_per_token == 2 * 80 * 128 * 2.0, "one of eight key-value heads on each rank"
    assert found.capacity == pytest.approx(found.cache / found.bytes_per_token)
    assert found.bytes_per_sequence == 8 * found.bytes_per_token, "half a block of 16 tokens"
    newer = memory_of("llama-70b", "h100-sxm", "vllm@0.33", tp=8, max_batch=256)
    assert newer.cache == pytest.approx(0.92 * total - weights - peak - 1.3 * GIB - newer.graphs), (
        "0.21 counts the graphs"
    )
    parts = (found.weights, found.draft, found.activations, found.graphs, found.reserve, found.cache)
    assert sum(parts) == pytest.approx(total)


def test_llama_70b_in_sglang_and_tensorrt_llm_by_hand() -> None:
    weights = memory_of("llama-70b", "h100-sxm", "vllm", tp=8).weights
    sglang = memory_of("llama-70b", "h100-sxm", "sglang", tp=8, max_batch=2048)
    reserve = (512 + 1.5 * 8192 + 1024 * 8 / 8 + 2 * 512) * MIB
    assert sglang.cache == pytest.approx((79.2 - 2.55) * GIB * (1 - reserve / (79.2 * GIB)) - weights)
    trt = memory_of("llama-70b", "h100-sxm", "trtllm@1.1", tp=8, max_batch=256)
    free = 79.2 * GIB - weights - trt.activations - trt.graphs - 3 * GIB - 8 * 40e6
    assert trt.cache == pytest.approx(0.9 * free)
    old = memory_of("llama-70b", "h100-sxm", "sglang@0.4.1", tp=8)
    assert old.cache == pytest.approx((79.2 - 2.55) * GIB * 0.81 - weights)


LOGS = {
    "llama-3.1-8b a100-sxm-80gb vllm@0.6.6": ({"max_tokens": 8192}, 14.99, 1.19, 54.93),
    "qwen3-next-80b-a3b h200-sxm vllm@0.11.0": ({"tp": 2, "moe_tp": 2, "max_batch": 1024}, 74.28, 5.58, 44.59),
    "gpt-oss-120b h100-sxm vllm@0.10.1": ({"max_batch": 1024}, 65.97, 7.4, -2.14),
    "llama-70b h200-sxm sglang@0.5.3": ({"tp": 8, "max_batch": 2048}, 16.4, None, 106.62),
}
"""GiB of weights, peak and cache that servers printed when they started; gpt-oss had to be told to use more of the memory."""


@pytest.mark.parametrize("name", LOGS)
def test_memory_is_what_servers_print_when_they_start(name: str) -> None:
    model, hardware, engine = name.split()
    layout, weights, peak, cache = LOGS[name]
    precision = Precision(experts="mxfp4") if model == "gpt-oss-120b" else Precision()
    found = memory_of(model, hardware, engine, precision, **layout)
    assert found.weights / GIB == pytest.approx(weights, rel=0.005)
    assert peak is None or found.activations / GIB == pytest.approx(peak, rel=0.05)
    own = (
        found.usable * load_engine(engine).accounting.share - found.weights - found.activations
        if found.raised
        else found.cache
    )
    assert own / GIB == pytest.approx(cache, abs=0.5)
    assert bool(found.raised) == (cache < 0) and found.fits


def test_deepseek_v3_keeps_68_kib_a_token_on_every_rank_and_attention_whole_on_each() -> None:
    layout = {"tp": np.array([1, 8]), "attn_dp": np.array([8, 1]), "ep": np.array([8, 1]), "moe_tp": np.array([1, 8])}
    fp8 = Precision(weights="fp8_block")
    found = memory_of("deepseek-v3", "h200-sxm", "sglang", fp8, **layout)
    assert np.all(found.bytes_per_token == 61 * 576 * 2) and pytest.approx(68.6, abs=0.05) == 61 * 576 * 2 / KIB
    assert found.weights[1] / GIB == pytest.approx(79.2, rel=0.01), (
        "137.3 - 58.12 GiB, as a server of eight H200 printed"
    )
    assert found.weights[0] > found.weights[1] + 10 * GIB, "attention is not split"
    assert found.capacity[0] > 4 * found.capacity[1], "why attention data parallelism pays"
    half = memory_of("deepseek-v3", "h200-sxm", "sglang", replace(fp8, cache="fp8"), **layout)
    assert np.all(half.bytes_per_token == 61 * 576)


@pytest.mark.parametrize("name", ["llama-70b", "qwen3-32b", "mixtral-8x7b"])
def test_weights_of_the_stages_add_up_to_the_model(name: str) -> None:
    model, engine, layout = load_model(name), load_engine("vllm"), ServingLayout(tp=4, pp=4, moe_tp=4)
    first, middle, last = (
        float(weight_bytes(model, engine, Precision(), layout, one)) for one in stages(model, engine, layout)
    )
    alone = replace(layout, pp=1)
    whole = float(weight_bytes(model, engine, Precision(), alone, stages(model, engine, alone)[2]))
    assert first + 2 * middle + last == pytest.approx(whole, rel=1e-9)


def test_every_format_of_a_dense_model_has_a_size() -> None:
    for form, size in WEIGHT_BYTES.items():
        found = memory_of("llama-70b", "b200-sxm", "vllm", Precision(weights=form), tp=8)
        tables = 2 * 2 * 128256 * 8192 / 8
        assert found.weights == pytest.approx(68.45e9 / 8 * size + tables, rel=0.002), form


def test_left_over_layers_go_where_the_engine_puts_them() -> None:
    model = load_model("deepseek-v3")  # 61 layers
    columns = ServingLayout(pp=np.array([2, 3, 4]))
    layers = {
        name: [list(one.layers) for one in stages(model, load_engine(name), columns)] for name in ("vllm", "trtllm")
    }
    assert layers["vllm"] == [[31, 20, 15], [31, 21, 16], [30, 20, 15]]
    assert layers["trtllm"] == [[31, 21, 16], [30, 20, 15], [30, 20, 15]]


def test_windows_states_and_drafts() -> None:
    oss = memory_of("gpt-oss-120b", "h200-sxm", "vllm", Precision(experts="mxfp4"))
    assert (
        oss.bytes_per_token == 18 * 2 * 8 * 64 * 2
        and oss.bytes_per_sequence == 128 * oss.bytes_per_token + 8 * oss.bytes_per_token
    )
    assert memory_of("gpt-oss-120b", "h200-sxm", "trtllm@0.19", Precision()).bytes_per_token == 36 * 2 * 8 * 64 * 2
    mamba = memory_of("qwen3-next-80b-a3b", "h200-sxm", "sglang")
    state = 36 * (4 * 32 * 128 * 128 + 2 * (2 * 2048 + 4096) * 3)
    assert mamba.bytes_per_sequence == pytest.approx(state + 0.5 * mamba.bytes_per_token)
    model = load_model("deepseek-v3")
    for parameters, weights in ((1e9, 0.0), (0.0, 0.0)):
        ask = replace(ASK, speculation=Speculation(depth=2, acceptance=0.8, draft_parameters=parameters))
        layout, fp8 = ServingLayout(tp=8, ep=8), Precision(weights="fp8_block")
        found = serving_memory(model, H200, load_engine("vllm"), fp8, layout, ask)
        assert found.bytes_per_token == (61 + (parameters > 0)) * 576 * 2, (
            "the module that drafts keeps a cache of its own"
        )
        assert (1.0 < found.draft / GIB < 1.8) if parameters else found.draft == weights
    small = replace(ASK, speculation=Speculation(depth=4, acceptance=0.7, draft_parameters=1e9))
    assert (
        serving_memory(
            load_model("llama-70b"), H200, load_engine("vllm"), Precision(), ServingLayout(tp=8), small
        ).draft
        == 2e9 / 8
    )


def random_layouts(seed: int, count: int) -> ServingLayout:
    draw = np.random.default_rng(seed)
    pick = lambda *values: draw.choice(values, count)  # noqa: E731
    return ServingLayout(
        tp=pick(1, 2, 3, 4, 8, 16), pp=pick(1, 2, 3, 4, 80), replicas=pick(1, 2), attn_dp=pick(1, 2, 8), ep=pick(1, 2, 4, 8, 64),
        moe_tp=pick(1, 2, 4, 8, 72), dcp=pick(1, 2, 3), max_batch=pick(1, 7, 64, 300, 4096), max_tokens=pick(64, 2048, 8192),
    )  # fmt: skip


def row(layout: ServingLayout, index: int) -> ServingLayout:
    return ServingLayout(**{name: int(getattr(layout, name)[index]) for name in DEGREES})


MODELS = ("llama-70b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3.2", "qwen3-235b-a22b")


@pytest.mark.parametrize("engine", ["vllm", "vllm@0.6", "sglang@0.5.9", "sglang@0.4.9", "trtllm"])
def test_columns_are_what_each_layout_is_alone(engine: str) -> None:
    layouts, one = random_layouts(5, 40), load_engine(engine)
    for number, name in enumerate(MODELS):
        model, precision = load_model(name), Precision(weights=("bf16", "fp8_block", "int4")[number % 3])
        whole = serving_memory(model, H200, one, precision, layouts, ASK)
        mask = legal(model, H200, one, precision, layouts)
        for index in range(number, 40, 6):
            alone = serving_memory(model, H200, one, precision, row(layouts, index), ASK)
            for field in (
                "weights",
                "draft",
                "activations",
                "graphs",
                "reserve",
                "cache",
                "capacity",
                "spread",
                "bytes_per_sequence",
            ):
                assert np.broadcast_to(getattr(whole, field), 40)[index] == pytest.approx(getattr(alone, field)), field
            assert bool(mask[index]) == (not violations(model, H200, one, precision, row(layouts, index)))


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("name", ["llama-70b", "deepseek-v3"])
def test_more_of_anything_is_never_less_room(engine: str, name: str) -> None:
    fp8, degrees = Precision(weights="fp8"), np.array([4, 8, 16, 32])
    split = memory_of(name, "b200-sxm", engine, fp8, tp=degrees, moe_tp=degrees)
    assert (
        np.all(np.diff(split.weights) < 0) and np.all(np.diff(split.cache) > 0) and np.all(np.diff(split.capacity) > 0)
    )
    batches = np.array([8, 256, 2048, 8192])
    larger = memory_of(name, "b200-sxm", engine, fp8, tp=8, moe_tp=8, max_batch=batches)
    assert np.all(np.diff(larger.cache) <= 0) and np.all(np.diff(larger.activations) >= 0)
    cards = [replace(H200, usable_memory=size * GIB) for size in (130.0, 150.0)]
    at = ServingLayout(tp=8, moe_tp=8)
    small, big = (serving_memory(load_model(name), one, load_engine(engine), fp8, at, ASK) for one in cards)
    assert big.cache > small.cache


def test_a_share_is_raised_before_a_server_is_said_not_to_start() -> None:
    """DeepSeek-R1 in fp8 on four B200 leaves SGLang's reserve nothing: 0.86 of the memory is less than its weights."""
    fp8 = Precision(weights="fp8_block")
    tight = memory_of("deepseek-v3", "b200-sxm", "sglang@0.5.9", fp8, tp=4, moe_tp=4, max_tokens=16384)
    assert tight.raised and tight.fits and 5 * GIB < tight.cache < 16 * GIB
    free = (178.35 - 2.55) * GIB
    assert tight.share == pytest.approx((tight.cache + tight.weights) / free) and 0.93 < tight.share < 0.99
    none = memory_of("deepseek-v3", "h200-sxm", "sglang@0.5.9", fp8, tp=4, moe_tp=4, max_batch=64)
    assert not none.fits and none.cache < 0 and none.capacity == 0.0 and none.start_chance < 1e-3
    sure = memory_of("llama-70b", "h100-sxm", "vllm", tp=8)
    assert sure.fits and sure.start_chance > 0.999 and not sure.raised and sure.share == 0.92


def test_weights_in_host_memory_leave_the_gpu_and_take_the_link_or_the_cpu() -> None:
    layer = 2 * (80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)) / 8
    whole, half = (memory_of("llama-70b", "h100-sxm", "vllm", tp=8, gpu_weights=share) for share in (100, 50))
    assert whole.weights - half.weights == pytest.approx(layer / 2, rel=1e-3) and half.capacity > whole.capacity
    dense, sparse = (
        Served(model=load_model("llama-70b"), hardware=H100, engine=load_engine("vllm")),
        load_model("deepseek-v3"),
    )
    at, some = ServingLayout(tp=8), ServingLayout(tp=8, gpu_weights=np.array([100, 50, 10]))
    rate = min(H100.pcie_bandwidth, H100.host_memory_bandwidth / 8)
    assert float(products_seconds(dense, at, 0.01)) == 0.01
    assert products_seconds(dense, some, 0.01)[0] == 0.01
    assert products_seconds(dense, some, 0.01)[1] == pytest.approx(0.005 + layer / 2 / rate, rel=1e-3)
    mixed = Served(model=sparse, hardware=H200, engine=load_engine("sglang"), precision=Precision(weights="fp8_block"))
    one = ServingLayout(tp=8, moe_tp=8, gpu_weights=25)
    bytes_read = 0.75 * 256 * (1 - (1 - 8 / 256) ** 4) * 3 * 7168 * 2048 * WEIGHT_BYTES["fp8_block"]
    cpu = (
        bytes_read / (H200.host_memory_bandwidth * H200.cpu_adam_bandwidth_fraction)
        + 2 * 2 * 4 * 7168 / H200.pcie_bandwidth
    )
    assert experts_seconds(mixed, one, 1e-5, 4.0) == pytest.approx(cpu)
    assert experts_seconds(mixed, one, 1e-5, 8192.0) > 0.75 * 2 * 8192 * 8 * 3 * 7168 * 2048 / 43e12, (
        "many tokens are arithmetic"
    )
    assert experts_seconds(mixed, replace(one, gpu_weights=100), 1e-5, 4.0) == 1e-5
    on_host = memory_of(
        "deepseek-v3", "h100-sxm", "sglang", Precision(weights="fp8_block"), tp=8, moe_tp=8, gpu_weights=25
    )
    assert (
        on_host.fits
        and not memory_of("deepseek-v3", "h100-sxm", "sglang", Precision(weights="fp8_block"), tp=8, moe_tp=8).fits
    )
    slower = [
        float(step_time(mixed, replace(one, gpu_weights=share), Pass(batch=8, context=2048)).total)
        for share in (100, 60, 20)
    ]
    assert slower == sorted(slower) and slower[-1] > 2 * slower[0]


def test_chance_of_preemption_is_that_of_drawn_lengths() -> None:
    draw, layout = np.random.default_rng(3), ServingLayout(tp=8)
    ask = Traffic(input=Lengths.uniform(800, 1000), output=Lengths.fixed(1000))
    memory = replace(memory_of("llama-70b", "h100-sxm", "vllm", tp=8), capacity=100_000.0)
    lengths = draw.uniform(800, 1000, (4000, 70)) + draw.uniform(0, 1000, (4000, 70)) + 8
    for running in (66, 70):
        drawn = np.mean(lengths[:, :running].sum(axis=1) > 100_000)
        assert preemption_chance(load_engine("vllm"), layout, ask, memory, running) == pytest.approx(drawn, abs=0.03)
    assert preemption_chance(load_engine("trtllm"), layout, ask, memory, 70) == 0.0, "answers are reserved"
    assert np.all(np.diff(preemption_chance(load_engine("sglang"), layout, ask, memory, np.arange(1, 200))) >= 0)
    for x in (-3.0, -1.0, 0.0, 0.5, 2.0):
        assert normal_share(x) == pytest.approx(0.5 * math.erfc(-x / math.sqrt(2)), abs=2e-4)
