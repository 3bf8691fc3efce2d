"""Fits the constants of an ``AttentionCurve`` for one head size to measured times of its kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.curves import AttentionCurve, Column
from planner.lab.profile.fitting import fitted

LOW, HIGH = (1e-6, 0.05, 1.0, 0.02), (6e-5, 1.0, 8e3, 4.0)
"""Bounds of (t0 seconds, efficiency, s0 keys, c) in a large table."""
HIGH_LAUNCH = 1e-4
"""Longest launch where rows of a kernel refine the constants of another."""
START = (8e-6, 0.5, 500.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Measured times of one kernel, pass and head size."""

    flop: Column
    """FlashAttention convention: causal halved, backward 2.5 x."""
    span: Column
    """Keys that a query sees on average."""
    tiles: Column
    """batch x heads x ceil(s / 128)."""
    seconds: Column

    def take(self, keep: Any) -> Rows:
        """Some of the rows."""
        flop, span, tiles, seconds = (column[keep] for column in (self.flop, self.span, self.tiles, self.seconds))
        return Rows(flop=flop, span=span, tiles=tiles, seconds=seconds)


def attention_model(p: Iterable[float], rows: Rows, peak: float, units: float) -> Column:
    """``AttentionCurve.time`` for one head size, from (t0, e, s0, c)."""
    t0, e, s0, c = (np.array([value]) for value in p)
    curve = AttentionCurve(head_dims=np.array([128.0]), launch=t0, efficiency=e, s0=s0, c=c)
    return curve.time(rows.flop, rows.span, rows.tiles, np.full_like(rows.flop, 128.0), peak, units)


def fit_all(
    rows: Rows, peak: float, units: float, low: tuple[float, ...] = LOW, high: tuple[float, ...] = HIGH
) -> Column:
    """(t0, e, s0, c) of one head size from many rows."""

    def residual(p: Column) -> Column:
        return np.asarray(np.log(attention_model(np.exp(p), rows, peak, units) / rows.seconds), float)

    start = np.clip(np.log(START), np.log(low), np.log(high))
    return np.asarray(np.exp(fitted(residual, start, np.log(low), np.log(high), max_nfev=100)), float)


def refine_all(rows: Rows, base: Column, peak: float, units: float) -> Column:
    """All four constants, begun at those of another kernel: enough rows to see launch and idle units too."""
    low, high = np.log(LOW), np.log((HIGH_LAUNCH, *HIGH[1:]))
    start = np.clip(np.log(base), low + 1e-6, high - 1e-6)
    return np.exp(
        fitted(lambda p: np.log(attention_model(np.exp(p), rows, peak, units) / rows.seconds), start, low, high)
    )


def refine_rate(rows: Rows, base: Column, peak: float, units: float) -> Column:
    """Efficiency and s0 from few rows; launch and c stay those of ``base``. Fewer than three lengths show no slope."""
    if len(set(rows.span.tolist())) < 3:
        ratio = attention_model(base, rows, peak, units) / rows.seconds
        return np.asarray(base * np.array([1.0, float(np.median(ratio)), 1.0, 1.0]))

    def residual(p: Column) -> Column:
        e, s0 = np.exp(p)
        return np.log(attention_model((base[0], e, s0, base[3]), rows, peak, units) / rows.seconds)

    found = fitted(residual, np.log([0.5, 500.0]), np.log([0.05, 1.0]), np.log([1.0, 2e4]))
    return np.array([base[0], *np.exp(found), base[3]])
