"""Where a measured profile comes from: machine, versions, date, command, and how far its figures scatter."""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any

from planner.errors import PlannerError, shown
from planner.schema import Text, keys, plain_fields


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Who measured a profile, when, with what, and how well."""

    machine: Text
    """Host and what it is: processor, cores, number of devices."""
    device: Text
    """Name that the driver reports."""
    driver: Text = ""
    """Version of the driver; empty where there is none."""
    versions: dict[str, Text] = field(default_factory=dict)
    """Version of each library: python, torch, cuda, nccl, cudnn, planner."""
    date: Text
    """Day of the measurement, ISO 8601; a time may follow."""
    command: Text
    """Command line that wrote the file."""
    timer: Text = ""
    """What was read: device events, process CPU time, synchronised clocks."""
    spread: dict[str, float] = field(default_factory=dict)
    """Half the 95 percent interval of a measured median over the median, percent, by family or curve: the median over points."""
    drift: dict[str, Annotated[dict[str, float], keys(("percent", "rounds"))]] = field(default_factory=dict)
    """By family: ``percent``, by how much all of it moved between rounds of the same points while it was measured (standard
    deviation), and ``rounds``, the degrees of freedom of that."""
    residuals: dict[str, Any] = field(default_factory=dict)
    """[median, 90th percentile] of |fit / measured - 1| in percent, by curve; ``held_out`` where it was scored on other
    points than it was fitted on."""
    cost: dict[str, float] = field(default_factory=dict)
    """What the measurement took: seconds, points, points left out by the budget."""
    notes: tuple[Text, ...] = ()
    """What was not measured and where it comes from instead; points that failed; outliers."""
    to_dict = plain_fields

    def __post_init__(self) -> None:
        for key in ("machine", "device", "date", "command"):
            if not getattr(self, key).strip():
                raise PlannerError(f"{key} is empty; say what was measured, when and how")
        try:
            date.fromisoformat(self.date[:10])
        except ValueError as error:
            raise PlannerError(f"date {shown(self.date)} is not a day such as 2026-03-31") from error
