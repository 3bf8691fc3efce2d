"""Which kernel torch's scaled dot product attention runs: the one that a plan's price is of, and what was chosen (torch)."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NAMES = {
    SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.OVERRIDEABLE: "overrideable",
}  # fmt: skip
PRICED = {"fa1": [SDPBackend.FLASH_ATTENTION], "fa2": [SDPBackend.FLASH_ATTENTION]}
"""Kernels of trainers that torch has too, FlashAttention 2; others are priced as the best, which torch is left to choose."""
RAN: dict[tuple[object, ...], str] = {}
"""Kernels that attention ran on a GPU in this process, by name, sizes and type of queries and keys."""


def sdpa_choice(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> str:
    """The kernel that torch chooses for tensors like these (batch, heads, tokens, width): flash, cudnn, efficient or math."""
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=grouped)
    return next((name for backend, name in NAMES.items() if int(backend) == chosen), str(chosen))


def attend_by(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, heads, tokens, width) on a GPU, by the kernel that it is priced as; notes which one runs."""
    with priced_kernel(name):
        shape = name, q.shape, k.shape, v.shape, q.dtype
        if shape not in RAN and type(q) is Tensor:  # no fake one: torch chooses by the real device
            RAN[shape] = sdpa_choice(q, k, v, causal=True)
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def priced_kernel(name: str) -> contextlib.AbstractContextManager[Any]:
    """Only the kernel that a trainer's attention is priced as, where torch has it."""
    return sdpa_kernel(PRICED[name]) if name in PRICED else contextlib.nullcontext()
