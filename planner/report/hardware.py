"""What a hardware profile says, two of them side by side, and its curves as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner import units
from planner.curves import bus_factor
from planner.errors import PlannerError
from planner.hardware import HardwareProfile

SIZES = (units.MIB, 16 * units.MIB, 256 * units.MIB)
"""Messages of the table: a small bucket, an activation, a large bucket."""
SQUARES = (256, 512, 1024, 2048, 4096, 8192)
"""Sizes of square products in the table: those that a profile measured about; of the library's, whose points are not in the
file, from 1024 on."""
LAYER_KEYS = ("hidden", "ffn", "heads", "seq", "batch", "dtype", "pass", "whole_us", "operators_us", "error_percent")
"""What is shown of a whole layer that was measured beside its operators."""
LEAST_DIFFERENCE = 2.0
"""Percent below which two figures count as the same where neither profile says how far its own scatter."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a profile."""

    family: str
    """memory, gemm, attention, scale_up, scale_out, machine."""
    name: str
    """What it is of."""
    value: float
    """In base units."""
    unit: str
    """bytes, bytes/s, FLOP/s, seconds, or a share."""

    @property
    def text(self) -> str:
        """For a person."""
        return in_words(self.value, self.unit)


def in_words(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "bytes":
        return units.format_bytes(value)
    if unit == "bytes/s":
        return f"{value / units.GIGA:.4g} GB/s"
    if unit == "FLOP/s":
        return f"{value / units.TERA:.4g} TFLOP/s" if value >= units.TERA else f"{value / units.GIGA:.4g} GFLOP/s"
    return units.format_seconds(value) if unit == "seconds" else f"{value:.3g}"


def figures(profile: HardwareProfile) -> list[Figure]:
    """The figures that decide prices, each read off the curves at a few sizes; what cannot be priced is left out."""
    return [*_machine(profile), *_compute(profile), *_collectives(profile)]


def _machine(one: HardwareProfile) -> Iterator[Figure]:
    for name in ("usable_memory", "context_memory", "communicator_memory"):
        yield Figure(family="machine", name=name.replace("_", " "), value=getattr(one, name), unit="bytes")
    for name in (
        "memory_bandwidth",
        "pcie_bandwidth",
        "host_memory_bandwidth",
        "scale_up_bandwidth",
        "network_bandwidth",
    ):
        yield Figure(family="machine", name=name.replace("_", " "), value=getattr(one, name), unit="bytes/s")
    for name in ("launch_floor", "graph_launch_floor", "network_latency"):
        yield Figure(family="machine", name=name.replace("_", " "), value=getattr(one, name), unit="seconds")
    for name in ("sustained_clock", "cpu_adam_bandwidth_fraction"):
        yield Figure(family="machine", name=name.replace("_", " "), value=getattr(one, name), unit="share")
    for dtype, rate in one.peak_flops.items():
        yield Figure(family="machine", name=f"peak {dtype}", value=rate, unit="FLOP/s")


def _compute(one: HardwareProfile) -> Iterator[Figure]:
    for recipe in one.gemm:
        if {"fp8_block": "fp8", "nvfp4": "fp4"}.get(recipe, recipe) not in (*one.peak_flops, "bf16"):
            continue
        for size in _squares(one, recipe):
            rate = 2.0 * size**3 / float(one.gemm_time(size, size, size, recipe, quantised=True))
            yield Figure(family="gemm", name=f"{recipe} {size} x {size} x {size}", value=rate, unit="FLOP/s")
    for kernel, dtype, pass_ in one.attention:
        if kernel != "best":
            continue
        seq = _longest(one, dtype)
        time = float(one.attention_time(1, 32, 8, 128, seq, seq, True, pass_, dtype))
        flop = 2.0 * 32 * seq * seq * 128 * (2.5 if pass_ == "backward" else 1.0)
        yield Figure(
            family="attention",
            name=f"{dtype} {pass_}, 32 heads of 128, {seq:.0f} tokens",
            value=flop / time,
            unit="FLOP/s",
        )
    for op, fraction in one.memory_fraction.items():
        yield Figure(family="memory", name=op, value=fraction * one.memory_bandwidth, unit="bytes/s")


def _squares(one: HardwareProfile, recipe: str) -> list[int]:
    """Sizes between the smallest and the largest product that was measured, by the cube root of m n k."""
    points = [row for row in one.measurements.get("gemm", ()) if row.get("dtype") == recipe]
    sides = [(float(row["m"]) * row["n"] * row["k"]) ** (1.0 / 3.0) for row in points if {"m", "n", "k"} <= row.keys()]
    if not sides:
        return [size for size in SQUARES if size >= 1024]
    return [size for size in SQUARES if 0.8 * min(sides) <= size <= 1.25 * max(sides)]


def _longest(one: HardwareProfile, dtype: str) -> float:
    """4096 tokens, or the longest sequence measured where that is shorter, to a power of two."""
    points = [row for row in one.measurements.get("attention", ()) if row.get("dtype") == dtype]
    longest = max((float(row["seq"]) for row in points if "seq" in row), default=4096.0)
    return float(2.0 ** math.floor(math.log2(min(longest, 4096.0))))


def _collectives(one: HardwareProfile) -> Iterator[Figure]:
    for op, curve in one.scale_up.items():
        for group in curve.groups.tolist():
            for size in SIZES:
                rate = float(bus_factor(op, group)) * size / float(one.scale_up_time(op, size, group))
                name = f"{op} of {group:.0f}, {units.format_bytes(size)}"
                yield Figure(family="scale_up", name=name, value=rate, unit="bytes/s")
    for op in one.scale_out:
        for nodes in (2, 8):
            size, ranks = SIZES[-1], nodes * one.gpus_per_node
            rate = float(bus_factor(op, ranks)) * size / float(one.scale_out_time(op, size, ranks, one.gpus_per_node))
            name = f"{op} on {nodes} nodes, {units.format_bytes(size)}"
            yield Figure(family="scale_out", name=name, value=rate, unit="bytes/s")


# ---------------------------------------------------------------------------------------------------- show


def shown_profile(profile: HardwareProfile) -> dict[str, Any]:
    """Everything that ``plan hardware show`` prints, as plain data."""
    return {
        "name": profile.name, "device": profile.device, "vendor": profile.vendor, "arch": profile.arch,
        "measured": dict(profile.measured),
        "provenance": profile.provenance.to_dict() if profile.provenance else None,
        "figures": [asdict(one) for one in figures(profile)],
        "points": {family: len(rows) for family, rows in profile.measurements.items() if isinstance(rows, list)},
        "layers": [
            {key: row[key] for key in LAYER_KEYS} for row in profile.measurements.get("layer", ())
            if isinstance(row, dict) and set(LAYER_KEYS) <= row.keys()
        ],
        "notes": list(profile.notes), "unverified": list(profile.unverified),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- diff


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure that two profiles disagree on."""

    family: str
    """Family of the figure."""
    name: str
    """What it is of."""
    first: float
    """In the first profile; NaN where it has none."""
    second: float
    """In the second profile."""
    unit: str
    """Of both."""
    percent: float
    """100 (second / first - 1)."""
    spread: float
    """Percent that may be chance: the spreads of the two profiles, as squares added; at least LEAST_DIFFERENCE."""

    @property
    def verdict(self) -> str:
        """``faster``, ``slower`` or ``other`` in the second profile: a figure is better when it is larger, but for times
        and what memory is taken."""
        if self.unit in ("share", "bytes"):
            return "more" if self.percent > 0 else "less"
        worse = self.percent > 0 if self.unit == "seconds" else self.percent < 0
        return "slower" if worse else "faster"


_SPREADS = {
    "gemm": ("gemm",), "attention": ("attention",), "memory": ("memory_bound",), "launch floor": ("launch",),
    "graph launch floor": ("launch",), "memory bandwidth": ("memory_bound",), "pcie bandwidth": ("host_copy",),
    "host memory bandwidth": ("host_stream",), "cpu adam bandwidth fraction": ("host_stream", "cpu_adam"),
    "sustained clock": ("sustained", "gemm"), "network latency": ("collective send_recv",),
    "scale up bandwidth": ("collective send_recv",), "network bandwidth": ("collective send_recv",),
}  # fmt: skip
"""Families of points whose scatter is that of a figure, by the figure's family or its name; sizes of memories have none."""


def spread_of(profile: HardwareProfile, family: str, name: str = "") -> float:
    """Percent by which a figure scatters in a profile that says so; 0 in one that does not."""
    if profile.provenance is None:
        return 0.0
    said = profile.provenance.spread
    if family in ("scale_up", "scale_out"):
        return said.get(f"collective {name.split()[0]}", 0.0) if name else 0.0
    wanted = _SPREADS.get(name) or _SPREADS.get(family, ())
    return math.hypot(*(said.get(one, 0.0) for one in wanted))


def assumed(profile: HardwareProfile) -> set[str]:
    """Families and quantities that a measured profile only assumes: they differ from another's for no reason of the machine's."""
    families = {family for family, how in profile.measured.items() if how.startswith("assumed")}
    said = {name.replace("_", " ") for name in profile.unverified} if profile.provenance else set()
    return families | said


def differences(first: HardwareProfile, second: HardwareProfile) -> tuple[list[Difference], int]:
    """Figures that differ by more than their spread, the largest difference first; and how many figures were compared.

    Chance: sqrt(spread_1^2 + spread_2^2) percent, at least LEAST_DIFFERENCE. What one of them assumes is not compared.
    """
    guessed = assumed(first) | assumed(second)
    theirs = {(one.family, one.name): one for one in figures(second)}
    found = []
    compared = 0
    for one in figures(first):
        other = theirs.get((one.family, one.name))
        if other is None or one.value == 0 or {one.family, one.name} & guessed:
            continue
        compared += 1
        percent = 100.0 * (other.value / one.value - 1.0)
        both = (spread_of(profile, one.family, one.name) for profile in (first, second))
        chance = max(math.hypot(*both), LEAST_DIFFERENCE)
        if abs(percent) > chance:
            found.append(Difference(
                family=one.family, name=one.name, first=one.value, second=other.value, unit=one.unit,
                percent=round(percent, 1), spread=round(chance, 1),
            ))  # fmt: skip
    return sorted(found, key=lambda one: -abs(math.log1p(max(one.percent, -99.9) / 100.0))), compared


# ---------------------------------------------------------------------------------------------------- plot


def plot(profile: HardwareProfile, path: Path) -> None:
    """A picture of three parts: bus bandwidth by size, GEMM rate by size, roofline. Raises PlannerError without matplotlib."""
    if not path.parent.is_dir():
        raise PlannerError(f"{path}: cannot be written, there is no directory {path.parent}")
    try:
        import matplotlib
    except ImportError as error:
        raise PlannerError("a plot needs matplotlib: pip install 'planner[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    _draw_collectives(axes[0, 0], profile)
    _draw_groups(axes[0, 1], profile)
    _draw_gemm(axes[1, 0], profile)
    _draw_roofline(axes[1, 1], profile)
    source = profile.provenance
    said = f"measured {source.date[:10]} on {source.machine}" if source else f"GEMM curves: {profile.measured['gemm']}"
    figure.suptitle(f"{profile.name}: {profile.device}\n{said}", fontsize=12)
    temporary = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(temporary, dpi=110, format=path.suffix.lstrip(".") or "png")
        temporary.replace(path)
    except (OSError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        raise PlannerError(
            f"{path}: cannot be written ({error}); use a name that ends in .png, .svg or .pdf"
        ) from error
    finally:
        plt.close(figure)


def _size_axis(axis: Any, sizes: Any) -> None:
    axis.set_xscale("log", base=2)
    ticks = [size for size in sizes if math.log2(size) % 5 == 0]
    axis.set_xticks(ticks, [units.format_bytes(size) for size in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=0)


def _draw_collectives(axis: Any, profile: HardwareProfile) -> None:
    """Every operation on its largest measured group."""
    for op, curve in profile.scale_up.items():
        group = float(curve.groups[-1])
        rate = bus_factor(op, group) * curve.sizes / curve.seconds[-1] / units.GIGA
        axis.plot(
            curve.sizes, rate, "--" if op == "broadcast" else "-", label=f"{op}, {group:.0f} ranks", linewidth=1.6
        )
    link = profile.scale_up_bandwidth if profile.scale_up_domain > 1 else profile.pcie_bandwidth
    axis.axhline(link / units.GIGA, color="grey", linestyle="--", linewidth=1, label="link, one direction")
    _size_axis(axis, next(iter(profile.scale_up.values())).sizes)
    axis.set(title="Bus bandwidth inside a node, largest group", xlabel="buffer size", ylabel="GB/s")
    axis.legend(fontsize=8)


def _draw_groups(axis: Any, profile: HardwareProfile) -> None:
    """all_reduce and all_gather by group size; across nodes as dashed lines."""
    import matplotlib.pyplot as plt

    sizes = next(iter(profile.scale_up.values())).sizes
    for op, style in (("all_reduce", "-"), ("all_gather", ":")):
        curve = profile.scale_up[op]
        for number, group in enumerate(curve.groups.tolist()):
            rate = bus_factor(op, group) * curve.sizes / curve.seconds[number] / units.GIGA
            axis.plot(curve.sizes, rate, style, color=plt.cm.viridis(number / max(len(curve.groups), 2)),
                      label=f"{op} of {group:.0f}", linewidth=1.6)  # fmt: skip
    for nodes, color in ((2, "tab:red"), (8, "tab:orange")):
        ranks = nodes * profile.gpus_per_node
        time = np.asarray(profile.scale_out_time("all_reduce", sizes, ranks, profile.gpus_per_node))
        rate = bus_factor("all_reduce", ranks) * sizes / time / units.GIGA
        axis.plot(
            sizes,
            rate,
            "--",
            color=color,
            label=f"all_reduce, {nodes} nodes of {profile.gpus_per_node:.0f}",
            linewidth=1.3,
        )
    _size_axis(axis, sizes)
    axis.set(title="Bus bandwidth by group, and across nodes", xlabel="buffer size", ylabel="GB/s")
    axis.legend(fontsize=8)


def _rate_unit(profile: HardwareProfile) -> tuple[float, str]:
    """TFLOP/s for a GPU, GFLOP/s for a core."""
    fast = max(profile.peak_flops.values()) >= units.TERA
    return (units.TERA, "TFLOP/s") if fast else (units.GIGA, "GFLOP/s")


def _draw_gemm(axis: Any, profile: HardwareProfile) -> None:
    """Rate of a product of m tokens with a 4096 x 4096 weight, by recipe and pass."""
    scale, unit = _rate_unit(profile)
    tokens = np.exp2(np.linspace(4, 15, 90))
    for number, recipe in enumerate(profile.gemm):
        try:
            times = profile.gemm_times(tokens, 4096.0, 4096.0, recipe, True)
        except PlannerError:
            continue
        for which, style in ((0, "-"), (2, ":")):
            rate = 2.0 * tokens * 4096.0**2 / times[which] / scale
            axis.plot(
                tokens,
                rate,
                style,
                color=f"C{number}",
                label=f"{recipe} {('forward', '', 'wgrad')[which]}",
                linewidth=1.6,
            )
    points = [one for one in profile.measurements.get("gemm", ()) if one.get("pass") == "forward"]
    if points:
        rates = [2.0 * one["m"] * one["n"] * one["k"] / (one["us"] * units.MICRO) / scale for one in points]
        axis.plot([one["m"] for one in points], rates, "k.", markersize=3, label="measured, every shape")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3, which="both")
    axis.set(title="GEMM rate: tokens x 4096 x 4096, short burst", xlabel="tokens", ylabel=unit)
    axis.legend(fontsize=8)


def _draw_roofline(axis: Any, profile: HardwareProfile) -> None:
    """Peak and bandwidth, with the classes of operators where the profile puts them."""
    scale, unit = _rate_unit(profile)
    intensity = np.exp2(np.linspace(-4, 13, 200))
    for number, peak in enumerate(sorted(set(profile.peak_flops.values()))):
        roof = np.minimum(peak, intensity * profile.memory_bandwidth) / scale
        dtypes = ", ".join(dtype for dtype, rate in profile.peak_flops.items() if rate == peak)
        axis.plot(intensity, roof, color=f"C{number}", linewidth=1.2, label=f"peak {dtypes}")
    for recipe, marker in zip(profile.gemm, "os^Dv", strict=False):
        for size in (512.0, 2048.0, 8192.0):
            curve = profile.gemm[recipe]
            moved = float(curve.bytes_moved(np.asarray(size), np.asarray(size), np.asarray(size)))
            try:
                seconds = float(profile.gemm_time(size, size, size, recipe, quantised=True))
            except PlannerError:
                continue
            axis.plot(2.0 * size**3 / moved, 2.0 * size**3 / seconds / scale, marker, color="black", markersize=5,
                      label=f"gemm {recipe}: 512, 2048, 8192" if size == 512.0 else None)  # fmt: skip
    reached = sorted({round(fraction, 3) for fraction in profile.memory_fraction.values()})
    for fraction in (reached[0], reached[-1]):
        names = [op for op, value in profile.memory_fraction.items() if round(value, 3) == fraction]
        low = intensity[intensity < 2.0]
        axis.plot(low, low * profile.memory_bandwidth * fraction / scale, "--", color="grey", linewidth=1)
        end = (low[-1], low[-1] * profile.memory_bandwidth * fraction / scale)
        said = f"{names[0]}: {fraction:.2f} of the bandwidth"
        axis.annotate(said, end, fontsize=8, xytext=(4, -8), textcoords="offset points")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3, which="both")
    axis.set(title="Roofline", xlabel="FLOP per byte of memory traffic", ylabel=unit)
    axis.legend(fontsize=8, loc="upper left")
