"""Time of a matrix product by its shape: saturating rate, roofline, tiles and waves, a residual grid."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

import numpy as np

from planner import arrays as npt
from planner.curves.reading import Column, checked, numbers
from planner.errors import PlannerError
from planner.record import record
from planner.schema import Seconds, plain_fields

MOST_ROWS = 2.0**30
"""Rows, columns or depth that no product was measured with; far beyond them sizes overflow."""


@record
class Grid:
    """A correction factor over (log M, log N, log K), interpolated linearly in the logarithms, clamped outside."""

    m: Column
    n: Column
    k: Column
    log_factor: Column
    """Logarithm of measured / model (both above the launch time) at the nodes, shape (len(m), len(n), len(k))."""

    @classmethod
    def from_dict(cls, data: object, where: str) -> Grid:
        """``percent`` holds 100 x measured / model: one row per (m, n), m outermost, one number per k."""
        entry = checked(data, where, ("m", "n", "k", "percent"))
        m, n, k = (numbers(entry[axis], f"{where} {axis}", above=1.0) for axis in ("m", "n", "k"))
        for axis, nodes in (("m", m), ("n", n), ("k", k)):
            if np.any(np.diff(nodes) <= 0.0) or nodes[-1] > MOST_ROWS:
                raise PlannerError(f"{where} {axis}: the nodes of an axis must increase, to {MOST_ROWS:g} at most")
        percent = numbers(entry["percent"], f"{where} percent", above=1.0)
        if percent.size != m.size * n.size * k.size:
            raise PlannerError(f"{where}: percent has {percent.size} numbers, expected {m.size} x {n.size} x {k.size}")
        return cls(m=m, n=n, k=k, log_factor=np.log(percent / 100.0).reshape(m.size, n.size, k.size))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        percent = np.round(100.0 * np.exp(self.log_factor), 6).reshape(-1, self.k.size)
        return {"m": self.m.tolist(), "n": self.n.tolist(), "k": self.k.tolist(), "percent": percent.tolist()}

    @staticmethod
    def weights(nodes: Column, x: Column) -> tuple[npt.NDArray[np.intp], Column]:
        """Index of the node below x and the fraction of the way to the next one, in the logarithm."""
        logs = np.log(nodes)
        position = np.interp(np.log(np.maximum(x, 1.0)), logs, np.arange(len(nodes), dtype=np.float64))
        below = np.minimum(position.astype(np.intp), len(nodes) - 2)
        return below, position - below

    def factor(self, m: Column, n: Column, k: Column) -> Column:
        """exp(sum over the 8 corners of weight x log_factor)."""
        below, share = self.weights(self.m, m)
        lower, upper = self._between(n, k, below, below + 1)
        return np.exp(lower + share * (upper - lower))

    def log_factors(self, n: Column, k: Column) -> Column:
        """The logarithm at all nodes of m, on an axis behind those of n and k."""
        return self._between(n[..., None], k[..., None], np.arange(self.m.size))[0]

    def _between(self, n: Column, k: Column, *nodes: npt.NDArray[np.intp]) -> list[Column]:
        """The logarithm at nodes of m, given by their numbers."""
        jn, wn = self.weights(self.n, n)
        lk, wk = self.weights(self.k, k)
        _, size_n, size_k = self.log_factor.shape
        flat, found = self.log_factor.ravel(), []
        for node in nodes:
            corner = (node * size_n + jn) * size_k + lk
            near, far = (flat[one] + wk * (flat[one + 1] - flat[one]) for one in (corner, corner + size_k))
            found.append(near + wn * (far - near))
        return found


@record
class Waves:
    """Tile and wave quantisation of a chip without balanced tiles (Ampere and before)."""

    tiles: Column
    """Candidate tiles, shape (number, 2): rows and columns of the output."""
    tile_cost: Column
    """Relative cost of one FLOP in each tile (1 = the best tile), shape (number,)."""
    compute_units: float

    @classmethod
    def from_dict(cls, data: object, where: str) -> Waves:
        """``tiles`` as pairs, ``tile_cost`` of each."""
        entry = checked(data, where, ("tiles", "tile_cost", "compute_units"))
        tiles = numbers(entry["tiles"], f"{where} tiles", above=1.0).reshape(-1, 2)
        cost = numbers(entry["tile_cost"], f"{where} tile_cost", above=1.0)
        return cls(tiles=tiles, tile_cost=cost, compute_units=float(entry["compute_units"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return {
            "tiles": self.tiles.tolist(),
            "tile_cost": self.tile_cost.tolist(),
            "compute_units": self.compute_units,
        }

    def area(self, m: Column, n: Column) -> Column:
        """Output elements that the chip works through for M x N: min over tiles of cost x ceil(T/U) U x tile area.

        T = ceil(M/tm) ceil(N/tn) tiles on U compute units; the library picks the best tile. Where T <= U the library
        splits K instead, and what that loses is in the saturation constants: M N. Grows with M and N.
        """
        m, n = m[..., None], n[..., None]
        tiles_needed = np.ceil(m / self.tiles[:, 0]) * np.ceil(n / self.tiles[:, 1])
        area = np.ceil(tiles_needed / self.compute_units) * self.compute_units * self.tiles[:, 0] * self.tiles[:, 1]
        area = np.where(tiles_needed <= self.compute_units, m * n, area)
        best: Column = np.min(self.tile_cost * area, axis=-1)
        return best


@record
class GemmCurve:
    """Time of one dense GEMM of output M x N and reduction K.

    t = t0 + r(M,N,K) max(2 (A + m0 N + n0 M + m0 n0)(K + k0) / (P e), bytes / (W u)) + q M K / W, never below 2MNK / P;
    q only where the activation is quantised first, P peak, W memory bandwidth, A = M N, or the area with tiles and waves
    (``Waves``), r residual grid (1 without one).
    With A = M N the first term is 2MNK/(P e) (1 + m0/M)(1 + n0/N)(1 + k0/K).
    """

    peak_name: str
    """Key of peak_flops that bounds it."""
    operand_bytes: float
    """Bytes per element of both inputs as the tensor core reads them."""
    quantise: bool
    """The measured time includes reading the 2-byte activation (M x K) and writing it quantised."""
    quantise_traffic: float = 0.0
    """What that costs: q bytes per element of the activation at the nominal bandwidth, q M K / W."""
    efficiency: float
    m0: float
    n0: float
    k0: float
    memory_efficiency: float
    launch: Seconds
    """t0, seconds."""
    grid: Grid | None = None
    waves: Waves | None = None
    grouped_m0: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Saturation in tokens per group of a grouped GEMM: forward, dgrad, wgrad."""
    grouped_efficiency: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Rate of a large grouped GEMM over the rate of a large dense one: forward, dgrad, wgrad."""
    accumulate: float = 0.0
    """Part of the traffic of accumulating a weight gradient, at the nominal bandwidth, that its GEMM does not hide."""
    errors: dict[str, Any] = field(default_factory=dict)
    to_dict = plain_fields

    def without_quantisation(self, plain: GemmCurve) -> GemmCurve:
        """The GEMM alone, on inputs that are quantised already: one kernel, launched as ``plain``, that of bf16."""
        if not self.quantise:
            return self
        return replace(self, quantise=False, launch=min(self.launch, plain.launch))

    def bytes_moved(self, m: Column, n: Column, k: Column) -> Column:
        """Inputs once, output once, of 2 bytes, or of 4 where the inputs have as many."""
        return self.operand_bytes * (m * k + n * k) + (4.0 if self.operand_bytes >= 4.0 else 2.0) * m * n

    def time(
        self, m: Column, n: Column, k: Column, peak: float | Column, bandwidth: float, factor: Column | None = None
    ) -> Column:  # fmt: skip
        """Seconds of one GEMM; the equation is in the class. ``factor``: r, where it is known."""
        return np.maximum(self.unbounded_time(m, n, k, peak, bandwidth, factor), 2.0 * m * n * k / peak)

    def unbounded_time(
        self, m: Column, n: Column, k: Column, peak: float | Column, bandwidth: float, factor: Column | None = None
    ) -> Column:  # fmt: skip
        """The same without the bound by the peak: what the constants say, which ``checks`` holds against the bound."""
        area = m * n if self.waves is None else self.waves.area(m, n)
        outputs = area + self.m0 * n + self.n0 * m + self.m0 * self.n0
        compute = 2.0 * outputs * (k + self.k0) / (peak * self.efficiency)
        memory = self.bytes_moved(m, n, k) / (bandwidth * self.memory_efficiency)
        work = np.maximum(compute, memory)
        if factor is None and self.grid is not None:
            factor = self.grid.factor(m, n, k)
        work = work if factor is None else work * factor
        if self.quantise:
            work = work + self.quantise_traffic * m * k / bandwidth
        return self.launch + work

    def grouped_time(
        self, tokens: Column, m: Column, n: Column, k: Column, groups: Column, which: int, peak: float,
        bandwidth: float, gradient_bytes: float = 4.0,
    ) -> Column:  # fmt: skip
        """Seconds of ``groups`` equal GEMMs of M x N x K in one kernel; ``which`` 0 forward, 1 dgrad, 2 wgrad.

        t = t0 + max(g 2MNK / (P e e_g) (1 + m_g/T)(1 + n0/N)(1 + k0/K), g bytes / (W u)), T tokens per group; in wgrad
        T is the reduction, and the gradient is accumulated: 2 ``gradient_bytes`` per weight, less the 2 of the output.
        m_g was measured with fp32 gradients; what it exceeds that of dgrad by is this traffic, and shrinks with it.
        """
        flop = 2.0 * m * n * k * groups
        accumulated = 2.0 * gradient_bytes - 2.0
        filling = self.grouped_m0[which]
        if which == 2:
            filling = self.grouped_m0[1] + (filling - self.grouped_m0[1]) * accumulated / 6.0
        saturation = (1.0 + filling / tokens) * (1.0 + self.n0 / n)
        saturation = saturation * (1.0 + (0.0 if which == 2 else self.k0) / k)
        compute = flop / (peak * self.efficiency * self.grouped_efficiency[which]) * saturation
        traffic = self.bytes_moved(m, n, k) + (accumulated * m * n if which == 2 else 0.0)
        memory = groups * traffic / (bandwidth * self.memory_efficiency)
        quantised = groups * self.quantise_traffic * m * k / bandwidth if self.quantise else 0.0
        return np.maximum(self.launch + np.maximum(compute, memory) + quantised, flop / peak)
