"""Hardware profiles: the accelerator (compute), its links, both with their origin (profile), what no machine can be (checks)."""

from planner.hardware.accelerator import MEMORY_OPS, PASSES
from planner.hardware.links import ASSUMED, MeasuredOverlap, Slowdown
from planner.hardware.names import OVER
from planner.hardware.profile import SCALES, HardwareProfile, Price, Provenance, joined_by, load_hardware
from planner.hardware.relatives import FAMILIES

__all__ = [
    "ASSUMED", "FAMILIES", "MEMORY_OPS", "OVER", "PASSES", "SCALES", "HardwareProfile", "MeasuredOverlap", "Price", "Provenance",
    "Slowdown", "joined_by", "load_hardware",
]  # fmt: skip
