"""Products: dense and grouped, fitted to tables of published rows, and at the rate of a library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.curves import Column, GemmCurve
from planner.lab.profile.fit_gemm import Device, fit_gemm, fit_grouped
from planner.lab.profile.fitting import error_of, short
from tools.hardware_fits.measured import RANDOM
from tools.tables import floats


def fit_table(
    rows: list[dict[str, str]], recipe: str, peak: float, memory: float, units: float, ampere: bool
) -> GemmCurve:
    """``fit_gemm`` of the rows that are no slivers, scored on a random half; with the wave factor on Ampere."""
    m, n, k, us = floats(rows, "m", "n", "k", "time_us")
    keep = (m >= 128) & (n >= 256) & (k >= 256)
    m, n, k, t = m[keep], n[keep], k[keep], us[keep] * 1e-6
    device = Device(peak=peak, bandwidth=memory, units=units, waves=ampere)
    curve = fit_gemm(np.array((m, n, k)), t, recipe, device, RANDOM.random(len(t)) < 0.5)
    print("   ", recipe, len(t), curve.errors)
    return curve


def at_library_rate(
    curve: GemmCurve, plain: GemmCurve, shapes: list[tuple[int, int, int]], seconds: float, clock: float, peak: float,
    memory: float,
) -> GemmCurve:  # fmt: skip
    """The curve without its grid, at the rate where ``shapes`` take ``seconds`` together; grouped products stay as they are."""
    constants = replace(curve, grid=None)
    alone = constants.without_quantisation(plain)
    m, n, k = (np.array(axis, float) for axis in zip(*shapes, strict=True))
    launches = alone.launch * len(shapes)
    ratio = float((alone.time(m, n, k, peak, memory) - alone.launch).sum() / (seconds * clock - launches))
    grouped = triple(value / ratio for value in curve.grouped_efficiency)
    return replace(
        constants, efficiency=curve.efficiency * ratio, grouped_efficiency=grouped,
        errors={"rate": "cuBLAS", "ratio_to_table": short(ratio, 3), "table": curve.errors},  # of the table's curve
    )  # fmt: skip


def fit_grouped_backward(rows: list[dict[str, str]], curve: GemmCurve, peak: float, memory: float) -> dict[str, Any]:
    """(m_g, e_g) of forward, dgrad and wgrad on B200, from grouped rows whose source runs at its own sustained clock.

    The rate is taken relative to the same source's largest grouped forward rows, so that the burst or sustained level
    of the source drops out.
    """
    names = {"grouped-fwd": 0, "grouped-bwd_grad_act": 1, "grouped-bwd_grad_w": 2}
    rows = [r for r in rows if r["source"] == "simumax" and r["layout"] in names]
    level = max(float(r["tflops"]) for r in rows) * 1e12 / (peak * curve.efficiency)
    result: dict[str, Any] = {"m": [], "e": [], "errors": {}}
    for layout, which in names.items():
        m, n, k, groups, us = floats([r for r in rows if r["layout"] == layout], "m", "n", "k", "groups", "time_us")
        shape = ((m, n, k), (m, k, n), (n, k, m))[which]

        def time(p: Column, w: int = which, s: Any = shape, m: Column = m, g: Column = groups) -> Column:
            trial = replace(curve, grouped_m0=(p[0],) * 3, grouped_efficiency=(min(p[1], 1.0),) * 3, grid=None)
            rows_, columns_, depth_ = s
            return trial.grouped_time(m, rows_, columns_, depth_, g, w, peak * level, memory)

        m_g, e_g = fit_grouped(time, us * 1e-6, (150.0, 0.9), 0.3)
        result["m"].append(short(m_g, 3))
        result["e"].append(short(min(e_g, 1.0), 3))
        result["errors"][layout] = error_of(time(np.array([m_g, e_g])), us * 1e-6)
    return result


def fit_grouped_forward(
    rows: list[dict[str, str]], gpu: str, curve: GemmCurve, peak: float, memory: float
) -> dict[str, Any]:
    """(m_g, e_g) of the forward from fused expert FFNs (gate and up in one GEMM, activation, down), balanced router."""
    dtype = {"bf16": "bfloat16"}.get("bf16" if not curve.quantise else "fp8_block", "fp8_block")
    rows = [r for r in rows if r["gpu"] == gpu and r["dtype"] == dtype and r["distribution"] == "balanced"]
    tokens, h, f, top_k, experts, ep, us = floats(rows, "tokens", "hidden", "ffn", "topk", "experts", "ep", "time_us")
    local = experts / ep
    per_expert = tokens * top_k / experts
    keep = (per_expert >= 64) & (local >= 1)
    per_expert, h, f, local, t = per_expert[keep], h[keep], f[keep], local[keep], us[keep] * 1e-6

    def time(p: Column) -> Column:
        trial = replace(curve, grouped_m0=(p[0],) * 3, grouped_efficiency=(min(p[1], 1.0),) * 3, grid=None)
        up = trial.grouped_time(per_expert, per_expert, 2.0 * f, h, local, 0, peak, memory)
        down = trial.grouped_time(per_expert, per_expert, h, f, local, 0, peak, memory)
        rows_in = per_expert * local
        return up + down + rows_in * (6.0 * f + 4.0 * h) / (0.7 * memory)  # activation, gather and weighted sum

    half = RANDOM.random(len(t)) < 0.5

    def fit(chosen: Any) -> Column:
        return fit_grouped(lambda p: time(p)[chosen], t[chosen], (100.0, 0.8), 0.2)

    error = error_of(time(fit(half))[~half], t[~half])
    m_g, e_g = fit(np.ones(len(t), bool))
    return {"m": short(m_g, 3), "e": short(min(e_g, 1.0), 3), "error": error, "rows": len(t)}


def triple(values: Iterable[float]) -> tuple[float, float, float]:
    """Forward, dgrad, wgrad, rounded."""
    forward, dgrad, wgrad = (short(value, 3) for value in values)
    return forward, dgrad, wgrad
