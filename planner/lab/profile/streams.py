"""Memory-bound operators as torch runs them: single kernels, plain operations in turn, and what torch.compile makes of them."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import PlannerError
from planner.lab.profile.definitions import EAGER, ELEMENT
from planner.lab.profile.points import Point, Run
from planner.lab.profile.tensors import DTYPES, gradients, rotating, values
from planner.lab.reference.transformer import Place, angles, rotary


def memory_bound(point: Point, device: str) -> Run:
    """One run of a point; ``definitions.MEMORY_BYTES`` and ``EAGER_TENSORS`` count its bytes. Raises PlannerError."""
    op = point["op"]
    if op == "optimizer":
        return adam(point["rows"] * point["columns"], device)
    makers: dict[str, Callable[[Point, str], Run]] = {"swiglu": _swiglu, "rope": _rope, "cross_entropy": _loss}
    maker = makers.get(op, _single)
    each = 2.0 * ELEMENT[point["dtype"]] * point["rows"] * point["columns"]
    return rotating(lambda: maker(point, device), each, device)


def _tensors(point: Point, device: str, count: int) -> list[Any]:
    rows, columns, dtype = point.each("rows", "columns", "dtype")
    return [values((rows, columns), dtype, device) for _ in range(count)]


def _single(point: Point, device: str) -> Run:
    """Norms, additions, copies and casts: one kernel of torch's own."""
    op, (x, y) = point["op"], _tensors(point, device, 2)
    if op in ("norm_forward", "norm_backward"):
        scale = values(x.shape[1:], point["dtype"], device)
        if op == "norm_forward":
            return lambda: F.rms_norm(x, scale.shape, scale)
        return _either_pass(lambda: [F.rms_norm(x, scale.shape, scale)], (x, scale), point)
    order = torch.randperm(len(x), device=device)
    runs: dict[str, Run] = {
        "permute": lambda: torch.index_select(x, 0, order),
        "quantize": lambda: x.to(torch.float8_e4m3fn),
        "copy": lambda: y.copy_(x),
        "elementwise": lambda: torch.add(x, y),
    }
    return runs[op]


def compiled(function: Callable[..., Any], point: Point, device: str) -> Callable[..., Any]:
    """The function as the key's ``kernel`` says: eager, or one kernel made by torch.compile. Raises PlannerError."""
    if point["kernel"] == EAGER:
        return function
    if device != "cuda":
        raise PlannerError(f"{point.label}: fused kernels of torch.compile are measured on a GPU; this is a CPU")
    from torch._functorch import config

    # The graph is kept, so that its backward pass can be run again and again: its buffers must not be reused by it.
    config.donated_buffer = False
    return cast(Callable[..., Any], torch.compile(function, fullgraph=True, dynamic=False))


def gate(up: Any, gate_: Any) -> Any:
    """silu(gate) * up."""
    return F.silu(gate_) * up


def _swiglu(point: Point, device: str) -> Run:
    """SwiGLU between separate gate and up projections."""
    both, function = _tensors(point, device, 2), compiled(gate, point, device)
    return _either_pass(lambda: [function(*both)], both, point)


def _rope(point: Point, device: str) -> Run:
    """The rotary embedding of q and k of the reference transformer."""
    rows, columns, kv, d, dtype = point.each("rows", "columns", "kv_heads", "head_dim", "dtype")
    heads = [values((1, rows, count, d), dtype, device) for count in (columns // d - kv, kv)]
    cosine, sine = (table.to(DTYPES[dtype]) for table in angles(torch.arange(rows, device=device), d, torch.float32))
    place = Place(cosine=cosine, sine=sine)

    def rotate(q: Any, k: Any) -> list[Any]:
        return [rotary(one, place, fused=False) for one in (q, k)]

    function = compiled(rotate, point, device)
    return _either_pass(lambda: function(*heads), heads, point)


def _either_pass(forward: Callable[[], list[Any]], inputs: Sequence[Any], point: Point) -> Run:
    """The forward pass with what the backward pass needs kept, or the backward pass."""
    for one in inputs:
        one.requires_grad_(True)
    return gradients(forward(), inputs) if point["pass"] == "backward" else forward


def adam(parameters: int, device: str) -> Run:
    """torch's fused AdamW on one fp32 tensor: 28 bytes per parameter."""
    weight = torch.nn.Parameter(torch.randn(parameters, device=device))
    weight.grad = torch.randn_like(weight)
    return cast(Run, torch.optim.AdamW([weight], lr=1e-3, fused=True).step)


def _loss(point: Point, device: str) -> Run:
    """Log-softmax in fp32, or its gradient."""
    (logits,) = _tensors(point, device, 1)
    if point["pass"] == "forward":
        return lambda: F.log_softmax(logits, -1, dtype=torch.float32)
    output = F.log_softmax(logits, -1, dtype=torch.float32)
    gradient = torch.randn_like(output)
    kept = logits.dtype if device == "cuda" else torch.float32  # the CPU's kernel keeps the type of the softmax
    return lambda: torch.ops.aten._log_softmax_backward_data(gradient, output, -1, kept)
