"""Fused operators of the torch model: norm, SwiGLU, rotary embedding, grouped products, cross entropy.

Compiled or hand-written GPU code runs each of them as one kernel that keeps its inputs and small statistics. Here each is one
operator of a torch library, with its gradient: on fake tensors it allocates what the kernel would, on a CPU it computes
by plain torch, on a GPU compiled: in the time and the memory of a compiled trainer. Without ``fused`` the model uses plain
torch operations. What is for a GPU is written from torch's own schemas; it has not run on one yet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""Non-linearities as plain torch operations, by their names in a model."""
NOT_COMPILED: dict[str, str] = {}
"""Operators that run as several plain kernels because no compiler made one of them, and why: slower and larger than planned."""


def exact(x: Tensor) -> Tensor:
    """At least single precision."""
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, times a weight; and one number per row."""
    wide = exact(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale


def _rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    wide, straight = exact(x) * scale, exact(gradient)
    inner = straight * weight
    to_x = scale * (inner - wide * (inner * wide).mean(-1, keepdim=True))
    return to_x.to(x.dtype), (straight * wide).flatten(0, -2).sum(0).to(weight.dtype)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (functional.silu(exact(gate)) * up).to(gate.dtype)


def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, straight = exact(gate), exact(gradient)
    open_ = wide.sigmoid()
    to_gate = straight * up * open_ * (1 + wide * (1 - open_))
    return to_gate.to(gate.dtype), (straight * wide * open_).to(up.dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of (batch, tokens, heads, width): pairs (i, i + width/2) turned by angles (1, tokens, 1, width / 2)."""
    a, b = exact(x).chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


def _grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows of x times the transposed weights of their group, (rows, in) x (groups, out, in); ``counts`` of each group lie one
    after the other. A GPU's kernel reads them on the device: the host does not wait for them."""
    if _has_kernel(x):
        return functional.grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    rows = counts.tolist()
    out = x.new_empty(x.shape[0], weights.shape[1])  # each product writes its rows
    for part, weight, to in zip(x.split(rows), weights, out.split(rows), strict=True):
        torch.mm(part, weight.T, out=to)
    return out


def _grouped_weight_gradient(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    if _has_kernel(x):
        return functional.grouped_mm(gradient.T, x, offs=counts.cumsum(0, dtype=torch.int32))
    rows = counts.tolist()
    out = x.new_empty(len(rows), gradient.shape[1], x.shape[1])
    for g, part, to in zip(gradient.split(rows), x.split(rows), out, strict=True):
        torch.mm(g.T, part, out=to)
    return out


def _has_kernel(x: Tensor) -> bool:
    """torch multiplies groups in one kernel, in bf16 on a GPU: nothing to compile."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _largest_logit(logits: Tensor) -> Tensor:
    return exact(logits.amax(-1))


def _sum_of_exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    return (exact(logits) - largest[..., None]).exp().sum(-1)


def _loss_gradient(logits: Tensor, normaliser: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """(softmax - one at the target) scale; a target outside of this rank's part of the vocabulary is -1."""
    found = (exact(logits) - normaliser[..., None]).exp()
    found.scatter_add_(-1, targets.clamp(min=0)[..., None], -(targets >= 0)[..., None].to(found.dtype))
    return (found * scale).to(logits.dtype)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as one generated kernel, compiled when it is first called; each shape on its own."""
    ready: list[Callable[..., Any]] = []
    name = function.__name__.lstrip("_")

    def run(*arguments: Any) -> Any:
        if not ready:
            import torch._inductor.config

            torch._inductor.config.compile_threads = 1  # a dozen small kernels: no processes of its own to start and end
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            ready.append(torch.compile(function, dynamic=False))
        with torch.no_grad():
            if name in NOT_COMPILED:
                return function(*arguments)
            try:
                return ready[0](*arguments)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # of every stage of the compiler: no Triton, no C compiler
                NOT_COMPILED[name] = (str(error).splitlines() or [type(error).__name__])[0]
                return function(*arguments)

    return run


_LIBRARY = torch.library.Library("planner", "DEF")
for _real, _signature, _fake in (
    (_rms_norm, "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
     lambda x, weight, eps: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=_wide(x)))),
    (_rms_norm_backward, "(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
     lambda g, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight))),
    (_swiglu, "(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.empty_like(gate)),
    (_swiglu_backward, "(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)",
     lambda g, gate, up: (torch.empty_like(gate), torch.empty_like(up))),
    (_rotate, "(Tensor x, Tensor cosine, Tensor sine) -> Tensor", lambda x, cosine, sine: x.new_empty(x.shape)),
    (_grouped, "(Tensor x, Tensor weights, Tensor counts) -> Tensor",
     lambda x, weights, counts: x.new_empty(x.shape[0], weights.shape[1])),
    (_grouped_weight_gradient, "(Tensor gradient, Tensor x, Tensor counts) -> Tensor",
     lambda g, x, counts: x.new_empty(counts.shape[0], g.shape[1], x.shape[1])),
    (_largest_logit, "(Tensor logits) -> Tensor",
     lambda logits: logits.new_empty(logits.shape[:-1], dtype=_wide(logits))),
    (_sum_of_exponentials, "(Tensor logits, Tensor largest) -> Tensor",
     lambda logits, largest: torch.empty_like(largest)),
    (_loss_gradient, "(Tensor logits, Tensor normaliser, Tensor targets, Tensor scale) -> Tensor",
     lambda logits, normaliser, targets, scale: torch.empty_like(logits)),
):  # fmt: skip
    _name = _real.__name__.lstrip("_")
    _LIBRARY.define(_name + _signature)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _real if _name.startswith("grouped") else compiled(_real), "CUDA")
    torch.library.register_fake(f"planner::{_name}", _fake, lib=_LIBRARY)

OPS = torch.ops.planner


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _keep(first: int, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """For the gradient: tensors that an operator takes, from the first one on, and what it gives besides its result."""
    more = output[1:] if isinstance(output, tuple) else ()
    tensors = [one for one in inputs[first:] if isinstance(one, Tensor)]
    ctx.save_for_backward(*tensors, *more)
    ctx.mark_non_differentiable(*more)
    ctx.set_materialize_grads(False)
    ctx.rest = [one for one in inputs if not isinstance(one, Tensor)]


def _rms_norm_gradient(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
    return *OPS.rms_norm_backward(gradient.contiguous(), *ctx.saved_tensors), None


def _swiglu_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return OPS.swiglu_backward(gradient, *ctx.saved_tensors)


def _rotate_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    cosine, sine = ctx.saved_tensors
    return OPS.rotate(gradient, cosine, -sine), None, None


def _grouped_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, counts = ctx.saved_tensors
    return OPS.grouped(gradient, weights.transpose(1, 2), counts), OPS.grouped_weight_gradient(gradient, x, counts), None


for _name, _gradient, _first in (
    ("rms_norm", _rms_norm_gradient, 0), ("swiglu", _swiglu_gradient, 0),
    ("rotate", _rotate_gradient, 1), ("grouped", _grouped_gradient, 0),
):  # fmt: skip
    torch.library.register_autograd(f"planner::{_name}", _gradient, setup_context=partial(_keep, _first), lib=_LIBRARY)


class VocabularyLoss(Function):
    """Sum of cross entropies times a scale, of logits (batch, tokens, V / ranks) whose vocabulary is split over a group, and
    targets (batch, tokens) of the whole one; keeps the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float, group: Any) -> Tensor:
        largest = OPS.largest_logit(logits)
        if group is not None:
            largest = collectives.wait_tensor(collectives.all_reduce(largest, "max", group))
        total = OPS.sum_of_exponentials(logits, largest)
        width = logits.shape[-1]
        mine = targets - width * (dist.get_rank(group) if group is not None else 0)
        mine = torch.where((mine >= 0) & (mine < width), mine, -1)
        picked = exact(logits.gather(-1, mine.clamp(min=0)[..., None])[..., 0]) * (mine >= 0)
        if group is not None:
            total, picked = collectives.wait_tensor(
                collectives.all_reduce(torch.stack([total, picked]), "sum", group)
            ).unbind()
        normaliser = largest + total.log()
        ctx.save_for_backward(logits, normaliser, mine)
        ctx.scale = scale
        return (normaliser - picked).sum() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normaliser, mine = ctx.saved_tensors
        return OPS.loss_gradient(logits, normaliser, mine, gradient * ctx.scale), None, None, None
