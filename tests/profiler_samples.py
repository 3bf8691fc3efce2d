"""A guess of a GPU, measured points and layers for the tests of the profiler's compute half."""

from __future__ import annotations

from typing import Any

from planner.hardware import load_hardware
from planner.lab.profile.points import Measured, Point

H100 = load_hardware("h100-sxm")


def known(point: Point, seconds: float, **details: Any) -> Measured:
    """A measured point with a scatter of 1 percent."""
    return Measured(
        point=point, median=seconds, low=0.99 * seconds, high=1.01 * seconds, repetitions=9, clock="cuda_events",
        details=details,
    )  # fmt: skip


LAYERS: tuple[dict[str, Any], ...] = (
    {"hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 8, "head_dim": 64, "batch": 1, "seq": 192, "gated": True},
    {"hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12, "head_dim": 64, "batch": 1, "seq": 128, "gated": False},
    {"hidden": 640, "ffn": 1728, "heads": 10, "kv_heads": 2, "head_dim": 64, "batch": 1, "seq": 256, "gated": True},
    {"hidden": 384, "ffn": 1536, "heads": 6, "kv_heads": 6, "head_dim": 64, "batch": 2, "seq": 192, "gated": False},
)
"""Four shapes, none of which is among the shapes that the profile is fitted to."""
