"""What each measured operator does: FLOP and bytes by the definitions of the cost model. No torch.

The same definitions as the published tables that the library was fitted to: a GEMM is 2 m n k FLOP; attention counts causal
pairs once and its backward pass 2.5 times the forward; a memory-bound operator counts what its algorithm must read and
write, whatever its kernel moves.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from planner.errors import PlannerError
from planner.lab.profile.points import Point, Value

ELEMENT = {
    "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "fp8_row": 1.0, "fp8_block": 1.0, "mxfp8": 1.0,
    "nvfp4": 0.5,
}  # fmt: skip
"""Bytes of one element, scales not counted; tf32 is a mode of multiplying fp32."""
SCALED = ("fp8", "fp8_row", "fp8_block", "mxfp8", "nvfp4")
"""Products of quantised operands: one scale per tensor, per row, per 1 x 128 and 128 x 128 (DeepSeek-V3), per 1 x 32 (MX), per
1 x 16 and per tensor (NVFP4)."""
GEMM_PASSES = ("forward", "dgrad", "wgrad")
ACCUMULATING = "wgrad_fp32"
"""The weight gradient added to an fp32 sum by the product's own kernel, beside the plain ``wgrad``."""
EAGER, COMPILED = "eager", "compiled"
"""How torch runs a chain of operations: one kernel for each of them, or one that torch.compile makes of all."""

MEMORY_BYTES: dict[tuple[str, str], tuple[float, float]] = {
    ("norm_forward", "forward"): (2.0, 0.0),  # x in, y out
    ("norm_backward", "backward"): (3.0, 0.0),  # x and dy in, dx out
    ("elementwise", "forward"): (3.0, 0.0),  # two in, one out: a residual addition
    ("swiglu", "forward"): (3.0, 0.0),  # gate and up in, product out; columns = inner width
    ("swiglu", "backward"): (5.0, 0.0),  # gate, up and dy in, both gradients out
    ("rope", "forward"): (2.0, 0.0),  # x in, rotated x out; the table of a sequence is shared by all heads
    ("rope", "backward"): (2.0, 0.0),  # the same turn backwards
    ("cross_entropy", "forward"): (1.0, 4.0),  # logits in, fp32 log-softmax out
    ("cross_entropy", "backward"): (1.0, 8.0),  # fp32 log-softmax and its gradient in, gradient of the logits out
    ("optimizer", "forward"): (0.0, 28.0),  # fp32 weight and two moments in and out, gradient in
    ("quantize", "forward"): (1.0, 1.0),  # x in, 8 bit out
    ("permute", "forward"): (2.0, 0.0),  # rows in, rows out in another order
    ("copy", "forward"): (2.0, 0.0),
}
"""(operator, pass): bytes per element of rows x columns, as (multiples of the element, further bytes); one kernel."""
EAGER_TENSORS: dict[tuple[str, str], tuple[float, float]] = {
    # silu 2, product 3
    ("swiglu", "forward"): (5.0, 2.0),
    # both factors of the product 3 + 3, silu 3
    ("swiglu", "backward"): (9.0, 3.0),
    # on halves of q or k: four products 4 (the tables are shared by all heads), difference and sum 3, joined 2
    ("rope", "forward"): (9.0, 14.0),
    # four products 4, negated half 1, two gradients of each half added 3, halves joined 2
    ("rope", "backward"): (10.0, 16.0),
}
"""(operator, pass) of a chain of plain torch operations: tensors of rows x columns read or written, and kernels (q and k apart)."""
ATTENTION_HALVES = 2
"""Of context parallelism: a rank holds this many pieces of the sequence, one from each end, so that causal work is equal."""
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
    """2 b a pairs (d + d_v), backward 2.5 times it; pairs = s_q s_k, half of it when causal.  [Dao 2022]

    Also with context parallelism: the queries of a rank come from both ends of the sequence and see half of the keys.
    """
    b, a, d, d_v, s = (number(point, name) for name in ("batch", "heads", "head_dim", "value_dim", "seq"))
    pairs = s * keys(point) * (0.5 if point["causal"] else 1.0)
    return 2.0 * b * a * pairs * (d + d_v) * (2.5 if text(point, "pass") == "backward" else 1.0)


def keys(point: Point) -> float:
    """Keys of a sequence: more than its queries on one rank of context parallelism."""
    return float(cast(float, point.values.get("seq_kv", point["seq"])))


def layer_weights(point: Point) -> float:
    """Weights that each token of a whole layer meets: projections (MLA: down and up), MLP or K of E experts and the router."""
    value = point.values
    h, f, a, kv, d = (number(point, name) for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim"))
    matrices = 3.0 if value["gated"] else 2.0
    attention = h * d * (2.0 * a + 2.0 * kv)
    if "kv_rank" in value:
        q_rank, kv_rank, rope, v_dim = (number(point, name) for name in ("q_rank", "kv_rank", "rope_dim", "value_dim"))
        queries = h * q_rank + q_rank * a * d if q_rank else h * a * d
        attention = queries + h * (kv_rank + rope) + kv_rank * a * (d - rope + v_dim) + a * v_dim * h
    if "experts" not in value:
        return attention + h * f * matrices
    experts, top_k, width, shared = (number(point, name) for name in ("experts", "top_k", "expert_ffn", "shared_ffn"))
    return attention + h * (top_k * width + shared) * matrices + h * experts


def resident_weights(point: Point) -> float:
    """Weights of a whole layer, those of all experts."""
    every = layer_weights(point)
    if "experts" not in point.values:
        return every
    h, width, experts, top_k = (number(point, name) for name in ("hidden", "expert_ffn", "experts", "top_k"))
    return every + h * width * (3.0 if point["gated"] else 2.0) * (experts - top_k)


def layer_flop(point: Point) -> float:
    """FLOP of a whole layer: 2 per weight and token and attention; backward twice the former, 2.5 times the latter."""
    b, s, a, d = (number(point, name) for name in ("batch", "seq", "heads", "head_dim"))
    d_v = float(cast(float, point.values.get("value_dim", d)))
    attention = b * a * s * s * (d + d_v)  # causal: half of the pairs
    if text(point, "pass") == "backward":
        return 4.0 * b * s * layer_weights(point) + 2.5 * attention
    return 2.0 * b * s * layer_weights(point) + attention


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
    if kind in EAGER_TENSORS and point.values.get("kernel") == EAGER:
        tensors, _ = EAGER_TENSORS[kind]
        return number(point, "rows") * number(point, "columns") * tensors * ELEMENT[text(point, "dtype")]
    if kind == WHOLE_LOSS:
        return number(point, "rows") * number(point, "columns") * (2.0 * ELEMENT[text(point, "dtype")] + 12.0)
    if kind not in MEMORY_BYTES:
        raise PlannerError(f"no memory-bound operator '{kind[0]}' with a pass '{kind[1]}'")
    multiples, further = MEMORY_BYTES[kind]
    each = multiples * ELEMENT[text(point, "dtype")] + further
    return number(point, "rows") * number(point, "columns") * each


def kernels(point: Point) -> float:
    """Kernels that a memory-bound point launches: each takes the launch floor beside its bytes."""
    if point.values.get("kernel") == EAGER:
        return EAGER_TENSORS[text(point, "op"), text(point, "pass")][1]
    return 2.0 if point.values.get("op") == "rope" else 1.0  # q and k


def gemm(dtype: str, pass_: str, m: float, n: float, k: float, weight: float = 0.0) -> Point:
    """The point of one pass of a linear layer."""
    values: dict[str, Value] = {"dtype": dtype, "pass": pass_, "m": int(m), "n": int(n), "k": int(k)}
    return Point.of("gemm", weight=weight, **values)


def attention(
    dtype: str, pass_: str, batch: float, heads: float, kv_heads: float, head_dim: float, value_dim: float, seq: float,
    *, seq_kv: float | None = None, kernel: str = "default", causal: bool = True, weight: float = 0.0,
) -> Point:  # fmt: skip
    """The point of one attention kernel; with ``seq_kv`` above ``seq`` of one rank of context parallelism: its queries, from
    both ends of the sequence, against the keys of all ranks before them."""
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
    if seq_kv is not None and int(seq_kv) != int(seq):
        values["seq_kv"] = int(seq_kv)
    return Point.of("attention", weight=weight, **values)


def rope(pass_: str, rows: float, heads: float, kv_heads: float, head_dim: float, dtype: str, kernel: str,
         weight: float = 0.0) -> Point:  # fmt: skip
    """The point of the rotary embedding of q and k: ``rows`` tokens of heads + kv_heads heads."""
    values: dict[str, Value] = {
        "op": "rope", "pass": pass_, "rows": int(rows), "columns": int((heads + kv_heads) * head_dim),
        "kv_heads": int(kv_heads), "head_dim": int(head_dim), "dtype": dtype, "kernel": kernel,
    }  # fmt: skip
    return Point.of("memory_bound", weight=weight, **values)


def swiglu(pass_: str, rows: float, columns: float, dtype: str, kernel: str, weight: float = 0.0) -> Point:
    """The point of silu(gate) * up; ``columns`` is the inner width."""
    values: dict[str, Value] = {
        "op": "swiglu", "pass": pass_, "rows": int(rows), "columns": int(columns), "dtype": dtype, "kernel": kernel,
    }  # fmt: skip
    return Point.of("memory_bound", weight=weight, **values)


def memory_bound(op: str, pass_: str, rows: float, columns: float, dtype: str, weight: float = 0.0) -> Point:
    """The point of one memory-bound operator over rows x columns elements; SwiGLU and RoPE have their own."""
    values: dict[str, Value] = {
        "op": op, "pass": pass_, "rows": int(rows), "columns": int(columns), "dtype": dtype,
    }  # fmt: skip
    return Point.of("memory_bound", weight=weight, **values)
