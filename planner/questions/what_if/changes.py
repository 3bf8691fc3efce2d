"""Inputs of a job that a what-if changes, one table: how each is read (``x2``, ``800 Gb/s``, ``64..4096``), checked, applied."""

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
from planner.keywords import flag_of
from planner.model import load_model
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
    check: Callable[[str], Any] | None = None
    """Of a name: raises PlannerError where it is none."""
    now: Callable[[HardwareProfile], float] = lambda _: 1.0
    """The value of the hardware, base units, where the request says none."""
    scaled: Callable[[HardwareProfile, float], HardwareProfile] | None = None
    """Of a figure: the profile with it multiplied."""


def _one_of(what: str, known: Any) -> Callable[[str], None]:
    def check(name: str) -> None:
        if name not in known:
            raise UnknownNameError(what, name, known)

    return check


def _link(hardware: HardwareProfile) -> str:
    return "scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth"


INPUTS: Mapping[str, Input] = {
    "model": Input(
        metavar="NAME", help="Model; several values, each a row.", field="model", kind="name", check=load_model,
    ),
    "gpus": Input(metavar="N", help="GPUs: 512, or 128,256, or 64..4096 (doublings), or x2.", field="num_gpus"),
    "hardware": Input(metavar="NAME", help="Hardware profiles.", field="hardware", kind="name", check=load_hardware),
    "trainer": Input(metavar="NAME", help="Trainers.", field="trainer", kind="name", check=load_trainer),
    "sequence_length": Input(
        metavar="S", help="Tokens per sequence: 131072, 8192..131072, x2. Sequences per step stay.", field="sequence_length",
    ),
    "global_batch_size": Input(metavar="B", help="Sequences per optimizer step, likewise.", field="global_batch_size"),
    "precision": Input(
        metavar="NAME", help="Precisions.", field="precision", kind="name", check=_one_of("precision", PRECISIONS),
    ),
    "optimizer": Input(
        metavar="NAME", help="Optimizers.", field="optimizer", kind="name", check=_one_of("optimizer", OPTIMIZERS),
    ),
    "lora_rank": Input(metavar="R", help="Ranks of low-rank adapters; 0 = all weights.", field="lora_rank"),
    "lora_targets": Input(
        metavar="NAME", help="Layers with adapters: all, attention or qkv.", field="lora_targets", kind="name",
        check=_one_of("lora targets", LORA_TARGETS),
    ),
    "document_length": Input(metavar="N", help="Mean tokens of packed documents.", field="document_length"),
    "expert_imbalance": Input(
        metavar="X", help="Tokens of the busiest expert rank over the mean.", field="expert_imbalance", kind="number",
    ),
    "network": Input(
        metavar="RATE", help="Bandwidth between nodes per GPU, one direction: '800 Gb/s' or x2.",
        field="network_bandwidth", kind="bytes/s", now=lambda one: one.network_bandwidth,
    ),
    "network_latency": Input(
        metavar="TIME", help="Latency between nodes: '3 us' or x0.5.", kind="seconds", now=lambda one: one.network_latency,
        scaled=lambda one, factor: one.achieving(network_latency=factor),
    ),
    "scale_up": Input(
        metavar="RATE", help="Bandwidth inside a node per GPU, one direction: '900 GB/s' or x2.", kind="bytes/s",
        now=lambda one: float(getattr(one, _link(one))), scaled=lambda one, factor: one.scaled(**{_link(one): factor}),
    ),
    "memory": Input(
        metavar="SIZE", help="Usable memory of a GPU: '141 GiB' or x1.5.", kind="bytes", now=lambda one: one.usable_memory,
        scaled=lambda one, factor: one.scaled(usable_memory=factor, memory=factor),
    ),
    "memory_bandwidth": Input(
        metavar="RATE", help="Of a GPU: '4.8 TB/s' or x1.5.", kind="bytes/s", now=lambda one: one.memory_bandwidth,
        scaled=lambda one, factor: one.scaled(memory_bandwidth=factor),
    ),
    "compute": Input(
        metavar="xN", help="Peak FLOP/s of a GPU, only as a factor: x1.5.", kind="",
        scaled=lambda one, factor: one.scaled(peak_flops=factor),
    ),
}  # fmt: skip
"""By flag, in the order of the rows."""


@dataclass(frozen=True, kw_only=True)
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
    if one.check is not None:
        one.check(text)
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
            return [Value(flag=flag, text=str(n), number=n) for n in _doublings(what, text, low, high)]
        return [Value(flag=flag, text=text, number=_whole(what, text, text))]
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
    return [*(low << n for n in range(32) if low << n < high), high]


@dataclass(frozen=True, kw_only=True)
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
            scaled = INPUTS[flag].scaled
            assert scaled is not None
            hardware = scaled(hardware, factor)
        usual = load_hardware(found.hardware).network_bandwidth
        kind = kind_of(found.job.workload, hardware, usual)
        return dataclasses.replace(on_cluster(found, hardware=hardware), kind=kind)


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
    if one.check is not None:
        new = {one.field: value.text}
    elif not one.field:
        number = value.factor or (number or 0.0) / one.now(load_hardware(str(request.hardware)))
        figures = (*figures, (flag, number))
    elif one.kind == "count":
        count = _count(flag, getattr(request, one.field), value)
        new, number = {one.field: count}, float(count)
        shown = f"{count} ({shown})" if value.factor else f"{count}"
    else:
        now = getattr(request, one.field) or one.now(load_hardware(str(request.hardware)))
        rate = number if number is not None else now * (value.factor or 1.0)
        new = {one.field: rate}
        if flag == "network":
            number, shown = rate, f"{shown} ({rate * 8.0 / units.GIGA:g} Gb/s per GPU)" if value.factor else shown
    label = f"{flag.replace('_', ' ')} {shown}"
    return Variant(
        label=label if base.label == "base" else f"{base.label}, {label}", changed=(*base.changed, flag),
        request=dataclasses.replace(request, **new), figures=figures, number=number,
    )  # fmt: skip


def _count(flag: str, now: int, value: Value) -> int:
    exact = value.number if value.number is not None else now * (value.factor or 1.0)
    count = round(exact)
    if not math.isclose(exact, count, rel_tol=1e-6):
        raise PlannerError(f"{flag_of(flag)} {value.text}: {now} times {value.factor:g} is no whole number")
    if count < 1 and flag not in ("lora_rank", "document_length"):
        raise PlannerError(f"{flag_of(flag)} {value.text}: it must be a whole number from 1")
    return count
