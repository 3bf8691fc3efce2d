"""What the fits make of measured points: curves of a device that is known, few points, and none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from profiler_samples import H100, known

from planner.curves import GemmCurve
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.profile import definitions
from planner.lab.profile.compute_points import compute_points
from planner.lab.profile.definitions import EAGER, flop, moved_bytes
from planner.lab.profile.fit_compute import base_of, fit_compute
from planner.lab.profile.layer_check import predicted
from planner.lab.profile.points import Measured, Point

pytest.importorskip("torch")


def synthetic(profile: HardwareProfile, scatter: float, seed: int = 0) -> list[Measured]:
    """Points of the two models on a GPU that is exactly ``profile``, each disturbed by up to ``scatter``."""
    random = np.random.default_rng(seed)
    found = []
    eager = {op: 0.8 * profile.memory_fraction[op] for op in ("swiglu", "rope")}  # slower than the fused kernels
    plain = replace(profile, memory_fraction=profile.memory_fraction | eager)
    for point in compute_points(("llama-8b", "qwen3-30b-a3b"), "h100-sxm", "cuda"):
        value = point.values
        if point.family == "gemm" and value["dtype"] != "bf16":
            continue
        if point.family == "gemm" and value["pass"] == definitions.ACCUMULATING:
            sizes = (float(value[name]) for name in ("m", "n", "k"))
            seconds = float(profile.gemm_times(*sizes, "bf16")[2])
        elif point.family == "gemm":
            times = profile.gemm_times(*(float(value[name]) for name in ("m", "n", "k")), "bf16", gradient_bytes=1.0)
            seconds = float(times[definitions.GEMM_PASSES.index(str(value["pass"]))])
        elif point.family == "attention":
            size = {name: float(value[name]) for name in ("batch", "heads", "kv_heads", "head_dim")}
            slow = {"flash": 2.0, "cudnn": 1.0, "default": 1.0}[str(value["kernel"])]
            size |= {"seq_q": float(value["seq"]), "seq_kv": float(value.get("seq_kv", value["seq"]))}
            seconds = slow * float(
                profile.attention_time(**size, causal=bool(value["causal"]), pass_=str(value["pass"]))
            )
        elif point.family == "memory_bound" and str(value["op"]) in profile.memory_fraction:
            by = plain if value.get("kernel") == EAGER else profile
            seconds = float(by.memory_time(moved_bytes(point), str(value["op"])))
            seconds += definitions.kernels(point) * profile.launch_floor
        elif point.family == "launch" and value["kind"] in ("stream", "graph"):
            seconds = profile.launch_floor if value["kind"] == "stream" else profile.graph_launch_floor
        elif point.family == "sustained":
            burst = float(profile.gemm_time(*(float(value[name]) for name in ("m", "n", "k"))))
            found.append(known(point, burst / 0.83, first=burst))
            continue
        elif point.family == "bytes" and value["name"] == "usable":
            seconds = 85e9
        elif point.family == "layer":
            seconds = predicted(point, plain)
        else:
            continue
        found.append(known(point, seconds * float(np.exp(random.uniform(-scatter, scatter)))))
    return found


def test_fits_give_back_the_device_that_was_measured() -> None:
    """A GPU 0.9 times as fast as the guess in products, 0.8 in memory, measured with 2 percent scatter: the fitted
    profile prices every measured shape, and shapes between them, within a few percent of the truth."""
    truth = replace(
        H100,
        gemm={name: replace(one, efficiency=0.9 * one.efficiency, grid=None, m0=80.0) for name, one in H100.gemm.items()},
        attention={key: replace(one, efficiency=0.85 * one.efficiency) for key, one in H100.attention.items()},
        memory_fraction={op: 0.8 * fraction for op, fraction in H100.memory_fraction.items()},
    )  # fmt: skip
    measured = synthetic(truth, 0.02)
    fit = fit_compute(measured, base_of("cuda", measured, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    tokens, width = (np.exp2(np.arange(10.0, 15.0)), np.array([2500.0, 5000.0, 9000.0]))
    shapes = [axis.ravel() for axis in np.meshgrid(tokens, width, width)]
    ratio = found.gemm_times(*shapes, gradient_bytes=4.0) / truth.gemm_times(*shapes, gradient_bytes=4.0)
    assert np.median(np.abs(ratio - 1.0)) < 0.02 and np.max(np.abs(ratio - 1.0)) < 0.08
    for pass_ in ("forward", "backward"):
        for seq in (1500.0, 6000.0):
            pair = [float(one.attention_time(2, 32, 8, 128, seq, seq, pass_=pass_)) for one in (found, truth)]
            assert pair[0] == pytest.approx(pair[1], rel=0.08)
    for op in ("norm_forward", "swiglu", "rope", "permute", "optimizer", "cross_entropy"):
        assert found.memory_fraction[op] == pytest.approx(truth.memory_fraction[op], rel=0.05)
    assert found.sustained_clock == pytest.approx(0.83, rel=0.03)
    assert found.usable_memory == pytest.approx(85e9, rel=0.03)
    assert found.kernels["slowdown"]["fa2"]["forward"] == pytest.approx(2.0, rel=0.05)
    assert found.launch_floor == pytest.approx(2.5e-6, rel=0.03)
    assert fit.residuals["gemm bf16"]["held_out_percent_median_p90"]["all"][0] < 3.0
    assert fit.residuals["memory rope eager"]["fraction"] == pytest.approx(
        0.8 * truth.memory_fraction["rope"], rel=0.05
    )
    assert max(abs(row["error_percent"]) for row in fit.measurements["layer"]) < 6.0
    kinds = {("experts" in row, row["heads"]) for row in fit.measurements["layer"]}
    assert kinds == {(False, 32), (False, 4), (True, 32), (True, 4)}, "8b dense, 30b experts, whole and an eighth"
    assert set(fit.measured) == {"gemm", "attention", "memory"} and fit.spread["gemm"] == pytest.approx(1.0, rel=0.1)


def test_few_points_move_the_guess_and_keep_its_shape() -> None:
    """Three products at 0.8 of the guess's rate: all shapes follow; the rest of the guess stays."""
    points = [definitions.gemm("bf16", "forward", m, 4096, 4096) for m in (2048, 4096, 8192)]
    slow = [
        known(point, float(H100.gemm_time(*(float(point.values[n]) for n in ("m", "n", "k")))) / 0.8)
        for point in points
    ]
    fit = fit_compute(slow, base_of("cuda", slow, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    for shape in ((1024.0, 8192.0, 8192.0), (16384.0, 4096.0, 14336.0)):
        assert float(found.gemm_time(*shape)) == pytest.approx(float(H100.gemm_time(*shape)) / 0.8, rel=0.02)
    assert found.memory_fraction == H100.memory_fraction
    assert float(found.attention_time(1, 32, 8, 128, 4096, 4096)) == pytest.approx(
        float(H100.attention_time(1, 32, 8, 128, 4096, 4096))
    )


def test_no_fit_passes_the_peak_and_nothing_measured_is_an_error() -> None:
    points = [definitions.gemm("bf16", "forward", m, 4096, 4096) for m in (2048, 4096, 8192)]
    fast = [known(point, 0.5 * flop(point) / H100.peak("bf16")) for point in points]
    fit = fit_compute(fast, base_of("cuda", fast, H100), "cuda")
    assert fit.keys["gemm"]["bf16"]["efficiency"] <= 1.0
    HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    random = np.random.default_rng(
        1
    )  # a boosted clock: many shapes at 0.7 to 1.2 of the nominal peak, with a residual grid
    shapes = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 16384) for k in (1024, 4096, 16384)]
    many = [
        known(point, flop(point) / H100.peak("bf16") / random.uniform(0.7, 1.2))
        for shape in shapes
        for point in (definitions.gemm("bf16", name, *shape) for name in definitions.GEMM_PASSES)
    ]
    fit = fit_compute(many, base_of("cuda", many, H100), "cuda")
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys | {"measured": {**H100.measured, **fit.measured}})
    assert all(
        float(found.gemm_time(*shape)) >= 2.0 * np.prod(np.float64(shape)) / H100.peak("bf16") for shape in shapes
    )
    with pytest.raises(PlannerError, match="larger --budget"):
        base_of("cpu", [], None)
    with pytest.raises(PlannerError, match="give --hardware"):
        base_of("cuda", [], None)


def test_grouped_products_fit_back() -> None:
    curve = replace(H100.gemm["bf16"], grid=None, grouped_m0=(150.0, 180.0, 180.0), grouped_efficiency=(0.9, 0.85, 0.8))
    truth: GemmCurve = curve
    rows = []
    for which, pass_ in enumerate(definitions.GEMM_PASSES):
        for tokens in (128, 256, 512, 2048):
            t, n, k, g = (np.array(float(x)) for x in (tokens, 4096, 2048, 16))
            shape = ((t, n, k), (t, k, n), (n, k, t))[which]
            adds = pass_ == "wgrad"  # to an fp32 gradient, by the faster of two ways
            seconds = float(
                truth.grouped_time(t, *shape, g, which, H100.peak("bf16"), H100.memory_bandwidth, 4.0 if adds else 1.0)
            )
            sizes: dict[str, Any] = {"tokens": tokens, "n": 4096, "k": 2048, "groups": 16, "dtype": "bf16"}
            if adds:
                slow = Point.of("grouped_gemm", **sizes, kernel="loop", **{"pass": definitions.ACCUMULATING})
                rows.append(known(slow, 1.4 * seconds))
            sizes["pass"] = definitions.ACCUMULATING if adds else pass_
            rows.append(known(Point.of("grouped_gemm", **sizes), seconds))
    guess = replace(H100, gemm={"bf16": replace(curve, grouped_m0=(1.0, 1.0, 1.0), grouped_efficiency=(0.5, 0.5, 0.5))})
    fit = fit_compute(rows, base_of("cuda", rows, guess), "cuda")
    assert fit.keys["gemm"]["bf16"]["grouped_efficiency"] == pytest.approx([0.9, 0.85, 0.8], rel=0.05)
    assert fit.keys["gemm"]["bf16"]["grouped_m0"][:2] == pytest.approx([150.0, 180.0], rel=0.1)
    found = HardwareProfile.from_dict(H100.to_dict() | fit.keys, where="fitted")
    for row in rows[8:]:  # of few tokens the traffic of the sum is longer than the product: the price counts, not m_0
        if "kernel" not in row.point.values:
            priced = float(found.grouped_gemm_time(float(row.point.values["tokens"]), 4096, 2048, 16, "bf16", "wgrad"))
            assert priced == pytest.approx(row.median, rel=0.04)


def test_scaled_products_have_curves_of_their_own() -> None:
    """Block scales at 0.7 of the fp8 rate, NVFP4 at 0.6 of its peak, MXFP8 and scales per row as slow: the first two get curves
    without quantisation, the others are priced as fp8 and the file says by how much that is off."""
    b200, rows = load_hardware("b200-sxm"), []
    rate = {"fp8": 0.8, "fp8_row": 0.4, "mxfp8": 0.4, "fp8_block": 0.56, "nvfp4": 0.6}
    for dtype, part in rate.items():
        peak = b200.peak("fp4" if dtype == "nvfp4" else "fp8")
        for m in (2048, 4096, 8192, 16384):
            point = definitions.gemm(dtype, "forward", m, 8192, 8192)
            rows.append(known(point, flop(point) / (part * peak)))
    fit = fit_compute(rows, base_of("cuda", rows, b200), "cuda")
    found = HardwareProfile.from_dict(b200.to_dict() | fit.keys, where="fitted")
    for dtype in ("fp8", "fp8_block", "nvfp4"):
        seconds = float(found.gemm_time(4096, 8192, 8192, dtype))
        assert 2.0 * 4096 * 8192**2 / seconds / found.peak(dtype) == pytest.approx(rate[dtype], rel=0.15), dtype
        assert not found.gemm[dtype].quantise
    for dtype in ("mxfp8", "fp8_row"):
        assert fit.residuals[f"gemm {dtype} on the fp8 curve"][0] == pytest.approx(50.0, abs=8.0)
