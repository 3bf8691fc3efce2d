"""Tables of measured hardware, and the random halves that fits are scored on."""

from __future__ import annotations

import numpy as np

SIZES = 2.0 ** np.arange(9, 35)  # 512 B to 16 GiB, one per octave
RANDOM = np.random.default_rng(0)
