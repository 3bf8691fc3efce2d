"""Plan: the chosen layout with its inputs, its estimate and what was assumed; to YAML and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.cluster import Cluster
from planner.cost.estimate import HIDDEN, PARTS, Estimate
from planner.cost.memory.states import COMPONENTS
from planner.error_bars import error_bar, kind_of
from planner.errors import PlannerError, nearest_first
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.rules import Job
from planner.trainer import Trainer, load_trainer
from planner.units import GIB, parse
from planner.workload import Workload

VERSION = 2
"""Format of plan files. A file of another format is refused."""
STAGE_NAMES = ("first", "middle", "last")


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Something the user did not say."""

    what: str
    """Name of the input."""
    value: str
    """What was taken."""
    why: str
    """Where it comes from."""
    flag: str
    """The flag that changes it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An estimate of one layout as plain numbers: what plan files, tables and --json show."""

    step_time_s: float
    """Seconds of one optimizer step."""
    step_time_range_s: tuple[float, float]
    """Nine of ten measured steps lie within, by the residuals of published runs like it."""
    step_time_range_basis: str
    """Which runs those were."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOP utilisation: causal attention halved, head counted, recompute not counted."""
    bubble_share: float
    """Idle time of the pipeline over the step time."""
    time_s: dict[str, float]
    """Seconds by part; they sum to step_time_s."""
    hidden_s: dict[str, float]
    """Seconds of communication behind computation, not part of the step time."""
    memory_gib: dict[str, float]
    """GiB per GPU by component on the stage with the highest peak."""
    memory_peak_gib: float
    """Sum of memory_gib: the peak of the device."""
    memory_peak_range_gib: tuple[float, float]
    """Nine of ten measured peaks lie within, by the residuals of published runs like it."""
    memory_limit_gib: float
    """What the driver reports as usable."""
    memory_stage: str
    """Pipeline stage of the peak: first, middle or last."""
    out_of_memory_probability: float
    host_memory_gib_per_gpu: float
    """Host memory for offloaded states."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed communication by kind, seconds per step."""
        return {
            name.removesuffix("_communication"): value for name, value in self.time_s.items() if "communication" in name
        }


def predict(found: Estimate, job: Job, kind: str, index: int = 0) -> Prediction:
    """Plain numbers of one candidate of an estimate; ``kind`` of run as in ``error_bars.kind_of``."""
    step, peak = float(found.step_time[index]), float(found.memory_peak[index]) / GIB
    times = error_bar("step_time", job.trainer, job.cluster.hardware, kind)
    memory = error_bar("memory", job.trainer, job.cluster.hardware, kind)
    return Prediction(
        step_time_s=step,
        step_time_range_s=times.interval(step),
        step_time_range_basis=times.basis,
        tokens_per_second_per_gpu=float(found.tokens_per_second_per_gpu[index]),
        mfu=float(found.mfu[index]),
        bubble_share=float(found.bubble_share[index]),
        time_s={name: float(found.time[name][index]) for name in PARTS},
        hidden_s={name: float(found.hidden[name][index]) for name in HIDDEN},
        memory_gib={name: float(found.memory[name][index]) / GIB for name in COMPONENTS},
        memory_peak_gib=peak,
        memory_peak_range_gib=memory.interval(peak),
        memory_limit_gib=found.usable_memory / GIB,
        memory_stage=STAGE_NAMES[int(found.stage[index])],
        out_of_memory_probability=float(found.out_of_memory_probability[index]),
        host_memory_gib_per_gpu=float(found.host_memory[index]) / GIB,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout for one job, with everything needed to price, export or run it again."""

    workload: Workload
    hardware: str
    """Library name or path of the hardware profile."""
    num_gpus: int
    trainer: str
    """Library name or path of the trainer."""
    layout: Layout
    prediction: Prediction
    network_bandwidth: float | None = None
    """Bytes/s per GPU, one direction, where it is not the profile's."""
    assumptions: tuple[Assumption, ...] = ()
    why: str = ""
    """Why this layout and not the next."""

    def cluster(self) -> Cluster:
        """The cluster, its profile read again."""
        return Cluster(hardware=self._on_its_network(load_hardware(self.hardware)), num_gpus=self.num_gpus)

    def kind(self) -> str:
        """Kind of run, which chooses its error bar."""
        listed = load_hardware(self.hardware)
        return kind_of(self.workload, self._on_its_network(listed), listed.network_bandwidth)

    def _on_its_network(self, hardware: HardwareProfile) -> HardwareProfile:
        """The profile with the plan's own network, where it has one."""
        if self.network_bandwidth is None:
            return hardware
        return dataclasses.replace(hardware, network_bandwidth=self.network_bandwidth)

    def load_trainer(self) -> Trainer:
        """The trainer, read again."""
        return load_trainer(self.trainer)

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a plan file."""
        prediction = {
            key: list(value) if isinstance(value, tuple) else value for key, value in vars(self.prediction).items()
        }
        return {
            "planner_plan": VERSION,
            "workload": self.workload.to_dict(),
            "cluster": {
                "hardware": self.hardware,
                "num_gpus": self.num_gpus,
                "network_bandwidth": None if self.network_bandwidth is None else f"{self.network_bandwidth!r} B/s",
            },
            "trainer": self.trainer,
            "layout": self.layout.to_dict(),
            "estimate": prediction,
            "why": self.why,
            "assumptions": [vars(one) for one in self.assumptions],
        }

    def save(self, path: Path) -> None:
        """Write the plan file, whole or not at all."""
        library.write_whole(path, library.dump_yaml(self.to_dict()))


def load_plan(path: Path) -> Plan:
    """Read a plan file. Raises PlannerError with file and key when it is damaged, or newer than this planner."""
    return plan_from_dict(library.read_yaml(path), where=str(path))


def plan_from_dict(data: Mapping[str, Any], *, where: str = "plan") -> Plan:
    """A plan from plain data. Raises PlannerError."""
    version = data.get("planner_plan")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PlannerError(f"{where}: not a plan file: the key 'planner_plan' with its version number is missing")
    if version > VERSION:
        raise PlannerError(
            f"{where}: the plan has version {version}, this planner reads up to {VERSION}; update planner to read it"
        )
    if version < VERSION:
        raise PlannerError(
            f"{where}: the plan has the older format {version}, this planner reads {VERSION}; make it again with --output"
        )
    keys = ("planner_plan", "workload", "cluster", "trainer", "layout", "estimate", "why", "assumptions")
    _expect(data, keys, where)
    cluster = _mapping(data["cluster"], ("hardware", "num_gpus", "network_bandwidth"), f"{where}: cluster")
    num_gpus = cluster["num_gpus"]
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        raise PlannerError(f"{where}: cluster: num_gpus is {num_gpus!r}; it must be a whole number from 1")
    network = cluster["network_bandwidth"]
    if network is not None:
        network = parse(network, "bytes/s", what=f"{where}: cluster: network_bandwidth")
    for name, value in (("cluster: hardware", cluster["hardware"]), ("trainer", data["trainer"]), ("why", data["why"])):
        if not isinstance(value, str):
            raise PlannerError(f"{where}: {name} is {value!r}; it must be a text")
    if not isinstance(data["workload"], Mapping) or not isinstance(data["layout"], Mapping):
        raise PlannerError(f"{where}: workload and layout must be mappings")
    if not isinstance(data["assumptions"], list):
        raise PlannerError(f"{where}: assumptions must be a list")
    return Plan(
        workload=Workload.from_dict(data["workload"], where=f"{where}: workload"),
        hardware=cluster["hardware"],
        num_gpus=num_gpus,
        network_bandwidth=network or None,
        trainer=data["trainer"],
        layout=Layout.from_dict(data["layout"], where=f"{where}: layout"),
        prediction=_prediction(data["estimate"], f"{where}: estimate"),
        assumptions=tuple(_assumption(one, f"{where}: assumptions") for one in data["assumptions"]),
        why=data["why"],
    )


def _prediction(data: Any, where: str) -> Prediction:
    names = tuple(field.name for field in dataclasses.fields(Prediction))
    data = dict(_mapping(data, names, where))
    parts = {"time_s": PARTS, "hidden_s": HIDDEN, "memory_gib": COMPONENTS}
    for key, value in data.items():
        if key in parts:
            inner = _mapping(value, tuple(parts[key]), f"{where}: {key}")
            data[key] = {name: _number(inner[name], f"{where}: {key}: {name}") for name in parts[key]}
        elif key in ("step_time_range_s", "memory_peak_range_gib"):
            if not isinstance(value, list) or len(value) != 2:
                raise PlannerError(f"{where}: {key} is {value!r}; it must be a list of two numbers")
            data[key] = (_number(value[0], f"{where}: {key}"), _number(value[1], f"{where}: {key}"))
        elif key == "step_time_range_basis":
            if not isinstance(value, str):
                raise PlannerError(f"{where}: {key} is {value!r}; it must be a text")
        elif key == "memory_stage":
            if value not in STAGE_NAMES:
                raise PlannerError(f"{where}: memory_stage is {value!r}; it must be one of {', '.join(STAGE_NAMES)}")
        else:
            data[key] = _number(value, f"{where}: {key}")
    return Prediction(**data)


def _assumption(data: Any, where: str) -> Assumption:
    data = _mapping(data, tuple(field.name for field in dataclasses.fields(Assumption)), where)
    if not all(isinstance(value, str) for value in data.values()):
        raise PlannerError(f"{where}: every value must be a text")
    return Assumption(**data)


def _mapping(data: Any, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PlannerError(f"{where}: expected a mapping with the keys {', '.join(keys)}")
    _expect(data, keys, where)
    return data


def _expect(data: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Exactly these keys."""
    for key in data:
        if key not in keys:
            raise PlannerError(f"{where}: unknown key '{key}'; nearest: {nearest_first(str(key), keys)[0]}")
    for key in keys:
        if key not in data:
            raise PlannerError(f"{where}: missing key '{key}'; the file is damaged or cut off")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise PlannerError(f"{where}: {value!r} is not a number")
    return float(value)


__all__ = ["Assumption", "Plan", "Prediction", "load_plan", "plan_from_dict", "predict"]
