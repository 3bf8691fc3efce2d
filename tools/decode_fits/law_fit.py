"""The fit of one kernel: positive numbers of its law, its mesh, and the errors of both as its file says them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from planner.curves import Column
from planner.hardware import HardwareProfile
from planner.serving.curves.kernel_laws import LAWS
from planner.serving.curves.kernel_tables import Kernel
from tools.decode_fits.measured import Data
from tools.decode_fits.mesh_fit import between, fit_mesh

LEAST_MEMORY = 1.08
"""No kernel reads faster than 93 % of the nominal bandwidth; smaller numbers come from operands that stayed in the cache."""


@dataclass
class Form:
    """How a kernel is fitted: least numbers of terms, terms left out, and the nodes of its mesh."""

    least: dict[str, float] = field(default_factory=lambda: {"memory": LEAST_MEMORY})
    without: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    """Two sizes along whose product the mesh is filled in (``between``)."""
    memory: float = 0.0
    """Known share of the bandwidth: rows that a cache served show the other numbers all the same; 0 = fitted. What reads from there adds
    to nothing that those few rows of the memory show: the walk along k hides behind it (``Kernel.overlaps``)."""
    axes: dict[str, tuple[float, ...]] = field(default_factory=dict)


def quantiles(error: Column) -> list[float]:
    """Median and 90th percentile of |error|, percent."""
    return [round(100.0 * float(np.quantile(np.abs(error), share)), 1) for share in (0.5, 0.9)]


def errors_of(kernel: Kernel, data: Data) -> list[float]:
    """``quantiles`` of predicted / measured - 1."""
    return quantiles(kernel.time(data.sizes) / data.seconds - 1.0)


def fit_numbers(law: Kernel, data: Data, form: Form) -> dict[str, float]:
    """Positive numbers of the law, least absolute relative error by reweighting, none below its least."""
    terms = {
        name: np.broadcast_to(value, data.seconds.shape)
        for name, value in LAWS[law.operator](law.hardware, data.sizes, law.dtype).items()
    }
    names = [name for name in terms if name not in form.without and np.any(terms[name] > 0)]
    matrix = np.stack([terms[name] for name in names], axis=1) / data.seconds[:, None]
    base = np.array([form.least.get(name, 0.0) for name in names])
    weight = np.ones(len(matrix))
    found = base
    for _ in range(12):
        extra, _ = nnls(matrix * weight[:, None], (1.0 - matrix @ base) * weight)
        found = base + extra
        weight = 1.0 / np.sqrt(np.maximum(np.abs(matrix @ found - 1.0), 0.03))
    return {name: float(f"{value:.4g}") for name, value in zip(names, found, strict=True) if value > 0}


def fitted(law: Kernel, data: Data, form: Form) -> tuple[Kernel, Kernel]:
    """(law alone, law with its mesh) on these rows."""
    numbers = fit_numbers(law, data if data.keep is None or form.memory else data.take(data.keep), form)
    if form.memory:  # rows too short for the rate say too little of it
        numbers |= {"memory": form.memory, "compute": min(numbers.get("compute", 0.0), form.memory)}
    law = replace(law, numbers=numbers, overlaps=bool(form.memory))
    shapes = between(data, *form.smooth) if form.smooth else data
    return law, fit_mesh(law, shapes, form.axes) if form.axes else law


def entry(operator: str, hardware: HardwareProfile, dtype: str, data: Data, form: Form) -> dict[str, Any]:
    """What the file says about one kernel, with its errors."""
    empty = Kernel(operator, dtype, hardware, {})
    half = np.random.default_rng(0).random(len(data.seconds)) < 0.5
    errors: dict[str, Any] = {}
    if half.sum() > 20 and data.keep is None:
        errors["held_out"] = errors_of(fitted(empty, data.take(half), form)[1], data.take(~half))
    law, whole = fitted(empty, data, form)
    scored = data if data.keep is None else data.take(data.keep)
    errors["all"] = errors_of(whole, scored)
    result: dict[str, Any] = {
        "from": data.said,
        "law": " ".join(f"{name} {value:g}" for name, value in whole.numbers.items()),
    }
    if whole.overlaps:
        result["overlaps"] = True
    if form.axes:
        errors["law"] = errors_of(law, scored)
        result["axes"] = {name: " ".join(f"{node:g}" for node in nodes) for name, nodes in whole.axes.items()}
        result["percent"] = " ".join(f"{value:.0f}" for value in whole.percent.ravel())
    return {**result, "rows": len(scored.seconds), "errors": errors}
