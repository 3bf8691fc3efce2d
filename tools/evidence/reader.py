"""docs/accuracy.md: what holds and what does not, on one page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from planner.questions.accuracy.page import Table, headline, markdown, percent
from planner.questions.accuracy.prediction import Pair
from tools.evidence.appendix import Proofs, left_out


def reader(
    pairs: Sequence[Pair], summary: Mapping[str, Any], held: Sequence[Pair], proofs: Proofs, notes: Mapping[str, Any]
) -> str:
    """Markdown; arguments as of ``appendix``."""
    limits = [
        f"- {one['what']}: {one['reached']} (asked: {one['asked']}); {' '.join(one['short'].split())}."
        for one in notes["limits"]
    ]
    return "\n\n".join([
        "# Accuracy: predicted against measured", _wrapped(headline(summary)), _wrapped(_ERRORS),
        "![Predicted against measured step time](accuracy.png)",
        "## Step time, by family of runs", markdown(families_table(summary)), _wrapped(_RULE),
        "## Memory", _wrapped(f"{_memory(summary)} {_fits(summary)}"),
        "## Choice of a layout", _wrapped(_choice(summary["ranking"])),
        "## Does it hold for what was never seen?", _wrapped(_unseen(proofs) + " " + left_out(pairs, held)),
        "## What is not reached, and why", "\n".join(_wrapped(line, "  ") for line in limits),
        "## How to reproduce it", _COMMANDS, _wrapped(_REMOVED),
    ]) + "\n"  # fmt: skip


_ERRORS = (
    "Errors are predicted / measured - 1: positive means predicted too slow, or too large. The bias is their median. All tables, every "
    "source, every sweep, the worst rows and the constants that were fitted: [accuracy-appendix.md](accuracy-appendix.md)."
)
_RULE = (
    "The rule for the head: FLOP over half the peak, times the pipeline bubble. *Alike*: runs that state the same and measured "
    "different times; no model can do better on them."
)
_COMMANDS = """```sh
plan accuracy                        # predicts all published runs and prints the tables
plan accuracy examples/my-runs.yaml  # the same for runs of your own
python tools/update_accuracy.py      # writes these pages, the error bars and the stored predictions (minutes)
python -m pytest -m proof            # fits every constant again without each of its sources
```"""
_REMOVED = "vTrain's single-node table (arXiv 2312.12391, 1,440 rows) was removed: its times are the output of a simulator, not measured."


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def families_table(summary: Mapping[str, Any]) -> Table:
    """Errors of the step time by family, with those of the rule and of runs that state the same."""
    rows = []
    for name, one in [*summary["families"].items(), ("all that count", summary["overall"])]:
        rule = summary["rule"]["families"].get(name, summary["rule"]["overall"])
        twins = summary["alike"].get(name, {"n": 0})
        rows.append((
            name, f"{one['n']:,}", percent(one["median_abs"]), percent(one["median_signed"], signed=True), percent(one["p90_abs"]),
            percent(rule["median_abs"]), percent(twins["median_abs"]) if twins["n"] else "-",
        ))  # fmt: skip
    sources, rule = summary["mean_of_sources"], summary["rule"]["mean_of_sources"]
    rows.append(("mean over sources", "", percent(sources), "", "", percent(rule), ""))
    headings = ("", "runs", "median error", "bias", "90 % below", "rule for the head", "alike")
    return Table(headings, tuple(rows))


def _memory(summary: Mapping[str, Any]) -> str:
    kinds = ", ".join(
        f"{name} {percent(one['median_abs'])} ({percent(one['p90_abs'])}) over {one['n']:,} runs"
        for name, one in summary["memory"].items()
    )
    return f"Median error of the peak (in nine of ten runs below): {kinds}."


def _fits(summary: Mapping[str, Any]) -> str:
    out = summary["out_of_memory"]
    verdict, bins = out["overall"], out["reliability"]
    low, high = bins[0], bins[-1]
    return (
        f"Of {verdict['ran_out']:,} runs that ran out of memory {verdict['called_safe_but_ran_out']} were called safe, of "
        f"{verdict['ran']:,} that ran {verdict['called_impossible_but_ran']} impossible; {percent(verdict['right'])} of these verdicts were right. "
        f"The stated chance is true: where it was below 5 %, {percent(low['ran_out'])} of {low['n']:,} ran out; where it was "
        f"above 95 %, {percent(high['ran_out'])} of {high['n']:,}."
    )


def _choice(ranking: Mapping[str, Any]) -> str:
    one = ranking["overall"]
    return (
        f"{one['sweeps']} sweeps: five or more measured layouts of one job. The layout that the planner picks, memory first, took "
        f"{percent(one['mean_pick_regret'])} longer than the best on average; {one['picks_that_ran_out']} of "
        f"{one['with_out_of_memory']} picks ran out of memory where others did. By step time alone: {percent(one['best_found'])} of the "
        f"best layouts found, mean regret {percent(one['mean_regret'])}, median {percent(one['median_regret'])}, worst "
        f"{percent(one['worst_regret'])}, Kendall's tau {one['mean_tau']:.2f}."
    )


def _unseen(proofs: Proofs) -> str:
    time, memory = proofs["step_time"], proofs["memory"]
    return (
        f"Every source is left out in turn, and the constants that were set on it are fitted again without it. The interval that "
        f"`plan` prints then holds {percent(time['runs'])} of {time['n']:,} step times and {percent(memory['runs'])} of {memory['n']:,} "
        f"peaks (mean over sources {percent(time['sources'])} and {percent(memory['sources'])})."
    )
