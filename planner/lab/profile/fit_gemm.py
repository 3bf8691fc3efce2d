"""Fits a ``GemmCurve`` to measured times of dense and grouped products, with errors on points that the fit did not see.

First the fits themselves, also of tables of thousands of published rows (tools/build_hardware_profiles.py); then curves of the
tens of points that a profile measures: constants always, the residual grid only where there are enough rows to hold some back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from planner.curves import Column, GemmCurve, Grid, Waves
from planner.lab.profile.definitions import ACCUMULATING, GEMM_PASSES, SCALED, rows_columns_depth
from planner.lab.profile.fitting import Base, columns, error_of, fitted, left_out, of, seconds, short
from planner.lab.profile.points import Measured
from planner.record import record

Shape: TypeAlias = Column  # (3, R): rows M, columns N and depth K of R products as the kernel runs them

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
FEW, MANY = 12, 60  # Points of one dtype: below FEW only the rate is fitted, from MANY on a residual grid is tried
RECIPE = {
    "bf16": "bf16", "fp16": "bf16", "fp32": "fp32", "tf32": "tf32", "fp8": "fp8", "fp8_row": "fp8", "mxfp8": "fp8",
    "fp8_block": "fp8_block", "nvfp4": "nvfp4",
}  # fmt: skip
"""Type that was measured: the curve that prices it."""


@record
class Device:
    """What a GEMM runs on, and how far its constants may go."""

    peak: float  # FLOP/s of the recipe
    bandwidth: float  # Bytes/s of the memory
    units: float  # Compute units that tiles are assigned to
    waves: bool = False  # Tiles and waves show in the times (Ampere and before)
    least_efficiency: float = 0.2
    longest_launch: float = 3e-5  # Seconds
    prior: float = 0.0
    """What an e-fold of m0, n0 or k0 away from the start weighs against a relative error: few scattered points say little about
    how a rate saturates, and would extrapolate wildly."""

    @classmethod
    def profiled(cls, base: Base, dtype: str, *, waves: bool) -> "Device":
        """Of the few points of a profile. A CPU's first touch of a tensor, and its dispatch, are longer than a GPU's launch. The
        prior: an e-fold counts as much as one point that is 10 percent off; on three sets of 15 to 60 points on a busy machine the
        errors at points left out were least with it (0, 0.01, 0.03 and 0.1 tried)."""
        return cls(
            peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units, waves=waves, least_efficiency=0.02,
            longest_launch=3e-4, prior=0.1,
        )  # fmt: skip

    def time(self, curve: GemmCurve, shape: Shape) -> Column:
        """Seconds by a curve."""
        m, n, k = shape
        return curve.time(m, n, k, self.peak, self.bandwidth)


def gemm_from(parameters: Column, recipe: str, device: Device) -> GemmCurve:
    """The curve of a parameter vector (logarithms)."""
    name, operand, quantise = OPERAND[recipe]
    e, m0, n0, k0, u, t0 = (float(value) for value in np.exp(parameters[:6]))
    wave = None
    if device.waves:
        c128, c64 = 1.0 + np.exp(parameters[6:8])
        cost = [1.0, 1.0, c128, c128, c128, 0.5 * (c128 + c64), 0.5 * (c128 + c64), c64]
        wave = Waves(tiles=np.array(TILES, float), tile_cost=np.array(cost), compute_units=device.units)
    return GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=e, m0=m0, n0=n0, k0=k0, memory_efficiency=u,
        launch=t0, waves=wave, quantise_traffic=float(np.exp(parameters[6])) if quantise else 0.0,
    )  # fmt: skip


def fit_constants(shape: Shape, t: Column, recipe: str, device: Device) -> GemmCurve:
    """Six constants by robust least squares on log time; eight with waves, seven where the activation is quantised.

    Both n0 and the quantisation grow with M K: tiles lose no more columns than in bf16, so n0 is bounded there.
    """

    def residual(parameters: Column) -> Column:
        curve = gemm_from(parameters, recipe, device)
        error = np.log(device.time(curve, shape) / t) + 3.0 * max(curve.efficiency - 1.0, 0.0)
        return np.append(error, device.prior * (parameters[1:4] - start[1:4])) if device.prior else error

    waves = device.waves
    start = np.log([0.8, 60, 60, 120, 0.6, 4e-6] + ([0.05, 0.2] if waves else []))
    low = np.log([device.least_efficiency, 1e-2, 1e-2, 1e-2, 0.1, 1e-6] + ([1e-4, 1e-3] if waves else []))
    high = np.log([1.0, 4e3, 6e3, 4e3, 1.0, device.longest_launch] + ([1.0, 2.0] if waves else []))
    if OPERAND[recipe][2]:
        start, low, high = (np.append(v, np.log(q)) for v, q in ((start, 6.0), (low, 0.5), (high, 40.0)))
        high[2] = np.log(100.0)
    return gemm_from(fitted(residual, start, low, high, scale=0.08, max_nfev=150).x, recipe, device)


def fit_grid(curve: GemmCurve, shape: Shape, t: Column, device: Device, nodes: str) -> Grid:
    """log(measured / model) at the nodes by ridge regression of the trilinear form (reweighted twice for outliers)."""
    axis_m, axis_nk = (np.array(values, float) for values in GRIDS[nodes])
    axes = (axis_m, axis_nk, axis_nk)
    work = device.time(replace(curve, quantise=False), shape) - curve.launch
    other = curve.launch + (curve.quantise_traffic * shape[0] * shape[2] / device.bandwidth if curve.quantise else 0.0)
    target = np.log(np.maximum(t - other, 0.3 * work) / work)
    share = (work / (other + work)) ** 2  # what launch and quantisation hide says little about the rate

    def along(axis: Column, x: Column) -> Column:
        """What each row takes of each node of one axis."""
        (below, fraction), row = Grid.weights(axis, x), np.arange(len(x))
        weights = np.zeros((len(x), len(axis)))
        weights[row, below], weights[row, below + 1] = 1.0 - fraction, fraction
        return weights

    parts = [along(axis, x) for axis, x in zip(axes, shape, strict=True)]
    matrix = np.einsum("ri,rj,rk->rijk", *parts).reshape(len(t), -1)
    trust: Any = share
    solution: Column = np.zeros(matrix.shape[1])
    for _ in range(3):
        normal = matrix.T @ (matrix * trust[:, None]) + 0.3 * np.eye(matrix.shape[1])
        solution = np.asarray(np.linalg.solve(normal, matrix.T @ (trust * target)), float)
        trust = share / np.maximum(1.0, np.abs(target - matrix @ solution) / 0.08)
    percent = np.clip(np.round(100.0 * np.exp(solution)), 60, 160)
    return Grid(m=axes[0], n=axes[1], k=axes[2], log_factor=np.log(percent / 100.0).reshape([len(one) for one in axes]))


def fit_form(shape: Shape, t: Column, recipe: str, device: Device, nodes: str) -> GemmCurve:
    """Constants, times a grid of these nodes where some are named."""
    curve = fit_constants(shape, t, recipe, device)
    return replace(curve, grid=fit_grid(curve, shape, t, device, nodes)) if nodes else curve


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
    large = np.all(shape >= LARGE, axis=0)
    tried: dict[str, tuple[list[float], list[float]]] = {}
    forms = {("waves" if device.waves else "constants") + (f" x grid {one}" if one else ""): one for one in ("", *GRIDS)}
    for label, nodes in forms.items():
        predicted = device.time(fit_form(shape[:, half], t[half], recipe, device, nodes), shape)
        tried[label] = (error_of(predicted[~half & large], t[~half & large]), error_of(predicted[~half], t[~half]))
    # The x2 grid is five times the numbers: take it only where it is better by half a point.
    best = min(tried, key=lambda label: tried[label][0][0] + tried[label][1][0] + (1.0 if "x2" in label else 0.0))
    errors = {
        "held_out_percent_median_p90": {"M,N,K>=1024": tried[best][0], "M>=128,N,K>=256": tried[best][1]},
        "chosen": best,
        "others_M,N,K>=1024": {label: error[0] for label, error in tried.items() if label != best},
        "rows": len(t),
    }
    return replace(fit_form(shape, t, recipe, device, forms[best]), errors=errors)


def fit_grouped(time: Callable[[Column], Column], t: Column, start: tuple[float, float], least: float) -> Column:
    """(m_g, e_g): saturation in tokens per group and rate of a large grouped GEMM over that of a large dense one.

    ``time`` predicts the rows of ``t`` from the two; ``least`` bounds e_g from below.
    """
    low, high = np.log([1.0, least]), np.log([3e3, 1.0])
    return np.exp(fitted(lambda p: np.log(time(np.exp(p)) / t), np.log(start), low, high).x)


# ------------------------------------------------------------------------------------------------ of a profile's points


def gemm_curves(
    measured: Sequence[Measured], base: Base
) -> tuple[dict[str, GemmCurve], dict[str, Any], dict[str, Any]]:
    """Curves by recipe, their residuals, and further keys (precise_accumulation, block_scaling)."""
    curves: dict[str, GemmCurve] = dict(base.guess.gemm) if base.guess else {}
    residuals: dict[str, Any] = {}
    further: dict[str, Any] = {}
    every = of(measured, "gemm")
    for dtype in sorted({row.point["dtype"] for row in every}):
        rows = [row for row in of(every, "gemm", dtype=dtype) if row.point["pass"] != ACCUMULATING]
        forward, recipe = of(rows, "gemm", pass_="forward"), RECIPE[dtype]
        if recipe != dtype and (f"gemm {recipe}" in residuals or recipe == "fp8"):  # say how far the price as another holds
            alike = forward if recipe == "fp8" else rows
            if alike and f"gemm {recipe}" in residuals:
                priced = _predicted(curves[recipe], alike, base, recipe)
                residuals[f"gemm {dtype} on the {recipe} curve"] = error_of(priced, seconds(alike))
                if dtype == "mxfp8":
                    further["block_scaling"] = {dtype: short(float(np.median(seconds(alike) / priced)), 3)}
            continue
        fitted_on = forward if dtype == "fp8" and forward else rows
        curve = curves[recipe] = _gemm_curve(fitted_on, dtype, base)
        residuals[f"gemm {dtype}"] = curve.errors
        if len(fitted_on) < len(rows):
            rest = [row for row in rows if row.point["pass"] != "forward"]
            ratio = float(np.median(seconds(rest) / _predicted(curve, rest, base, dtype)))
            further["precise_accumulation"] = {"fp8": short(max(ratio, 1.0), 3)}
    return _grouped(_accumulating(curves, measured, base), measured, base, residuals), residuals, further


def _shape(rows: Sequence[Measured]) -> Shape:
    return np.array([rows_columns_depth(row.point) for row in rows], float).T


def _predicted(curve: GemmCurve, rows: Sequence[Measured], base: Base, dtype: str) -> Column:
    m, n, k = _shape(rows)
    return curve.time(m, n, k, base.peak(dtype), base.bandwidth)


def _gemm_curve(rows: Sequence[Measured], dtype: str, base: Base) -> GemmCurve:
    """Constants, or constants x grid where that is better on points left out; the rate alone from few points."""
    recipe, many = f"{dtype}_plain" if dtype in SCALED else RECIPE[dtype], len(rows) >= MANY
    waves = many and bool(base.guess and "bf16" in base.guess.gemm and base.guess.gemm["bf16"].waves is not None)
    device, shape, t = Device.profiled(base, dtype, waves=waves), _shape(rows), seconds(rows)
    if len(rows) < FEW:
        return _rate_only(rows, recipe, dtype, base)

    def make(keep: Any, nodes: str) -> GemmCurve:
        return bounded(fit_form(shape[:, keep], t[keep], recipe, device, nodes), device)

    def held_out(nodes: str) -> list[float]:
        return left_out(lambda keep: make(keep, nodes), lambda curve, out: device.time(curve, shape[:, out]), t)

    tried = {nodes: held_out(nodes) for nodes in (("", "x4") if many else ("",))}
    best = min(tried, key=lambda nodes: tried[nodes][0])
    curve = make(slice(None), best)
    model, passes = device.time(curve, shape), np.array([row.point["pass"] for row in rows])
    by_pass = {name: passes == name for name in GEMM_PASSES if name in passes}
    errors = {
        "held_out_percent_median_p90": {"all": tried[best]}, "chosen": f"constants x grid {best}" if best else "constants",
        "in_sample": error_of(model, t), "rows": len(t),
        "in_sample_by_pass": {name: error_of(model[keep], t[keep]) for name, keep in by_pass.items()},
    }  # fmt: skip
    return replace(curve, errors=errors)


def _rate_only(rows: Sequence[Measured], recipe: str, dtype: str, base: Base) -> GemmCurve:
    """The guess's constants, or a roofline, with the efficiency that puts the median point right."""
    name, operand, quantise = OPERAND[recipe]
    start = (base.guess.gemm.get(RECIPE[dtype]) if base.guess else None) or GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=0.5, m0=0.0, n0=0.0, k0=0.0,
        memory_efficiency=1.0, launch=0.0,
    )  # fmt: skip
    start = replace(start, quantise=quantise, quantise_traffic=0.0) if dtype in SCALED else start
    efficiency, t = start.efficiency, seconds(rows)
    for _ in range(4):  # launch and memory parts do not scale with it
        ratio = float(np.median(_predicted(replace(start, efficiency=efficiency), rows, base, dtype) / t))
        efficiency = float(np.clip(efficiency * ratio, 1e-3, 1.0))
    curve = bounded(replace(start, efficiency=efficiency), Device.profiled(base, dtype, waves=False))
    in_sample = error_of(_predicted(curve, rows, base, dtype), t)
    chosen = "rate alone: too few points for a shape"
    return replace(curve, errors={"in_sample": in_sample, "rows": len(rows), "chosen": chosen})


def _accumulating(curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base) -> dict[str, GemmCurve]:
    """The part of the traffic of an fp32 weight gradient that its product does not hide: (t - t_plain) W / (6 n k).

    Where torch has no such kernel (a CPU) it is added by an operation of its own, and the part is 0.
    """

    def by_shape(pass_: str) -> dict[Any, float]:
        rows = of(measured, "gemm", pass_=pass_)
        return {tuple(row.point[name] for name in ("dtype", "m", "n", "k")): row.median for row in rows}

    plain, summed = by_shape("wgrad"), by_shape(ACCUMULATING)
    beyond = {shape: max(t - plain[shape], 0.0) for shape, t in summed.items() if shape in plain}
    if not beyond and base.guess:
        return curves
    parts = [t * base.bandwidth / (6.0 * float(n) * float(k)) for (_, _, n, k), t in beyond.items()]
    accumulate = short(median(parts), 3) if parts else 0.0
    return {name: replace(curve, accumulate=accumulate) for name, curve in curves.items()}


def _grouped(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base, residuals: dict[str, Any]
) -> dict[str, GemmCurve]:
    """Saturation and rate of grouped products by pass, where three points or more were measured.

    Weight gradients that add to an fp32 sum, by the faster way of each shape, come before plain ones: they are what the
    price of a step asks for. A plain one adds nothing to the bytes of its gradient, the other fp32 read and written.
    """
    found = dict(curves)
    for dtype in sorted({row.point["dtype"] for row in of(measured, "grouped_gemm")}):
        if RECIPE[dtype] not in found:
            continue
        curve = found[RECIPE[dtype]]
        m_g, e_g = list(curve.grouped_m0), list(curve.grouped_efficiency)
        faster: dict[Any, Measured] = {}
        for row in sorted(of(measured, "grouped_gemm", dtype=dtype, pass_=ACCUMULATING), key=lambda row: -row.median):
            faster[tuple(row.point[name] for name in ("tokens", "n", "k", "groups"))] = row
        for which, pass_ in enumerate(GEMM_PASSES):
            summed = pass_ == "wgrad" and len(faster) >= 3
            rows = list(faster.values()) if summed else of(measured, "grouped_gemm", dtype=dtype, pass_=pass_)
            if len(rows) < 3:
                continue
            predict = _grouped_time(curve, rows, which, (base.peak(dtype), base.bandwidth, 4.0 if summed else 1.0))
            best = fit_grouped(predict, seconds(rows), (100.0, 0.8), 0.05)
            m_g[which], e_g[which] = short(best[0], 3), short(min(best[1], 1.0), 3)
            residuals[f"grouped {dtype} {rows[0].point['pass']}"] = {
                "in_sample": error_of(predict(best), seconds(rows)), "rows": len(rows),
            }  # fmt: skip
        m0, efficiency = (m_g[0], m_g[1], m_g[2]), (e_g[0], e_g[1], e_g[2])
        found[RECIPE[dtype]] = replace(curve, grouped_m0=m0, grouped_efficiency=efficiency)
    return found


def _grouped_time(curve: GemmCurve, rows: Sequence[Measured], which: int, rates: tuple[float, float, float]) -> Any:
    """What (m_g, e_g) predict for the rows of a pass; ``rates`` are peak, bandwidth and bytes of a gradient."""
    tokens, n, k, groups = columns(rows, "tokens", "n", "k", "groups")
    shape = ((tokens, n, k), (tokens, k, n), (n, k, tokens))[which]

    def time(p: Column) -> Column:
        trial = replace(curve, grouped_m0=(p[0],) * 3, grouped_efficiency=(p[1],) * 3, grid=None)
        return trial.grouped_time(tokens, *shape, groups, which, *rates)

    return time
