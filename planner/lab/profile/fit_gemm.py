"""Fits the constants of a ``GemmCurve`` to measured times, with errors on points that the fit did not see.

Used on tables of thousands of published rows (tools/build_hardware_profiles.py) and on the tens of points that a profile
measures: constants always, the residual grid only where there are enough rows to hold some back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from planner.curves import Column, GemmCurve, Grid, Waves
from planner.lab.profile.fitting import error_of, fitted

Shape: TypeAlias = tuple[Column, Column, Column]  # Columns of rows M, columns N and depth K as the kernel runs them

OPERAND = {
    "bf16": ("bf16", 2.0, False), "fp16": ("fp16", 2.0, False), "fp32": ("fp32", 4.0, False), "tf32": ("tf32", 4.0, False),
    "fp8": ("fp8", 1.0, True), "fp8_block": ("fp8", 1.0, True), "nvfp4": ("fp4", 0.5, True),
    "fp8_plain": ("fp8", 1.0, False), "fp8_block_plain": ("fp8", 1.0, False), "nvfp4_plain": ("fp4", 0.5, False),
}  # fmt: skip
"""Recipe: key of the peak, bytes per element of the operands, whether the time holds the quantisation of the activation."""
TILES = [[256, 128], [128, 256], [128, 128], [256, 64], [64, 256], [128, 64], [64, 128], [64, 64]]
GRIDS = {
    "x4": ([128, 512, 2048, 8192, 32768], [256, 1024, 4096, 16384, 65536]),
    "x2": ([128, 256, 512, 1024, 2048, 4096, 8192, 32768], [256, 512, 1024, 2048, 4096, 8192, 16384, 65536]),
}
"""Nodes of the residual grid along M and along N and K."""
LARGE = 1024.0  # "Large" shapes in the errors: M, N, K at least this


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a GEMM runs on."""

    peak: float  # FLOP/s of the recipe
    bandwidth: float  # Bytes/s of the memory
    units: float  # Compute units that tiles are assigned to
    waves: bool = False  # Tiles and waves show in the times (Ampere and before)


def gemm_from(parameters: Column, recipe: str, units: float, waves: bool) -> GemmCurve:
    """The curve of a parameter vector (logarithms)."""
    name, operand, quantise = OPERAND[recipe]
    e, m0, n0, k0, u, t0 = np.exp(parameters[:6])
    traffic = float(np.exp(parameters[6])) if quantise else 0.0
    wave = None
    if waves:
        c128, c64 = 1.0 + np.exp(parameters[6:8])
        cost = [1.0, 1.0, c128, c128, c128, 0.5 * (c128 + c64), 0.5 * (c128 + c64), c64]
        wave = Waves(tiles=np.array(TILES, float), tile_cost=np.array(cost), compute_units=units)
    return GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=float(e), m0=float(m0), n0=float(n0),
        k0=float(k0), memory_efficiency=float(u), launch=float(t0), waves=wave, quantise_traffic=traffic,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far constants may go."""

    least_efficiency: float = 0.2
    longest_launch: float = 3e-5  # Seconds
    prior: float = 0.0
    """What an e-fold of m0, n0 or k0 away from the start weighs against a relative error: few scattered points say little about
    how a rate saturates, and would extrapolate wildly."""


def fit_constants(shape: Shape, t: Column, recipe: str, device: Device, limits: Limits) -> GemmCurve:
    """Six constants by robust least squares on log time; eight with waves, seven where the activation is quantised.

    Both n0 and the quantisation grow with M K: tiles lose no more columns than in bf16, so n0 is bounded there.
    """

    def residual(parameters: Column) -> Column:
        curve = gemm_from(parameters, recipe, device.units, device.waves)
        error = np.log(curve.time(*shape, device.peak, device.bandwidth) / t) + 3.0 * max(curve.efficiency - 1.0, 0.0)
        return np.append(error, limits.prior * (parameters[1:4] - start[1:4])) if limits.prior else error

    waves = device.waves
    start = np.log([0.8, 60, 60, 120, 0.6, 4e-6] + ([0.05, 0.2] if waves else []))
    low = np.log([limits.least_efficiency, 1e-2, 1e-2, 1e-2, 0.1, 1e-6] + ([1e-4, 1e-3] if waves else []))
    high = np.log([1.0, 4e3, 6e3, 4e3, 1.0, limits.longest_launch] + ([1.0, 2.0] if waves else []))
    if OPERAND[recipe][2]:
        start, low, high = (np.append(v, np.log(q)) for v, q in ((start, 6.0), (low, 0.5), (high, 40.0)))
        high[2] = np.log(100.0)
    return gemm_from(fitted(residual, start, low, high, scale=0.08, max_nfev=150), recipe, device.units, waves)


def fit_grid(curve: GemmCurve, shape: Shape, t: Column, device: Device, nodes: str) -> Grid:
    """log(measured / model) at the nodes by ridge regression of the trilinear form (reweighted twice for outliers)."""
    axis_m, axis_nk = (np.array(values, float) for values in GRIDS[nodes])
    axes = (axis_m, axis_nk, axis_nk)
    work = replace(curve, quantise=False).time(*shape, device.peak, device.bandwidth) - curve.launch
    other = curve.launch + (curve.quantise_traffic * shape[0] * shape[2] / device.bandwidth if curve.quantise else 0.0)
    target = np.log(np.maximum(t - other, 0.3 * work) / work)
    share = (work / (other + work)) ** 2  # what launch and quantisation hide says little about the rate
    count = [len(axis) for axis in axes]
    matrix = np.zeros((len(t), math.prod(count)))
    parts = [Grid.weights(axis, x) for axis, x in zip(axes, shape, strict=True)]
    for corner in np.ndindex(2, 2, 2):
        index, weight = np.zeros(len(t), int), np.ones(len(t))
        for (below, fraction), bit, size in zip(parts, corner, count, strict=True):
            index = index * size + below + bit
            weight = weight * (fraction if bit else 1.0 - fraction)
        matrix[np.arange(len(t)), index] += weight
    trust: Any = share
    solution: Column = np.zeros(matrix.shape[1])
    for _ in range(3):
        normal = matrix.T @ (matrix * trust[:, None]) + 0.3 * np.eye(matrix.shape[1])
        solution = np.asarray(np.linalg.solve(normal, matrix.T @ (trust * target)), float)
        trust = share / np.maximum(1.0, np.abs(target - matrix @ solution) / 0.08)
    percent = np.clip(np.round(100.0 * np.exp(solution)), 60, 160)
    return Grid(m=axes[0], n=axes[1], k=axes[2], log_factor=np.log(percent / 100.0).reshape(count))


def bounded(curve: GemmCurve, device: Device) -> GemmCurve:
    """The curve with the nodes of its grid raised to where no product is faster than the peak; scatter may put them below."""
    if curve.grid is None:
        return curve
    grid = curve.grid
    m, n, k = np.meshgrid(grid.m, grid.n, grid.k, indexing="ij")
    time = curve.unbounded_time(m, n, k, device.peak, device.bandwidth) - curve.launch
    least = 2.0 * m * n * k / device.peak - curve.launch
    short_by = np.log(np.maximum(least, 1e-12) / time)
    return replace(curve, grid=replace(grid, log_factor=grid.log_factor + np.maximum(short_by, 0.0)))


def fit_gemm(shape: Shape, t: Column, recipe: str, device: Device, half: Any) -> GemmCurve:
    """The best of constants and constants x grid (x4, x2) by the error on the rows that are not in ``half``.

    A thinned table holds few M between powers of two, so its held-out half cannot show what waves are worth: at N = K =
    4096 and M = 768, 1024, 1280, 1792, 2560, 2816 the full table of A100 gives 230, 166, 207, 195, 276, 216 TFLOP/s; the
    form with waves says 201, 174, 225, 208, 257, 239, without them 191, 204, 213, 226, 235, 236.
    """
    large = (shape[0] >= LARGE) & (shape[1] >= LARGE) & (shape[2] >= LARGE)
    tried: dict[str, tuple[list[float], list[float]]] = {}
    makers: dict[str, Callable[[Shape, Column], GemmCurve]] = {}
    for nodes in ("", *GRIDS):

        def make(rows: Shape, time: Column, g: str = nodes) -> GemmCurve:
            curve = fit_constants(rows, time, recipe, device, Limits())
            return replace(curve, grid=fit_grid(curve, rows, time, device, g)) if g else curve

        label = ("waves" if device.waves else "constants") + (f" x grid {nodes}" if nodes else "")
        makers[label] = make
        m, n, k = (axis[half] for axis in shape)
        predicted = make((m, n, k), t[half]).time(*shape, device.peak, device.bandwidth)
        tried[label] = (error_of(predicted[~half & large], t[~half & large]), error_of(predicted[~half], t[~half]))
    # The x2 grid is five times the numbers: take it only where it is better by half a point.
    best = min(tried, key=lambda label: tried[label][0][0] + tried[label][1][0] + (1.0 if "x2" in label else 0.0))
    errors = {
        "held_out_percent_median_p90": {"M,N,K>=1024": tried[best][0], "M>=128,N,K>=256": tried[best][1]},
        "chosen": best,
        "others_M,N,K>=1024": {label: error[0] for label, error in tried.items() if label != best},
        "rows": len(t),
    }
    return replace(makers[best](shape, t), errors=errors)


def fit_grouped(time: Callable[[Column], Column], t: Column, start: tuple[float, float], least: float) -> Column:
    """(m_g, e_g): saturation in tokens per group and rate of a large grouped GEMM over that of a large dense one.

    ``time`` predicts the rows of ``t`` from the two; ``least`` bounds e_g from below.
    """
    return np.exp(
        fitted(lambda p: np.log(time(np.exp(p)) / t), np.log(start), np.log([1.0, least]), np.log([3e3, 1.0]))
    )
