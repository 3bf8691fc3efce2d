"""Products of a pass: shapes by what they compute, and their seconds on the ranks of columns of layouts.

Shapes follow from tp alone, of which columns have few: their curves are worked out once for each and shared by all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, spread
from planner.layout import divisors
from planner.model import ModelSpec
from planner.record import record
from planner.serving.curves.linear_products import Products
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout


@record
class Product:
    """A linear layer of n outputs and k inputs; columns over the degrees of ``LinearLayers``."""

    n: Any
    k: Any
    weights: str
    after: str = "norm"
    """The kernel of FUSING that writes its input; a norm stands in an all-reduce where there is one."""
    times: float = 1.0
    """In a pass."""


def projections(model: ModelSpec, tp: Floats, weights: str, times: float = 1.0) -> list[Product]:
    """Products around attention of one layer; KV heads below tp are repeated.

    MLA decodes with the up projections absorbed: queries times W_uk and values times W_uv per head, the weights of
    kv_b once [DeepSeek-V2, arXiv 2405.04434, section 2.1.2]; prompts decompress keys and values with the same weights.
    """
    m, h = model, float(model.hidden_size)
    shapes: list[tuple[Any, Any, str, str]] = [(h, m.attention_output_size / tp, weights, "attention")]
    if not m.is_mla:
        heads = np.maximum(m.num_kv_heads / tp, 1.0)
        columns = (m.query_size + m.query_gate_size) / tp + heads * (m.head_dim + m.value_head_size)
        shapes.append((columns, h, weights, "norm"))
    else:
        rank, rope = float(m.kv_lora_rank), float(m.qk_rope_head_dim)
        shapes.append((m.q_lora_rank + rank + rope, h, weights, "norm"))
        shapes.append((m.query_size / tp, float(m.q_lora_rank or h), weights, "norm"))
        shapes.append((m.num_heads / tp * (m.qk_nope_head_dim + m.v_head_dim), rank, "bf16", "norm"))
        if m.is_sparse:
            shapes.append((float(m.index_heads * m.index_head_dim), float(m.q_lora_rank), weights, "norm"))
            shapes.append((float(m.index_head_dim + m.index_heads), h, "bf16", "norm"))
    return [Product(n=n, k=k, weights=form, after=after, times=times) for n, k, form, after in shapes]


def mlp(model: ModelSpec, width: Floats, weights: str, times: float = 1.0) -> list[Product]:
    """Gate and up of ``width`` inner columns of a rank in one product, then down."""
    h, gates = float(model.hidden_size), model.num_mlp_matrices - 1.0
    return [
        Product(n=gates * width, k=h, weights=weights, times=times),
        Product(n=h, k=width, weights=weights, after="activation", times=times),
    ]


class Row:
    """Products one after the other."""

    def __init__(self, served: Served, tp: Floats, products: Sequence[Product]) -> None:
        self.served, self.tp = served, tp
        runs = [(one, kind, one.times * (self._fused(one) == kind)) for one in products for kind in (False, True)]
        runs = [(one, kind, times) for one, kind, times in runs if times.any()]
        self.parts: list[tuple[Products, Floats]] = []
        """Of one format each, and how often they run by product and degree."""
        for weights, fused in sorted({(one.weights, kind) for one, kind, _ in runs}):
            same = [(one.n, one.k, times) for one, kind, times in runs if (one.weights, kind) == (weights, fused)]
            n, k, times = (
                np.stack([spread(value, tp.shape) for value in values]) for values in zip(*same, strict=True)
            )
            self.parts.append((served.curves.products(n, k, weights, fused), times))

    def _fused(self, one: Product) -> NDArray[np.bool_]:
        """By degree whether the kernel before quantises the input."""
        engine, model = self.served.engine, self.served.model
        plain = not (model.is_moe or model.qk_norm or model.is_mla)
        if one.after == "norm" and not engine.fuses(one.weights, plain, "norm"):
            return (self.tp > 1.0) & engine.fuses(one.weights, plain, "all_reduce")
        return np.full(self.tp.shape, engine.fuses(one.weights, plain, one.after))

    def time(self, rows: Floats, degree: Any) -> Floats:
        """Seconds of all of them on so many rows."""
        shape = np.broadcast_shapes(rows.shape, degree.shape)
        rows, degree = spread(rows, shape), spread(degree, shape)
        m, which = rows.ravel(), degree.ravel()
        found = sum(np.sum(times[:, which] * one.time(m, which), axis=0) for one, times in self.parts)
        return np.asarray(found).reshape(rows.shape)


class LinearLayers:
    """Those of a pass of columns of layouts."""

    def __init__(self, served: Served, layout: ServingLayout) -> None:
        self.served, self.model = served, served.model
        tp = np.asarray(layout.tp, dtype=np.float64)
        usual = np.array(divisors(self.model.num_heads), dtype=np.float64)
        self.degree = np.minimum(usual.searchsorted(tp), usual.size - 1)
        self.tp = usual
        """Degrees: those that divide the heads, which all columns of a search have, or those of these columns."""
        if not np.array_equal(usual[self.degree], tp):
            self.tp, degree = np.unique(tp, return_inverse=True)
            self.degree = degree.reshape(tp.shape)
        kinds = self.model.layer_kinds
        self.attends = sum(kind.share for kind in kinds if kind.mixer == "attention") * self.model.num_layers
        """Layers with attention."""
        self.mlps = sum(kind.share for kind in kinds if kind.mlp)
        """Part of the layers that has an MLP."""
        self.sparse = self.mlps * self.model.num_moe_layers
        """Layers with routed experts."""

    def time(self, row: Row, rows: Floats) -> Floats:
        """Seconds of some of them on so many rows of one rank."""
        return row.time(rows, self.degree)

    def _row(self, name: str, products: Callable[[], Sequence[Product]]) -> Row:
        """Shapes follow from the degrees alone: one is worked out for all tables of a search."""
        kept, key = self.served.products, (name, self.tp.tobytes())
        if key not in kept:
            kept[key] = Row(self.served, self.tp, products())
        found: Row = kept[key]
        return found

    @cached_property
    def body(self) -> Row:
        """Projections of attention and dense MLPs."""
        m, weights = self.model, self.served.precision.weights
        dense = self.mlps * m.num_plain_layers
        return self._row("body", lambda: [
            *projections(m, self.tp, self.served.attention_format, self.attends),
            *(mlp(m, m.ffn_size / self.tp, weights, dense) if dense else ()),
        ])  # fmt: skip

    @cached_property
    def shared(self) -> Row:
        """Shared experts of one layer, as a dense MLP over all ranks of the stage."""
        m = self.model
        width = float(m.num_shared_experts * m.shared_expert_ffn_size)
        return self._row("shared", lambda: mlp(m, width / self.tp, self.served.precision.weights))

    @cached_property
    def router(self) -> Row:
        """Of one layer with experts."""
        n, k = float(self.model.num_experts), float(self.model.hidden_size)
        return self._row("router", lambda: [Product(n=n, k=k, weights="bf16")])

    @cached_property
    def head(self) -> Row:
        """The output head."""
        n, k = self.model.vocab_size / self.tp, float(self.model.hidden_size)
        return self._row("head", lambda: [Product(n=n, k=k, weights="bf16")])

    @cached_property
    def recurrent(self) -> Row:
        """Projections of one layer of linear attention."""
        one, h, weights = self.model.linear, float(self.model.hidden_size), self.served.attention_format
        assert one is not None
        shapes = (one.input_size / self.tp, h), (h, one.value_size / self.tp)
        return self._row("recurrent", lambda: [Product(n=n, k=k, weights=weights) for n, k in shapes])
