"""What the torch model runs on a GPU in place of plain torch operations: flash attention and compiled kernels.

Operators that plain torch composes of several kernels are compiled to one each, so that they take the time and the memory of
a compiled trainer. On a CPU ``fused_operators.py`` computes by itself. Written from torch's own schemas and tested on the CPU where
the operations exist there; not yet run on a GPU.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
"""What the flash kernel of CUDA takes."""


NOT_COMPILED: dict[str, str] = {}
"""Operators that run as several plain kernels because no compiler made one of them, and why: slower and larger than planned."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as one generated kernel, compiled when it is first called; each shape on its own."""
    ready: list[Callable[..., Any]] = []
    name = function.__name__.lstrip("_")

    def run(*arguments: Any) -> Any:
        if not ready:
            import torch._inductor.config

            torch._inductor.config.compile_threads = (
                1  # a dozen small kernels: no processes of its own to start and end
            )
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


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, tokens, width) and the normaliser of each row, ln sum exp, (batch, heads, tokens).

    k and v may have fewer heads. Half precision by the flash kernel; else, for comparisons of small models, by the definition.
    """
    if q.dtype in HALF and q.is_cuda:
        found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return found[0], found[1]
    return _by_definition(q, k, v, causal)


Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, output and normaliser of a forward pass."""


def attention_backward(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k = saved[:2]
    if q.dtype in HALF and q.is_cuda:
        unused = q.new_empty(2, dtype=torch.uint64)  # state of a dropout that there is not
        return ATEN._scaled_dot_product_flash_attention_backward(
            gradient, *saved, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )
    return _backward_by_definition(gradient, saved, causal)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Each key or value head as often as queries share it."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d), minus infinity where a query must not look; causal ones are aligned at the first token."""
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _by_definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v; memory grows with the square of the sequence."""
    scores = _scores(q, _spread(k, q.shape[1]), causal)
    normaliser = scores.logsumexp(-1)
    return (scores - normaliser[..., None]).exp() @ _spread(v, q.shape[1]), normaliser


def _backward_by_definition(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P (dP - sum(dO O)), dP = dO V^T.  [FlashAttention, arXiv 2205.14135, appendix B.2]"""
    q, k, v, out, normaliser = saved
    heads = q.shape[1]
    keys, values = _spread(k, heads), _spread(v, heads)
    p = (_scores(q, keys, causal) - normaliser[..., None]).exp()
    inner = p * (gradient @ values.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    shared = k.shape[:2]
    to_k = (inner.transpose(-1, -2) @ q).unflatten(1, (shared[1], -1)).sum(2)
    to_v = (p.transpose(-1, -2) @ gradient).unflatten(1, (shared[1], -1)).sum(2)
    return inner @ keys, to_k, to_v
