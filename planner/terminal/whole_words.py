"""Tables that break words only where the terminal is narrower than the words."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Column, Table
from rich.text import Text

WIDE = 10_000
"""Columns of a terminal that no table fills."""


class WholeWords(Table):
    """A table that is narrowed between words first, the widest columns first.

    Rich narrows columns without looking at the words in them, and cuts what a ``min_width`` then widens again. A column that is
    not wrapped keeps its width; where whole words do not fit, the longest of the others are broken.
    """

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """One row. Text is read for markup once, not whenever it is measured."""
        read = (Text.from_markup(cell, emoji=False) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*read, style=style, end_section=end_section)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        self._unfolded(console, options)
        return super().__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=WIDE)
        widths = self._unfolded(console, wide)
        over = super().__rich_measure__(console, wide).maximum - options.max_width
        if over > 0:
            fixed, most = [one.no_wrap for one in self.columns], [one.maximum for one in widths]
            words = [one.maximum if stays else one.minimum for one, stays in zip(widths, fixed, strict=True)]
            for column, width in zip(self.columns, _narrowed(most, words, fixed, sum(most) - over), strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)

    def _unfolded(self, console: Console, options: ConsoleOptions) -> list[Measurement]:
        """Give every column the width in which nothing is folded, so that rich measures no cell again."""
        widths = [_widths(console, options.update(width=WIDE), one) for one in self.columns]
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width.maximum
        return widths


def _widths(console: Console, wide: ConsoleOptions, column: Column) -> Measurement:
    """Widths of the longest word and of the longest cell of a column, the heading and its ``min_width`` included."""
    found = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    least = column.min_width or 0
    return Measurement(max([least, *(one.minimum for one in found)]), max([least, *(one.maximum for one in found)]))


def _narrowed(most: list[int], words: list[int], fixed: list[bool], room: int) -> list[int]:
    """Widths that sum to ``room`` where they can: each at least its longest word, and no more than all of it."""
    if sum(words) > room:
        short = _level(lambda level: [one if stays else min(one, level) for one, stays in zip(words, fixed, strict=True)], room)
        return short if sum(short) <= room else _level(lambda level: [min(one, level) for one in words], room)
    found = _level(lambda level: [min(one, max(word, level)) for word, one in zip(words, most, strict=True)], room)
    spare = room - sum(found)
    for i, one in enumerate(most):
        if found[i] < one and spare:
            found[i], spare = found[i] + 1, spare - 1
    return found


def _level(widths: Callable[[int], list[int]], room: int) -> list[int]:
    """The widest of the ``widths`` of a level, rising with it, that fit; those of level 1 where none does."""
    level = 1
    while sum(widths(level + 1)) <= room and level < WIDE:
        level += 1
    return widths(level)


def most_columns(shown: Table) -> int:
    """Columns of a terminal that the lines of a table fill where nothing is folded."""
    console = Console(width=WIDE)
    return Measurement.get(console, console.options, shown).maximum


def least_columns(shown: Table) -> int:
    """Columns of a terminal in which a table shows whole words."""
    console = Console(width=WIDE)
    widths = [_widths(console, console.options, one) for one in shown.columns]
    return most_columns(shown) - sum(
        0 if one.no_wrap else width.maximum - width.minimum for one, width in zip(shown.columns, widths, strict=True)
    )
