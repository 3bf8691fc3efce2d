"""From measured points to the compute keys of a hardware profile, with residuals and errors at points that were held back.

What was not measured keeps the constants of the profile that stands for the device, and is said.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
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
from planner.lab.profile.fit_gemm import gemm_curves
from planner.lab.profile.fitting import Base, Findings, error_of, of, short, spread_of
from planner.lab.profile.layer_check import HOST_LAYER, host_floor, predicted
from planner.lab.profile.points import Measured

FLOPS_PER_CYCLE = {"avx512f": 64.0, "fma": 32.0, "avx": 16.0}
"""fp32 FLOP per cycle and core of an x86 with two vector units of the kind; one with a single unit reaches half."""
LARGER = "give the profile a larger --budget"


def base_of(device: str, measured: Sequence[Measured], guess: HardwareProfile | None) -> Base:
    """What the fits stand on. A GPU: its profile in the library, or the nearest relative. A CPU: its own figures.

    CPU: the peak is cycles times the FLOP of two vector units, or the fastest measured product where that is not known or
    lower (a boosted clock); the bandwidth is the fastest measured stream, caches included.
    """
    check_device(device)
    if device == "cuda":
        if guess is None:
            raise PlannerError("a GPU profile needs the library profile that is nearest to the device: give --hardware")
        peaks, bandwidth = dict(guess.peak_flops), guess.memory_bandwidth
        return Base(peak_flops=peaks, bandwidth=bandwidth, compute_units=guess.compute_units, guess=guess)
    products, streams = of(measured, "gemm") + of(measured, "attention"), of(measured, "memory_bound")
    if not products or not streams:
        raise PlannerError(f"no product or no stream was measured: {LARGER}")
    peaks = {}
    for row in sorted(products, key=lambda row: row.point["dtype"]):
        dtype = row.point["dtype"]
        peaks[dtype] = max(peaks.get(dtype) or _nominal_peak(), flop(row.point) / row.median)
    peaks.setdefault("bf16", peaks.get("fp32", max(peaks.values())))
    bandwidth = max(moved_bytes(row.point) / row.median for row in streams)
    return Base(peak_flops=peaks, bandwidth=bandwidth, compute_units=1.0)


def _nominal_peak() -> float:
    """FLOP/s of one core in fp32 from /proc/cpuinfo; 0 where that does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    entries = dict(re.findall(r"^(flags|cpu MHz)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = entries.get("flags", "").split()
    per_cycle = next((each for flag, each in FLOPS_PER_CYCLE.items() if flag in flags), 0.0)
    return per_cycle * float(entries.get("cpu MHz") or 0.0) * units.MEGA


def memory_fractions(
    measured: Sequence[Measured], base: Base, launch: float
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Part of the bandwidth by class; the same with that of plain operations; and how the points scatter.

    bytes / (W (t - launches)), the median over the points of the class, at most 1. Plain operations count their own traffic
    (``definitions.EAGER_TENSORS``), so both are parts of one bandwidth; the profile gets that of the fused kernel, and that
    of plain operations where no fused one was measured (a CPU). A layer in plain torch is compared with the latter. Classes that
    were not measured and have no guess take the element-wise one. Raises PlannerError without that.
    """
    fractions: dict[str, float] = dict(base.guess.memory_fraction) if base.guess else {}
    eager: dict[str, float] = {}
    spread: dict[str, Any] = {}

    def part(row: Measured) -> float:
        seconds = max(row.median - kernels(row.point) * launch, 0.2 * row.median)
        return moved_bytes(row.point) / seconds / base.bandwidth

    for op in MEMORY_OPS:
        rows = of(measured, "memory_bound", op=op)
        plain = of(rows, "memory_bound", kernel=EAGER)
        fused = [row for row in rows if row.point.values.get("kernel") != EAGER]
        for some, name, found in ((plain, f"{op} eager", eager), (fused or plain, op, fractions)):
            if not some:
                continue
            parts = np.array([part(row) for row in some])
            value = float(np.median(parts))
            if value > 1.005:
                base.notes.append(
                    f"memory_fraction {name}: measured {value:.2f} of the bandwidth, out of a cache; 1 is kept"
                )
            found[op] = short(min(value, 1.0), 3)
            spread[f"memory {name}"] = {
                "in_sample": error_of(value / parts, np.ones_like(parts)), "rows": len(some), "fraction": found[op],
            }  # fmt: skip
        if plain and not fused:
            base.notes.append(f"memory_fraction {op}: of plain torch operations; no fused kernel was measured")
    if "elementwise" not in fractions:
        raise PlannerError(f"no element-wise operator was measured: {LARGER}")
    if missing := [op for op in MEMORY_OPS if op not in fractions]:
        base.notes.append(f"memory_fraction of {', '.join(missing)}: not measured, as elementwise")
    fractions = {op: fractions.get(op, fractions["elementwise"]) for op in MEMORY_OPS}
    return fractions, fractions | eager, spread


def machine_keys(measured: Sequence[Measured], base: Base, device: str) -> dict[str, Any]:
    """launch floors, sustained clock, memory facts, host link and host Adam, in the form of the file."""
    keys: dict[str, Any] = {}
    stream, graph = (of(measured, "launch", kind=kind) for kind in ("stream", "graph"))
    if stream:
        keys["launch_floor"] = _micro(stream[0].median)
        keys["graph_launch_floor"] = _micro(min(one.median for one in (*stream, *graph)))
    for row in of(measured, "sustained"):  # the end of a long run over a short burst of the same product, at most 1
        burst = of(measured, "gemm", pass_="forward", **{name: row.point[name] for name in ("m", "n", "k", "dtype")})
        first = burst[0].median if burst else float(row.details["first"])
        keys["sustained_clock"] = min(short(min(first / row.median, 1.0), 3), keys.get("sustained_clock", 1.0))
    for name in ("usable", "context", "workspace", "communicator", "expert_communicator"):
        for fact in of(measured, "bytes", name=name):
            keys[f"{name}_memory"] = f"{fact.median:.0f} B"
    rates: dict[str, float] = {}
    for row in of(measured, "host_copy"):  # of rank 0 alone, and of the slowest while all copy
        way, rate = row.point["direction"], moved_bytes(row.point) / row.median
        rates[way] = min(rate, rates.get(way, rate))
    if rates:
        keys["pcie_bandwidth"] = f"{short(min(rates.values()))} B/s"
        said = ", ".join(f"{way} {rate / units.GIGA:.1f} GB/s" for way, rate in rates.items())
        base.notes.append(f"host link: {said}")
    streams, adam = of(measured, "host_stream"), of(measured, "cpu_adam")
    if streams and adam:
        rate = max(moved_bytes(row.point) / row.median for row in adam)
        host = max(rate, *(row.point["bytes"] / row.median for row in streams))
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
        found.setdefault(row.point.family, []).append({**row.point.values, **entry, **row.details})
    return found


def findings(measured: Sequence[Measured], base: Base, keys: dict[str, Any]) -> Findings:
    """Keys with the points that they come from and their spread."""
    families = sorted({row.point.family for row in measured if row.point.family != "bytes"})
    spread = {family: spread_of(of(measured, family)) for family in families}
    return Findings(keys=keys, spread=spread, notes=base.notes, measurements=points_by_family(measured))


def fit_compute(measured: Sequence[Measured], base: Base, device: str) -> Findings:
    """The compute keys of a profile file from measured points. Raises PlannerError where too little was measured."""
    curves, residuals, further = gemm_curves(measured, base)
    if not curves:
        raise PlannerError(f"no matrix product was measured: {LARGER}")
    if "bf16" not in curves:  # every price of a low precision looks it up
        base.notes.append("gemm bf16: not measured, as fp32")
        curves["bf16"] = next(iter(curves.values()))
    keys = machine_keys(measured, base, device) | further
    entries, attention_residuals, slower = attention_entries(measured, base)
    if not entries:
        raise PlannerError(f"no attention kernel was measured: {LARGER}")
    launches = {row.point["kind"]: row.median for row in of(measured, "launch")}
    launch = launches.get("stream", launches.get("graph", 0.0))  # what the price of an operator adds for each kernel
    keys["gemm"] = {recipe: curve.to_dict() for recipe, curve in curves.items()}
    keys["attention"] = entries + _bf16_attention(entries, base)
    keys["kernels"] = slower or (base.guess.kernels if base.guess else {"same_as_best": ["fa2", "fa3", "cudnn"]})
    keys["memory_fraction"], plain, memory_residuals = memory_fractions(measured, base, launch)
    if device == "cpu":
        base.notes.append("sustained_clock of a CPU core is 1 by definition: processor time was measured")
        keys["sustained_clock"] = 1.0
    profile = _with_curves(base, curves, keys | {"memory_fraction": plain}, launch)
    host = {kind: launches[kind] for kind in HOST_LAYER if kind in launches}
    if device == "cpu" and len(host) == len(HOST_LAYER):  # its host works where its kernels do: the time adds up
        floor = max(host_floor(host, profile), launch)
        profile = replace(profile, launch_floor=floor)
        keys["launch_floor"] = _micro(floor)
        base.notes.append(
            f"launch_floor: host time of a layer by kernel; one kernel alone {launch / units.MICRO:.2g} us"
        )
    found = findings(measured, base, keys)
    found.residuals = residuals | attention_residuals | memory_residuals
    if layers := check(measured, profile):
        found.measurements["layer"] = layers
        off = [abs(row["error_percent"]) for row in layers]
        found.residuals["layers whole, against the sum of their operators"] = {"median": median(off), "rows": len(off)}
    how = "measured" if device == "cuda" else "measured, processor time of one thread"
    found.measured = dict.fromkeys(("gemm", "attention", "memory"), how)
    return found


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
    scaled = {
        name: keys.get(name, getattr(some, name) if base.guess else {})
        for name in ("precise_accumulation", "block_scaling")
    }
    return replace(
        some, peak_flops=base.peak_flops, memory_bandwidth=base.bandwidth, compute_units=base.compute_units, gemm=curves,
        attention=attention, memory_fraction=keys["memory_fraction"], kernels=keys["kernels"],
        launch_floor=launch or some.launch_floor, **scaled,
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
