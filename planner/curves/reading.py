"""Columns of numbers, and how the mappings of a profile file become them: one clear sentence when one is broken."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from planner import arrays as npt
from planner.errors import PlannerError, UnknownNameError, shown
from planner.schema import check_keys

Column: TypeAlias = npt.NDArray[np.float64]
"""Result of every method: float64 of the broadcast shape of the arguments (a numpy scalar for scalars)."""


def column(values: npt.ArrayLike) -> Column:
    """The values as float64."""
    return np.asarray(values, dtype=np.float64)


def index(value: str, known: tuple[str, ...], kind: str) -> int:
    """Place of a name among the known ones. Raises UnknownNameError."""
    if value not in known:
        raise UnknownNameError(kind, value, known)
    return known.index(value)


def checked(data: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The mapping, if it has the required keys and no others. Raises PlannerError with the nearest key."""
    return check_keys(data, (*required, *optional), where, required=required)


def numbers(values: object, where: str, *, above: float = -np.inf) -> Column:
    """A list of finite numbers as float64, none below a bound; text of numbers between blanks is a list too.

    Raises PlannerError.
    """
    try:
        if isinstance(values, list) and values and isinstance(values[0], str):
            values = [row.split() for row in values]
        result = np.array(values.split() if isinstance(values, str) else values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlannerError(f"{where}: expected numbers, found {shown(values)}") from error
    if not np.all(np.isfinite(result)):
        raise PlannerError(f"{where}: numbers must be finite")
    if result.size and float(np.min(result)) < above:
        raise PlannerError(f"{where}: {float(np.min(result)):g} must not be below {above:g}")
    return result
