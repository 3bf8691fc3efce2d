"""The summary as tables of text, for the terminal and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for people: plain text, the first row of ``rows`` below ``headings``."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary_rows(summary: dict[str, Any]) -> list[Table]:
    """The summary of ``accuracy`` as tables of text: coverage, step time, memory, out of memory, ranking."""
    return [
        _coverage_table(summary["coverage"]),
        _error_table("Step time, predicted against measured", summary, "families", "overall"),
        _error_table("Peak memory, predicted against measured", summary, "memory", None),
        _memory_table(summary["out_of_memory"]),
        _reliability_table(summary["out_of_memory"]["reliability"]),
        _rule_table(summary),
        _ranking_table(summary["ranking"]),
    ]


def percent(value: float | None, signed: bool = False) -> str:
    """A fraction as percent; '-' for None."""
    return "-" if value is None else f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _coverage_table(coverage: dict[str, Any]) -> Table:
    rows = [
        ("runs", str(coverage["rows"])),
        ("that state their layout", str(coverage["stated"])),
        ("predicted of those", percent(coverage["predicted_of_stated"])),
        ("predicted in all", str(coverage["predicted"])),
    ]
    rows += [(f"not supported: {reason}", str(n)) for reason, n in list(coverage["unsupported"].items())[:12]]
    return Table(title="Coverage", headings=("", "runs"), rows=tuple(rows))


def _error_table(title: str, summary: dict[str, Any], groups: str, total: str | None) -> Table:
    lines = dict(summary[groups])
    if total:
        lines["overall"] = summary[total]
    rows = tuple(
        (name, str(s["n"]), percent(s["median_abs"]), percent(s["median_signed"], True), _interval(s["bias_interval"]),
         percent(s["p90_abs"]), percent(s["within_10"]))
        for name, s in lines.items() if s["n"]
    )  # fmt: skip
    headings = ("", "runs", "median error", "bias", "its 90 % interval", "90 % below", "within 10 %")
    return Table(title=title, headings=headings, rows=rows)


def _interval(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{100 * ends[0]:+.1f} to {100 * ends[1]:+.1f}"


def _memory_table(verdicts: dict[str, Any]) -> Table:
    lines = {**verdicts["families"], "overall": verdicts["overall"]}
    rows = tuple(
        (name, str(v["ran"]), str(v["ran_out"]), str(v["called_safe_but_ran_out"]),
         str(v["called_impossible_but_ran"]), str(v["uncertain"]), percent(v["right"]))
        for name, v in lines.items()
    )  # fmt: skip
    headings = ("", "ran", "ran out", "called safe, ran out", "called impossible, ran", "uncertain", "right")
    return Table(title="Does it fit?", headings=headings, rows=rows)


def _reliability_table(bins: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (f"{100 * one['from']:.0f} to {100 * one['to']:.0f} %", str(one["n"]), percent(one["stated"]), percent(one["ran_out"]))
        for one in bins
    )  # fmt: skip
    headings = ("stated chance", "runs", "stated on average", "ran out")
    return Table(title="Stated chance of running out of memory against what happened", headings=headings, rows=rows)


def _rule_table(summary: dict[str, Any]) -> Table:
    rows = []
    for name, ours in [*summary["families"].items(), ("overall", summary["overall"])]:
        rule = summary["rule"]["overall"] if name == "overall" else summary["rule"]["families"][name]
        twins = summary["alike"].get(name, {"n": 0})
        floor = (str(twins["n"]), percent(twins["median_abs"]), percent(twins["p90_abs"])) if twins["n"] else ("-",) * 3
        if ours["n"]:
            rows.append((name, percent(ours["median_abs"]), percent(rule["median_abs"]), percent(ours["mean_abs"]),
                         percent(rule["mean_abs"]), *floor))  # fmt: skip
    headings = ("", "median error", "of the rule", "mean error", "of the rule", "alike", "their median", "their 90 %")
    return Table(
        title="Against the one-line rule, and what runs that state the same differ by",
        headings=headings,
        rows=tuple(rows),
    )


def _ranking_table(ranking: dict[str, Any]) -> Table:
    lines = {**ranking["families"], "overall": ranking["overall"]}
    rows = tuple(
        (name, str(s["sweeps"]), percent(s["best_found"]), percent(s["mean_regret"]), percent(s["median_regret"]),
         percent(s["p90_regret"]), percent(s["worst_regret"]), "-" if s["mean_tau"] is None else f"{s['mean_tau']:.2f}",
         percent(s["mean_pick_regret"]), f"{s['picks_that_ran_out']} of {s['with_out_of_memory']}",
         percent(s["mean_floor"]), percent(s["worst_floor"]))
        for name, s in lines.items()
    )  # fmt: skip
    headings = ("", "sweeps", "best layout found", "mean regret", "median", "90 % below", "worst", "Kendall tau",
                "regret with memory gate", "picks that ran out", "of a perfect model", "its worst")  # fmt: skip
    return Table(title="Ranking of layouts in published sweeps", headings=headings, rows=rows)
