"""The factors that a user's runs may correct: the physically meaningful free constants of a profile and a trainer.

Each multiplies one thing that a machine or a software stack achieves, never what a part is by its datasheet. The prior of a
factor says how far machines of one kind differ in it; its source stands next to it. Nothing is keyed to a model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.curves import least_factor
from planner.hardware import HardwareProfile
from planner.questions.accuracy.prediction import predict
from planner.questions.calibrate.fit import Unknown
from planner.runs import Run
from planner.trainer import Trainer

Pair = tuple[HardwareProfile, Trainer]
"""What a factor can change of a run."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One factor; 1 = as the profile says."""

    key: str
    """Where it lives: a name of hardware.SCALES, or the field of Trainer that it multiplies."""
    of: str
    """'hardware' or 'trainer'."""
    fits: str
    """'time' or 'memory'."""
    name: str
    """What it is called in sentences and tables."""
    what: str
    """What it physically is."""
    low: float
    """Smallest factor that makes sense."""
    high: float
    """Largest, before what the profile itself allows (``highest``)."""
    width: float
    """How far machines differ: standard deviation of its logarithm before any run is seen."""
    why: str
    """Where the width comes from."""
    used: Callable[[Run], bool]
    """The run uses it at all."""
    unused: str
    """Sentence when no run does."""
    hidden: str
    """Sentence when runs use it, but their time or memory hardly depends on it."""
    helps: str
    """Which runs would tell it."""


def _always(run: Run) -> bool:
    return True


def _crosses(run: Run) -> bool:
    """Some of its groups reach over the end of a scale-up domain."""
    return run.cluster is not None and run.cluster.num_gpus > run.cluster.domain


def _several(run: Run) -> bool:
    return run.cluster is not None and run.cluster.num_gpus > 1


def _reserved(run: Run) -> bool:
    return run.measured.memory_kind in ("reserved", "device")


FACTORS: tuple[Factor, ...] = (
    Factor(
        key="sustained_clock", of="hardware", fits="time", name="sustained clock",
        what="rate of tensor-core work in a training run over a short burst: power and cooling",
        low=0.5, high=1.6, width=0.10,
        why="0.82 to 0.95 between generations; the cube root of the power limit: 0.89 at 500 of 700 W",
        used=_always, unused="no run was timed", hidden="your runs hardly wait for tensor cores",
        helps="runs that are nearly all matrix products (large micro batch, no tensor parallelism)",
    ),
    Factor(
        key="memory_fraction", of="hardware", fits="time", name="memory bandwidth",
        what="share of the memory bandwidth that norms, activations, losses and the optimizer reach",
        low=0.3, high=1.5, width=0.10, why="measured shares of one class of kernels on different GPUs differ by a tenth",
        used=_always, unused="no run was timed", hidden="memory-bound work is too small a part of your runs",
        helps="runs of a small hidden size, or with few tokens per optimizer step",
    ),
    Factor(
        key="scale_up", of="hardware", fits="time", name="network inside a node",
        what="bandwidth of collectives inside a node (NVLink, xGMI or PCIe) over the measured curves",
        low=0.1, high=2.0, width=0.20, why="measured all-reduce over NVLink differs by a fifth between NCCL versions",
        used=_several, unused="none of your runs uses more than one GPU",
        hidden="communication inside a node is hidden or small in your runs",
        helps="runs with tensor parallelism of 4 and more inside a node, and others without",
    ),
    Factor(
        key="scale_out", of="hardware", fits="time", name="network across nodes",
        what="share of the line rate of the NICs that collectives across nodes reach",
        low=0.05, high=2.0, width=0.35, why="jobs of one cluster reached 0.2 to 1 of the line rate (nanotron sweeps)",
        used=_crosses, unused="none of your runs crosses a node",
        hidden="communication across nodes is hidden or small in your runs",
        helps="runs of the same model on one and on several nodes, with few microbatches",
    ),
    Factor(
        key="network_latency", of="hardware", fits="time", name="latency across nodes",
        what="latencies of collectives across nodes over those of the profile",
        low=0.2, high=30.0, width=1.1, why="EFA has 5.6 to 8.7 times that of RoCE (nanotron sweeps)",
        used=_crosses, unused="none of your runs crosses a node",
        hidden="messages across nodes are large or few in your runs",
        helps="runs with small messages across nodes: tensor or context parallelism over nodes, small buckets",
    ),
    Factor(
        key="host_time", of="trainer", fits="time", name="host time per kernel",
        what="work of the host per kernel launched: Python, autograd, dispatch; the speed of one CPU core",
        low=0.05, high=30.0, width=1.0, why="7 to 125 us between frameworks",
        used=_always, unused="no run was timed", hidden="none of your runs waits for the host",
        helps="runs of small layers: micro batch 1, short sequences, high tensor parallelism, no CUDA graphs",
    ),
    Factor(
        key="step_overhead", of="trainer", fits="time", name="overhead per step",
        what="seconds per optimizer step that are neither computation nor communication: data, logging, gradient norm",
        low=0.02, high=200.0, width=1.6, why="10 to 20 ms assumed; 0 to seconds where data or logging waits",
        used=_always, unused="no run was timed", hidden="your steps are long against it",
        helps="runs with few microbatches per step and runs with many",
    ),
    Factor(
        key="fragmentation", of="trainer", fits="memory", name="fragmentation",
        what="memory that the allocator holds on top of what was asked for",
        low=0.05, high=20.0, width=0.9, why="0.03 to 0.21 of the peak between frameworks",
        used=_reserved, unused="none of your runs reports reserved or device memory", hidden="it is a small part of the peak",
        helps="runs that report reserved memory",
    ),
)  # fmt: skip
"""All of them, in the order of the report."""


def highest(factor: Factor, hardware: HardwareProfile, trainer: Trainer) -> float:
    """Largest factor that stays physical: no faster than the burst, the memory, the line rate or the link."""
    most = factor.high
    if factor.key == "sustained_clock":
        most = 1.0 / hardware.sustained_clock
    elif factor.key == "memory_fraction":
        most = 1.0 / max(hardware.memory_fraction.values())
    elif factor.key == "scale_out":
        most = 1.0 / max(max(c.fast.efficiency, c.bulk.efficiency) for c in hardware.scale_out.values())
    elif factor.key == "scale_up":
        most = _link_room(hardware)
    elif factor.key == "fragmentation" and trainer.stored.fragmentation > 0:
        most = 1.0 / trainer.stored.fragmentation
    return min(factor.high, most)


def _link_room(hardware: HardwareProfile) -> float:
    """How much faster collectives inside a node may get before some message would outrun its link.

    t' = l + (t - l) / f >= s, s the least time on the link: f <= (t - l) / (s - l).
    """
    room = math.inf
    for op, curve in hardware.scale_up.items():
        for group, row in zip(curve.groups, curve.seconds, strict=True):
            link = hardware.scale_up_bandwidth if group <= hardware.scale_up_domain else hardware.pcie_bandwidth
            least = least_factor(op, group) * curve.sizes / link
            bound = least > row[0] * 1.001
            if np.any(bound):
                room = min(room, float(np.min((row[bound] - row[0]) / (least[bound] - row[0]))))
    return max(room, 1.0)


def unknown(factor: Factor, hardware: HardwareProfile, trainer: Trainer) -> Unknown:
    """The factor as an unknown of the fit: its logarithm."""
    high = max(highest(factor, hardware, trainer), 1.0)
    return Unknown(name=factor.name, low=math.log(factor.low), high=math.log(high), width=factor.width)


def with_factors(runs: Sequence[Run], values: Mapping[str, float]) -> list[Run]:
    """The runs with factors applied to their hardware and their trainer, by key."""

    def change(hardware: HardwareProfile, trainer: Trainer) -> Pair:
        return achieved(hardware, trainer, values)

    return changed(runs, change)


def achieved(hardware: HardwareProfile, trainer: Trainer, values: Mapping[str, float]) -> Pair:
    """Hardware and trainer with the factors applied."""
    scales = {one.key: values[one.key] for one in FACTORS if one.of == "hardware" and values.get(one.key, 1.0) != 1.0}
    fields: dict[str, Any] = {
        one.key: trainer.fact(one.key) * values[one.key]
        for one in FACTORS
        if one.of == "trainer" and values.get(one.key, 1.0) != 1.0
    }
    return hardware.achieving(**scales), trainer.replace(**fields) if fields else trainer


# ------------------------------------------------------------------------------------------------ runs with other constants


def measured(run: Run, fits: str) -> float | None:
    """What the run measured: seconds per step, or bytes of peak memory; None = not measured."""
    return run.measured.step_time if fits == "time" else run.measured.memory


def changed(runs: Sequence[Run], change: Callable[[HardwareProfile, Trainer], Pair]) -> list[Run]:
    """The runs with another hardware and trainer; ``change`` is asked once per pair of them.

    Runs that shared both share them after, and are still priced in one call; where nothing changes the run stays.
    """
    known: dict[tuple[int, int], Pair] = {}
    result = []
    for run in runs:
        if run.cluster is None or run.trainer is None:
            result.append(run)
            continue
        before = (run.cluster.hardware, run.trainer)
        key = (id(before[0]), id(before[1]))
        if key not in known:
            known[key] = change(*before)
        hardware, trainer = known[key]
        if hardware is before[0] and trainer is before[1]:
            result.append(run)
        else:
            result.append(replace(run, cluster=replace(run.cluster, hardware=hardware), trainer=trainer))
    return result


def predicted(runs: Sequence[Run], fits: str) -> Floats:
    """Predicted seconds or bytes of every run; nan where it cannot be priced."""
    found = [one.step_time if fits == "time" else one.memory for one in predict(runs)]
    return np.array([value or math.nan for value in found])


def log_errors(runs: Sequence[Run], fits: str) -> Floats:
    """ln(predicted / measured) of runs that were measured and that the cost model can price (``usable``)."""
    return np.log(predicted(runs, fits)) - np.log([float(measured(run, fits) or math.nan) for run in runs])


def usable(runs: Sequence[Run], fits: str) -> list[Run]:
    """The runs that measured time or memory and that the cost model can price."""
    candidates = [run for run in runs if not run.unsupported and measured(run, fits)]
    good = np.isfinite(predicted(candidates, fits))
    return [run for run, ok in zip(candidates, good, strict=True) if ok]
