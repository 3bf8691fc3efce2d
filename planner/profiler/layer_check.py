"""A whole layer priced by the cost model, operator by operator, against the same layer run whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner import units
from planner.cost.compute import price
from planner.cost.layers import layer
from planner.cost.operators import Shard
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.model import ModelSpec
from planner.profiler.definitions import number, text
from planner.profiler.fitting import short
from planner.profiler.points import Measured, Point, Value
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload

ROPE_PASSES = 6.0
"""Times the rotary embedding of plain torch operations reads or writes its input, over one kernel's two.

Forward 10 tensors in or out: times cosine 2, half negated 1, halves joined 2, times sine 2, sum 3; backward 15: two
products 4, negated half 1, two halves put into zeros 4, three gradients added 6. (10 + 15) / 4.
"""


def plain_trainer() -> Trainer:
    """Plain torch operations and nothing in parallel: torchtitan's memory rules, its fusions taken away.

    torch.autograd.grad adds to no gradient that was there before: one byte makes the traffic of accumulation, 2 g - 2, zero.
    """
    return dataclasses.replace(
        load_trainer("torchtitan"), norm_passes=1.0, elementwise_passes=1.0, rope_passes=ROPE_PASSES,
        unfused=frozenset({"swiglu", "gradient_sum"}), separate_gate=False, gradient_bytes=1.0, dropout=False,
        attention_kernel="best",
    )  # fmt: skip


def model_of(point: Point) -> ModelSpec:
    """The model of one layer that a layer point stands for; its tensor parallel shard is a model of its own."""
    sizes = {name: int(number(point, name)) for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim", "seq")}
    gated = bool(point["gated"])
    return ModelSpec(
        name="layer", num_layers=1, hidden_size=sizes["hidden"], num_heads=sizes["heads"], num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"], ffn_size=sizes["ffn"], vocab_size=256, max_sequence_length=sizes["seq"], gated=gated,
        activation="silu" if gated else "relu",
    )  # fmt: skip


def predicted(point: Point, hardware: HardwareProfile) -> float:
    """Seconds of a layer point: the sum of its operators by the profile's curves, in a short burst as it was measured."""
    parts = predicted_parts(point, hardware)
    return float(sum(parts.values()))


def predicted_parts(point: Point, hardware: HardwareProfile) -> dict[str, float]:
    """Seconds by operator; the sustained clock is left out, as a measured layer is a short burst too."""
    precision = {"tf32": "fp32"}.get(text(point, "dtype"), text(point, "dtype"))
    workload = Workload(
        model=model_of(point), sequence_length=int(number(point, "seq")), global_batch_size=int(number(point, "batch")),
        precision=precision,
    )  # fmt: skip
    layout = Layout.stack([Layout(micro_batch_size=int(number(point, "batch")))])
    shard = Shard(workload=workload, trainer=plain_trainer(), layout=layout, ep_stride=np.ones(1))
    operators, _ = layer(shard, moe=False)
    work = price(operators, shard, dataclasses.replace(hardware, sustained_clock=1.0))
    backward = text(point, "pass") == "backward"
    return {
        operator.name: _one(found.dgrad) + _one(found.wgrad) if backward else _one(found.forward)
        for operator in operators
        for found in (work[operator.name],)
    }


def _one(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])


def layer_point(
    pass_: str, *, hidden: float, ffn: float, heads: float, kv_heads: float, head_dim: float, batch: float, seq: float,
    gated: bool, dtype: str, weight: float = 0.0,
) -> Point:  # fmt: skip
    """The point of one pass of a whole dense layer (of one rank of a tensor parallel group)."""
    sizes = {
        "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch,
        "seq": seq,
    }  # fmt: skip
    values: dict[str, Value] = {name: int(value) for name, value in sizes.items()}
    return Point.of("layer", weight=weight, **values, gated=gated, dtype=dtype, **{"pass": pass_})


def check(measured: Sequence[Measured], hardware: HardwareProfile) -> list[dict[str, Any]]:
    """Every measured layer: microseconds whole, sum of its operators by the profile, and predicted / measured - 1."""
    rows = []
    for row in measured:
        if row.point.family != "layer":
            continue
        total = predicted(row.point, hardware)
        rows.append({
            **row.point.values, "whole_us": short(row.median / units.MICRO), "operators_us": short(total / units.MICRO),
            "error_percent": round(100.0 * (total / row.median - 1.0), 1), "spread_percent": round(100.0 * row.spread, 1),
        })  # fmt: skip
    return rows
