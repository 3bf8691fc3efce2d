"""The numbers of a profile that a choice may depend on, each with the way to scale it and the test that measures it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.defaults import ResolvedJob
from planner.hardware import HardwareProfile
from planner.questions.best_plan import on_cluster, with_job
from planner.record import record

_READ = {"usable_memory": "read from the driver", "launch": "measured", "network_latency": "measured"}


@record
class Quantity:
    """One number or curve of a profile that can be multiplied."""

    key: str
    """Short name: the key in --json."""
    text: str
    """The number in words."""
    unit: str
    """'rate': more is better; 'time': less is better; 'size'."""
    measure: str
    """How to measure it on a user's machine."""
    scaled: list[str] = dataclasses.field(default_factory=list)
    """Figures of the profile that it multiplies."""
    achieving: list[str] = dataclasses.field(default_factory=list)
    """Names of hardware.SCALES that it multiplies."""
    curves: list[str] = dataclasses.field(default_factory=list)
    """Fields of the curves of its family that it multiplies."""
    family: str = ""
    """Family of ``HardwareProfile.measured`` it belongs to; '' = a plain figure."""
    host: bool = False
    """The trainer's host time is multiplied too."""
    offload: bool = False
    """It matters only where the best plan keeps states on the host."""

    def most(self, hardware: HardwareProfile) -> float:
        """Largest factor that physics allows: no kernel above its peak, no memory above its bandwidth."""
        if self.curves:
            return 1.0 / max(float(np.max(one.efficiency)) for one in getattr(hardware, self.family).values())
        return 1.0 / max(hardware.memory_fraction.values()) if "memory_fraction" in self.achieving else math.inf

    def scale(self, resolved: ResolvedJob, factor: float) -> ResolvedJob:
        """The job with it multiplied."""
        hardware = resolved.job.cluster.hardware
        hardware = hardware.scaled(**dict.fromkeys(self.scaled, factor))
        hardware = hardware.achieving(**dict.fromkeys(self.achieving, factor))
        if self.curves:
            curves = {}
            for name, one in getattr(hardware, self.family).items():
                curves[name] = dataclasses.replace(one, **{key: getattr(one, key) * factor for key in self.curves})
            changed: dict[str, Any] = {self.family: curves}
            hardware = dataclasses.replace(hardware, **changed)
        moved = on_cluster(resolved, hardware=hardware)
        if not self.host:
            return moved
        trainer = moved.job.trainer
        return with_job(moved, trainer=trainer.replace(host_time=trainer.host.host_time * factor))

    def origin(self, hardware: HardwareProfile) -> str:
        """How the profile knows it: 'measured', 'scaled from <profile>', 'assumed' or 'data sheet'."""
        if self.family:
            return hardware.measured[self.family]
        return _READ.get(self.key, "assumed" if self.key in hardware.unverified else "data sheet")


QUANTITIES = tuple(
    Quantity(key=key, **said) for key, said in library.read_yaml(Path(__file__).with_name("quantities.yaml")).items()
)


def relevant(resolved: ResolvedJob, offloads: bool) -> tuple[Quantity, ...]:
    """The quantities that can change this job: no network inside one domain, no host where nothing is kept there."""
    cluster = resolved.job.cluster
    idle = {"network", "network_latency"} if cluster.num_gpus <= cluster.domain else set()
    idle |= {"scale_up"} if cluster.num_gpus == 1 else set()
    return tuple(one for one in QUANTITIES if one.key not in idle and (offloads or not one.offload))
