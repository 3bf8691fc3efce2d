"""The compute half of a profile: which points, how one is measured, and the keys of the profile that they give.

    points = compute_points(models, hardware_guess="h100-sxm", device="cuda")
    measured = [measure_compute(point, "cuda", budget_s=0.5) for point in points]
    fit = fit_compute(measured, base_of("cuda", measured, load_hardware("h100-sxm")), "cuda")

Points come in the order in which they should be measured: what every profile needs first, then by share of the predicted
step time. Stop anywhere: what is missing keeps the constants of the guess and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from planner import library, units
from planner.curves import AttentionCurve, GemmCurve
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.profile.definitions import flop, moved_bytes, text
from planner.lab.profile.extra_points import SUSTAINED_SECONDS, chain_points, facts, layer_points, machine, spanning
from planner.lab.profile.fit_base import Base
from planner.lab.profile.fit_compute import (
    ComputeFit,
    attention_entries,
    machine_keys,
    memory_fractions,
    points_by_family,
    spreads,
    stand_ins,
)
from planner.lab.profile.fit_products import gemm_curves
from planner.lab.profile.fitting import short
from planner.lab.profile.layer_check import HOST_LAYER, check, host_floor
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.shapes import Wanted, affordable, weighed, with_kernels

MODELS = {"cuda": ("llama-8b", "llama-70b", "qwen3-30b-a3b"), "cpu": ("gpt3-125m",)}
"""Models of a profile when none is named: heads of 128 with grouped queries, sizes from 4k to 8k, and experts; on a CPU what
it can run."""
GPUS = {"cuda": (8, 64), "cpu": (1, 8)}
"""Sizes of job whose best layouts count."""
CPU_SEQUENCE = 512
CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST, CPU_LONGEST_LAYER = 50e9, 8e9, 0.06, 0.6
"""FLOP/s and bytes/s of a slow core, and the longest run of an operator and of a layer there in seconds."""
CPU_TRAFFIC = 16.0 * units.MIB
"""Bytes of a memory-bound point on a CPU: about what one operator of a layer moves there."""
FLOPS_PER_CYCLE = {"avx512f": 64.0, "fma": 32.0, "avx": 16.0}
"""fp32 FLOP per cycle and core of an x86 with two vector units of the kind; one with a single unit reaches half."""


def compute_points(
    models: Sequence[str], hardware_guess: str, device: str, *, sequence_length: int | None = None,
    precision: str | None = None,
) -> list[Point]:  # fmt: skip
    """What to measure, in this order. Raises PlannerError where nothing of the models can be measured on the device."""
    _check_device(device)
    named = tuple(models) or MODELS[device]
    dtype = "fp32" if device == "cpu" else None
    length = sequence_length or (CPU_SEQUENCE if device == "cpu" else None)
    wanted = Wanted(
        models=named, gpus=GPUS[device], sequence_length=length, precision=precision,
        largest_traffic=CPU_TRAFFIC if device == "cpu" else units.GIB,
    )  # fmt: skip
    shapes = with_kernels(weighed(wanted, hardware_guess, dtype), device)
    if device == "cpu":
        shapes = affordable(shapes, CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST)
        if not any(point.family == "gemm" for point in shapes):
            raise PlannerError(
                f"no layer of {', '.join(named)} at {length} tokens runs in {CPU_LONGEST:g} s on one core; "
                "profile a smaller model here, such as gpt3-125m, or shorter sequences"
            )
    layers = [point for name in named for point in layer_points(name, device, length)]
    if device == "cpu":
        layers = affordable(layers, CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST_LAYER)
    first, last = facts(device), spanning(device)
    anchors, rest = _anchors(shapes)
    chains = [point for name in named for point in chain_points(name, length)] if device == "cpu" else []
    half = max(1, len(rest) // 4)  # layers and clocks after the shapes that most of the time is in
    classes = [point for point in last if point.family == "memory_bound"]
    ordered = [*first, *anchors, *chains, *classes, *rest[:half], *layers, *machine(device), *rest[half:], *last]
    unique: dict[object, Point] = {}
    for point in ordered:
        unique.setdefault(point.identity, point)
    return list(unique.values())


def _check_device(device: str) -> None:
    if device not in MODELS:
        raise PlannerError(f"unknown device '{device}'; known: {', '.join(MODELS)}")


def _anchors(shapes: list[Point]) -> tuple[list[Point], list[Point]]:
    """The weightiest point of every kind of operator and pass, so that any budget gives a whole profile; and the rest."""
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in shapes:
        kind = (point.family, *(point.values.get(name) for name in ("pass", "dtype", "op", "head_dim", "kernel")))
        kinds.setdefault(kind, point)
    chosen = {point.identity for point in kinds.values()}
    return list(kinds.values()), [point for point in shapes if point.identity not in chosen]


# ---------------------------------------------------------------------------------------------------- measuring


def measure_compute(point: Point, device: str, budget_s: float) -> Measured:
    """Measure one point of ``compute_points``. Raises PlannerError where the device cannot run it, with the reason.

    GPU: device events. CPU: processor time of one thread, because its cores may be shared with others.
    """
    _check_device(device)
    import torch

    from planner.lab.profile import machine as one_device
    from planner.lab.profile import operator_runs as operators
    from planner.lab.profile import streams, tensors, whole_layer
    from planner.lab.profile.timing import measure

    threads = torch.get_num_threads()
    alone = {
        "launch": one_device.launch, "host_copy": one_device.host_copy, "cpu_adam": one_device.cpu_adam,
        "warm_up": one_device.warm_up,
        "host_stream": one_device.host_stream, "sustained": one_device.sustained, "bytes": one_device.memory_fact,
        "yardstick": one_device.yardstick_fact,
    }  # fmt: skip
    try:
        if device == "cpu":
            torch.set_num_threads(1)
            tensors.keep_memory()
        if point.family in alone:
            budget_s = max(budget_s, SUSTAINED_SECONDS[device]) if point.family == "sustained" else budget_s
            return alone[point.family](point, device, budget_s)
        makers = {"layer": whole_layer.layer, "chain": streams.chain}
        make = makers.get(point.family, operators.operator)
        run = make(point, device)
        details = (
            {"kernel_of_groups": operators.grouped_kernel(point, device)} if point.family == "grouped_gemm" else {}
        )
        by = one_device.yardstick_of(point) if device == "cpu" else None
        clock = one_device.clock_of(device)
        return measure(run, device=device, clock=clock, budget_s=budget_s, yardstick=by).measured(point, **details)
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
        TypeError,
        KeyError,
    ) as error:  # torch: no kernel, no memory
        if device == "cuda":
            torch.cuda.empty_cache()
        reason = str(error).strip() or type(error).__name__
        raise PlannerError(f"{point.label}: {reason.splitlines()[0][:200]}") from error
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------- fitting


def base_of(device: str, measured: Sequence[Measured], guess: HardwareProfile | None) -> Base:
    """What the fits stand on. A GPU: its profile in the library, or the nearest relative. A CPU: its own figures.

    CPU: the peak is cycles times the FLOP of two vector units, or the fastest measured product where that is not known or
    lower (a boosted clock); the bandwidth is the fastest measured stream, caches included.
    """
    _check_device(device)
    if device == "cuda":
        if guess is None:
            raise PlannerError("a GPU profile needs the library profile that is nearest to the device: give --hardware")
        return Base(
            peak_flops=dict(guess.peak_flops), bandwidth=guess.memory_bandwidth, compute_units=guess.compute_units,
            guess=guess,
        )  # fmt: skip
    products = [row for row in measured if row.point.family in ("gemm", "attention")]
    streams = [row for row in measured if row.point.family == "memory_bound"]
    if not products or not streams:
        raise PlannerError("no product or no stream was measured: give the profile a larger --budget")
    peaks = {}
    for dtype in sorted({text(row.point, "dtype") for row in products}):
        rows = [row for row in products if row.point["dtype"] == dtype]
        fastest = float(max(flop(row.point) / row.median for row in rows))
        peaks[dtype] = max(_nominal_peak(), fastest)
    peaks.setdefault("bf16", peaks.get("fp32", max(peaks.values())))
    bandwidth = float(max(moved_bytes(row.point) / row.median for row in streams))
    return Base(peak_flops=peaks, bandwidth=bandwidth, compute_units=1.0)


def _nominal_peak() -> float:
    """FLOP/s of one core in fp32 from /proc/cpuinfo; 0 where that does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    entries = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(entries.get("flags", "").split())
    per_cycle = next((each for flag, each in FLOPS_PER_CYCLE.items() if flag in flags), 0.0)
    try:
        return per_cycle * float(entries.get("cpu MHz", "0")) * units.MEGA
    except ValueError:
        return 0.0


def fit_compute(measured: Sequence[Measured], base: Base, device: str) -> ComputeFit:
    """The compute keys of a profile file from measured points. Raises PlannerError where too little was measured."""
    curves, residuals, further = gemm_curves(measured, base)
    if not curves:
        raise PlannerError("no matrix product was measured: give the profile a larger --budget")
    if "bf16" not in curves:  # every price of a low precision looks it up
        base.notes.append("gemm bf16: not measured, as fp32")
        curves["bf16"] = next(iter(curves.values()))
    keys = machine_keys(measured, base, device) | further
    entries, attention_residuals, kernels = attention_entries(measured, base)
    if not entries:
        raise PlannerError("no attention kernel was measured: give the profile a larger --budget")
    entries += _bf16_attention(entries, base)
    launches = {text(row.point, "kind"): row.median for row in measured if row.point.family == "launch"}
    launch = min((launches[kind] for kind in ("stream", "graph") if kind in launches), default=0.0)
    fractions, plain, memory_residuals = memory_fractions(measured, base, launch)
    keys["gemm"] = {recipe: curve.to_dict() for recipe, curve in curves.items()}
    keys["attention"] = entries
    keys["kernels"] = kernels or (base.guess.kernels if base.guess else {"same_as_best": ["fa2", "fa3", "cudnn"]})
    keys["memory_fraction"] = stand_ins(fractions, base.notes)
    if device == "cpu":
        base.notes.append("sustained_clock of a CPU core is 1 by definition: processor time was measured")
        keys["sustained_clock"] = 1.0
    profile = _with_curves(base, curves, entries, keys | {"memory_fraction": stand_ins(plain, [])}, launch)
    host = {kind: launches[kind] for kind in HOST_LAYER if kind in launches}
    if device == "cpu" and len(host) == len(HOST_LAYER):  # its host works where its kernels do: the time adds up
        floor = max(host_floor(host, profile), launch)
        profile = replace(profile, launch_floor=floor)
        keys["launch_floor"] = f"{short(floor / units.MICRO)} us"
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
        measured={family: how for family in ("gemm", "attention", "memory")}, notes=tuple(base.notes),
        measurements=measurements,
    )  # fmt: skip


def _with_curves(
    base: Base, curves: dict[str, GemmCurve], entries: list[dict[str, Any]], keys: dict[str, Any], launch: float,
) -> HardwareProfile:  # fmt: skip
    """A profile that prices operators as the file will; links and sizes play no part and are some library profile's."""
    some = base.guess or load_hardware(library.names("hardware")[0])
    attention = {
        (one["kernel"], one["dtype"], one["pass"]): AttentionCurve.from_dict(one, "attention") for one in entries
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
