"""One accelerator with its node and network, as measured: peaks, memory, prices and curves.

A profile is a file in ``profiles/hardware`` (or a user's own); every number there has a unit and a source. All methods
take scalars or columns of numpy and broadcast; they return float64 seconds of a **short burst** on an idle machine:
divide compute by ``sustained_clock`` for a training step. Nothing here knows about layouts or models.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from functools import cache
from typing import Annotated, Any

import numpy as np

from planner import library, schema, units
from planner.curves import RINGS, bus_factor, least_factor
from planner.errors import PlannerError, UnknownNameError, shown
from planner.hardware.accelerator import Compute
from planner.hardware.links import Links
from planner.hardware.names import OVER, profile_named
from planner.hardware.relatives import FAMILIES, FASTEST_PCIE, filled, with_relatives
from planner.record import record
from planner.schema import HourlyPrice, Positive, Text, keys

SCALES: dict[str, str] = {
    "sustained_clock": "rate of tensor-core work in a training run",
    "memory_fraction": "share of the memory bandwidth that memory-bound operations reach",
    "scale_up": "bandwidth of collectives inside a node, their latency kept",
    "scale_out": "share of the NICs' line rate that collectives across nodes reach",
    "network_latency": "latencies across nodes",
}
"""What ``scale`` in a file that extends a profile may multiply: what a machine achieves, not what its parts are."""

LINK_TOLERANCE = 1.02
"""Timers, and 1000-against-1024 rounding in published tables."""
CLOCK_TOLERANCE = 1.05
"""Two measured times of the same thing may be in the wrong order by this."""
GRID_TOLERANCE = 1.02
"""A grid's nodes are rounded to percent; the price itself is never below 2 m n k / peak."""
SIZE_TOLERANCE = 1.08
"""80 GB parts hold 80 GiB less the reserve."""


@record
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


@record
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
    conditions: dict[str, Text] = field(default_factory=dict)
    """State of the first node before the start: clocks, power limit, ECC, persistence, links, NICs, environment."""
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
    to_dict = schema.plain_fields

    def __post_init__(self) -> None:
        for key in ("machine", "device", "date", "command"):
            if not getattr(self, key).strip():
                raise PlannerError(f"{key} is empty; say what was measured, when and how")
        try:
            datetime.date.fromisoformat(self.date[:10])
        except ValueError as error:
            raise PlannerError(f"date {shown(self.date)} is not a day such as 2026-03-31") from error


@record
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
        self._require_factors(factors, (*schema.quantities_of(HardwareProfile), "peak_flops"))
        changes: dict[str, Any] = {key: getattr(self, key) * by for key, by in factors.items() if key != "peak_flops"}
        if "peak_flops" in factors:
            changes["peak_flops"] = {dtype: rate * factors["peak_flops"] for dtype, rate in self.peak_flops.items()}
        link = "scale_up_bandwidth" if self.scale_up_domain > 1 else "pcie_bandwidth"
        if link in factors:
            changes["scale_up"] = {op: curve.with_link(factors[link]) for op, curve in self.scale_up.items()}
            changes["scale_up_bandwidth"] = self.scale_up_bandwidth * factors[link]
        return replace(self, **changes)

    def achieving(self, **factors: float) -> HardwareProfile:
        """The profile with what the machine achieves multiplied, by name of SCALES: ``achieving(scale_out=0.7)``."""
        self._require_factors(factors, SCALES)
        changes: dict[str, Any] = {}
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

    def _require_factors(self, factors: Mapping[str, float], known: Collection[str]) -> None:
        for key, factor in factors.items():
            if key not in known:
                raise UnknownNameError("scale", key, known)
            if not (np.isfinite(factor) and factor > 0):
                raise PlannerError(f"{self.name}: the scale of {key} must be above 0, it is {factor}")

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
        try:
            return schema.read(cls, with_relatives(filled(data, where), where), where)._possible(where)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # values of another shape
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            raise PlannerError(f"{where}: a value has another form than a profile has there ({reason})") from error

    def _possible(self, where: str) -> HardwareProfile:
        """The profile, if a machine can be so fast. Raises PlannerError."""
        for fault in _faults(self):
            raise PlannerError(f"{where}: {fault}")
        return self


def load_hardware(name: str) -> HardwareProfile:
    """The profile of a library name ("h100-sxm", or ``profile_named``) or of a user's YAML file, with another link inside a node
    where the name says so ("rtx-3090 over PCIe 3.0 x8"). Raises PlannerError when it is broken."""
    named, over, link = profile_named(name).partition(OVER)
    profile = _read(named) if library.is_file_name(named) else _of_library(named)
    return joined_by(profile, link) if over else profile


def _read(name: str) -> HardwareProfile:
    path = library.find("hardware", name)
    return HardwareProfile.from_dict(library.read_yaml(path), path.name)


@cache
def _of_library(name: str) -> HardwareProfile:
    """Read once: a question over all hardware asks for each profile many times, and takes 50 ms each."""
    return _read(name)


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


def _faults(profile: HardwareProfile) -> Iterator[str]:
    """What a price looks up and is not there, and what no machine can be: faster than its peak, its memory, its host or a link;
    with the numbers."""
    yield from profile.missing_curves()
    for family in (one for one in FAMILIES if one not in profile.measured):
        yield f"measured does not say how {family} is known; write measured, assumed, or scaled from a profile"
    for what, share, of in _shares(profile):
        if not 0 < share <= 1:
            yield f"{what} {share:.2f}{of}; at most 1, and above 0"
    yield from _sizes(profile)
    if profile.measured["gemm"].startswith("measured"):  # else the grid of a relative, which may not suit this peak
        yield from _grids(profile)
    yield from _switches(profile)
    yield from _collectives(profile)


def _shares(profile: HardwareProfile) -> Iterator[tuple[str, float, str]]:
    """What is a part of something else: words before it, the share, words after it."""
    yield "sustained_clock is", profile.sustained_clock, ", faster than a short burst"
    yield "cpu_adam_bandwidth_fraction is", profile.cpu_adam_bandwidth_fraction, ", faster than the host's memory"
    for op, fraction in profile.memory_fraction.items():
        yield f"memory_fraction {op} is", fraction, ", faster than the memory"
    for recipe, curve in profile.gemm.items():
        yield f"gemm {recipe} runs at", curve.efficiency, " of the peak"
        yield f"gemm {recipe} reads its operands at", curve.memory_efficiency, " of the memory bandwidth"
        grouped = max(curve.grouped_efficiency)
        yield f"gemm {recipe} runs grouped products at", grouped, " of the rate of one large product"
    for key, attention in profile.attention.items():
        for share in (float(attention.efficiency.min()), float(attention.efficiency.max())):
            yield f"attention {' '.join(key)} runs at", share, " of the peak"
    for op, network in profile.scale_out.items():
        share = max(network.fast.efficiency, network.bulk.efficiency)
        yield f"scale_out {op} reaches", share, " of the line rate of the NICs"


def _sizes(profile: HardwareProfile) -> Iterator[str]:
    """Sizes of the machine and of the device's memory, and its launches."""
    for name in ("gpus_per_node", "scale_up_domain"):
        count = float(getattr(profile, name))
        if count < 1 or count % 1:
            yield f"{name} is {count:g}; it must be a whole number from 1"
    if profile.usable_memory > profile.memory * SIZE_TOLERANCE:
        yield "usable_memory is larger than memory; check GB against GiB"
    reserve = profile.context_memory + profile.communicator_memory + profile.workspace_memory
    if reserve >= profile.usable_memory:
        yield (
            f"context, one communicator and workspace take {units.format_bytes(reserve)} of "
            f"{units.format_bytes(profile.usable_memory)} usable memory; nothing would be left to train in"
        )
    if profile.graph_launch_floor > profile.launch_floor * CLOCK_TOLERANCE:
        yield (
            f"graph_launch_floor {units.format_seconds(profile.graph_launch_floor)} is longer than launch_floor "
            f"{units.format_seconds(profile.launch_floor)}; a graph only takes launches away"
        )


def _grids(profile: HardwareProfile) -> Iterator[str]:
    """No product above its peak at a node of its residual grid."""
    for recipe, curve in profile.gemm.items():
        if curve.grid is None or recipe not in profile.peak_flops:
            continue
        peak = profile.peak_flops[recipe]
        m, n, k = (axis.ravel() for axis in np.meshgrid(curve.grid.m, curve.grid.n, curve.grid.k, indexing="ij"))
        share = 2.0 * m * n * k / (curve.unbounded_time(m, n, k, peak, profile.memory_bandwidth) * peak)
        worst = int(np.argmax(share))
        if share[worst] > GRID_TOLERANCE:
            yield (
                f"gemm {recipe} runs at {share[worst]:.2f} of the peak of {peak / units.TERA:.4g} TFLOP/s at "
                f"m {m[worst]:.0f}, n {n[worst]:.0f}, k {k[worst]:.0f}; it cannot pass 1"
            )


def _switches(profile: HardwareProfile) -> Iterator[str]:
    """On two whole nodes an all_reduce in the switch may pass the line rate, where every GPU receives each byte once."""
    ranks = 2.0 * profile.gpus_per_node
    for op, network in profile.scale_out.items():
        most = float(bus_factor(op, ranks) / least_factor(op, ranks))
        if network.two_nodes is not None and network.two_nodes > most and profile.gpus_per_node > 1:
            reached = f"scale_out {op} on two nodes reaches {network.two_nodes:.2f} of the line rate of the NICs"
            yield f"{reached}; at most {most:.2f}, where every GPU receives each byte once"


def _collectives(profile: HardwareProfile) -> Iterator[str]:
    """No measured collective moves more than its link carries."""
    for op, collective in profile.scale_up.items():
        for group, row in zip(collective.groups, collective.seconds, strict=True):
            link = profile.scale_up_bandwidth if group <= profile.scale_up_domain else profile.pcie_bandwidth
            rate = least_factor(op, group) * collective.sizes / row
            worst = int(np.argmax(rate))
            if rate[worst] > link * LINK_TOLERANCE:
                moved, size = units.format_bytes(float(rate[worst])), units.format_bytes(float(collective.sizes[worst]))
                yield (
                    f"scale_up {op} on {group:.0f} GPUs moves {moved}/s at {size}, "
                    f"above the link of {units.format_bytes(link)}/s"
                )


# ------------------------------------------------------------------------------------------- another link inside a node

PCIE_BOX, NVLINK_BOX = "rtx-pro-6000", "a100-sxm-80gb"
"""Profiles whose collectives were measured over PCIe, and over NVLink: their curves stand for a link that a profile lacks."""
LANES_16 = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}
"""GB/s in one direction of 16 lanes, by generation of PCIe."""
_PCIE = re.compile(r"^\s*pci-?e(?:xpress)?(?:\s*(?:gen)?\s*(\d)(?:\.0)?)?(?:\s*x\s*(\d+))?", re.IGNORECASE)
_BOTH_WAYS = re.compile(r"^\s*(?:nvlink|infinity fabric)\s*\d*\s+(\d+(?:\.\d+)?)\s*GB/s", re.IGNORECASE)


def joined_by(hardware: HardwareProfile, link: str, what: str = "--intra-node") -> HardwareProfile:
    """The profile with another link inside a node. Raises PlannerError.

    ``pcie``, 'PCIe 3.0 x8': no NVLink and no bridge. ``nvlink``: as the profile has it; 'NVLink4 900 GB/s': at this rate, which
    counts both directions, as it is printed. A plain rate, '200 GB/s', is that of one GPU in one direction.
    """
    if found := _PCIE.match(link):
        return _over_pcie(hardware, found.group(1), found.group(2), what)
    if found := _BOTH_WAYS.match(link):
        return _at_rate(hardware, float(found.group(1)) * units.GIGA / 2.0)
    if re.match(r"\s*(nvlink|infinity fabric)", link, re.IGNORECASE):
        if hardware.scale_up_domain > 1:
            return replace(hardware, link_shares={}) if re.search("nvswitch", link, re.IGNORECASE) else hardware
        raise PlannerError(f"{what} {shown(link)}: {hardware.name} has no NVLink; give its rate per GPU, like '300 GB/s'")
    rate = units.parse(link, "bytes/s", what=what)
    if rate <= 0:
        raise PlannerError(f"{what} must be above zero")
    return _at_rate(hardware, rate)


def _over_pcie(hardware: HardwareProfile, generation: str | None, lanes: str | None, what: str) -> HardwareProfile:
    if generation and int(generation) not in LANES_16:
        raise PlannerError(f"{what}: PCIe {generation}.0 is not known; {', '.join(map(str, LANES_16))} are")
    rate = LANES_16[int(generation)] * units.GIGA if generation else hardware.pcie_bandwidth
    rate = min(rate, FASTEST_PCIE) * int(lanes or 16) / 16.0
    if hardware.scale_up_domain == 1:
        return hardware if rate == hardware.pcie_bandwidth else hardware.scaled(pcie_bandwidth=rate / hardware.pcie_bandwidth)
    box = load_hardware(PCIE_BOX)
    curves = {op: curve.with_link(rate / box.pcie_bandwidth) for op, curve in box.scale_up.items()}
    return replace(
        hardware, scale_up=curves, scale_up_domain=1, scale_up_bandwidth=rate, pcie_bandwidth=rate, link_shares={},
        measured={**hardware.measured, "scale_up": f"scaled from {PCIE_BOX}"},
    )  # fmt: skip


def _at_rate(hardware: HardwareProfile, rate: float) -> HardwareProfile:
    if hardware.scale_up_domain > 1:
        close = abs(rate / hardware.scale_up_bandwidth - 1.0) < 0.01
        return hardware if close else hardware.scaled(scale_up_bandwidth=rate / hardware.scale_up_bandwidth)
    if rate <= FASTEST_PCIE:
        return hardware.scaled(pcie_bandwidth=rate / hardware.pcie_bandwidth)
    box = load_hardware(NVLINK_BOX)
    curves = {op: curve.with_link(rate / box.scale_up_bandwidth) for op, curve in box.scale_up.items()}
    return replace(
        hardware, scale_up=curves, scale_up_domain=hardware.gpus_per_node, scale_up_bandwidth=rate,
        measured={**hardware.measured, "scale_up": f"scaled from {NVLINK_BOX}"},
    )  # fmt: skip
