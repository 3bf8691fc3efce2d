"""Intervals of serving estimates: where nine of ten measurements lie, from the residuals of published runs.

``profiles/serving_error_bars.yaml`` is written by tools/update_serving_bars.py: for each quantity and kind of run the ends of
measured / predicted, every family (model x device x engine) weighing the same; they are wide enough that a family which was left
out lies inside nine times of ten, as a mean over families.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import numpy as np

from planner import library
from planner.arrays import Floats
from planner.record import record
from planner.schema import Rule, check_keys, read, within

TAILS = ("p90", "p95", "p99")
"""Statistics whose residuals are wider than those of means and medians."""
BASES = ("ttft", "ttft tail", "tpot", "tpot tail", "latency", "latency tail", "throughput", "memory")
"""Quantities with intervals of their own."""
ALL = "all"
"""The kind that stands for a kind that was never measured."""
SATURATED = ", saturated"
"""Ending of the kind where requests wait for a place: queues are long, and their seconds uncertain."""
_LOADS = ("closed", "open", "offline", "static", "disaggregated", "mlperf")
KINDS = tuple(f"{load} {model}{end}" for load in _LOADS for model in ("dense", "experts") for end in ("", SATURATED))
"""How requests came x what answered x whether they waited; without the ending: of both."""


@record
class ServingBar:
    """Nine of ten measurements lie between low and high times the prediction."""

    low: Annotated[float, Rule(above=True, most=1.0)]
    high: Annotated[float, within(1.0)]
    middle: Annotated[float, Rule(above=True)]
    """Half of them measured less than this times the prediction."""
    runs: int
    families: int


def base_of(quantity: str) -> str:
    """The entry of BASES of a quantity by schema name: 'ttft tail' of ttft_ms.p99."""
    name, _, statistic = quantity.partition(".")
    tail = " tail" if statistic in TAILS else ""
    if name == "memory_gb":
        return "memory"
    if name.startswith(("tokens_per_s", "request_per_s")):
        return "throughput"
    kind = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "tpot"}.get(name, "latency")
    return f"{kind}{tail}"


def kind_of(load: str, experts: bool, saturated: bool = False) -> str:
    """The entry of KINDS of a load of ``Traffic`` (or disaggregated, mlperf), a model, and whether requests wait for a place."""
    name = {"concurrency": "closed", "rate": "open"}.get(load, load)
    return f"{name} {'experts' if experts else 'dense'}{SATURATED if saturated else ''}"


def bar(quantity: str, kind: str) -> ServingBar:
    """The bar of a quantity by schema name; of all kinds where this one was never measured."""
    bars = shipped()[base_of(quantity)]
    return bars.get(kind) or bars.get(kind.removesuffix(SATURATED)) or bars[ALL]


def range_of(quantity: str, kind: str, predicted: float | Floats) -> tuple[Any, Any]:
    """Ends of the interval of a quantity by schema name (tpot_ms.mean, tokens_per_s_per_gpu, ...), in the unit of ``predicted``."""
    found = bar(quantity, kind)
    value = np.asarray(predicted, dtype=np.float64)
    low, high = value * found.low, value * found.high
    return (float(low), float(high)) if low.ndim == 0 else (low, high)


@cache
def shipped() -> dict[str, dict[str, ServingBar]]:
    """The table, by base and kind. Raises PlannerError with the entry that is wrong."""
    data = library.read_yaml(library.profiles_directory() / "serving_error_bars.yaml")
    tables = check_keys(data, ("held", *BASES), "serving_error_bars.yaml", required=BASES)
    found: dict[str, dict[str, ServingBar]] = {}
    for base in BASES:
        where = f"serving_error_bars.yaml: {base}"
        entries = check_keys(tables[base], (*KINDS, ALL), where, required=(ALL,))
        found[base] = {kind: read(ServingBar, one, f"{where}: {kind}") for kind, one in entries.items()}
    return found


@cache
def held() -> dict[str, float]:
    """Part of the runs that the bars hold, every family left out in turn, as a mean over families: by base."""
    data = library.read_yaml(library.profiles_directory() / "serving_error_bars.yaml")
    return {str(base): float(share) for base, share in data["held"].items()}
