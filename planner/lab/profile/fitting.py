"""What all fits share: robust least squares on the logarithm of the time, and how far a fit is off.

Fits are made on logarithms of positive constants and judged on relative errors: a point of 10 us weighs as much as one of
10 ms. The soft L1 loss keeps a disturbed point from pulling the curve [scipy, least_squares].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planner.curves import Column


def fitted(
    residual: Callable[[Column], Column], start: Column, low: Column, high: Column, *, scale: float = 0.1,
    **more: Any,
) -> Column:  # fmt: skip
    """The constants (not their logarithms) of least robust residual; start and bounds are logarithms.

    ``scale`` is the relative error beyond which a point counts as disturbed.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    fit = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=scale, **more)
    return np.asarray(fit.x, float)


def error_of(predicted: Column, measured: Column) -> list[float]:
    """[median, 90th percentile] of |predicted / measured - 1| in percent."""
    error = 100.0 * np.abs(predicted / measured - 1.0)
    return [round(float(np.median(error)), 1), round(float(np.percentile(error, 90)), 1)]


def short(value: float, digits: int = 4) -> float:
    """Rounded to significant digits, for a readable file."""
    return float(f"{value:.{digits}g}")


def left_out(
    fit: Callable[[Any], Callable[[Any], Column]], measured: Column, folds: int = 4
) -> list[float]:  # fmt: skip
    """[median, p90] percent error at points that the fit did not see: every ``folds``-th point is left out in turn.

    ``fit(rows)`` fits on the rows of a mask and returns what predicts the rows of another mask. Points in a row are alike,
    so every k-th one is left out, not a block.
    """
    number = np.arange(len(measured)) % folds
    predicted = np.empty_like(measured)
    for fold in range(folds):
        inside, outside = number != fold, number == fold
        predicted[outside] = fit(inside)(outside)
    return error_of(predicted, measured)
