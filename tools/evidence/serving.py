"""The tables of docs/serving.md: errors on the serving runs that come along, and what is promised, as `plan accuracy` prints them."""

from __future__ import annotations

import re

from planner.questions.accuracy.accuracy_page import markdown
from planner.questions.accuracy.serving_summary import serving_tables, summarise_serving
from planner.questions.accuracy.training_and_serving import serving_pairs, shipped_serving

TABLES = re.compile(r"(On )\d{4}-\d\d-\d\d(:\n\n)\|.*?\|\n(?=\n[^|])", re.DOTALL)


def with_tables(page: str, day: str) -> str:
    """The page with the errors by class and the promises of today's model. ``day``: ISO 8601."""
    promised, classes = serving_tables(summarise_serving(serving_pairs(shipped_serving())))[:2]
    text, number = TABLES.subn(lambda match: f"{match[1]}{day}{match[2]}{markdown(classes)}\n\n{markdown(promised)}\n", page)
    if number != 1:
        raise ValueError("docs/serving.md has no tables after 'On <date>:'")
    return text
