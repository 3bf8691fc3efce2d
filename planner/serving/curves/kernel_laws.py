"""Physical laws of the kernels of serving: each a sum of times, a fitted number times what is moved, computed or launched.

Every term is a product of powers of the sizes and every number is positive, so a law grows with every size and holds far outside
what was measured. Terms are seconds at the nominal bandwidth and peak: a number of 1.25 on ``memory`` means 80 % of the bandwidth.
Terms that count launches, blocks or steps are in microseconds.
"""

from collections.abc import Callable, Mapping

import numpy as np

from planner.curves import Column
from planner.hardware import HardwareProfile
from planner.serving.serving_layout import CACHE_BYTES, WEIGHT_BYTES
from planner.units import MICRO

Terms = dict[str, Column | float]
"""Seconds by name of the term; of a shape that broadcasts to that of the sizes."""
Sizes = Mapping[str, Column]
"""Float64 columns that broadcast, by name."""
Law = Callable[[HardwareProfile, Sizes, str], Terms]
"""Terms of a kernel from its sizes and the format of what it reads."""
MLA_CHANNELS, MLA_VALUES = 576.0, 512.0
"""Of the latent cache: 512 that serve as keys and values, and 64 with the rotary position."""
LONG = 4096.0
"""Inputs of a product that ``depth`` counts by."""
STEP = 512.0
"""Keys that ``steps`` count by."""
HEAD_TILE = 64.0
"""Heads of one query that a block of sparse attention takes: fewer are padded."""
CHUNK = 64.0
"""Tokens that the scan of a linear-attention layer takes at a time."""


def compute_dtype(hardware: HardwareProfile, weights: str) -> str:
    """Format that a product with such weights is computed in: that of the activation, 16 bits where weights are only stored small.

    int4 and int8 are unpacked on the way to 16-bit tensor cores; so are fp8, nvfp4 and mxfp4 on devices without cores for them.
    mxfp4 meets activations in 8 bits, at their rate.
    """
    core = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}.get(weights, "")
    if weights == "mxfp4" and core in hardware.peak_flops:
        return "fp8"
    return weights if core in hardware.peak_flops else "bf16"


def keys_seen(position: Column, window: Column) -> Column:
    """Keys that all queries up to a position see: p^2 / 2, or w p - w^2 / 2 beyond the window."""
    near = np.minimum(position, window)
    return 0.5 * near * near + np.where(position > near, near * (position - near), 0.0)


def linear_law(hardware: HardwareProfile, sizes: Sizes, weights: str) -> Terms:
    """A linear layer forward on m rows, n outputs, k inputs: weights and activations once, 2 m n k FLOP.

    ``depth``: a block walks along k, tile after tile, whatever the rate; few outputs leave no other work to hide that behind.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    bytes_moved = WEIGHT_BYTES[weights] * n * k + 2.0 * m * (n + k)
    return {
        "launch": MICRO,
        "memory": bytes_moved / hardware.memory_bandwidth,
        "compute": 2.0 * m * n * k / hardware.peak(compute_dtype(hardware, weights)),
        "depth": MICRO * k / LONG,
    }


def decode_attention_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """One query per sequence against its keys and values: the cache once, 4 FLOP per query head, key and channel.

    ``rows``: key-value heads of all sequences, each a block of its own; ``group``: query heads that share one.
    ``tiles`` and ``queries`` count them over the compute units; ``steps`` the keys that one block walks along.
    """
    rows, group, context, width = sizes["rows"], sizes["group"], sizes["context"], sizes["head_dim"]
    cached = 2.0 * rows * context * width
    return {
        "launch": MICRO,
        "memory": CACHE_BYTES[cache] * cached / hardware.memory_bandwidth,
        "tiles": MICRO * rows / hardware.compute_units,
        "queries": MICRO * rows * group / hardware.compute_units,
        "compute": 2.0 * cached * group / hardware.peak(compute_dtype(hardware, cache)),
        "steps": MICRO * context / STEP,
    }


def window_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """The same against the last ``context`` of ``walked`` cached tokens: some kernels walk past what the window hides."""
    terms = decode_attention_law(hardware, sizes, cache)
    return {**terms, "steps": MICRO * sizes["walked"] / STEP}


def decode_mla_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """One query per sequence against its latent cache, which all heads share; ``walk``: blocks times the keys they walk along."""
    batch, heads, context = sizes["batch"], sizes["heads"], sizes["context"]
    flop = 2.0 * (MLA_CHANNELS + MLA_VALUES) * batch * heads * context
    return {
        "launch": MICRO,
        "memory": MLA_CHANNELS * CACHE_BYTES[cache] * batch * context / hardware.memory_bandwidth,
        "tiles": MICRO * batch / hardware.compute_units,
        "queries": MICRO * batch * heads / hardware.compute_units,
        "compute": flop / hardware.peak(compute_dtype(hardware, cache)),
        "steps": MICRO * context / STEP,
        "walk": MICRO * batch * context / STEP / hardware.compute_units,
    }


def sparse_prefill_law(hardware: HardwareProfile, sizes: Sizes, cache: str) -> Terms:
    """Prompts against the ``selected`` keys of each query in a latent cache: gathered, then attended by whole tiles of heads.

    ``score``: the indexer multiplies every ``pair`` of query and key over its own channels in 8 bits; ``heads``: what the queries,
    absorbed into the latent, and their results move. Neighbours gather the same keys, so a cache serves part of them.
    """
    queries, heads, wide = sizes["queries"], sizes["heads"], MLA_CHANNELS + MLA_VALUES
    gathered = queries * sizes["selected"]
    padded = np.maximum(heads, HEAD_TILE)
    return {
        "launch": MICRO,
        "gather": gathered * MLA_CHANNELS * CACHE_BYTES[cache] / hardware.memory_bandwidth,
        "attend": 2.0 * wide * gathered * padded / hardware.peak("bf16"),
        "score": 2.0 * sizes["pairs"] * sizes["channels"] / hardware.peak(compute_dtype(hardware, "fp8")),
        "heads": 2.0 * wide * queries * heads / hardware.memory_bandwidth,
    }


def experts_law(hardware: HardwareProfile, sizes: Sizes, weights: str) -> Terms:
    """Gate, up and down products of the experts of one rank: 3 h f weights of each that is ``touched``, once.

    ``rows``: copies of tokens on the rank; ``pairs``: of all tokens, which the kernels around the products sort, quantise and sum;
    ``blocks``: touched experts; ``depth`` and ``width``: the walk along h and f.
    """
    touched, rows, pairs, hidden, ffn = (sizes[name] for name in ("touched", "rows", "pairs", "hidden", "ffn"))
    each = 3.0 * hidden * ffn
    return {
        "launch": MICRO,
        "memory": touched * each * WEIGHT_BYTES[weights] / hardware.memory_bandwidth,
        "compute": 2.0 * rows * each / hardware.peak(compute_dtype(hardware, weights)),
        "rows": 6.0 * rows * (hidden + ffn) / hardware.memory_bandwidth,
        "pairs": 2.0 * pairs * (hidden + ffn) / hardware.memory_bandwidth,
        "blocks": MICRO * touched,
        "depth": MICRO * hidden / LONG,
        "width": MICRO * ffn / LONG,
    }


def update_law(hardware: HardwareProfile, sizes: Sizes, _: str) -> Terms:
    """One token per sequence through a linear-attention layer: its state is read and written in fp32, its convolution shifted."""
    state = 8.0 * sizes["batch"] * sizes["heads"] * sizes["key_dim"] * sizes["value_dim"]
    return {
        "launch": MICRO,
        "memory": state / hardware.memory_bandwidth,
        "convolution": 16.0 * sizes["batch"] * sizes["channels"] / hardware.memory_bandwidth,
        "tiles": MICRO * sizes["batch"] * sizes["heads"] / hardware.compute_units,
    }


def scan_law(hardware: HardwareProfile, sizes: Sizes, _: str) -> Terms:
    """Whole sequences through a linear-attention layer: channels in and out, chunks of a sequence one after the other.

    ``compute``: 4 FLOP per token, head, key and value channel for the state, and a chunk of keys per token inside of it.
    """
    tokens = sizes["batch"] * sizes["tokens"]
    inner = sizes["key_dim"] * sizes["value_dim"] + 0.5 * CHUNK * (sizes["key_dim"] + sizes["value_dim"])
    return {
        "launch": MICRO,
        "memory": 4.0 * tokens * sizes["channels"] / hardware.memory_bandwidth,
        "compute": 4.0 * tokens * sizes["heads"] * inner / hardware.peak("bf16"),
        "steps": MICRO * sizes["tokens"] / CHUNK,
    }


def exchange_law(hardware: HardwareProfile, sizes: Sizes, _: str) -> Terms:
    """Tokens to experts on other ranks, or results back: ``sent`` bytes over the link, ``across`` bytes over the network.

    ``own`` bytes of the tokens themselves are read and converted; ``slots``: those of one expert, which one block receives;
    ``counters``: one per expert.
    """
    return {
        "launch": MICRO,
        "link": sizes["sent"] / hardware.scale_up_bandwidth,
        "network": sizes["across"] / hardware.network_bandwidth,
        "own": sizes["own"] / hardware.scale_up_bandwidth,
        "slots": sizes["slots"] / hardware.scale_up_bandwidth,
        "counters": MICRO * sizes["experts"] / 128.0,
    }


LAWS: dict[str, Law] = {
    "linear": linear_law, "decode_attention": decode_attention_law, "window": window_law, "decode_mla": decode_mla_law,
    "sparse_prefill": sparse_prefill_law, "experts": experts_law, "linear_update": update_law, "linear_scan": scan_law,
    "exchange": exchange_law,
}  # fmt: skip
"""By operator."""
