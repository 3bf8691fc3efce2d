"""What was measured, over what a law says, at the nodes of a coarse grid of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import NDArray
from planner.curves import Column
from planner.serving.curves.kernel_laws import Sizes


@dataclass(frozen=True)
class Mesh:
    """Seconds at the nodes of a grid, linear in the sizes between them: exact for launch + work / rate, and never falling.

    Interpolating times, not factors, keeps the order of the nodes: a larger operation never takes less time.
    """

    axes: dict[str, Column]
    """Nodes by name of the size, increasing; one node = the size that all measurements are reduced to."""
    seconds: Column
    """Times at the nodes, one axis each, never decreasing along any."""

    @classmethod
    def lifted(cls, axes: dict[str, Column], seconds: Column) -> Mesh:
        """Times that fall with a size are lifted to the longest before them: noise must not reward more work."""
        for axis in range(seconds.ndim):
            seconds = np.maximum.accumulate(seconds, axis=axis)
        return cls(axes, seconds)

    @cached_property
    def _cells(self) -> list[tuple[str, Column, Column, int]]:
        """Per axis of two nodes or more: name, nodes, widths of the cells, and elements from one node to the next."""
        strides = np.cumprod((1, *self.seconds.shape[:0:-1]))[::-1]
        found = zip(self.axes.items(), strides, strict=True)
        return [(name, nodes, np.diff(nodes), int(stride)) for (name, nodes), stride in found if nodes.size > 1]

    @cached_property
    def _corners(self) -> NDArray[np.intp]:
        """Elements from the lowest corner of a cell to each of its corners, the first axis slowest."""
        corners = np.zeros(1, dtype=np.intp)
        for *_, stride in self._cells:
            corners = (corners[:, None] + np.array([0, stride])).ravel()
        return corners

    @cached_property
    def _ends(self) -> list[tuple[str, float, float]]:
        """Per axis: name, first and last node."""
        return [(name, float(nodes[0]), float(nodes[-1])) for name, nodes in self.axes.items()]

    def inside(self, sizes: Sizes) -> tuple[dict[str, Column], bool]:
        """The sizes with those of the axes clamped to the range of the nodes, and whether any was above it."""
        clamped, beyond = dict(sizes), False
        for name, first, last in self._ends:
            size = sizes[name]
            beyond = beyond or bool((size > last).any())
            clamped[name] = np.minimum(np.maximum(size, first), last)
        return clamped, beyond

    def time(self, inside: Sizes) -> Column:
        """Seconds of sizes within the nodes: linear along each axis of the cell in turn."""
        base: NDArray[np.intp] = np.zeros((), dtype=np.intp)
        shares = []
        for name, nodes, widths, stride in self._cells:
            below = np.minimum(nodes.searchsorted(inside[name], side="right") - 1, widths.size - 1)
            shares.append((inside[name] - nodes[below]) / widths[below])
            base = base + below * stride
        corners = self._corners.reshape(-1, *(1,) * base.ndim)
        values: Column = self.seconds.ravel()[base + corners]
        for share in shares:
            half = values.shape[0] // 2
            values = values[:half] + share * (values[half:] - values[:half])
        return values[0]
