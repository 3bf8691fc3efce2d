"""Least squares on the logarithm of times: robust against odd runs, held by a prior, honest about what is determined.

Unknowns are x = ln(value / default), 0 = no change; r = ln(predicted(x) / measured). With w the width of the prior and rho(z) =
2 (sqrt(1 + z) - 1) beyond KNEE spreads s (an odd run pulls like its size, not its square), the fit minimises

    sum over runs of rho(r^2 / s^2) + sum over unknowns of (x / w)^2,    s^2 = (n0 s0^2 + sum rho' r^2) / (n0 + N)

s is what the model leaves unexplained: three runs that happen to agree do not look exact. The covariance of the unknowns is
(J^T rho' J / s^2 + diag(1/w^2))^-1.
"""

from collections.abc import Callable

import numpy as np

from planner import arrays as npt
from planner.arrays import Floats
from planner.record import record

FIRST_SPREAD, FIRST_WEIGHT = 0.05, 4.0
"""s0 and n0: before any run is seen, the model is held to be 5 % off, with the weight of four runs."""
KNEE = 2.0
"""Spreads beyond which a run counts by its size instead of its square."""
STEP = 0.02
"""Step of the difference quotients, in ln: wide enough to see over the kinks of maxima and stages."""
NEAR, DONE = 0.04, 0.002
"""Step in ln up to which slopes are kept, and at which the search ends."""
REWEIGHTED = 6
"""Times that runs are weighed anew in one linear least squares."""


@record
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
    bounds: Floats
    """Of the unknowns, (3, K): ln of the smallest and of the largest value over the default, width of the prior around 0."""

    @property
    def covariance(self) -> Floats:
        """Of the unknowns, prior included, (K, K)."""
        weights, widths = _weight(self.residuals, self.spread), self.bounds[2]
        information = self.jacobian.T @ (weights[:, None] * self.jacobian) / self.spread**2 + np.diag(1.0 / widths**2)
        return np.asarray(np.linalg.inv(information), dtype=float)

    @property
    def deviations(self) -> Floats:
        """Standard deviation of each unknown."""
        return np.sqrt(np.diag(self.covariance))

    def without(self, out: npt.NDArray[np.bool_]) -> Floats:
        """The unknowns when the runs ``out`` do not count: the same least squares on the slopes of all.

        r(x) = r* + J (x - x*): nothing is priced again, and leaving a few runs out moves x little.
        """
        return _linear(self.residuals[~out], self.jacobian[~out], self.x, self.bounds, self.spread)


Residuals = Callable[[Floats], Floats]


def slopes(residuals: Residuals, x: Floats, at: Floats, bounds: Floats) -> Floats:
    """Change of the residuals per unknown, (N, K), by differences that stay inside the allowed range."""
    columns = []
    for index, high in enumerate(bounds[1]):
        step = STEP if x[index] + STEP <= high else -STEP
        moved = x.copy()
        moved[index] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1) if columns else np.zeros((len(at), 0))


def solve(residuals: Residuals, bounds: Floats, *, start: Floats | None = None) -> Solution:
    """The least squares of the module's equation; ``residuals(x)`` prices all runs, ``start`` is near the answer.

    Gauss and Newton's method: slopes at x, the least squares of r + J dx by scipy, half the step back while the sum rises.
    """
    x = _start(residuals, bounds) if start is None else start
    at = residuals(x)
    spread, jacobian = _spread(at, FIRST_SPREAD), slopes(residuals, x, at, bounds)
    for _ in range(8 if len(x) else 0):
        before, here = total(at, x, bounds, spread), x
        x = _linear(at, jacobian, here, bounds, spread)
        for _ in range(4):
            at = residuals(x)
            if total(at, x, bounds, spread) <= before * (1.0 + 1e-9):
                break
            x = (x + here) / 2.0
        step, spread = float(np.max(np.abs(x - here))), _spread(at, spread)
        if step > NEAR:
            jacobian = slopes(residuals, x, at, bounds)
        elif step < DONE:
            break
    return Solution(x=x, residuals=at, jacobian=jacobian, spread=spread, bounds=bounds)


def _start(residuals: Residuals, bounds: Floats) -> Floats:
    """Where the search begins: each unknown in turn at the best of four values within two widths of its prior.

    The slope alone may be zero: host work costs nothing until it passes what the GPU needs.
    """
    x = np.zeros(bounds.shape[1])
    best = total(residuals(x), x, bounds, FIRST_SPREAD) if len(x) else 0.0
    for index, (low, high, width) in enumerate(bounds.T):
        for widths in (-1.0, 1.0, 2.0):
            moved = x.copy()
            moved[index] = np.clip(widths * width, low, high)
            new = total(residuals(moved), moved, bounds, FIRST_SPREAD)
            if new < best:
                x, best = moved, new
    return x


def total(residuals: Floats, x: Floats, bounds: Floats, spread: float) -> float:
    """What is minimised."""
    z = (residuals / spread / KNEE) ** 2
    return float(KNEE**2 * np.sum(2.0 * (np.sqrt(1.0 + z) - 1.0)) + np.sum((x / bounds[2]) ** 2))


def _linear(at: Floats, jacobian: Floats, x: Floats, bounds: Floats, spread: float) -> Floats:
    """The unknowns that minimise the sum when residuals are ``at + jacobian (new - x)``, within their bounds.

    Least squares whose weights are set again by its residuals; the prior is a row per unknown, of weight 1.
    """
    from scipy.optimize import lsq_linear  # type: ignore[import-untyped]

    low, high, widths = bounds
    new = x
    for _ in range(REWEIGHTED if len(x) else 0):
        root = np.sqrt(_weight(at + jacobian @ (new - x), spread)) / spread
        rows = np.concatenate([root[:, None] * jacobian, np.diag(1.0 / widths)])
        goal = np.concatenate([root * (jacobian @ x - at), np.zeros(len(x))])
        new = np.asarray(lsq_linear(rows, goal, bounds=(low, np.maximum(high, low + 1e-6))).x, dtype=float)
    return np.clip(new, low, high)


def _weight(residuals: Floats, spread: float) -> Floats:
    """rho'(r^2 / s^2): how much a run counts."""
    return (1.0 + (residuals / spread / KNEE) ** 2) ** -0.5


def _spread(residuals: Floats, before: float) -> float:
    """s of the module's equation, the weights by the spread before."""
    total = np.sum(_weight(residuals, before) * residuals**2)
    return float(np.sqrt((FIRST_WEIGHT * FIRST_SPREAD**2 + total) / (FIRST_WEIGHT + len(residuals))))
