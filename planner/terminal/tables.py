"""Tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from planner.assumption import Assumption
from planner.terminal.whole_words import WholeWords, least_columns

if TYPE_CHECKING:
    pass

def seconds(value: float) -> str:
    """A duration for a table: 128 s, 5.32 s, 45.1 ms."""
    if value >= 1:
        return f"{value:.4g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else "1 s"


def percent(value: float) -> str:
    """A share: 46.4 %, 0.3 %, and < 0.1 % for what is not zero."""
    if value != 0 and abs(value) < 0.001:
        return "< 0.1 %"
    return f"{100 * value:.1f} %"


_COLUMNS: dict[str, dict[str, Any]] = {
    ">": {"justify": "right", "no_wrap": True},
    "~": {"justify": "right", "overflow": "fold"},
    "=": {"no_wrap": True},
}


def table(*headings: str, title: str | None = None, least: int | None = None, rows: Iterable[Any] = ()) -> Table:
    """A table of sequences of cells, which are no markup: folded text; after '>' numbers in one line, '~' folded numbers, '='
    text in one line. ``least``: width of the first column that is text."""
    found = WholeWords(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in headings:
        options = _COLUMNS.get(heading[:1])
        if options is None:
            found.add_column(heading, overflow="fold", min_width=least)
            least = None
        else:
            found.add_column(heading[1:], **options)
    for row in rows:
        found.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return found


def fitted(
    columns: Mapping[str, Sequence[Any]], spare: Sequence[str], width: int, title: str | None = None, least: int | None = None
) -> Table:
    """A table of columns by their headings (as of ``table``) for a terminal of this width: where whole words do not fit, columns
    stand nearer to each other, then those of ``spare`` are left out, the first of them first."""
    kept, left, near = dict(columns), [name for name in spare if name in columns], False
    while True:
        found = table(*kept, title=title, least=least, rows=zip(*kept.values(), strict=True))
        if near:
            found.padding = (0, 1, 0, 0)
        if least_columns(found) <= width or (near and not left):
            return found
        if near:
            kept.pop(left.pop(0))
        near = True


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    """A Markdown table, ``rule`` below the headings but the first; a bar and HTML in a cell are escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(re.sub(r"\||<(?=[A-Za-z/!?])", r"\\\g<0>", " ".join(cell.split())) for cell in cells) + " |"

    return "\n".join([line(headings), line(["---", *[rule] * (len(headings) - 1)]), *map(line, rows)])


def plain_table(title: str | None, *justify: Any) -> Table:
    """A table without headings, its columns to the left or to the right."""
    found = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left", pad_edge=False)
    for side in justify:
        found.add_column(justify=side)
    return found


def assumptions_table(assumptions: tuple[Assumption, ...]) -> Table:
    """What was assumed, with the flag that changes it, which is never broken."""
    rows = ((one.what, one.value, one.why, one.flag) for one in assumptions)
    return table("what", "value", "why", "=change with", title="Assumed", rows=rows)
