"""The measured kernels of one device, as ``profiles/decode`` holds them, and the relative of a device that has no file there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from planner import library
from planner.curves import Column, column, numbers
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.schema import check_keys
from planner.serving.curves.kernel_laws import LAWS, Sizes, Terms
from planner.serving.curves.time_mesh import Mesh

KIND = "decode"
INDEX = "decode_devices.yaml"
BEST_SHARE = 0.95
"""Of the nominal bandwidth: no kernel was seen to reach more from memory."""
OVERLAPPED = ("memory", "depth")
"""Terms of a product that may hide each other."""
_KERNEL_KEYS = ("from", "law", "overlaps", "axes", "percent", "rows", "errors", "note")


@dataclass(frozen=True)
class Kernel:
    """One kernel on one device: the numbers of its law and, where shapes were measured, a mesh of measured over law."""

    operator: str
    """Key of LAWS."""
    dtype: str
    """Format of what it reads, as the law takes it."""
    hardware: HardwareProfile
    numbers: dict[str, float]
    """By name of the term."""
    axes: dict[str, Column] = field(default_factory=dict)
    """Nodes of the mesh by name of every size of the law, one where only the law knows the size; empty without a mesh."""
    percent: Column = field(default_factory=lambda: np.zeros(0))
    """100 x measured / law at the nodes."""
    overlaps: bool = False
    """Of the terms of OVERLAPPED the longer is seen, not their sum; without a mesh only, which says how shapes differ."""

    @cached_property
    def mesh(self) -> Mesh | None:
        """Times at the nodes on this device, within its bounds."""
        if not self.axes:
            return None
        grid = dict(zip(self.axes, np.meshgrid(*self.axes.values(), indexing="ij"), strict=True))
        terms = self._terms(grid)
        return Mesh.lifted(self.axes, np.maximum(self._sum(terms) * self.percent / 100.0, self._least(terms)))

    def _terms(self, sizes: Sizes) -> Terms:
        return LAWS[self.operator](self.hardware, sizes, self.dtype)

    def _sum(self, terms: Terms) -> Column:
        return column(sum(number * terms[name] for name, number in self.numbers.items()))

    def _hidden(self, terms: Terms) -> Column | float:
        """What overlaps: blocks walk along k while others read, and the longer of both is seen."""
        if not self.overlaps:
            return 0.0
        memory, depth = (self.numbers.get(name, 0.0) * column(terms[name]) for name in OVERLAPPED)
        return np.minimum(memory, depth)

    def _least(self, terms: Terms) -> Column:
        """The traffic at BEST_SHARE of the bandwidth, the work at the peak, one launch inside a graph."""
        least = np.maximum(terms.get("memory", 0.0) * (1.0 / BEST_SHARE), terms.get("compute", 0.0))
        return np.maximum(least, self.hardware.graph_launch_floor)

    def time(self, sizes: Sizes) -> Column:
        """Seconds: the mesh at the nearest sizes within it, and what the law adds from there; never below the bounds.

        Within the mesh its nodes keep them: every bound is a product of sizes, and linear between the nodes as well.
        """
        shape = np.broadcast_shapes(*(size.shape for size in sizes.values()))
        if (mesh := self.mesh) is None:
            terms = self._terms(sizes)
            time = np.maximum(self._sum(terms) - self._hidden(terms), self._least(terms))
        else:
            inside, beyond = mesh.inside(sizes)
            time = mesh.time(inside)
            if beyond:
                terms = self._terms(sizes)
                further = np.maximum(self._sum(terms) - self._sum(self._terms(inside)), 0.0)
                time = np.maximum(time + further, self._least(terms))
        return time if time.shape == shape else np.broadcast_to(time, shape).copy()

    def part(self, term: str, sizes: Sizes) -> Column:
        """Seconds of one term of the law."""
        return column(self.numbers.get(term, 0.0) * self._terms(sizes)[term])

    def reading(self, dtype: str, **least: float) -> Kernel:
        """The same kernel on another format, without what shapes showed; numbers named in ``least`` are at least that."""
        return replace(
            self, dtype=dtype, numbers={**self.numbers, **{k: max(v, self.numbers.get(k, 0.0)) for k, v in least.items()}},
            axes={}, percent=np.zeros(0),
        )  # fmt: skip


def kernel_from(data: object, operator: str, dtype: str, hardware: HardwareProfile, where: str) -> Kernel:
    """A kernel from a mapping: ``law`` as text of names and numbers, ``axes`` of names and texts of nodes, ``percent``.

    Raises PlannerError.
    """
    entry = check_keys(data, _KERNEL_KEYS, where, required=("law",))
    words = str(entry["law"]).split()
    values = numbers(" ".join(words[1::2]), f"{where} law", above=0.0)
    if len(words) % 2 or not words:
        raise PlannerError(f"{where}: law is text of names, each with its number")
    axes = {str(name): numbers(nodes, f"{where} {name}", above=0.0) for name, nodes in entry.get("axes", {}).items()}
    percent = numbers(entry.get("percent", ""), f"{where} percent", above=1.0)
    shape = tuple(nodes.size for nodes in axes.values())
    if axes and (percent.size != math.prod(shape) or any(np.any(np.diff(nodes) <= 0) for nodes in axes.values())):
        raise PlannerError(f"{where}: percent holds {percent.size} numbers for increasing axes of {shape} nodes")
    percent = percent.reshape(shape) if axes else percent
    named = dict(zip(words[::2], values.tolist(), strict=True))
    return Kernel(operator, dtype, hardware, named, axes, percent, bool(entry.get("overlaps", False)))


@cache
def table(name: str) -> Mapping[str, Any]:
    """The file of a device, as it stands."""
    path = library.find(KIND, name)
    return check_keys(
        library.read_yaml(path),
        ("name", "source", "kernels", "all_reduce"),
        path.name,
        required=("kernels", "all_reduce"),
    )


@cache
def measured_devices() -> Mapping[str, Likeness]:
    """The devices with a file, by name, and what they are like; written with the files, so that none need be read to choose."""
    path = library.profiles_directory() / INDEX
    return {name: Likeness(*row) for name, row in library.read_yaml(path).items()}


class Likeness(NamedTuple):
    """What makes devices relatives."""

    arch: str
    domain: float
    """Devices joined by the scale-up link."""
    peak: float
    """In bf16, FLOP/s."""
    bandwidth: float
    """Of the memory, bytes/s."""

    @classmethod
    def of(cls, hardware: HardwareProfile) -> Likeness:
        """That of a profile."""
        return cls(hardware.arch, float(hardware.scale_up_domain), hardware.peak("bf16"), hardware.memory_bandwidth)


def nearest(hardware: HardwareProfile) -> str:
    """The measured device that is most alike: generation and kind of link, then domain, peak and bandwidth by their ratio."""
    if hardware.name in measured_devices():
        return hardware.name
    own = Likeness.of(hardware)

    def distance(name: str) -> float:
        other = measured_devices()[name]
        apart = 2.0 * (own.arch != other.arch) + 2.0 * ((own.domain > 1) != (other.domain > 1))
        apart += 0.25 * abs(math.log2(own.domain / other.domain))
        return apart + abs(math.log2(own.peak / other.peak)) + abs(math.log2(own.bandwidth / other.bandwidth))

    return min(measured_devices(), key=distance)
