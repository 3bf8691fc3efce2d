"""docs/accuracy.md: what holds and what does not, on one page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from planner.questions.accuracy.accuracy_page import headline, markdown, percent, summary_rows
from planner.questions.accuracy.prediction import Pair
from tools.evidence.appendix import Proofs, left_out, unmet


def reader(
    pairs: Sequence[Pair], summary: Mapping[str, Any], held: Sequence[Pair], proofs: Proofs, notes: Mapping[str, Any],
    beyond: str = "",
) -> str:  # fmt: skip
    """Markdown; arguments as of ``appendix``, and the section of ``beyond``."""
    limits = [f"- {one['what']}: {one['reached']} (asked: {one['asked']}); {one['short']}." for one in unmet(summary, notes)]
    tables = summary_rows(summary)
    return "\n\n".join([
        "# Accuracy: predicted against measured", _wrapped(headline(summary)), _wrapped(_ERRORS),
        "## Step time, by kind of user", markdown(tables["kinds_time"]), _wrapped(_KINDS),
        "![Predicted against measured step time](accuracy.png)",
        "## Memory, by kind of user", markdown(tables["kinds_memory"]), _wrapped(_fits(summary)),
        "## What is promised", markdown(tables["bounds"]), _wrapped(_unseen(proofs) + " " + left_out(pairs, held)),
        "## Choice of a layout", _wrapped(_choice(summary["ranking"])), *([beyond] if beyond else []),
        "## What is not reached, and why", "\n".join(_wrapped(line, "  ") for line in limits) or "Every bound is met.",
        "## How to reproduce it", _COMMANDS, _wrapped(_REMOVED),
    ]) + "\n"  # fmt: skip


_ERRORS = (
    "Errors are predicted / measured - 1: positive means predicted too slow, or too large. The bias is their median. All tables, every "
    "family, source and sweep, the worst rows and the constants that were fitted: [accuracy-appendix.md](accuracy-appendix.md)."
)
_KINDS = (
    "A source is one table, paper or log; its error is its median, and every source weighs the same. *Own runs* are what users report "
    "of their own jobs, in issues and logs, untuned: `plan` answers with both figures, as tuned and as first runs usually are."
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
        f"{percent(one['worst_regret'])}, Kendall's tau {one['mean_tau']:.2f}, {one['mean_tau_apart']:.2f} of pairs that are 3 % apart."
    )


def _unseen(proofs: Proofs) -> str:
    time, memory = proofs["step_time"], proofs["memory"]
    return (
        "A campaign is all that one paper or repository published. Every campaign is left out in turn, the constants that were set on it "
        "are fitted again without it, and the intervals that `plan` prints are made without it. They then hold "
        f"{percent(time['sources'])} of the step times and {percent(memory['sources'])} of the peaks as a mean over sources "
        f"({percent(time['runs'])} of {time['n']:,} and {percent(memory['runs'])} of {memory['n']:,} runs)."
    )
