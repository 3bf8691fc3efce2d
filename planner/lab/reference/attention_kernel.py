"""Which kernel torch's scaled dot product attention runs: the one that a plan's price is of, and what was chosen (torch)."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NAMES = {
    SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.OVERRIDEABLE: "overrideable",
}  # fmt: skip
PRICED = {"fa1": [SDPBackend.FLASH_ATTENTION], "fa2": [SDPBackend.FLASH_ATTENTION]}
"""Kernels of trainers that torch has too, FlashAttention 2; others are priced as the best, which torch is left to choose."""
RAN: set[str] = set()
"""Kernels that attention ran in this process since the set was emptied."""


def sdpa_choice(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> str:
    """The kernel that torch chooses for tensors like these (batch, heads, tokens, width): flash, cudnn, efficient or math."""
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=grouped)
    return next((name for backend, name in NAMES.items() if int(backend) == chosen), str(chosen))


def priced_kernel(name: str) -> contextlib.AbstractContextManager[Any]:
    """Only the kernel that a trainer's attention is priced as, where torch has it."""
    return sdpa_kernel(PRICED[name]) if name in PRICED else contextlib.nullcontext()
