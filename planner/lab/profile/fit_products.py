"""Curves of dense and grouped matrix products from measured points, with errors at points that were held back."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from planner.curves import Column, GemmCurve
from planner.lab.profile import fit_gemm
from planner.lab.profile.definitions import ACCUMULATING, GEMM_PASSES, SCALED, rows_columns_depth
from planner.lab.profile.fitting import Base, columns, error_of, left_out, of, seconds, short
from planner.lab.profile.points import Measured

FEW, MANY = 12, 60  # Points of one dtype: below FEW only the rate is fitted, from MANY on a residual grid is tried
LIMITS = fit_gemm.Limits(least_efficiency=0.02, longest_launch=3e-4, prior=0.1)
"""A CPU's first touch of a tensor, and its dispatch, are longer than a GPU's launch. The prior: an e-fold of a saturation constant
away from its usual value counts as much as one point that is 10 percent off; on three sets of 15 to 60 points on a busy machine the
errors at points left out were least with it (0, 0.01, 0.03 and 0.1 tried)."""
RECIPE = {
    "bf16": "bf16", "fp16": "bf16", "fp32": "fp32", "tf32": "tf32", "fp8": "fp8", "fp8_row": "fp8", "mxfp8": "fp8",
    "fp8_block": "fp8_block", "nvfp4": "nvfp4",
}  # fmt: skip
"""Type that was measured: the curve that prices it."""


def gemm_curves(
    measured: Sequence[Measured], base: Base
) -> tuple[dict[str, GemmCurve], dict[str, Any], dict[str, Any]]:
    """Curves by recipe, their residuals, and further keys (precise_accumulation, block_scaling)."""
    curves: dict[str, GemmCurve] = dict(base.guess.gemm) if base.guess else {}
    residuals: dict[str, Any] = {}
    further: dict[str, Any] = {}
    every = of(measured, "gemm")
    for dtype in sorted({row.point.text("dtype") for row in every}):
        rows = [row for row in of(every, "gemm", dtype=dtype) if row.point["pass"] != ACCUMULATING]
        forward, recipe = of(rows, "gemm", pass_="forward"), RECIPE[dtype]
        priced_as_other = recipe != dtype and (f"gemm {recipe}" in residuals or recipe == "fp8")
        if priced_as_other:  # say how far the price as another holds
            alike = forward if recipe == "fp8" else rows
            if alike and f"gemm {recipe}" in residuals:
                priced = _predicted(curves[recipe], alike, base, recipe)
                residuals[f"gemm {dtype} on the {recipe} curve"] = error_of(priced, seconds(alike))
                if dtype == "mxfp8":
                    further["block_scaling"] = {dtype: short(float(np.median(seconds(alike) / priced)), 3)}
            continue
        fitted_on = forward if dtype == "fp8" and forward else rows
        curve = _gemm_curve(fitted_on, dtype, base)
        if len(fitted_on) < len(rows):
            rest = [row for row in rows if row.point["pass"] != "forward"]
            ratio = float(np.median(seconds(rest) / _predicted(curve, rest, base, dtype)))
            further["precise_accumulation"] = {"fp8": short(max(ratio, 1.0), 3)}
        curves[recipe] = curve
        residuals[f"gemm {dtype}"] = curve.errors
    return _grouped(_accumulating(curves, measured, base), measured, base, residuals), residuals, further


def _shape(rows: Sequence[Measured]) -> fit_gemm.Shape:
    m, n, k = (np.array(axis, float) for axis in zip(*[rows_columns_depth(row.point) for row in rows], strict=True))
    return m, n, k


def _predicted(curve: GemmCurve, rows: Sequence[Measured], base: Base, dtype: str) -> Column:
    return curve.time(*_shape(rows), base.peak(dtype), base.bandwidth)


def _gemm_curve(rows: Sequence[Measured], dtype: str, base: Base) -> GemmCurve:
    """Constants, or constants x grid where that is better on points left out; the rate alone from few points."""
    recipe = f"{dtype}_plain" if dtype in SCALED else RECIPE[dtype]
    many = len(rows) >= MANY
    waves = many and bool(base.guess and "bf16" in base.guess.gemm and base.guess.gemm["bf16"].waves is not None)
    device = fit_gemm.Device(peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units, waves=waves)
    if len(rows) < FEW:
        return _rate_only(rows, recipe, dtype, base)
    shape, t = _shape(rows), seconds(rows)

    def part(keep: Any) -> fit_gemm.Shape:
        return shape[0][keep], shape[1][keep], shape[2][keep]

    def make(keep: Any, nodes: str = "") -> GemmCurve:
        curve = fit_gemm.fit_constants(part(keep), t[keep], recipe, device, LIMITS)
        if not nodes:
            return curve
        grid = fit_gemm.fit_grid(curve, part(keep), t[keep], device, nodes)
        return fit_gemm.bounded(replace(curve, grid=grid), device)

    tried = {}
    for nodes in ("", "x4") if many else ("",):

        def fit(keep: Any, nodes: str = nodes) -> Any:
            curve = make(keep, nodes)
            return lambda out: curve.time(*part(out), device.peak, device.bandwidth)

        tried[nodes] = left_out(fit, t)
    best = min(tried, key=lambda nodes: tried[nodes][0])
    curve = make(np.ones(len(t), bool), best)
    model = curve.time(*shape, device.peak, device.bandwidth)
    by_pass = {
        name: error_of(model[keep], t[keep])
        for name in GEMM_PASSES
        if np.any(keep := np.array([row.point["pass"] == name for row in rows]))
    }
    errors = {
        "held_out_percent_median_p90": {"all": tried[best]}, "chosen": f"constants x grid {best}" if best else "constants",
        "in_sample": error_of(model, t), "in_sample_by_pass": by_pass, "rows": len(t),
    }  # fmt: skip
    return replace(curve, errors=errors)


def _rate_only(rows: Sequence[Measured], recipe: str, dtype: str, base: Base) -> GemmCurve:
    """The guess's constants, or a roofline, with the efficiency that puts the median point right."""
    name, operand, quantise = fit_gemm.OPERAND[recipe]
    start = (base.guess.gemm.get(RECIPE[dtype]) if base.guess else None) or GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=0.5, m0=0.0, n0=0.0, k0=0.0,
        memory_efficiency=1.0, launch=0.0,
    )  # fmt: skip
    start = replace(start, quantise=quantise, quantise_traffic=0.0) if dtype in SCALED else start
    efficiency, t = start.efficiency, seconds(rows)
    for _ in range(4):  # launch and memory parts do not scale with it
        ratio = float(np.median(_predicted(replace(start, efficiency=efficiency), rows, base, dtype) / t))
        efficiency = float(np.clip(efficiency * ratio, 1e-3, 1.0))
    device = fit_gemm.Device(peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units)
    curve = fit_gemm.bounded(replace(start, efficiency=efficiency), device)
    in_sample = error_of(_predicted(curve, rows, base, dtype), t)
    chosen = "rate alone: too few points for a shape"
    return replace(curve, errors={"in_sample": in_sample, "rows": len(rows), "chosen": chosen})


def _key(row: Measured, *names: str) -> tuple[Any, ...]:
    return tuple(row.point[name] for name in names)


def _accumulating(curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base) -> dict[str, GemmCurve]:
    """The part of the traffic of an fp32 weight gradient that its product does not hide: (t - t_plain) W / (6 n k).

    Where torch has no such kernel (a CPU) it is added by an operation of its own, and the part is 0.
    """
    shape = ("dtype", "m", "n", "k")
    plain = {_key(row, *shape): row for row in of(measured, "gemm", pass_="wgrad")}
    summed = [row for row in of(measured, "gemm", pass_=ACCUMULATING) if _key(row, *shape) in plain]
    if not summed and base.guess:
        return curves
    parts = [
        max(row.median - plain[_key(row, *shape)].median, 0.0) * base.bandwidth
        / (6.0 * row.point.number("n") * row.point.number("k"))
        for row in summed
    ]  # fmt: skip
    part = short(median(parts), 3) if parts else 0.0
    return {name: replace(curve, accumulate=part) for name, curve in curves.items()}


def _faster(rows: Sequence[Measured]) -> list[Measured]:
    """Of weight gradients that add to an fp32 sum the faster way of every shape."""
    best: dict[tuple[Any, ...], Measured] = {}
    for row in rows:
        key = _key(row, "tokens", "n", "k", "groups")
        if key not in best or row.median < best[key].median:
            best[key] = row
    return list(best.values())


def _grouped(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base, residuals: dict[str, Any]
) -> dict[str, GemmCurve]:
    """Saturation and rate of grouped products by pass, where three points or more were measured.

    Weight gradients that add to an fp32 sum, by the faster way of each shape, come before plain ones: they are what the
    price of a step asks for. A plain one adds nothing to the bytes of its gradient, the other fp32 read and written.
    """
    found = dict(curves)
    for dtype in sorted({row.point.text("dtype") for row in of(measured, "grouped_gemm")}):
        if RECIPE[dtype] not in found:
            continue
        curve = found[RECIPE[dtype]]
        m_g, e_g = list(curve.grouped_m0), list(curve.grouped_efficiency)
        for which, pass_ in enumerate(GEMM_PASSES):
            rows, gradient_bytes = of(measured, "grouped_gemm", dtype=dtype, pass_=pass_), 1.0
            summed = _faster(of(measured, "grouped_gemm", dtype=dtype, pass_=ACCUMULATING))
            if pass_ == "wgrad" and len(summed) >= 3:
                rows, gradient_bytes = summed, 4.0
            if len(rows) < 3:
                continue
            predict = _grouped_time(curve, rows, which, (base.peak(dtype), base.bandwidth, gradient_bytes))
            best = fit_gemm.fit_grouped(predict, seconds(rows), (100.0, 0.8), 0.05)
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
