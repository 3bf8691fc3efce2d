"""Serving runs predicted: rows that share model, device, engine, format and lengths in one call, each row a column of it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.record import record
from planner.serving import pools
from planner.serving.engine import load_engine
from planner.serving.result import ServingEstimate
from planner.serving.runs.bench_tuning import limits_of
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.length_columns import columns_of
from planner.serving.runs.methods import method_of
from planner.serving.runs.mlperf_scenarios import best_within, search_layouts
from planner.serving.runs.run_schema import LATENCIES, RATES
from planner.serving.runs.serving_run import ServingRun
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import Precision, ServingLayout
from planner.units import GIGA, KILO

TUNED_BATCH = 8192
"""Batch limit of runs that seek the highest throughput: their makers raise it until the cache is full."""
PREDICTED, DOES_NOT_FIT, REFUSED, UNSUPPORTED = "predicted", "does not fit", "refused", "unsupported"


@record
class ServingAnswer:
    """What the model says of one run."""

    status: str
    """predicted; does not fit: priced as if it did; refused by the model; unsupported: the row cannot be understood."""
    reason: str = ""
    """Why it was not predicted."""
    quantities: Mapping[str, float] = field(default_factory=dict)
    """Predictions of what was measured, under its name and unit."""
    layout: Degrees | None = None
    """The layout that was priced, of several that may have run."""
    saturated: bool = False
    """More arrives than leaves, or requests wait for a place."""


@record
class Case:
    """A run with its engine and one layout per column."""

    index: int
    run: ServingRun
    served: Served
    layouts: tuple[Degrees, ...]


def predict_runs(
    runs: Sequence[ServingRun], progress: Callable[[int], object] = lambda done: None
) -> list[ServingAnswer]:
    """The answer to every run, in their order. ``progress`` is called with how many are done."""
    answers = [ServingAnswer(status=UNSUPPORTED, reason=one.unsupported) for one in runs]
    groups: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    known: dict[tuple[object, ...], Served] = {}
    for index, run in enumerate(runs):
        if not run.unsupported:
            try:
                case = _case(index, run, known)
                groups[_shared(case)].append(case)
            except PlannerError as error:
                answers[index] = ServingAnswer(status=REFUSED, reason=str(error))
    done = len(runs) - sum(map(len, groups.values()))
    for cases in groups.values():
        for case, answer in zip(cases, _priced(cases), strict=True):
            answers[case.index] = answer
        done += len(cases)
        progress(done)
    return answers


def _case(index: int, run: ServingRun, known: dict[tuple[object, ...], Served]) -> Case:
    assert run.model and run.hardware and run.engine
    key = (run.model.name, id(run.hardware), _facts(run.engine.full), run.launch.changes, *sorted(run.formats.items()))
    if key not in known:
        engine = run.launch.started(load_engine(run.engine.full))
        cache = {"cache": engine.cache_dtype_default(run.formats["weights"]), **run.formats}
        known[key] = Served(model=run.model, hardware=run.hardware, engine=engine, precision=Precision(**cache))
    served, layouts = known[key], run.split.layouts
    if len(layouts) > 1 and "attn_dp" not in served.engine.degrees:
        layouts = tuple(one for one in layouts if one.attn_dp == 1) or layouts
    if run.split.decode is not None:
        layouts = (run.split.decode,)
    elif not layouts:
        layouts = search_layouts(
            served, int(run.row.get("hardware.count") or 1), int(run.row.get("hardware.nodes") or 1)
        )
    return Case(index=index, run=run, served=served, layouts=layouts)


@cache
def _facts(engine: str) -> str:
    """What decides an answer: versions with the same facts share one."""
    return repr(replace(load_engine(engine), version="", note="", sources={}))


def _shared(case: Case) -> tuple[object, ...]:
    """What one call of the model shares: everything but layout, lengths and value of the load."""
    traffic = case.run.traffic
    assert traffic is not None
    return (
        id(case.served),
        case.run.kind,
        traffic.load,
        traffic.prefix_hit,
        traffic.speculation,
        traffic.waves,
        traffic.client,
        traffic.stream,
    )


def _priced(cases: list[Case]) -> list[ServingAnswer]:
    """Answers of one group; what the model refuses, all its rows carry."""
    once = list({_same(case): case for case in cases}.values())
    starts, columns = {}, 0
    for case in once:
        starts[_same(case)] = columns
        columns += len(case.layouts)
    try:
        found = _estimated(cases[0].served, once)
    except PlannerError as error:
        if len(cases) > 1:
            return [answer for case in cases for answer in _priced([case])]
        return [ServingAnswer(status=REFUSED, reason=str(error))]
    answers = []
    for case in cases:
        start = starts[_same(case)]
        answers.append(_answer(case, found, _taken(found, start, start + len(case.layouts)), start))
    return answers


def _same(case: Case) -> tuple[object, ...]:
    """What makes two rows of a group one question: repetitions, and the submitters of one benchmark."""
    run, row = case.run, case.run.row
    own = (
        row.get("load.kind"),
        row.get("load.dataset"),
        row.get("load.max_batch"),
        str(row.get("options").get("max_num_seqs")),
    )
    return run.traffic, case.layouts, run.split.prefill, run.launch, own


def _estimated(served: Served, cases: Sequence[Case]) -> ServingEstimate:
    """One column for each case and each of its layouts."""
    columns = [(case, layout) for case in cases for layout in case.layouts]
    layout = _stacked([_layout(case, one) for case, one in columns])
    traffics = [case.run.traffic for case, _ in columns if case.run.traffic]
    traffic = replace(
        traffics[0],
        value=1.0,
        input=columns_of([one.input for one in traffics]),
        output=columns_of([one.output for one in traffics]),
    )
    values = np.array([one.value for one in traffics], dtype=np.float64)
    if cases[0].run.kind == "mlperf":
        return best_within(served, layout, traffic, values, [case.run.row for case, _ in columns])
    if cases[0].run.kind != "disaggregated":
        return estimate(served, layout, traffic, values)
    prefill = [(case, case.run.split.prefill) for case in cases]
    first = _stacked([_prefill_layout(case, one) for case, one in prefill if one is not None])
    return pools.estimate(served, first, layout, traffic, values)


def _layout(case: Case, degrees: Degrees) -> dict[str, int]:
    """Fields of a layout with its batch limit and token budget: as stated, else the engine's, raised to what was in flight."""
    hardware, traffic, run = case.served.hardware, case.run.traffic, case.run
    plain = ServingLayout(**vars(degrees))
    batch = float(case.served.engine.default_max_batch(hardware, plain))
    tokens = run.launch.max_tokens or float(case.served.engine.default_max_tokens(hardware, plain))
    stated = run.row.get("load.max_batch") or _whole(run.row.get("options").get("max_num_seqs"))
    if stated:
        batch = float(stated)
    elif run.launch.held:
        batch = max(run.launch.held // degrees.replicas, 1)
    elif run.kind == "offline" and traffic and method_of(run.row).get("tuned"):
        limits = limits_of(case.served, degrees, traffic)
        batch, tokens = float(limits.sequences * degrees.pp * degrees.attn_dp), float(limits.tokens)
    elif run.kind in ("offline", "mlperf"):
        batch = max(batch, TUNED_BATCH * degrees.attn_dp)
    elif traffic and run.kind != "open":
        batch = max(batch, math.ceil(traffic.value / degrees.replicas))
    spread = degrees.attn_dp > 1
    waits = {
        "receive_interval": run.launch.receive,
        "balance": run.launch.receive_spread if spread else 1,
        "hold": 1 if spread else 1 + run.launch.hold,
    }
    return {**vars(degrees), "max_batch": int(batch), "max_tokens": int(tokens), **waits}


def _prefill_layout(case: Case, degrees: Degrees) -> dict[str, int]:
    """The same of the workers for prompts, with the limits of their passes where the method of the source states them."""
    tokens, requests = case.run.launch.prefill
    own = _layout(case, degrees)
    limits = {"max_tokens": tokens, "max_batch": requests * degrees.attn_dp}
    return {**own, **{name: limit for name, limit in limits.items() if limit}}


def _whole(value: object) -> int | None:
    """A positive whole number, also as a text; None for anything else."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None
    return value if type(value) is int and 0 < value < 10**9 else None


def _stacked(layouts: Sequence[dict[str, int]]) -> ServingLayout:
    """Layouts of many rows as columns."""
    return ServingLayout(**{name: np.array([one[name] for one in layouts], dtype=np.int64) for name in layouts[0]})


def _taken(found: ServingEstimate, start: int, stop: int) -> int:
    """Of the layouts that may have run the one with the highest throughput of those that fit; the first where none does."""
    if stop - start == 1:
        return start
    rate, fits = (
        one[start:stop] for one in np.broadcast_arrays(found.output_tokens_per_second, np.asarray(found.fits))
    )
    return start + int(np.argmax(np.where(fits, rate, -1.0))) if fits.any() else start


def _answer(case: Case, found: ServingEstimate, column: int, start: int) -> ServingAnswer:
    layout, prefill = case.layouts[column - start], case.run.split.prefill
    gpus = layout.num_gpus + (prefill.num_gpus if prefill is not None else 0)
    return _said(case.run, figures(found, column, gpus), _at(found.fits, column), _at(found.saturated, column), layout)


def _said(
    run: ServingRun, values: Mapping[str, float], fits: object, saturated: object, layout: Degrees
) -> ServingAnswer:
    """The answer in the names of what was measured; a statistic that is not stated is the mean."""
    named = {name: values.get(name.replace(".unstated", ".mean")) for name in run.measured}
    quantities = {
        name: value for name, value in named.items() if value is not None and math.isfinite(value) and value > 0
    }
    if not quantities:
        return ServingAnswer(
            status=REFUSED, reason="the model has no finite answer for what was measured", layout=layout
        )
    status, reason = (PREDICTED, "") if fits else (DOES_NOT_FIT, "weights and cache of one request do not fit")
    return ServingAnswer(status=status, reason=reason, quantities=quantities, layout=layout, saturated=bool(saturated))


def figures(found: ServingEstimate, column: int, gpus: int) -> dict[str, float]:
    """All figures of one column by schema name, in its units."""
    values: dict[str, float] = {}
    for name in LATENCIES:
        latency = getattr(found, name.removesuffix("_ms"))
        for statistic in ("mean", "p50", "p90", "p99"):
            values[f"{name}.{statistic}"] = KILO * _at(latency.of(statistic), column)
    output, total = _at(found.output_tokens_per_second, column), _at(found.total_tokens_per_second, column)
    rates = (output, output / gpus, total, total / gpus, _at(found.requests_per_second, column))
    values |= dict(zip(RATES, rates, strict=True))
    values["latency_s"] = _at(found.e2e.mean, column)
    memory = found.memory
    parts = (memory.weights, memory.draft, memory.activations, memory.graphs, memory.cache)
    values["memory_gb"] = sum(_at(part, column) for part in parts) / GIGA
    return values


def _at(values: Any, column: int) -> float:
    """One column of a figure that may be the same for all."""
    array = np.asarray(values)
    return float(array[column] if array.ndim and array.size > 1 else array.reshape(-1)[0])
