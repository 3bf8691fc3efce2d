"""``DecodeCurves``: the seconds of every kernel of a serving step on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from planner import arrays as npt
from planner.curves import Column, column, index
from planner.hardware import HardwareProfile
from planner.linear_attention import LinearAttention
from planner.serving.curves.kernel_laws import (
    ROOFLINE,
    Fitted,
    Law,
    Sizes,
    compute_dtype,
    decode_attention_law,
    decode_mla_law,
    experts_law,
    linear_law,
    states_law,
)
from planner.serving.curves.kernel_shapes import ExpertShape, HeadShape, PrefillShape
from planner.serving.serving_layout import WEIGHTS

KINDS = ("graph", "eager", "nccl")
TABLE_ROWS = 128.0
"""Most rows of the tables of decode; above it products follow the curves of the hardware profile."""
JOINED_BY = 2.0
"""Doublings of the rows within which both become one."""


def _columns(**sizes: npt.ArrayLike) -> dict[str, Column]:
    """Sizes as float64, none below one."""
    return {name: np.maximum(column(values), 1.0) for name, values in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class DecodeCurves:
    """Seconds of one call of each kernel, alone on one device, inside a CUDA graph unless ``eager`` is said.

    All methods take scalars or columns and return float64 of the broadcast shape. They grow with every size and are never
    faster than memory and tensor cores allow.
    """

    hardware: HardwareProfile
    provenance: dict[str, str] = field(default_factory=dict)
    """By operator: measured, scaled from a relative, or derived from the roofline."""
    errors: dict[str, Any] = field(default_factory=dict)
    """By operator and format: [median, 90th percentile] of the error on rows that were left out of the fit, percent."""

    def linear_time(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, weights: str) -> Column:
        """Seconds of a linear layer forward: m tokens, n outputs, k inputs; ``weights`` of WEIGHTS.

        To 128 rows the measured products of decode; above, those of the hardware profile, joined over two doublings.
        """
        weights = WEIGHTS[index(weights, WEIGHTS, "weight format")]
        sizes = _columns(m=m, n=n, k=k)
        rows = sizes["m"]
        few = self._bounded("linear", linear_law, {**sizes, "m": np.minimum(rows, TABLE_ROWS)}, weights)
        if not np.any(rows > TABLE_ROWS):
            return few[()]
        dtype = compute_dtype(self.hardware, weights)
        many = column(self.hardware.gemm_time(rows, sizes["n"], sizes["k"], dtype))
        start = column(self.hardware.gemm_time(TABLE_ROWS, sizes["n"], sizes["k"], dtype))
        share = np.clip(np.log2(rows / TABLE_ROWS) / JOINED_BY, 0.0, 1.0)
        joined = np.maximum(few, many + (1.0 - share) * np.minimum(few - start, 0.0))
        return np.where(rows > TABLE_ROWS, np.maximum(joined, few), few)[()]

    def decode_attention_time(
        self, *, batch: npt.ArrayLike, context: npt.ArrayLike, cache: str = "bf16", window: npt.ArrayLike = 0,
        **shape: Unpack[HeadShape],
    ) -> Column:  # fmt: skip
        """Seconds of attention of one token per sequence against ``context`` cached ones; heads of one rank, ``cache`` of CACHES.

        ``window`` w > 0: the last w tokens only.
        """
        heads, kv_heads = column(shape["heads"]), np.maximum(column(shape["kv_heads"]), 1.0)
        seen = np.where(column(window) > 0.0, np.minimum(column(context), column(window)), column(context))
        sizes = _columns(
            rows=column(batch) * kv_heads, group=heads / kv_heads, context=seen, head_dim=shape["head_dim"]
        )
        return self._bounded("decode_attention", decode_attention_law, sizes, cache)[()]

    def decode_mla_time(
        self, batch: npt.ArrayLike, heads: npt.ArrayLike, context: npt.ArrayLike, cache: str = "bf16"
    ) -> Column:
        """Seconds of MLA's attention of one token per sequence against a latent cache of 512 + 64 channels; heads of one rank."""
        sizes = _columns(batch=batch, heads=heads, context=context)
        return self._bounded("decode_mla", decode_mla_law, sizes, cache)[()]

    def prefill_attention_time(
        self, *, queries: npt.ArrayLike, keys: npt.ArrayLike, batch: npt.ArrayLike = 1, window: npt.ArrayLike = 0,
        **shape: Unpack[PrefillShape],
    ) -> Column:  # fmt: skip
        """Seconds of causal attention of the last ``queries`` of ``keys`` tokens, per sequence; heads of one rank.

        The pairs are exact: query number i of q sees keys - q + i, at most ``window`` (0 = all) of them; the curve is that of
        the hardware profile for equal work. Never faster than reading the keys and values.
        """
        q = np.maximum(column(queries), 1.0)
        s = np.maximum(column(keys), q)
        w = np.where(column(window) > 0.0, column(window), np.inf)
        seen = (_sum_to(s, w) - _sum_to(s - q, w)) / q
        width, value = column(shape["head_dim"]), column(shape["value_dim"])
        value = np.where(value > 0.0, value, width)
        time = self.hardware.attention_time(batch, shape["heads"], shape["kv_heads"], width, q, seen, causal=False,
                                            value_dim=value)  # fmt: skip
        read = 2.0 * column(batch) * column(shape["kv_heads"]) * np.minimum(s, w + q) * (width + value)
        return np.maximum(time, read / self.hardware.memory_bandwidth)[()]

    def all_reduce_time(self, num_bytes: npt.ArrayLike, n: npt.ArrayLike, kind: str, engine: str) -> Column:
        """Seconds of an all-reduce of ``num_bytes`` over n ranks of one domain; ``kind`` of KINDS.

        graph, eager: the engine's own kernel, inside a CUDA graph or launched by the host. nccl: ``hardware.scale_up_time``; which
        of them runs at a size is the engine's rule.
        """
        kind = KINDS[index(kind, KINDS, "kind of all-reduce")]
        return column(self.hardware.scale_up_time("all_reduce", num_bytes, n))[()]

    def experts_time(
        self, tokens: npt.ArrayLike, *, weights: str, skewed: bool = True, **shape: Unpack[ExpertShape]
    ) -> Column:
        """Seconds of the routed experts of one layer on the slowest rank; ``tokens`` of the whole group of ep x moe_tp ranks.

        ``skewed``: routing by a power law of 1.2, as measured; else every expert gets the same.
        """
        weights = WEIGHTS[index(weights, WEIGHTS, "weight format")]
        sizes = _columns(tokens=tokens, **shape)
        touched, rows = touched_experts(sizes["tokens"], sizes["top_k"], sizes["experts"], sizes["ep"])
        own = {"touched": touched, "rows": rows, "hidden": sizes["hidden"], "ffn": sizes["ffn"] / sizes["moe_tp"]}
        return self._bounded("experts", experts_law, own, weights)[()]

    def dispatch_time(
        self, tokens_per_rank: npt.ArrayLike, hidden: npt.ArrayLike, top_k: npt.ArrayLike, experts: npt.ArrayLike,
        ep: npt.ArrayLike,
    ) -> Column:  # fmt: skip
        """Seconds to send fp8 copies of the tokens of each rank to their experts on ep ranks of one domain (low-latency kernel)."""
        return self._exchange(1.0, tokens_per_rank, hidden, top_k, ep)

    def combine_time(
        self, tokens_per_rank: npt.ArrayLike, hidden: npt.ArrayLike, top_k: npt.ArrayLike, experts: npt.ArrayLike,
        ep: npt.ArrayLike,
    ) -> Column:  # fmt: skip
        """Seconds to bring the bf16 results back and sum them; as ``dispatch_time``."""
        return self._exchange(2.0, tokens_per_rank, hidden, top_k, ep)

    def linear_attention_time(
        self, linear: LinearAttention, batch: npt.ArrayLike, tokens: npt.ArrayLike = 1, tp: npt.ArrayLike = 1
    ) -> Column:
        """Seconds of the convolution and the scan of one linear-attention layer (no projections), heads split over tp.

        ``tokens`` per sequence: 1 updates the state, more scan a chunk of a prompt.
        """
        heads = np.maximum(linear.value_heads / column(tp), 1.0)
        sizes = _columns(batch=batch, value_heads=heads, key_dim=linear.key_head_dim, value_dim=linear.value_head_dim)
        one = self._bounded("states", states_law, sizes, "")
        traffic = (
            2.0 * column(batch) * column(tokens) * heads * (linear.value_head_dim * 2.0 + linear.key_head_dim * 4.0)
        )
        return (one + np.where(column(tokens) > 1.0, 3.0 * traffic / self.hardware.memory_bandwidth, 0.0))[()]

    def _exchange(
        self, item: float, tokens: npt.ArrayLike, hidden: npt.ArrayLike, top_k: npt.ArrayLike, ep: npt.ArrayLike
    ) -> Column:
        ranks = np.maximum(column(ep), 1.0)
        sent = item * column(tokens) * column(hidden) * column(top_k) * (ranks - 1.0) / ranks
        return np.where(ranks > 1.0, 10e-6 + 1.4 * sent / self.hardware.scale_up_bandwidth, 0.0)[()]

    def _bounded(self, operator: str, law: Law, sizes: Sizes, dtype: str) -> Column:
        """The time by the law, not below the launch of a kernel, the traffic at the full bandwidth and the work at the peak."""
        time = Fitted(law, ROOFLINE[operator]).time(self.hardware, sizes, dtype)
        terms = law(self.hardware, sizes, dtype)
        least = np.maximum(terms["memory"], terms.get("compute", 0.0))
        return np.maximum(np.maximum(time, least), self.hardware.graph_launch_floor)


def touched_experts(tokens: Column, top_k: Column, experts: Column, ep: Column) -> tuple[Column, Column]:
    """Experts of one of ``ep`` ranks that at least one of the tokens uses, E/e (1 - (1 - K/E)^B), and copies of tokens there."""
    each = np.maximum(experts / ep, 1.0)
    touched = each * -np.expm1(tokens * np.log1p(-np.minimum(top_k / experts, 1.0 - 1e-9)))
    return np.maximum(touched, 1.0 / ep), tokens * top_k / ep


def _sum_to(position: Column, window: Column) -> Column:
    """Keys that all queries up to a position see: p^2 / 2, or w p - w^2 / 2 beyond the window."""
    near = np.minimum(position, window)
    return 0.5 * near * near + np.where(position > near, near * (position - near), 0.0)


def decode_curves(hardware: HardwareProfile) -> DecodeCurves:
    """The curves of a device, read once."""
    return DecodeCurves(hardware=hardware, provenance=dict.fromkeys((*ROOFLINE, "all_reduce", "exchange"), "derived"))
