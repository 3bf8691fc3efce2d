"""Curves of dense and grouped matrix products from measured points, with errors at points that were held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from planner.curves import Column, GemmCurve
from planner.lab.profile import definitions, fit_gemm
from planner.lab.profile.definitions import number, rows_columns_depth, text
from planner.lab.profile.fit_base import Base, seconds
from planner.lab.profile.fitting import error_of, left_out, short
from planner.lab.profile.points import Measured

FEW, MANY = 12, 60
"""Points of one dtype: below FEW only the rate is fitted, from MANY on a residual grid is tried."""
LEAST_EFFICIENCY = 0.02
LONGEST_LAUNCH = 3e-4
"""A CPU's first touch of a tensor, and its dispatch, are longer than a GPU's launch."""
PRIOR = 0.1
"""An e-fold of a saturation constant away from its usual value counts as much as one point that is 10 percent off: on three sets
of 15 to 60 points on a busy machine the errors at points left out were least with it (0, 0.01, 0.03 and 0.1 tried)."""
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
    for dtype in sorted({text(row.point, "dtype") for row in measured if row.point.family == "gemm"}):
        rows = [
            row for row in measured
            if row.point.family == "gemm" and row.point["dtype"] == dtype and row.point["pass"] != definitions.ACCUMULATING
        ]  # fmt: skip
        recipe = RECIPE[dtype]
        if recipe != dtype and (
            f"gemm {recipe}" in residuals or recipe == "fp8"
        ):  # say how far the price as another holds
            alike = [row for row in rows if recipe != "fp8" or row.point["pass"] == "forward"]
            if alike and f"gemm {recipe}" in residuals:
                priced = _predicted(curves[recipe], alike, base, recipe)
                residuals[f"gemm {dtype} on the {recipe} curve"] = error_of(priced, seconds(alike))
                if dtype == "mxfp8":
                    further["block_scaling"] = {dtype: short(float(np.median(seconds(alike) / priced)), 3)}
            continue
        fitted_on = [row for row in rows if row.point["pass"] == "forward"] if dtype == "fp8" else rows
        curve = _gemm_curve(fitted_on or rows, dtype, base)
        if dtype == "fp8" and fitted_on and len(fitted_on) < len(rows):
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
    recipe = f"{dtype}_plain" if dtype in definitions.SCALED else RECIPE[dtype]
    waves = bool(base.guess and "bf16" in base.guess.gemm and base.guess.gemm["bf16"].waves is not None)
    device = fit_gemm.Device(
        peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units, waves=waves and len(rows) >= MANY
    )
    shape, t = _shape(rows), seconds(rows)
    if len(rows) < FEW:
        return _rate_only(rows, recipe, dtype, base)

    def make(keep: Any, nodes: str = "") -> GemmCurve:
        part = tuple(axis[keep] for axis in shape)
        m, n, k = part
        curve = fit_gemm.fit_constants((m, n, k), t[keep], recipe, device, LEAST_EFFICIENCY, LONGEST_LAUNCH, PRIOR)
        if not nodes:
            return curve
        return fit_gemm.bounded(
            replace(curve, grid=fit_gemm.fit_grid(curve, (m, n, k), t[keep], device, nodes)), device
        )

    tried = {}
    for nodes in ("", "x4") if len(rows) >= MANY else ("",):

        def fit(keep: Any, nodes: str = nodes) -> Any:
            curve = make(keep, nodes)
            return lambda out: curve.time(shape[0][out], shape[1][out], shape[2][out], device.peak, device.bandwidth)

        tried[nodes] = left_out(fit, t)
    best = min(tried, key=lambda nodes: tried[nodes][0])
    curve = make(np.ones(len(t), bool), best)
    model = curve.time(*shape, device.peak, device.bandwidth)
    by_pass = {
        name: error_of(model[keep], t[keep])
        for name in definitions.GEMM_PASSES
        if np.any(keep := np.array([row.point["pass"] == name for row in rows]))
    }
    errors = {
        "held_out_percent_median_p90": {"all": tried[best]}, "chosen": f"constants x grid {best}" if best else "constants",
        "in_sample": error_of(model, t), "in_sample_by_pass": by_pass, "rows": len(t),
    }  # fmt: skip
    return replace(curve, errors=errors)


def _rate_only(rows: Sequence[Measured], recipe: str, dtype: str, base: Base) -> GemmCurve:
    """The guess's constants, or a roofline, with the efficiency that puts the median point right."""
    guess = base.guess.gemm.get(RECIPE[dtype]) if base.guess else None
    name, operand, quantise = fit_gemm.OPERAND[recipe]
    start = guess or GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=0.5, m0=0.0, n0=0.0, k0=0.0,
        memory_efficiency=1.0, launch=0.0,
    )  # fmt: skip
    start = replace(start, quantise=quantise, quantise_traffic=0.0) if dtype in definitions.SCALED else start
    efficiency = start.efficiency
    for _ in range(4):  # launch and memory parts do not scale with it
        trial = replace(start, efficiency=efficiency)
        ratio = float(np.median(_predicted(trial, rows, base, dtype) / seconds(rows)))
        efficiency = float(np.clip(efficiency * ratio, 1e-3, 1.0))
    device = fit_gemm.Device(peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units)
    curve = fit_gemm.bounded(replace(start, efficiency=efficiency), device)
    errors = {
        "in_sample": error_of(_predicted(curve, rows, base, dtype), seconds(rows)), "rows": len(rows),
        "chosen": "rate alone: too few points for a shape",
    }  # fmt: skip
    return replace(curve, errors=errors)


def _accumulating(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base
) -> dict[str, GemmCurve]:  # fmt: skip
    """The part of the traffic of an fp32 weight gradient that its product does not hide: (t - t_plain) W / (6 n k).

    Where torch has no such kernel (a CPU) it is added by an operation of its own, and the part is 0.
    """
    pairs = _pairs(measured)
    if not pairs:
        return curves if base.guess else {name: replace(curve, accumulate=0.0) for name, curve in curves.items()}
    parts = [
        max(with_sum.median - plain.median, 0.0) * base.bandwidth
        / (6.0 * number(plain.point, "n") * number(plain.point, "k"))
        for plain, with_sum in pairs
    ]  # fmt: skip
    return {name: replace(curve, accumulate=short(median(parts), 3)) for name, curve in curves.items()}


def _pairs(measured: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """wgrad without and with accumulation, of equal shape."""

    def key(row: Measured) -> tuple[Any, ...]:
        return tuple(row.point[name] for name in ("dtype", "m", "n", "k"))

    plain = {key(row): row for row in measured if row.point.family == "gemm" and row.point["pass"] == "wgrad"}
    summed = [row for row in measured if row.point.family == "gemm" and row.point["pass"] == definitions.ACCUMULATING]
    return [(plain[key(row)], row) for row in summed if key(row) in plain]


def _faster(rows: Sequence[Measured]) -> list[Measured]:
    """Of weight gradients that add to an fp32 sum the faster way of every shape."""
    best: dict[tuple[Any, ...], Measured] = {}
    for row in rows:
        if row.point["pass"] == definitions.ACCUMULATING:
            key = tuple(row.point[name] for name in ("tokens", "n", "k", "groups"))
            if key not in best or row.median < best[key].median:
                best[key] = row
    return list(best.values())


def _grouped(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base, residuals: dict[str, Any]
) -> dict[str, GemmCurve]:  # fmt: skip
    """Saturation and rate of grouped products by pass, where three points or more were measured.

    Weight gradients that add to an fp32 sum, by the faster way of each shape, come before plain ones: they are what the
    price of a step asks for. ``plain`` is what a gradient adds to its bytes then: nothing, or fp32 read and written.
    """
    found = dict(curves)
    every = [row for row in measured if row.point.family == "grouped_gemm"]
    for dtype in sorted({text(row.point, "dtype") for row in every}):
        if RECIPE[dtype] not in found:
            continue
        curve = found[RECIPE[dtype]]
        m_g, e_g = list(curve.grouped_m0), list(curve.grouped_efficiency)
        for which, pass_ in enumerate(definitions.GEMM_PASSES):
            rows = [row for row in every if row.point["dtype"] == dtype and row.point["pass"] == pass_]
            summed = _faster([row for row in every if row.point["dtype"] == dtype]) if pass_ == "wgrad" else []
            adds = len(summed) >= 3
            rows, gradient_bytes = (summed, 4.0) if adds else (rows, 1.0)
            if len(rows) < 3:
                continue
            tokens, n, k, groups = (
                np.array([number(row.point, name) for row in rows]) for name in ("tokens", "n", "k", "groups")
            )
            shape = ((tokens, n, k), (tokens, k, n), (n, k, tokens))[which]

            def time(
                p: Column, w: int = which, s: Any = shape, t: Column = tokens, g: Column = groups,
                e: float = gradient_bytes,
            ) -> Column:  # fmt: skip
                trial = replace(found[RECIPE[dtype]], grouped_m0=(p[0],) * 3, grouped_efficiency=(p[1],) * 3, grid=None)  # noqa: B023
                rows_, columns_, depth_ = s
                return trial.grouped_time(t, rows_, columns_, depth_, g, w, base.peak(dtype), base.bandwidth, e)  # noqa: B023

            best = fit_gemm.fit_grouped(time, seconds(rows), (100.0, 0.8), 0.05)
            m_g[which], e_g[which] = short(best[0], 3), short(min(best[1], 1.0), 3)
            residuals[f"grouped {dtype} {rows[0].point['pass']}"] = {
                "in_sample": error_of(time(best), seconds(rows)),
                "rows": len(rows),
            }
        found[RECIPE[dtype]] = replace(
            curve, grouped_m0=(m_g[0], m_g[1], m_g[2]), grouped_efficiency=(e_g[0], e_g[1], e_g[2])
        )
    return found
