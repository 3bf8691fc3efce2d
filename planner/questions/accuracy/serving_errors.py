"""Errors of predicted serving runs, and which of them a bound speaks of.

An error is predicted / measured - 1. Rows of one family (model x device x engine) are near-copies of each other: figures are given
over rows, and as the mean over families of each one's mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from planner.record import record
from planner.serving.intervals import kind_of
from planner.serving.runs.predicted_runs import DOES_NOT_FIT, PREDICTED, ServingAnswer
from planner.serving.runs.serving_run import ServingRun

THROUGHPUT = (
    "tokens_per_s_total_output",
    "tokens_per_s_per_gpu",
    "tokens_per_s_total",
    "tokens_per_s_total_per_gpu",
    "request_per_s",
)


@record
class ServingPair:
    """A run with its answer."""

    run: ServingRun
    answer: ServingAnswer

    def error(self, quantity: str) -> float | None:
        """Predicted / measured - 1 of a quantity by schema name; None when one of them is missing."""
        predicted, measured = self.answer.quantities.get(quantity), self.run.measured.get(quantity)
        return None if predicted is None or measured is None else predicted / measured - 1.0

    def first_error(self, names: Iterable[str]) -> float | None:
        """The error of the first of some quantities that was measured and predicted: a row counts once."""
        return next((one for name in names if (one := self.error(name)) is not None), None)

    @property
    def kind(self) -> str:
        """Kind of ``serving.intervals``."""
        return kind_of(self.run.kind, self.run.moe, self.answer.saturated)

    @property
    def saturated(self) -> bool:
        """Requests wait for a place, or more arrives than leaves: as the source says, or as predicted."""
        return "saturated" in self.run.row.flags or self.answer.saturated


def middle(name: str) -> tuple[str, ...]:
    """The figure of a latency that stands for its row: the mean; what is not said is the mean; else the median."""
    return tuple(f"{name}_ms.{statistic}" for statistic in ("mean", "unstated", "p50"))


def _plain(pair: ServingPair, kind: str) -> bool:
    return pair.run.kind == kind and pair.run.counts and not pair.run.speculates


def _latency(name: str) -> Callable[[ServingPair], float | None]:
    return lambda pair: pair.first_error(middle(name))


def throughput(pair: ServingPair) -> float | None:
    """The error of the throughput, of a row whose figures can be."""
    return None if pair.run.law else pair.first_error(THROUGHPUT)


@record
class Class:
    """Rows that one bound speaks of, and the error that counts."""

    name: str
    of: Callable[[ServingPair], bool]
    error: Callable[[ServingPair], float | None]


CLASSES = (
    Class(name="TPOT, closed loop, dense", of=lambda one: _plain(one, "closed") and not one.run.moe, error=_latency("tpot")),
    Class(name="TPOT, closed loop, experts", of=lambda one: _plain(one, "closed") and one.run.moe, error=_latency("tpot")),
    Class(
        name="TTFT below saturation", error=_latency("ttft"),
        of=lambda one: (_plain(one, "closed") or _plain(one, "open")) and not one.saturated
        and "prefix-cache-hit-unknown" not in one.run.row.flags,
    ),
    Class(name="offline throughput, dense", of=lambda one: _plain(one, "offline") and not one.run.moe, error=throughput),
    Class(name="offline throughput, experts", of=lambda one: _plain(one, "offline") and one.run.moe, error=throughput),
    Class(name="disaggregated, TPOT", of=lambda one: _plain(one, "disaggregated"), error=_latency("tpot")),
    Class(name="disaggregated, throughput", of=lambda one: _plain(one, "disaggregated"), error=throughput),
    Class(
        name="static batches, latency", of=lambda one: _plain(one, "static"),
        error=lambda one: one.first_error(("latency_s", *THROUGHPUT, *middle("ttft"))),
    ),
    Class(name="open loop, TPOT", of=lambda one: _plain(one, "open"),
          error=lambda one: one.first_error((*middle("tpot"), *middle("itl")))),
    Class(name="throughput, closed loop", of=lambda one: _plain(one, "closed"), error=throughput),
    Class(name="MLPerf, best of the search", of=lambda one: _plain(one, "mlperf"), error=throughput),
    Class(
        name="speculation, TPOT", of=lambda one: one.run.speculates and one.run.counts, error=_latency("tpot"),
    ),
)  # fmt: skip


def of_class(pairs: Iterable[ServingPair], one: Class) -> list[tuple[ServingPair, float]]:
    """Pairs of a class that were predicted, with their errors."""
    found = ((pair, one.error(pair)) for pair in pairs if pair.answer.status == PREDICTED and one.of(pair))
    return [(pair, error) for pair, error in found if error is not None]


def figures_of(errors: Sequence[tuple[ServingPair, float]]) -> dict[str, Any]:
    """n, families, mean, median and 90th percentile of the sizes, bias, and the mean over families of each one's mean."""
    if not errors:
        return {
            "n": 0,
            "families": 0,
            **dict.fromkeys(("mean_abs", "median_abs", "p90_abs", "bias", "mean_of_families")),
        }
    values = np.array([error for _, error in errors])
    families = by([pair for pair, _ in errors], lambda pair: pair.run.family, [abs(error) for _, error in errors])
    return {
        "n": len(values), "families": len(families), "mean_abs": float(np.abs(values).mean()),
        "median_abs": float(np.median(np.abs(values))), "p90_abs": float(np.percentile(np.abs(values), 90)),
        "bias": float(values.mean()), "mean_of_families": float(np.mean([np.mean(one) for one in families.values()])),
    }  # fmt: skip


def by(pairs: Sequence[ServingPair], key: Callable[[ServingPair], Any], values: Sequence[Any]) -> dict[Any, list[Any]]:
    """Values by a key of their pairs."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for pair, value in zip(pairs, values, strict=True):
        groups[key(pair)].append(value)
    return groups


def coverage(pairs: Sequence[ServingPair]) -> dict[str, Any]:
    """Rows whose configuration is stated, how many have an answer, and how many of those that ran are said not to fit."""
    stated = [pair for pair in pairs if pair.run.stated]
    answered = [pair for pair in stated if pair.answer.quantities]
    refused = [pair for pair in pairs if pair.run.counts and pair.answer.status == DOES_NOT_FIT]
    counted = [pair for pair in pairs if pair.run.counts]
    return {
        "rows": len(pairs), "counted": len(counted), "stated": len(stated),
        "predicted": sum(pair.answer.status == PREDICTED for pair in pairs),
        "answered_of_stated": len(answered) / len(stated) if stated else None,
        "refused_for_memory": len(refused) / len(counted) if counted else None,
    }  # fmt: skip
