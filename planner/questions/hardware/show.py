"""What a hardware profile says, two of them side by side, and its curves as a picture."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner import units
from planner.curves import bus_factor
from planner.errors import PlannerError
from planner.hardware import ASSUMED, HardwareProfile
from planner.hardware.overlap import LINKS

SIZES = (units.MIB, 16 * units.MIB, 256 * units.MIB)
"""Messages of the table: a small bucket, an activation, a large bucket."""
SQUARES = (256, 512, 1024, 2048, 4096, 8192)
"""Sizes of square products in the table: those that a profile measured about; of the library's, whose points are not in the
file, from 1024 on."""
LAYER_KEYS = ("hidden", "ffn", "heads", "seq", "batch", "dtype", "pass", "whole_us", "operators_us", "error_percent")
"""What is shown of a whole layer that was measured beside its operators."""
FACTS = ("allocator_rounding",)
"""Memory facts that are measured and priced by nothing; shown where a profile has them."""


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
    """bytes, bytes/s, FLOP/s, seconds, a share, or times (what takes so many times as long)."""

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
    return [*_machine(profile), *_compute(profile), *_collectives(profile), *_overlap(profile)]


def _machine(one: HardwareProfile) -> Iterator[Figure]:
    for name in (
        "usable_memory", "context_memory", "communicator_memory", "expert_communicator_memory", "workspace_memory",
    ):  # fmt: skip
        yield Figure(family="machine", name=name.replace("_", " "), value=getattr(one, name), unit="bytes")
    for row in one.measurements.get("bytes", ()):
        if row.get("name") in FACTS and isinstance(row.get("bytes"), int | float):
            yield Figure(family="machine", name=row["name"].replace("_", " "), value=row["bytes"], unit="bytes")
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
    sizes: list[list[Any]] = [[row.get(name) for name in ("m", "n", "k")] for row in points]
    sides = [
        math.prod(size) ** (1.0 / 3.0) for size in sizes if all(isinstance(side, int) and side > 0 for side in size)
    ]
    if not sides:
        return [size for size in SQUARES if size >= 1024]
    return [size for size in SQUARES if 0.8 * min(sides) <= size <= 1.25 * max(sides)]


def _longest(one: HardwareProfile, dtype: str) -> float:
    """4096 tokens, or the longest sequence measured where that is shorter, to a power of two."""
    points = [row for row in one.measurements.get("attention", ()) if row.get("dtype") == dtype]
    lengths = [row.get("seq") for row in points]
    longest = max((float(length) for length in lengths if isinstance(length, int) and length > 0), default=4096.0)
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


def _overlap(one: HardwareProfile) -> Iterator[Figure]:
    """As measured: a ratio below one is priced as one."""
    for link, found in one.overlap.items():
        for what, value in (
            ("computation beside a collective", found.compute), ("a collective beside computation", found.communication)
        ):  # fmt: skip
            yield Figure(family="overlap", name=f"{what}, {link}", value=value, unit="times")


# ---------------------------------------------------------------------------------------------------- show


def shown_profile(profile: HardwareProfile) -> dict[str, Any]:
    """Everything that ``plan hardware show`` prints, as plain data."""
    return {
        "name": profile.name, "device": profile.device, "vendor": profile.vendor, "arch": profile.arch,
        "measured": dict(profile.measured) | _unmeasured_overlap(profile),
        "provenance": profile.provenance.to_dict() if profile.provenance else None,
        "figures": [asdict(one) for one in figures(profile)],
        "collectives": list(_shown_collectives(profile)),
        "points": {family: len(rows) for family, rows in profile.measurements.items() if isinstance(rows, list)},
        "layers": [
            {key: row[key] for key in LAYER_KEYS} for row in profile.measurements.get("layer", ())
            if set(LAYER_KEYS) <= row.keys() and all(isinstance(row[key], int | float) for key in LAYER_KEYS[-3:])
        ],
        "notes": list(profile.notes), "unverified": list(profile.unverified),
    }  # fmt: skip


def _unmeasured_overlap(profile: HardwareProfile) -> dict[str, str]:
    """What the cost model takes for links whose overlap the profile has not measured."""
    missing = [link for link in LINKS if link not in profile.overlap]
    if not missing:
        return {}
    where = "" if len(missing) == len(LINKS) else f" {missing[0]}"
    said = f"assumed{where}: {float(np.asarray(ASSUMED.compute)):g} both ways, computation and collectives beside each other"
    return {"overlap": "; ".join(part for part in (profile.measured.get("overlap", ""), said) if part)}


def _shown_collectives(profile: HardwareProfile) -> Iterator[dict[str, Any]]:
    """One row per measured curve of collectives: latency, algorithm and bus bandwidth with their spread, and the fit.

    Rows that somebody wrote in another form are passed over.
    """
    for row in profile.measurements.get("collective", ()):
        with contextlib.suppress(ArithmeticError, KeyError, PlannerError, TypeError, ValueError):
            fits = [float(one["median_percent"]) for one in row.get("fits", ())]
            yield {
                **{key: str(row[key]) for key in ("op", "dtype")}, **{key: int(row[key]) for key in ("n", "stride", "nodes")},
                "sizes": len(str(row["sizes"]).split()),
                "latency_s": units.parse(row["latency"], "seconds", what="latency"),
                "algorithm_bandwidth": units.parse(row["algorithm_bandwidth"], "bytes/s", what="algorithm_bandwidth"),
                "bus_bandwidth": units.parse(row["bus_bandwidth"], "bytes/s", what="bus_bandwidth"),
                **{key: float(row[key]) for key in ("latency_percent", "bandwidth_percent", "confidence")},
                "outliers": sum(int(count) for count in str(row["outliers"]).split()),
                "fit_percent": min(fits, default=None),
            }  # fmt: skip


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
    assumed = ", assumed" if profile.measured.get("scale_out", "").startswith("assumed") else ""
    for nodes, color in ((2, "tab:red"), (8, "tab:orange")):
        ranks = nodes * profile.gpus_per_node
        time = np.asarray(profile.scale_out_time("all_reduce", sizes, ranks, profile.gpus_per_node))
        rate = bus_factor("all_reduce", ranks) * sizes / time / units.GIGA
        axis.plot(
            sizes,
            rate,
            "--",
            color=color,
            label=f"all_reduce, {nodes} nodes of {profile.gpus_per_node:.0f}{assumed}",
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
    points = [
        one for one in profile.measurements.get("gemm", ())
        if one.get("pass") == "forward" and all(isinstance(one.get(name), int | float) for name in ("m", "n", "k", "us"))
        and one["us"] > 0
    ]  # fmt: skip
    if points:
        rates = [2.0 * one["m"] * one["n"] * one["k"] / (one["us"] * units.MICRO) / scale for one in points]
        axis.plot([one["m"] for one in points], rates, "k.", markersize=3, label="measured, every shape")
    axis.set_xscale("log", base=2)
    low, high = axis.get_ylim()
    if low > 0.1 * high:  # a rate alone was fitted: no decade to show
        axis.set_ylim(0, 1.1 * high)
    else:
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
