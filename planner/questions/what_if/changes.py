"""Changes of a job, one at a time: ``x2``, ``800 Gb/s``, ``64..4096``, ``b200-sxm``; read, checked and applied."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner import units
from planner.defaults import Request, ResolvedJob, resolve
from planner.error_bars import kind_of
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import HardwareProfile, load_hardware
from planner.model import ModelSpec, load_model
from planner.questions.best_plan import on_cluster
from planner.trainer import load_trainer
from planner.workload import LORA_TARGETS, OPTIMIZERS, PRECISIONS

_FACTOR = re.compile(r"^\s*[x×]\s*(\S+)\s*$")
_RANGE = re.compile(r"^\s*([^.\s]+)\s*\.\.\s*([^.\s]+)\s*$")
_WHOLE = re.compile(r"^\s*(0|[1-9][0-9]{0,9})\s*$")
LARGEST_FACTOR = 1000.0
MOST_VALUES = 200
"""Values of one command; each is a search."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of one flag, as read."""

    flag: str
    """Field of Request, or name of a Machine."""
    text: str
    """What the user wrote."""
    number: float | None = None
    """A number in base units."""
    factor: float | None = None
    """'x2' is 2."""
    name: str | None = None
    """A name: hardware, trainer, model, precision, optimizer."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A figure of the hardware that a change may multiply or set."""

    unit: str
    """Dimension of units.parse; '' = only factors."""
    current: Callable[[HardwareProfile], float]
    """The profile's figure, base units."""
    scaled: Callable[[HardwareProfile, float], HardwareProfile]


def _link(hardware: HardwareProfile) -> str:
    return "scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth"


COUNTS = ("gpus", "sequence_length", "global_batch_size", "lora_rank", "document_length")
"""Flags of whole numbers; they take ranges."""
NAMES = ("model", "hardware", "trainer", "precision", "optimizer", "lora_targets")
"""Flags of names."""
MACHINES: Mapping[str, Machine] = {
    "network_latency": Machine(
        unit="seconds", current=lambda one: one.network_latency,
        scaled=lambda one, factor: one.achieving(network_latency=factor),
    ),
    "scale_up": Machine(
        unit="bytes/s", current=lambda one: float(getattr(one, _link(one))),
        scaled=lambda one, factor: one.scaled(**{_link(one): factor}),
    ),
    "memory": Machine(
        unit="bytes", current=lambda one: one.usable_memory,
        scaled=lambda one, factor: one.scaled(usable_memory=factor, memory=factor),
    ),
    "memory_bandwidth": Machine(
        unit="bytes/s", current=lambda one: one.memory_bandwidth,
        scaled=lambda one, factor: one.scaled(memory_bandwidth=factor),
    ),
    "compute": Machine(
        unit="", current=lambda one: one.peak("bf16"), scaled=lambda one, factor: one.scaled(peak_flops=factor),
    ),
}  # fmt: skip
"""Figures of the hardware beside the network's bandwidth."""
FLAGS = (*NAMES[:3], "gpus", *COUNTS[1:], *NAMES[3:], "expert_imbalance", "network", *MACHINES)


def flag_of(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def read_values(flag: str, texts: Sequence[str]) -> list[Value]:
    """The values of one flag: each text holds one or more, separated by commas. Raises PlannerError with the sentence."""
    found: list[Value] = []
    for part in [part for text in texts for part in text.split(",")]:
        if not part.strip():
            raise PlannerError(f"{flag_of(flag)}: a value is missing beside a comma")
        found += _read(flag, part.strip())
    if len(found) > MOST_VALUES:
        raise PlannerError(
            f"{flag_of(flag)}: {len(found)} values are too many; each is a search, give at most {MOST_VALUES}"
        )
    return found


def _read(flag: str, text: str) -> list[Value]:
    what = flag_of(flag)
    if flag in NAMES:
        _check_name(flag, text)
        return [Value(flag=flag, text=text, name=text)]
    if match := _FACTOR.match(text):
        return [Value(flag=flag, text=text, factor=_factor(what, text, match[1]))]
    if flag in COUNTS:
        if match := _RANGE.match(text):
            low, high = (_whole(what, end, text) for end in match.groups())
            return [Value(flag=flag, text=str(n), number=n) for n in _doublings(what, text, low, high)]
        return [Value(flag=flag, text=text, number=_whole(what, text, text))]
    if flag == "expert_imbalance":
        return [Value(flag=flag, text=text, number=_plain(what, text))]
    unit = "bytes/s" if flag == "network" else MACHINES[flag].unit
    if not unit:
        raise PlannerError(f"{what}: '{text}' is not a factor; write it like x1.5")
    number = units.parse(text, unit, what=what)
    if number <= 0:
        raise PlannerError(f"{what}: '{text}' must be above 0")
    return [Value(flag=flag, text=text, number=number)]


def _check_name(flag: str, name: str) -> None:
    loaders: dict[str, Callable[[str], Any]] = {"model": load_model, "hardware": load_hardware, "trainer": load_trainer}
    known: dict[str, Any] = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "lora_targets": LORA_TARGETS}
    if flag in loaders:
        loaders[flag](name)
    elif name not in known[flag]:
        raise UnknownNameError(flag.replace("_", " "), name, known[flag])


def _factor(what: str, text: str, digits: str) -> float:
    try:
        factor = float(digits)
    except ValueError:
        raise PlannerError(f"{what}: '{text}' is not a factor; write it like x2 or x0.5") from None
    if not 0.0 < factor <= LARGEST_FACTOR:
        raise PlannerError(f"{what}: '{text}' must be a factor above 0, at most {LARGEST_FACTOR:g}")
    return factor


def _plain(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise PlannerError(f"{what}: '{text}' is not a number")
    return number


def _whole(what: str, text: str, shown: str) -> int:
    if not _WHOLE.match(text) or (number := int(text)) > 2**27:
        raise PlannerError(
            f"{what}: '{shown}' is not a whole number up to {2**27}, a factor like x2 or a range like 64..4096"
        )
    return number


def _doublings(what: str, text: str, low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and high."""
    if low < 1:
        raise PlannerError(f"{what}: the range '{text}' must start at 1 or above")
    if low > high:
        raise PlannerError(f"{what}: the range '{text}' runs backwards; write {high}..{low}")
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A job with changes, not looked at yet."""

    label: str
    """The changes in words; 'base' without."""
    changed: tuple[str, ...]
    """The flags that were changed."""
    request: Request
    """Every field said."""
    machine: tuple[tuple[str, float], ...] = ()
    """Figures of the hardware that are multiplied, by name of MACHINES."""
    number: float | None = None
    """The changed number where one number was changed: what a sweep is plotted over."""

    def resolved(self) -> ResolvedJob:
        """The job, its files read. Raises PlannerError when it cannot be trained at all."""
        found = resolve(self.request)
        hardware = found.job.cluster.hardware
        for name, factor in self.machine:
            hardware = MACHINES[name].scaled(hardware, factor)
        usual = load_hardware(found.hardware).network_bandwidth
        kind = kind_of(found.job.workload, hardware, usual)
        return dataclasses.replace(on_cluster(found, hardware=hardware), kind=kind)


def complete_request(resolved: ResolvedJob) -> Request:
    """A request that says everything, so that nothing is assumed anew when one thing changes."""
    work = resolved.job.workload
    return Request(
        model=work.model, num_gpus=resolved.job.cluster.num_gpus, hardware=resolved.hardware, trainer=resolved.trainer,
        sequence_length=work.sequence_length, global_batch_size=work.global_batch_size, precision=work.precision,
        optimizer=work.optimizer, lora_rank=work.lora_rank, lora_targets=work.lora_targets,
        expert_imbalance=work.expert_imbalance, document_length=work.document_length,
        network_bandwidth=resolved.network_bandwidth,
    )  # fmt: skip


def base_variant(resolved: ResolvedJob) -> Variant:
    """The job as it is."""
    return Variant(label="base", changed=(), request=complete_request(resolved))


def apply(base: Variant, value: Value) -> Variant:
    """The variant with one more change. Raises PlannerError when a factor makes no whole number."""
    flag, request = value.flag, base.request
    machine, number, shown = base.machine, value.number, value.text
    if flag in MACHINES:
        hardware = load_hardware(str(request.hardware))
        factor = value.factor or (value.number or 0.0) / MACHINES[flag].current(hardware)
        machine, number = (*machine, (flag, factor)), factor
    elif flag == "network":
        now = request.network_bandwidth or load_hardware(str(request.hardware)).network_bandwidth
        rate = value.number if value.number is not None else now * (value.factor or 1.0)
        shown = f"{value.text} ({rate_text(rate)} per GPU)" if value.factor else value.text
        request, number = dataclasses.replace(request, network_bandwidth=rate), rate
    elif flag in COUNTS:
        field = "num_gpus" if flag == "gpus" else flag
        count = _count(flag, getattr(request, field), value)
        shown = f"{count} ({value.text})" if value.factor else f"{count}"
        counted: dict[str, Any] = {field: count}
        request, number = dataclasses.replace(request, **counted), float(count)
    elif flag == "expert_imbalance":
        now = request.expert_imbalance or 1.0
        busiest = value.number if value.number is not None else now * (value.factor or 1.0)
        request = dataclasses.replace(request, expert_imbalance=busiest)
    else:
        named: dict[str, Any] = {flag: value.name}
        request = dataclasses.replace(request, **named)
    label = f"{flag.replace('_', ' ')} {shown}"
    return Variant(
        label=label if base.label == "base" else f"{base.label}, {label}", changed=(*base.changed, flag),
        request=request, machine=machine, number=number,
    )  # fmt: skip


def _count(flag: str, now: int, value: Value) -> int:
    if value.number is not None:
        count = int(value.number)
    else:
        exact = now * (value.factor or 1.0)
        count = round(exact)
        if not math.isclose(exact, count, rel_tol=1e-6):
            raise PlannerError(f"{flag_of(flag)} {value.text}: {now} times {value.factor:g} is no whole number")
    if count < 1 and flag not in ("lora_rank", "document_length"):
        raise PlannerError(f"{flag_of(flag)} {value.text}: it must be a whole number from 1")
    return count


def rate_text(rate: float) -> str:
    """A network's rate as it is sold: bits per second."""
    return f"{rate * 8.0 / units.GIGA:g} Gb/s"


def model_name(request: Request) -> str:
    """Name of the model of a request."""
    return request.model.name if isinstance(request.model, ModelSpec) else request.model


__all__ = [
    "COUNTS", "FLAGS", "MACHINES", "NAMES", "Value", "Variant", "apply", "base_variant", "complete_request", "flag_of",
    "model_name", "rate_text", "read_values",
]  # fmt: skip
