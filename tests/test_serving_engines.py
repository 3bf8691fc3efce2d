"""Engines as versioned data, the memory of an engine by its own accounting, and what it may run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import load_hardware
from planner.model import ModelSpec, load_model
from planner.serving.engine import FACTS, Engine, engine_names, load_engine
from planner.serving.host_weights import experts_seconds, products_seconds
from planner.serving.result import ServingMemory, normal_share
from planner.serving.served import Served
from planner.serving.serving_layout import WEIGHT_BYTES, Precision, ServingLayout
from planner.serving.serving_memory import preemption_chance, serving_memory
from planner.serving.serving_rules import RULES, legal, rules_of, violations
from planner.serving.serving_weights import stages, weight_bytes
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Speculation, Traffic
from planner.units import GIB, KIB, MIB

H100, H200, A100 = (load_hardware(name) for name in ("h100-sxm", "h200-sxm", "a100-sxm-80gb"))
ASK = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(1024))
DEGREES = ("tp", "pp", "replicas", "attn_dp", "ep", "moe_tp", "dcp", "max_batch", "max_tokens")


def memory_of(
    model: ModelSpec | str, hardware: str, engine: str, precision: Precision | None = None, **layout: Any
) -> ServingMemory:
    """Memory of a layout under ASK."""
    spec = load_model(model) if isinstance(model, str) else model
    found = ServingLayout(**layout)
    return serving_memory(spec, load_hardware(hardware), load_engine(engine), precision or Precision(), found, ASK)


# ---------------------------------------------------------------------------------------------------------------- engines


def test_an_engine_is_of_its_version() -> None:
    shares = {"0.6.3": 0.90, "v0.19.0": 0.90, "0.20": 0.92, "0.33.0": 0.92, "0.21.0rc1": 0.92}
    assert {one: load_engine(f"vllm@{one}").accounting.share for one in shares} == shares
    assert load_engine("vllm").version == "0.33" and not load_engine("vllm").note
    assert load_engine("vllm@0.33.4").note == "", "a patch of the newest minor version is known"
    assert "those of 0.33" in load_engine("vllm@0.99").note and "those of 0.4" in load_engine("sglang@0.3").note
    assert not load_engine("vllm@0.13").overlap_scheduler and load_engine("vllm@0.14").overlap_scheduler
    assert load_engine("vllm@0.7.3").mixes_prefill is False and load_engine("vllm@0.8").chunked_prefill
    assert [load_engine(name).admits for name in engine_names()] == ["input", "all", "input"]
    with pytest.raises(UnknownNameError):
        load_engine("vlm")
    with pytest.raises(PlannerError, match="'nightly' has no number; write vllm@0.33"):
        load_engine("vllm@nightly")


@pytest.mark.parametrize("name", engine_names())
def test_every_version_that_a_fact_names_is_an_engine(name: str) -> None:
    facts = library.read_yaml(library.find("engines", name))["facts"]
    assert set(facts) >= {"max_batch", "graphs", "accounting", "host", "formats", "kinds"} and set(facts) <= set(FACTS)
    for fact, history in facts.items():
        since = [tuple(map(int, one["since"].split("."))) for one in history]
        assert since == sorted(set(since)), f"{fact} of {name} is not in order"
        for one in history:
            engine = load_engine(f"{name}@{one['since']}")
            assert engine.sources[fact].startswith(f"since {one['since']}: ") and len(one["source"]) > 10


def defaults(engine: str, hardware: str, **layout: Any) -> tuple[float, float, float]:
    """Default batch and budget, and the largest graph at that batch."""
    one, card, at = load_engine(engine), load_hardware(hardware), ServingLayout(**layout)
    batch, tokens = float(one.default_max_batch(card, at)), float(one.default_max_tokens(card, at))
    return batch, tokens, float(one.largest_graph(replace(at, max_batch=int(batch)), card))


def test_defaults_by_card_and_version() -> None:
    assert defaults("vllm@0.33", "h100-sxm") == (1024, 8192, 512)
    assert defaults("vllm@0.33", "a100-sxm-80gb") == (256, 2048, 512), "a large budget costs an A100 throughput"
    assert defaults("vllm@0.33", "b200-sxm") == (1024, 16384, 1024)
    assert defaults("vllm@0.26", "b200-sxm") == (1024, 8192, 512)
    assert defaults("vllm@0.12", "l40s") == (256, 2048, 512)
    assert defaults("vllm@0.6.4", "h100-sxm") == (256, 2048, 256)
    assert defaults("sglang", "h200-sxm", tp=2) == (2048, 8192, 256)
    assert defaults("sglang", "h200-sxm", tp=4) == (2048, 8192, 512)
    assert defaults("sglang", "h200-sxm", tp=2, attn_dp=2, ep=4) == (4096, 8192, 512), (
        "tp as SGLang counts it: GPUs of a stage"
    )
    assert defaults("sglang", "b200-sxm") == (2048, 16384, 512)
    assert defaults("sglang@0.5.9", "rtx-4090") == (2048, 2048, 24) and defaults("sglang", "rtx-4090") == (
        2048,
        4096,
        48,
    )
    assert defaults("trtllm", "h100-sxm") == (2048, 8192, 2048)


def test_a_batch_is_padded_to_the_next_captured_size_and_eager_above_the_largest() -> None:
    vllm, at = load_engine("vllm@0.15"), ServingLayout(max_batch=200)
    batch = np.array([1.0, 3.0, 5.0, 9.0, 255.0, 257.0, 390.0, 401.0])
    assert list(vllm.padded(batch, at, H100)) == [1, 4, 8, 16, 256, 272, 400, 401], (
        "steps of 8, of 16 above 256, up to twice 200"
    )
    assert list(vllm.captured(batch, at, H100)) == [True] * 7 + [False]
    assert float(load_engine("vllm@0.11").padded(257, at, H100)) == 264
    ranks = ServingLayout(attn_dp=2, ep=2, max_batch=200)
    assert not vllm.captured(201, ranks, H100), "graphs are captured for the batch of a rank"
    sglang = load_engine("sglang")
    assert (
        float(sglang.padded(9, ServingLayout(max_batch=512), H100)) == 12
        and float(sglang.padded(9, ServingLayout(max_batch=10), H100)) == 10
    )
    assert [
        float(load_engine(f"trtllm@{one}").padded(130, ServingLayout(), H100)) for one in ("0.20", "1.2", "1.3")
    ] == [130, 256, 192]


def test_the_own_all_reduce_ends_at_a_size_by_version_card_and_gpus() -> None:
    n = np.array([1, 2, 3, 4, 8, 16])
    assert list(load_engine("vllm@0.10.2").all_reduce_limit(H100, n) / MIB) == [0, 8, 0, 8, 8, 0]
    assert list(load_engine("vllm").all_reduce_limit(H100, n) / MIB) == [0, 64, 0, 32, 64, 0]
    assert load_engine("vllm").all_reduce_limit(load_hardware("b300-sxm"), 8) == 64 * MIB
    assert load_engine("vllm@0.15").all_reduce_limit(load_hardware("b300-sxm"), 8) == 8 * MIB, "10.3 came with 0.19"
    assert load_engine("sglang@0.5.9").all_reduce_limit(load_hardware("mi300x"), 8) == 16 * MIB
    assert list(load_engine("vllm").all_reduce_limit(load_hardware("l40s"), np.array([2, 4]))) == [8 * MIB, 0], (
        "no link between any two"
    )


def test_a_cache_is_fp8_by_default_where_the_checkpoint_has_its_scales() -> None:
    assert (
        load_engine("trtllm").cache_dtype_default("fp8") == "fp8"
        and load_engine("trtllm").cache_dtype_default("fp8_block") == "bf16"
    )
    assert (
        load_engine("vllm").cache_dtype_default("fp8") == "bf16"
        and load_engine("vllm").cache_dtype_default("fp16") == "fp16"
    )
    assert (
        load_engine("vllm").cache_dtype_default("nvfp4") == "fp8"
        and load_engine("vllm@0.13").cache_dtype_default("nvfp4") == "bf16"
    )


# ----------------------------------------------------------------------------------------------------------------- memory


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


# ------------------------------------------------------------------------------------------------------------------ rules

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "vendor": ("trtllm llama-70b mi300x", {"tp": 8}, "trtllm runs on NVIDIA GPUs, and mi300x is from AMD; choose"),
    "model": ("vllm@0.9 qwen3-next-80b-a3b h100-sxm", {"tp": 2, "ep": 2}, "delta net layers, which vllm 0.9 does not run"),
    "formats": (
        "trtllm llama-70b h100-sxm nvfp4", {"tp": 8},
        "trtllm 1.3 does not run nvfp4 weights on h100-sxm (Hopper); it runs bf16, fp16, fp8, fp8_block, mxfp4, int4 there",
    ),
    "heads": ("vllm llama-70b h100-sxm", {"tp": 3}, "tp 3 does not divide the 64 heads of llama-3.1-70b; give a tp of 1, 2, 4"),
    "key-value heads": ("vllm qwen2.5-14b h100-sxm", {"tp": 5}, "tp 5 neither divides the 8 key-value heads"),
    "linear heads": ("vllm qwen3-next-80b-a3b h100-sxm", {"tp": 64, "ep": 64}, "tp 64 does not divide the 32 value heads"),
    "decode context": ("vllm llama-70b h100-sxm", {"tp": 8, "dcp": 2}, "tp 8 must be a multiple of 8 key-value heads x dcp"),
    "attention of TensorRT-LLM": (
        "trtllm deepseek-v3 h200-sxm", {"tp": 4, "attn_dp": 2, "ep": 8}, "tp 4 x attn_dp 2 is tp 1 x attn_dp 8",
    ),
    "stages": ("vllm llama-70b h100-sxm", {"tp": 8, "pp": 81}, "pp 81 is more than the 80 layers"),
    "MLP": ("sglang qwen3-32b h100-sxm fp8_block", {"tp": 16}, "into multiples of the 128 that share a scale"),
    "experts over ranks": ("sglang deepseek-v3 h200-sxm", {"tp": 8, "ep": 4}, "give ep x moe_tp = 8"),
    "number of experts": ("trtllm mixtral-8x7b h100-sxm", {"tp": 16, "ep": 16}, "ep 16 is more than the 8 experts"),
    "width of experts": (
        "vllm@0.28 qwen3-235b-a22b h100-sxm fp8_block", {"tp": 8, "moe_tp": 8},
        "moe_tp 8 does not divide the expert width 1536 of qwen3-235b-a22b into multiples of the 128",
    ),
    "experts of vLLM": (
        "vllm deepseek-v3 h200-sxm", {"tp": 8, "ep": 4, "moe_tp": 2}, "give ep 8 (--enable-expert-parallel) or ep 1",
    ),
    "dense model": ("vllm llama-70b h100-sxm", {"tp": 4, "attn_dp": 2}, "no routed experts: ep 1 and attn_dp 2 must be 1"),
    "weights in host memory": (
        "sglang deepseek-v3 h200-sxm fp8_block", {"tp": 4, "ep": 4, "gpu_weights": 50}, "and deepseek-v3 has ep 4 and attn_dp 1",
    ),
    "room in host memory": (
        "vllm deepseek-v3 rtx-4090", {"gpu_weights": 1}, "99 % of the weights on 1 GPU(s) are 1",
    ),
    "budget of a step": (
        "vllm llama-70b h100-sxm", {"tp": 8, "max_batch": 1024, "max_tokens": 512}, "max_tokens 512 is less than the 1024",
    ),
}  # fmt: skip
"""Rule -> engine, model, card and format; a layout that breaks it; part of the sentence."""


@pytest.mark.parametrize("name", [one.name for one in RULES])
def test_each_rule_says_what_is_wrong(name: str) -> None:
    words, layout, sentence = WRONG[name]
    engine, model, card, *form = words.split()
    precision = Precision(weights=form[0] if form else "bf16")
    one = (load_model(model), load_hardware(card), load_engine(engine), precision, ServingLayout(**layout))
    said = [line for line in violations(*one) if sentence in line]
    assert len(said) == 1 and not legal(*one), violations(*one)
    assert any(rule.name == name for rule in rules_of(one[2]))


def test_what_engines_run() -> None:
    ask = {
        ("vllm", "deepseek-v3", "h200-sxm", "fp8_block"): {"tp": 8, "moe_tp": 8},
        ("sglang", "deepseek-v3", "h200-sxm", "fp8_block"): {"tp": 2, "attn_dp": 4, "ep": 4, "moe_tp": 2},
        ("trtllm", "deepseek-v3", "gb200-nvl72", "nvfp4"): {"attn_dp": 36, "ep": 36},
        ("vllm", "llama-70b", "a100-sxm-80gb", "fp8"): {"tp": 4, "pp": 2},
        ("vllm", "llama-70b", "mi300x", "fp8"): {"tp": 16},
        ("vllm", "llama-70b", "h100-sxm", "bf16"): {"tp": 16, "dcp": 2},
        ("vllm", "deepseek-v3", "h200-sxm", "fp8"): {"tp": 8, "dcp": 8, "ep": 8},
        ("vllm@0.33", "qwen3-235b-a22b", "h100-sxm", "fp8_block"): {"tp": 8, "moe_tp": 8},
        ("sglang", "gpt-oss-120b", "mi355x", "mxfp4"): {"tp": 8, "moe_tp": 8},
    }
    for (engine, model, hardware, form), layout in ask.items():
        found = violations(
            load_model(model),
            load_hardware(hardware),
            load_engine(engine),
            Precision(weights=form),
            ServingLayout(**layout),
        )
        assert found == [], (engine, model)


def test_formats_by_generation() -> None:
    runs = lambda engine, form, card: load_engine(engine).runs(form, load_hardware(card))  # noqa: E731
    assert (
        runs("vllm", "nvfp4", "h100-sxm")
        and not runs("trtllm", "nvfp4", "h100-sxm")
        and runs("trtllm", "nvfp4", "b200-sxm")
    )
    assert (
        not runs("trtllm", "fp8", "a100-sxm-80gb")
        and runs("trtllm", "fp8", "l40s")
        and runs("vllm", "fp8", "a100-sxm-80gb")
    )
    assert runs("vllm", "fp8", "mi300x") and not runs("vllm", "fp8", "mi250x") and not runs("vllm", "nvfp4", "mi300x")
    assert not runs("vllm@0.9", "mxfp4", "b200-sxm") and runs("vllm@0.10.1", "mxfp4", "b200-sxm")
    assert not runs("vllm", "bf16", "t4") and runs("vllm", "fp16", "t4") and not runs("vllm", "fp16", "gaudi3")
    assert isinstance(load_engine("sglang"), Engine)
