"""Least squares on the logarithm of times: robust against odd runs, held by a prior, honest about what is determined.

Unknowns are x = ln(value / default), 0 = no change. The fit minimises

    sum over runs of rho(r^2 / s^2) + sum over unknowns of (x / w)^2,        r = ln(predicted(x) / measured)

rho(z) = 2 (sqrt(1 + z) - 1) beyond twice the spread s (soft L1: an odd run pulls like its size, not its square), w the
width of the prior: how far from the default the factor is known to lie before any run is seen. The spread is what the
model leaves unexplained, estimated from the residuals themselves together with a first guess:

    s^2 = (n0 s0^2 + sum w_i r_i^2) / (n0 + N),     w_i = rho'(r_i^2 / s^2), n0 = 4, s0 = 5 %

so that three runs that happen to agree do not look exact. Covariance of the unknowns: (J^T W J / s^2 + diag(1/w^2))^-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats

FIRST_SPREAD, FIRST_WEIGHT = 0.05, 4.0
"""s0 and n0: before any run is seen, the model is held to be 5 % off, with the weight of four runs."""
KNEE = 2.0
"""Spreads beyond which a run counts by its size instead of its square."""
STEP = 0.02
"""Step of the difference quotients, in ln: wide enough to see over the kinks of maxima and stages."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """One number to find, as ln(value / default)."""

    name: str
    low: float
    """ln of the smallest value over the default."""
    high: float
    """ln of the largest value over the default."""
    width: float
    """Standard deviation of the prior around 0."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Where the least squares ended."""

    x: Floats
    """The unknowns, (K,)."""
    residuals: Floats
    """ln(predicted / measured) of every run at x, (N,)."""
    jacobian: Floats
    """Change of the residuals per unknown, (N, K)."""
    spread: float
    """s, what stays unexplained."""
    covariance: Floats
    """Of the unknowns, prior included, (K, K)."""

    @property
    def deviations(self) -> Floats:
        """Standard deviation of each unknown."""
        return np.sqrt(np.diag(self.covariance))

    @property
    def correlations(self) -> Floats:
        """Correlation of each pair of unknowns, prior included."""
        deviations = self.deviations
        return self.covariance / np.outer(deviations, deviations)


Residuals = Callable[[Floats], Floats]


def slopes(residuals: Residuals, x: Floats, at: Floats, unknowns: Sequence[Unknown]) -> Floats:
    """Change of the residuals per unknown, (N, K), by differences that stay inside the allowed range."""
    columns = []
    for index, unknown in enumerate(unknowns):
        step = STEP if x[index] + STEP <= unknown.high else -STEP
        moved = x.copy()
        moved[index] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1) if columns else np.zeros((len(at), 0))


def solve(residuals: Residuals, unknowns: Sequence[Unknown]) -> Solution:
    """The least squares of the module's equation; ``residuals(x)`` prices all runs."""
    spread, x = FIRST_SPREAD, _start(residuals, unknowns)
    for _ in range(2 if unknowns else 0):
        x = _minimise(residuals, unknowns, x, spread)
        spread = _spread(residuals(x), spread)
    at = residuals(x)
    spread = _spread(at, spread)
    jacobian = slopes(residuals, x, at, unknowns)
    weights = _weight((at / spread) ** 2)
    widths = np.array([unknown.width for unknown in unknowns])
    information = jacobian.T @ (weights[:, None] * jacobian) / spread**2 + np.diag(1.0 / widths**2)
    covariance = np.asarray(np.linalg.inv(information), dtype=float)
    return Solution(x=x, residuals=at, jacobian=jacobian, spread=spread, covariance=covariance)


def _start(residuals: Residuals, unknowns: Sequence[Unknown]) -> Floats:
    """Where the search begins: each unknown in turn at the best of five values within two widths of its prior.

    The slope alone may be zero: host work costs nothing until it passes what the GPU needs.
    """
    x = np.zeros(len(unknowns))
    for index, unknown in enumerate(unknowns):
        tried = {}
        for widths in (0.0, -1.5, -0.75, 0.75, 1.5):
            moved = x.copy()
            moved[index] = np.clip(widths * unknown.width, unknown.low, unknown.high)
            z = (residuals(moved) / FIRST_SPREAD / KNEE) ** 2
            tried[float(moved[index])] = KNEE**2 * float(np.sum(2.0 * (np.sqrt(1.0 + z) - 1.0))) + widths**2
        x[index] = min(tried, key=lambda value: tried[value])
    return x


def _minimise(residuals: Residuals, unknowns: Sequence[Unknown], start: Floats, spread: float) -> Floats:
    """One run of scipy's trust region with bounds; the prior is a row per unknown that stays quadratic."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    widths = np.array([unknown.width for unknown in unknowns])
    last: dict[bytes, Floats] = {}

    def data(x: Floats) -> Floats:
        key = x.tobytes()
        if key not in last:
            last.clear()
            last[key] = residuals(x)
        return last[key]

    def rows(x: Floats) -> Floats:
        return np.concatenate([data(x) / spread, x / widths])

    def jacobian(x: Floats) -> Floats:
        return np.concatenate([slopes(residuals, x, data(x), unknowns) / spread, np.diag(1.0 / widths)])

    def loss(z: Floats) -> Floats:
        soft = np.stack([2.0 * (np.sqrt(1.0 + z) - 1.0), (1.0 + z) ** -0.5, -0.5 * (1.0 + z) ** -1.5])
        plain = np.stack([z, np.ones_like(z), np.zeros_like(z)])
        return np.where(np.arange(len(z)) < len(z) - len(unknowns), soft, plain)

    bounds = ([unknown.low for unknown in unknowns], [unknown.high for unknown in unknowns])
    inside = np.clip(start, *bounds)
    found = least_squares(
        rows, inside, jac=jacobian, bounds=bounds, loss=loss, f_scale=KNEE, xtol=1e-4, ftol=1e-5, gtol=1e-6, max_nfev=25
    )
    return np.asarray(found.x, dtype=float)


def _weight(z: Floats) -> Floats:
    """rho'(z): how much a run counts whose residual is sqrt(z) spreads."""
    return (1.0 + z / KNEE**2) ** -0.5


def _spread(residuals: Floats, before: float) -> float:
    """s of the module's equation, the weights by the spread before."""
    total = np.sum(_weight((residuals / before) ** 2) * residuals**2)
    return float(np.sqrt((FIRST_WEIGHT * FIRST_SPREAD**2 + total) / (FIRST_WEIGHT + len(residuals))))
