"""What torchtitan computes in where nothing is sharded, so that FSDP casts nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.trainers.reading.settings import beside
from planner.trainers.reading.values import read_text

UNTIL = "until 2026-03 torchtitan turned mixed precision off without FSDP where tp or pp is on; priced with it"


def cast_of(
    path: Path, precision: str, other: Mapping[str, Any], degrees: tuple[int, int, int], replicate: int
) -> tuple[str, tuple[str, ...]]:
    """(precision, what is to be said of it): while configurations were TOML, and a month after, autocast cast instead, of a GPU or
    of replicas alone; since then FSDP is there over groups of one rank as well.  [distributed/utils.py, maybe_enable_amp]
    ``degrees``: what splits layers or the model, what has FSDP as well, and data parallel."""
    split, shared, dp = degrees
    if dp > replicate or shared > 1 or precision not in ("bf16", "fp8", "fp8_row", "mxfp8"):
        return precision, ()
    if not other.get("toml"):
        file = beside(path, "torchtitan/distributed/utils.py", (".py",)) if other.get("module") else None
        if file is None or "def maybe_enable_amp" not in read_text(file):
            return precision, (UNTIL,) * (file is None and bool(other.get("module")) and split > 1)
    if split == 1 and not other.get("old"):
        return precision, ("autocast keeps casted copies of the weights for the backward pass, which is not priced",)
    why = "had no mixed precision before 2025-06" if split == 1 else "turns mixed precision off where tp or pp is on"
    low = ": what is not in 8 bits is in float32" if precision != "bf16" else ""
    return precision if low else "fp32", (f"without FSDP torchtitan {why}{low}",)
