"""From measured points to the compute keys of a hardware profile, with residuals and errors at points that were held back.

What was not measured keeps the constants of the profile that stands for the device, and is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from planner import library, units
from planner.curves import AttentionCurve, GemmCurve
from planner.errors import PlannerError
from planner.hardware import MEMORY_OPS, HardwareProfile, load_hardware
from planner.lab.profile.compute_points import check_device
from planner.lab.profile.definitions import EAGER, flop, kernels, moved_bytes
from planner.lab.profile.fit_attention import attention_entries
from planner.lab.profile.fit_products import gemm_curves
from planner.lab.profile.fitting import Base, error_of, of, short
from planner.lab.profile.layer_check import HOST_LAYER, host_floor, predicted
from planner.lab.profile.points import Measured

FLOPS_PER_CYCLE = {"avx512f": 64.0, "fma": 32.0, "avx": 16.0}
"""fp32 FLOP per cycle and core of an x86 with two vector units of the kind; one with a single unit reaches half."""


@dataclass(frozen=True, kw_only=True)
class ComputeFit:
    """What the compute points say."""

    keys: dict[str, Any]  # Keys of a profile file, those that were measured
    spread: dict[str, float]  # Half the interval of the median over it, percent, by family: the median over its points
    measurements: dict[str, Any]  # The points themselves, by family
    residuals: dict[str, Any] = field(default_factory=dict)  # [median, p90] percent by curve, for the provenance
    measured: dict[str, str] = field(default_factory=dict)  # Family of the profile -> how it was measured
    notes: tuple[str, ...] = ()  # What stands in for what was not measured


def base_of(device: str, measured: Sequence[Measured], guess: HardwareProfile | None) -> Base:
    """What the fits stand on. A GPU: its profile in the library, or the nearest relative. A CPU: its own figures.

    CPU: the peak is cycles times the FLOP of two vector units, or the fastest measured product where that is not known or
    lower (a boosted clock); the bandwidth is the fastest measured stream, caches included.
    """
    check_device(device)
    if device == "cuda":
        if guess is None:
            raise PlannerError("a GPU profile needs the library profile that is nearest to the device: give --hardware")
        return Base(
            peak_flops=dict(guess.peak_flops), bandwidth=guess.memory_bandwidth, compute_units=guess.compute_units,
            guess=guess,
        )  # fmt: skip
    products, streams = of(measured, "gemm") + of(measured, "attention"), of(measured, "memory_bound")
    if not products or not streams:
        raise PlannerError("no product or no stream was measured: give the profile a larger --budget")
    peaks: dict[str, float] = {}
    for row in sorted(products, key=lambda row: row.point.text("dtype")):
        dtype = row.point.text("dtype")
        peaks[dtype] = max(peaks.get(dtype) or _nominal_peak(), flop(row.point) / row.median)
    peaks.setdefault("bf16", peaks.get("fp32", max(peaks.values())))
    bandwidth = max(moved_bytes(row.point) / row.median for row in streams)
    return Base(peak_flops=peaks, bandwidth=bandwidth, compute_units=1.0)


def _nominal_peak() -> float:
    """FLOP/s of one core in fp32 from /proc/cpuinfo; 0 where that does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        pairs = (line.split(":", 1) for line in lines if ":" in line)
        entries = {key.strip(): value.strip() for key, value in pairs}
        flags = entries.get("flags", "").split()
        per_cycle = next((each for flag, each in FLOPS_PER_CYCLE.items() if flag in flags), 0.0)
        return per_cycle * float(entries.get("cpu MHz", "0")) * units.MEGA
    except (OSError, ValueError):
        return 0.0


def memory_fractions(
    measured: Sequence[Measured], base: Base, launch: float
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Part of the bandwidth by class, of single kernels and of chains of plain operations; and how the points scatter.

    bytes / (W (t - launches)), the median over the points of the class, at most 1. A chain counts its own traffic
    (``definitions.EAGER_TENSORS``), so both are parts of one bandwidth; the profile gets that of the fused kernel, and that
    of the chain where no fused one was measured (a CPU). A layer in plain torch is compared with that of the chain.
    """
    fractions: dict[str, float] = dict(base.guess.memory_fraction) if base.guess else {}
    chains: dict[str, float] = {}
    spread: dict[str, Any] = {}
    for op in MEMORY_OPS:
        rows = of(measured, "memory_bound", op=op)
        chain = of(rows, "memory_bound", kernel=EAGER)
        fused = [row for row in rows if row.point.values.get("kernel") != EAGER]
        for some, name, found in ((chain, f"{op} eager", chains), (fused or chain, op, fractions)):
            if not some:
                continue
            parts = np.array([_part(row, base, launch) for row in some])
            value = float(np.median(parts))
            if value > 1.005:
                base.notes.append(
                    f"memory_fraction {name}: measured {value:.2f} of the bandwidth, out of a cache; 1 is kept"
                )
            found[op] = short(min(value, 1.0), 3)
            spread[f"memory {name}"] = {
                "in_sample": error_of(value / parts, np.ones_like(parts)), "rows": len(some), "fraction": found[op],
            }  # fmt: skip
        if chain and not fused:
            base.notes.append(f"memory_fraction {op}: of plain torch operations; no fused kernel was measured")
    return fractions, fractions | chains, spread


def _part(row: Measured, base: Base, launch: float) -> float:
    seconds = max(row.median - kernels(row.point) * launch, 0.2 * row.median)
    return moved_bytes(row.point) / seconds / base.bandwidth


def _all_classes(fractions: dict[str, float], notes: list[str]) -> dict[str, float]:
    """Classes that were not measured and have no guess take the element-wise one. Raises PlannerError without that."""
    if "elementwise" not in fractions:
        raise PlannerError("no element-wise operator was measured: give the profile a larger --budget")
    missing = [op for op in MEMORY_OPS if op not in fractions]
    if missing:
        notes.append(f"memory_fraction of {', '.join(missing)}: not measured, as elementwise")
    return {op: fractions.get(op, fractions["elementwise"]) for op in MEMORY_OPS}


def machine_keys(measured: Sequence[Measured], base: Base, device: str) -> dict[str, Any]:
    """launch floors, sustained clock, memory facts, host link and host Adam, in the form of the file."""
    keys: dict[str, Any] = {}
    stream, graph = (of(measured, "launch", kind=kind) for kind in ("stream", "graph"))
    if stream:
        keys["launch_floor"] = _micro(stream[0].median)
        keys["graph_launch_floor"] = _micro((graph or stream)[0].median)
    keys |= _sustained(measured)
    for name in ("usable", "context", "workspace", "communicator", "expert_communicator"):
        for fact in of(measured, "bytes", name=name)[:1]:
            keys[f"{name}_memory"] = f"{fact.median:.0f} B"
    rates = {row.point.text("direction"): moved_bytes(row.point) / row.median for row in of(measured, "host_copy")}
    if rates:
        keys["pcie_bandwidth"] = f"{short(min(rates.values()))} B/s"
        said = ", ".join(f"{way} {rate / units.GIGA:.1f} GB/s" for way, rate in rates.items())
        base.notes.append(f"host link: {said}")
    streams, adam = of(measured, "host_stream"), of(measured, "cpu_adam")
    if streams and adam:
        rate = max(moved_bytes(row.point) / row.median for row in adam)
        host = max(rate, *(row.point.number("bytes") / row.median for row in streams))
        keys["host_memory_bandwidth"] = f"{short(host)} B/s"
        keys["cpu_adam_bandwidth_fraction"] = short(rate / host, 3)
    if device == "cpu":
        keys["memory_bandwidth"] = f"{short(base.bandwidth)} B/s"
        keys["peak_flops"] = {dtype: f"{short(rate)} FLOP/s" for dtype, rate in base.peak_flops.items()}
        keys["compute_units"] = base.compute_units
        if "usable_memory" in keys:
            keys["memory"] = keys["host_memory"] = keys["usable_memory"]
    return keys


def _micro(value: float) -> str:
    return f"{short(value / units.MICRO)} us"


def _sustained(measured: Sequence[Measured]) -> dict[str, Any]:
    """Rate at the end of a long run over that of the same product in a short burst, at most 1."""
    for row in of(measured, "sustained")[:1]:
        same = {name: row.point[name] for name in ("m", "n", "k", "dtype")}
        burst = of(measured, "gemm", pass_="forward", **same)
        first = burst[0].median if burst else float(row.more["first"])
        return {"sustained_clock": short(min(first / row.median, 1.0), 3)}
    return {}


def points_by_family(measured: Sequence[Measured]) -> dict[str, Any]:
    """The points as they are kept in the file: key, microseconds (bytes for facts), interval, repetitions, clock."""
    found: dict[str, Any] = {}
    for row in measured:
        scale, unit = (1.0, "bytes") if row.point.family == "bytes" else (units.MICRO, "us")
        entry: dict[str, Any] = {unit: short(row.median / scale), "repetitions": row.repetitions, "clock": row.clock}
        if row.high > row.low:
            entry["interval"] = [short(row.low / scale), short(row.high / scale)]
        if row.outliers:
            entry["outliers"] = row.outliers
        found.setdefault(row.point.family, []).append({**row.point.values, **entry, **row.more})
    return found


def spreads(measured: Sequence[Measured]) -> dict[str, float]:
    """Median over the points of a family of half the interval of the median over it, percent."""
    families = sorted({row.point.family for row in measured if row.point.family != "bytes"})
    return {family: short(100.0 * median(row.spread for row in of(measured, family)), 3) for family in families}


def fit_compute(measured: Sequence[Measured], base: Base, device: str) -> ComputeFit:
    """The compute keys of a profile file from measured points. Raises PlannerError where too little was measured."""
    curves, residuals, further = gemm_curves(measured, base)
    if not curves:
        raise PlannerError("no matrix product was measured: give the profile a larger --budget")
    if "bf16" not in curves:  # every price of a low precision looks it up
        base.notes.append("gemm bf16: not measured, as fp32")
        curves["bf16"] = next(iter(curves.values()))
    keys = machine_keys(measured, base, device) | further
    entries, attention_residuals, slower = attention_entries(measured, base)
    if not entries:
        raise PlannerError("no attention kernel was measured: give the profile a larger --budget")
    entries += _bf16_attention(entries, base)
    launches = {row.point.text("kind"): row.median for row in of(measured, "launch")}
    launch = min((launches[kind] for kind in ("stream", "graph") if kind in launches), default=0.0)
    fractions, plain, memory_residuals = memory_fractions(measured, base, launch)
    keys["gemm"] = {recipe: curve.to_dict() for recipe, curve in curves.items()}
    keys["attention"] = entries
    keys["kernels"] = slower or (base.guess.kernels if base.guess else {"same_as_best": ["fa2", "fa3", "cudnn"]})
    keys["memory_fraction"] = _all_classes(fractions, base.notes)
    if device == "cpu":
        base.notes.append("sustained_clock of a CPU core is 1 by definition: processor time was measured")
        keys["sustained_clock"] = 1.0
    profile = _with_curves(base, curves, keys | {"memory_fraction": _all_classes(plain, [])}, launch)
    host = {kind: launches[kind] for kind in HOST_LAYER if kind in launches}
    if device == "cpu" and len(host) == len(HOST_LAYER):  # its host works where its kernels do: the time adds up
        floor = max(host_floor(host, profile), launch)
        profile = replace(profile, launch_floor=floor)
        keys["launch_floor"] = _micro(floor)
        base.notes.append(
            f"launch_floor: host time of a layer by kernel; one kernel alone {launch / units.MICRO:.2g} us"
        )
    measurements = points_by_family(measured)
    layers = check(measured, profile)
    if layers:
        measurements["layer"] = layers
        off = [abs(row["error_percent"]) for row in layers]
        residuals["layers whole, against the sum of their operators"] = {"median": median(off), "rows": len(off)}
    how = "measured" if device == "cuda" else "measured, processor time of one thread"
    return ComputeFit(
        keys=keys, residuals=residuals | attention_residuals | memory_residuals, spread=spreads(measured),
        measured=dict.fromkeys(("gemm", "attention", "memory"), how), notes=tuple(base.notes), measurements=measurements,
    )  # fmt: skip


def check(measured: Sequence[Measured], hardware: HardwareProfile) -> list[dict[str, Any]]:
    """Every measured layer: microseconds whole, sum of its operators by the profile, and predicted / measured - 1."""
    rows = []
    for row in of(measured, "layer"):
        total = predicted(row.point, hardware)
        rows.append({
            **row.point.values, "whole_us": short(row.median / units.MICRO), "operators_us": short(total / units.MICRO),
            "error_percent": round(100.0 * (total / row.median - 1.0), 1), "spread_percent": round(100.0 * row.spread, 1),
        })  # fmt: skip
    return rows


def _with_curves(base: Base, curves: dict[str, GemmCurve], keys: dict[str, Any], launch: float) -> HardwareProfile:
    """A profile that prices operators as the file will; links and sizes play no part and are some library profile's."""
    some = base.guess or load_hardware(library.names("hardware")[0])
    attention = {
        (one["kernel"], one["dtype"], one["pass"]): AttentionCurve.from_dict(one, "attention")
        for one in keys["attention"]
    }
    return replace(
        some, peak_flops=base.peak_flops, memory_bandwidth=base.bandwidth, compute_units=base.compute_units, gemm=curves,
        attention=attention, memory_fraction=keys["memory_fraction"], kernels=keys["kernels"],
        launch_floor=launch or some.launch_floor,
        precise_accumulation=keys.get("precise_accumulation", some.precise_accumulation if base.guess else {}),
        block_scaling=keys.get("block_scaling", some.block_scaling if base.guess else {}),
    )  # fmt: skip


def _bf16_attention(entries: list[dict[str, Any]], base: Base) -> list[dict[str, Any]]:
    """bf16 is what every other dtype falls back to: where it was not measured, the measured one's seconds stand in."""
    more: list[dict[str, Any]] = []
    for entry in entries:
        missing = not any(one["dtype"] == "bf16" and one["pass"] == entry["pass"] for one in entries + more)
        if missing:
            ratio = base.peak(entry["dtype"]) / base.peak("bf16")
            more.append({**entry, "dtype": "bf16", "efficiency": [min(e * ratio, 0.98) for e in entry["efficiency"]]})
            base.notes.append(f"attention bf16 {entry['pass']}: not measured, as {entry['dtype']}")
    return more
