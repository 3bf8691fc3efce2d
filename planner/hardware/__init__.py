"""Hardware profiles: the type and its prices (profile), files (files, relatives), physics (checks), origin (provenance)."""

from planner.hardware.files import load_hardware
from planner.hardware.overlap import ASSUMED, MeasuredOverlap, Slowdown
from planner.hardware.profile import HardwareProfile, Price
from planner.hardware.provenance import Provenance
from planner.hardware.vocabulary import FAMILIES, MEMORY_OPS, PASSES, SCALES

__all__ = [
    "ASSUMED", "FAMILIES", "MEMORY_OPS", "PASSES", "SCALES", "HardwareProfile", "MeasuredOverlap", "Price", "Provenance",
    "Slowdown", "load_hardware",
]  # fmt: skip
