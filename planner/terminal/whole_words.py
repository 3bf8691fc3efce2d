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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.width = None
        wide = options.update(width=WIDE)
        if self.__rich_measure__(console, wide).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        most = [_widths(console, wide, one).maximum for one in self.columns]
        words = [most[i] if one.no_wrap else _widths(console, wide, one).minimum for i, one in enumerate(self.columns)]
        room = options.max_width - self.__rich_measure__(console, wide).maximum + sum(most)
        if sum(most) > room:
            fitted = _narrowed(most, words, [one.no_wrap for one in self.columns], room)
            for column, width in zip(self.columns, fitted, strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)


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
