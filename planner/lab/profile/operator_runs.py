"""The operators of a training step as torch runs them: one callable per point, its tensors made beforehand.

Operands rotate through sets that together exceed the last-level cache, as in a model whose weights are read once per
microbatch and whose activations were written many operators ago. Backward passes run on a graph that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name torch's own documentation uses

from planner.errors import PlannerError
from planner.lab.profile import scaled
from planner.lab.profile.definitions import ACCUMULATING, ATTENTION_HALVES, ELEMENT, SCALED, keys, text
from planner.lab.profile.points import Point
from planner.lab.profile.streams import memory_bound
from planner.lab.profile.tensors import Run, gradients, in_turn, precision, values, whole


def operator(point: Point, device: str) -> Run:
    """The callable of a point of family gemm, grouped_gemm, attention or memory_bound. Raises PlannerError."""
    makers = {"gemm": _gemm, "grouped_gemm": _grouped, "attention": _attention, "memory_bound": memory_bound}
    if point.family not in makers:
        raise PlannerError(f"'{point.family}' is no family of operators; known: {', '.join(makers)}")
    precision(text(point, "dtype"))
    return makers[point.family](point, device)


# ---------------------------------------------------------------------------------------------------- GEMM


def _gemm(point: Point, device: str) -> Run:
    """F.linear forward; dY W for the input, dY^T X for the weight."""
    dtype, pass_ = text(point, "dtype"), text(point, "pass")
    m, n, k = (whole(point, name) for name in ("m", "n", "k"))
    if dtype in SCALED:
        return scaled.gemm(point, device)
    if pass_ == ACCUMULATING:
        return _accumulated(point, device)
    shapes = {"forward": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[pass_]

    def one() -> Run:
        left, right = (values(shape, dtype, device) for shape in shapes)
        if pass_ == "forward":
            return lambda: F.linear(left, right)
        return lambda: torch.mm(left.t() if pass_ == "wgrad" else left, right)

    return in_turn(one, ELEMENT[dtype] * (m * k + n * k), device)


def _accumulated(point: Point, device: str) -> Run:
    """dW += dY^T X into an fp32 gradient, in the product's own kernel; from half precision torch has it on a GPU only, in place
    from 2.10 on."""
    dtype = text(point, "dtype")
    if device != "cuda" and dtype != "fp32":
        raise PlannerError(f"{point.label}: a product that adds to an fp32 gradient needs a GPU; this is a CPU")
    m, n, k = (whole(point, name) for name in ("m", "n", "k"))
    gradient, inputs = values((m, n), dtype, device), values((m, k), dtype, device)
    return added(torch.zeros(n, k, device=device), gradient, inputs)


def added(total: Any, gradient: Any, inputs: Any) -> Run:
    """total += gradient^T inputs, one kernel."""
    if gradient.dtype == total.dtype:
        return lambda: torch.addmm(total, gradient.t(), inputs, out=total)
    return lambda: torch.addmm(total, gradient.t(), inputs, out_dtype=torch.float32, out=total)


def grouped_kernel(point: Point, device: str) -> str:
    """How groups are multiplied: torch's grouped kernel on a GPU (Ampere or newer), one GEMM after the other elsewhere or
    where the key says so. The grouped kernel does not add to a gradient: another kernel does."""
    if point.values.get("kernel") == "loop" or device != "cuda" or not hasattr(F, "grouped_mm"):
        return "loop"
    return "grouped_mm, then added" if text(point, "pass") == ACCUMULATING else "grouped_mm"


def _grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens: X[T, k] with offsets, W[g, n, k]; wgrad makes dW[g, n, k] from dY and X."""
    dtype = text(point, "dtype")
    if dtype in SCALED:
        return scaled.grouped(point, device)
    tokens, n, k, groups = (whole(point, name) for name in ("tokens", "n", "k", "groups"))
    bytes_each = ELEMENT[dtype] * groups * (tokens * (n + k) + n * k)
    return in_turn(lambda: _experts(point, device, tokens, n, k, groups), bytes_each, device)


def _experts(point: Point, device: str, tokens: int, n: int, k: int, groups: int) -> Run:
    """One set of experts and of their tokens."""
    dtype, pass_ = text(point, "dtype"), text(point, "pass")
    inputs, gradient = values((tokens * groups, k), dtype, device), values((tokens * groups, n), dtype, device)
    weights = values((groups, n, k), dtype, device)
    total = torch.zeros(groups, n, k, device=device) if pass_ == ACCUMULATING else None
    if grouped_kernel(point, device) == "loop":
        return _loop(pass_, inputs.view(groups, tokens, k), gradient.view(groups, tokens, n), weights, total)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens
    if pass_ == "forward":
        return lambda: F.grouped_mm(inputs, weights.transpose(-2, -1), offs=ends)
    if pass_ == "dgrad":
        return lambda: F.grouped_mm(gradient, weights, offs=ends)
    if total is not None:
        return lambda: total.add_(F.grouped_mm(gradient.t(), inputs, offs=ends))
    return lambda: F.grouped_mm(gradient.t(), inputs, offs=ends)


def _loop(pass_: str, x: Any, g: Any, weights: Any, total: Any) -> Run:
    """One product after the other."""
    groups = range(len(weights))
    if pass_ == ACCUMULATING:
        each = [added(total[i], g[i], x[i]) for i in groups]
        return lambda: [one() for one in each]
    kinds: dict[str, Callable[[int], object]] = {
        "forward": lambda i: F.linear(x[i], weights[i]),
        "dgrad": lambda i: torch.mm(g[i], weights[i]),
        "wgrad": lambda i: torch.mm(g[i].t(), x[i]),
    }
    kind = kinds[pass_]
    return lambda: [kind(i) for i in groups]


# ---------------------------------------------------------------------------------------------------- attention


def _attention(point: Point, device: str) -> Run:
    """Scaled dot product attention with grouped queries, by the kernel that the key names.

    With more keys than queries, those of one rank of context parallelism: its queries are the first and the last piece of
    the sequence; both attend causally to their own keys, the last one also to all keys before it. Outputs of the last
    piece are left unmerged: merging moves bytes and is priced apart.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype, kernel = text(point, "dtype"), text(point, "kernel")
    b, a, kv, d, d_v, s = (
        whole(point, name) for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "seq")
    )
    causal, backward, all_keys = bool(point["causal"]), text(point, "pass") == "backward", int(keys(point))
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if kernel not in ("default", *backends):
        raise PlannerError(f"{point.label}: unknown kernel '{kernel}'; known: default, {', '.join(backends)}")
    query, key, value = (
        values((b, heads, length, size), dtype, device).requires_grad_(backward)
        for heads, length, size in ((a, s, d), (kv, all_keys, d), (kv, all_keys, d_v))
    )

    def one(q: Any, k: Any, v: Any, masked: bool) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=masked, enable_gqa=a != kv)

    def parts() -> list[Any]:
        if all_keys == s:
            return [one(query, key, value, causal)]
        piece = s // ATTENTION_HALVES
        (first, last), before = query.split([piece, s - piece], dim=2), all_keys - (s - piece)

        def some(q: Any, start: int, end: int, masked: bool) -> Any:
            return one(q, key.narrow(2, start, end - start), value.narrow(2, start, end - start), masked)

        return [some(first, 0, piece, True), some(last, before, all_keys, True), some(last, 0, before, False)]

    def forward() -> Any:
        if kernel == "default":
            return parts()
        with sdpa_kernel(backends[kernel]):
            return parts()

    if not backward:
        return lambda: forward()[0] if all_keys == s else forward()
    return gradients(forward(), (query, key, value))
