"""Predicted against measured: every run priced, the errors summed up by source, family and kind.

An error is predicted / measured - 1: positive means predicted too slow, or too large. Rows that share model, sequence
length, precision, trainer and hardware are priced in one call of the cost model.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner import units
from planner.arrays import Floats
from planner.cost.step import Estimate, estimate
from planner.errors import PlannerError
from planner.layout import Layout
from planner.runs import Run, read_runs

SAFE, HOPELESS = 0.05, 0.95
"""Chance of running out of memory up to which a layout is called safe, and from which it is called impossible."""
RELIABILITY = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
"""Bins of the stated chance in which it is compared with the share that ran out."""
SWEEP = 5
"""Timed layouts that a sweep needs to say anything about ranking."""
MEMORY = {"allocated": "memory_allocated", "reserved": "memory_reserved", "device": "memory_peak"}
"""Which column of the estimate a measured peak is compared with."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the cost model says about one run; None where it could not be priced."""

    step_time: float | None = None
    """Seconds."""
    memory: float | None = None
    """Peak of the kind that was measured (allocated when none was), bytes."""
    out_of_memory: float | None = None
    """Chance of running out of memory, 0 to 1."""
    refused: str = ""
    """Why the cost model could not price it; '' = it could."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for people: plain text, the first row of ``rows`` below ``headings``."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def accuracy(paths: Sequence[str | Path] | None = None) -> dict[str, Any]:
    """Runs of the paths (default: the shipped ones), each with measured and predicted values, and their summary.

    ``{"runs": [{source, id, status, reason, step_time_s, memory_gib, fits}], "summary": {...}}``; ``status`` is
    'predicted' or 'unsupported'. ``reason`` says why not; of a predicted run it lists what was assumed. ``fits``
    holds the chance that the run fits. Plain data: what ``--json`` prints. Raises PlannerError for broken files.
    """
    runs = read_runs(paths)
    predicted = predict(runs)
    return {"runs": [_entry(r, p) for r, p in zip(runs, predicted, strict=True)], "summary": summarise(runs, predicted)}


# ------------------------------------------------------------------------------------------------ prediction


def predict(runs: Sequence[Run]) -> list[Predicted]:
    """The cost model's answer to every run, in their order; a run that is not supported gets an empty answer."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if not run.unsupported:
            groups[_group(run)].append(index)
    answers = [Predicted(refused=run.unsupported) for run in runs]
    for members in groups.values():
        for index, answer in zip(members, _price([runs[i] for i in members]), strict=True):
            answers[index] = answer
    return answers


def _group(run: Run) -> tuple[object, ...]:
    """What one call of the cost model shares; profiles, trainers and models are built once each: identity will do."""
    workload, cluster = run.workload, run.cluster
    assert workload is not None and cluster is not None
    shared = (workload.sequence_length, workload.precision, workload.optimizer, workload.lora_rank)
    return (id(workload.model), id(cluster.hardware), id(run.trainer), *shared)


def _price(runs: list[Run]) -> list[Predicted]:
    """Runs of one group in one call; when the cost model refuses the group, every run carries the reason."""
    first = runs[0]
    assert first.workload is not None and first.cluster is not None and first.trainer is not None
    layouts = [run.layout for run in runs if run.layout is not None]
    try:
        found = estimate(first.workload, first.cluster, first.trainer, Layout.stack(layouts))
    except PlannerError as error:
        return [Predicted(refused=str(error)) for _ in runs]
    columns = {kind: np.asarray(getattr(found, name)) for kind, name in MEMORY.items()}
    return [_one(found, columns, index, run) for index, run in enumerate(runs)]


def _one(found: Estimate, columns: dict[str, Floats], index: int, run: Run) -> Predicted:
    step, chance = float(found.step_time[index]), float(found.out_of_memory_probability[index])
    kind = run.measured.memory_kind or "allocated"
    first = run.measured.first_stage and kind == "reserved"
    memory = float((found.first_reserved if first else columns[kind])[index])
    if not all(map(np.isfinite, (step, memory, chance))) or step <= 0 or memory <= 0:
        return Predicted(refused="the cost model has no finite answer for this layout")
    return Predicted(step_time=step, memory=memory, out_of_memory=chance)


def _entry(run: Run, predicted: Predicted) -> dict[str, Any]:
    """One run as plain data."""
    measured, chance = run.measured, predicted.out_of_memory
    assumed = "; ".join(run.assumptions)

    def gib(value: float | None) -> float | None:
        return None if value is None else value / units.GIB

    return {
        "source": run.source, "id": run.id, "status": "unsupported" if predicted.refused else "predicted",
        "reason": predicted.refused or (f"assumed: {assumed}" if assumed else ""),
        "step_time_s": {"measured": measured.step_time, "predicted": predicted.step_time},
        "memory_gib": {"measured": gib(measured.memory), "predicted": gib(predicted.memory),
                       "kind": measured.memory_kind or "allocated"},
        "fits": {"measured": measured.fits, "predicted": None if chance is None else chance < 0.5,
                 "probability": None if chance is None else 1.0 - chance},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ summary


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A run with its answer."""

    run: Run
    predicted: Predicted

    @property
    def time_error(self) -> float | None:
        return _error(self.predicted.step_time, self.run.measured.step_time)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted.memory, self.run.measured.memory)

    @property
    def counts(self) -> bool:
        """In the overall figures: nothing of the layout was assumed and the source does not call the run broken."""
        return self.run.stated and self.run.representative


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def summarise(runs: Sequence[Run], predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Coverage, errors of step time and memory, out-of-memory verdicts, and ranking inside sweeps, as plain data.

    ``overall`` counts runs whose layout is stated and that their source does not call broken; families and sources
    count all predicted runs. ``mean_of_sources`` is the mean over sources of each source's mean absolute error.
    """
    pairs = [_Pair(run=run, predicted=p) for run, p in zip(runs, predicted, strict=True)]
    good = [pair for pair in pairs if pair.counts]
    sources = _by(pairs, lambda pair: pair.run.source, "time_error")
    means = [stats["mean_abs"] for stats in _by(good, lambda pair: pair.run.source, "time_error").values()]
    return {
        "coverage": _coverage(pairs),
        "overall": _statistics(good, "time_error"),
        "all_predicted": _statistics(pairs, "time_error"),
        "mean_of_sources": float(np.mean(means)) if means else None,
        "families": _by(pairs, lambda pair: pair.run.family, "time_error"),
        "sources": sources,
        "memory": _by(good, lambda pair: pair.run.measured.memory_kind, "memory_error"),
        "memory_by_source": _by(pairs, lambda pair: pair.run.source, "memory_error"),
        "out_of_memory": {"overall": _confusion(good), "families": _confusions(pairs)},
        "ranking": _ranking(pairs),
    }


def _coverage(pairs: list[_Pair]) -> dict[str, Any]:
    stated = [pair for pair in pairs if pair.run.stated]
    done = [pair for pair in stated if not pair.predicted.refused]
    reasons = Counter(pair.predicted.refused for pair in pairs if pair.predicted.refused)
    return {
        "rows": len(pairs),
        "stated": len(stated),
        "predicted": sum(not pair.predicted.refused for pair in pairs),
        "predicted_of_stated": len(done) / len(stated) if stated else None,
        "unsupported": dict(reasons.most_common()),
    }


def _by(pairs: Iterable[_Pair], key: Callable[[_Pair], str], which: str) -> dict[str, dict[str, Any]]:
    """Statistics of each group that has any error of that kind, groups sorted by name."""
    groups: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        if getattr(pair, which) is not None:
            groups[key(pair)].append(pair)
    return {name: _statistics(groups[name], which) for name in sorted(groups)}


def _statistics(pairs: list[_Pair], which: str) -> dict[str, Any]:
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
        "p90_abs": float(np.percentile(size, 90)),
        "within_10": float(np.mean(size <= 0.10)),
    }


def _confusion(pairs: list[_Pair]) -> dict[str, Any]:
    """Verdicts on memory: what was called safe but ran out, and what was called impossible but ran."""
    judged = [p for p in pairs if p.run.measured.fits is not None and p.predicted.out_of_memory is not None]
    ran = np.array([bool(p.run.measured.fits) for p in judged])
    chance = np.array([p.predicted.out_of_memory or 0.0 for p in judged])
    out = ~ran if len(judged) else ran
    return {
        "ran": int(ran.sum()),
        "ran_out": int(out.sum()),
        "called_safe_but_ran_out": int((out & (chance <= SAFE)).sum()) if len(judged) else 0,
        "called_impossible_but_ran": int((ran & (chance >= HOPELESS)).sum()) if len(judged) else 0,
        "uncertain": int(((chance > SAFE) & (chance < HOPELESS)).sum()) if len(judged) else 0,
        "right": float(np.mean((chance < 0.5) == ran)) if len(judged) else None,
        "reliability": _reliability(judged),
    }


def _reliability(judged: list[_Pair]) -> list[dict[str, Any]]:
    """Of the layouts given a chance within each bin: how many, and how many of them ran out of memory.

    Only sources that publish runs which ran out count: where failures are left out, nothing can be said about them.
    """
    sources = {p.run.source for p in judged if not p.run.measured.fits}
    told = [p for p in judged if p.run.source in sources]
    chances = np.array([p.predicted.out_of_memory or 0.0 for p in told], dtype=float)
    out = np.array([not p.run.measured.fits for p in told], dtype=bool)
    bins = np.searchsorted(RELIABILITY[1:-1], chances, side="right")
    return [
        {"from": low, "to": high, "n": int((bins == k).sum()), "ran_out": int((out & (bins == k)).sum())}
        for k, (low, high) in enumerate(itertools.pairwise(RELIABILITY))
    ]


def _confusions(pairs: list[_Pair]) -> dict[str, Any]:
    """Verdicts by family, of families in which some run ran out of memory."""
    groups: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.run.family].append(pair)
    found = {name: _confusion(groups[name]) for name in sorted(groups)}
    return {name: verdict for name, verdict in found.items() if verdict["ran_out"]}


# ------------------------------------------------------------------------------------------------ ranking


def _ranking(pairs: list[_Pair]) -> dict[str, Any]:
    """How well the planner chooses among the layouts of one job: sweeps of one source with the same work on the same GPUs.

    A sweep counts with ``SWEEP`` timed layouts; what ran out of memory is a candidate too. The pick is the layout with the
    shortest predicted time among those whose chance of running out is at most SAFE (of all, the least likely to run out,
    where there is none). Regret: its measured time over the best, minus 1; None when it ran out. Kendall's tau-b of the
    timed layouts: 1 = same order, 0 = no relation. ``overall`` leaves out sweeps of runs that their source calls broken.
    """
    timed: dict[tuple[object, ...], list[_Pair]] = defaultdict(list)
    ran_out: dict[tuple[object, ...], list[_Pair]] = defaultdict(list)
    for pair in pairs:
        workload, cluster = pair.run.workload, pair.run.cluster
        if pair.predicted.step_time is None or workload is None or cluster is None:
            continue
        model = (workload.model.name, workload.model.num_layers, workload.model.num_kv_heads, workload.precision)
        batch = (cluster.num_gpus, workload.global_batch_size, workload.sequence_length)
        job = (pair.run.source, pair.run.representative, *model, *batch)
        if pair.time_error is not None:
            timed[(pair.run.family, *job)].append(pair)
        elif pair.run.measured.fits is False:  # the network of a job that ran out is not in its family
            ran_out[job].append(pair)
    sweeps = [
        _sweep(key, members, ran_out[key[1:]])
        for key, members in sorted(timed.items(), key=lambda item: str(item[0]))
        if len({p.run.layout for p in members}) >= SWEEP
    ]
    families = {str(s["family"]) for s in sweeps}
    return {
        "overall": _ranking_statistics([s for s in sweeps if s["representative"]]),
        "families": {f: _ranking_statistics([s for s in sweeps if s["family"] == f]) for f in sorted(families)},
        "sweeps": sweeps,
    }


def _sweep(key: tuple[object, ...], timed: list[_Pair], ran_out: list[_Pair]) -> dict[str, Any]:
    """One sweep: what the planner would pick of it, and how well it orders the layouts that ran."""
    members = timed + ran_out
    predicted = np.array([p.predicted.step_time for p in timed], dtype=float)
    measured = np.array([p.run.measured.step_time for p in timed], dtype=float)
    chances = [p.predicted.out_of_memory or 0.0 for p in members]
    gate = max(SAFE, min(chances))
    safe = [p for p, chance in zip(members, chances, strict=True) if chance <= gate]
    pick = min(safe, key=lambda p: p.predicted.step_time or 0.0)
    time = pick.run.measured.step_time
    return {
        "source": key[1],
        "family": key[0],
        "representative": key[2],
        "job": " ".join(map(str, key[3:])),
        "n": len(timed),
        "ran_out": len(ran_out),
        "pick": pick.run.id,
        "best": timed[int(np.argmin(measured))].run.id,
        "pick_ran_out": time is None,
        "regret": None if time is None else float(time / measured.min() - 1.0),
        "tau": kendall_tau(predicted, measured),
    }


def _ranking_statistics(sweeps: list[dict[str, Any]]) -> dict[str, Any]:
    regrets = [sweep["regret"] for sweep in sweeps if sweep["regret"] is not None]
    taus = [sweep["tau"] for sweep in sweeps if sweep["tau"] is not None]
    return {
        "sweeps": len(sweeps),
        "best_found": float(np.mean([regret == 0 for regret in regrets])) if regrets else None,
        "picks_that_ran_out": sum(sweep["pick_ran_out"] for sweep in sweeps),
        "mean_regret": float(np.mean(regrets)) if regrets else None,
        "median_regret": float(np.median(regrets)) if regrets else None,
        "p90_regret": float(np.percentile(regrets, 90)) if regrets else None,
        "worst_regret": float(np.max(regrets)) if regrets else None,
        "mean_tau": float(np.mean(taus)) if taus else None,
    }


def kendall_tau(first: Floats, second: Floats) -> float | None:
    """Kendall's rank correlation tau-b: (C - D) / sqrt((pairs - ties_1) (pairs - ties_2)); None if all are tied."""
    a = np.sign(np.subtract.outer(first, first))
    b = np.sign(np.subtract.outer(second, second))
    scale = float(np.sqrt(np.sum(a * a) * np.sum(b * b)))
    return float(np.sum(a * b)) / scale if scale > 0 else None


# ------------------------------------------------------------------------------------------------ tables


def summary_rows(summary: dict[str, Any]) -> list[Table]:
    """The summary of ``accuracy`` as tables of text: coverage, step time, memory, out of memory, ranking."""
    return [
        _coverage_table(summary["coverage"]),
        _error_table("Step time, predicted against measured", summary, "families", "overall"),
        _error_table("Peak memory, predicted against measured", summary, "memory", None),
        _memory_table(summary["out_of_memory"]),
        _reliability_table(summary["out_of_memory"]["overall"]),
        _ranking_table(summary["ranking"]),
    ]


def _percent(value: float | None, signed: bool = False) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _coverage_table(coverage: dict[str, Any]) -> Table:
    rows = [
        ("runs", str(coverage["rows"])),
        ("that state their layout", str(coverage["stated"])),
        ("predicted of those", _percent(coverage["predicted_of_stated"])),
        ("predicted in all", str(coverage["predicted"])),
    ]
    rows += [(f"not supported: {reason}", str(n)) for reason, n in list(coverage["unsupported"].items())[:12]]
    return Table(title="Coverage", headings=("", "runs"), rows=tuple(rows))


def _error_table(title: str, summary: dict[str, Any], groups: str, total: str | None) -> Table:
    lines = dict(summary[groups])
    if total:
        lines["overall"] = summary[total]
    rows = tuple(
        (name, str(s["n"]), _percent(s["median_abs"]), _percent(s["median_signed"], True), _percent(s["p90_abs"]),
         _percent(s["within_10"]))
        for name, s in lines.items() if s["n"]
    )  # fmt: skip
    return Table(title=title, headings=("", "runs", "median error", "bias", "90 % below", "within 10 %"), rows=rows)


def _memory_table(verdicts: dict[str, Any]) -> Table:
    lines = {**verdicts["families"], "overall": verdicts["overall"]}
    rows = tuple(
        (name, str(v["ran"]), str(v["ran_out"]), str(v["called_safe_but_ran_out"]),
         str(v["called_impossible_but_ran"]), str(v["uncertain"]), _percent(v["right"]))
        for name, v in lines.items()
    )  # fmt: skip
    headings = ("", "ran", "ran out", "called safe, ran out", "called impossible, ran", "uncertain", "right")
    return Table(title="Does it fit?", headings=headings, rows=rows)


def _reliability_table(verdict: dict[str, Any]) -> Table:
    rows = tuple(
        (f"{100 * b['from']:.0f} to {100 * b['to']:.0f} %", str(b["n"]), str(b["ran_out"]),
         _percent(b["ran_out"] / b["n"] if b["n"] else None))
        for b in verdict["reliability"]
    )  # fmt: skip
    headings = ("stated chance", "layouts", "ran out", "share")
    return Table(title="Chance of running out of memory, stated and observed", headings=headings, rows=rows)


def _ranking_table(ranking: dict[str, Any]) -> Table:
    lines = {**ranking["families"], "overall": ranking["overall"]}
    rows = tuple(
        (name, str(s["sweeps"]), str(s["picks_that_ran_out"]), _percent(s["best_found"]), _percent(s["mean_regret"]),
         _percent(s["median_regret"]), _percent(s["p90_regret"]), _percent(s["worst_regret"]),
         "-" if s["mean_tau"] is None else f"{s['mean_tau']:.2f}")
        for name, s in lines.items()
    )  # fmt: skip
    headings = ("", "sweeps", "picks that ran out", "best layout found", "mean regret", "median", "90 % below", "worst",
                "Kendall tau")  # fmt: skip
    return Table(title="Ranking of layouts in published sweeps", headings=headings, rows=rows)
