"""Shapes of the measured curves of a hardware profile: few constants, plain numpy, scalars or columns.

Every curve is made so that it holds outside what was measured too: a rate never passes the peak or the link, a larger
operation never takes less time, and far from the measurements the form tends to its physical limit (roofline, latency).
The constants are fitted by ``planner/profiler`` (from a machine at hand) and ``tools/build_hardware_profiles.py`` (from
published tables), which write their held-out errors next to them.
"""

from planner.curves.attention import AttentionCurve
from planner.curves.collectives import (
    COLLECTIVES,
    RINGS,
    CollectiveCurve,
    NetworkCurve,
    Segment,
    bus_factor,
    least_factor,
)
from planner.curves.gemm import GemmCurve, Grid, Waves
from planner.curves.reading import Column, column, index, numbers

__all__ = [
    "COLLECTIVES", "RINGS", "AttentionCurve", "CollectiveCurve", "Column", "GemmCurve", "Grid", "NetworkCurve", "Segment", "Waves",
    "bus_factor", "column", "index", "least_factor", "numbers",
]  # fmt: skip
