"""The section of docs/accuracy.md on what lies beyond one job on one kind of node: mixed clusters, links, elastic jobs, RL."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from planner.published_rows import DOES_NOT_FIT, NOT_RUN, PREDICTED, REFUSED, AnsweredRow
from planner.questions.accuracy.accuracy_page import markdown, percent
from planner.questions.accuracy.beyond import beyond_tables, summarise_beyond

SAID = {DOES_NOT_FIT: "called impossible", NOT_RUN: "that nobody ran", REFUSED: "refused with a reason"}
"""What became of rows that were not predicted."""
HEADING = "## Mixed clusters, slow links, elastic jobs and RL"


def section(rows: Sequence[AnsweredRow]) -> str:
    """Markdown: errors by topic and quantity, choices in sweeps, and what was not predicted."""
    summary = summarise_beyond(rows)
    predicted = sum(row.status == PREDICTED for row in rows)
    others = {name: sum(row.status == name for row in rows) for name in dict.fromkeys(row.status for row in rows)}
    counts = ", ".join(f"{number} {SAID[name]}" for name, number in others.items() if name in SAID)
    head = (
        f"{len(rows)} rows in `profiles/beyond-runs`: {predicted} predicted{f', {counts}' if counts else ''}. Few sources stand behind "
        "each line: rows that were kept back may show more. `plan accuracy profiles/beyond-runs` prints this, `--json` every row."
    )
    swept = ", ".join(
        f"{name} {percent(one['right'])} and {percent(one['regret'])}" for name, one in sorted(summary["sweeps"].items())
    )
    parts = [HEADING, _wrapped(head), markdown(beyond_tables(summary, rows)[0])]
    named = f"Pairs of a sweep in the right order (3 % apart), and the regret of the pick: {swept}."
    return "\n\n".join([*parts, *([_wrapped(named)] if swept else [])])


def replaced(page: str, text: str) -> str:
    """The page with its section of this heading written anew, before 'What is not reached' where it had none."""
    if HEADING in page:
        return re.sub(rf"{re.escape(HEADING)}.*?(?=\n## )", lambda _: f"{text}\n", page, flags=re.DOTALL)
    return page.replace("## What is not reached", f"{text}\n\n## What is not reached", 1)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)
