"""What an RL question is about, with everything loaded: workload, framework, trainer, engine, kinds of GPUs of both pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from planner.cluster import Cluster
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.record import record
from planner.rl.generation import shared_engine
from planner.rl.host_times import HostTimes, host_times
from planner.rl.rl_framework import RlFramework
from planner.rl.rl_workload import RlWorkload
from planner.rl.training_phase import Learner
from planner.serving.engine import Engine
from planner.serving.served import Served
from planner.serving.serving_layout import Precision, ServingLayout
from planner.trainer import Trainer


@record
class RlJob:
    """A step of RL on kinds of GPUs, without its placement."""

    workload: RlWorkload
    framework: RlFramework
    trainer: Trainer
    engine: Engine
    hardware: HardwareProfile
    """Of the pool that trains."""
    generate_hardware: HardwareProfile
    """Of the pool that only generates."""
    precision: Precision
    """Of the rollout's weights and cache."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Phase -> measured over predicted, of runs of one's own (``phase_factors``)."""
    memory_share: float = 0.0
    """Engine's share of memory that was given; 0 = the framework's."""
    between: float = 0.0
    """Bytes/s of the link between the pools, where they are of two kinds or sites; 0 = the network of both."""
    price: float | None = None
    """Dollars per GPU and hour that were given; None = of the profiles."""
    host: HostTimes = field(default_factory=host_times)
    """Host times of a step."""

    def cluster(self, gpus: int) -> Cluster:
        """GPUs of the kind that trains."""
        return Cluster(hardware=self.hardware, num_gpus=gpus)

    def learner(self, gpus: int, model: ModelSpec | None = None) -> Learner:
        """The actor, or another model, on so many GPUs."""
        return Learner(
            model=model or self.workload.model, cluster=self.cluster(gpus), trainer=self.trainer, packs=self.framework.packs,
            slower=self.host.slower(self.hardware.name),
        )  # fmt: skip

    def served(self, mode: str) -> Served:
        """The rollout's engine with its share of the memory in a placement of this mode."""
        hardware = self.generate_hardware if mode == "split" else self.hardware
        one = Served(
            model=self.workload.model, hardware=hardware, engine=self.engine, precision=self.precision, related=True
        )
        framework = self.framework
        usual = framework.cache_share_alone if mode == "split" else framework.cache_share
        return shared_engine(one, self.memory_share or usual)

    def max_batch(self, mode: str, ahead: bool) -> int:
        """Answers that an engine runs at once at most, per attention rank."""
        framework, hardware = self.framework, self.generate_hardware if mode == "split" else self.hardware
        said = (framework.max_batch_ahead if ahead else 0) or framework.max_batch
        return said or int(self.engine.default_max_batch(hardware, ServingLayout()))

    def replace(self, **changes: object) -> RlJob:
        """With some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
