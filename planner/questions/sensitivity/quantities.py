"""The numbers of a profile that a choice may depend on, each with the way to scale it and the test that measures it."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.defaults import ResolvedJob
from planner.hardware import HardwareProfile
from planner.questions.best_plan import on_cluster, with_job

_READ = {"usable_memory": "read from the driver", "launch": "measured", "network_latency": "measured"}


@dataclass(frozen=True, kw_only=True)
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
    scaled: Callable[[HardwareProfile, float], HardwareProfile]
    """The profile with it multiplied."""
    family: str = ""
    """Family of ``HardwareProfile.measured`` it belongs to; '' = a plain figure."""
    most: Callable[[HardwareProfile], float] = lambda _: math.inf
    """Largest factor that physics allows: no kernel above its peak, no memory above its bandwidth."""
    host: bool = False
    """The trainer's host time is multiplied too."""
    offload: bool = False
    """It matters only where the best plan keeps states on the host."""

    def scale(self, resolved: ResolvedJob, factor: float) -> ResolvedJob:
        """The job with it multiplied."""
        moved = on_cluster(resolved, hardware=self.scaled(resolved.job.cluster.hardware, factor))
        if not self.host:
            return moved
        trainer = moved.job.trainer
        return with_job(moved, trainer=trainer.replace(host_time=trainer.host.host_time * factor))

    def origin(self, hardware: HardwareProfile) -> str:
        """How the profile knows it: 'measured', 'scaled from <profile>', 'assumed' or 'data sheet'."""
        if self.family:
            return hardware.measured[self.family]
        return _READ.get(self.key, "assumed" if self.key in hardware.unverified else "data sheet")


def _gemm(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """GEMM rates multiplied, launches kept; the curves themselves never pass the peak."""
    curves = dict(hardware.gemm)
    for name, one in curves.items():
        memory = one.memory_efficiency * factor
        curves[name] = dataclasses.replace(one, efficiency=one.efficiency * factor, memory_efficiency=memory)
    return dataclasses.replace(hardware, gemm=curves)


def _attention(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    curves = {
        key: dataclasses.replace(one, efficiency=one.efficiency * factor) for key, one in hardware.attention.items()
    }
    return dataclasses.replace(hardware, attention=curves)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        key="network", text="bandwidth between nodes", unit="rate", family="scale_out",
        scaled=lambda one, factor: one.scaled(network_bandwidth=factor),
        measure="nccl-tests all_reduce and reduce_scatter over 4 nodes or more",
    ),
    Quantity(
        key="network_latency", text="latency between nodes", unit="time",
        scaled=lambda one, factor: one.achieving(network_latency=factor),
        measure="nccl-tests with messages of 8 B to 64 KiB over all nodes of the job",
    ),
    Quantity(
        key="scale_up", text="bandwidth inside a node", unit="rate", family="scale_up",
        scaled=lambda one, factor: one.achieving(scale_up=factor),
        measure="nccl-tests all_gather and reduce_scatter inside one node",
    ),
    Quantity(
        key="gemm", text="matrix multiplication", unit="rate", family="gemm", scaled=_gemm,
        most=lambda one: 1.0 / max(curve.efficiency for curve in one.gemm.values()),
        measure="the model's GEMM shapes on one GPU, warm and for minutes: power limits show late",
    ),
    Quantity(
        key="attention", text="attention kernels", unit="rate", family="attention", scaled=_attention,
        most=lambda one: 1.0 / max(float(curve.efficiency.max()) for curve in one.attention.values()),
        measure="attention forward and backward at the job's sequence length on one GPU",
    ),
    Quantity(
        key="memory_bandwidth", text="memory-bound kernels", unit="rate", family="memory",
        scaled=lambda one, factor: one.achieving(memory_fraction=factor),
        most=lambda one: 1.0 / max(one.memory_fraction.values()),
        measure="norms, activations and the optimizer step on one GPU",
    ),
    Quantity(  # host work per kernel of the trainer, and the GPU's own floor per kernel
        key="launch", text="host time per kernel", unit="time", host=True,
        scaled=lambda one, factor: one.scaled(launch_floor=factor, graph_launch_floor=factor),
        measure="a profile of a few steps with a small micro batch: gaps between kernels",
    ),
    Quantity(
        key="usable_memory", text="usable memory of a GPU", unit="size",
        scaled=lambda one, factor: one.scaled(usable_memory=factor),
        measure="a few steps on one pipeline's GPUs; reserved memory in the trainer's log against the plan's",
    ),
    Quantity(
        key="pcie_bandwidth", text="bandwidth to the host", unit="rate", offload=True,
        scaled=lambda one, factor: one.scaled(pcie_bandwidth=factor),
        measure="copies between pinned host memory and all GPUs of a node at once",
    ),
    Quantity(
        key="host_memory_bandwidth", text="host memory bandwidth", unit="rate", offload=True,
        scaled=lambda one, factor: one.scaled(host_memory_bandwidth=factor), measure="STREAM on all sockets of a node",
    ),
    Quantity(
        key="host_memory", text="host memory of a node", unit="size", offload=True,
        scaled=lambda one, factor: one.scaled(host_memory=factor), measure="read it off: free -h",
    ),
)  # fmt: skip


def relevant(resolved: ResolvedJob, offloads: bool) -> tuple[Quantity, ...]:
    """The quantities that can change this job: no network inside one domain, no host where nothing is kept there."""
    cluster = resolved.job.cluster
    idle = {"network", "network_latency"} if cluster.num_gpus <= cluster.domain else set()
    idle |= {"scale_up"} if cluster.num_gpus == 1 else set()
    return tuple(one for one in QUANTITIES if one.key not in idle and (offloads or not one.offload))
