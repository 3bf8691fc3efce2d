"""The summary as tables of text, for the terminal and for the page."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.questions.accuracy.floor import KINDS

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table for people: plain text, the first row of ``rows`` below ``headings``."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def table(lines: Iterable[Line], columns: str, title: str = "") -> Table:
    """One row for each line; ``columns`` are 'heading = key format; ...', the format one of ``cell``."""
    parts = [[word.strip() for word in column.split("=")] for column in columns.split(";")]
    keys = [[*key.split(" "), ""] for _, key in parts]
    rows = tuple(tuple(cell(line.get(key), how) for key, how, *_ in keys) for line in lines)
    return Table(tuple(heading for heading, _ in parts), rows, title)


def cell(value: Any, how: str) -> str:
    """A value as text: '%' a share, '+%' one with its sign, '.2f' and the like a number, '..' an interval; '-' for None."""
    if value is None:
        return "-"
    if how in ("%", "+%"):
        return percent(value, how == "+%")
    if how == "..":
        return f"{100 * value[0]:+.1f} to {100 * value[1]:+.1f}"
    return format(value, how) if how else str(value)


def percent(value: float | None, signed: bool = False) -> str:
    """A fraction as percent; '-' for None."""
    return "-" if value is None else f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _named(groups: Mapping[str, Line], overall: Line | None = None) -> list[dict[str, Any]]:
    """Groups with their names, the overall figures last."""
    whole = {} if overall is None else {"overall": overall}
    return [{"name": name, **one} for name, one in {**groups, **whole}.items()]


ERROR_COLUMNS = (
    " = name; runs = n; median error = median_abs %; bias = median_signed +%; its 90 % interval = bias_interval ..; "
    "90 % below = p90_abs %; within 10 % = within_10 %"
)


def summary_rows(summary: Mapping[str, Any]) -> list[Table]:
    """The summary of ``accuracy``: coverage, step time, memory, out of memory, chances, the one-line rule, ranking."""
    verdicts = summary["out_of_memory"]
    times = [one for one in _named(summary["families"], summary["overall"]) if one["n"]]
    return [
        _coverage(summary["coverage"]),
        table(times, ERROR_COLUMNS, "Step time, predicted against measured"),
        table(_named(summary["memory"]), ERROR_COLUMNS, "Peak memory, predicted against measured"),
        table(
            _named(verdicts["families"], verdicts["overall"]),
            " = name; ran = ran; ran out = ran_out; called safe, ran out = called_safe_but_ran_out; "
            "called impossible, ran = called_impossible_but_ran; uncertain = uncertain; right = right %",
            "Does it fit?",
        ),
        table(
            [{**one, "bin": f"{100 * one['from']:.0f} to {100 * one['to']:.0f} %"} for one in verdicts["reliability"]],
            "stated chance = bin; runs = n; stated on average = stated %; ran out = ran_out %",
            "Stated chance of running out of memory against what happened",
        ),
        _rule(summary),
        _ranking(summary["ranking"]),
    ]


def _coverage(coverage: Line) -> Table:
    rows = [
        ("runs", str(coverage["rows"])),
        ("that state their layout", str(coverage["stated"])),
        ("predicted of those", percent(coverage["predicted_of_stated"])),
        ("predicted in all", str(coverage["predicted"])),
    ]
    rows += [(f"not supported: {reason}", str(n)) for reason, n in list(coverage["unsupported"].items())[:12]]
    return Table(("", "runs"), tuple(rows), "Coverage")


def _rule(summary: Mapping[str, Any]) -> Table:
    lines = []
    for one in _named(summary["families"], summary["overall"]):
        rule = summary["rule"]["families"].get(one["name"], summary["rule"]["overall"])
        twins = summary["alike"].get(one["name"], {})
        if one["n"]:
            found = {"alike": twins.get("n") or None, "twins": twins.get("median_abs"), "most": twins.get("p90_abs")}
            lines.append({**one, "rule_median": rule["median_abs"], "rule_mean": rule["mean_abs"], **found})
    return table(
        lines,
        " = name; median error = median_abs %; of the rule = rule_median %; mean error = mean_abs %; "
        "of the rule = rule_mean %; alike = alike; their median = twins %; their 90 % = most %",
        "Against the one-line rule, and what runs that state the same differ by",
    )


def _ranking(ranking: Mapping[str, Any]) -> Table:
    lines = [
        {**one, "picks": f"{one['picks_that_ran_out']} of {one['with_out_of_memory']}"}
        for one in _named(ranking["families"], ranking["overall"])
    ]
    return table(
        lines,
        " = name; sweeps = sweeps; best layout found = best_found %; mean regret = mean_regret %; median = median_regret %; "
        "90 % below = p90_regret %; worst = worst_regret %; Kendall tau = mean_tau .2f; "
        "regret with memory gate = mean_pick_regret %; picks that ran out = picks; of a perfect model = mean_floor %; "
        "its worst = worst_floor %",
        "Ranking of layouts in published sweeps",
    )


def scatter_table(ranking: Mapping[str, Any]) -> Table:
    """Scatter of each family whose runs show it, and the kind of runs that show it."""
    lines = [{**one, "of": KINDS[one["kind"]]} for one in _named(ranking["scatter"])]
    return table(
        lines, " = name; scatter of = of; runs = n; standard deviation of the bulk = deviation %; 90 % below = p90 %"
    )


def sweeps_table(ranking: Mapping[str, Any]) -> Table:
    """Every sweep with its regret and rank correlation."""
    lines = [
        {**one, "gated": "ran out" if one["pick_ran_out"] else percent(one["pick_regret"])} for one in ranking["sweeps"]
    ]
    return table(
        lines,
        "source = source; job = job; layouts = n; regret = regret %; Kendall tau = tau .2f; rows that ran out = out_of_memory; "
        "regret with memory gate = gated; of a perfect model = floor %; pick = pick; best = best",
    )
