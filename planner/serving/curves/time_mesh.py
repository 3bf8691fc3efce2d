"""What was measured, over what a law says, at the nodes of a coarse grid of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

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

    def inside(self, sizes: Sizes) -> dict[str, Column]:
        """The sizes with those of the axes clamped to the range of the nodes."""
        clamped = {name: np.clip(sizes[name], nodes[0], nodes[-1]) for name, nodes in self.axes.items()}
        return {**sizes, **clamped}

    def time(self, inside: Sizes) -> Column:
        """Seconds of sizes within the nodes: the sum over the corners of a cell of weight x seconds."""
        base: NDArray[np.intp] = np.zeros((), dtype=np.intp)
        parts = []
        for (name, nodes), stride in zip(self.axes.items(), _strides(self.seconds.shape), strict=True):
            if nodes.size == 1:
                continue
            below = np.clip(np.searchsorted(nodes, inside[name], side="right") - 1, 0, nodes.size - 2)
            share = (inside[name] - nodes[below]) / (nodes[below + 1] - nodes[below])
            base = base + below * stride
            parts.append((stride, share))
        flat = self.seconds.ravel()
        total: Column = np.zeros(())
        for corner in product((0, 1), repeat=len(parts)):
            weight: Column = np.ones(())
            step = 0
            for side, (stride, share) in zip(corner, parts, strict=True):
                weight = weight * (share if side else 1.0 - share)
                step += side * stride
            total = total + weight * flat[base + step]
        return total


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Elements from one node to the next along each axis."""
    return [int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape))]
