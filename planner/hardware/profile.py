"""One accelerator with its node and network, as measured: peaks, memory, prices and curves.

A profile is a file in ``profiles/hardware`` (or a user's own); every number there has a unit and a source. All methods
take scalars or columns of numpy and broadcast; they return float64 seconds of a **short burst** on an idle machine:
divide compute by ``sustained_clock`` for a training step. Nothing here knows about layouts or models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from planner import library, schema
from planner.curves import RINGS
from planner.errors import PlannerError, UnknownNameError, nearest_first, shown
from planner.hardware.checks import compute_faults, link_faults
from planner.hardware.compute import Compute
from planner.hardware.datasheet import filled
from planner.hardware.links import Links
from planner.hardware.provenance import Provenance
from planner.hardware.relatives import with_relatives
from planner.schema import HourlyPrice, Positive, Text, keys

SCALES: dict[str, str] = {
    "sustained_clock": "rate of tensor-core work in a training run",
    "memory_fraction": "share of the memory bandwidth that memory-bound operations reach",
    "scale_up": "bandwidth of collectives inside a node, their latency kept",
    "scale_out": "share of the NICs' line rate that collectives across nodes reach",
    "network_latency": "latencies across nodes",
}
"""What ``scale`` in a file that extends a profile may multiply: what a machine achieves, not what its parts are."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """One dated price of one GPU for one hour."""

    usd_per_hour: HourlyPrice
    """Dollars; the middle of a published range."""
    kind: Text
    """on-demand, spot, median, range, ..."""
    date: Text
    """When it was read."""
    source: Text
    """Where it was read."""


@dataclass(frozen=True, kw_only=True)
class HardwareProfile(Compute, Links):
    """One accelerator, its node and its network, and where the numbers come from."""

    measured: dict[str, Text]
    """Per family (gemm, attention, memory, scale_up, scale_out): "measured" or "scaled from <profile>"."""
    prices: tuple[Price, ...] = ()
    """Dated prices."""
    unverified: tuple[Text, ...] = ()
    """Fields that come from general knowledge and were not checked in a document."""
    notes: tuple[Text, ...] = ()
    """What a user should know."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Where the numbers come from: repository, commit, licence."""
    provenance: Provenance | None = None
    """Of a profile that was measured on the spot: machine, versions, date, command, spread."""
    filled_from: Text = ""
    """The relative that stands for whatever a datasheet did not say; empty where nothing had to be filled."""
    measurements: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What the curves were fitted to, as it was measured, points by family; kept for the reader, no price depends on it."""

    def scaled(self, **factors: float) -> HardwareProfile:
        """A profile with some quantities multiplied: ``scaled(network_bandwidth=2)``; peak_flops means all dtypes.

        Curves follow: rates and fractions are relative to the peaks, and collectives keep their latency.
        """
        changes: dict[str, Any] = {}
        known = (*schema.quantities_of(HardwareProfile), "peak_flops")
        for key, factor in factors.items():
            if key not in known:
                nearest = nearest_first(key, known)[0]
                raise PlannerError(f"{self.name}: '{key}' cannot be scaled; did you mean {nearest}?")
            if not factor > 0:
                raise PlannerError(f"{self.name}: the factor of {key} must be above 0, it is {factor}")
            if key == "peak_flops":
                changes[key] = {dtype: rate * factor for dtype, rate in self.peak_flops.items()}
            else:
                changes[key] = getattr(self, key) * factor
        link = "scale_up_bandwidth" if self.scale_up_domain > 1 else "pcie_bandwidth"
        if link in factors:
            changes["scale_up"] = {op: curve.with_link(factors[link]) for op, curve in self.scale_up.items()}
            changes["scale_up_bandwidth"] = self.scale_up_bandwidth * factors[link]
        return replace(self, **changes)

    def achieving(self, **factors: float) -> HardwareProfile:
        """The profile with what the machine achieves multiplied, by name of SCALES: ``achieving(scale_out=0.7)``."""
        changes: dict[str, Any] = {}
        for key, factor in factors.items():
            if key not in SCALES:
                raise UnknownNameError("scale", key, SCALES)
            if not np.isfinite(factor) or not factor > 0:
                raise PlannerError(f"{self.name}: the scale of {key} must be above 0, it is {factor}")
        if "sustained_clock" in factors:
            changes["sustained_clock"] = self.sustained_clock * factors["sustained_clock"]
        if "memory_fraction" in factors:
            share = factors["memory_fraction"]
            changes["memory_fraction"] = {op: fraction * share for op, fraction in self.memory_fraction.items()}
        if "scale_up" in factors:
            changes["scale_up"] = {op: curve.with_link(factors["scale_up"]) for op, curve in self.scale_up.items()}
        share, latency = factors.get("scale_out", 1.0), factors.get("network_latency", 1.0)
        if (share, latency) != (1.0, 1.0):
            further = self.stretched(rings=latency, others=latency)
            changes["scale_out"] = {op: curve.with_share(share) for op, curve in further.scale_out.items()}
            changes["network_latency"] = further.network_latency
        return replace(self, **changes) if changes else self

    def stretched(self, *, rings: float = 1.0, others: float = 1.0) -> HardwareProfile:
        """The profile with latencies across nodes multiplied: those of RINGS, for which network_latency stands, and the others."""
        curves = {op: c.stretched(rings if op in RINGS else others) for op, c in self.scale_out.items()}
        return replace(self, network_latency=self.network_latency * rings, scale_out=curves)

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a profile file, with every curve written out; ``from_dict`` reads it back."""
        data = schema.plain_fields(self)
        data["attention"] = [
            {"kernel": kernel, "dtype": dtype, "pass": pass_, **curve.to_dict()}
            for (kernel, dtype, pass_), curve in self.attention.items()
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "hardware profile") -> HardwareProfile:
        """A profile from the data of a file. Raises PlannerError: what is wrong, where, and what would be right."""
        if "extends" in data:
            return _extended(data, where)
        with _readable(where):
            return schema.read(cls, with_relatives(filled(data, where), where), where)._possible(where)

    def _possible(self, where: str) -> HardwareProfile:
        """The profile, if a machine can be so fast. Raises PlannerError."""
        measured = self.measured["gemm"].startswith("measured")
        for fault in (*compute_faults(self, measured), *link_faults(self)):
            raise PlannerError(f"{where}: {fault}")
        return self


def load_hardware(name: str) -> HardwareProfile:
    """The profile of a library name ("h100-sxm") or of a user's YAML file. Raises PlannerError when it is broken."""
    path = library.find("hardware", name)
    return HardwareProfile.from_dict(library.read_yaml(path), path.name)


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """What Python says of values of another shape than the readers expect, as a sentence."""
    try:
        yield
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise PlannerError(f"{where}: a value has another form than a profile has there ({reason})") from error


def _extended(data: Mapping[str, Any], where: str, depth: int = 0) -> HardwareProfile:
    """A file that ``extends`` a profile: its own keys replace those of the base, then ``scale`` multiplies what the machine
    achieves (SCALES). ``calibration`` says where that comes from; it is kept among the sources."""
    own = dict(data)
    base, scale, calibration = own.pop("extends"), own.pop("scale", {}), own.pop("calibration", None)
    if not isinstance(base, str) or depth > 3:
        raise PlannerError(f"{where}: extends is {shown(base)}; it must name one profile, at most four levels deep")
    factors = schema.value_of(_SCALE, scale, where, "scale")
    path = library.find("hardware", base)
    below = library.read_yaml(path)
    if "extends" in below:
        if own.keys() - {"name", "device", "notes", "sources"}:
            raise PlannerError(f"{where}: extends {base}, which extends another profile; only scale may be given here")
        profile = _extended(below, path.name, depth + 1)
        profile = replace(profile, name=str(own.get("name", profile.name)))
    else:
        profile = HardwareProfile.from_dict({**below, **own}, where)
    profile = profile.achieving(**factors)
    if calibration is not None:
        profile = replace(profile, sources={**profile.sources, "calibration": calibration})
    return profile._possible(where)


_SCALE = Annotated[dict[str, Positive], keys(SCALES, required=False)]
