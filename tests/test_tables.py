"""Tables of the terminal: no name that a user copies is broken, no column is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from planner.terminal.library_tables import hardware_table, models_table, trainers_table
from planner.terminal.tables import table


def lines_of(shown: Table, width: int) -> list[str]:
    out = StringIO()
    Console(width=width, file=out).print(shown)
    return [line for line in out.getvalue().splitlines() if line.strip(" ─")]


@cache
def words(make: Callable[[int], Table]) -> frozenset[str]:
    """All words of a table that has room for them."""
    return frozenset(" ".join(lines_of(make(1000), 1000)).split())


@pytest.mark.parametrize("width", [80, 109, 117, 140])
@pytest.mark.parametrize("make", [models_table, hardware_table, trainers_table])
def test_names_of_the_library_are_never_broken(make: Callable[[int], Table], width: int) -> None:
    lines = lines_of(make(width), width)
    assert set(" ".join(lines).split()) <= words(make) and max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [12, 24, 31, 36, 40, 60])
def test_tables_are_narrowed_between_words(width: int) -> None:
    """Where whole words do not fit the longest are broken; nothing is lost, and what does not wrap is never cut."""
    row = ("name-of-one", "three short words", "1,234", "antidisestablish")
    lines = lines_of(table("=name", "words", ">n", "long word", rows=[row]), width)
    assert max(map(len, lines)) <= width
    letters = sorted("".join("".join(lines).split()))
    assert width < 31 or letters == sorted("namewordsnlongword" + "".join(row).replace(" ", ""))
    assert width < 31 or {"name-of-one", "1,234"} <= set(" ".join(lines).split())
    assert width < 60 or {"three", "antidisestablish"} <= set(" ".join(lines).split())
