"""Fits the constants of an ``AttentionCurve`` to measured times: one head size, then all of a type and pass."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from planner.curves import AttentionCurve, Column
from planner.lab.profile import definitions
from planner.lab.profile.fitting import Base, columns, error_of, fitted, left_out, of, seconds, short
from planner.lab.profile.points import Measured
from planner.record import record

TABLE = ((1e-6, 0.05, 1.0, 0.02), (6e-5, 1.0, 8e3, 4.0))
"""Bounds of (t0 seconds, efficiency, s0 keys, c) in a large table."""
REFINED = ((1e-6, 0.05, 1.0, 0.02), (1e-4, 1.0, 8e3, 4.0))  # Where rows of a kernel refine the constants of another
WIDE = ((1e-6, 5e-3, 1.0, 1e-3), (2e-3, 1.0, 8e3, 4.0))  # For the few points of a profile, on any device
START = (8e-6, 0.5, 500.0, 0.5)


@record
class Rows:
    """Measured times of one kernel, pass and head size."""

    flop: Column  # FlashAttention convention: causal halved, backward 2.5 x
    span: Column  # Keys that a query sees on average
    tiles: Column  # batch x heads x ceil(s / 128)
    seconds: Column

    def take(self, keep: Any) -> "Rows":
        """Some of the rows."""
        return Rows(**{name: column[keep] for name, column in vars(self).items()})


def attention_model(p: Iterable[float], rows: Rows, peak: float, units: float) -> Column:
    """``AttentionCurve.time`` for one head size, from (t0, e, s0, c)."""
    t0, e, s0, c = (np.array([value]) for value in p)
    curve = AttentionCurve(head_dims=np.array([128.0]), launch=t0, efficiency=e, s0=s0, c=c)
    return curve.time(rows.flop, rows.span, rows.tiles, np.full_like(rows.flop, 128.0), peak, units)


def _off(p: Iterable[float], rows: Rows, peak: float, units: float) -> Column:
    """Logarithm of predicted over measured."""
    return np.asarray(np.log(attention_model(p, rows, peak, units) / rows.seconds), float)


def fit_all(rows: Rows, peak: float, units: float, bounds: Any = TABLE, start: Any = START) -> Column:
    """(t0, e, s0, c) of one head size from many rows."""
    low, high = np.log(bounds)
    start = np.clip(np.log(start), low + 1e-6, high - 1e-6)
    return np.exp(fitted(lambda p: _off(np.exp(p), rows, peak, units), start, low, high, max_nfev=100).x)


def refine_rate(rows: Rows, base: Column, peak: float, units: float) -> Column:
    """Efficiency and s0 from few rows; launch and c stay those of ``base``. Fewer than three lengths show no slope."""
    if len(set(rows.span.tolist())) < 3:
        ratio = attention_model(base, rows, peak, units) / rows.seconds
        return np.asarray(base * np.array([1.0, float(np.median(ratio)), 1.0, 1.0]))
    found = fitted(
        lambda p: _off((base[0], *np.exp(p), base[3]), rows, peak, units),
        np.log([0.5, 500.0]), np.log([0.05, 1.0]), np.log([1.0, 2e4]),
    ).x  # fmt: skip
    return np.array([base[0], *np.exp(found), base[3]])


def attention_entries(
    measured: Sequence[Measured], base: Base
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Entries of the file, residuals, and the ``kernels`` that are slower than the best."""
    curves = dict(base.guess.attention) if base.guess else {}
    residuals: dict[str, Any] = {}
    best, slowdown = _best_kernel(of(measured, "attention"))
    for dtype, pass_ in sorted({(row.point["dtype"], row.point["pass"]) for row in best}):
        if dtype != "fp16":  # priced as bf16
            key = "best", dtype, pass_
            curves[key] = _curve(of(best, "attention", dtype=dtype, pass_=pass_), dtype, base, curves.get(key))
            residuals[f"attention {dtype} {pass_}"] = curves[key].errors
    entries = [
        {"kernel": kernel, "dtype": dtype, "pass": pass_, **curve.to_dict()}
        for (kernel, dtype, pass_), curve in curves.items()
    ]
    return entries, residuals, slowdown


def _best_kernel(rows: Sequence[Measured]) -> tuple[list[Measured], dict[str, Any]]:
    """The fastest kernel of every shape, and the median slowdown of flash attention 2 by pass where both were measured."""
    shapes: dict[Any, list[Measured]] = {}
    for row in rows:
        shapes.setdefault(tuple(pair for pair in row.point.key if pair[0] != "kernel"), []).append(row)
    ratios: dict[str, list[float]] = {}
    best = [min(alike, key=lambda row: row.median) for alike in shapes.values()]
    for alike, fastest in zip(shapes.values(), best, strict=True):
        for row in of(alike, "attention", kernel="flash"):
            ratios.setdefault(row.point["pass"], []).append(row.median / fastest.median)
    slow = {pass_: short(median(values), 3) for pass_, values in ratios.items()}
    if set(slow) != {"forward", "backward"}:
        return best, {}
    return best, {"same_as_best": ["fa2"]} if max(slow.values()) < 1.02 else {"slowdown": {"fa2": slow}}


def _curve(rows: Sequence[Measured], dtype: str, base: Base, before: AttentionCurve | None) -> AttentionCurve:
    """Constants over the head sizes measured; other sizes of the guess keep their relation to the nearest measured one."""
    peak, units = base.peak(dtype), base.compute_units
    found: dict[float, Column] = {}
    errors: dict[str, Any] = {}
    for size in sorted({_head_size(row) for row in rows}):
        inputs = _rows([row for row in rows if _head_size(row) == size])
        found[size], errors[f"{size:g}"] = _one_size(inputs, _constants(before, size), peak, units)
    own = tuple(found)
    for size in before.head_dims.tolist() if before is not None else ():
        if size not in found:
            nearest = min(own, key=lambda other: abs(other - size))
            gain = found[nearest][1] / _constants(before, nearest)[1]
            found[size] = _constants(before, size) * np.array([1.0, gain, 1.0, 1.0])
            errors[f"{size:g}"] = f"not measured; moves with {nearest:g}"
    sizes = sorted(found)
    launch, efficiency, s0, c = np.array([found[size] for size in sizes]).T
    return AttentionCurve(
        head_dims=np.array(sizes), launch=launch, efficiency=np.clip(efficiency, 1e-4, 0.98), s0=s0, c=c, errors=errors
    )


def _one_size(rows: Rows, before: Column, peak: float, units: float) -> tuple[Column, dict[str, Any]]:
    """All constants where the rows show them, else the rate and s0; and the errors."""

    def fit(keep: Any) -> Column:
        return fit_all(rows.take(keep), peak, units, WIDE)

    error: dict[str, Any] = {}
    if len(rows.seconds) >= 8 and len(set(rows.span.tolist())) >= 3:
        error["held_out"] = left_out(fit, lambda p, out: attention_model(p, rows.take(out), peak, units), rows.seconds)
        found = fit(slice(None))
    else:
        found = refine_rate(rows, before, peak, units)
    in_sample = error_of(attention_model(found, rows, peak, units), rows.seconds)
    return found, {"in_sample": in_sample, "rows": len(rows.seconds), **error}


def _head_size(row: Measured) -> float:
    return 0.5 * (row.point["head_dim"] + row.point["value_dim"])


def _constants(curve: AttentionCurve | None, size: float) -> Column:
    if curve is None:
        return np.array(START)
    constants = (curve.launch, curve.efficiency, curve.s0, curve.c)
    return np.array([float(np.interp(size, curve.head_dims, values)) for values in constants])


def _rows(rows: Sequence[Measured]) -> Rows:
    """FLOP, mean keys, tiles and seconds."""
    seq, batch, heads, causal = columns(rows, "seq", "batch", "heads", "causal")
    span = np.array([definitions.keys(row.point) for row in rows])
    return Rows(
        flop=np.array([definitions.attention_flop(row.point) for row in rows]), span=span * np.where(causal, 0.5, 1.0),
        tiles=batch * heads * np.ceil(seq / 128.0), seconds=seconds(rows),
    )  # fmt: skip
