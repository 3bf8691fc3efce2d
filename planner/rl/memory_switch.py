"""Memory that pools which train and generate in turn move between the phases, and the seconds of it.

Before generation the trainer's gradients are dropped and its optimizer states and weights go to host memory; before log-probs they
come back, the engine frees cache and weights. Copies run over PCIe, from memory that is not pinned: ``PAGEABLE`` of its bandwidth.
A frozen reference that lives on the trainer's GPUs comes and goes with its log-probs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.hardware import HardwareProfile

PAGEABLE = 0.2
"""Part of PCIe's bandwidth that copies of ordinary host memory reach: 10 to 13 GB/s of 63, as torch's ``.to('cpu')`` does them."""
WAKE = 1.0
"""Seconds of an engine to free and to map its memory again, both."""


def copied(hardware: HardwareProfile, size: Any) -> Floats:
    """Seconds to copy ``size`` bytes of a GPU to host memory or back."""
    return np.asarray(size, dtype=float) / (hardware.pcie_bandwidth * PAGEABLE)


def switch_seconds(hardware: HardwareProfile, states: Any) -> Floats:
    """Seconds of both switches of a step: ``states`` (weights and optimizer of the trainer) out and in; the engine's weights are
    synchronised, not copied, and its memory is mapped again."""
    return 2.0 * copied(hardware, states) + WAKE
