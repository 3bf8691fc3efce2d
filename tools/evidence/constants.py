"""The planner's own constants that were calibrated on published runs: what they are, and what they would be without a source.

``profiles/calibrated.yaml`` lists them: the file and key that hold the value, the runs that it was set on, the value that
would stand there had no run determined it, and the range that is physically possible. Nothing here edits a file: a
constant is changed on the runs themselves, which carry their trainer and their hardware.

    listed = constants()
    found = refit(listed, runs, without="oss-vtrain-single-node")      # {name: Refit}
    held_back = [run for run in runs if run.source == "oss-vtrain-single-node"]
    predicted = predict(with_constants(held_back, listed, {name: one.value for name, one in found.items()}))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from planner import library, units
from planner.arrays import Floats
from planner.curves import column
from planner.errors import PlannerError, shown
from planner.hardware import HardwareProfile, load_hardware
from planner.questions.calibrate.fit import Solution, Unknown, solve
from planner.questions.calibrate.run_pricing import FITS, Pair, changed, log_errors, measured, usable
from planner.runs import Run
from planner.trainer import Trainer

STRETCHED = {"ring_latency": ("rings", "all_gather"), "tree_latency": ("others", "all_reduce")}
"""Keys of frameworks.yaml that stretch latencies across nodes: what of a profile, and one of the collectives concerned."""
MOST_RUNS = 24
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
        """Those of the runs that are meant, and that measured time or memory, evenly thinned to MOST_RUNS."""
        found = [
            run for run in runs
            if run.source == self.source and not run.unsupported and re.match(self.id, run.id)
            and self.family in ("", run.family) and measured(run, fits) is not None
        ]  # fmt: skip
        return found[:: -(-len(found) // MOST_RUNS)] if found else []


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number of the library that was set on published runs."""

    name: str
    """What it physically is."""
    file: str
    """Where it stands, below profiles/."""
    key: str
    """Key in that file, dotted where it is nested; in frameworks.yaml a key of the entry that ``entry`` matches."""
    entry: str
    """Expression of the entry in frameworks.yaml; '' elsewhere."""
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
    """'time' or 'memory': what it is fitted to."""
    runs: tuple[Evidence, ...]
    """What it was calibrated on."""
    also: tuple[Evidence, ...] = ()
    """What would have determined it had those runs not been there; used by ``refit`` where none of them is left."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, each once."""
        return tuple(dict.fromkeys(one.source for one in self.runs))

    def evidence(self, runs: Sequence[Run], *, without: str = "") -> list[Run]:
        """The runs that determine it, but for those of one source: what it was calibrated on, else what ``also`` lists."""
        for listed in (self.runs, self.also):
            found = [run for one in listed if one.source != without for run in one.of(runs, self.fits)]
            if found:
                return found
        return []


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What a constant is when a source is left out."""

    value: float
    """In base units."""
    low: float
    """Lower end of its interval (90 %)."""
    high: float
    """Upper end."""
    runs: int
    """Runs behind it; 0 = the default, or the shipped value where the left-out source is not one of its sources."""
    reason: str
    """'fitted', 'shipped' (its sources are all there) or 'default' (none of its runs is left)."""


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
    if not isinstance(entry, dict) or not _KEYS <= set(entry) <= _KEYS | {"entry", "arch", "also"}:
        raise PlannerError(f"{where}: it needs the keys {', '.join(sorted(_KEYS))}; entry, arch and also are optional")
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
    path = library.profiles_directory() / str(entry["file"])
    if not path.is_file():
        raise PlannerError(f"{where}: there is no file profiles/{entry['file']}")
    data: Any = library.read_yaml(path)
    if path.name == "frameworks.yaml":
        data = next((one for one in data["trainers"] if one["match"] == entry.get("entry")), None)
        if data is None:
            raise PlannerError(
                f"{where}: frameworks.yaml has no trainer entry that matches {shown(entry.get('entry'))}"
            )
    elif path.parent.name == "hardware" and not entry.get("arch"):
        raise PlannerError(f"{where}: a constant of hardware needs arch, the generations that share it")
    for part in str(entry["key"]).split("."):
        data = data.get(part) if isinstance(data, dict) else None
    if data is None:
        raise PlannerError(f"{where}: profiles/{entry['file']} has no key '{entry['key']}'")
    return _number(data, f"{where}: {entry['key']}")


# ------------------------------------------------------------------------------------------------ changing runs


def with_constants(runs: Sequence[Run], listed: Iterable[Constant], values: Mapping[str, float]) -> list[Run]:
    """The runs with constants replaced by ``values`` (by name, base units); runs that none concerns stay as they are."""
    moved = [(one, values[one.name]) for one in listed if one.name in values and values[one.name] != one.value]

    def change(hardware: HardwareProfile, trainer: Trainer) -> Pair:
        mine = [(one, value) for one, value in moved if applies(one, hardware, trainer)]
        fields = {one.key.removeprefix("changes."): value for one, value in mine if _of_trainer(one)}
        for one, value in mine:
            if not _of_trainer(one):
                hardware = _hardware_with(hardware, one, value / one.value)
        return hardware, trainer.replace(**fields) if fields else trainer

    return changed(runs, change)


def _of_trainer(constant: Constant) -> bool:
    return constant.file.startswith("trainers/") or constant.key.startswith("changes.")


def applies(constant: Constant, hardware: HardwareProfile, trainer: Trainer) -> bool:
    """The constant stands in this hardware or this trainer, and was not overridden there."""
    if constant.file.startswith("hardware/"):
        return hardware.arch in constant.arch and _nested(hardware, constant.key) is not None
    if constant.file.startswith("trainers/"):
        return trainer.name in _heirs(constant.file, constant.key) and _equals(trainer, constant.key, constant.value)
    if trainer.name != _entry_trainer(constant.entry):
        return False
    if constant.key in STRETCHED:
        now, shipped = (_latency(one, constant.key) for one in (hardware, load_hardware(hardware.name)))
        return math.isclose(now, shipped * constant.value, rel_tol=1e-6)
    if constant.key == "network_share":
        whole = load_hardware(hardware.name).network_bandwidth
        return math.isclose(hardware.network_bandwidth, whole * constant.value, rel_tol=1e-6)
    return _equals(trainer, constant.key.removeprefix("changes."), constant.value)


def _equals(trainer: Trainer, key: str, value: float) -> bool:
    return math.isclose(float(getattr(trainer, key)), value, rel_tol=1e-9)


@cache
def _heirs(file: str, key: str) -> frozenset[str]:
    """Trainers that have this key from this file: its own, and those that extend it and do not say otherwise."""
    directory = library.profiles_directory()
    found = set()
    for name in library.names("trainers"):
        path: str | None = name
        while path is not None:
            data = library.read_yaml(directory / "trainers" / f"{path}.yaml")
            if key in data:
                break
            path = data.get("extends")
        if path is not None and file == f"trainers/{path}.yaml":
            found.add(name)
    return frozenset(found)


@cache
def _entry_trainer(match: str) -> str:
    """Trainer of an entry of frameworks.yaml."""
    table = library.read_yaml(library.profiles_directory() / "frameworks.yaml")["trainers"]
    return str(next(one["trainer"] for one in table if one["match"] == match))


def _latency(hardware: HardwareProfile, key: str) -> float:
    """Seconds of a short message of a collective that a latency of STRETCHED concerns, two ranks on two nodes."""
    return float(hardware.scale_out[STRETCHED[key][1]].fast.latency_of(column(2.0), column(2.0)))


def _nested(hardware: HardwareProfile, key: str) -> float | None:
    first, *rest = key.split(".")
    value: Any = getattr(hardware, first, None)
    for part in rest:
        value = value.get(part) if isinstance(value, dict) else None
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


# ------------------------------------------------------------------------------------------------ fitting again


def refit(listed: Sequence[Constant], runs: Sequence[Run], *, without: str = "") -> dict[str, Refit]:
    """Every constant as it would be without the runs of one source (a file name in profiles/runs), by name.

    A constant that was calibrated on that source is fitted again on the other runs that determine it, together with
    constants that share them, by the least squares of ``calibrate.fit`` (prior: the default, a quarter of the logarithm
    of its range wide); where none is left it falls back to its default. All others keep their shipped value.
    ``without=''`` fits every constant again on all its runs, which shows how near the shipped values are.
    ``runs`` is what ``read_runs`` gives, unchanged (all sources, or at least those of the constants).
    """
    concerned = [one for one in listed if not without or without in one.sources]
    evidence = {one.name: one.evidence(runs, without=without) for one in concerned}
    answers: dict[str, Refit] = {}
    for one in listed:
        if one not in concerned:
            answers[one.name] = Refit(value=one.value, low=one.value, high=one.value, runs=0, reason="shipped")
        elif not evidence[one.name]:
            answers[one.name] = _interval(one, 0.0, _width(one), 0, "default")
    for group in _groups([one for one in concerned if evidence[one.name]], evidence):
        known = {name: answer.value for name, answer in answers.items()}
        solution = _solve(group, listed, known, evidence)
        for one, x, deviation in zip(group, solution.x, solution.deviations, strict=True):
            answers[one.name] = _interval(one, float(x), float(deviation), len(evidence[one.name]), "fitted")
    return {one.name: answers[one.name] for one in listed}


def _groups(concerned: Sequence[Constant], evidence: Mapping[str, list[Run]]) -> list[list[Constant]]:
    """Constants that share runs are fitted together."""
    groups: list[tuple[set[int], list[Constant]]] = []
    for one in concerned:
        mine, members = {id(run) for run in evidence[one.name]}, [one]
        apart = []
        for ids, others in groups:
            if ids & mine and others[0].fits == one.fits:
                mine, members = mine | ids, [*others, *members]
            else:
                apart.append((ids, others))
        groups = [*apart, (mine, members)]
    return [members for _, members in groups]


def _width(constant: Constant) -> float:
    return math.log(constant.high / constant.low) / 4.0


def _interval(constant: Constant, x: float, deviation: float, runs: int, reason: str) -> Refit:
    """90 % of a normal distribution lie within 1.645 deviations; cut at the physical range."""
    ends = (constant.default * math.exp(x + sign * 1.645 * deviation) for sign in (-1.0, 1.0))
    low, high = (min(max(end, constant.low), constant.high) for end in ends)
    return Refit(value=constant.default * math.exp(x), low=low, high=high, runs=runs, reason=reason)


def _solve(
    group: Sequence[Constant], listed: Sequence[Constant], known: Mapping[str, float], evidence: Mapping[str, list[Run]]
) -> Solution:
    """The least squares of constants that share their runs, the others at what is ``known`` of them."""
    runs = usable(list({id(run): run for one in group for run in evidence[one.name]}.values()), group[0].fits)

    def price(x: Floats) -> list[Run]:
        values = {one.name: one.default * math.exp(float(step)) for one, step in zip(group, x, strict=True)}
        return with_constants(runs, listed, {**known, **values})

    unknowns = [
        Unknown(name=one.name, low=math.log(one.low / one.default), high=math.log(one.high / one.default), width=_width(one))
        for one in group
    ]  # fmt: skip
    return solve(log_errors(runs, price, group[0].fits), unknowns)
