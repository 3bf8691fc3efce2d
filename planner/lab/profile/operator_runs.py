"""The operators of a training step as torch runs them: one callable per point, its tensors made beforehand.

Operands rotate through sets that together exceed the last-level cache, as in a model whose weights are read once per
microbatch and whose activations were written many operators ago. Backward passes run on a graph that is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name torch's own documentation uses

from planner.errors import PlannerError
from planner.lab.profile import scaled
from planner.lab.profile.definitions import ACCUMULATING, ATTENTION_HALVES, ELEMENT, SCALED, keys, layer_weights
from planner.lab.profile.layer_check import model_of
from planner.lab.profile.points import Point, Run
from planner.lab.profile.streams import chain, memory_bound
from planner.lab.profile.tensors import DTYPES, gradients, precision, rotating, values
from planner.lab.reference.split import Split
from planner.lab.reference.transformer import Layer, Place, angles


def operator(point: Point, device: str) -> Run:
    """The callable of a point of a family of operators. Raises PlannerError."""
    makers = {
        "gemm": _gemm, "grouped_gemm": _grouped, "attention": _attention, "memory_bound": memory_bound, "layer": layer,
        "chain": chain,
    }  # fmt: skip
    if point.family not in makers:
        raise PlannerError(f"'{point.family}' is no family of operators; known: {', '.join(makers)}")
    precision(point["dtype"])
    return makers[point.family](point, device)


def _gemm(point: Point, device: str) -> Run:
    """F.linear forward; dY W for the input, dY^T X for the weight; or dW += dY^T X into an fp32 gradient, in the product's own
    kernel: from half precision torch has it on a GPU only, in place from 2.10 on."""
    m, n, k, dtype, pass_ = point.each("m", "n", "k", "dtype", "pass")
    if dtype in SCALED:
        return scaled.gemm(point, device)
    if pass_ == ACCUMULATING:
        if device != "cuda" and dtype != "fp32":
            raise PlannerError(f"{point.label}: a product that adds to an fp32 gradient needs a GPU; this is a CPU")
        gradient, inputs = values((m, n), dtype, device), values((m, k), dtype, device)
        return added(torch.zeros(n, k, device=device), gradient, inputs)
    shapes = {"forward": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[pass_]

    def one() -> Run:
        left, right = (values(shape, dtype, device) for shape in shapes)
        if pass_ == "forward":
            return lambda: F.linear(left, right)
        return lambda: torch.mm(left.t() if pass_ == "wgrad" else left, right)

    return rotating(one, ELEMENT[dtype] * (m * k + n * k), device)


def added(total: Any, gradient: Any, inputs: Any) -> Run:
    """total += gradient^T inputs, one kernel."""
    how = {} if gradient.dtype == total.dtype else {"out_dtype": torch.float32}
    return lambda: torch.addmm(total, gradient.t(), inputs, out=total, **how)


def grouped_kernel(point: Point, device: str) -> str:
    """How groups are multiplied: torch's grouped kernel on a GPU (Ampere or newer), one GEMM after the other elsewhere or
    where the key says so. The grouped kernel does not add to a gradient: another kernel does."""
    if point.values.get("kernel") == "loop" or device != "cuda" or not hasattr(F, "grouped_mm"):
        return "loop"
    return "grouped_mm, then added" if point["pass"] == ACCUMULATING else "grouped_mm"


def _grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens: X[T, k] with offsets, W[g, n, k]; wgrad makes dW[g, n, k] from dY and X."""
    dtype, tokens, n, k, groups = point.each("dtype", "tokens", "n", "k", "groups")
    if dtype in SCALED:
        return scaled.grouped(point, device)
    return rotating(lambda: _experts(point, device), ELEMENT[dtype] * groups * (tokens * (n + k) + n * k), device)


def _experts(point: Point, device: str) -> Run:
    """One set of experts and of their tokens."""
    dtype, pass_, tokens, n, k, groups = point.each("dtype", "pass", "tokens", "n", "k", "groups")
    inputs, gradient = values((tokens * groups, k), dtype, device), values((tokens * groups, n), dtype, device)
    weights = values((groups, n, k), dtype, device)
    total = torch.zeros(groups, n, k, device=device) if pass_ == ACCUMULATING else None
    if grouped_kernel(point, device) == "loop":
        return _loop(pass_, inputs.view(groups, tokens, k), gradient.view(groups, tokens, n), weights, total)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens
    left, right = {
        "forward": (inputs, weights.transpose(-2, -1)), "dgrad": (gradient, weights),
    }.get(pass_, (gradient.t(), inputs))  # fmt: skip
    if total is not None:
        return lambda: total.add_(F.grouped_mm(left, right, offs=ends))
    return lambda: F.grouped_mm(left, right, offs=ends)


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


def _attention(point: Point, device: str) -> Run:
    """Scaled dot product attention with grouped queries, by the kernel that the key names.

    With more keys than queries, those of one rank of context parallelism: its queries are the first and the last piece of
    the sequence; both attend causally to their own keys, the last one also to all keys before it. Outputs of the last
    piece are left unmerged: merging moves bytes and is priced apart.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, a, kv, d, d_v, s = point.each("batch", "heads", "kv_heads", "head_dim", "value_dim", "seq")
    dtype, kernel, causal, all_keys = point["dtype"], point["kernel"], bool(point["causal"]), int(keys(point))
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if kernel not in ("default", *backends):
        raise PlannerError(f"{point.label}: unknown kernel '{kernel}'; known: default, {', '.join(backends)}")
    query, key, value = (
        values((b, heads, length, size), dtype, device).requires_grad_(point["pass"] == "backward")
        for heads, length, size in ((a, s, d), (kv, all_keys, d), (kv, all_keys, d_v))
    )

    def one(q: Any, k: Any, v: Any, masked: bool) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=masked, enable_gqa=a != kv)

    def parts() -> list[Any]:
        if all_keys == s:
            return [one(query, key, value, causal)]
        piece = s // ATTENTION_HALVES
        (first, last), before = query.split([piece, s - piece], dim=2), all_keys - (s - piece)
        own = one(last, key[:, :, before:], value[:, :, before:], True)
        return [
            one(first, key[:, :, :piece], value[:, :, :piece], True), own,
            one(last, key[:, :, :before], value[:, :, :before], False),
        ]  # fmt: skip

    def forward() -> list[Any]:
        if kernel == "default":
            return parts()
        with sdpa_kernel(backends[kernel]):
            return parts()

    return gradients(forward(), (query, key, value)) if point["pass"] == "backward" else forward


def built(point: Point, device: str) -> Layer:
    """The layer of the reference transformer that a layer point stands for, with random weights.

    Dense or with experts, grouped-query or latent attention, in plain torch operations. The shard of one rank of a tensor parallel
    group, its collectives left out: heads / t, width / t, the hidden size whole.
    """
    model, dtype, sequence = model_of(point), DTYPES[point["dtype"]], point["seq"]
    place = Place()
    if model.position == "rope":
        width = model.qk_rope_head_dim if model.is_mla else model.head_dim
        tables = angles(torch.arange(sequence, device=device), width, torch.float32)
        place.cosine, place.sine = (table.to(dtype) for table in tables)
    # Every expert gets the same number of tokens, as the cost model has it; the router is computed all the same.
    split = Split(model=model, sequence_length=sequence, micro_batch_size=point["batch"], balanced=True)
    with torch.device("meta"):
        made = Layer(split, 0, place)
    made = made.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = values(tuple(parameter.shape), point["dtype"], device)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else torch.ones_like(drawn))
    return made


def layer(point: Point, device: str) -> Run:
    """Forward with what the backward pass needs kept, or the backward pass of the input and all weights."""
    dtype, shape = point["dtype"], tuple(point.each("batch", "seq", "hidden"))
    if dtype in SCALED:
        raise PlannerError(f"{point.label}: a whole layer runs in bf16, fp16, tf32 or fp32")

    def one() -> Run:
        made: Any = built(point, device)
        x = values(shape, dtype, device).requires_grad_(True)
        if point["pass"] == "forward":
            return lambda: made(x)
        return gradients([made(x)], (x, *made.parameters()))

    return rotating(one, layer_weights(point, resident=True) * ELEMENT[dtype], device)
