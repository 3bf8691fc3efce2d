"""How often nodes fail: published rates as dated data (profiles/failures.yaml), and what stopping and starting a job takes
(profiles/elastic.yaml)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from planner import library, schema
from planner.costs import DAY, HOUR
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.record import record
from planner.schema import Bandwidth, Count, Name, Positive, Seconds, Text

VERSION = 1
NEAREST = {"Blackwell": "Hopper", "Ada": "Ampere", "Volta": "Ampere", "Turing": "Ampere"}
"""Generation whose rate stands for one without: of the same maker and of about the same kind of node."""
EVERY_OTHER = "Hopper"
REPAIR = DAY
"""Seconds until a failed node is back, where the user does not say and no source shows it."""


@record
class FailureRate:
    """One published observation."""

    arch: Name
    """Generation of the accelerator."""
    hardware: Name
    """Profile of the nodes."""
    gpus: Count
    """GPUs of a node."""
    node_hours: Positive
    """Hours x nodes that were observed."""
    failures: Positive
    """Unplanned ends in that time; machines that were taken away where ``spot``."""
    date: Text
    """Of the source."""
    source: Text
    """Document and place."""
    spot: bool = False
    """Machines that the provider takes back."""
    away_hours: float = 0.0
    """Mean hours until a machine is replaced; 0 = not known."""
    note: Text = ""
    """What else to know."""

    @property
    def mtbf(self) -> float:
        """Seconds between failures of one node."""
        return self.node_hours / self.failures * HOUR


@record
class NodeMtbf:
    """Mean time between failures of one node, and where it comes from."""

    seconds: float
    why: str
    repair: float = 0.0
    """Seconds until a machine is replaced, where the source shows it; 0 = not known."""


@cache
def published_rates() -> tuple[FailureRate, ...]:
    """The rates of profiles/failures.yaml."""
    path = library.profiles_directory() / "failures.yaml"
    data = library.read_yaml(path)
    library.version_of(data, "failure_rates", VERSION, where=path.name)
    found: tuple[FailureRate, ...] = schema.value_of(tuple[FailureRate, ...], data.get("rates"), path.name, "rates")
    return found


def node_mtbf(hardware: HardwareProfile, *, spot: bool = False) -> NodeMtbf:
    """The rate of a profile's hardware: of the profile itself, of its generation, else of the nearest one, and then said.

    Of several sources the one with the most node hours counts. A node of other size fails in proportion to its GPUs, as most
    failures are those of GPUs, their memory and their links (Llama 3, table 5).
    """
    rates = [one for one in published_rates() if one.spot == spot]
    family = hardware.arch.split()[0] if hardware.arch else ""
    near = NEAREST.get(family, EVERY_OTHER)
    for matches, how in (
        ([one for one in rates if one.hardware == hardware.name], ""),
        ([one for one in rates if one.arch == family], ""),
        ([one for one in rates if one.arch == near], f"nothing published for {hardware.name}, taken as {near}: "),
        (rates, f"nothing published for {hardware.name}: "),
    ):
        if matches:
            one = max(matches, key=lambda rate: rate.node_hours)
            scale = 1.0 if spot else one.gpus / float(hardware.gpus_per_node)
            sized = "" if scale == 1.0 else f", by GPU for nodes of {hardware.gpus_per_node:g}"
            why = f"{how}{one.source} ({one.date}){sized}"
            return NodeMtbf(seconds=one.mtbf * scale, why=why, repair=one.away_hours * HOUR)
    raise PlannerError("profiles/failures.yaml holds no rate of such nodes; give --mtbf")


def repair_of(hardware: HardwareProfile, spot: bool) -> float:
    """Seconds until a failed node is back, where the user does not say; of ``spot`` machines as their source shows it."""
    return (node_mtbf(hardware, spot=True).repair if spot else 0.0) or REPAIR


@record
class Constant:
    """A number with its source."""

    value: float
    source: Text
    fast: float
    """The end of its interval with which things take least."""
    slow: float
    """The other end; both are the value where it is documented as one number."""


@record
class Constants:
    """What stopping, starting and moving a job takes beside its bytes: seconds, and bytes/s."""

    detect_process: Constant
    detect_node: Constant
    last_call: Constant
    process_start: Constant
    communicator: Constant
    communicator_rank: Constant
    plan_shard: Constant
    plan_tensor: Constant
    host_copy: Constant
    storage_node: Constant


@record
class _Time:
    value: Seconds
    source: Text
    low: Seconds | None = None
    high: Seconds | None = None


@record
class _Rate:
    value: Bandwidth
    source: Text
    low: Bandwidth | None = None
    high: Bandwidth | None = None


@cache
def constants(end: str = "") -> Constants:
    """The numbers of profiles/elastic.yaml; ``fast`` or ``slow``: that end of their intervals. Raises PlannerError."""
    path = library.profiles_directory() / "elastic.yaml"
    data = library.read_yaml(path)
    library.version_of(data, "elastic", VERSION, where=path.name)
    found: dict[str, Constant] = {}
    for group, kind in (("constants", _Time), ("rates", _Rate)):
        for name, one in schema.mapping(data.get(group), f"{path.name}: {group}").items():
            read: Any = schema.read(kind, one, f"{path.name}: {group} {name}")
            ends = [read.value if each is None else each for each in (read.low, read.high)]
            fast, slow = ends if kind is _Time else reversed(ends)
            value = {"fast": fast, "slow": slow}.get(end, read.value)
            found[name] = Constant(value=value, source=read.source, fast=fast, slow=slow)
    fields, _ = schema.fields_of(Constants)
    schema.check_keys(found, fields, path.name, required=fields)
    return Constants(**found)


def spread(parts: Mapping[str, float], fast: Mapping[str, float], slow: Mapping[str, float]) -> tuple[float, float]:
    """Seconds that a sum of parts lies between: what each part may take less or more is independent, sqrt of the sum of squares."""
    total = sum(parts.values())
    less, more = (math.sqrt(sum((value - ends[name]) ** 2 for name, value in parts.items())) for ends in (fast, slow))
    return max(total - less, 0.0), total + more
