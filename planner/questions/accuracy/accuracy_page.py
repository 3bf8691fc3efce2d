"""The accuracy report as tables: for the terminal, and as a page for a sceptical engineer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from planner import library
from planner.error_bars import QUANTITIES
from planner.questions.accuracy.prediction import Pair, grouped
from planner.questions.accuracy.ranking import KINDS
from planner.questions.accuracy.summary import statistics
from planner.terminal import tables
from planner.terminal.pictures import new_figure, write_picture

WORST = 20
"""Rows shown one by one."""


Line = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table for people: plain text, the first row of ``rows`` below ``headings``."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@cache
def _texts() -> dict[str, Any]:
    return library.read_yaml(Path(__file__).with_name("tables.yaml"))


def table(name: str, lines: Iterable[Line]) -> Table:
    """A table of tables.yaml, one row for each line."""
    said = _texts()[name]
    columns = [[*how.split(" "), ""] for how in said["columns"].values()]
    rows = tuple(tuple(cell(line.get(key), how) for key, how, *_ in columns) for line in lines)
    return Table(tuple(said["columns"]), rows, said.get("title", ""))


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


def summary_rows(summary: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of ``accuracy``, by their names in page.md; bounds where the summary has them."""
    verdicts = summary["out_of_memory"]
    times = [one for one in _named(summary["families"], summary["overall"]) if one["n"]]
    bins = [{**one, "bin": f"{100 * one['from']:.0f} to {100 * one['to']:.0f} %"} for one in verdicts["reliability"]]
    found = kinds_tables(summary)
    if "bounds" in summary:
        found["bounds"] = bounds_table(summary["bounds"])
    return found | {
        "coverage": _coverage(summary["coverage"]),
        "time": table("step_time", times),
        "memory": table("memory", _named(summary["memory"])),
        "verdicts": table("out_of_memory", _named(verdicts["families"], verdicts["overall"])),
        "chances": table("reliability", bins),
        "rule": _rule(summary),
        "choice": _ranking(summary["ranking"]),
    }


def kinds_tables(summary: Mapping[str, Any]) -> dict[str, Table]:
    """Step time and memory by kind of user: mean over sources first."""
    kinds = {**summary["kinds"], "all": summary["all_kinds"]}
    lines = {
        quantity: [{"name": kind, **one["verdicts"], **one[quantity]} for kind, one in kinds.items() if one[quantity]["n"]]
        for quantity in QUANTITIES
    }  # fmt: skip
    return {"kinds_time": table("kinds_time", lines["step_time"]), "kinds_memory": table("kinds_memory", lines["memory"])}


def bounds_table(bounds: Sequence[Line]) -> Table:
    """Every bound, what it is now, and whether it is met."""
    lines = []
    for one in bounds:
        low, high, now = (None if one[key] is None else cell(one[key], one["digits"]) for key in ("least", "most", "now"))
        asked = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
        met = {True: "yes", False: "no", None: "-"}[one["met"]]
        lines.append({"name": one["name"], "asked": asked, "shown": now, "met": met})
    return table("bounds", lines)


def _coverage(coverage: Line) -> Table:
    rows = [
        ("runs", str(coverage["rows"])),
        ("that state their layout", str(coverage["stated"])),
        ("predicted of those", percent(coverage["predicted_of_stated"])),
        ("predicted in all", str(coverage["predicted"])),
    ]
    rows += [(f"in no summary: {reason}", str(n)) for reason, n in coverage["set_aside"].items()]
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
    return table("rule", lines)


def _ranking(ranking: Mapping[str, Any]) -> Table:
    lines = [
        {**one, "picks": f"{one['picks_that_ran_out']} of {one['with_out_of_memory']}"}
        for one in _named(ranking["families"], ranking["overall"])
    ]
    return table("ranking", lines)


def scatter_table(ranking: Mapping[str, Any]) -> Table:
    """Scatter of each family whose runs show it, and the kind of runs that show it."""
    return table("scatter", [{**one, "of": KINDS[one["kind"]]} for one in _named(ranking["scatter"])])


def sweeps_table(ranking: Mapping[str, Any]) -> Table:
    """Every sweep with its regret and rank correlation."""
    lines = [
        {**one, "gated": "ran out" if one["pick_ran_out"] else percent(one["pick_regret"])} for one in ranking["sweeps"]
    ]
    return table("sweeps", lines)


def print_accuracy(
    console: Console, report: dict[str, Any], pairs: Sequence[Pair] = (), *, serving: Sequence[Table] = (), sweeps: bool = False,
    worst: int = 0,
) -> None:  # fmt: skip
    """Coverage, errors by source and family, memory, ranking: one table each; every sweep, the ``worst`` rows of the pairs; then
    the tables of serving. Those of training are left out where there is serving alone."""
    summary = report["summary"]
    found = [*summary_rows(summary).values()] if pairs or not serving else []
    found += [sweeps_table(summary["ranking"])] if sweeps and pairs else []
    found += [worst_table(pairs, worst)] if worst and pairs else []
    found += serving
    for one in (one for one in found if one.rows):
        first, *others = one.headings
        console.print(tables.table(first, *(f"~{heading}" for heading in others), title=one.title, rows=one.rows))


def page(pairs: Sequence[Pair], summary: Mapping[str, Any], picture: str) -> str:
    """The page as Markdown; ``picture`` is the file name of the scatter plot."""
    shown = summary_rows(summary) | {
        "sources": sources_table(pairs), "scatter": scatter_table(summary["ranking"]), "sweeps": sweeps_table(summary["ranking"]),
        "worst": worst_table(pairs),
    }  # fmt: skip
    found = {"bounds": "(For the runs that come with planner.)"} | {name: markdown(one) for name, one in shown.items()}
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return text.format(headline=headline(summary), picture=picture, number=WORST, **found)


def write_page(pairs: Sequence[Pair], summary: Mapping[str, Any], path: Path, *, more: str = "") -> Path:
    """The page of any runs, ``more`` behind it, and its picture next to it, whose path is returned. Raises PlannerError."""
    picture = path.with_suffix(".png")
    scatter(pairs, picture)
    library.write_whole(path, page(pairs, summary, picture.name) + more)
    return picture


def headline(summary: Mapping[str, Any]) -> str:
    """The figures that matter most, in a paragraph."""
    coverage, overall, out = summary["coverage"], summary["overall"], summary["out_of_memory"]["overall"]
    return (
        f"{coverage['rows']:,} published runs; {percent(coverage['predicted_of_stated'])} of those that state their layout are "
        f"predicted. Step time: error {percent(summary['mean_of_sources'])} as a mean over sources of each one's median, "
        f"{percent(overall['median_abs'])} as the median over {overall['n']:,} runs (the one-line rule: "
        f"{percent(summary['rule']['mean_of_sources'])} and {percent(summary['rule']['overall']['median_abs'])}). Of "
        f"{out['ran_out']} runs that ran out of memory {out['called_safe_but_ran_out']} were called safe; of {out['ran']:,} that "
        f"ran {out['called_impossible_but_ran']} were called impossible."
    )


def markdown(one: Table) -> str:
    """A table in Markdown: the first column left, the others right."""
    return tables.markdown_table(one.headings, one.rows, "---:")


def link(where: str) -> str:
    """Where a source was published, as a link if the text names a paper or a repository."""
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", where)
    if paper:
        return f"[arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]})"
    repository = re.search(r"repository ([\w.-]+/[\w.-]+)", where)
    if repository:
        return f"[{repository[1]}](https://github.com/{repository[1]})"
    return where.split(",")[0]


def sources_table(pairs: Sequence[Pair]) -> Table:
    """Every source with its link, number of runs and errors of the step time."""
    sources = grouped((p for p in pairs if p.time_error is not None), lambda p: p.run.source)
    lines = [
        {"source": source, "link": link(members[0].run.where), **statistics(members, "time_error")}
        for source, members in sources.items()
    ]
    return table("sources", lines)


def worst_table(pairs: Sequence[Pair], most: int = WORST) -> Table:
    """The rows with the largest ratio of predicted and measured step time."""
    counted = [(p, p.time_error) for p in pairs if p.counts and p.time_error is not None]
    rows = tuple(
        (
            p.run.source, p.run.id, f"{p.run.measured.step_time:.3g} s", f"{p.predicted.step_time:.3g} s",
            percent(error, signed=True),
        )
        for p, error in sorted(counted, key=lambda one: -abs(np.log1p(one[1])))[:most]
    )  # fmt: skip
    return Table(("source", "run", "measured", "predicted", "error"), rows)


def scatter(pairs: Sequence[Pair], path: Path) -> None:
    """Write the picture as PNG: one point per timed run, coloured by family, with lines at 10 % to either side.

    Raises PlannerError when matplotlib is not installed.
    """
    figure = new_figure(9.6, 6.4, dpi=110)
    axes = figure.add_subplot()
    timed = [pair for pair in pairs if pair.run.representative and pair.time_error is not None]
    groups = sorted(grouped(timed, lambda pair: pair.run.family).items(), key=lambda item: -len(item[1]))
    markers = "osD^vP"
    for number, (family, members) in enumerate(groups):
        measured = [pair.run.measured.step_time or 0.0 for pair in members]
        predicted = [pair.predicted.step_time or 0.0 for pair in members]
        colour, marker = f"C{number % 10}", markers[number % len(markers)]
        label = f"{family} ({len(members)})"
        axes.scatter(measured, predicted, s=9, color=colour, marker=marker, alpha=0.55, linewidths=0, label=label)
    values = [pair.run.measured.step_time or 0.0 for pair in timed]
    ends = (min(values) / 1.3, max(values) * 1.3)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (1 / 1.1, 1.1):
        axes.plot(ends, [end * factor for end in ends], color="black", linewidth=0.6, linestyle=":")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured step time, s", ylabel="predicted step time, s")
    axes.set_title("Published runs: predicted against measured; dotted: 10 % off", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False, markerscale=2)
    write_picture(figure, path)
