"""Causal flash attention of the torch model, whole or over a context-parallel group, with its gradient.

On fake tensors it allocates what the kernel would; what is for a GPU is written from torch's own schemas; it has not run on one
yet.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from planner.lab.reference.fused_operators import OPS

HALF = (torch.bfloat16, torch.float16)
"""What the flash kernel of CUDA takes."""
ATEN = torch.ops.aten
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, output and normaliser of a forward pass."""


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, tokens, width) and the normaliser of each row, ln sum exp; k and v may have fewer heads."""
    if q.is_cuda and q.dtype in HALF:
        return ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return _by_processor(ATEN._scaled_dot_product_flash_attention_for_cpu, q, k, v, 0.0, causal)


def _flash_backward(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k = saved[:2]
    if not (q.is_cuda and q.dtype in HALF):
        return _by_processor(ATEN._scaled_dot_product_flash_attention_for_cpu_backward, gradient, *saved, 0.0, causal)
    unused = q.new_empty(2, dtype=torch.uint64)  # state of a dropout that there is not
    return ATEN._scaled_dot_product_flash_attention_backward(
        gradient, *saved, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
    )


def _by_processor(operator: Callable[..., Any], first: Tensor, *more: Any) -> Any:
    """What the processor computes; for a GPU too, whose kernel takes half precision only: a tiny model in fp64."""
    here = (one.cpu() if isinstance(one, Tensor) else one for one in (first, *more))
    return tuple(one.to(first.device) for one in operator(*here))


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """``_flash`` whose values may be narrower than queries, as kernels for these put out no more; laid out by tokens, as these do:
    the output projection then takes it without a copy."""
    out, normaliser = _flash(q, k, _padded(v, q), causal)
    return out[..., : v.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2), normaliser


def _joined_attention(outputs: list[Tensor], normalisers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What chunks of queries put out, as one."""
    return torch.cat([one.transpose(1, 2) for one in outputs], 1).transpose(1, 2), torch.cat(normalisers, 2)


def _attention_sizes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens = q.shape[:3]
    out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.promote_types(q.dtype, torch.float32))


# As operators of their own recompute sees each call as one, and the attention of a chunk of queries by another name.
_LIBRARY = torch.library.Library("planner", "FRAGMENT")
_ATTENTION = "(Tensor q, Tensor k, Tensor v, bool causal)"
_OPERATORS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("flash_attention", _ATTENTION, _flash_attention, _attention_sizes),
    ("chunk_attention", _ATTENTION, _flash_attention, _attention_sizes),
    ("joined_attention", "(Tensor[] outputs, Tensor[] normalisers)", _joined_attention, _joined_attention),
)
for _name, _signature, _real, _fake in _OPERATORS:
    _LIBRARY.define(f"{_name}{_signature} -> (Tensor, Tensor)")
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner::{_name}", _fake, lib=_LIBRARY)


class SavedAttention:
    """Entered where recompute finds the output of attention saved: what a context-parallel group did for it is not repeated."""

    on = False

    def __enter__(self) -> None:
        SavedAttention.on = True

    def __exit__(self, *_: object) -> None:
        SavedAttention.on = False


class FlashAttention(Function):
    """Causal attention of (batch, heads, tokens, width); keeps q, k, v, its output and one number per row and head.

    With a context-parallel group of c ranks each holds chunks r and 2 c - 1 - r of the 2 c of a sequence. Keys and
    values are gathered for both passes; each chunk of queries attends to the chunks before it and, causally, to its own,
    and the two outputs are joined by their normalisers. Gradients of keys and values are summed and scattered.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.narrow = group, v.shape[-1]
        if group is None:
            out, normaliser = OPS.flash_attention(q, k, v, True)
        else:
            parts: list[tuple[Tensor, Tensor]] = []
            if not SavedAttention.on:
                keys, values = _gathered(k, group), _gathered(v, group)
                chunks = zip(q.chunk(2, 2), _starts(q, group), strict=True)
                parts = [_attend(chunk, keys, values, start) for chunk, start in chunks]
            out, normaliser = OPS.joined_attention([one for one, _ in parts], [one for _, one in parts])
        ctx.save_for_backward(q, k, v, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, normaliser = ctx.saved_tensors
        out, gradient = _padded(out, q), _padded(gradient, q)
        if ctx.group is None:
            to_q, to_k, to_v = _flash_backward(gradient, (q, k, _padded(v, q), out, normaliser), True)
            return to_q, to_k, to_v[..., : ctx.narrow], None
        keys, values = _gathered(k, ctx.group), _padded(_gathered(v, ctx.group), q)
        to_queries, to_k, to_v = [], torch.zeros_like(keys), torch.zeros_like(values)
        chunks = (one.chunk(2, 2) for one in (q, gradient, out, normaliser))
        for mine, g, o, n, start in zip(*chunks, _starts(q, ctx.group), strict=True):
            end, to_q = start + mine.shape[2], None
            for where, causal in ((slice(start, end), True), (slice(0, start), False))[: 2 if start else 1]:
                saved = (mine, keys[:, :, where], values[:, :, where], o, n.contiguous())
                found = _flash_backward(g, saved, causal)
                to_q = found[0] if to_q is None else to_q + found[0]
                to_k[:, :, where] += found[1]
                to_v[:, :, where] += found[2]
            to_queries.append(to_q)
        return torch.cat(to_queries, 2), _scattered(to_k, ctx.group), _scattered(to_v[..., : ctx.narrow], ctx.group), None


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """Zeros up to the width of ``like``: the kernel wants one width."""
    return x if x.shape[-1] == like.shape[-1] else functional.pad(x, (0, like.shape[-1] - x.shape[-1]))


def _starts(q: Tensor, group: Any) -> tuple[int, int]:
    """Where in the sequence both chunks of this rank start."""
    size, rank = q.shape[2] // 2, dist.get_rank(group)
    return rank * size, (2 * dist.get_world_size(group) - 1 - rank) * size


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """One chunk over its own keys causally and over all earlier ones."""
    end = start + q.shape[2]
    out, normaliser = OPS.chunk_attention(q, keys[:, :, start:end], values[:, :, start:end], True)
    if not start:
        return out, normaliser
    earlier, before = OPS.chunk_attention(q, keys[:, :, :start], values[:, :, :start], False)
    joint = torch.logaddexp(normaliser, before)
    weights = [(one - joint).exp()[..., None] for one in (normaliser, before)]
    return (out * weights[0] + earlier * weights[1]).to(q.dtype), joint


def _order(ranks: int) -> list[int]:
    """Where each chunk of the sequence lies among the gathered chunks, two of each rank."""
    return [2 * j if j < ranks else 2 * (2 * ranks - 1 - j) + 1 for j in range(2 * ranks)]


def _gathered(x: Tensor, group: Any) -> Tensor:
    """(batch, heads, tokens, width) of all ranks in the order of the sequence."""
    mine = torch.stack(x.chunk(2, 2))
    every = collectives.wait_tensor(collectives.all_gather_tensor(mine, 0, group))
    return torch.cat([every[i] for i in _order(dist.get_world_size(group))], 2)


def _scattered(x: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of gradients in the order of the sequence; the two chunks of this rank."""
    ranks = dist.get_world_size(group)
    chunks = x.chunk(2 * ranks, 2)
    order = sorted(range(2 * ranks), key=_order(ranks).__getitem__)
    mine = collectives.wait_tensor(
        collectives.reduce_scatter_tensor(torch.stack([chunks[j] for j in order]), "sum", 0, group)
    )
    return torch.cat(list(mine), 2)
