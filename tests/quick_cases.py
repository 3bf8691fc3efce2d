"""Cases of a parametrised test that the quick suite runs; the others are among the proofs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def proofs_but(quick: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """The cases, of which all but those of the quick suite carry the marker."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in quick else pytest.mark.proof)
        for one in every
    ]
