"""Price once, gather often: a search has millions of layouts but few distinct shapes of a layer, a stage, a group."""

from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.layout import Layout

TABLE_PER_ROW = 4
"""Keys are numbered with a table of up to this many entries per candidate, and made dense again beyond it."""
FEW_ROWS = 64
"""Up to this many candidates, looking for equal ones costs more than pricing them all."""


def distinct(
    layout: Layout, fields: tuple[str, ...], *extra: NDArray[np.integer], few: int = FEW_ROWS
) -> tuple[Layout, NDArray[np.intp]]:
    """Layout of the distinct combinations of some fields, and for every candidate its row in it.

    ``extra`` are further columns that count as fields. All other fields keep the values of one of the candidates, so
    nothing that is priced on the result may depend on them. Up to ``few`` candidates count as distinct unseen.
    """
    rows = len(layout)
    if rows <= few:
        return layout, np.arange(rows)
    key, size = np.zeros(rows, dtype=np.int64), 1
    for values in (*(np.asarray(getattr(layout, name)) for name in fields), *extra):
        codes, count = _codes(values)
        if count == 1:
            continue
        if size * count > TABLE_PER_ROW * rows:
            key, size = _renumbered(key, size)
        key, size = key * count + codes, size * count
    if size > TABLE_PER_ROW * rows:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return layout.take(first), inverse
    where = np.full(size, -1, dtype=np.intp)
    where[key] = np.arange(rows)
    number, _ = _numbers(where >= 0)
    return layout.take(where[where >= 0]), number[key]


def distinct_values(values: list[Floats | float], rows: int, few: int = FEW_ROWS) -> tuple[Any, Any]:
    """One row of every distinct combination of some columns and single numbers, and for every row which one it is; both take all
    rows as they are where there are up to ``few``."""
    columns = {id(one): one for one in values if np.size(one) > 1}
    if rows <= few or not columns:
        return slice(None), slice(None)
    width = 8 * len(columns)
    table = np.stack(list(columns.values()), axis=1, dtype=float).tobytes()
    number: dict[bytes, int] = {}
    starts = range(0, width * rows, width)
    inverse = np.array([number.setdefault(table[start : start + width], len(number)) for start in starts], dtype=np.intp)
    first = np.empty(len(number), dtype=np.intp)
    first[inverse] = np.arange(rows)
    return first, inverse


def stacked(values: list[Floats | float], rows: int) -> Floats:
    """Columns and single numbers as the rows of one array, (len(values), rows); a fifth of the cost of numpy's own way."""
    table = np.empty((len(values), rows))
    for number, value in enumerate(values):
        table[number] = value
    return table


def _codes(values: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
    """Number of each value among the distinct ones, and how many there are."""
    if values.ndim == 0 or values.strides == (0,):  # one integer for all candidates
        return values, 1
    least, largest = int(values.min(initial=0)), int(values.max(initial=0))  # below 0: a stage without layers
    if largest - least > 1 << 20:
        found, codes = np.unique(values, return_inverse=True)
        return codes, len(found)
    present = np.zeros(largest - least + 1, dtype=bool)
    present[values - least] = True
    number, count = _numbers(present)
    return (values, 1) if count == 1 else (number[values - least], count)


def _renumbered(key: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], int]:
    """Keys as numbers of the distinct ones."""
    present = np.zeros(size, dtype=bool)
    present[key] = True
    number, count = _numbers(present)
    return number[key], count


def _numbers(present: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int]:
    """The how-manieth each present entry is, and how many there are."""
    number = np.cumsum(present) - 1
    return number, int(number[-1]) + 1
