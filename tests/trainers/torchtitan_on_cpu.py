"""torchtitan's own ``train.py`` on the CPU: what it needs that only a GPU has is replaced, and nothing else.

Started by torchrun in place of ``-m torchtitan.train``. Replaced: the device, its memory statistics (the process' own peak stands
for reserved bytes), FlexAttention (torch refuses its backward pass on CPUs; the same mask over all scores), premultiplied sums
(gloo has none), and ``torch.distributed.set_timeout``, which 0.3.0 calls after the first step and torch 2.13 has not got.
The trainer, its configuration, its parallelism, its optimizer and its log are torchtitan's.
"""

from __future__ import annotations

import resource
import runpy
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask

from planner.trainers.checking.import_standins import settle_torch, stand_in
from planner.units import GIB, KIB


def host() -> None:
    """torch reports the CPU as its device, with what torchtitan asks of one."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "get_device_name": lambda *_: "host", "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None,
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=int(64 * GIB)),
        "memory_stats": lambda *_: {"reserved_bytes.all.peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
                                    "active_bytes.all.peak": 0, "num_alloc_retries": 0, "num_ooms": 0},
        "current_device": lambda: 0, "set_device": lambda *_: None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)


def attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """What FlexAttention computes, over all scores."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    places = [torch.arange(size).view([-1 if at == axis else 1 for at in range(4)]) for axis, size in enumerate(sizes)]
    allowed = block_mask.mask_mod(*places).expand(*sizes)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=scale, enable_gqa=enable_gqa
    )
    return out, types.SimpleNamespace(lse=None)


def main() -> None:
    """Replace, then run it."""
    settle_torch()
    stand_in("triton")
    host()
    from torchtitan.models.common import attention as module

    module.FlexAttention._compiled_flex_attn = staticmethod(attention)
    module._compiled_create_block_mask = create_block_mask
    divide = FSDPModule.set_gradient_divide_factor

    def plain_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = plain_sum
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
