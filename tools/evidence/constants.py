"""The planner's own constants that were calibrated on published runs: what they are, and what they would be without a source.

``profiles/calibrated.yaml`` lists them: the file and key that hold the value, the runs that it was set on, the value that
would stand there had no run determined it, and the range that is physically possible. Nothing here edits a file. A constant of
a trainer or of hardware is changed on the runs, which carry both; a number of the cost model is changed in its module for as
long as a block lasts.

    listed = constants()
    found = refit(listed, runs, without=["nv-moe-folding-table4"])       # {name: Refit}
    values = {name: one.value for name, one in found.items()}
    predicted = predict_with([run for run in runs if run.source == "nv-moe-folding-table4"], listed, values)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from planner import library, units
from planner.curves import column
from planner.errors import PlannerError, shown
from planner.hardware import HardwareProfile, load_hardware
from planner.questions.accuracy.prediction import Predicted, predict
from planner.questions.calibrate.factors import Pair, changed
from planner.runs import Run
from planner.trainer import Trainer

STRETCHED = {"ring_latency": ("rings", "all_gather"), "tree_latency": ("others", "all_reduce")}
"""Figures of a source's cluster that stretch latencies across nodes: what of a profile, and one of the collectives concerned."""
FITS = ("time", "memory", "time differences", "running out")
"""What a constant is fitted to: step times, peak memory, how step times differ inside of a series of runs whatever their level,
and whether runs ran out of memory."""
MOST_RUNS = {"time": 24, "memory": 24, "time differences": 100, "running out": 200}
"""Runs of one source that a constant is fitted to; of more, every second, third ... one: the others cost time only."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Runs of one source that a constant was calibrated on."""

    source: str
    """File name in profiles/runs, without the ending."""
    id: str
    """Regular expression that the ids match, at their beginning; '' = every run of the source."""
    family: str = ""
    """Family of the report that they are in; '' = any. It tells jobs on a slow network from the others."""

    def of(self, runs: Sequence[Run], fits: str) -> list[Run]:
        """Those of the runs that are meant, and that measured what is fitted, evenly thinned to MOST_RUNS."""
        found = [
            run for run in runs
            if run.source == self.source and not run.unsupported and re.match(self.id, run.id)
            and self.family in ("", run.family) and measures(run, fits)
        ]  # fmt: skip
        return found[:: -(-len(found) // MOST_RUNS[fits])] if found else []

    def series(self, run: Run) -> tuple[str, ...]:
        """The series that a run of this evidence belongs to: what the groups of the expression hold."""
        found = re.match(self.id, run.id)
        return (self.source, self.id, *(map(str, found.groups()) if found else ()))


def measures(run: Run, fits: str) -> bool:
    """The run measured what a constant of this kind is fitted to."""
    if fits == "running out":
        return run.measured.fits is not None
    return (run.measured.memory if fits == "memory" else run.measured.step_time) is not None


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number of the library that was set on published runs."""

    name: str
    """What it physically is."""
    file: str
    """Where it stands: a file below profiles/, or a module of the cost model, planner/cost/...py."""
    key: str
    """Key in that file, dotted where it is nested; in a file of runs a figure of its hardware; in a module
    the name of the number."""
    entry: str
    """Trainer that ran on the cluster of a file of runs; '' elsewhere."""
    arch: tuple[str, ...]
    """Generations of hardware that share it; () for trainers."""
    value: float
    """As it is shipped, in base units."""
    default: float
    """What would stand there had no run determined it, in base units."""
    why: str
    """Where the default comes from."""
    low: float
    """Smallest physically possible value."""
    high: float
    """Largest."""
    fits: str
    """What it is fitted to: one of FITS."""
    runs: tuple[Evidence, ...]
    """What it was calibrated on."""
    also: tuple[Evidence, ...] = ()
    """What would have determined it had those runs not been there; used by ``refit`` where none of them is left."""

    @property
    def of_module(self) -> bool:
        """It is a number of the cost model; all others stand in profiles."""
        return self.file.startswith("planner/")

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, each once."""
        return tuple(dict.fromkeys(one.source for one in self.runs))

    def evidence(self, runs: Sequence[Run], *, without: Collection[str] = ()) -> list[Run]:
        """The runs that determine it, but for those of some sources: what it was calibrated on, else what ``also`` lists."""
        for listed in (self.runs, self.also):
            found = [run for one in listed if one.source not in without for run in one.of(runs, self.fits)]
            if found:
                return found
        return []


# ------------------------------------------------------------------------------------------------ reading


def constants() -> tuple[Constant, ...]:
    """The list in profiles/calibrated.yaml, every file, key and source checked. Raises PlannerError."""
    where = "calibrated.yaml"
    data = library.read_yaml(library.profiles_directory() / where)
    if set(data) != {"constants"} or not isinstance(data["constants"], list):
        raise PlannerError(f"{where}: it must hold one list, 'constants'")
    found = tuple(_constant(entry, f"{where}: entry {number}") for number, entry in enumerate(data["constants"], 1))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise PlannerError(f"{where}: the name '{name}' is given twice")
    return found


_KEYS = {"name", "file", "key", "default", "why", "range", "fits", "runs"}


def _constant(entry: Any, where: str) -> Constant:
    """One entry as a Constant. Raises PlannerError."""
    optional = {"entry", "arch", "also", "value", "unit"}
    if not isinstance(entry, dict) or not _KEYS <= set(entry) <= _KEYS | optional:
        raise PlannerError(
            f"{where}: it needs the keys {', '.join(sorted(_KEYS))}; {', '.join(sorted(optional))} are optional"
        )
    where = f"{where} ({entry['name']})"
    if entry["fits"] not in FITS:
        raise PlannerError(f"{where}: fits is {shown(entry['fits'])}; it must be one of {', '.join(FITS)}")
    value = _shipped(entry, where)
    default = _number(entry["default"], f"{where}: default")
    limits = entry["range"]
    if not isinstance(limits, list) or len(limits) != 2:
        raise PlannerError(f"{where}: range is {shown(limits)}; it must hold the smallest and the largest value")
    low, high = (_number(limit, f"{where}: range") for limit in limits)
    if not 0 < low <= min(value, default) <= max(value, default) <= high:
        raise PlannerError(f"{where}: {value:g} and the default {default:g} must lie in the range {low:g} to {high:g}")
    return Constant(
        name=str(entry["name"]), file=str(entry["file"]), key=str(entry["key"]), entry=str(entry.get("entry", "")),
        arch=tuple(map(str, entry.get("arch", ()))), value=value, default=default, why=str(entry["why"]),
        low=low, high=high, fits=str(entry["fits"]), runs=tuple(_evidence(one, where) for one in entry["runs"]),
        also=tuple(_evidence(one, where) for one in entry.get("also", ())),
    )  # fmt: skip


def _evidence(entry: Any, where: str) -> Evidence:
    if not isinstance(entry, dict) or not {"source"} <= set(entry) <= {"source", "id", "family"}:
        raise PlannerError(f"{where}: each of its runs needs a source, and may have an id and a family")
    if entry["source"] not in library.names("runs"):
        raise PlannerError(f"{where}: profiles/runs has no source '{entry['source']}'")
    return Evidence(**{key: str(entry.get(key, "")) for key in ("source", "id", "family")})


def _number(value: Any, what: str) -> float:
    """A plain number, or a duration with its unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return units.parse(value, "seconds", what=what)


def _shipped(entry: Mapping[str, Any], where: str) -> float:
    """The value that stands in the file. Raises PlannerError when file, entry or key are not there."""
    if str(entry["file"]).startswith("planner/"):
        return _in_module(entry, where)
    path = library.profiles_directory() / str(entry["file"])
    if not path.is_file():
        raise PlannerError(f"{where}: there is no file profiles/{entry['file']}")
    data: Any = library.read_yaml(path)
    if path.parent.name == "runs" and entry.get("entry") not in library.names("trainers"):
        raise PlannerError(f"{where}: entry is {shown(entry.get('entry'))}; it must be the trainer that ran there")
    data = data.get("hardware") if path.parent.name == "runs" else data
    if path.parent.name == "hardware" and not entry.get("arch"):
        raise PlannerError(f"{where}: a constant of hardware needs arch, the generations that share it")
    value = _in(data, str(entry["key"]))
    if value is None:
        raise PlannerError(f"{where}: profiles/{entry['file']} has no key '{entry['key']}'")
    return _number(value, f"{where}: {entry['key']}")


def _in(data: Any, key: str) -> Any:
    """What stands under a dotted key; None = nothing."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _in_module(entry: Mapping[str, Any], where: str) -> float:
    """The number of a module; the entry repeats it with its unit. Raises PlannerError when they differ."""
    try:
        value = float(getattr(_module(str(entry["file"])), str(entry["key"])))
    except (ImportError, AttributeError) as error:
        raise PlannerError(f"{where}: {entry['file']} has no number {entry['key']}") from error
    if "value" not in entry or "unit" not in entry:
        raise PlannerError(f"{where}: a number of the cost model needs value and unit")
    if _number(entry["value"], f"{where}: value") != value:
        raise PlannerError(
            f"{where}: the value is {entry['value']}, but {entry['file']} has {entry['key']} = {value:g}"
        )
    return value


def _module(file: str) -> ModuleType:
    return import_module(".".join(Path(file).with_suffix("").parts))


# ------------------------------------------------------------------------------------------------ changing constants


def predict_with(runs: Sequence[Run], listed: Iterable[Constant], values: Mapping[str, float]) -> list[Predicted]:
    """The cost model's answer to the runs with constants at ``values`` (by name, base units)."""
    listed = tuple(listed)
    with in_modules(listed, values):
        return predict(with_constants(runs, listed, values))


@contextmanager
def in_modules(listed: Iterable[Constant], values: Mapping[str, float]) -> Iterator[None]:
    """Inside the block the numbers of the cost model among ``listed`` are those of ``values``."""
    mine = [one for one in listed if one.of_module and one.name in values]
    for one in mine:
        setattr(_module(one.file), one.key, values[one.name])
    try:
        yield
    finally:
        for one in mine:
            setattr(_module(one.file), one.key, one.value)


def with_constants(runs: Sequence[Run], listed: Iterable[Constant], values: Mapping[str, float]) -> list[Run]:
    """The runs with constants of trainers and hardware replaced by ``values``; runs that none concerns stay as they are."""
    moved = [
        (one, values[one.name])
        for one in listed
        if not one.of_module and one.name in values and values[one.name] != one.value
    ]

    def change(hardware: HardwareProfile, trainer: Trainer) -> Pair:
        mine = [(one, value) for one, value in moved if applies(one, hardware, trainer)]
        for one, value in mine:
            if one.file.startswith("trainers/"):
                trainer = trainer.replace(**_facts(one.key, value))
            else:
                hardware = _hardware_with(hardware, one, value / one.value)
        return hardware, trainer

    return changed(runs, change)


def _facts(key: str, value: float) -> dict[str, Any]:
    """A dotted key as the nested mapping that ``Trainer.replace`` takes."""
    first, *rest = key.split(".")
    return {first: _facts(".".join(rest), value) if rest else value}


def _fact(trainer: Trainer, key: str) -> float:
    """A fact of a trainer, '<fact>.<name>' of a mapping, or 'terms.<folder>.<field>': of what it alone does."""
    first, *names = key.split(".")
    if first == "terms":
        return float(next(getattr(one, names[-1]) for one in trainer.terms if hasattr(one, names[-1])))
    return float(functools.reduce(lambda part, name: part[name], names, trainer.fact(first)))


def applies(constant: Constant, hardware: HardwareProfile, trainer: Trainer) -> bool:
    """The constant stands in this hardware or this trainer, and was not overridden there."""
    if constant.file.startswith("hardware/"):
        return hardware.arch in constant.arch and _nested(hardware, constant.key) is not None
    if constant.file.startswith("trainers/"):
        mine = trainer.name in _heirs(constant.file, constant.key)
        return mine and math.isclose(_fact(trainer, constant.key), constant.value, rel_tol=1e-9)
    if trainer.name != constant.entry:
        return False
    if constant.key in STRETCHED:
        now, shipped = (_latency(one, constant.key) for one in (hardware, load_hardware(hardware.name)))
        return math.isclose(now, shipped * constant.value, rel_tol=1e-6)
    whole = load_hardware(hardware.name).network_bandwidth
    return math.isclose(hardware.network_bandwidth, whole * constant.value, rel_tol=1e-6)


@cache
def _heirs(file: str, key: str) -> frozenset[str]:
    """Trainers that have this key from this file: its own, and those that extend it and do not say otherwise."""
    directory = library.profiles_directory()
    found = set()
    for name in library.names("trainers"):
        path: str | None = name
        while path is not None:
            data = library.read_yaml(directory / "trainers" / f"{path}.yaml")
            if _in(data, key) is not None:
                break
            path = data.get("extends")
        if path is not None and file == f"trainers/{path}.yaml":
            found.add(name)
    return frozenset(found)


def _latency(hardware: HardwareProfile, key: str) -> float:
    """Latency of a collective that a latency of STRETCHED concerns, two ranks on two nodes, seconds."""
    return float(hardware.scale_out[STRETCHED[key][1]].bulk.latency_of(column(2.0), column(2.0)))


def _nested(hardware: HardwareProfile, key: str) -> float | None:
    first, *rest = key.split(".")
    value: Any = getattr(hardware, first, None)
    value = _in(value, ".".join(rest)) if rest else value
    return None if value is None else float(value)


def _hardware_with(hardware: HardwareProfile, constant: Constant, ratio: float) -> HardwareProfile:
    """The profile with the constant times ``ratio``: parts of a generation keep their own differences."""
    if constant.key in STRETCHED:
        return hardware.stretched(**{STRETCHED[constant.key][0]: ratio})
    if constant.key == "network_share":
        return replace(hardware, network_bandwidth=hardware.network_bandwidth * ratio)

    def scaled(value: Any, parts: Sequence[str]) -> Any:
        return value * ratio if not parts else {**value, parts[0]: scaled(value[parts[0]], parts[1:])}

    first, *rest = constant.key.split(".")
    return replace(hardware, **{first: scaled(getattr(hardware, first), rest)})
