"""The numbers of a profile that a choice may hang on, each with the way to scale it and the test that measures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from planner.defaults import ResolvedJob
from planner.hardware import HardwareProfile
from planner.questions.best_plan import on_cluster


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number or curve of a profile that can be multiplied."""

    key: str
    """Short name: the key in --json."""
    text: str
    """What it is."""
    unit: str
    """'rate': more is better; 'time': less is better; 'size'."""
    family: str
    """Family of ``HardwareProfile.measured`` it belongs to; '' = a plain figure."""
    scale: Callable[[ResolvedJob, float], ResolvedJob]
    """The job with it multiplied."""
    most: Callable[[HardwareProfile], float]
    """Largest factor that physics allows: no kernel above its peak, no memory above its bandwidth."""
    measure: str
    """What measures it on a user's machine."""

    def origin(self, hardware: HardwareProfile) -> str:
        """How the profile knows it: 'measured', 'scaled from <profile>', 'assumed' or 'data sheet'."""
        if self.family:
            return hardware.measured[self.family]
        return {"usable_memory": "read from the driver", "launch": "measured", "network_latency": "measured"}.get(
            self.key, "assumed" if self.key in hardware.unverified else "data sheet"
        )


def _no_limit(_: HardwareProfile) -> float:
    return float("inf")


def _hardware(
    change: Callable[[HardwareProfile, float], HardwareProfile],
) -> Callable[[ResolvedJob, float], ResolvedJob]:
    return lambda resolved, factor: on_cluster(resolved, hardware=change(resolved.job.cluster.hardware, factor))


def _gemm(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """GEMM rates multiplied, launches kept; the curves themselves never pass the peak."""
    curves = {
        name: dataclasses.replace(
            one, efficiency=one.efficiency * factor, memory_efficiency=one.memory_efficiency * factor
        )
        for name, one in hardware.gemm.items()
    }
    return dataclasses.replace(hardware, gemm=curves)


def _attention(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    curves = {
        key: dataclasses.replace(one, efficiency=one.efficiency * factor) for key, one in hardware.attention.items()
    }
    return dataclasses.replace(hardware, attention=curves)


def _launch(resolved: ResolvedJob, factor: float) -> ResolvedJob:
    """Host work per kernel of the trainer, and the GPU's own floor per kernel."""
    hardware = resolved.job.cluster.hardware.scaled(launch_floor=factor, graph_launch_floor=factor)
    moved = on_cluster(resolved, hardware=hardware)
    trainer = dataclasses.replace(moved.job.trainer, host_time=moved.job.trainer.host.host_time * factor)
    return dataclasses.replace(moved, job=dataclasses.replace(moved.job, trainer=trainer))


def _gemm_most(hardware: HardwareProfile) -> float:
    return 1.0 / max(one.efficiency for one in hardware.gemm.values())


def _attention_most(hardware: HardwareProfile) -> float:
    return 1.0 / max(float(one.efficiency.max()) for one in hardware.attention.values())


def _memory_most(hardware: HardwareProfile) -> float:
    return 1.0 / max(hardware.memory_fraction.values())


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        key="network", text="bandwidth between nodes", unit="rate", family="scale_out", most=_no_limit,
        scale=_hardware(lambda one, factor: one.scaled(network_bandwidth=factor)),
        measure="nccl-tests all_reduce and reduce_scatter over 4 nodes or more",
    ),
    Quantity(
        key="network_latency", text="latency between nodes", unit="time", family="", most=_no_limit,
        scale=_hardware(lambda one, factor: one.achieving(network_latency=factor)),
        measure="nccl-tests with messages of 8 B to 64 KiB over all nodes of the job",
    ),
    Quantity(
        key="scale_up", text="bandwidth inside a node", unit="rate", family="scale_up", most=_no_limit,
        scale=_hardware(lambda one, factor: one.achieving(scale_up=factor)),
        measure="nccl-tests all_gather and reduce_scatter inside one node",
    ),
    Quantity(
        key="gemm", text="matrix multiplication", unit="rate", family="gemm", most=_gemm_most, scale=_hardware(_gemm),
        measure="the model's GEMM shapes on one GPU, warm and for minutes: power limits show late",
    ),
    Quantity(
        key="attention", text="attention kernels", unit="rate", family="attention", most=_attention_most,
        scale=_hardware(_attention), measure="attention forward and backward at the job's sequence length on one GPU",
    ),
    Quantity(
        key="memory_bandwidth", text="memory-bound kernels", unit="rate", family="memory", most=_memory_most,
        scale=_hardware(lambda one, factor: one.achieving(memory_fraction=factor)),
        measure="norms, activations and the optimizer step on one GPU",
    ),
    Quantity(
        key="launch", text="host time per kernel", unit="time", family="", most=_no_limit, scale=_launch,
        measure="a profile of a few steps with a small micro batch: gaps between kernels",
    ),
    Quantity(
        key="usable_memory", text="usable memory of a GPU", unit="size", family="", most=_no_limit,
        scale=_hardware(lambda one, factor: one.scaled(usable_memory=factor)),
        measure="a few steps on one pipeline's GPUs; reserved memory in the trainer's log against the plan's",
    ),
)  # fmt: skip
OFFLOAD_QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        key="pcie_bandwidth", text="bandwidth to the host", unit="rate", family="", most=_no_limit,
        scale=_hardware(lambda one, factor: one.scaled(pcie_bandwidth=factor)),
        measure="copies between pinned host memory and all GPUs of a node at once",
    ),
    Quantity(
        key="host_memory_bandwidth", text="host memory bandwidth", unit="rate", family="", most=_no_limit,
        scale=_hardware(lambda one, factor: one.scaled(host_memory_bandwidth=factor)),
        measure="STREAM on all sockets of a node",
    ),
    Quantity(
        key="host_memory", text="host memory of a node", unit="size", family="", most=_no_limit,
        scale=_hardware(lambda one, factor: one.scaled(host_memory=factor)), measure="read it off: free -h",
    ),
)  # fmt: skip
"""Looked at where the best plan keeps states on the host."""


def relevant(resolved: ResolvedJob, offloads: bool) -> tuple[Quantity, ...]:
    """The quantities that can change this job: no network inside one domain, no host where nothing is kept there."""
    cluster = resolved.job.cluster
    inside = cluster.num_gpus <= cluster.domain
    shown = [
        one for one in QUANTITIES
        if not (one.key.startswith("network") and inside) and not (one.key == "scale_up" and cluster.num_gpus == 1)
    ]  # fmt: skip
    return (*shown, *(OFFLOAD_QUANTITIES if offloads else ()))


__all__ = ["OFFLOAD_QUANTITIES", "QUANTITIES", "Quantity", "relevant"]
