"""Seconds of kernels that gather single rows: attention on chosen keys, and what of it is bound by FLOP."""

import numpy as np

from planner.cost.layer.operators import GatheredRows, Number
from planner.hardware import HardwareProfile

HEADS_PER_PASS = {"Hopper": 64.0}
"""Query heads that share one gather of their keys, by architecture; BLACKWELL_HEADS on all others."""
BLACKWELL_HEADS = 128.0
GATHER_RATE = 3.2e12
"""Bytes/s at which attention on chosen keys reads single tokens' keys, through the cache.

DeepSeek-V3.2 with 1 to 64 heads (Hopper) and 8 to 128 heads (Blackwell), 4k and 16k tokens, vLLM 0.24: 2.6 to 4.1e12 on H100, H200,
B200 and GB300 alike.  [aiconfigurator @095f58a]
"""


def gathered_seconds(one: GatheredRows, hardware: HardwareProfile) -> tuple[Number, Number]:
    """Forward and backward, max(F / (e P), passes x bytes / rate); passes = ceil(heads / heads of one pass), rate GATHER_RATE
    or that of memory where it is less."""
    passes = np.ceil(one.heads / HEADS_PER_PASS.get(hardware.arch, BLACKWELL_HEADS))
    rate = min(GATHER_RATE, hardware.memory_bandwidth)
    peak = hardware.peak(one.dtype if one.dtype in hardware.peak_flops else "bf16") * one.efficiency
    forward, backward = (
        np.maximum(flop / peak, passes * moved / rate) / hardware.sustained_clock
        for flop, moved in zip(one.flop, one.gathered, strict=True)
    )
    return forward, backward
