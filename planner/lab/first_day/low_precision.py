"""Products of quantised operands that this device has, against bf16 and against the price of a profile, into one file.

``python -m planner.lab.first_day.low_precision --device cuda --hardware profile.yaml --output fp8.yaml``. Operands are quantised
before, so that the product alone is timed, as the profile does; the shapes are those of an 8B model's layers.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.profile.definitions import GEMM_PASSES, SCALED
from planner.lab.profile.fit_gemm import RECIPE
from planner.lab.profile.points import Point
from planner.units import TERA

SHAPES = {"cuda": ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)), "cpu": ((16, 32, 32),)}
"""(tokens, columns, depth) of a forward product."""
BUDGET = {"cuda": 0.3, "cpu": 0.05}
"""Seconds of one point."""


def rows(device: str, hardware: HardwareProfile) -> Iterator[dict[str, Any]]:
    """One per shape, pass and recipe: seconds, rate, times bf16 and error of the price; or why the device cannot."""
    from planner.lab.profile.compute_timing import DeviceLostError, measure_compute

    for shape in SHAPES[device]:
        for pass_ in GEMM_PASSES:
            reference = None
            for recipe in ("bf16", *SCALED):
                row: dict[str, Any] = {"recipe": recipe, "pass": pass_, "tokens_columns_depth": list(shape)}
                point = Point.of("gemm", **dict(zip("mnk", shape, strict=True)), dtype=recipe, pass_=pass_)
                try:
                    seconds = measure_compute(point, device, BUDGET[device]).median
                except DeviceLostError:
                    raise
                except PlannerError as error:
                    yield {**row, "refused": str(error)}
                    continue
                reference = seconds if recipe == "bf16" else reference
                priced = _priced(hardware, shape, recipe, pass_)
                yield {
                    **row, "seconds": seconds, "tflops": 2.0 * shape[0] * shape[1] * shape[2] / seconds / TERA,
                    "times_bf16": reference / seconds if reference else None, "predicted_seconds": priced,
                    "error": priced / seconds - 1.0 if priced else None,
                }  # fmt: skip


def _priced(hardware: HardwareProfile, shape: tuple[int, int, int], recipe: str, pass_: str) -> float | None:
    """Seconds by the profile of the product alone (g = 1: nothing is added to a gradient); None where it has no such rate."""
    try:
        return float(hardware.gemm_time(*shape, RECIPE[recipe], pass_, quantised=True, gradient_bytes=1.0))
    except PlannerError:
        return None


def main() -> int:
    """Writes the file after every row; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    try:
        for row in rows(given.device, load_hardware(given.hardware)):
            found.append(row)
            library.write_whole(given.output, library.dump_yaml({"low_precision": found}))
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
