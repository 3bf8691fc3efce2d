"""Physical laws of the kernels of serving: each a sum of non-negative times, a few numbers that were fitted times what is moved,
computed or launched.

Every term is a product of powers of the sizes, so every law grows with every size and holds far outside what was measured. The
sizes are float64 columns that broadcast; terms are seconds at the nominal bandwidth and peak, and the fitted numbers say how much
longer they take (1.25 on ``memory`` = 80 % of the bandwidth). ``launch``, ``tiles`` and the like count in microseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.curves import Column, column
from planner.hardware import HardwareProfile
from planner.serving.serving_layout import CACHE_BYTES, WEIGHT_BYTES

Terms = dict[str, Column]
"""Seconds by name of the term."""
Sizes = Mapping[str, Column]
Law = Callable[[HardwareProfile, Sizes, str], Terms]
"""Terms of a kernel from its sizes and the format of what it reads."""
US = 1e-6


def compute_dtype(hardware: HardwareProfile, weights: str) -> str:
    """Format that a product with such weights is computed in: that of the activation, 16 bits where weights are only stored small.

    int4 and mxfp4 are unpacked on the way to 16-bit tensor cores; so are fp8 and nvfp4 on devices without cores for them.
    """
    wanted = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}.get(weights, "bf16")
    core = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}.get(wanted, "bf16")
    return wanted if core in hardware.peak_flops or core == "bf16" else "bf16"


def linear_law(hardware: HardwareProfile, sizes: Sizes, weights: str) -> Terms:
    """A linear layer forward on m rows, n outputs, k inputs: weights and activations once, 2 m n k FLOP.

    ``split`` is the reading of partial sums where n alone does not fill the device: k is split over more of its units.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    bytes_moved = WEIGHT_BYTES[weights] * n * k + 2.0 * m * (n + k)
    flop = 2.0 * m * n * k / hardware.peak(compute_dtype(hardware, weights))
    one = np.ones_like(m * n * k)
    return {"launch": US * one, "memory": bytes_moved / hardware.memory_bandwidth, "compute": flop}


def decode_attention_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """One query per sequence against its keys and values: the cache once, 4 FLOP per query head, key and channel.

    ``tiles``: every key-value head of every sequence is a block of its own, in waves over the compute units.
    """
    rows, group, context, width = sizes["rows"], sizes["group"], sizes["context"], sizes["head_dim"]
    one = np.ones_like(rows * group * context * width)
    cached = 2.0 * rows * context * width
    return {
        "launch": US * one,
        "memory": CACHE_BYTES[cache] * cached / hardware.memory_bandwidth * one,
        "tiles": US * rows / hardware.compute_units * one,
        "queries": US * rows * group / hardware.compute_units * one,
        "compute": 2.0 * cached * group / hardware.peak("bf16"),
        "steps": US * context / 512.0 * one,
    }


def decode_mla_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """One query per sequence against its latent cache of 512 + 64 channels, which all heads share."""
    batch, heads, context = sizes["batch"], sizes["heads"], sizes["context"]
    one = np.ones_like(batch * heads * context)
    return {
        "launch": US * one,
        "memory": 576.0 * CACHE_BYTES[cache] * batch * context / hardware.memory_bandwidth * one,
        "tiles": US * batch / hardware.compute_units * one,
        "queries": US * batch * heads / hardware.compute_units,
        "compute": 2.0 * (576.0 + 512.0) * batch * heads * context / hardware.peak("bf16"),
        "steps": US * context / 512.0 * one,
    }


def experts_law(hardware: HardwareProfile, sizes: Sizes, weights: str) -> Terms:
    """Gate, up and down products of the experts of one rank: the weights of those touched once, in tiles of rows.

    ``touched`` experts of 3 h f weights each, ``rows`` copies of tokens on the rank; ``tiles`` pads the rows of every touched
    expert to a tile of 16.
    """
    touched, rows, hidden, ffn = sizes["touched"], sizes["rows"], sizes["hidden"], sizes["ffn"]
    each = 3.0 * hidden * ffn
    peak = hardware.peak(compute_dtype(hardware, weights))
    one = np.ones_like(touched * rows * each)
    return {
        "launch": US * one,
        "memory": touched * each * WEIGHT_BYTES[weights] / hardware.memory_bandwidth * one,
        "activations": 2.0 * rows * (3.0 * hidden + 3.0 * ffn) / hardware.memory_bandwidth,
        "tiles": 2.0 * 16.0 * touched * each / peak * one,
        "compute": 2.0 * rows * each / peak,
    }


def states_law(hardware: HardwareProfile, sizes: Sizes, _: str) -> Terms:
    """One token per sequence through a state: it is read and written once, in fp32, and the channels of the convolution with it."""
    batch, heads, key, value = sizes["batch"], sizes["value_heads"], sizes["key_dim"], sizes["value_dim"]
    return {
        "launch": US * np.ones_like(batch * heads * key * value),
        "memory": 8.0 * batch * heads * key * value / hardware.memory_bandwidth,
        "tiles": US * batch * heads / hardware.compute_units * np.ones_like(key * value),
    }


@dataclass(frozen=True)
class Fitted:
    """The numbers of one law: by name of the term, non-negative."""

    law: Law
    numbers: dict[str, float]

    def time(self, hardware: HardwareProfile, sizes: Sizes, dtype: str) -> Column:
        """Seconds: the sum of number x term."""
        terms = self.law(hardware, sizes, dtype)
        return column(sum(number * terms[name] for name, number in self.numbers.items()))

    @classmethod
    def from_dict(cls, law: Law, data: Mapping[str, Any]) -> "Fitted":
        """From plain numbers by name."""
        return cls(law, {str(name): float(number) for name, number in data.items()})


ROOFLINE: dict[str, dict[str, float]] = {
    "linear": {"launch": 3.0, "memory": 1.2, "compute": 1.3},
    "decode_attention": {"launch": 8.0, "memory": 1.15, "tiles": 2.0, "compute": 1.0},
    "decode_mla": {"launch": 12.0, "memory": 1.2, "tiles": 4.0, "compute": 1.6},
    "experts": {"launch": 30.0, "memory": 1.3, "activations": 2.0, "tiles": 1.0, "compute": 1.5},
    "states": {"launch": 4.0, "memory": 1.4},
}
"""Numbers of a kernel that nobody measured on any relative: launches, 70 to 85 % of the bandwidth and the peak."""
