"""From measured points to the keys of a hardware profile, with residuals and errors at points that were held back.

What was not measured keeps the constants of the profile that stands for the device, and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from planner import units
from planner.curves import AttentionCurve, Column, GemmCurve
from planner.errors import PlannerError
from planner.hardware import MEMORY_OPS, HardwareProfile
from planner.profiler import definitions, fit_attention, fit_gemm
from planner.profiler.definitions import attention_flop, moved_bytes, number, rows_columns_depth, text
from planner.profiler.fitting import error_of, left_out, short
from planner.profiler.points import Measured

FEW, MANY = 12, 60
"""Points of one dtype: below FEW only the rate is fitted, from MANY on a residual grid is tried."""
LEAST_EFFICIENCY = 0.02
LONGEST_LAUNCH = 3e-4
"""A CPU's first touch of a tensor, and its dispatch, are longer than a GPU's launch."""
PRIOR = 0.1
"""An e-fold of a saturation constant away from its usual value counts as much as one point that is 10 percent off: on three sets
of 15 to 60 points on a busy machine the errors at points left out were least with it (0, 0.01, 0.03 and 0.1 tried)."""
RECIPE = {"bf16": "bf16", "fp16": "bf16", "fp32": "fp32", "tf32": "tf32", "fp8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class ComputeFit:
    """What the compute points say."""

    keys: dict[str, Any]
    """Keys of a profile file, those that were measured."""
    residuals: dict[str, Any]
    """[median, p90] percent by curve, for the provenance."""
    spread: dict[str, float]
    """Half the interval of the median over it, percent, by family: the median over its points."""
    measured: dict[str, str]
    """Family of the profile -> how it was measured."""
    measurements: dict[str, Any]
    """The points themselves, by family."""
    notes: tuple[str, ...] = ()
    """What stands in for what was not measured."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the fits stand on: peaks, bandwidth and constants before anything was fitted."""

    peak_flops: dict[str, float]
    """FLOP/s by dtype."""
    bandwidth: float
    """Bytes/s of the memory."""
    compute_units: float
    """Compute units of the device; threads of a CPU."""
    guess: HardwareProfile | None = None
    """The profile whose constants stay where nothing was measured; None = nothing stays (a CPU)."""
    notes: list[str] = field(default_factory=list)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype. Raises PlannerError."""
        key = {"fp16": "bf16"}.get(dtype, dtype) if dtype not in self.peak_flops else dtype
        if key not in self.peak_flops:
            raise PlannerError(f"no peak is known for {dtype}; known: {', '.join(self.peak_flops)}")
        return self.peak_flops[key]


def seconds(rows: Sequence[Measured]) -> Column:
    """Medians as a column."""
    return np.array([row.median for row in rows])


# ---------------------------------------------------------------------------------------------------- GEMM


def gemm_curves(
    measured: Sequence[Measured], base: Base
) -> tuple[dict[str, GemmCurve], dict[str, Any], dict[str, Any]]:
    """Curves by recipe, their residuals, and further keys (precise_accumulation)."""
    curves: dict[str, GemmCurve] = dict(base.guess.gemm) if base.guess else {}
    residuals: dict[str, Any] = {}
    further: dict[str, Any] = {}
    for dtype in sorted({text(row.point, "dtype") for row in measured if row.point.family == "gemm"}):
        rows = [
            row for row in measured
            if row.point.family == "gemm" and row.point["dtype"] == dtype and row.point["pass"] != definitions.ACCUMULATING
        ]  # fmt: skip
        if dtype == "fp16" and "bf16" in residuals:  # the cost model prices fp16 as bf16: say how far that holds
            residuals["gemm fp16 on the bf16 curve"] = error_of(
                _predicted(curves["bf16"], rows, base, "bf16"), seconds(rows)
            )
            continue
        fitted_on = [row for row in rows if row.point["pass"] == "forward"] if dtype == "fp8" else rows
        curve = _gemm_curve(fitted_on or rows, dtype, base)
        if dtype == "fp8" and fitted_on and len(fitted_on) < len(rows):
            rest = [row for row in rows if row.point["pass"] != "forward"]
            ratio = float(np.median(seconds(rest) / _predicted(curve, rest, base, dtype)))
            further["precise_accumulation"] = {"fp8": short(max(ratio, 1.0), 3)}
        curves[RECIPE[dtype]] = curve
        residuals[f"gemm {dtype}"] = curve.errors
    return _grouped(_accumulating(curves, measured, base), measured, base, residuals), residuals, further


def _shape(rows: Sequence[Measured]) -> fit_gemm.Shape:
    m, n, k = (np.array(axis, float) for axis in zip(*[rows_columns_depth(row.point) for row in rows], strict=True))
    return m, n, k


def _predicted(curve: GemmCurve, rows: Sequence[Measured], base: Base, dtype: str) -> Column:
    return curve.time(*_shape(rows), base.peak(dtype), base.bandwidth)


def _gemm_curve(rows: Sequence[Measured], dtype: str, base: Base) -> GemmCurve:
    """Constants, or constants x grid where that is better on points left out; the rate alone from few points."""
    recipe = "fp8_plain" if dtype == "fp8" else RECIPE[dtype]
    waves = bool(base.guess and "bf16" in base.guess.gemm and base.guess.gemm["bf16"].waves is not None)
    device = fit_gemm.Device(
        peak=base.peak(dtype), bandwidth=base.bandwidth, units=base.compute_units, waves=waves and len(rows) >= MANY
    )
    shape, t = _shape(rows), seconds(rows)
    if len(rows) < FEW:
        return _rate_only(rows, recipe, dtype, base)

    def make(keep: Any, nodes: str = "") -> GemmCurve:
        part = tuple(axis[keep] for axis in shape)
        m, n, k = part
        curve = fit_gemm.fit_constants((m, n, k), t[keep], recipe, device, LEAST_EFFICIENCY, LONGEST_LAUNCH, PRIOR)
        if not nodes:
            return curve
        return fit_gemm.bounded(
            replace(curve, grid=fit_gemm.fit_grid(curve, (m, n, k), t[keep], device, nodes)), device
        )

    tried = {}
    for nodes in ("", "x4") if len(rows) >= MANY else ("",):

        def fit(keep: Any, nodes: str = nodes) -> Any:
            curve = make(keep, nodes)
            return lambda out: curve.time(shape[0][out], shape[1][out], shape[2][out], device.peak, device.bandwidth)

        tried[nodes] = left_out(fit, t)
    best = min(tried, key=lambda nodes: tried[nodes][0])
    curve = make(np.ones(len(t), bool), best)
    model = curve.time(*shape, device.peak, device.bandwidth)
    by_pass = {
        name: error_of(model[keep], t[keep])
        for name in definitions.GEMM_PASSES
        if np.any(keep := np.array([row.point["pass"] == name for row in rows]))
    }
    errors = {
        "held_out_percent_median_p90": {"all": tried[best]}, "chosen": f"constants x grid {best}" if best else "constants",
        "in_sample": error_of(model, t), "in_sample_by_pass": by_pass, "rows": len(t),
    }  # fmt: skip
    return replace(curve, errors=errors)


def _rate_only(rows: Sequence[Measured], recipe: str, dtype: str, base: Base) -> GemmCurve:
    """The guess's constants, or a roofline, with the efficiency that puts the median point right."""
    guess = base.guess.gemm.get(RECIPE[dtype]) if base.guess else None
    name, operand, quantise = fit_gemm.OPERAND[recipe]
    start = guess or GemmCurve(
        peak_name=name, operand_bytes=operand, quantise=quantise, efficiency=0.5, m0=0.0, n0=0.0, k0=0.0,
        memory_efficiency=1.0, launch=0.0,
    )  # fmt: skip
    start = replace(start, quantise=quantise, quantise_traffic=0.0) if dtype == "fp8" else start
    efficiency = start.efficiency
    for _ in range(4):  # launch and memory parts do not scale with it
        trial = replace(start, efficiency=efficiency)
        ratio = float(np.median(_predicted(trial, rows, base, dtype) / seconds(rows)))
        efficiency = float(np.clip(efficiency * ratio, 1e-3, 1.0))
    curve = replace(start, efficiency=efficiency)
    errors = {
        "in_sample": error_of(_predicted(curve, rows, base, dtype), seconds(rows)), "rows": len(rows),
        "chosen": "rate alone: too few points for a shape",
    }  # fmt: skip
    return replace(curve, errors=errors)


def _accumulating(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base
) -> dict[str, GemmCurve]:  # fmt: skip
    """The part of the traffic of an fp32 weight gradient that its product does not hide: (t - t_plain) W / (6 n k).

    Where torch has no such kernel (a CPU) it is added by an operation of its own, and the part is 0.
    """
    pairs = _pairs(measured)
    if not pairs:
        return curves if base.guess else {name: replace(curve, accumulate=0.0) for name, curve in curves.items()}
    parts = [
        max(with_sum.median - plain.median, 0.0) * base.bandwidth
        / (6.0 * number(plain.point, "n") * number(plain.point, "k"))
        for plain, with_sum in pairs
    ]  # fmt: skip
    return {name: replace(curve, accumulate=short(median(parts), 3)) for name, curve in curves.items()}


def _pairs(measured: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """wgrad without and with accumulation, of equal shape."""

    def key(row: Measured) -> tuple[Any, ...]:
        return tuple(row.point[name] for name in ("dtype", "m", "n", "k"))

    plain = {key(row): row for row in measured if row.point.family == "gemm" and row.point["pass"] == "wgrad"}
    summed = [row for row in measured if row.point.family == "gemm" and row.point["pass"] == definitions.ACCUMULATING]
    return [(plain[key(row)], row) for row in summed if key(row) in plain]


def _grouped(
    curves: dict[str, GemmCurve], measured: Sequence[Measured], base: Base, residuals: dict[str, Any]
) -> dict[str, GemmCurve]:  # fmt: skip
    """Saturation and rate of grouped products by pass, where three points or more were measured."""
    found = dict(curves)
    for dtype in sorted({text(row.point, "dtype") for row in measured if row.point.family == "grouped_gemm"}):
        if RECIPE[dtype] not in found:
            continue
        curve = found[RECIPE[dtype]]
        m_g, e_g = list(curve.grouped_m0), list(curve.grouped_efficiency)
        for which, pass_ in enumerate(definitions.GEMM_PASSES):
            rows = [
                row for row in measured
                if row.point.family == "grouped_gemm" and row.point["dtype"] == dtype and row.point["pass"] == pass_
            ]  # fmt: skip
            if len(rows) < 3:
                continue
            tokens, n, k, groups = (
                np.array([number(row.point, name) for row in rows]) for name in ("tokens", "n", "k", "groups")
            )
            shape = ((tokens, n, k), (tokens, k, n), (n, k, tokens))[which]

            def time(p: Column, w: int = which, s: Any = shape, t: Column = tokens, g: Column = groups) -> Column:
                trial = replace(found[RECIPE[dtype]], grouped_m0=(p[0],) * 3, grouped_efficiency=(p[1],) * 3, grid=None)  # noqa: B023
                rows_, columns_, depth_ = s
                return trial.grouped_time(t, rows_, columns_, depth_, g, w, base.peak(dtype), base.bandwidth, 1.0)  # noqa: B023

            best = fit_gemm.fit_grouped(time, seconds(rows), (100.0, 0.8), 0.05)
            m_g[which], e_g[which] = short(best[0], 3), short(min(best[1], 1.0), 3)
            residuals[f"grouped {dtype} {pass_}"] = {
                "in_sample": error_of(time(best), seconds(rows)),
                "rows": len(rows),
            }
        found[RECIPE[dtype]] = replace(
            curve, grouped_m0=(m_g[0], m_g[1], m_g[2]), grouped_efficiency=(e_g[0], e_g[1], e_g[2])
        )
    return found


# ---------------------------------------------------------------------------------------------------- attention


def attention_entries(
    measured: Sequence[Measured], base: Base
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Entries of the file, residuals, and the ``kernels`` that are slower than the best."""
    rows = [row for row in measured if row.point.family == "attention"]
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    if base.guess:
        for (kernel, dtype, pass_), curve in base.guess.attention.items():
            entries[kernel, dtype, pass_] = {"kernel": kernel, "dtype": dtype, "pass": pass_, **curve.to_dict()}
    residuals: dict[str, Any] = {}
    best, slowdown = _best_kernel(rows)
    kinds = sorted({(text(row.point, "dtype"), text(row.point, "pass")) for row in best})
    for dtype, pass_ in kinds:
        if dtype == "fp16":
            continue  # priced as bf16
        alike = [row for row in best if row.point["dtype"] == dtype and row.point["pass"] == pass_]
        before = base.guess.attention.get(("best", dtype, pass_)) if base.guess else None
        entry, errors = _attention_entry(alike, dtype, pass_, base, before)
        entries["best", dtype, pass_] = entry
        residuals[f"attention {dtype} {pass_}"] = errors
    return list(entries.values()), residuals, slowdown


def _best_kernel(rows: Sequence[Measured]) -> tuple[list[Measured], dict[str, Any]]:
    """The fastest kernel of every shape, and the median slowdown of flash attention 2 by pass where both were measured."""
    shapes: dict[tuple[Any, ...], list[Measured]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.point.key if name != "kernel")
        shapes.setdefault(key, []).append(row)
    ratios: dict[str, list[float]] = {}
    best = []
    for alike in shapes.values():
        fastest = min(alike, key=lambda row: row.median)
        best.append(fastest)
        for row in alike:
            if row.point["kernel"] == "flash":
                ratios.setdefault(text(row.point, "pass"), []).append(row.median / fastest.median)
    slow = {pass_: short(median(values), 3) for pass_, values in ratios.items()}
    if set(slow) != {"forward", "backward"}:
        return best, {}
    same = max(slow.values()) < 1.02
    return best, {"same_as_best": ["fa2"]} if same else {"slowdown": {"fa2": slow}}


def _attention_entry(
    rows: Sequence[Measured], dtype: str, pass_: str, base: Base, before: AttentionCurve | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants over the head sizes measured; other sizes of the guess keep their relation to the nearest measured one."""
    peak, units_ = base.peak(dtype), base.compute_units
    found: dict[float, Column] = {}
    errors: dict[str, Any] = {}
    low, high = (1e-6, 5e-3, 1.0, 1e-3), (2e-3, 1.0, 8e3, 4.0)
    for size in sorted({_head_size(row) for row in rows}):
        alike = [row for row in rows if _head_size(row) == size]
        inputs = attention_rows(alike)
        if len(alike) >= 8 and len(set(inputs.span.tolist())) >= 3:

            def fit(keep: Any, inputs: fit_attention.Rows = inputs) -> Any:
                constants = fit_attention.fit_all(inputs.take(keep), peak, units_, low, high)
                return lambda out: fit_attention.attention_model(constants, inputs.take(out), peak, units_)

            held_out: list[float] | None = left_out(fit, inputs.seconds)
            found[size] = fit_attention.fit_all(inputs, peak, units_, low, high)
        else:
            held_out = None
            found[size] = fit_attention.refine_rate(inputs, _constants(before, size), peak, units_)
        model = fit_attention.attention_model(found[size], inputs, peak, units_)
        errors[f"{size:g}"] = {"in_sample": error_of(model, inputs.seconds), "rows": len(alike)}
        if held_out:
            errors[f"{size:g}"]["held_out"] = held_out
    own = tuple(found)
    for size in before.head_dims.tolist() if before is not None else ():
        if size not in found:
            nearest = min(own, key=lambda other: abs(other - size))
            gain = found[nearest][1] / _constants(before, nearest)[1]
            found[size] = _constants(before, size) * np.array([1.0, gain, 1.0, 1.0])
            errors[f"{size:g}"] = f"not measured; moves with {nearest:g}"
    sizes = sorted(found)
    columns = np.array([found[size] for size in sizes])
    columns[:, 1] = np.clip(columns[:, 1], 1e-4, 0.98)
    curve = AttentionCurve(
        head_dims=np.array(sizes), launch=columns[:, 0], efficiency=columns[:, 1], s0=columns[:, 2], c=columns[:, 3],
        errors=errors,
    )  # fmt: skip
    return {"kernel": "best", "dtype": dtype, "pass": pass_, **curve.to_dict()}, errors


def _head_size(row: Measured) -> float:
    return 0.5 * (number(row.point, "head_dim") + number(row.point, "value_dim"))


def _constants(curve: AttentionCurve | None, size: float) -> Column:
    if curve is None:
        return np.array(fit_attention.START)
    columns = (curve.launch, curve.efficiency, curve.s0, curve.c)
    return np.array([float(np.interp(size, curve.head_dims, values)) for values in columns])


def attention_rows(rows: Sequence[Measured]) -> fit_attention.Rows:
    """FLOP, mean keys, tiles and seconds."""
    seq, batch, heads = (np.array([number(row.point, name) for row in rows]) for name in ("seq", "batch", "heads"))
    causal = np.array([bool(row.point["causal"]) for row in rows])
    return fit_attention.Rows(
        flop=np.array([attention_flop(row.point) for row in rows]), span=seq * np.where(causal, 0.5, 1.0),
        tiles=batch * heads * np.ceil(seq / 128.0), seconds=seconds(rows),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- memory


def memory_fractions(
    measured: Sequence[Measured], base: Base, launch: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Part of the bandwidth by class: bytes / (W (t - launch)), the median over the points of the class, at most 1."""
    fractions: dict[str, float] = dict(base.guess.memory_fraction) if base.guess else {}
    spread: dict[str, Any] = {}
    for op in MEMORY_OPS:
        rows = [row for row in measured if row.point.family == "memory_bound" and row.point["op"] == op]
        if not rows:
            continue
        parts = np.array(
            [moved_bytes(row.point) / max(row.median - launch, 0.2 * row.median) for row in rows]
        ) / base.bandwidth  # fmt: skip
        value = float(np.median(parts))
        if value > 1.005:
            base.notes.append(f"memory_fraction {op}: measured {value:.2f} of the bandwidth, out of a cache; 1 is kept")
        fractions[op] = short(min(value, 1.0), 3)
        spread[f"memory {op}"] = {"in_sample": error_of(value / parts, np.ones_like(parts)), "rows": len(rows)}
    return fractions, spread


def stand_ins(fractions: dict[str, float], notes: list[str]) -> dict[str, float]:
    """Classes that were not measured and have no guess take the element-wise one. Raises PlannerError without that."""
    if "elementwise" not in fractions:
        raise PlannerError("no element-wise operator was measured: give the profile a larger --budget")
    missing = [op for op in MEMORY_OPS if op not in fractions]
    if missing:
        notes.append(f"memory_fraction of {', '.join(missing)}: not measured, as elementwise")
    return {op: fractions.get(op, fractions["elementwise"]) for op in MEMORY_OPS}


# ---------------------------------------------------------------------------------------------------- all


def figure(measured: Sequence[Measured], family: str, **wanted: object) -> Measured | None:
    """The measured point of a family with some values of its key, or None."""
    for row in measured:
        if row.point.family == family and all(row.point.values.get(key) == value for key, value in wanted.items()):
            return row
    return None


def machine_keys(measured: Sequence[Measured], base: Base, device: str) -> dict[str, Any]:
    """launch floors, sustained clock, memory facts, host link and host Adam, in the form of the file."""
    keys: dict[str, Any] = {}
    stream, graph = (figure(measured, "launch", kind=kind) for kind in ("stream", "graph"))
    if stream:
        keys["launch_floor"] = _micro(stream.median)
        keys["graph_launch_floor"] = _micro(graph.median if graph else stream.median)
    keys |= _sustained(measured)
    for name, key in (
        ("usable", "usable_memory"), ("context", "context_memory"), ("workspace", "workspace_memory"),
        ("communicator", "communicator_memory"), ("expert_communicator", "expert_communicator_memory"),
    ):  # fmt: skip
        fact = figure(measured, "bytes", name=name)
        if fact:
            keys[key] = f"{fact.median:.0f} B"
    copies = [row for row in measured if row.point.family == "host_copy"]
    if copies:
        rates = {text(row.point, "direction"): moved_bytes(row.point) / row.median for row in copies}
        keys["pcie_bandwidth"] = f"{short(min(rates.values()))} B/s"
        base.notes.append(
            "host link: " + ", ".join(f"{way} {rate / units.GIGA:.1f} GB/s" for way, rate in rates.items())
        )
    stream_rows = [row for row in measured if row.point.family == "host_stream"]
    adam = [row for row in measured if row.point.family == "cpu_adam"]
    if stream_rows and adam:
        rate = max(moved_bytes(row.point) / row.median for row in adam)
        host = max(rate, *(number(row.point, "bytes") / row.median for row in stream_rows))
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
    row = next((row for row in measured if row.point.family == "sustained"), None)
    if row is None:
        return {}
    same = {name: row.point[name] for name in ("m", "n", "k", "dtype")}
    burst = figure(measured, "gemm", **same, **{"pass": "forward"})
    first = burst.median if burst else float(dict(row.details)["first"])
    return {"sustained_clock": short(min(first / row.median, 1.0), 3)}


def points_by_family(measured: Sequence[Measured]) -> dict[str, Any]:
    """The points as they are kept in the file: key, microseconds (bytes for facts), interval, repetitions, clock."""
    found: dict[str, Any] = {}
    for row in measured:
        scale = 1.0 if row.point.family == "bytes" else units.MICRO
        unit = "bytes" if row.point.family == "bytes" else "us"
        entry: dict[str, Any] = {
            **row.point.values,
            unit: short(row.median / scale),
            "repetitions": row.repetitions,
            "clock": row.clock,
        }
        if row.high > row.low:
            entry["interval"] = [short(row.low / scale), short(row.high / scale)]
        if row.outliers:
            entry["outliers"] = row.outliers
        found.setdefault(row.point.family, []).append(entry | dict(row.details))
    return found


def spreads(measured: Sequence[Measured]) -> dict[str, float]:
    """Median over the points of a family of half the interval of the median over it, percent."""
    families = sorted({row.point.family for row in measured if row.point.family != "bytes"})
    return {
        family: short(100.0 * median(row.spread for row in measured if row.point.family == family), 3)
        for family in families
    }
