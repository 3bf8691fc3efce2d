"""What all fits share: what they stand on, what they say, robust least squares on the logarithm of the time, and errors.

Fits are made on logarithms of positive constants and judged on relative errors: a point of 10 us weighs as much as one of
10 ms. The soft L1 loss keeps a disturbed point from pulling the curve [scipy, least_squares].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np

from planner.curves import Column
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.lab.profile.points import Measured
from planner.record import record

T = TypeVar("T")


@record
class Base:
    """What the fits stand on: peaks, bandwidth and constants before anything was fitted."""

    peak_flops: dict[str, float]  # FLOP/s by dtype
    bandwidth: float  # Bytes/s of the memory
    compute_units: float  # Compute units of the device; threads of a CPU
    guess: HardwareProfile | None = None
    """The profile whose constants stay where nothing was measured; None = nothing stays (a CPU)."""
    notes: list[str] = field(default_factory=list)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype. Raises PlannerError."""
        stands = {"fp16": "bf16", "fp8_row": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
        key = stands.get(dtype, dtype) if dtype not in self.peak_flops else dtype
        if key not in self.peak_flops:
            raise PlannerError(f"no peak is known for {dtype}; known: {', '.join(self.peak_flops)}")
        return self.peak_flops[key]


@dataclass(kw_only=True)
class Findings:
    """What the measured points of one half of a profile, operators or links, say."""

    keys: dict[str, Any] = field(default_factory=dict)  # Keys of a profile file, those that were measured
    measured: dict[str, str] = field(default_factory=dict)  # Family of the profile -> how it was measured
    notes: list[str] = field(default_factory=list)  # What stands in for what was not measured
    unverified: list[str] = field(default_factory=list)  # Keys that were not measured
    spread: dict[str, float] = field(default_factory=dict)
    """Half the interval of the median over it, percent, by family: the median over its points."""
    residuals: dict[str, Any] = field(default_factory=dict)  # [median, p90] percent by curve, for the provenance
    measurements: dict[str, Any] = field(default_factory=dict)  # The points themselves, by family


def of(measured: Sequence[Measured], family: str, **wanted: object) -> list[Measured]:
    """The measured points of a family with some values of their key; ``pass_`` is the value ``pass``."""
    values = {name.rstrip("_"): value for name, value in wanted.items()}
    return [
        row for row in measured
        if row.point.family == family and all(row.point.values.get(name) == value for name, value in values.items())
    ]  # fmt: skip


def spread_of(rows: Sequence[Measured]) -> float:
    """Half the interval over the median, the median over points, in percent."""
    return short(100.0 * median(row.spread for row in rows), 3)


def seconds(rows: Sequence[Measured]) -> Column:
    """Medians as a column."""
    return np.array([row.median for row in rows])


def columns(rows: Sequence[Measured], *names: str) -> list[Column]:
    """Numbers of the keys, one column for each name."""
    return [np.array([float(row.point[name]) for row in rows]) for name in names]


def fitted(
    residual: Callable[[Column], Any], start: Any, low: Any, high: Any, *, scale: float = 0.1, **more: Any
) -> Any:
    """scipy's result: the constants ``x`` of least robust residual and its ``cost``; start and bounds are logarithms,
    ``scale`` is the relative error beyond which a point counts as disturbed."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    return least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=scale, **more)


def error_of(predicted: Column, measured: Column, digits: int = 1) -> list[float]:
    """[median, 90th percentile] of |predicted / measured - 1| in percent."""
    error = 100.0 * np.abs(predicted / measured - 1.0)
    return [round(float(np.median(error)), digits), round(float(np.percentile(error, 90)), digits)]


def short(value: float, digits: int = 4) -> float:
    """Rounded to significant digits, for a readable file."""
    return float(f"{value:.{digits}g}")


def left_out(
    fit: Callable[[Any], T], predict: Callable[[T, Any], Column], measured: Column, folds: int = 4
) -> list[float]:
    """[median, p90] percent error at points that the fit did not see: every ``folds``-th point is left out, one after the other
    (points in a row are alike). ``fit(mask)`` sees some rows, ``predict(fit, mask)`` gives the seconds of others."""
    number = np.arange(len(measured)) % folds
    predicted = np.empty_like(measured)
    for fold in range(folds):
        predicted[number == fold] = predict(fit(number != fold), number == fold)
    return error_of(predicted, measured)
