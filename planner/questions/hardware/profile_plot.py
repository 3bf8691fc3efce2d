"""A hardware profile as a picture: bus bandwidth by size and by group, GEMM rate, roofline."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from planner import units
from planner.curves import bus_factor
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.terminal.pictures import new_figure, write_picture


def plot(profile: HardwareProfile, path: Path) -> None:
    """A picture of three parts: bus bandwidth by size, GEMM rate by size, roofline. Raises PlannerError without matplotlib."""
    if not path.parent.is_dir():
        raise PlannerError(f"{path}: cannot be written, there is no directory {path.parent}")
    figure = new_figure(13.0, 9.5, dpi=110)
    axes = figure.subplots(2, 2)
    _draw_collectives(axes[0, 0], profile)
    _draw_groups(axes[0, 1], profile)
    _draw_gemm(axes[1, 0], profile)
    _draw_roofline(axes[1, 1], profile)
    source = profile.provenance
    said = f"measured {source.date[:10]} on {source.machine}" if source else f"GEMM curves: {profile.measured['gemm']}"
    figure.suptitle(f"{profile.name}: {profile.device}\n{said}", fontsize=12)
    write_picture(figure, path)


def _bandwidths(axis: Any, sizes: Any, title: str) -> None:
    """Axes of bus bandwidth by buffer size."""
    axis.set_xscale("log", base=2)
    ticks = [size for size in sizes if math.log2(size) % 5 == 0]
    axis.set_xticks(ticks, [units.format_bytes(size) for size in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=0)
    axis.set(title=title, xlabel="buffer size", ylabel="GB/s")
    axis.legend(fontsize=8)


def _draw_collectives(axis: Any, profile: HardwareProfile) -> None:
    """Every operation on its largest measured group."""
    for op, curve in profile.scale_up.items():
        group = float(curve.groups[-1])
        rate = bus_factor(op, group) * curve.sizes / curve.seconds[-1] / units.GIGA
        style = "--" if op == "broadcast" else "-"
        axis.plot(curve.sizes, rate, style, label=f"{op}, {group:.0f} ranks", linewidth=1.6)
    link = profile.scale_up_bandwidth if profile.scale_up_domain > 1 else profile.pcie_bandwidth
    axis.axhline(link / units.GIGA, color="grey", linestyle="--", linewidth=1, label="link, one direction")
    _bandwidths(axis, next(iter(profile.scale_up.values())).sizes, "Bus bandwidth inside a node, largest group")


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
        label = f"all_reduce, {nodes} nodes of {profile.gpus_per_node:.0f}{assumed}"
        axis.plot(sizes, rate, "--", color=color, label=label, linewidth=1.3)
    _bandwidths(axis, sizes, "Bus bandwidth by group, and across nodes")


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
            label = f"{recipe} {('forward', '', 'wgrad')[which]}"
            axis.plot(tokens, rate, style, color=f"C{number}", label=label, linewidth=1.6)
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
