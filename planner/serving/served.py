"""What is served, on what, by which engine: the inputs of a step that are one value for all layouts of a call."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any

from planner.cluster import Cluster
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.record import record
from planner.serving.curves import DecodeCurves, decode_curves
from planner.serving.engine import Engine
from planner.serving.serving_layout import Precision


@record
class Served:
    """A model in a format, on a kind of GPU, behind an engine."""

    model: ModelSpec
    hardware: HardwareProfile
    engine: Engine
    precision: Precision = field(default_factory=Precision)
    related: bool = False
    """What runs at once are answers to a few prompts of one kind, as in a step of RL."""

    @property
    def skewed(self) -> bool:
        """Whether some experts are far more popular than others. A bias per expert balances a router over all that a model sees
        [arXiv 2408.15664], not over related requests."""
        router = self.model.constants and self.model.constants.router
        return self.related or not (router and router.expert_bias)

    @cached_property
    def curves(self) -> DecodeCurves:
        """Measured kernels of the GPU."""
        return decode_curves(self.hardware, self.engine.name)

    @cached_property
    def cluster(self) -> Cluster:
        """Links by distance of ranks; the number of GPUs does not matter to them."""
        return Cluster(hardware=self.hardware, num_gpus=1)

    @cached_property
    def products(self) -> dict[tuple[str, bytes], Any]:
        """Products of passes by what they are and degrees of tensor parallelism, each worked out once (``linear_layers``)."""
        return {}

    @property
    def attention_format(self) -> str:
        """Weights of the projections of attention."""
        return self.precision.attention or self.precision.weights

    @property
    def expert_format(self) -> str:
        """Weights of routed experts."""
        return self.precision.experts or self.precision.weights
