"""Tables that a watcher is given: CSV with a heading, and the columns of ``dcgmi dmon``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence

from planner.errors import PlannerError, shown
from planner.record import record

EMPTY = ("", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]")


@record
class Table:
    """Cells by row, and what their columns are called."""

    name: str
    """Of the file."""
    headings: tuple[str, ...]
    """In small letters, without units and DCGM's prefix."""
    rows: Sequence[Sequence[str]]

    def has(self, *names: str) -> bool:
        """One of some columns is there."""
        return any(name in self.headings for name in names)

    def texts(self, *names: str) -> list[str] | None:
        """The cells of the first of some columns that is there; None where none is."""
        at = next((self.headings.index(name) for name in names if name in self.headings), None)
        return None if at is None else [row[at].strip() if at < len(row) else "" for row in self.rows]

    def numbers(self, *names: str) -> list[float | None] | None:
        """The same as numbers, their units left out; None for an empty cell. Raises PlannerError."""
        found = self.texts(*names)
        return None if found is None else [number_of(cell, f"{self.name} line {at}") for at, cell in enumerate(found, 2)]


def number_of(cell: str, where: str) -> float | None:
    """The number that a cell begins with; None for an empty one. Raises PlannerError."""
    if cell in EMPTY:
        return None
    match = re.match(r"0x[0-9a-fA-F]+|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", cell)
    if match is None:
        raise PlannerError(f"{where}: {shown(cell)} is no number")
    return float(int(match[0], 16)) if match[0].lower().startswith("0x") else float(match[0])


def table_of(text: str, name: str, known: set[str]) -> Table | None:
    """The table in a text whose heading names one of the ``known`` columns, or which ``dcgmi dmon`` printed; None where there is
    none."""
    lines = iter(text.splitlines())
    first = next((line for line in lines if line.strip() and (not line.startswith("#") or line.startswith("#Entity"))), "")
    if first.startswith("#Entity"):
        return _of_dmon(first, lines, name)
    headings = [re.sub(r"^dcgm_fi_dev_|\s*\[.*\]", "", one.strip().lower()) for one in next(csv.reader([first]), [])]
    if len(headings) < 2 or not known & set(headings):
        return None
    rows = csv.reader(line for line in lines if line.strip() and not line.startswith("#"))
    return Table(name=name, headings=tuple(headings), rows=list(rows))


def _of_dmon(heading: str, lines: Iterator[str], name: str) -> Table:
    """What ``dcgmi dmon -e FIELDS`` prints: short names of the fields, units below, then lines like ``GPU 0   1980   699.8``; the
    heading comes again after some of them.  [DCGM, dcgmlib/src/dcgm_fields.cpp; dcgmi/DeviceMonitor.cpp]"""
    headings = ("gpu", *(one.lower() for one in heading.split()[1:]))
    rows = []
    for line in lines:
        entity, _, rest = line.strip().partition(" ")
        cells = rest.split()
        if entity == "GPU" and cells and cells[0].isdigit():
            if len(cells) != len(headings):
                raise PlannerError(f"{name}: {shown(line.strip())} has {len(cells)} values below {len(headings)} headings")
            rows.append(cells)
    return Table(name=name, headings=headings, rows=rows)
