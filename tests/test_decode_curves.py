"""The kernels of serving: they load, grow with every size, and respect what the hardware can do."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.linear_attention import LinearAttention
from planner.model import load_model
from planner.serving.curves import DecodeCurves, decode_curves
from planner.serving.curves.decode_curves import ENGINES
from planner.serving.curves.expert_kernels import slowest_rank
from planner.serving.curves.kernel_tables import Kernel, Likeness, kernel_from, measured_devices
from planner.serving.engine import load_engine
from planner.serving.served import Served
from planner.serving.serving_layout import CACHE_BYTES, CACHES, WEIGHT_BYTES, WEIGHTS, Precision, ServingLayout
from planner.serving.step import Pass, step_time
from tools import build_decode_curves

ROOT = Path(__file__).resolve().parent.parent
SCALED = ("mi300x", "v100-sxm2-32gb", "h20-sxm", "l4")
SIZES = np.unique(np.round(np.exp(np.linspace(0.0, np.log(40_000.0), 90))))
FEW = np.unique(np.round(np.exp(np.linspace(0.0, np.log(2_000.0), 50))))
HEADS = {"heads": 8.0, "kv_heads": 2.0, "head_dim": 128.0}
EXPERTS = {"hidden": 4096.0, "ffn": 1536.0, "top_k": 8.0, "experts": 128.0, "moe_tp": 1.0, "ep": 1.0}
MIXER = LinearAttention(
    kind="gated_delta_net", num_layers=1, key_heads=16, key_head_dim=128, value_heads=32, value_head_dim=128
)


@pytest.fixture(scope="module", params=(*measured_devices(), *SCALED))
def curves(request: pytest.FixtureRequest) -> DecodeCurves:
    return decode_curves(load_hardware(request.param))


def grows(times: np.ndarray, least: np.ndarray | float = 0.0) -> None:
    times = np.asarray(times)
    assert np.all(np.isfinite(times)) and np.all(times > 0)
    assert np.all(np.diff(times) >= -1e-9 * times[1:]), (
        f"falls at {np.argmax(np.diff(times) < -1e-9 * times[1:])}: {times}"
    )
    assert np.all(times >= least)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_products(curves: DecodeCurves, weights: str) -> None:
    bandwidth = curves.hardware.memory_bandwidth
    bytes_of = WEIGHT_BYTES[weights]
    for n, k in ((300.0, 4096.0), (8192.0, 8192.0), (28672.0, 5120.0)):
        grows(curves.linear_time(SIZES[SIZES <= 128], n, k, weights), bytes_of * n * k / bandwidth)
    grows(curves.linear_time(16, SIZES, 3000, weights), bytes_of * SIZES * 3000 / bandwidth)
    grows(curves.linear_time(100, 3000, SIZES, weights), bytes_of * SIZES * 3000 / bandwidth)


def test_a_fused_quantisation_is_not_paid_for(curves: DecodeCurves) -> None:
    """The product alone is at most as long, never below reading its weights, and on small shapes no longer than that of bf16."""
    for weights in WEIGHTS:
        for n, k in ((1280.0, 8192.0), (8192.0, 8192.0)):
            alone, whole = (curves.linear_time(SIZES, n, k, weights, fused=one) for one in (True, False))
            grows(alone[SIZES <= 128])
            assert np.all(alone <= whole + 1e-9)
            if weights in ("fp8", "nvfp4") and curves.hardware.arch.startswith(("Hopper", "Blackwell")):
                assert alone[0] <= 1.1 * curves.linear_time(1, n, k, "bf16")


def test_many_rows_follow_the_profile(curves: DecodeCurves) -> None:
    """Above the tables: no step at their end, and the profile's own curve from four times as many rows on."""
    for n, k in ((4096.0, 4096.0), (10240.0, 8192.0)):
        rows = np.array([127.0, 128.0, 129.0, 512.0, 4096.0])
        times = curves.linear_time(rows, n, k, "bf16")
        profile = curves.hardware.gemm_time(rows, n, k, "bf16")
        assert times[2] < 1.1 * times[0]
        assert times[3:] == pytest.approx(np.maximum(profile[3:], times[1]))


def test_few_shapes_at_many_rows_are_those_of_each_alone(curves: DecodeCurves) -> None:
    """To the end of the tables as the kernel says of every row, also beyond the shapes that were measured; above as of one."""
    n = np.array([[300.0, 5000.0, 28672.0], [8192.0, 100.0, 53248.0]])
    k = np.array([[8192.0, 4096.0, 1024.0], [1.0, 9000.0, 16384.0]])
    rows = np.array([0.5, 1.0, 7.3, 100.0, 128.0, 128.5, 300.0, 512.0, 5000.0])
    shape = np.arange(rows.size) % 3
    for weights, fused in ((one, kind) for one in WEIGHTS for kind in (False, True)):
        found, few = curves.products(n, k, weights, fused), rows <= 128
        times = found.time(rows, shape)
        sizes = {"m": np.maximum(rows[few], 1.0), "n": n[:, shape[few]], "k": k[:, shape[few]]}
        assert times[:, few] == pytest.approx(found.kernel.time(sizes), rel=1e-12)
        alone = curves.linear_time(rows, n[:, shape], k[:, shape], weights, fused)
        assert times == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("cache", CACHES)
def test_attention_of_one_token(curves: DecodeCurves, cache: str) -> None:
    def read(batch: object, context: object) -> object:
        return (
            2.0
            * np.asarray(batch)
            * np.asarray(context)
            * 2.0
            * 128.0
            * CACHE_BYTES[cache]
            / curves.hardware.memory_bandwidth
        )

    for batch in (1.0, 37.0, 300.0):
        grows(curves.decode_attention_time(batch=batch, context=SIZES, cache=cache, **HEADS), read(batch, SIZES))
    grows(curves.decode_attention_time(batch=FEW, context=5000.0, cache=cache, **HEADS), read(FEW, 5000.0))
    for vary in ("heads", "kv_heads", "head_dim"):
        sizes = np.array([64.0, 80.0, 128.0, 192.0, 256.0]) if vary == "head_dim" else np.array([2.0, 4.0, 8.0])
        shape = {**HEADS, vary: sizes, **({"heads": 8.0 * sizes} if vary == "kv_heads" else {})}
        grows(curves.decode_attention_time(batch=64.0, context=3000.0, cache=cache, **shape))
    windowed = curves.decode_attention_time(batch=64.0, context=SIZES, cache=cache, window=1024.0, **HEADS)
    grows(windowed)
    assert windowed[-1] < curves.decode_attention_time(batch=64.0, context=SIZES[-1], cache=cache, **HEADS)
    grows(curves.decode_mla_time(64.0, 16.0, SIZES, cache), read(64.0, SIZES) * 1.125)
    grows(curves.decode_mla_time(FEW, 16.0, 5000.0, cache))
    grows(curves.decode_mla_time(64.0, np.array([1.0, 8.0, 16.0, 64.0, 128.0, 256.0]), 5000.0, cache))


def test_attention_of_a_prompt(curves: DecodeCurves) -> None:
    shape = {"heads": 8.0, "kv_heads": 2.0, "head_dim": 128.0, "value_dim": 0.0}
    grows(curves.prefill_attention_time(queries=SIZES, keys=SIZES, **shape))
    grows(curves.prefill_attention_time(queries=512.0, keys=512.0 + SIZES, **shape))
    whole = float(curves.prefill_attention_time(queries=8192.0, keys=8192.0, **shape))
    first, second = (
        float(curves.prefill_attention_time(queries=4096.0, keys=keys, **shape)) for keys in (4096.0, 8192.0)
    )
    assert second > 1.8 * first and whole <= 1.05 * (first + second) <= 2.0 * whole, "chunks do the work of the whole"
    assert curves.prefill_attention_time(queries=8192.0, keys=8192.0, window=512.0, **shape) < 0.5 * whole


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_sparse_attention(curves: DecodeCurves, cache: str) -> None:
    """It is dense up to its keys and beyond that grows with the pairs that the indexer scores."""
    shape = {"heads": 16.0, "top_k": 2048.0, "index_heads": 64.0, "index_dim": 128.0}
    grows(curves.sparse_prefill_time(queries=SIZES, keys=SIZES, cache=cache, **shape))
    grows(curves.sparse_prefill_time(queries=1024.0, keys=1024.0 + SIZES, cache=cache, **shape))
    grows(
        curves.sparse_prefill_time(
            queries=8192.0, keys=8192.0, cache=cache, **{**shape, "heads": np.array([1.0, 16.0, 64.0, 128.0])}
        )
    )
    few = curves.sparse_prefill_time(queries=2048.0, keys=2048.0, cache=cache, **shape)
    dense = curves.prefill_attention_time(
        queries=2048.0, keys=2048.0, heads=16.0, kv_heads=16.0, head_dim=192.0, value_dim=128.0
    )
    assert dense < few < 5.0 * dense


def test_a_step_pays_for_sparse_attention() -> None:
    """8,192 tokens of a DeepSeek-V3.2 prompt on one of 8 H200: 5.9 ms a layer measured with its projections; dense is a tenth."""
    engine, hardware = load_engine("sglang"), load_hardware("h200-sxm")
    work, layout = Pass(batch=1.0, context=1.0, prompts=1.0, prompt_tokens=8192.0), ServingLayout(tp=8, moe_tp=8)
    dense, sparse = (
        float(
            step_time(
                Served(model=load_model(name), hardware=hardware, engine=engine, precision=Precision()), layout, work
            ).attention
        )
        for name in ("deepseek-v3", "deepseek-v3.2")
    )
    assert 4e-3 < sparse / 61.0 < 5.9e-3 and sparse > 5.0 * dense


@pytest.mark.parametrize("engine", ENGINES)
def test_all_reduces(curves: DecodeCurves, engine: str) -> None:
    if curves.hardware.gpus_per_node == 1:
        return
    sizes = 2.0 ** np.arange(7, 30, 0.5)
    for kind in ("graph", "eager"):
        for ranks in (2.0, 3.0, 8.0):
            grows(curves.all_reduce_time(sizes, ranks, kind, engine), sizes / curves.hardware.scale_up_bandwidth)
        grows(curves.all_reduce_time(65536.0, np.arange(2.0, 17.0), kind, engine))
    assert curves.all_reduce_time(4096, 8, "graph", engine) <= curves.all_reduce_time(4096, 8, "eager", engine)
    assert curves.all_reduce_time(4096, 1, "graph", engine) == 0
    assert curves.all_reduce_time(4096, 8, "nccl", engine) == curves.hardware.scale_up_time("all_reduce", 4096, 8)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("skewed", [True, False])
def test_experts(curves: DecodeCurves, weights: str, skewed: bool) -> None:
    def time(tokens: object = 64.0, **shape: Any) -> np.ndarray:
        return np.asarray(curves.experts_time(tokens, weights=weights, skewed=skewed, **{**EXPERTS, **shape}))

    each = 3.0 * 4096.0 * 1536.0 * WEIGHT_BYTES[weights] / curves.hardware.memory_bandwidth
    grows(time(SIZES), 7.5 * each)
    assert float(time(20_000.0)) >= 125.0 * each, "all experts are read"
    grows(time(hidden=SIZES))
    grows(time(ffn=SIZES))
    grows(time(top_k=np.arange(1.0, 17.0)))
    assert np.all(time(SIZES, ep=8.0) >= time(SIZES, ep=8.0, sent=True))
    for tokens in (1.0, 64.0, 4096.0):
        grows(time(tokens, ep=2.0 ** np.arange(7, -1, -1)))
        grows(time(tokens, moe_tp=2.0 ** np.arange(4, -1, -1)))


def test_experts_of_many_rows_follow_grouped_products() -> None:
    """At 2,048 rows per expert not below the peak, and near grouped products; the join does not jump."""
    curves, hardware = decode_curves(load_hardware("h100-sxm")), load_hardware("h100-sxm")
    shape = {"hidden": 4096.0, "ffn": 14336.0, "top_k": 2.0, "experts": 8.0, "moe_tp": 1.0, "ep": 1.0}
    time = float(curves.experts_time(8192.0, weights="bf16", skewed=False, **shape))
    grouped = sum(
        float(hardware.grouped_gemm_time(2048.0, n, k, 8.0, "bf16")) for n, k in ((28672.0, 4096.0), (4096.0, 14336.0))
    )
    assert grouped < time < 1.3 * grouped and time > 2.0 * 16384.0 * 3.0 * 4096.0 * 14336.0 / hardware.peak("bf16")
    tokens = np.arange(200.0, 1400.0, 4.0)
    times = curves.experts_time(tokens, weights="bf16", skewed=False, **shape)
    assert np.all(np.diff(times) / times[1:] < 0.03)


def test_experts_of_an_engine_without_rows_are_launched_less() -> None:
    hardware = load_hardware("b200-sxm")
    vllm, trtllm = (decode_curves(hardware, engine) for engine in ("vllm", "trtllm"))
    shape = {**EXPERTS, "hidden": 7168.0, "ffn": 2048.0, "experts": 256.0, "moe_tp": 8.0}
    few, many = (
        vllm.experts_time(one, weights="nvfp4", **shape) - trtllm.experts_time(one, weights="nvfp4", **shape)
        for one in (1.0, 512.0)
    )
    assert 5e-6 < few < 25e-6 and many == pytest.approx(few, rel=0.05)
    assert "launches of trtllm derived" in trtllm.provenance["experts"] and "derived" not in vllm.provenance["experts"]


def test_mxfp4_runs_on_fp4_cores_where_there_are_some() -> None:
    """Blackwell's kernel of nvfp4 reads it, and Hopper's unpacks it."""
    shape = {"hidden": 2880.0, "ffn": 2880.0, "top_k": 4.0, "experts": 128.0, "moe_tp": 1.0, "ep": 1.0}
    times = {
        name: float(decode_curves(load_hardware(name)).experts_time(16384.0, weights="mxfp4", **shape))
        for name in ("h100-sxm", "b200-sxm")
    }
    assert times["h100-sxm"] > 3.0 * times["b200-sxm"]


def test_dispatch_and_combine(curves: DecodeCurves) -> None:
    for time in (curves.dispatch_time, curves.combine_time):
        grows(time(SIZES, 7168, 8, 256, 8))
        grows(time(64, SIZES, 8, 256, 16))
        grows(time(64, 7168, np.arange(1.0, 17.0), 256, 32))
        assert time(64, 7168, 8, 256, 1) == 0
    assert curves.combine_time(2048, 7168, 8, 256, 8) > curves.dispatch_time(2048, 7168, 8, 256, 8)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention", "mamba2"])
def test_linear_attention(curves: DecodeCurves, kind: str) -> None:
    mixer = LinearAttention(kind=kind, num_layers=1, key_heads=16, key_head_dim=128, value_heads=32, value_head_dim=128)
    grows(curves.linear_attention_time(mixer, FEW))
    grows(curves.linear_attention_time(mixer, 4, SIZES))
    assert curves.linear_attention_time(mixer, 0.1, 512) == pytest.approx(
        0.1 * curves.linear_attention_time(mixer, 1, 512)
    )
    grows(curves.linear_attention_time(mixer, 64, 1, np.array([8.0, 4.0, 2.0, 1.0])))


def test_every_device_has_curves() -> None:
    for name in library.names("hardware"):
        curves = decode_curves(load_hardware(name))
        assert set(curves.provenance) >= {"linear", "decode_attention", "decode_mla", "experts", "all_reduce"}
        measured = name in measured_devices()
        assert curves.provenance["linear"].startswith("measured" if measured else "scaled from")


def test_relatives_are_alike() -> None:
    assert {name: Likeness.of(load_hardware(name)) for name in library.names("decode")} == measured_devices()
    for name, relative in {"h20-sxm": "h100-sxm", "a100-sxm-40gb": "a100-sxm-80gb", "l4": "l40s", "mi355x": "b200-sxm",
                           "rtx-5090": "rtx-pro-6000", "h800-sxm": "h100-sxm", "gh200-96gb": "h100-sxm"}.items():  # fmt: skip
        assert decode_curves(load_hardware(name)).provenance["experts"].endswith(relative), name


def test_quirks_of_an_engine_stay_with_the_vendor_of_the_device() -> None:
    """SGLang's fp8 cache of latent attention is slow on Hopper; on AMD another kernel runs, and 8 bits are no slower than 16."""
    sizes = {"batch": 64.0, "context": 5000.0, "heads": 16.0}
    nvidia, amd = (decode_curves(load_hardware(name), "sglang") for name in ("h200-sxm", "mi325x"))
    assert nvidia.decode_mla_time(**sizes, cache="fp8") > 3.0 * nvidia.decode_mla_time(**sizes, cache="bf16")
    assert amd.decode_mla_time(**sizes, cache="fp8") <= amd.decode_mla_time(**sizes, cache="bf16")


def test_a_scaled_profile_scales() -> None:
    """What-if: twice the bandwidth halves what is read; nothing is kept from the profile of the same name."""
    hardware = load_hardware("h100-sxm")
    once = decode_curves(hardware).decode_attention_time(batch=256, context=16384, **HEADS)
    twice = decode_curves(hardware.scaled(memory_bandwidth=2.0)).decode_attention_time(
        batch=256, context=16384, **HEADS
    )
    assert twice == pytest.approx(once / 2.0, rel=0.1)
    assert decode_curves(hardware).decode_attention_time(batch=256, context=16384, **HEADS) == once


def test_touched_experts_and_the_busiest_rank() -> None:
    """One token of 8 in 256 reads 8 experts, 64 tokens nearly all; under skew the busiest of 32 ranks gets twice the mean."""
    curves = decode_curves(load_hardware("h100-sxm"))
    shape = {**EXPERTS, "experts": 256.0, "hidden": 7168.0, "ffn": 2048.0}
    each = 3.0 * 7168.0 * 2048.0 * WEIGHT_BYTES["fp8_block"] / curves.hardware.memory_bandwidth
    times = curves.experts_time(np.array([1.0, 4.0, 16.0, 64.0, 256.0]), weights="fp8_block", skewed=False, **shape)
    touched = (times - times[0]) / each
    assert touched * 0.88 + 8 == pytest.approx([8, 31, 102, 222, 256], rel=0.15)
    one = np.ones(2)
    for skewed, mean in ((False, [1.01, 1.03]), (True, [1.3, 2.0])):
        rows = slowest_rank(16384 * one, 8 * one, 256 * one, np.array([8.0, 32.0]), skewed)[1]
        assert rows / [16384, 4096] == pytest.approx(mean, abs=0.05)


def test_measured_rows_come_back() -> None:
    """Some rows of the tables, microseconds: 8192 x 8192 in bf16 and fp8, 64 sequences of 2,048 tokens, small all-reduces."""
    curves = decode_curves(load_hardware("h100-sxm"))
    assert curves.linear_time(64, 8192, 8192, "bf16") * 1e6 == pytest.approx(49, rel=0.1)
    assert curves.linear_time(8, 8192, 8192, "fp8", fused=False) * 1e6 == pytest.approx(29.2, rel=0.1)
    heads = {"heads": 8, "kv_heads": 1, "head_dim": 128}
    assert curves.decode_attention_time(batch=64, context=2048, **heads) * 1e6 == pytest.approx(37.8, rel=0.1)
    assert curves.all_reduce_time(2048, 8, "graph", "trtllm") * 1e6 == pytest.approx(3.4, rel=0.1)
    assert curves.all_reduce_time(2048, 8, "eager", "vllm") * 1e6 == pytest.approx(23.8, rel=0.1)
    assert curves.decode_mla_time(64, 16, 8192) * 1e6 == pytest.approx(218, rel=0.1)


def test_files_are_small_and_say_their_errors() -> None:
    assert sum(path.stat().st_size for path in (library.profiles_directory() / "decode").glob("*.yaml")) < 1.2e6
    for name in ("h100-sxm", "h200-sxm", "b200-sxm"):
        errors = decode_curves(load_hardware(name)).errors
        assert errors["linear"]["bf16"]["held_out"][0] < 6
        assert errors["decode_attention"]["bf16 128 vllm"]["held_out"][0] < 4
        assert errors["experts"]["bf16 vllm"]["held_out"][0] < 10


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"law": "launch"}, "each with its number"),
        ({"law": "launch x"}, "expected numbers"),
        ({"law": "launch -1"}, "must not be below 0"),
        ({"law": "launch 1", "axes": {"m": "1 2"}, "percent": "100"}, "percent holds 1 numbers"),
        ({"law": "launch 1", "axes": {"m": "2 1"}, "percent": "100 100"}, "increasing"),
        ({"laws": ""}, "law"),
    ],
)
def test_a_broken_file_is_one_sentence(data: dict, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        kernel_from(data, "linear", "bf16", load_hardware("h100-sxm"), "file")


def test_unknown_names() -> None:
    curves = decode_curves(load_hardware("h100-sxm"))
    for wrong in (
        lambda: curves.linear_time(1, 1, 1, "fp5"), lambda: curves.all_reduce_time(1, 2, "grpah", "vllm"),
        lambda: decode_curves(load_hardware("h100-sxm"), "vlm"), lambda: curves.decode_mla_time(1, 1, 1, "int4"),
    ):  # fmt: skip
        with pytest.raises(PlannerError):
            wrong()


def test_the_page_shows_the_errors_of_the_files() -> None:
    assert build_decode_curves.errors_table() in (ROOT / "docs" / "serving-kernels.md").read_text(encoding="utf-8")


def test_the_tool_finds_a_law_again(tmp_path: Path) -> None:
    """Rows made by a known law, with a tenth of them spoilt: its numbers come back, and shapes in between are priced by it."""
    hardware = load_hardware("h100-sxm")
    numbers = {"launch": 3.0, "memory": 1.25, "compute": 1.5, "depth": 2.0}
    known = Kernel("linear", "bf16", hardware, numbers)
    random = np.random.default_rng(0)
    lines = ["gpu,engine,version,dtype,m,n,k,time_us"]
    for m, n, k in itertools.product(
        (1, 4, 8, 16, 32, 64, 128), (512, 1024, 2048, 5120, 8192), (512, 1024, 2048, 5120, 8192)
    ):
        us = 1e6 * float(known.time({"m": np.float64(m), "n": np.float64(n), "k": np.float64(k)}))
        lines.append(f"H100-SXM,vllm,1,bfloat16,{m},{n},{k},{us * (2.0 if random.random() < 0.1 else 1.0)}")
    for name in build_decode_curves.TABLES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) if "gemm" in name else "gpu,impl,engine\n")
    (tmp_path / "sources.yaml").write_text("aic-012: {package: made up, licence: none, trust: A}\n")
    (tmp_path / "decode").mkdir(exist_ok=True)
    build_decode_curves.build(tmp_path, ("h100-sxm",), tmp_path / "decode")
    data = library.read_yaml(tmp_path / "decode" / "h100-sxm.yaml")
    found = kernel_from(data["kernels"]["linear"]["bf16"], "linear", "bf16", hardware, "written")
    assert found.numbers == pytest.approx(numbers, rel=0.03)
    between = {
        "m": np.array([2.0, 24.0, 100.0]),
        "n": np.array([700.0, 3000.0, 7000.0]),
        "k": np.array([6000.0, 1500.0, 800.0]),
    }
    assert found.time(between) == pytest.approx(known.time(between), rel=0.05)
    assert not (tmp_path / "docs").exists()
