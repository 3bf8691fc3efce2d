"""Tables of measurements as csv files have them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from planner.curves import Column

Row = dict[str, str]


def table(path: Path) -> list[Row]:
    """Rows of a csv file."""
    with open(path, encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def floats(rows: list[Row], *keys: str) -> list[Column]:
    """Columns of the rows as float64."""
    return [np.array([float(row[key]) for row in rows]) for key in keys]
