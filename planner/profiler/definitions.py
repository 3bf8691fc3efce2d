"""What each measured operator does: FLOP and bytes by the definitions of the cost model. No torch.

The same definitions as the published tables that the library was fitted to: a GEMM is 2 m n k FLOP; attention counts causal
pairs once and its backward pass 2.5 times the forward; a memory-bound operator counts what its algorithm must read and
write, whatever its kernel moves.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from planner.errors import PlannerError
from planner.profiler.points import Point, Value

ELEMENT = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0}
"""Bytes of one element; tf32 is a mode of multiplying fp32."""
GEMM_PASSES = ("forward", "dgrad", "wgrad")
ACCUMULATING = "wgrad_fp32"
"""The weight gradient added to an fp32 sum by the product's own kernel, beside the plain ``wgrad``."""

MEMORY_BYTES: dict[tuple[str, str], tuple[float, float]] = {
    ("norm_forward", "forward"): (2.0, 0.0),  # x in, y out
    ("norm_backward", "backward"): (3.0, 0.0),  # x and dy in, dx out
    ("elementwise", "forward"): (3.0, 0.0),  # two in, one out: a residual addition
    ("swiglu", "forward"): (3.0, 0.0),  # gate and up in, product out; columns = inner width
    ("swiglu", "backward"): (5.0, 0.0),  # gate, up and dy in, both gradients out
    ("rope", "forward"): (2.0, 0.0),  # x in, rotated x out; the table of a sequence is shared by all heads
    ("cross_entropy", "forward"): (1.0, 4.0),  # logits in, fp32 log-softmax out
    ("cross_entropy", "backward"): (1.0, 8.0),  # fp32 log-softmax and its gradient in, gradient of the logits out
    ("optimizer", "forward"): (0.0, 28.0),  # fp32 weight and two moments in and out, gradient in
    ("quantize", "forward"): (1.0, 1.0),  # x in, 8 bit out
    ("permute", "forward"): (2.0, 0.0),  # rows in, rows out in another order
    ("copy", "forward"): (2.0, 0.0),
}
"""(operator, pass): bytes per element of rows x columns, as (multiples of the element, further bytes)."""
WHOLE_LOSS = ("cross_entropy_whole", "both")
"""torch's own loss forward and backward, kept beside the kernels it is made of; no class of the profile is fitted to it."""


def number(point: Point, name: str) -> float:
    """A number of the point's key."""
    return float(cast(float, point[name]))


def text(point: Point, name: str) -> str:
    """A text of the point's key."""
    return str(point[name])


def rows_columns_depth(point: Point) -> tuple[float, float, float]:
    """Dimensions of a GEMM as its kernel runs it; the key holds those of Y[m, n] = X[m, k] W[n, k]^T whatever the pass.

    dgrad is (m, k, n), wgrad (n, k, m), as in ``HardwareProfile.gemm_times``.
    """
    m, n, k = (number(point, name) for name in ("m", "n", "k"))
    passes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m), ACCUMULATING: (n, k, m)}
    return passes[text(point, "pass")]


def attention_flop(point: Point) -> float:
    """2 b a pairs (d + d_v), backward 2.5 times it; pairs = s^2, half of it when causal.  [Dao 2022]"""
    b, a, d, d_v, s = (number(point, name) for name in ("batch", "heads", "head_dim", "value_dim", "seq"))
    pairs = s * s * (0.5 if point["causal"] else 1.0)
    return 2.0 * b * a * pairs * (d + d_v) * (2.5 if text(point, "pass") == "backward" else 1.0)


def layer_flop(point: Point) -> float:
    """FLOP of a whole dense layer: 2 per weight and token and attention; backward twice the former, 2.5 times the latter."""
    b, s, h, f, a, kv, d = (
        number(point, name) for name in ("batch", "seq", "hidden", "ffn", "heads", "kv_heads", "head_dim")
    )
    weights = h * d * (2.0 * a + 2.0 * kv) + h * f * (3.0 if point["gated"] else 2.0)
    attention = 2.0 * b * a * s * s * d  # causal: half of 4
    if text(point, "pass") == "backward":
        return 4.0 * b * s * weights + 2.5 * attention
    return 2.0 * b * s * weights + attention


def flop(point: Point) -> float:
    """FLOP of a point; 0 where it only moves bytes."""
    if point.family == "gemm":
        return 2.0 * float(np.prod([number(point, name) for name in ("m", "n", "k")]))
    if point.family == "grouped_gemm":
        return 2.0 * float(np.prod([number(point, name) for name in ("tokens", "n", "k", "groups")]))
    if point.family == "attention":
        return attention_flop(point)
    if point.family == "layer":
        return layer_flop(point)
    return 0.0


def moved_bytes(point: Point) -> float:
    """Bytes that a memory-bound point must read and write; 0 for other families. Raises PlannerError for unknown ones."""
    if point.family == "host_copy":
        return number(point, "bytes")
    if point.family == "cpu_adam":
        return 28.0 * number(point, "parameters")
    if point.family != "memory_bound":
        return 0.0
    kind = (text(point, "op"), text(point, "pass"))
    if kind == WHOLE_LOSS:
        return number(point, "rows") * number(point, "columns") * (2.0 * ELEMENT[text(point, "dtype")] + 12.0)
    if kind not in MEMORY_BYTES:
        raise PlannerError(f"no memory-bound operator '{kind[0]}' with a pass '{kind[1]}'")
    multiples, further = MEMORY_BYTES[kind]
    each = multiples * ELEMENT[text(point, "dtype")] + further
    return number(point, "rows") * number(point, "columns") * each


def gemm(dtype: str, pass_: str, m: float, n: float, k: float, weight: float = 0.0) -> Point:
    """The point of one pass of a linear layer."""
    values: dict[str, Value] = {"dtype": dtype, "pass": pass_, "m": int(m), "n": int(n), "k": int(k)}
    return Point.of("gemm", weight=weight, **values)


def attention(
    dtype: str, pass_: str, batch: float, heads: float, kv_heads: float, head_dim: float, value_dim: float, seq: float,
    *, kernel: str = "default", causal: bool = True, weight: float = 0.0,
) -> Point:  # fmt: skip
    """The point of one attention kernel over square scores."""
    sizes = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "seq": seq,
    }
    values: dict[str, Value] = {name: int(value) for name, value in sizes.items()}
    values |= {"dtype": dtype, "pass": pass_, "causal": causal, "kernel": kernel}
    return Point.of("attention", weight=weight, **values)


def memory_bound(op: str, pass_: str, rows: float, columns: float, dtype: str, weight: float = 0.0) -> Point:
    """The point of one memory-bound operator over rows x columns elements."""
    values: dict[str, Value] = {
        "op": op, "pass": pass_, "rows": int(rows), "columns": int(columns), "dtype": dtype,
    }  # fmt: skip
    return Point.of("memory_bound", weight=weight, **values)
