"""Inputs of a job that a what-if changes, one table: how each is read (``x2``, ``800 Gb/s``, ``64..4096``), checked, applied."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from planner import library, units
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import HardwareProfile, load_hardware
from planner.hardware.names import profile_named
from planner.keywords import flag_of
from planner.model import load_model
from planner.questions.best_plan import on_cluster
from planner.record import record
from planner.trainer import load_trainer
from planner.trainer_options import read_options, spell
from planner.workload import FROZEN_WEIGHTS, LORA_TARGETS, LORA_WHOLE, OBJECTIVES, OPTIMIZERS, PRECISIONS

_FACTOR = re.compile(r"^\s*[x×]\s*(\S+)\s*$")
_RANGE = re.compile(r"^\s*([^.\s]+)\s*\.\.\s*([^.\s]+)\s*$")
_WHOLE = re.compile(r"^\s*(0|[1-9][0-9]{0,9})\s*$")
LARGEST_FACTOR = 1000.0
MOST_VALUES = 200
"""Values of one command; each is a search."""


@record
class Input:
    """One input of a job."""

    metavar: str
    help: str
    """For the command line."""
    field: str = ""
    """Field of Request; '' = a figure of the hardware."""
    kind: str = "count"
    """name; count: a whole number, of which ranges may be given; number; rate: bytes/s; of a figure the dimension of
    units.parse, or '' where only factors are read."""


_CHOICES: dict[str, Collection[str]] = {
    "precision": PRECISIONS, "optimizer": OPTIMIZERS, "lora_targets": LORA_TARGETS, "lora_whole": LORA_WHOLE,
    "frozen_weights": FROZEN_WEIGHTS, "objective": OBJECTIVES,
}  # fmt: skip
_LOADERS: dict[str, Callable[[str], Any]] = {
    "model": load_model, "hardware": load_hardware, "trainer": load_trainer, "options": read_options,
}  # fmt: skip


def _fields(flag: str, hardware: HardwareProfile) -> tuple[str, ...]:
    """The fields of a profile that a flag multiplies, the first in its unit."""
    link = "scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth"
    fields = {"network": ("network_bandwidth",), "scale_up": (link,), "memory": ("usable_memory", "memory")}
    return {**fields, "compute": ("peak_flops",)}.get(flag, (flag,))


def scaled(flag: str, hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """The profile with a figure multiplied; the latency of the network with that of its collectives."""
    if flag == "network_latency":
        return hardware.achieving(network_latency=factor)
    return hardware.scaled(**dict.fromkeys(_fields(flag, hardware), factor))


INPUTS: dict[str, Input] = {
    flag: Input(**said) for flag, said in library.read_yaml(Path(__file__).with_name("inputs.yaml")).items()
}
"""By flag, in the order of the rows."""


@record
class Value:
    """One value of one flag, as read."""

    flag: str
    """Of INPUTS."""
    text: str
    """What the user wrote; a name as it is."""
    number: float | None = None
    """A number in base units."""
    factor: float | None = None
    """'x2' is 2."""
    tokens: bool = False
    """The number of a batch counts tokens, not sequences: 4M, as with ``plan``."""


def read_values(flag: str, texts: Sequence[str]) -> list[Value]:
    """The values of one flag: each text holds one or more, separated by commas. Raises PlannerError with the sentence."""
    found: list[Value] = []
    for part in [part.strip() for text in texts for part in text.split(",")]:
        if not part:
            raise PlannerError(f"{flag_of(flag)}: a value is missing next to a comma")
        found += _read(flag, part)
    if len(found) > MOST_VALUES:
        raise PlannerError(
            f"{flag_of(flag)}: {len(found)} values are too many; each is a search, give at most {MOST_VALUES}"
        )
    return found


def _read(flag: str, text: str) -> list[Value]:
    what, one = flag_of(flag), INPUTS[flag]
    if one.kind == "name":
        if text not in (known := _CHOICES.get(flag, (text,))):
            raise UnknownNameError(flag.replace("_", " "), text, known)
        _LOADERS.get(flag, str)(text)
        text = profile_named(text) if flag == "hardware" else text
        return [Value(flag=flag, text=text)]
    if match := _FACTOR.match(text):
        factor = _number(match[1])
        if factor is None:
            raise PlannerError(f"{what}: '{text}' is not a factor; write it like x2 or x0.5")
        if not 0.0 < factor <= LARGEST_FACTOR:
            raise PlannerError(f"{what}: '{text}' must be a factor above 0, at most {LARGEST_FACTOR:g}")
        return [Value(flag=flag, text=text, factor=factor)]
    if one.kind == "count":
        if match := _RANGE.match(text):
            low, high = (_whole(what, end, text) for end in match.groups())
            tokens = {_in_tokens(flag, end) for end in match.groups()}
            if len(tokens) > 1:
                raise PlannerError(f"{what}: the range '{text}' counts sequences at one end and tokens at the other; write 1M..8M")
            return [Value(flag=flag, text=str(n), number=n, tokens=True in tokens) for n in _doublings(what, text, low, high)]
        return [Value(flag=flag, text=text, number=_whole(what, text, text), tokens=_in_tokens(flag, text))]
    if one.kind == "number":
        number = _number(text)
        if number is None or not math.isfinite(number):
            raise PlannerError(f"{what}: '{text}' is not a number")
    elif not one.kind:
        raise PlannerError(f"{what}: '{text}' is not a factor; write it like x1.5")
    else:
        number = units.parse(text, one.kind, what=what)
        if number <= 0:
            raise PlannerError(f"{what}: '{text}' must be above 0")
    return [Value(flag=flag, text=text, number=number)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _in_tokens(flag: str, text: str) -> bool:
    return flag == "global_batch_size" and text[-1:].lower() in ("k", "m")


def _whole(what: str, text: str, shown: str) -> int:
    if text[-1:].lower() in ("k", "m"):
        text = str(units.parse_count(text, what=what)[0])
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
    return [*(low << n for n in range(32) if low << n < high), high]


@record
class Variant:
    """A job with changes, not looked at yet."""

    label: str
    """The changes in words; 'base' without."""
    changed: tuple[str, ...] = ()
    """The flags that were changed."""
    request: Request
    """Every field said."""
    figures: tuple[tuple[str, float], ...] = ()
    """Figures of the hardware that are multiplied, by flag."""
    number: float | None = None
    """The changed number where one number was changed: what a sweep is plotted over."""

    def resolved(self) -> ResolvedJob:
        """The job, its files read. Raises PlannerError when it cannot be trained at all."""
        found = resolve(self.request)
        hardware = found.job.cluster.hardware
        for flag, factor in self.figures:
            hardware = scaled(flag, hardware, factor)
        return on_cluster(found, hardware=hardware)


def base_variant(resolved: ResolvedJob) -> Variant:
    """The job as it is: a request that says everything, so that nothing is assumed anew when one thing changes."""
    work = resolved.job.workload
    said = {field.name: getattr(work, field.name) for field in dataclasses.fields(work)}
    request = Request(
        **said, num_gpus=resolved.job.cluster.num_gpus, hardware=resolved.hardware, trainer=resolved.trainer,
        network_bandwidth=resolved.network_bandwidth,
    )  # fmt: skip
    return Variant(label="base", request=request)


def apply(base: Variant, value: Value) -> Variant:
    """The variant with one more change. Raises PlannerError when a factor makes no whole number."""
    flag, shown, figures, number = value.flag, value.text, base.figures, value.number
    one, request = INPUTS[flag], base.request
    new: dict[str, Any] = {}
    if flag == "options":
        new = {"trainer": spell(str(request.trainer), read_options(value.text))}
    elif one.kind == "name":
        new = {one.field: value.text}
    elif not one.field:
        number = value.factor or (number or 0.0) / _now(flag, request)
        figures = (*figures, (flag, number))
    elif one.kind == "count":
        count = _count(flag, getattr(request, one.field), value, request.sequence_length)
        new, number = {one.field: count}, float(count)
        shown = f"{count} ({shown}{' tokens' if value.tokens else ''})" if value.factor or value.tokens else f"{count}"
    else:
        rate = number if number is not None else _now(flag, request) * (value.factor or 1.0)
        new = {one.field: rate}
        if flag == "network":
            number, shown = rate, f"{shown} ({rate * 8.0 / units.GIGA:g} Gb/s per GPU)" if value.factor else shown
    label = f"{flag.replace('_', ' ')} {shown}"
    return Variant(
        label=label if base.label == "base" else f"{base.label}, {label}", changed=(*base.changed, flag),
        request=dataclasses.replace(request, **new), figures=figures, number=number,
    )  # fmt: skip


def _now(flag: str, request: Request) -> float:
    """The value of a request, or of its hardware where it says none, in base units."""
    if INPUTS[flag].field and (said := getattr(request, INPUTS[flag].field)):
        return float(said)
    hardware = load_hardware(str(request.hardware))
    return float(getattr(hardware, _fields(flag, hardware)[0]))


def _count(flag: str, now: int, value: Value, length: int | None) -> int:
    exact = value.number if value.number is not None else now * (value.factor or 1.0)
    if value.tokens and length and exact < length:
        raise PlannerError(f"{flag_of(flag)}: {value.text} tokens are less than one sequence of {length}")
    exact = round(exact / length) if value.tokens and length else exact
    count = round(exact)
    if not math.isclose(exact, count, rel_tol=1e-6):
        raise PlannerError(f"{flag_of(flag)} {value.text}: {now} times {value.factor:g} is no whole number")
    if count < 1 and flag not in ("lora_rank", "document_length", "image_tokens"):
        raise PlannerError(f"{flag_of(flag)} {value.text}: it must be a whole number from 1")
    return count
