"""Names of array types. numpy.typing takes 35 ms to import, and only a type checker needs it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
else:
    ArrayLike = Any
    NDArray = np.ndarray
    Floats = np.ndarray


def only(where: Any, price: Callable[..., Floats], *columns: Any) -> Floats:
    """What ``price`` makes of the rows of the columns where a condition holds; 0 elsewhere."""
    where = np.asarray(where)
    if where.all():
        return np.asarray(price(*columns))
    if not where.any():
        return np.zeros(where.shape)
    held, *sizes = np.broadcast_arrays(where, *columns)
    found = np.zeros(held.shape)
    found[held] = price(*(one[held] for one in sizes))
    return found


def spread(value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A number or columns as columns of a shape: np.broadcast_to, 3 us, where they have another."""
    found = np.asarray(value)
    return found if found.shape == shape else np.broadcast_to(found, shape)


def unique(values: ArrayLike) -> NDArray[Any]:
    """The values in order, each once. np.unique imports numpy.ma, 16 ms, unless it is asked for more than that."""
    return np.unique(values, return_index=True)[0]


__all__ = ["ArrayLike", "Floats", "NDArray", "only", "spread", "unique"]
