"""The accuracy report as a page: what a sceptical engineer wants to see before believing a prediction."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.questions.accuracy.page_tables import Table, percent, scatter_table, summary_rows, sweeps_table, table
from planner.questions.accuracy.prediction import Pair, grouped
from planner.questions.accuracy.summary import statistics
from planner.terminal.pictures import new_figure, write_picture

WORST = 20
"""Rows shown one by one."""


def page(pairs: Sequence[Pair], summary: Mapping[str, Any], picture: str) -> str:
    """The page as Markdown; ``picture`` is the file name of the scatter plot."""
    coverage, time, memory, verdicts, chances, rule, choice = (markdown(one) for one in summary_rows(summary))
    sections = [
        "# Accuracy: predicted against measured",
        headline(summary),
        "## Coverage", coverage,
        "## Step time", ERRORS, f"![Predicted against measured step time]({picture})", time,
        "### Against a rule for the head, and against what no model can know", _RULE, rule,
        "### By source", markdown(sources_table(pairs)),
        "## Memory", memory, "### Does it fit?", verdicts,
        "### Is the stated chance of running out of memory true?", chances,
        "## Choice", _CHOICE, choice, markdown(scatter_table(summary["ranking"])),
        "### Every sweep", markdown(sweeps_table(summary["ranking"])),
        f"## The {WORST} worst rows", markdown(worst_table(pairs)),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def write_page(pairs: Sequence[Pair], summary: Mapping[str, Any], path: Path) -> Path:
    """The page of any runs and its picture next to it, whose path is returned. Raises PlannerError."""
    picture = path.with_suffix(".png")
    scatter(pairs, picture)
    library.write_whole(path, page(pairs, summary, picture.name))
    return picture


ERRORS = (
    "Errors are predicted / measured - 1: positive means predicted too slow. The bias is their median; its interval is where it "
    "falls in nine of ten resamplings of the kinds of run (source, model, GPU, precision), which are wrong together."
)
_RULE = (
    "The rule: FLOP (6 N + 12 L a d s per token, recompute counted) over half the peak, times the bubble. *Alike* are runs that "
    "state the same model, batch, hardware, trainer and layout and measured different times: the error that the best "
    "possible model would still make on them."
)
_CHOICE = (
    "A sweep is five or more timed layouts of one job (same source, model, GPUs, batch, sequence length). Regret: how "
    "much longer the layout that the planner calls fastest took than the fastest one measured. Rows that ran out of memory are "
    "among the candidates; the planner picks among those that it says fit. *Of a perfect model*: the mean regret of a picker who "
    "knows the true times, when every time is measured once with the scatter of its family; the worst sweep likewise, on average."
)


def headline(summary: Mapping[str, Any]) -> str:
    """The figures that matter most, in a paragraph."""
    coverage, overall, out = summary["coverage"], summary["overall"], summary["out_of_memory"]["overall"]
    return (
        f"{coverage['rows']:,} published runs; {percent(coverage['predicted_of_stated'])} of those that state their layout are "
        f"predicted. Step time: median error {percent(overall['median_abs'])} over {overall['n']:,} runs, mean over sources "
        f"{percent(summary['mean_of_sources'])} (the one-line rule: {percent(summary['rule']['overall']['median_abs'])} and "
        f"{percent(summary['rule']['mean_of_sources'])}). Of {out['ran_out']} runs that ran out of memory "
        f"{out['called_safe_but_ran_out']} were called safe; of {out['ran']:,} that ran {out['called_impossible_but_ran']} were "
        "called impossible."
    )


def markdown(table: Table) -> str:
    """A table in Markdown: the first column left, the others right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "| " + " | ".join(["---", *["---:"] * (len(table.headings) - 1)]) + " |"
    return "\n".join([line(table.headings), rule, *map(line, table.rows)])


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
    return table(
        lines,
        "source = source; published = link; runs = n; median error = median_abs %; bias = median_signed +%; "
        "90 % below = p90_abs %",
    )


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
