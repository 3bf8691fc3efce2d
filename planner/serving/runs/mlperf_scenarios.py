"""MLPerf's scenarios: submitters tune their layout; the best of the search stands for it, at the highest load within the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.errors import PlannerError
from planner.serving.result import ServingEstimate
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.methods import methods
from planner.serving.runs.run_schema import ServingRow
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_rules import legal
from planner.serving.traffic import Lengths, Traffic

Indices = NDArray[np.intp]
LOADS = np.linspace(0.1, 1.0, 10)
"""Parts of the offline rate at which a server is tried."""


def search_layouts(served: Served, count: int, nodes: int) -> tuple[Degrees, ...]:
    """Layouts of all GPUs as copies inside a node, the legal ones where there are any."""
    found = list(_candidates(served, count, max(count // nodes, 1)))
    names = Degrees.__dataclass_fields__
    columns = ServingLayout(**{name: np.array([getattr(one, name) for one in found]) for name in names})
    mask = np.broadcast_to(
        legal(served.model, served.hardware, served.engine, served.precision, columns), (len(found),)
    )
    kept = tuple(one for one, keep in zip(found, mask, strict=True) if keep)
    return kept or tuple(found)  # it ran: a rule that refuses all of them is of another version


def _candidates(served: Served, count: int, node: int) -> Iterator[Degrees]:
    for tp in (1, 2, 4, 8, 16):
        for pp in (1, 2, 4):
            if tp > node or count % (tp * pp):
                continue
            shared = {"pp": pp, "replicas": count // (tp * pp)}
            if not served.model.is_moe:
                yield Degrees(tp=tp, **shared)
                continue
            yield Degrees(tp=tp, moe_tp=tp, **shared)
            if tp > 1:
                yield Degrees(tp=tp, ep=tp, **shared)
                yield Degrees(attn_dp=tp, ep=tp, **shared)


def best_within(
    served: Served, layout: ServingLayout, traffic: Traffic, values: Floats, rows: Sequence[ServingRow]
) -> ServingEstimate:
    """The estimate of every column at the highest load that keeps the limits of its row's scenario; offline at ``values``.

    A column that keeps them at no load counts as one that does not fit. Raises PlannerError for a scenario without known limits.
    """
    offline = estimate(served, layout, traffic, values)
    limits = np.array([_limits(row) for row in rows])
    which = np.flatnonzero(~np.isinf(limits).any(axis=1))
    if not len(which):
        return offline
    number, most = len(which), np.asarray(offline.requests_per_second)[which]
    many = replace(traffic, load="rate", input=_tiled(traffic.input, which), output=_tiled(traffic.output, which))
    tried = (LOADS[:, None] * most).reshape(-1)
    found = estimate(served, _repeated(layout, which), many, tried)
    first, token = (np.tile(limits[which, side], len(LOADS)) for side in (0, 1))
    keeps = (np.asarray(found.ttft.p99) <= first) & (np.asarray(found.tpot.p99) <= token)
    keeps &= ~np.asarray(found.saturated, dtype=bool)
    rates = np.where(keeps, tried, 0.0).reshape(len(LOADS), number).max(axis=0)
    fits, share = np.broadcast_to(np.asarray(found.memory.fits), (len(tried),))[:number], np.ones(len(rows))
    share[which] = rates / np.maximum(most, 1e-12)
    able = np.array(np.broadcast_to(np.asarray(offline.fits), (len(rows),)))
    able[which] = fits & (rates > 0)
    served_rates: Any = {
        name: np.asarray(getattr(offline, name)) * share
        for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second")
    }
    return replace(offline, fits=able, **served_rates)


def _limits(row: ServingRow) -> tuple[float, float]:
    """99th percentiles of first token and time per token that a scenario allows, seconds; infinite offline."""
    scenario = str(row.get("load.kind")).removeprefix("mlperf-")
    if scenario == "offline":
        return np.inf, np.inf
    name = str(row.get("load.dataset")).removesuffix("-99").removesuffix("-99.9")
    found = methods()["datasets"].get(name, {}).get(scenario)
    if found is None:
        raise PlannerError(f"the limits of MLPerf's scenario {scenario} of {name} are not known")
    return float(found[0]), float(found[1])


def _tiled(lengths: Lengths, which: Indices) -> Lengths:
    """Some columns of lengths, once for each load."""
    columns: Any = {one.name: np.tile(getattr(lengths, one.name)[which], len(LOADS)) for one in fields(lengths)}
    return replace(lengths, **columns)


def _repeated(layout: ServingLayout, which: Indices) -> ServingLayout:
    """Some columns of a layout, once for each load."""
    columns = {one.name: getattr(layout, one.name) for one in fields(layout)}
    return ServingLayout(
        **{name: np.tile(one[which], len(LOADS)) if np.ndim(one) else one for name, one in columns.items()}
    )
