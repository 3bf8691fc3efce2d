"""Error bars from residuals, and the proof that they hold: every source left out in turn.

A bar is a pair of quantiles of measured / predicted over runs of one class, each source with the same total weight, as
what a user will run is another source. With few sources the outermost residual of n of them is passed by the next with
chance 1 / (n + 1) (exchangeability, as in conformal prediction): the quantile asked for is raised accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.error_bars import KEYS, QUANTITIES, ErrorBar, choose
from planner.questions.accuracy.prediction import Pair, grouped

COVERAGE = 0.9
"""Part of the runs that a bar shall hold."""
FEWEST, SOURCES = 2, 4
"""Sources that a class needs to have a bar at all, and to have one that is narrower than that of the class around it."""
LEVELS: tuple[tuple[str, ...], ...] = (
    ("code_base", "arch", "kind"),
    ("code_base", "kind"),
    ("arch", "kind"),
    ("kind",),
    (),
)
"""Restrictions of the classes, the most specific first."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One measured value against its prediction."""

    source: str
    code_base: str
    arch: str
    kind: str
    value: float
    """ln(measured / predicted)."""


def residuals(pairs: Sequence[Pair], quantity: str) -> list[Residual]:
    """Residuals of all predicted runs that were measured and that their source does not call broken."""
    found = []
    for pair in pairs:
        run = pair.run
        error = pair.time_error if quantity == "step_time" else pair.memory_error
        if error is None or not run.representative or run.cluster is None or run.trainer is None:
            continue
        found.append(
            Residual(
                source=run.source, code_base=run.trainer.code_base, arch=run.cluster.hardware.arch, kind=run.kind,
                value=-float(np.log1p(error)),
            )
        )  # fmt: skip
    return found


def build(found: Sequence[Residual], widen: float = 1.0) -> tuple[ErrorBar, ...]:
    """Bars of every class, the most specific first; the last is that of all runs.

    A class of fewer than SOURCES sources says too little to promise less than the class around it does: its bar is
    never narrower than that one. ``widen`` stretches all bars in the logarithm.
    """
    bars: list[ErrorBar] = []
    for level in reversed(LEVELS):
        for key, members in grouped(found, itemgetter_of(level)).items():
            names = dict(zip(level, key, strict=True))
            sources = len({one.source for one in members})
            low, high = _range(members, widen)
            if sources < SOURCES and level:
                around = choose(tuple(bars), *(names.get(name, "") for name in KEYS))
                low, high = min(low, around.low), max(high, around.high)
            if sources >= FEWEST or not level:
                bars.insert(0, ErrorBar(low=low, high=high, runs=len(members), sources=sources, **names))
    return tuple(sorted(bars, key=lambda bar: LEVELS.index(tuple(key for key in KEYS if getattr(bar, key)))))


def itemgetter_of(level: tuple[str, ...]) -> Callable[[Residual], tuple[str, ...]]:
    """Reads the restrictions of a level off a residual."""
    return lambda one: tuple(getattr(one, name) for name in level)


def _range(members: Sequence[Residual], widen: float) -> tuple[float, float]:
    by_source = [np.array([one.value for one in rows]) for rows in grouped(members, lambda one: one.source).values()]
    inner = [np.clip(rows, *np.quantile(rows, ((1.0 - COVERAGE) / 2.0, (1.0 + COVERAGE) / 2.0))) for rows in by_source]
    values = np.concatenate(inner)
    weights = np.concatenate([np.full(len(rows), 1.0 / len(rows)) for rows in inner])
    tail = max(0.0, (1.0 - COVERAGE) / 2.0 - 0.5 / (len(by_source) + 1))
    low, high = quantile(values, weights, tail), quantile(values, weights, 1.0 - tail)
    return float(np.exp(widen * min(low, 0.0))), float(np.exp(widen * max(high, 0.0)))


def quantile(values: Floats, weights: Floats, share: float) -> float:
    """Weighted quantile: the value at which ``share`` of the weight is reached, interpolated between values."""
    order = np.argsort(values)
    weights = weights[order]
    place = (np.cumsum(weights) - 0.5 * weights) / np.sum(weights)
    return float(np.interp(share, place, values[order]))


@dataclass(frozen=True, kw_only=True)
class Held:
    """One residual and the bar of the other sources, before any stretch."""

    residual: Residual
    bar: ErrorBar

    @property
    def needed(self) -> float:
        """The stretch of the bar's logarithm that just holds the residual; infinite where the bar has no width there."""
        side = float(np.log(self.bar.high if self.residual.value > 0 else self.bar.low))
        return 0.0 if self.residual.value == 0 else self.residual.value / side if side else float("inf")


def held_back(found: Sequence[Residual], unseen: Sequence[Residual] | None = None) -> list[Held]:
    """Every source left out in turn: each residual with the bar made from all other sources.

    ``unseen`` are the residuals of the same runs when no constant was calibrated on their own source (default: the same).
    """
    rows = []
    for source, members in grouped(found if unseen is None else unseen, lambda one: one.source).items():
        bars = build([one for one in found if one.source != source])
        rows += [Held(residual=one, bar=choose(bars, one.code_base, one.arch, one.kind)) for one in members]
    return rows


def coverage(rows: Sequence[Held], widen: float) -> dict[str, Any]:
    """How many held-back runs the bars hold when they are stretched by ``widen``.

    ``runs`` is the share of all runs, ``sources`` the mean over sources of each one's share; ``by_kind`` and ``by_source``
    are shares of runs, and ``width`` the median of high / low.
    """

    def share(some: Sequence[Held]) -> float:
        return float(np.mean([row.needed <= widen for row in some]))

    by_source = {name: share(some) for name, some in grouped(rows, lambda row: row.residual.source).items()}
    return {
        "n": len(rows),
        "runs": share(rows),
        "sources": float(np.mean(list(by_source.values()))),
        "width": float(np.median([(row.bar.high / row.bar.low) ** widen for row in rows])),
        "widen": widen,
        "by_kind": {name: share(some) for name, some in grouped(rows, lambda row: row.residual.kind).items()},
        "by_source": by_source,
    }


def calibrated(rows: Sequence[Held]) -> dict[str, Any]:
    """The coverage with the smallest stretch, in steps of 0.05 from 1, that holds COVERAGE of runs and over sources."""
    for step in range(61):
        found = coverage(rows, round(1.0 + 0.05 * step, 2))
        if min(found["runs"], found["sources"]) >= COVERAGE:
            break
    return found


def stored_errors(pairs: Sequence[Pair], found: Sequence[Residual]) -> list[tuple[dict[str, str], list[float]]]:
    """Residuals as errors, predicted / measured - 1, by source and class: what ``profiles/residuals.yaml`` stores."""
    where = {pair.run.source: pair.run.where for pair in pairs}
    groups = grouped(found, lambda one: (one.source, one.code_base, one.arch, one.kind))
    return [
        (
            {"source": source, "where": where[source], "code_base": code_base, "arch": arch, "kind": kind},
            [float(np.expm1(-one.value)) for one in members],
        )
        for (source, code_base, arch, kind), members in sorted(groups.items())
    ]


def to_dict(tables: dict[str, tuple[ErrorBar, ...]]) -> dict[str, Any]:
    """Plain data in the form of ``profiles/error_bars.yaml``."""

    def entry(bar: ErrorBar) -> dict[str, Any]:
        names = {key: getattr(bar, key) for key in KEYS if getattr(bar, key)}
        return {**names, "low": round(bar.low, 3), "high": round(bar.high, 3), "runs": bar.runs, "sources": bar.sources}

    return {quantity: [entry(bar) for bar in tables[quantity]] for quantity in QUANTITIES}


def errors_to_dict(rows: Mapping[str, Sequence[tuple[Mapping[str, str], Sequence[float]]]]) -> dict[str, Any]:
    """Plain data in the form of ``profiles/residuals.yaml``: ``stored_errors`` by quantity, in percent with one decimal."""
    return {
        quantity: [
            {**entry, "percent": " ".join(f"{100 * error:.1f}" for error in sorted(errors))} for entry, errors in rows[quantity]
        ]
        for quantity in QUANTITIES
    }  # fmt: skip
