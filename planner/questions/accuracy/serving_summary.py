"""Serving runs predicted against measured: what is promised, errors by class and family, coverage; and every run as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from planner.questions.accuracy.accuracy_page import Table, bounds_table, percent, table
from planner.questions.accuracy.bounds import Bound, bounds
from planner.questions.accuracy.serving_errors import CLASSES, ServingPair, by, coverage, figures_of, of_class
from planner.serving.intervals import held, range_of
from planner.serving.runs.predicted_runs import REFUSED, UNSUPPORTED
from planner.serving.runs.serving_run import ServingRun

FAMILIES = 12
"""Worst families that the tables show."""


def _of(name: str, figure: str) -> Any:
    return lambda summary: summary["classes"][name][figure]


def _covers(key: str) -> Any:
    return lambda summary: summary["coverage"][key]


def _held(_: Mapping[str, Any]) -> float:
    shares = [share for base, share in held().items() if base in ("ttft", "tpot", "latency", "throughput")]
    return sum(shares) / len(shares)


PROMISED = (
    Bound(name="TPOT, dense, mean", most=0.06, now=_of("TPOT, closed loop, dense", "mean_abs")),
    Bound(name="TPOT, dense, median", most=0.04, now=_of("TPOT, closed loop, dense", "median_abs")),
    Bound(name="TPOT, experts, mean", most=0.10, now=_of("TPOT, closed loop, experts", "mean_abs")),
    Bound(name="TPOT, experts, median", most=0.07, now=_of("TPOT, closed loop, experts", "median_abs")),
    Bound(name="TTFT below saturation, mean", most=0.20, now=_of("TTFT below saturation", "mean_abs")),
    Bound(name="TTFT below saturation, median", most=0.12, now=_of("TTFT below saturation", "median_abs")),
    Bound(name="offline throughput, dense, median", most=0.06, now=_of("offline throughput, dense", "median_abs")),
    Bound(name="offline throughput, experts, median", most=0.10, now=_of("offline throughput, experts", "median_abs")),
    Bound(name="disaggregated, TPOT, mean", most=0.15, now=_of("disaggregated, TPOT", "mean_abs")),
    Bound(name="disaggregated, throughput, mean", most=0.15, now=_of("disaggregated, throughput", "mean_abs")),
    Bound(name="answered of the runs that state their configuration", least=0.97, now=_covers("answered_of_stated")),
    Bound(name="ran, refused for memory", most=0.03, now=_covers("refused_for_memory")),
    Bound(name="interval, families left out", least=0.88, most=0.97, now=_held),
)
"""What the project promises of serving, on rows whose configuration is known."""


def summarise_serving(pairs: Sequence[ServingPair]) -> dict[str, Any]:
    """Bounds, figures of every class, of its families, and coverage, as plain data."""
    classes, families = {}, {}
    for one in CLASSES:
        errors = of_class(pairs, one)
        classes[one.name] = figures_of(errors)
        groups = by([pair for pair, _ in errors], lambda pair: pair.run.family, errors)
        families[one.name] = {name: figures_of(groups[name]) for name in sorted(groups)}
    reasons = Counter(pair.answer.reason for pair in pairs if pair.answer.status in (REFUSED, UNSUPPORTED))
    found = {
        "classes": classes, "families": families,
        "coverage": {**coverage(pairs), "unsupported": dict(reasons.most_common())},
        "contradicted": sum(bool(pair.run.law or pair.run.impossible) for pair in pairs),
    }  # fmt: skip
    return {**found, "bounds": bounds(found, PROMISED)}


def serving_tables(summary: Mapping[str, Any]) -> list[Table]:
    """What is promised, classes, the worst families of those that a bound speaks of, and coverage."""
    classes = [{"name": name, **one} for name, one in summary["classes"].items() if one["n"]]
    worst = [
        {"class": name, "name": family, **one}
        for name, groups in summary["families"].items()
        for family, one in groups.items()
        if one["n"] > 1 and name in _PROMISED_CLASSES
    ]
    worst = sorted(worst, key=lambda one: -one["mean_abs"])[:FAMILIES]
    promised = bounds_table(summary["bounds"])
    return [
        Table(promised.headings, promised.rows, "What is promised of serving"), table("serving_classes", classes),
        table("serving_families", worst), _coverage(summary),
    ]  # fmt: skip


_PROMISED_CLASSES = tuple(one.name for one in CLASSES[:7])
"""Classes that a bound speaks of."""


def _coverage(summary: Mapping[str, Any]) -> Table:
    found = summary["coverage"]
    rows = [
        ("runs", str(found["rows"])),
        ("that count: known configuration, no copy", str(found["counted"])),
        ("that state all of their configuration", str(found["stated"])),
        ("answered of those", percent(found["answered_of_stated"])),
        ("ran, refused for memory", percent(found["refused_for_memory"])),
        ("contradict Little's law or physics", str(summary["contradicted"])),
    ]
    rows += [(f"not supported: {reason}", str(number)) for reason, number in list(found["unsupported"].items())[:8]]
    return Table(("", "runs"), tuple(rows), "Coverage of serving runs")


def serving_entry(pair: ServingPair) -> dict[str, Any]:
    """One run as plain data: ``{source, id, status, reason, counts, quantities: {name: {measured, predicted, range}}}``.

    ``status``: predicted, 'does not fit' (priced as if it did), refused or unsupported; ``reason`` says why, or what was assumed.
    """
    run, answer = pair.run, pair.answer
    quantities = {
        name: {"measured": run.measured[name], "predicted": value, "range": list(range_of(name, pair.kind, value))}
        for name, value in answer.quantities.items()
    }
    said = [answer.reason, run.impossible, run.law]
    said += [f"assumed: {'; '.join(_assumed(run, pair))}"] if run.assumed and answer.quantities else []
    return {
        "source": run.source, "id": run.id, "status": answer.status, "reason": "; ".join(one for one in said if one),
        "counts": run.counts, "quantities": quantities,
    }  # fmt: skip


def _assumed(run: ServingRun, pair: ServingPair) -> list[str]:
    """What the row does not say, with the layout that was taken of several."""
    layout = pair.answer.layout
    taken = "" if layout is None else " x ".join(f"{key} {value}" for key, value in vars(layout).items() if value > 1)
    return [f"{one}: {taken or 'one GPU'}" if "best of" in one else one for one in run.assumed]


def worst_serving(pairs: Sequence[ServingPair], number: int) -> Table:
    """The worst rows of the classes that a bound speaks of."""
    found = [(abs(error), error, one.name, pair) for one in CLASSES[:7] for pair, error in of_class(pairs, one)]
    found.sort(key=lambda one: -one[0])
    lines = [
        {"class": name, "id": f"{pair.run.source} {pair.run.id}", "error": error}
        for _, error, name, pair in found[:number]
    ]
    return table("serving_worst", lines)
