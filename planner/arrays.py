"""Names of array types. numpy.typing takes 35 ms to import, and only a type checker needs it."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
else:
    ArrayLike = Any
    NDArray = np.ndarray
    Floats = np.ndarray

__all__ = ["ArrayLike", "Floats", "NDArray"]
