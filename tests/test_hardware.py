"""Hardware profiles: complete, physics, measured points, monotony."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import library
from planner.curves import COLLECTIVES, bus_factor, least_factor
from planner.errors import PlannerError
from planner.hardware import FAMILIES, MEMORY_OPS, PASSES, HardwareProfile, load_hardware

NAMES = library.names("hardware")
PROFILES = {name: load_hardware(name) for name in NAMES}
H100 = PROFILES["h100-sxm"]
SHAPES = st.floats(1.0, 1e7)
SIZES = st.floats(1.0, 1e12)
MIB, GIB = 2.0**20, 2.0**30
# Hardware quantities that the methods read, with the pairs (bigger is never slower) they must obey.
SPEEDS = ("peak_flops", "memory_bandwidth", "scale_up_bandwidth", "network_bandwidth")


def any_profile() -> st.SearchStrategy[HardwareProfile]:
    return st.sampled_from(sorted(PROFILES)).map(PROFILES.__getitem__)


# ------------------------------------------------------------------------------------------------ all profiles


def test_every_device_is_there() -> None:
    assert {"h100-sxm", "a100-sxm-80gb", "mi300x", "gb200-nvl72", "rtx-4090", "gaudi3"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_profile_is_complete(name: str) -> None:
    profile = PROFILES[name]
    assert profile.name == name
    assert set(profile.measured) == set(FAMILIES)
    assert set(profile.memory_fraction) == set(MEMORY_OPS)
    assert profile.sources and profile.sources["specs"]
    assert (library.profiles_directory() / "hardware" / f"{name}.yaml").stat().st_size < 60_000
    assert all(price.date and price.source for price in profile.prices)
    assert 0.2 < profile.sustained_flops("bf16") / profile.peak("bf16") < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str) -> None:
    data = PROFILES[name].to_dict()
    again = HardwareProfile.from_dict(data)
    assert again.to_dict() == data
    assert float(again.gemm_time(4096, 4096, 4096)) == pytest.approx(
        float(PROFILES[name].gemm_time(4096, 4096, 4096)), 1e-9
    )
    dumped = library.dump_yaml(data)
    assert "scale_out" in dumped


def test_round_trip_through_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(library.dump_yaml(H100.to_dict()))
    assert load_hardware(str(path)).to_dict() == H100.to_dict()


# ------------------------------------------------------------------------------------------------ measured points

# Copied by hand from the raw tables; tolerance = the p90 error stated in the file for that family.
GEMM_POINTS = [  # name, dtype, m, n, k, TFLOP/s
    ("h100-sxm", "bf16", 8192, 8192, 8192, 789.0),  # community torch matmul
    ("a100-sxm-80gb", "bf16", 4096, 4096, 4096, 250.4),  # aiconfigurator sglang table
    ("a100-sxm-80gb", "bf16", 1024, 4096, 4096, 165.5),  # the same: two waves, the second nearly empty
    ("rtx-pro-6000", "bf16", 8192, 8192, 8192, 408.0),  # specs note
    ("mi300x", "bf16", 16384, 16384, 16384, 708.0),  # rocm-blogs @8e01195
]


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k", "tflops"), GEMM_POINTS)
def test_gemm_points(name: str, dtype: str, m: int, n: int, k: int, tflops: float) -> None:
    rate = 2.0 * m * n * k / PROFILES[name].gemm_time(m, n, k, dtype) / 1e12
    assert rate == pytest.approx(tflops, rel=0.11)


@pytest.mark.parametrize(
    ("name", "heads", "seq", "causal", "pass_", "microseconds"),
    [  # NVIDIA/cudnn-frontend @3929da2 on H200, 8 kv heads, head size 128; SimuMax @4dcaae5 on B200
        ("h200-sxm", 64, 4096, True, "forward", 465.0),
        ("h200-sxm", 64, 16384, True, "forward", 6531.0),
        ("h200-sxm", 64, 8192, False, "forward", 3182.0),
        ("h200-sxm", 64, 8192, True, "backward", 5083.0),
        ("h100-sxm", 64, 32768, True, "backward", 75688.0),
        ("b200-sxm", 128, 4096, True, "forward", 490.31),
        ("b200-sxm", 32, 4096, True, "backward", 383.53),
    ],
)
def test_attention_points(name: str, heads: int, seq: int, causal: bool, pass_: str, microseconds: float) -> None:
    time = PROFILES[name].attention_time(1, heads, 8, 128, seq, seq, causal, pass_)
    assert time * 1e6 == pytest.approx(microseconds, rel=0.10)


def test_latent_attention_point() -> None:
    """MLA, 192 for keys and 128 for values, 128 heads, 8k on H200: 16162 us backward (cudnn-frontend @3929da2)."""
    time = PROFILES["h200-sxm"].attention_time(1, 128, 128, 192, 8192, 8192, pass_="backward", value_dim=128)
    assert time * 1e6 == pytest.approx(16162, rel=0.05)


@pytest.mark.parametrize(
    ("name", "op", "size", "n", "microseconds"),
    [  # ai-dynamo/aiconfigurator @095f58a nccl tables; dgxc-benchmarking @841f546; CoreWeave nccl-tests
        ("h100-sxm", "all_reduce", 512 * MIB, 8, 2111.1),
        ("h100-sxm", "all_gather", 512 * MIB, 4, 1267.5),
        ("h100-sxm", "all_reduce", 16 * GIB, 8, 62648.0),
        ("a100-sxm-80gb", "reduce_scatter", 512 * MIB, 8, 2207.1),
        ("b200-sxm", "all_to_all", 512 * MIB, 8, 834.17),
        ("gb200-nvl72", "all_reduce", 8 * GIB, 72, 20299.0),
        ("rtx-pro-6000", "all_gather", 512 * MIB, 8, 20405.0),
    ],
)
def test_scale_up_points(name: str, op: str, size: float, n: int, microseconds: float) -> None:
    assert PROFILES[name].scale_up_time(op, size, n) * 1e6 == pytest.approx(microseconds, rel=0.02)


@pytest.mark.parametrize(("nodes", "bus"), [(4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260)])
def test_reduce_scatter_over_many_nodes(nodes: int, bus: float) -> None:
    """github.com/NVIDIA/nccl/issues/1229, H100 with 8x400G: not used in the fit."""
    n, size = 8 * nodes, 8 * GIB
    predicted = bus_factor("reduce_scatter", n) * size / H100.scale_out_time("reduce_scatter", size, n, 8) / 1e9
    assert predicted == pytest.approx(bus, rel=0.10)


@pytest.mark.parametrize(
    ("name", "op", "size", "n", "network", "milliseconds"),
    [  # CoreWeave 8 nodes; ALCF Sophia 2 nodes; OCI MI355X 4 nodes; OCI B300 2 nodes
        ("h100-sxm", "all_reduce", 8 * GIB, 64, None, 43.98),
        ("a100-sxm-80gb", "all_gather", GIB, 16, None, 5.712),
        ("a100-sxm-80gb", "all_to_all", GIB, 16, None, 25.26),
        ("mi355x", "all_reduce", 8 * GIB, 32, None, 44.95),
        ("b300-sxm", "all_to_all", 8 * GIB, 16, None, 44.5),
        ("b200-sxm", "all_reduce", 16 * GIB, 32, None, 87.18 / 0.955),  # EFA torch bench, within 10 percent
    ],
)
def test_scale_out_points(name: str, op: str, size: float, n: int, network: float | None, milliseconds: float) -> None:
    profile = PROFILES[name]
    ratio = 1.0 if network is None else network / profile.network_bandwidth
    time = profile.scaled(network_bandwidth=ratio).scale_out_time(op, size, n, 8)
    assert time * 1e3 == pytest.approx(milliseconds, rel=0.10)


# ------------------------------------------------------------------------------------------------ physics


@settings(max_examples=150, deadline=None)
@given(
    any_profile(),
    SHAPES,
    SHAPES,
    SHAPES,
    st.sampled_from(PASSES),
    st.sampled_from(("bf16", "fp16", "fp8", "fp8_block")),
)
def test_gemm_is_finite_and_below_the_peak(
    profile: HardwareProfile, m: float, n: float, k: float, pass_: str, dtype: str
) -> None:
    if "fp8" in dtype and "fp8" not in profile.peak_flops:
        return
    time = profile.gemm_time(m, n, k, dtype, pass_)
    assert np.isfinite(time) and time > 0
    assert 2.0 * m * n * k / time <= profile.peak(dtype) * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(any_profile(), SHAPES, SHAPES, SHAPES, st.sampled_from((0, 1, 2)))
def test_larger_gemm_takes_longer(profile: HardwareProfile, m: float, n: float, k: float, axis: int) -> None:
    """Twice the size is never faster by more than the noise that the residual grid carries (5 percent)."""
    shape = np.array([m, n, k])
    twice = shape * np.where(np.arange(3) == axis, 2.0, 1.0)
    assert profile.gemm_time(*twice) >= 0.95 * profile.gemm_time(*shape)


@settings(max_examples=100, deadline=None)
@given(any_profile(), st.floats(1, 1e5), SHAPES, SHAPES, st.integers(1, 512), st.sampled_from(PASSES))
def test_grouped_gemm(profile: HardwareProfile, tokens: float, n: float, k: float, groups: int, pass_: str) -> None:
    time = profile.grouped_gemm_time(tokens, n, k, groups, pass_=pass_)
    assert 2.0 * tokens * n * k * groups / time <= profile.peak("bf16") * (1 + 1e-9)
    assert profile.grouped_gemm_time(2 * tokens, n, k, groups, pass_=pass_) >= time
    assert profile.grouped_gemm_time(tokens, n, k, 2 * groups, pass_=pass_) >= time


@settings(max_examples=100, deadline=None)
@given(
    any_profile(), st.integers(1, 64), st.integers(1, 128), st.sampled_from((40, 64, 80, 96, 128, 192, 256)),
    st.integers(1, 2**18), st.booleans(), st.sampled_from(("forward", "backward")), st.sampled_from((0, 128, 4096)),
)  # fmt: skip
def test_attention(
    profile: HardwareProfile, batch: int, heads: int, d: int, s: int, causal: bool, pass_: str, window: int
) -> None:
    time = profile.attention_time(batch, heads, heads, d, s, s, causal, pass_, window=window)
    keys = min(window or s, s)
    pairs = s * keys - (0.5 * keys * keys if causal else 0)
    flop = 4.0 * batch * heads * pairs * d * (2.5 if pass_ == "backward" else 1.0)
    assert np.isfinite(time) and flop / time <= profile.peak("bf16") * (1 + 1e-9)
    assert profile.attention_time(2 * batch, heads, heads, d, s, s, causal, pass_, window=window) >= time * (1 - 1e-12)
    assert profile.attention_time(batch, heads, heads, d, 2 * s, 2 * s, causal, pass_, window=window) >= time * 0.99


@settings(max_examples=200, deadline=None)
@given(any_profile(), st.sampled_from(COLLECTIVES), SIZES, st.integers(1, 4096))
def test_scale_up_is_monotone_and_below_the_link(profile: HardwareProfile, op: str, size: float, n: int) -> None:
    time = profile.scale_up_time(op, size, n)
    if n == 1:
        assert time == 0
        return
    link = profile.scale_up_bandwidth if n <= profile.scale_up_domain else profile.pcie_bandwidth
    assert least_factor(op, n) * size / time <= link * (1 + 1e-9) or n <= profile.scale_up_domain
    assert profile.scale_up_time(op, 2 * size, n) >= time


@settings(max_examples=200, deadline=None)
@given(any_profile(), st.sampled_from(COLLECTIVES), SIZES, st.integers(1, 9), st.integers(1, 512))
def test_scale_out_is_monotone_and_below_the_network(
    profile: HardwareProfile, op: str, size: float, ranks: int, nodes: int
) -> None:
    ranks = min(ranks, int(profile.gpus_per_node))
    n = ranks * nodes
    time = profile.scale_out_time(op, size, n, ranks)
    if n == 1:
        assert time == 0
        return
    assert np.isfinite(time) and time > 0
    assert profile.scale_out_time(op, 2 * size, n, ranks) >= time
    assert profile.scaled(network_bandwidth=2).scale_out_time(op, size, n, ranks) <= time
    assert profile.achieving(network_latency=2).scale_out_time(op, size, n, ranks) >= time
    if nodes > 2 and op not in ("all_to_all", "send_recv"):
        assert bus_factor(op, n) * size / time <= ranks * profile.network_bandwidth * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantity", SPEEDS)
def test_more_bandwidth_is_never_slower(name: str, quantity: str) -> None:
    before, after = PROFILES[name], PROFILES[name].scaled(**{quantity: 2.0})
    size = np.logspace(0, 11, 60)
    for old, new in (
        (before.gemm_time(size / 1e4, 4096, 4096), after.gemm_time(size / 1e4, 4096, 4096)),
        (before.memory_time(size, "copy"), after.memory_time(size, "copy")),
        *((before.scale_up_time(op, size, 8), after.scale_up_time(op, size, 8)) for op in COLLECTIVES),
        *((before.scale_out_time(op, size, 64, 4), after.scale_out_time(op, size, 64, 4)) for op in COLLECTIVES),
    ):
        assert np.all(new <= old * (1 + 1e-12))


@pytest.mark.parametrize("name", NAMES)
def test_batch_equals_single(name: str) -> None:
    profile = PROFILES[name]
    generator = np.random.default_rng(1)
    m, n, k = np.exp(generator.uniform(0, 16, (3, 50)))
    groups = np.floor(np.exp(generator.uniform(0, 7, 50)))
    for pass_ in PASSES:
        column = profile.gemm_time(m, n, k, pass_=pass_)
        np.testing.assert_array_equal(column, [profile.gemm_time(*x, pass_=pass_) for x in zip(m, n, k, strict=True)])
    column = profile.attention_time(2, groups, 1, 128, n, n)
    np.testing.assert_allclose(
        column, [profile.attention_time(2, g, 1, 128, x, x) for g, x in zip(groups, n, strict=True)]
    )
    for op in COLLECTIVES:
        size = m * 1e4
        column = profile.scale_up_time(op, size, groups)
        np.testing.assert_array_equal(
            column, [profile.scale_up_time(op, s, g) for s, g in zip(size, groups, strict=True)]
        )
        column = profile.scale_out_time(op, size, groups, 4)
        np.testing.assert_array_equal(
            column, [profile.scale_out_time(op, s, g, 4) for s, g in zip(size, groups, strict=True)]
        )


def test_limits() -> None:
    for op in COLLECTIVES:
        assert H100.scale_up_time(op, GIB, 1) == 0 and H100.scale_up_time(op, 0, 8) == 0
        assert H100.scale_out_time(op, GIB, 1, 1) == 0 and H100.scale_out_time(op, 0, 64, 8) == 0
        assert H100.scale_out_time(op, GIB, 8, 8) == H100.scale_up_time(op, GIB, 8)
    assert H100.grouped_gemm_time(0, 4096, 4096, 8) == 0
    assert H100.memory_time(0, "copy") == 0
    strided = H100.scale_out_time("all_gather", GIB, 16, 1)
    assert strided > 6 * H100.scale_out_time("all_gather", GIB, 128, 8) * 0.9  # one NIC instead of eight


def test_two_node_all_reduce_is_not_extrapolated() -> None:
    """The NVLS tree of two B200 nodes passes the NICs; four nodes must not."""
    b200 = PROFILES["b200-sxm"]
    bus = [
        bus_factor("all_reduce", 8 * g) * 8 * GIB / b200.scale_out_time("all_reduce", 8 * GIB, 8 * g, 8) for g in (2, 4)
    ]
    assert bus[0] > 8 * b200.network_bandwidth > bus[1]


def test_attention_kernels() -> None:
    best = H100.attention_time(1, 32, 8, 128, 8192, 8192)
    for length, rate in ((2048, 298), (4096, 319), (16384, 335)):  # TFLOP/s, arXiv 2407.08608, figure 5, causal
        flop = 2 * 16384 * 2048 * length
        found = H100.attention_time(16384 // length, 16, 16, 128, length, length, kernel="fa2")
        assert flop / found == pytest.approx(rate * 1e12, rel=0.04)
    assert H100.attention_time(1, 32, 8, 128, 8192, 8192, dtype="fp8", kernel="fa2") > best  # it has no fp8
    assert H100.attention_time(1, 32, 8, 128, 8192, 8192, kernel="cudnn") == best
    assert H100.attention_time(1, 32, 8, 128, 8192, 8192, kernel="fa3") > best


def test_scaled() -> None:
    twice = H100.scaled(network_bandwidth=2, memory=2)
    assert twice.network_bandwidth == 2 * H100.network_bandwidth and twice.memory == 2 * H100.memory
    with pytest.raises(PlannerError, match="unknown scale 'network_bandwith'; known, nearest first: network_bandwidth"):
        H100.scaled(network_bandwith=2)
    with pytest.raises(PlannerError, match="must be above 0"):
        H100.scaled(network_bandwidth=0)


def test_columns_are_quick() -> None:
    """A thousand rows in a call: well below what a search can afford (generous, machines differ)."""
    import time

    m = np.exp(np.random.default_rng(2).uniform(4, 12, 1000))
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        H100.gemm_time(m, 4096, 4096)
        H100.scale_out_time("all_gather", m * 1e4, 64, 8)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02


@pytest.mark.parametrize(("name", "rate"), [("b200-sxm", 5.37e15), ("gb300-nvl72", 7.307e15)])
def test_nvfp4_meets_cublas_and_keeps_its_rate_at_large_shapes(name: str, rate: float) -> None:
    """The published points of 8192 cubed; at 16384 cubed cuBLAS is as fast (131.94, 1044.08 us on B300), not a quarter slower."""
    times = [float(PROFILES[name].gemm_time(n, n, n, "nvfp4", quantised=True)) for n in (8192.0, 16384.0)]
    assert 2 * 8192.0**3 / times[0] == pytest.approx(rate, rel=0.01)
    assert 1.0 <= 8.0 * times[0] / times[1] <= 1.15


def test_nvfp4_meets_the_tutorial_of_transformer_engine() -> None:
    """Twelve products of a layer of width 4096 in a loop on B300: 3.764 ms."""
    shapes = [(12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)]
    layer = sum(PROFILES["b300-sxm"].gemm_times(15872, n, k, "nvfp4", True, 1.0).sum() for n, k in shapes)
    assert layer / PROFILES["b300-sxm"].sustained_clock == pytest.approx(3.764e-3, rel=0.02)


def test_named_attention_kernels_of_another_vendor_do_not_run() -> None:
    """An AMD device takes the best curve of its NVIDIA relative; 'fa2' is AOTriton there, slower by pass, 'fa3' is nothing."""
    device = load_hardware("mi300x")
    assert {kernel for kernel, _, _ in device.attention} == {"best"}
    shape = (4, 32, 8, 128, 4096, 4096)
    for pass_, slower in (("forward", 1.4), ("backward", 3.3)):
        best, torch_ = (float(device.attention_time(*shape, pass_=pass_, kernel=kernel)) for kernel in ("best", "fa2"))
        assert torch_ == pytest.approx(slower * best)
    with pytest.raises(PlannerError, match="fa3"):
        device.attention_time(*shape, kernel="fa3")
    assert {"best", "fa2"} <= {kernel for kernel, _, _ in load_hardware("h100-sxm").attention}


@pytest.mark.parametrize(("cube", "measured"), [(1024, 57.3), (2048, 78.2), (4096, 95.7), (8192, 97.4), (10240, 89.4)])
def test_products_of_v100_meet_its_own_table(cube: int, measured: float) -> None:
    """TFLOP/s of torch's fp16 matmul on V100-SXM2, the source in its profile; those of V100S, a PCIe card, are lower."""
    rate = 2.0 * cube**3 / float(PROFILES["v100-sxm2-16gb"].gemm_time(cube, cube, cube)) / 1e12
    assert rate == pytest.approx(measured, rel=0.2 if cube < 4096 else 0.07)


@pytest.mark.parametrize(
    ("pass_", "kernel", "measured"),
    [("forward", "best", 1173), ("backward", "best", 1034), ("forward", "fa2", 630), ("backward", "fa2", 224)],
)
def test_attention_of_mi355x_meets_its_benchmark(pass_: str, kernel: str, measured: float) -> None:
    """TFLOP/s of AITER and of AOTriton, 16 sequences of 8192 tokens, 16 heads, causal (source in the profile)."""
    flop = (4.0 if pass_ == "forward" else 10.0) * 16 * 16 * 8192**2 * 128 / 2.0
    seconds = float(PROFILES["mi355x"].attention_time(16, 16, 16, 128, 8192, 8192, pass_=pass_, kernel=kernel))
    assert flop / seconds / 1e12 == pytest.approx(measured, rel=0.16)
