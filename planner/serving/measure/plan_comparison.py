"""Measured against predicted, at the load that was measured, and what would explain the gap.

Every cause is priced again with the model itself; what it explains is the part of the gap, in the logarithm, that it closes over
the quantities that were measured. [docs/explain.md does the same for training steps]
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.serving.measure.bench_files import BenchResult
from planner.serving.plan_pricing import priced
from planner.serving.serve_plan import LATENCIES, ServePlan, ServePrediction
from planner.serving.traffic import Lengths, Traffic

LOAD_DIFFERS = 0.02
"""A load that differs by more than this part is priced again; a mean length where chance does not explain it either."""
LEAST_GAP = 0.05
"""Gaps that are smaller explain nothing."""
LEAST = 0.1
"""A cause that closes less of the gap is not listed."""
LISTED = 4
COMPARED = ("tpot.mean", "ttft.mean", "output_tokens_per_second")
"""What a cause is judged by: the others follow from these."""


@record
class MeasuredQuantity:
    """One quantity."""

    quantity: str
    measured: float
    """Seconds, or a rate."""
    predicted: float
    """Infinite where the queue grows for ever."""
    interval: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool | None:
        """In the stated interval; None where there is none."""
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


@record
class Cause:
    """Something that would make the prediction what was measured."""

    what: str
    check: str
    """How to see whether it is so."""
    explains: float
    """Part of the gap that it closes."""


@record
class Comparison:
    """A run with its plan."""

    plan: ServePlan
    """With the load that was measured, priced."""
    result: BenchResult
    rows: tuple[MeasuredQuantity, ...]
    """Largest deviation first."""
    notes: tuple[str, ...]
    causes: tuple[Cause, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json: seconds and rates."""
        return {
            "source": self.result.source, "stopped": self.result.stopped or None, "completed": self.result.completed,
            "failed": self.result.failed, "notes": list(self.notes),
            "quantities": {
                one.quantity: {
                    "measured": one.measured, "predicted": one.predicted if math.isfinite(one.predicted) else None,
                    "error": one.error if math.isfinite(one.predicted) else None,
                    "interval": None if one.interval is None else list(one.interval), "inside": one.inside,
                }
                for one in self.rows
            },
            "causes": [vars(one) for one in self.causes],
        }  # fmt: skip


def compare_with(plan: ServePlan, result: BenchResult, *, causes: bool = True) -> Comparison:
    """The run against the plan, which is priced at the run's own load where that differs. Raises PlannerError."""
    traffic, notes = _as_measured(plan.traffic, result)
    again = priced(replace(plan, traffic=traffic))
    if notes:
        notes.append("the prediction is for the load that was measured")
    ranges = (plan.prediction.ranges if plan.prediction is not None and not notes else None) or {}
    assert again.prediction is not None
    rows = tuple(_rows(again.prediction, result, ranges))
    if not rows:
        raise PlannerError(f"{result.source}: it holds nothing that a plan predicts")
    ordered = tuple(sorted(rows, key=lambda one: -_size(one)))
    found = tuple(_causes(again, result)) if causes else ()
    return Comparison(plan=again, result=result, rows=ordered, notes=tuple(notes), causes=found)


def _size(one: MeasuredQuantity) -> float:
    return (
        abs(math.log(one.predicted / one.measured)) if math.isfinite(one.predicted) and one.predicted > 0 else math.inf
    )


def _as_measured(traffic: Traffic, result: BenchResult) -> tuple[Traffic, list[str]]:
    """The traffic with the load and the mean lengths of the run, and in words what differs."""
    notes = []
    if result.load is not None:
        kind, value = result.load
        kind = traffic.load if {kind, traffic.load} <= {"concurrency", "static"} else kind
        if kind != traffic.load or abs(value / max(traffic.value, 1e-9) - 1.0) > LOAD_DIFFERS:
            notes.append(f"the run had {kind} {value:g}, the plan {traffic.load} {traffic.value:g}")
            traffic = replace(traffic, load=kind, value=value)
    if result.lengths is not None:
        for name, mean in zip(("input", "output"), result.lengths, strict=True):
            planned: Lengths = getattr(traffic, name)
            chance = 2.0 * math.sqrt(planned.variation / max(result.completed or 1, 1))
            if mean >= 1 and abs(mean / planned.mean - 1.0) > LOAD_DIFFERS + chance:
                what = "prompts" if name == "input" else "answers"
                notes.append(f"its {what} had {mean:.0f} tokens on average, the plan's {planned.mean:.0f}")
                factor = mean / planned.mean
                scaled = Lengths(
                    mean=mean, squared=planned.squared * factor**2, longest=max(planned.longest * factor, mean)
                )
                traffic = replace(traffic, input=scaled) if name == "input" else replace(traffic, output=scaled)
    return traffic, notes


def _rows(found: ServePrediction, result: BenchResult, ranges: Any) -> Iterator[MeasuredQuantity]:
    for name in LATENCIES:
        for figure, measured in result.latencies.get(name, {}).items():
            interval = tuple(ranges[name]) if figure == "mean" and name in ranges else None
            yield MeasuredQuantity(
                quantity=f"{name}.{figure}", measured=measured, predicted=found.latency(name, figure), interval=interval
            )
    for name, measured in result.rates.items():
        if measured > 0:
            interval = tuple(ranges[name]) if name in ranges else None
            yield MeasuredQuantity(quantity=name, measured=measured, predicted=getattr(found, name), interval=interval)


# ------------------------------------------------------------------------------------------------ causes

_Change = Callable[[ServePlan], ServePlan | None]


def _precision(**fields: str) -> _Change:
    def change(plan: ServePlan) -> ServePlan | None:
        new = replace(plan.precision, **fields)
        return None if new == plan.precision else replace(plan, precision=new)

    return change


def _layout(**factors: float) -> _Change:
    def change(plan: ServePlan) -> ServePlan | None:
        new = {name: max(round(getattr(plan.layout, name) * factor), 1) for name, factor in factors.items()}
        return replace(plan, layout=replace(plan.layout, **new))

    return change


def _hit(plan: ServePlan) -> ServePlan | None:
    """Prompts that were found in the prefix cache."""
    return replace(plan, traffic=replace(plan.traffic, prefix_hit=0.95)) if plan.traffic.prefix_hit < 0.5 else None


def _no_hit(plan: ServePlan) -> ServePlan | None:
    return replace(plan, traffic=replace(plan.traffic, prefix_hit=0.0)) if plan.traffic.prefix_hit else None


def _no_drafts(plan: ServePlan) -> ServePlan | None:
    return replace(plan, traffic=replace(plan.traffic, speculation=None)) if plan.traffic.speculation else None


def _one_engine(plan: ServePlan) -> ServePlan | None:
    """Only one of the replicas works."""
    return replace(plan, layout=replace(plan.layout, replicas=1)) if int(plan.layout.replicas) > 1 else None


_FORMAT = "look for the format of the weights in the engine's log at its start"
_CACHE = "look for the format of the cache in the engine's log at its start"
CAUSES: tuple[tuple[str, str, _Change], ...] = (
    ("the weights are in 16 bits", _FORMAT, _precision(weights="bf16", experts="")),
    ("the weights are in 8 bits", _FORMAT, _precision(weights="fp8", experts="")),
    ("the cache is in 16 bits", _CACHE, _precision(cache="bf16")),
    ("the cache is in 8 bits", _CACHE, _precision(cache="fp8")),
    ("prompts are found in the prefix cache", "send different prompts, or look at the hit rate in /metrics", _hit),
    ("no prompt is found in the prefix cache", "look at the hit rate in /metrics", _no_hit),
    ("nothing is drafted, or no draft is accepted", "look at the acceptance rate in the engine's log or /metrics", _no_drafts),
    ("only one engine gets the requests", "look at the running requests of each engine in /metrics", _one_engine),
    ("the engine runs half as many sequences at once", "look for max_num_seqs and pre-emptions in its log", _layout(max_batch=0.5)),
    ("a step takes a quarter of the prompt tokens", "look for the chunk size in the engine's log", _layout(max_tokens=0.25)),
    ("tensor parallelism is half as wide", "look for the degrees in the engine's log", _layout(tp=0.5)),
)  # fmt: skip
"""What may differ from the plan: in words, how to see it, and the plan with it."""


def _causes(plan: ServePlan, result: BenchResult) -> Iterator[Cause]:
    """Causes that close a part of the gap, the largest first."""
    measured = {name: value for name, value in result.values().items() if name in COMPARED and value > 0}
    before = _gaps(plan, measured)
    if before < LEAST_GAP:
        return
    found = []
    for what, check, change in CAUSES:
        try:
            changed = change(plan)
            left = _gaps(priced(changed), measured) if changed is not None else before
        except PlannerError:  # no layout, or no format, of this engine
            continue
        if (explains := 1.0 - left / before) >= LEAST:
            found.append(Cause(what=what, check=check, explains=explains))
    yield from sorted(found, key=lambda one: -one.explains)[:LISTED]


def _gaps(plan: ServePlan, measured: dict[str, float]) -> float:
    """Root of the summed squares of the logarithms of predicted over measured."""
    assert plan.prediction is not None
    total = 0.0
    for name, value in measured.items():
        latency, _, figure = name.partition(".")
        predicted = plan.prediction.latency(latency, figure) if figure else float(getattr(plan.prediction, name))
        total += math.log(max(predicted, 1e-12) / value) ** 2 if math.isfinite(predicted) else 9.0
    return math.sqrt(total)
