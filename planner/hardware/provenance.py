"""Where a measured profile comes from: machine, versions, date, command, and how far its figures scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Any

from planner.errors import PlannerError, nearest_first, shown
from planner.hardware.vocabulary import mapping


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Who measured a profile, when, with what, and how well."""

    machine: str
    """Host and what it is: processor, cores, number of devices."""
    device: str
    """Name that the driver reports."""
    driver: str = ""
    """Version of the driver; empty where there is none."""
    versions: dict[str, str] = field(default_factory=dict)
    """Version of each library: python, torch, cuda, nccl, cudnn, planner."""
    date: str
    """Day of the measurement, ISO 8601; a time may follow."""
    command: str
    """Command line that wrote the file."""
    timer: str = ""
    """What was read: device events, process CPU time, synchronised clocks."""
    spread: dict[str, float] = field(default_factory=dict)
    """Half the 95 percent interval of a measured median over the median, percent, by family or curve: the median over points."""
    drift: dict[str, dict[str, float]] = field(default_factory=dict)
    """By family: ``percent``, by how much all of it moved between rounds of the same points while it was measured (standard
    deviation), and ``rounds``, the degrees of freedom of that."""
    residuals: dict[str, Any] = field(default_factory=dict)
    """[median, 90th percentile] of |fit / measured - 1| in percent, by curve; ``held_out`` where it was scored on other
    points than it was fitted on."""
    cost: dict[str, float] = field(default_factory=dict)
    """What the measurement took: seconds, points, points left out by the budget."""
    notes: tuple[str, ...] = ()
    """What was not measured and where it comes from instead; points that failed; outliers."""

    @classmethod
    def from_dict(cls, data: object, where: str) -> Provenance:
        """From the mapping of a file. Raises PlannerError with the key."""
        entry = mapping(data, where)
        known = {one.name for one in fields(cls)}
        for key in entry:
            if key not in known:
                raise PlannerError(
                    f"{where}: unknown key {shown(key)}; did you mean {nearest_first(str(key), known)[0]}?"
                )
        for key in ("machine", "device", "date", "command"):
            if not str(entry.get(key, "")).strip():
                raise PlannerError(f"{where}: the key '{key}' is missing; say what was measured, when and how")
        try:
            date.fromisoformat(str(entry["date"])[:10])
        except ValueError as error:
            raise PlannerError(f"{where}: date {shown(entry['date'])} is not a day such as 2026-03-31") from error
        values: dict[str, Any] = {
            key: str(entry.get(key, "")) for key in ("machine", "device", "driver", "date", "command", "timer")
        }
        values["versions"] = {
            str(name): str(version) for name, version in mapping(entry.get("versions", {}), f"{where} versions").items()
        }
        for key in ("spread", "cost"):
            values[key] = {
                str(name): _not_negative(value, f"{where} {key} {shown(name)}")
                for name, value in mapping(entry.get(key, {}), f"{where} {key}").items()
            }
        values["drift"] = {
            str(family): _drift(one, f"{where} drift {shown(family)}")
            for family, one in mapping(entry.get("drift", {}), f"{where} drift").items()
        }
        values["residuals"] = mapping(entry.get("residuals", {}), f"{where} residuals")
        notes = entry.get("notes", ())
        if not isinstance(notes, (list, tuple)):
            raise PlannerError(f"{where}: notes must be a list of sentences, found {type(notes).__name__}")
        return cls(**values, notes=tuple(str(one) for one in notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back; what is empty is left out."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        return {key: list(value) if key == "notes" else value for key, value in data.items() if value}


def _drift(value: object, what: str) -> dict[str, float]:
    entry = mapping(value, what)
    if set(entry) != {"percent", "rounds"}:
        raise PlannerError(f"{what}: must have percent and rounds, it has {', '.join(map(shown, entry)) or 'nothing'}")
    return {str(name): _not_negative(one, f"{what} {name}") for name, one in entry.items()}


def _not_negative(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise PlannerError(f"{what}: {shown(value)} is not a number of 0 or more")
    return float(value)
