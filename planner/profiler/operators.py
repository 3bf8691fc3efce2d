"""The operators of a training step as torch runs them: one callable per point, its tensors made beforehand.

The operands of a GEMM rotate through sets that together exceed the last-level cache, as in a model whose weights are read
once per microbatch; those of memory-bound operators stay, as a layer reads what it has just written. Backward passes run
on a graph that is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812  the name torch's own documentation uses

from planner import units
from planner.errors import PlannerError
from planner.profiler.definitions import ELEMENT, number, text
from planner.profiler.points import Point

Run: TypeAlias = Callable[[], object]

DTYPES: dict[str, Any] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
MOST_SETS = 16
MOST_BYTES = 2.0 * units.GIB
"""Operand sets that rotate, and what they may take together."""
USUAL_CACHE = 32.0 * units.MIB
"""Where the kernel does not say."""
FP8_MULTIPLE = 16
"""Rows and depth of an fp8 GEMM are multiples of this.  [cuBLASLt]"""


def whole(point: Point, name: str) -> int:
    """A whole number of the key."""
    return int(number(point, name))


def values(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    """Normal values: not constant ones, on which a GPU draws less power and clocks higher."""
    made = torch.randn(shape, device=device, dtype=torch.float32 if dtype in ("fp8", "tf32") else DTYPES[dtype])
    return made.to(DTYPES[dtype])


def precision(dtype: str) -> None:
    """fp32 products run in tf32 only where that is asked for."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def operator(point: Point, device: str) -> Run:
    """The callable of a point of family gemm, grouped_gemm, attention or memory_bound. Raises PlannerError."""
    makers = {"gemm": _gemm, "grouped_gemm": _grouped, "attention": _attention, "memory_bound": _memory_bound}
    if point.family not in makers:
        raise PlannerError(f"'{point.family}' is no family of operators; known: {', '.join(makers)}")
    precision(text(point, "dtype"))
    return makers[point.family](point, device)


def _cache_bytes(device: str) -> float:
    """The last-level cache: that of the GPU, or of the processor as the kernel says."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    try:
        said = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return float(said.rstrip("KM")) * (units.MIB if said.endswith("M") else units.KIB)
    except (OSError, ValueError):
        return USUAL_CACHE


def sets(bytes_each: float, device: str) -> int:
    """How many operand sets rotate so that none is still in the cache when its turn comes."""
    wanted = int(2.0 * _cache_bytes(device) / max(bytes_each, 1.0)) + 1
    return max(1, min(wanted, MOST_SETS, int(MOST_BYTES / max(bytes_each, 1.0))))


def _copies(first: tuple[Any, ...], bytes_each: float, device: str) -> list[tuple[Any, ...]]:
    """Operand sets of equal values in different places."""
    return [first, *(tuple(one.clone() for one in first) for _ in range(sets(bytes_each, device) - 1))]


# ---------------------------------------------------------------------------------------------------- GEMM


def _gemm(point: Point, device: str) -> Run:
    """F.linear forward; dY W for the input, dY^T X for the weight."""
    dtype, pass_ = text(point, "dtype"), text(point, "pass")
    m, n, k = (whole(point, name) for name in ("m", "n", "k"))
    if dtype == "fp8":
        return _scaled(point, device)
    bytes_each = ELEMENT[dtype] * (m * k + n * k)
    if pass_ == "wgrad_fp32":
        return _accumulated(point, device)
    shapes = {"forward": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[pass_]
    pairs = itertools.cycle(_copies(tuple(values(shape, dtype, device) for shape in shapes), bytes_each, device))
    if pass_ == "forward":
        return lambda: F.linear(*next(pairs))
    if pass_ == "dgrad":
        return lambda: torch.mm(*next(pairs))

    def wgrad() -> object:
        gradient, inputs = next(pairs)
        return torch.mm(gradient.t(), inputs)

    return wgrad


def _accumulated(point: Point, device: str) -> Run:
    """dW += dY^T X into an fp32 gradient, in the product's own kernel; torch has it on a GPU only, in place from 2.10 on."""
    if device != "cuda":
        raise PlannerError(f"{point.label}: a product that adds to an fp32 gradient needs a GPU; this is a CPU")
    dtype = text(point, "dtype")
    m, n, k = (whole(point, name) for name in ("m", "n", "k"))
    gradient, inputs = values((m, n), dtype, device), values((m, k), dtype, device)
    total = torch.zeros(n, k, device=device)
    return lambda: torch.addmm(total, gradient.t(), inputs, out_dtype=torch.float32, out=total)


def _scaled(point: Point, device: str) -> Run:
    """torch._scaled_mm with one scale per tensor, on operands that are quantised already.

    It wants a row-major left and a column-major right operand; the passes differ in shape alone. Forward adds up in the
    tensor core's own precision, as training does, the gradients in fp32.
    """
    m, n, k = (whole(point, name) for name in ("m", "n", "k"))
    pass_ = text(point, "pass")
    rows, columns, depth = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[pass_]
    if columns % FP8_MULTIPLE or depth % FP8_MULTIPLE:
        raise PlannerError(f"{point.label}: fp8 needs columns and depth that are multiples of {FP8_MULTIPLE}")
    one = torch.tensor(1.0, device=device)
    first = (values((rows, depth), "fp8", device), values((columns, depth), "fp8", device))
    pairs = itertools.cycle(_copies(first, float(rows * depth + columns * depth), device))
    fast = pass_ == "forward"

    def run() -> object:
        left, right = next(pairs)
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )  # fmt: skip

    return run


def grouped_kernel(device: str) -> str:
    """How groups are multiplied here: torch's grouped kernel on a GPU (Ampere or newer), one GEMM after the other elsewhere."""
    return "grouped_mm" if device == "cuda" and hasattr(F, "grouped_mm") else "loop"


def _grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens: X[T, k] with offsets, W[g, n, k]; wgrad makes dW[g, n, k] from dY and X."""
    dtype, pass_ = text(point, "dtype"), text(point, "pass")
    tokens, n, k, groups = (whole(point, name) for name in ("tokens", "n", "k", "groups"))
    inputs, gradients = values((tokens * groups, k), dtype, device), values((tokens * groups, n), dtype, device)
    weights = values((groups, n, k), dtype, device)
    if grouped_kernel(device) == "loop":
        x, g = inputs.view(groups, tokens, k), gradients.view(groups, tokens, n)
        each: Callable[[int], object] = {
            "forward": lambda i: F.linear(x[i], weights[i]),
            "dgrad": lambda i: torch.mm(g[i], weights[i]),
            "wgrad": lambda i: torch.mm(g[i].t(), x[i]),
        }[pass_]
        return lambda: [each(i) for i in range(groups)]
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens
    if pass_ == "forward":
        return lambda: F.grouped_mm(inputs, weights.transpose(-2, -1), offs=ends)
    if pass_ == "dgrad":
        return lambda: F.grouped_mm(gradients, weights, offs=ends)
    return lambda: F.grouped_mm(gradients.t(), inputs, offs=ends)


# ---------------------------------------------------------------------------------------------------- attention


def _attention(point: Point, device: str) -> Run:
    """Scaled dot product attention with grouped queries, by the kernel that the key names."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype, kernel = text(point, "dtype"), text(point, "kernel")
    b, a, kv, d, d_v, s = (
        whole(point, name) for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "seq")
    )
    causal, backward = bool(point["causal"]), text(point, "pass") == "backward"
    query, key, value = (
        values((b, heads, s, size), dtype, device).requires_grad_(backward)
        for heads, size in ((a, d), (kv, d), (kv, d_v))
    )
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

    def forward() -> Any:
        if kernel == "default":
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=a != kv)
        with sdpa_kernel(backends[kernel]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=a != kv)

    if kernel not in ("default", *backends):
        raise PlannerError(f"{point.label}: unknown kernel '{kernel}'; known: default, {', '.join(backends)}")
    if not backward:
        return forward
    output = forward()
    return _gradients(output, (query, key, value))


def _gradients(output: Any, wanted: tuple[Any, ...]) -> Run:
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)


# ---------------------------------------------------------------------------------------------------- memory-bound


def _memory_bound(point: Point, device: str) -> Run:
    """One kernel for each class; what torch itself offers for it (``definitions.MEMORY_BYTES`` counts its bytes)."""
    op, pass_, dtype = text(point, "op"), text(point, "pass"), text(point, "dtype")
    rows, columns = whole(point, "rows"), whole(point, "columns")
    if op == "optimizer":
        return _adam(rows * columns, device)
    if op.startswith("cross_entropy"):
        return _loss(op, pass_, dtype, rows, columns, device)
    x = values((rows, columns), dtype, device)
    if op in ("norm_forward", "norm_backward"):
        scale = values((columns,), dtype, device)
        if op == "norm_forward":
            return lambda: F.rms_norm(x, (columns,), scale)
        x.requires_grad_(True)
        scale.requires_grad_(True)
        return _gradients(F.rms_norm(x, (columns,), scale), (x, scale))
    if op == "swiglu":  # a gated product of two halves: the traffic of SwiGLU in one kernel
        both = values((rows, 2 * columns), dtype, device).requires_grad_(pass_ == "backward")
        return _gradients(F.glu(both), (both,)) if pass_ == "backward" else lambda: F.glu(both)
    if op == "rope":  # each row times its entry of a shared table: the traffic of a fused rotary embedding
        table = values((columns,), dtype, device)
        return lambda: torch.mul(x, table)
    if op == "permute":
        order = torch.randperm(rows, device=device)
        return lambda: torch.index_select(x, 0, order)
    if op == "quantize":
        return lambda: x.to(torch.float8_e4m3fn)
    if op == "copy":
        target = torch.empty_like(x)
        return lambda: target.copy_(x)
    if op == "elementwise":
        y = values((rows, columns), dtype, device)
        return lambda: torch.add(x, y)
    raise PlannerError(f"{point.label}: unknown memory-bound operator '{op}'")


def _adam(parameters: int, device: str) -> Run:
    """torch's fused AdamW on one fp32 tensor: 28 bytes per parameter."""
    weight = torch.nn.Parameter(torch.randn(parameters, device=device))
    weight.grad = torch.randn_like(weight)
    return cast(Run, torch.optim.AdamW([weight], lr=1e-3, fused=True).step)


def _loss(op: str, pass_: str, dtype: str, rows: int, columns: int, device: str) -> Run:
    """Log-softmax in fp32 and its gradient; or torch's cross entropy forward and backward."""
    logits = values((rows, columns), dtype, device)
    if op == "cross_entropy_whole":
        logits.requires_grad_(True)
        target = torch.randint(columns, (rows,), device=device)
        return lambda: torch.autograd.grad(F.cross_entropy(logits, target), logits)
    if pass_ == "forward":
        return lambda: F.log_softmax(logits, -1, dtype=torch.float32)
    output = F.log_softmax(logits, -1, dtype=torch.float32)
    gradient = torch.randn_like(output)
    kept = logits.dtype if device == "cuda" else torch.float32  # the CPU's kernel keeps the type of the softmax
    return lambda: torch.ops.aten._log_softmax_backward_data(gradient, output, -1, kept)
