"""Seconds of the kernels of serving: products of few rows, attention against a cache, small messages, experts, states.

``decode_curves(hardware)`` is the entrance. Physics first: every operator is a law of few constants (launch, share of the memory
bandwidth, share of the peak), corrected by a coarse mesh of measured / law where a GPU was measured, and bounded by what the
hardware can do at best. GPUs without measurements use the constants and the mesh of their nearest relative.
"""

from planner.serving.curves.decode_curves import DecodeCurves, decode_curves
from planner.serving.curves.kernel_shapes import ExpertShape, HeadShape, PrefillShape, SparseShape

__all__ = ["DecodeCurves", "ExpertShape", "HeadShape", "PrefillShape", "SparseShape", "decode_curves"]
