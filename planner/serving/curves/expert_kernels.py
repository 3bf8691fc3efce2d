"""Routed experts: what a batch touches on the slowest rank, and the time of its kernels from one row per expert to thousands."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from planner.curves import Column, column
from planner.serving.curves.kernel_laws import Sizes, compute_dtype
from planner.serving.curves.kernel_tables import Kernel
from planner.serving.serving_layout import WEIGHT_BYTES

FEW_ROWS = 64.0
"""Rows per touched expert up to which the measured kernels of decode stand alone."""
JOINED_BY = 2.0
"""Doublings of them within which grouped products of the hardware profile take over."""
FUSED_LAUNCHES = 4.0
"""Kernels of a fused mixture: sorting, first products with their activation, second products, the sum over a token's experts."""
MOST_PASSES = 2.0
"""Times that sorting and summing move the copies of tokens where products are priced by themselves: to the experts and back."""
_RANKS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
_LARGEST = np.array([0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.595, 2.827, 3.044, 3.248])
"""Mean of the largest of n standard normal variables."""
POWER, RANGE = 1.2, 100.0
"""Skewed routing: how often an expert is chosen is spread as x^-1.2 between one and a hundred times the least popular."""


def _popularity() -> tuple[Column, float]:
    """Quantiles of the popularity over its mean (each as likely), and its variance."""
    share = (np.arange(400) + 0.5) / 400.0
    spread = (1.0 - share * (1.0 - RANGE ** (1.0 - POWER))) ** (1.0 / (1.0 - POWER))
    relative = spread / spread.mean()
    return relative, float(np.var(relative))


_RELATIVE, _VARIANCE = _popularity()
_LOADS = np.exp2(np.arange(-14.0, 15.0, 0.5))
_TOUCHED = np.array([float(np.mean(-np.expm1(-load * _RELATIVE))) for load in _LOADS])
"""Share of experts touched at so many expected copies per expert, when popularity is skewed."""


def slowest_rank(
    tokens: Column, top_k: Column, experts: Column, ep: Column, skewed: bool
) -> tuple[Column, Column]:  # fmt: skip
    """(experts touched, copies of tokens) on the slowest of ``ep`` ranks that hold E / ep experts each.

    A token uses K of E experts: one expert is touched with probability p = 1 - (1 - K/E)^B, a rank touches n p of its n experts
    on the mean, and the luckless one L(ep) standard deviations more, at most all. Copies: B K / ep, likewise.
    ``skewed``: experts differ in popularity by the power law above; else all are alike and only chance makes ranks differ.
    """
    each = np.maximum(experts / ep, 1.0)
    chosen = np.minimum(top_k / experts, 1.0)
    uniform = -np.expm1(tokens * np.log1p(-np.minimum(chosen, 1.0 - 1e-12)))
    share = np.minimum(np.interp(np.log2(tokens * chosen), np.log2(_LOADS), _TOUCHED), uniform) if skewed else uniform
    luck = np.interp(np.log2(np.maximum(ep, 1.0)), np.log2(_RANKS), _LARGEST)
    touched = each * share + luck * np.sqrt(each * share * (1.0 - share))
    touched = np.clip(touched, np.minimum(1.0, tokens * top_k / ep), np.minimum(each, tokens * np.minimum(top_k, each)))
    mean = tokens * top_k / ep
    variance = mean * (1.0 - 1.0 / ep) + (mean * mean * _VARIANCE * (1.0 - 1.0 / ep) / each if skewed else 0.0)
    rows = np.minimum(mean + luck * np.sqrt(variance), tokens * np.minimum(top_k, each))
    return column(touched), column(np.maximum(rows, touched))


def routed_time(kernel: Kernel, sizes: Sizes, slower: float) -> Column:
    """Seconds of the experts of one rank, for the sizes of ``experts_law``; never falls with tokens.

    To FEW_ROWS rows per touched expert as measured; above, grouped products of the hardware profile with what sorts and sums around
    them, joined over two doublings. ``slower``: time of a product that unpacks its weights over that of a plain one.
    """
    rows, touched = sizes["rows"], sizes["touched"]
    per_expert = rows / touched
    share = np.minimum(FEW_ROWS / per_expert, 1.0)
    capped = {**sizes, "rows": rows * share, "pairs": sizes["pairs"] * share}
    few = kernel.time(capped)
    if not (per_expert > FEW_ROWS).any():
        return few
    many, start = (slower * _grouped(kernel, one) + _around(kernel, one) for one in (sizes, capped))
    away = np.clip(np.log2(per_expert / FEW_ROWS) / JOINED_BY, 0.0, 1.0)
    return np.where(share < 1.0, np.maximum(few, many + (1.0 - away) * np.minimum(few - start, 0.0)), few)


def _grouped(kernel: Kernel, sizes: Sizes) -> Column:
    """Gate and up in one grouped product, then down; weights of the kernel's format."""
    hardware, dtype = kernel.hardware, compute_dtype(kernel.hardware, kernel.dtype)
    curve = hardware.gemm_curve(dtype)
    curve = replace(curve.without_quantisation(hardware.gemm["bf16"]), operand_bytes=WEIGHT_BYTES[kernel.dtype])
    touched, hidden, ffn = sizes["touched"], sizes["hidden"], sizes["ffn"]
    rows = np.maximum(sizes["rows"] / touched, 1.0)
    limits = (hardware.peak(dtype), hardware.memory_bandwidth)
    up = curve.grouped_time(rows, rows, 2.0 * ffn, hidden, touched, 0, *limits)
    return up + curve.grouped_time(rows, rows, hidden, ffn, touched, 0, *limits)


def _around(kernel: Kernel, sizes: Sizes) -> Column:
    """What sorting and summing move around the products, which read and write the rows themselves."""
    passes = min(kernel.numbers.get("pairs", 0.0), MOST_PASSES)
    return replace(kernel, numbers={"pairs": passes}).part("pairs", sizes)


def fused(kernel: Kernel, product: Mapping[str, float]) -> Kernel:
    """The kernel in an engine whose own was not measured.

    It is launched as FUSED_LAUNCHES products, which walk along their depth as a product of that many bytes does (``product``: the
    numbers of linear layers in bf16), at least at the rate of grouped products, sorted and summed in MOST_PASSES. The bandwidth
    stays.
    """
    shorter = WEIGHT_BYTES[kernel.dtype] / WEIGHT_BYTES["bf16"]
    launch, walk = product.get("launch", 0.0), product.get("depth", 0.0) * shorter
    curve = kernel.hardware.gemm_curve(compute_dtype(kernel.hardware, kernel.dtype))
    most = {
        "launch": FUSED_LAUNCHES * launch, "depth": walk, "width": walk, "pairs": MOST_PASSES,
        "compute": 1.0 / (curve.efficiency * curve.grouped_efficiency[0]),
    }  # fmt: skip
    return replace(kernel, numbers={**kernel.numbers, **{k: min(v, kernel.numbers.get(k, v)) for k, v in most.items()}})
