"""The accuracy report as a page: what a sceptical engineer wants to see before believing a prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.questions.accuracy.floor import KINDS
from planner.questions.accuracy.numbers import Pair, Table, summary_rows
from planner.questions.accuracy.prediction import grouped
from planner.questions.accuracy.scatter import scatter
from planner.questions.accuracy.straight import straightness
from planner.questions.accuracy.tables import percent

WORST = 20
"""Rows shown one by one."""


def page(
    pairs: Sequence[Pair], summary: Mapping[str, Any], *, picture: str, notes: Mapping[str, Any], proof: str
) -> str:
    """The page as Markdown.

    ``picture`` is the file name of the scatter plot ('' = none), ``notes`` what people found out about rows and families
    (keys intro, mechanisms, floors, peers; all may be missing) and ``proof`` the section on held-back sources, which takes
    minutes to make and is therefore made elsewhere.
    """
    coverage, time, memory, verdicts, chances, rule, choice = (markdown(one) for one in summary_rows(dict(summary)))
    sections = [
        "# Accuracy: predicted against measured",
        str(notes.get("intro", "")).strip(),
        _headline(summary),
        "## Coverage", coverage,
        "## Step time", _ERRORS,
        f"![Predicted against measured step time]({picture})" if picture else "",
        time,
        "### Against a rule for the head, and against what no model can know", _RULE, rule,
        _peers(notes.get("peers"), summary),
        "### By source", markdown(sources_table(pairs)),
        "## Memory", memory, "### Does it fit?", verdicts,
        "### Is the stated chance of running out of memory true?", chances,
        "## Choice", _CHOICE, choice, markdown(scatter_table(summary["ranking"])),
        "### Every sweep", markdown(sweeps_table(summary["ranking"])),
        proof.strip(),
        "## Were the times measured?", _STRAIGHT, markdown(straight_table(pairs)), _computed(pairs, notes.get("computed")),
        f"## The {WORST} worst rows", markdown(worst_table(pairs, notes.get("mechanisms") or [])),
        _floors(notes.get("floors")),
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if section) + "\n"


def write_page(pairs: Sequence[Pair], summary: Mapping[str, Any], path: Path) -> Path:
    """The page of any runs and its picture beside it, whose path is returned. Raises PlannerError."""
    picture = path.with_suffix(".png")
    scatter(pairs, picture)
    library.write_whole(path, page(pairs, summary, picture=picture.name, notes={}, proof=""))
    return picture


_ERRORS = (
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


def scatter_table(ranking: Mapping[str, Any]) -> Table:
    """Scatter of each family whose runs tell it, and what it is read off."""
    rows = tuple(
        (family, KINDS[one["kind"]], str(one["n"]), percent(one["deviation"]), percent(one["p90"]))
        for family, one in ranking["scatter"].items()
    )
    headings = ("", "scatter of", "runs", "standard deviation of the bulk", "90 % below")
    return Table(title="", headings=headings, rows=rows)


_STRAIGHT = (
    "Runs of one job and layout that differ in the number of microbatches alone take a constant time plus a time per microbatch. "
    "Measured times scatter around that line; times that lie on it to the last printed digit came out of a simulator. "
    "Series of three or more numbers of microbatches; the scatter is relative to the time."
)


def straight_table(pairs: Sequence[Pair]) -> Table:
    """Scatter of every source's series around a straight line."""
    rows = tuple(
        (
            one.source,
            "computed" if one.computed else "measured",
            str(one.series),
            f"{one.median:.1e}",
            f"{one.largest:.1e}",
        )
        for one in straightness([pair.run for pair in pairs])
    )
    headings = ("source", "counts as", "series", "scatter, median", "largest")
    return Table(title="", headings=headings, rows=rows)


def _computed(pairs: Sequence[Pair], notes: Mapping[str, str] | None) -> str:
    """What is known about sources whose times were computed, and that they do not count."""
    sources = grouped((pair for pair in pairs if pair.run.computed), lambda pair: pair.run.source)
    if not sources:
        return ""
    listed = ", ".join(f"{name} ({len(members):,} rows)" for name, members in sources.items())
    told = [" ".join(str(text).split()) for name, text in (notes or {}).items() if name in sources]
    return "\n\n".join([
        f"Computed: {listed}. The tables by family, by source and by sweep show them; totals, error bars, ties, sources left "
        "out and calibration of trainers do without them.", *told,
    ])  # fmt: skip


def _headline(summary: Mapping[str, Any]) -> str:
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
    rows = []
    for source, members in grouped((p for p in pairs if p.time_error is not None), lambda p: p.run.source).items():
        errors = np.array([p.time_error for p in members], dtype=float)
        rows.append((
            source, link(members[0].run.where), str(len(errors)), percent(np.median(np.abs(errors))),
            percent(np.median(errors), signed=True), percent(np.percentile(np.abs(errors), 90)),
        ))  # fmt: skip
    return Table(
        title="", headings=("source", "published", "runs", "median error", "bias", "90 % below"), rows=tuple(rows)
    )


def sweeps_table(ranking: Mapping[str, Any]) -> Table:
    """Every sweep with its regret and rank correlation."""
    rows = tuple(
        (
            one["source"], one["job"], str(one["n"]), percent(one["regret"]),
            "-" if one["tau"] is None else f"{one['tau']:.2f}", str(one["out_of_memory"]),
            "ran out" if one["pick_ran_out"] else percent(one["pick_regret"]), percent(one["floor"]), one["pick"], one["best"],
        )
        for one in ranking["sweeps"]
    )  # fmt: skip
    headings = (
        "source",
        "job",
        "layouts",
        "regret",
        "Kendall tau",
        "rows that ran out",
        "regret with memory gate",
        "of a perfect model",
        "pick",
        "best",
    )
    return Table(title="", headings=headings, rows=rows)


def worst_table(pairs: Sequence[Pair], mechanisms: Sequence[Mapping[str, str]], most: int = WORST) -> Table:
    """The rows with the largest ratio of predicted and measured step time, and the mechanism where it is known."""
    counted = [(p, p.time_error) for p in pairs if p.counts and p.time_error is not None]
    worst = sorted(counted, key=lambda one: -abs(np.log1p(one[1])))[:most]
    last = ("mechanism",) if mechanisms else ()
    rows = tuple(
        (
            p.run.source, p.run.id, f"{p.run.measured.step_time:.3g} s", f"{p.predicted.step_time:.3g} s",
            percent(error, signed=True), *((mechanism(p, mechanisms) or "not explained",) if mechanisms else ()),
        )
        for p, error in worst
    )  # fmt: skip
    return Table(title="", headings=("source", "run", "measured", "predicted", "error", *last), rows=rows)


def mechanism(pair: Pair, mechanisms: Sequence[Mapping[str, str]]) -> str:
    """What is known about a row: the first note whose expressions match its source and id; '' = nothing."""
    for one in mechanisms:
        if re.search(one.get("source", ""), pair.run.source) and re.search(one.get("id", ""), pair.run.id):
            return " ".join(one["why"].split())
    return ""


def _peers(peers: Mapping[str, Any] | None, summary: Mapping[str, Any]) -> str:
    if not peers:
        return ""
    overall = summary["overall"]
    ours = ("planner", f"{overall['n']:,}", percent(overall["median_abs"]), percent(overall["within_10"]))
    rows = (*(tuple(map(str, row)) for row in peers["rows"]), ours)
    families = tuple(
        (name, f"{best} %", percent(summary["families"][name]["median_abs"]))
        for name, best in peers["families"].items() if name in summary["families"]
    )  # fmt: skip
    return "\n\n".join([
        "### Other predictors on the same runs", peers["text"].strip(),
        markdown(Table(title="", headings=tuple(peers["headings"]), rows=rows)),
        markdown(Table(title="", headings=("family", "best of these", "planner"), rows=families)),
    ])  # fmt: skip


def _floors(floors: Sequence[Mapping[str, str]] | None) -> str:
    if not floors:
        return ""
    rows = tuple(
        (one["what"], one["bound"], one["reached"], one["floor"], " ".join(one["proof"].split())) for one in floors
    )
    table = Table(title="", headings=("what", "asked", "reached", "floor", "how we know"), rows=rows)
    return "## Bounds that were not reached\n\n" + markdown(table)
