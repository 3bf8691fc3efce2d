"""What the other ranks of a CPU do while rank 0 measures alone: they compute, as they do in a step (torch).

Cores of one processor share caches, memory and often a clock; two threads may share a core. A core whose neighbours sleep is up to
twice as quick, and not equally for products, attention and what only moves bytes, so that no one factor makes up for it. GPUs
share none of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.lab.profile.compute_profile import CPU_BANDWIDTH, CPU_LONGEST_LAYER, CPU_RATE, CPU_SEQUENCE, MODELS
from planner.lab.profile.extra_points import layer_points
from planner.lab.profile.shapes import affordable
from planner.lab.profile.tensors import Run
from planner.lab.profile.whole_layer import layer


def layers(models: Sequence[str]) -> Run:
    """Runs a layer forward and backward in one thread: the first of the models' that is measured here."""
    torch.set_num_threads(1)
    points = [point for name in (*models, *MODELS["cpu"]) for point in layer_points(name, "cpu", CPU_SEQUENCE)]
    forward, backward = (
        layer(point, "cpu") for point in affordable(points, CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST_LAYER)[:2]
    )

    def both() -> None:
        forward()
        backward()

    return both
