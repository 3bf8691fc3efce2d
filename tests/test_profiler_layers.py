"""The proof of the compute half: whole layers of this CPU, predicted from its operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from profiler_samples import H100, LAYERS

from planner.hardware import HardwareProfile
from planner.lab.profile import definitions
from planner.lab.profile.compute_points import warm_up_point
from planner.lab.profile.compute_timing import measure_compute
from planner.lab.profile.definitions import EAGER, Heads
from planner.lab.profile.fit_compute import base_of, fit_compute
from planner.lab.profile.layer_check import HOST_LAYER, predicted, predicted_parts
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.timing import Rounds
from planner.units import GIGA, MIB

pytest.importorskip("torch")

FURTHER: tuple[dict[str, Any], ...] = (
    {"hidden": 512, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "batch": 1, "seq": 192, "gated": True,
     "experts": 8, "top_k": 2, "expert_ffn": 640, "shared_ffn": 512},
    {"hidden": 640, "ffn": 1536, "heads": 8, "kv_heads": 8, "head_dim": 96, "batch": 1, "seq": 192, "gated": True,
     "q_rank": 384, "kv_rank": 128, "rope_dim": 32, "value_dim": 64},
)  # fmt: skip
"""Experts with a shared one; latent attention."""


def cpu_profile(measured: Sequence[Measured]) -> HardwareProfile:
    fit = fit_compute(measured, base_of("cpu", measured, None), "cpu")
    data = {key: value for key, value in H100.to_dict().items() if key != "precise_accumulation"}
    return HardwareProfile.from_dict(data | fit.keys | {"name": "cpu"}, where="cpu")


def proof_points() -> list[Point]:
    """Shapes around those of the layers."""
    points = [Point.of("launch", kind=kind) for kind in ("stream", *HOST_LAYER)]
    points += [
        definitions.gemm("fp32", name, m, n, k)
        for m, n, k in ((128, 768, 768), (256, 512, 512), (256, 1024, 512), (192, 512, 1536), (384, 2048, 640))
        for name in definitions.GEMM_PASSES
    ]
    points += [
        definitions.attention("fp32", name, Heads(1, 8, 8, 64, 64, seq))
        for name in ("forward", "backward")
        for seq in (128, 256, 384)
    ]
    kinds = ("norm_forward", "norm_backward", "elementwise", "permute", "copy")
    points += [
        definitions.memory_bound(op, "backward" if op == "norm_backward" else "forward", 256, width, "fp32")
        for op in kinds for width in (512, 1024)
    ]  # fmt: skip
    for pass_ in ("forward", "backward"):
        points += [definitions.memory_bound("swiglu", pass_, 256, width, "fp32", kernel=EAGER) for width in (1024, 2048)]
        points += [definitions.rope(pass_, 256, (heads, heads // 2, 64), "fp32", EAGER) for heads in (8, 12)]
    return points + [
        Point.of("grouped_gemm", dtype="fp32", tokens=tokens, n=n, k=k, groups=8, **{"pass": name})
        for tokens, n, k in ((64, 768, 512), (48, 512, 512), (64, 512, 768)) for name in definitions.GEMM_PASSES
    ]  # fmt: skip


def test_a_layer_has_the_sum_of_its_measured_operators() -> None:
    """Every kind of operator measured once on this CPU, shortly: a profile whose layer takes what its operators take."""
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in proof_points():
        kind = (point.family, *(point.values.get(name) for name in ("pass", "op", "kind")))
        if point.family != "grouped_gemm":
            kinds.setdefault(kind, point)
    measured = [measure_compute(point, "cpu", 1e-3) for point in kinds.values()]
    profile = cpu_profile(measured)
    for pass_ in ("forward", "backward"):
        point = Point.of("layer", pass_=pass_, dtype="fp32", **LAYERS[0])
        parts = predicted_parts(point, profile)
        assert sum(parts.values()) == pytest.approx(predicted(point, profile)) and min(parts.values()) >= 0.0
        assert {"rope", "mlp_activation", "qkv"} <= {name for name, seconds in parts.items() if seconds > 0}
    assert profile.launch_floor > min(one.median for one in measured)


@pytest.mark.proof
def test_layers_are_predicted_from_their_operators_on_this_cpu() -> None:
    """Processor time of whole layers, forward and backward, against the cost model with this CPU's own curves.

    A shared machine slows some samples down to half, others not: after a warm-up operators and layers are measured in turn,
    by a yardstick, in up to four rounds until the median of the errors of the dense layers is what a quiet machine gives.
    """
    points = proof_points()
    layers = [
        Point.of("layer", pass_=name, dtype="fp32", **sizes)
        for sizes in LAYERS + FURTHER
        for name in ("forward", "backward")
    ]
    measure_compute(warm_up_point("cpu"), "cpu", 3.0)
    rounds = Rounds()
    for _ in range(4):
        operators = [rounds.add(measure_compute(point, "cpu", 0.02)) for point in points]
        whole = [rounds.add(measure_compute(point, "cpu", 0.05)) for point in layers]
        profile = cpu_profile(operators)
        errors = [abs(predicted(one.point, profile) / one.median - 1.0) for one in whole]
        dense = float(np.median(errors[: 2 * len(LAYERS)]))
        if dense < 0.08:
            break
    assert len(errors) == 12 and dense < 0.15, errors
    assert np.median(errors[2 * len(LAYERS) :]) < 0.25, errors
    parts = predicted_parts(layers[0], profile)
    assert sum(parts.values()) == pytest.approx(predicted(layers[0], profile)) and min(parts.values()) >= 0.0
    assert {"rope", "mlp_activation", "qkv"} <= {name for name, seconds in parts.items() if seconds > 0}
    assert profile.memory_bandwidth < 1000 * GIGA and profile.usable_memory > 64 * MIB
    assert profile.launch_floor > operators[0].median
