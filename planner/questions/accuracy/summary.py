"""Predicted against measured: every run priced, the errors summed up by source, family and kind.

An error is predicted / measured - 1: positive means predicted too slow, or too large.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from planner import units
from planner.error_bars import KINDS, error_bar
from planner.questions.accuracy.bounds import Bound, bounds
from planner.questions.accuracy.prediction import Pair, grouped
from planner.questions.accuracy.ranking import ranking
from planner.runs import Run
from planner.search import SAFE

HOPELESS = 0.95
"""Chance of running out of memory from which a layout is called impossible."""
DRAWS = 400
"""Resamplings: the ends of a 90 % interval then rest on 20 draws each."""
INSIDE = 0.9
"""Share of the resamplings inside of the interval."""


def summarise(pairs: Sequence[Pair], *, bounded: Sequence[Bound] = ()) -> dict[str, Any]:
    """Coverage, errors of step time and memory, out-of-memory verdicts, and ranking inside sweeps, as plain data.

    ``kinds`` holds the figures by kind of user; ``bounds`` those of the given bounds, of which ``bounds.BOUNDS`` are about the runs
    that come with planner.
    ``overall`` counts runs whose layout is stated and that their source does not call broken; families and sources all that are
    predicted. ``rule`` holds the errors of the one-line rule, ``alike`` what no model could tell apart.
    """
    good = [pair for pair in pairs if pair.counts]
    families = grouped(pairs, lambda pair: pair.run.family)
    summary = {
        "coverage": _coverage(pairs),
        "kinds": {kind: of_kind(group) for kind, group in _by_kind(good).items()},
        "all_kinds": of_kind(good),
        "overall": statistics(good, "time_error"),
        "all_predicted": statistics(pairs, "time_error"),
        "mean_of_sources": mean_of_sources(good, "time_error"),
        "families": _by(pairs, lambda pair: pair.run.family, "time_error"),
        "sources": _by(pairs, lambda pair: pair.run.source, "time_error"),
        "rule": {
            "overall": statistics(good, "rule_error"),
            "mean_of_sources": mean_of_sources(good, "rule_error"),
            "families": _by(pairs, lambda pair: pair.run.family, "rule_error"),
        },
        "alike": {name: alike(group) for name, group in families.items()},
        "memory": _by(good, lambda pair: pair.run.measured.memory_kind, "memory_error"),
        "memory_by_source": _by(pairs, lambda pair: pair.run.source, "memory_error"),
        "out_of_memory": {
            "overall": _confusion(good),
            "families": {name: one for name, group in families.items() if (one := _confusion(group))["ran_out"]},
            "reliability": reliability(good),
        },
        "ranking": ranking(pairs),
    }  # fmt: skip
    return {**summary, "bounds": bounds(summary, bounded)} if bounded else summary


def _by_kind(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Pairs of each kind of user, in the order of KINDS."""
    found = grouped((pair for pair in pairs if pair.run.kind), lambda pair: pair.run.user)
    return {kind: found[kind] for kind in KINDS if kind in found}


def of_kind(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Errors of step time and memory, each as ``statistics`` with sources and mean over sources, and verdicts on memory."""
    found: dict[str, Any] = {"verdicts": _confusion(pairs)}
    for name, which in (("step_time", "time_error"), ("memory", "memory_error")):
        sources = {pair.run.source for pair in pairs if getattr(pair, which) is not None}
        more = {"sources": len(sources), "mean_of_sources": mean_of_sources(pairs, which)}
        found[name] = {**statistics(pairs, which), **more}
    return found


def mean_of_sources(pairs: Iterable[Pair], which: str) -> float | None:
    """Mean over sources of each one's median error, so that every source weighs the same; None without any."""
    medians = [stats["median_abs"] for stats in _by(pairs, lambda pair: pair.run.source, which).values()]
    return float(np.mean(medians)) if medians else None


def alike(pairs: Iterable[Pair]) -> dict[str, Any]:
    """The error that is left to the best possible model: runs that state the same and measured different times.

    Runs with the same model, batch, hardware, trainer and layout get one prediction from any model that reads what is
    stated; the best one is their median. ``median_abs`` and ``p90_abs`` are over all runs that have such a twin.
    """
    left = []
    for twins in grouped((p for p in pairs if p.time_error is not None), _stated).values():
        measured = np.array([p.run.measured.step_time for p in twins], dtype=float)
        if len(measured) > 1:
            left.append(np.abs(np.median(measured) / measured - 1.0))
    if not left:
        return {"n": 0}
    errors = np.concatenate(left)
    return {"n": len(errors), "median_abs": float(np.median(errors)), "p90_abs": float(np.percentile(errors, 90))}


def _stated(pair: Pair) -> Hashable:
    run = pair.run
    return (str(run.workload), str(run.layout), id(run.trainer), run.cluster and id(run.cluster.hardware))


BINS = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
"""Borders of the chances of running out of memory in the reliability table."""


def reliability(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Stated chance of running out of memory against the share that ran out, per bin of BINS.

    Only sources that publish runs which ran out count: where failures are left out, nothing can be said about them.
    """
    known = [p for p in pairs if p.run.measured.fits is not None and p.predicted.out_of_memory is not None]
    sources = {p.run.source for p in known if not p.run.measured.fits}
    judged = [p for p in known if p.run.source in sources]
    chance = np.array([p.predicted.out_of_memory for p in judged], dtype=float)
    out = np.array([not p.run.measured.fits for p in judged], dtype=bool)
    place = np.clip(np.searchsorted(BINS, chance, side="right") - 1, 0, len(BINS) - 2)
    rows = []
    for number, (low, high) in enumerate(pairwise(BINS)):
        inside = place == number
        share = (float(chance[inside].mean()), float(out[inside].mean())) if inside.any() else (None, None)
        rows.append({"from": low, "to": high, "n": int(inside.sum()), "stated": share[0], "ran_out": share[1]})
    return rows


def _coverage(pairs: Sequence[Pair]) -> dict[str, Any]:
    stated = [pair for pair in pairs if pair.run.stated]
    done = [pair for pair in stated if not pair.predicted.refused]
    reasons = Counter(pair.predicted.refused for pair in pairs if pair.predicted.refused)
    return {
        "rows": len(pairs),
        "stated": len(stated),
        "predicted": sum(not pair.predicted.refused for pair in pairs),
        "predicted_of_stated": len(done) / len(stated) if stated else None,
        "unsupported": dict(reasons.most_common()),
        "set_aside": dict(Counter(pair.run.set_aside for pair in pairs if pair.run.set_aside).most_common()),
    }


def _by(pairs: Iterable[Pair], key: Callable[[Pair], str], which: str) -> dict[str, dict[str, Any]]:
    """Statistics of each group that has any error of that kind, groups sorted by name."""
    with_error = (pair for pair in pairs if getattr(pair, which) is not None)
    return {name: statistics(group, which) for name, group in grouped(with_error, key).items()}


def statistics(pairs: Iterable[Pair], which: str) -> dict[str, Any]:
    """Number of errors, and median, mean and spread of them; fractions, None when there are none."""
    kept = [(pair, error) for pair in pairs if (error := getattr(pair, which)) is not None]
    if not kept:
        return {"n": 0}
    errors = np.array([error for _, error in kept])
    size = np.abs(errors)
    return {
        "n": len(kept),
        "assumed": sum(not pair.run.stated for pair, _ in kept),
        "median_abs": float(np.median(size)),
        "mean_abs": float(np.mean(size)),
        "median_signed": float(np.median(errors)),
        "bias_interval": bias_interval(list(errors), [kind_of(pair) for pair, _ in kept]),
        "p90_abs": float(np.percentile(size, 90)),
        "within_10": float(np.mean(size <= 0.10)),
    }


def kind_of(pair: Pair) -> Hashable:
    """Runs that share most of what could be wrong about them: a source, a model, a GPU, a precision."""
    workload, cluster = pair.run.workload, pair.run.cluster
    if workload is None or cluster is None:
        return (pair.run.source, pair.run.id)
    model = workload.model
    return (pair.run.source, model.num_layers, model.hidden_size, cluster.hardware.name, workload.precision)


def bias_interval(errors: Sequence[float], kinds: Sequence[Hashable]) -> tuple[float, float] | None:
    """Ends of the interval that holds INSIDE of the medians when kinds of run are drawn again, with replacement.

    The cluster bootstrap [Field and Welsh 2007, J. R. Stat. Soc. B 69(3)]: rows of one model on one machine are wrong
    together, so that whole kinds are drawn, not rows. Draws are the same every time. None with fewer than three kinds.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    place, count = np.array([numbers[kind] for kind in kinds], dtype=int), len(numbers)
    if count < 3:
        return None
    order = np.argsort(errors, kind="stable")
    values, place = np.asarray(errors, dtype=float)[order], place[order]
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), size=DRAWS)
    weights = np.cumsum(drawn[:, place], axis=1)
    total = weights[:, -1:]
    low, high = (values[np.argmax(2 * weights >= total + more, axis=1)] for more in (0, 1))
    ends = np.quantile((low + high) / 2.0, [(1.0 - INSIDE) / 2.0, (1.0 + INSIDE) / 2.0])
    return float(ends[0]), float(ends[1])


def _confusion(pairs: Iterable[Pair]) -> dict[str, Any]:
    """Verdicts on memory: what was called safe but ran out, and what was called impossible but ran."""
    judged = [p for p in pairs if p.run.measured.fits is not None and p.predicted.out_of_memory is not None]
    ran = np.array([p.run.measured.fits for p in judged], dtype=bool)
    chance = np.array([p.predicted.out_of_memory for p in judged], dtype=float)
    return {
        "ran": int(ran.sum()),
        "ran_out": int((~ran).sum()),
        "called_safe_but_ran_out": int((~ran & (chance <= SAFE)).sum()),
        "called_impossible_but_ran": int((ran & (chance >= HOPELESS)).sum()),
        "uncertain": int(((chance > SAFE) & (chance < HOPELESS)).sum()),
        "right": float(np.mean((chance < 0.5) == ran)) if len(judged) else None,
    }


def report_of(pairs: Sequence[Pair], *, bounded: Sequence[Bound] = ()) -> dict[str, Any]:
    """Runs, each with measured and predicted values, and their summary.

    ``{"runs": [{source, id, user, status, reason, step_time_s, memory_gib, fits}], "summary": {...}}``; ``status`` is
    'predicted' or 'unsupported'. ``reason`` says why not; of a predicted run it lists what was assumed. ``range`` is the
    interval of nine of ten runs, ``fits`` holds the chance that the run fits. Plain data: what ``--json`` prints.
    """
    return {"runs": [_entry(pair) for pair in pairs], "summary": summarise(pairs, bounded=bounded)}


def _entry(pair: Pair) -> dict[str, Any]:
    """One run as plain data."""
    run, predicted = pair.run, pair.predicted
    measured, chance = run.measured, predicted.out_of_memory
    assumed = "; ".join(run.assumptions)

    def gib(value: float | None) -> float | None:
        return None if value is None else value / units.GIB

    peak = gib(predicted.memory)
    return {
        "source": run.source, "id": run.id, "user": run.user, "status": "unsupported" if predicted.refused else "predicted",
        "reason": predicted.refused or (f"assumed: {assumed}" if assumed else ""),
        "step_time_s": {"measured": measured.step_time, "predicted": predicted.step_time,
                        "range": _range(run, "step_time", predicted.step_time)},
        "memory_gib": {"measured": gib(measured.memory), "predicted": peak, "range": _range(run, "memory", peak),
                       "kind": measured.memory_kind or "allocated"},
        "fits": {"measured": measured.fits, "predicted": None if chance is None else chance < 0.5,
                 "probability": None if chance is None else 1.0 - chance},
    }  # fmt: skip


def _range(run: Run, quantity: str, predicted: float | None) -> list[float] | None:
    """The interval of nine of ten runs; None where nothing was predicted."""
    if predicted is None or run.cluster is None or run.trainer is None or run.kind is None:
        return None
    return list(error_bar(quantity, run.trainer, run.cluster.hardware, run.kind).interval(predicted))
