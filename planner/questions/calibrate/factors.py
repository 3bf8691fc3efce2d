"""The factors that a user's runs may correct: the physically meaningful free constants of a profile and a trainer.

Each multiplies one thing that a machine or a software stack achieves, never what a part is by its datasheet. The prior of a
factor says how far machines of one kind differ in it; its source stands next to it. Nothing is keyed to a model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.arrays import Floats
from planner.cluster import Cluster
from planner.curves import least_factor
from planner.hardware import HardwareProfile
from planner.questions.accuracy.prediction import predict
from planner.record import record
from planner.runs import Run
from planner.trainer import Trainer

Pair = tuple[HardwareProfile, Trainer]
"""What a factor can change of a run."""


@record
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
    used: str
    """Which runs use it at all: of ``_USES``."""
    hidden: str
    """Sentence when runs use it, but their time or memory hardly depends on it."""
    helps: str
    """Which runs would tell it."""

    def unused(self, runs: Sequence[Run]) -> str:
        """The sentence when none of the runs uses it; '' when one does."""
        use, sentence = _USES[self.used]
        return "" if any(run.cluster and use(run, run.cluster) for run in runs) else sentence


_USES: dict[str, tuple[Callable[[Run, Cluster], bool], str]] = {
    "always": (lambda run, cluster: True, "no run was timed"),
    "several GPUs": (lambda run, cluster: cluster.num_gpus > 1, "none of your runs uses more than one GPU"),
    "across nodes": (lambda run, cluster: cluster.num_gpus > cluster.domain, "none of your runs crosses a node"),
    "reserved memory": (
        lambda run, cluster: run.measured.memory_kind in ("reserved", "device"),
        "none of your runs reports reserved or device memory",
    ),
}
"""Which runs use a factor at all, and the sentence when none does."""
FACTORS = tuple(
    Factor(key=key, **said) for key, said in library.read_yaml(Path(__file__).with_name("factors.yaml")).items()
)
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


def bounds(factors: Sequence[Factor], hardware: HardwareProfile, trainer: Trainer) -> Floats:
    """Least and largest logarithm of each factor, and the width of its prior, (3, K)."""
    ends = [(math.log(one.low), math.log(max(highest(one, hardware, trainer), 1.0)), one.width) for one in factors]
    return np.array(ends, dtype=float).reshape(-1, 3).T


def with_factors(runs: Sequence[Run], values: Mapping[str, float]) -> list[Run]:
    """The runs with factors applied to their hardware and their trainer, by key."""
    return changed(runs, lambda hardware, trainer: achieved(hardware, trainer, values))


def achieved(hardware: HardwareProfile, trainer: Trainer, values: Mapping[str, float]) -> Pair:
    """Hardware and trainer with the factors applied."""
    moved = {one: values[one.key] for one in FACTORS if values.get(one.key, 1.0) != 1.0}
    scales = {one.key: value for one, value in moved.items() if one.of == "hardware"}
    facts: dict[str, Any] = {one.key: trainer.fact(one.key) * value for one, value in moved.items() if one.of == "trainer"}
    return hardware.achieving(**scales), trainer.replace(**facts) if facts else trainer


# ------------------------------------------------------------------------------------------------ runs with other constants


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


def log_errors(runs: Sequence[Run], fits: str) -> Floats:
    """ln(predicted / measured) of the time or memory of every run; nan where it cannot be priced or was not measured."""
    which = "step_time" if fits == "time" else "memory"
    pairs = zip(predict(runs), runs, strict=True)
    found = [[getattr(one, which) or math.nan, getattr(run.measured, which) or math.nan] for one, run in pairs]
    return np.diff(np.log(np.array(found).reshape(-1, 2)[:, ::-1]))[:, 0]


def usable(runs: Sequence[Run], fits: str) -> list[Run]:
    """The runs that measured time or memory and that the cost model can price."""
    supported = [run for run in runs if not run.unsupported]
    return [run for run, error in zip(supported, log_errors(supported, fits), strict=True) if math.isfinite(error)]
