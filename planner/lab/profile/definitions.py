"""What each measured operator does: FLOP and bytes by the definitions of the cost model. No torch.

The same definitions as the published tables that the library was fitted to: a GEMM is 2 m n k FLOP; attention counts causal
pairs once and its backward pass 2.5 times the forward; a memory-bound operator counts what its algorithm must read and
write, whatever its kernel moves.
"""

from math import prod
from typing import Any, NamedTuple

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
"""The weight gradient added to an fp32 sum by the product's own kernel; ``wgrad`` is without the sum."""
EAGER, COMPILED = "eager", "compiled"
"""How torch runs several operations: one kernel for each of them, or one that torch.compile makes of all."""

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
    ("swiglu", "forward"): (5.0, 2.0),  # silu 2, product 3
    ("swiglu", "backward"): (9.0, 3.0),  # both factors of the product 3 + 3, silu 3
    # on halves of q or k: four products 4 (the tables are shared by all heads), difference and sum 3, joined 2
    ("rope", "forward"): (9.0, 14.0),
    # four products 4, negated half 1, two gradients of each half added 3, halves joined 2
    ("rope", "backward"): (10.0, 16.0),
}
"""(operator, pass) of plain torch operations: tensors of rows x columns read or written, and kernels (q and k apart)."""
ATTENTION_HALVES = 2
"""Of context parallelism: a rank holds this many pieces of the sequence, one from each end, so that causal work is equal."""


def rows_columns_depth(point: Point) -> tuple[int, int, int]:
    """Dimensions of a GEMM as its kernel runs it; the key holds those of Y[m, n] = X[m, k] W[n, k]^T whatever the pass."""
    m, n, k = point.each("m", "n", "k")
    passes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m), ACCUMULATING: (n, k, m)}
    return passes[point["pass"]]


def attention_flop(point: Point) -> float:
    """2 b a pairs (d + d_v), backward 2.5 times it; pairs = s_q s_k, half of it when causal, also of the queries that a rank of
    context parallelism has from both ends of the sequence.  [Dao 2022]"""
    b, a, d, d_v, s = point.each("batch", "heads", "head_dim", "value_dim", "seq")
    pairs = s * keys(point) * (0.5 if point["causal"] else 1.0)
    return 2.0 * b * a * pairs * (d + d_v) * (2.5 if point["pass"] == "backward" else 1.0)


def keys(point: Point) -> float:
    """Keys of a sequence: more than its queries on one rank of context parallelism."""
    return float(point.values.get("seq_kv", point["seq"]))


def layer_weights(point: Point, *, resident: bool = False) -> float:
    """Weights that each token of a whole layer meets: projections (MLA: down and up), MLP or K of E experts and the router. Those
    of all experts with ``resident``."""
    h, f, a, kv, d = (float(size) for size in point.each("hidden", "ffn", "heads", "kv_heads", "head_dim"))
    matrices = 3.0 if point["gated"] else 2.0
    attention = h * d * (2.0 * a + 2.0 * kv)
    if "kv_rank" in point.values:
        q_rank, kv_rank, rope_dim, v_dim = point.each("q_rank", "kv_rank", "rope_dim", "value_dim")
        queries = h * q_rank + q_rank * a * d if q_rank else h * a * d
        attention = queries + h * (kv_rank + rope_dim) + kv_rank * a * (d - rope_dim + v_dim) + a * v_dim * h
    if "experts" not in point.values:
        return attention + h * f * matrices
    experts, top_k, width, shared = point.each("experts", "top_k", "expert_ffn", "shared_ffn")
    return attention + h * ((experts if resident else top_k) * width + shared) * matrices + h * experts


def layer_flop(point: Point) -> float:
    """FLOP of a whole layer: 2 per weight and token and attention; backward twice the former, 2.5 times the latter."""
    b, s, a, d = point.each("batch", "seq", "heads", "head_dim")
    attention = b * a * s * s * (d + point.values.get("value_dim", d))  # causal: half of the pairs
    weights, again = (4.0, 2.5) if point["pass"] == "backward" else (2.0, 1.0)
    return weights * b * s * layer_weights(point) + again * attention


def flop(point: Point) -> float:
    """FLOP of a point; 0 where it only moves bytes."""
    products = {"gemm": ("m", "n", "k"), "grouped_gemm": ("tokens", "n", "k", "groups")}
    if point.family in products:
        return 2.0 * prod(point.each(*products[point.family]))
    others = {"attention": attention_flop, "layer": layer_flop}
    return others[point.family](point) if point.family in others else 0.0


def moved_bytes(point: Point) -> float:
    """Bytes that a memory-bound point must read and write; 0 for other families. Raises PlannerError for unknown ones."""
    if point.family == "host_copy":
        return point["bytes"]
    if point.family == "cpu_adam":
        return 28.0 * point["parameters"]
    if point.family != "memory_bound":
        return 0.0
    kind, element = (point["op"], point["pass"]), ELEMENT[point["dtype"]]
    if kind in EAGER_TENSORS and point.values.get("kernel") == EAGER:
        each = EAGER_TENSORS[kind][0] * element
    elif kind in MEMORY_BYTES:
        multiples, further = MEMORY_BYTES[kind]
        each = multiples * element + further
    else:
        raise PlannerError(f"no memory-bound operator '{kind[0]}' with a pass '{kind[1]}'")
    return point["rows"] * point["columns"] * each


def kernels(point: Point) -> float:
    """Kernels that a memory-bound point launches: each takes the launch floor in addition to its bytes."""
    if point.values.get("kernel") == EAGER:
        return EAGER_TENSORS[point["op"], point["pass"]][1]
    return 2.0 if point.values.get("op") == "rope" else 1.0  # q and k


def gemm(dtype: str, pass_: str, m: float, n: float, k: float, weight: float = 0.0) -> Point:
    """The point of one pass of a linear layer."""
    return Point.of("gemm", weight=weight, dtype=dtype, pass_=pass_, m=int(m), n=int(n), k=int(k))


class Heads(NamedTuple):
    """Sizes of one attention. With ``seq_kv`` above ``seq`` that of one rank of context parallelism: its queries, from both
    ends of the sequence, against the keys of all ranks before them."""

    batch: float
    heads: float
    kv_heads: float
    head_dim: float
    value_dim: float
    seq: float
    seq_kv: float | None = None
    causal: bool = True


def attention(dtype: str, pass_: str, sizes: Heads, kernel: str = "default", weight: float = 0.0) -> Point:
    """The point of one attention kernel."""
    values = {name: int(value) for name, value in sizes._asdict().items() if value is not None}
    if values.get("seq_kv") == values["seq"]:
        del values["seq_kv"]
    values["causal"] = sizes.causal
    return Point.of("attention", weight=weight, dtype=dtype, pass_=pass_, kernel=kernel, **values)


def rope(
    pass_: str, rows: float, heads: tuple[float, float, float], dtype: str, kernel: str, weight: float = 0.0
) -> Point:
    """The point of the rotary embedding of q and k: ``rows`` tokens; ``heads`` are query heads, key heads and their size."""
    count, kv_heads, size = heads
    more: dict[str, Value] = {"kv_heads": int(kv_heads), "head_dim": int(size), "kernel": kernel}
    return memory_bound("rope", pass_, rows, (count + kv_heads) * size, dtype, weight, **more)


def memory_bound(
    op: str, pass_: str, rows: float, columns: float, dtype: str, weight: float = 0.0, **more: Value
) -> Point:
    """The point of one memory-bound operator over rows x columns elements, SwiGLU with its ``kernel``; RoPE has its own."""
    sizes: dict[str, Any] = {"rows": int(rows), "columns": int(columns), **more}
    return Point.of("memory_bound", weight=weight, op=op, pass_=pass_, dtype=dtype, **sizes)
