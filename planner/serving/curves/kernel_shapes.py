"""Sizes that a kernel's shape consists of, as keywords of the methods of ``DecodeCurves``."""

from typing import TypedDict

from planner.arrays import ArrayLike


class HeadShape(TypedDict):
    """Heads of one rank in attention of one token per sequence."""

    heads: ArrayLike
    """Query heads of the rank."""
    kv_heads: ArrayLike
    """Key-value heads of the rank."""
    head_dim: ArrayLike
    """Width of one head."""


class PrefillShape(HeadShape):
    """Heads of one rank in attention of many queries per sequence."""

    value_dim: ArrayLike
    """Width of a value head; 0 = head_dim."""


class SparseShape(TypedDict):
    """DeepSeek sparse attention of one rank."""

    heads: ArrayLike
    """Query heads of the rank."""
    top_k: ArrayLike
    """Keys that a query attends to."""
    index_heads: ArrayLike
    """Heads of the indexer, whole on every rank."""
    index_dim: ArrayLike
    """Width of one of them."""


class ExpertShape(TypedDict):
    """Routed experts of one layer and how they are split."""

    hidden: ArrayLike
    """Width of the model."""
    ffn: ArrayLike
    """Inner width of one expert, before it is split over ``moe_tp``."""
    top_k: ArrayLike
    """Experts per token."""
    experts: ArrayLike
    """Routed experts of the layer."""
    moe_tp: ArrayLike
    """Ranks that each expert is split over."""
    ep: ArrayLike
    """Groups of ranks that the experts are spread over."""
