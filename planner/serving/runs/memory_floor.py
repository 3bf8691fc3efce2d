"""A row that is faster than memory allows: every generated token reads the weights of a dense model once, whatever the engine does.

It happens where an engine stopped early, at the longest sequence of its model or at an end token, and the client counted on.
"""

from __future__ import annotations

from planner.cost.parameters import total_parameters
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.run_schema import ServingRow
from planner.serving.serving_layout import WEIGHT_BYTES
from planner.units import KILO


def impossible(
    row: ServingRow, model: ModelSpec, hardware: HardwareProfile, weights: str, layout: Degrees | None
) -> str:
    """What the figures say that cannot be; '' = nothing, or it is not known (experts, speculation, no layout)."""
    output = row.get("load.osl")
    speculates = str(row.get("options").get("speculative") or "none") != "none" or "spec-unknown" in row.flags
    if model.is_moe or speculates or layout is None or not output:
        return ""
    size = (total_parameters(model) - model.vocab_size * model.hidden_size) * WEIGHT_BYTES[weights]
    floor = size / (hardware.memory_bandwidth * layout.tp * layout.pp)
    latency = row.measured.get("latency_s")
    token = (
        latency / output
        if latency
        else row.measured.get("tpot_ms.mean", row.measured.get("tpot_ms.unstated", 0.0)) / KILO
    )
    if not token or token >= floor:
        return ""
    return (
        f"faster than memory: {KILO * token:.3g} ms per token of {output:g}, but reading the weights of {model.name} takes "
        f"{KILO * floor:.3g} ms on {layout.tp * layout.pp} x {hardware.name}"
    )
