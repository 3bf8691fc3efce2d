"""Price once, gather often: a search has millions of layouts but few distinct shapes of a layer, a stage, a group."""

from __future__ import annotations

import numpy as np

from planner.arrays import NDArray
from planner.layout import Layout

TABLE_PER_ROW = 64
"""Keys below this times the number of rows are numbered with a table; larger ones by sorting, which costs as much."""


FEW_ROWS = 64
"""Up to this many candidates, looking for equal ones costs more than pricing them."""


def distinct(layout: Layout, fields: tuple[str, ...], *extra: NDArray[np.integer]) -> tuple[Layout, NDArray[np.intp]]:
    """Layout of the distinct combinations of some fields, and for every candidate its row in it.

    ``extra`` are further columns that count as fields. All other fields keep the values of one of the candidates, so
    nothing that is priced on the result may depend on them.
    """
    rows = len(layout)
    if rows <= FEW_ROWS:
        return layout, np.arange(rows)
    key, size = np.zeros(rows, dtype=np.int64), 1
    for values in (*(np.asarray(getattr(layout, name)) for name in fields), *extra):
        if values.ndim == 0:
            continue
        codes, count = _codes(values)
        if count > 1:
            key, size = key * count + codes, size * count
    if size <= TABLE_PER_ROW * rows:
        first = np.full(size, -1, dtype=np.intp)
        first[key[::-1]] = np.arange(rows - 1, -1, -1)
        used = np.flatnonzero(first >= 0)
        number = np.empty(size, dtype=np.intp)
        number[used] = np.arange(len(used))
        return layout.take(first[used]), number[key]
    _, where, inverse = np.unique(key, return_index=True, return_inverse=True)
    return layout.take(where), inverse


def _codes(values: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
    """Number of each value among the distinct ones, and how many there are."""
    largest = int(values.max(initial=0))
    if largest > 1 << 20:
        found, codes = np.unique(values, return_inverse=True)
        return codes, len(found)
    present = np.zeros(largest + 1, dtype=bool)
    present[values] = True
    number = np.cumsum(present) - 1
    return number[values], int(number[-1]) + 1
