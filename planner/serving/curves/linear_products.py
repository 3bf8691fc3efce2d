"""Linear layers of a few shapes at many numbers of rows: what the shapes alone decide is worked out once.

To TABLE_ROWS rows the measured products of decode; above, those of the hardware profile, joined over two doublings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import NDArray, unique
from planner.curves import Column, GemmCurve
from planner.record import record
from planner.serving.curves.kernel_laws import compute_dtype
from planner.serving.curves.kernel_tables import Kernel

TABLE_ROWS = 128.0
"""Most rows of the tables of decode; above it products follow the curves of the hardware profile."""
JOINED_BY = 2.0
"""Doublings of the rows within which both become one."""


@dataclass(frozen=True)
class Lines:
    """Curves over one size, straight between nodes that all share; sizes lie within the nodes."""

    nodes: Column
    values: Column
    """At the nodes, the last axis; the one before it counts shapes."""

    def at(self, size: Column, shape: NDArray[np.intp]) -> Column:
        """Values of the curves of some shapes at a size each."""
        below = np.minimum(self.nodes.searchsorted(size, side="right") - 1, self.nodes.size - 2)
        share = (size - self.nodes[below]) / (self.nodes[below + 1] - self.nodes[below])
        flat, place = self.values.reshape(*self.values.shape[:-2], -1), shape * self.nodes.size + below
        lower = flat[..., place]
        return lower + share * (flat[..., place + 1] - lower)


@record
class Products:
    """Products of n outputs and k inputs: columns of shapes, or several rows of them that are asked for together."""

    n: Column
    k: Column
    kernel: Kernel
    """Of decode."""
    curve: GemmCurve
    """Of the hardware profile."""
    slower: float
    """Time of the product of the profile that unpacks its weights over that of a plain one."""

    def time(self, m: Column, shape: NDArray[np.intp]) -> Column:
        """Seconds of products of m rows, each of the shape with that number; with several rows of shapes one row of each. Never
        falls with the rows."""
        rows = np.maximum(m, 1.0)
        time = self._few(np.minimum(rows, TABLE_ROWS), shape)
        above = np.flatnonzero(rows > TABLE_ROWS)
        if above.size:
            time[..., above] = self._many(time[..., above], rows[above], shape[above])
        return time

    def _few(self, rows: Column, shape: NDArray[np.intp]) -> Column:
        if self._tables is not None:
            return self._tables.at(rows, shape)
        return self.kernel.time({"m": rows, "n": self.n[..., shape], "k": self.k[..., shape]})

    @cached_property
    def _tables(self) -> Lines | None:
        """The measured kernel at its nodes; between them its mesh and what its law adds beyond are straight."""
        if not self.kernel.axes:
            return None
        nodes = unique(np.clip([1.0, *self.kernel.axes["m"], TABLE_ROWS], 1.0, TABLE_ROWS))
        return Lines(nodes, self.kernel.time({"m": nodes, "n": self.n[..., None], "k": self.k[..., None]}))

    def _many(self, few: Column, rows: Column, shape: NDArray[np.intp]) -> Column:
        """The profile's law, from what the table says at its end."""
        factor = None if self._factors is None else np.exp(self._factors.at(self._logarithm(rows), shape))
        many = self._profile(rows, self.n[..., shape], self.k[..., shape], factor)
        away = np.log2(rows / TABLE_ROWS) / JOINED_BY
        if (away >= 1.0).all():
            return np.maximum(few, many)
        start = self._start[..., shape]
        return np.maximum(few, many + np.maximum(1.0 - away, 0.0) * np.minimum(few - start, 0.0))

    def _profile(self, m: Column, n: Column, k: Column, factor: Column | None = None) -> Column:
        hardware = self.kernel.hardware
        peak = hardware.peak(compute_dtype(hardware, self.kernel.dtype))
        return self.slower * self.curve.time(m, n, k, peak, hardware.memory_bandwidth, factor)

    @cached_property
    def _start(self) -> Column:
        """Where the profile's law begins."""
        return self._profile(np.full_like(self.n, TABLE_ROWS), self.n, self.k)

    @cached_property
    def _factors(self) -> Lines | None:
        """Residual grid of the profile's law, over the logarithm of the rows."""
        grid = self.curve.grid
        return None if grid is None else Lines(np.log(grid.m), grid.log_factors(self.n, self.k))

    def _logarithm(self, rows: Column) -> Column:
        """Of the rows, within the grid."""
        grid = self.curve.grid
        assert grid is not None
        return np.log(np.clip(rows, grid.m[0], grid.m[-1]))
