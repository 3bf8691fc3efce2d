"""From measured points to the keys of a hardware profile, with residuals and errors at points that were held back.

What was not measured keeps the constants of the profile that stands for the device, and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from planner import units
from planner.curves import AttentionCurve, Column
from planner.errors import PlannerError
from planner.hardware import MEMORY_OPS
from planner.lab.profile import definitions, fit_attention
from planner.lab.profile.definitions import attention_flop, moved_bytes, number, text
from planner.lab.profile.fit_base import Base, seconds
from planner.lab.profile.fitting import error_of, left_out, short
from planner.lab.profile.points import Measured


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
    span = np.array([definitions.keys(row.point) for row in rows])
    seq, batch, heads = (np.array([number(row.point, name) for row in rows]) for name in ("seq", "batch", "heads"))
    causal = np.array([bool(row.point["causal"]) for row in rows])
    return fit_attention.Rows(
        flop=np.array([attention_flop(row.point) for row in rows]), span=span * np.where(causal, 0.5, 1.0),
        tiles=batch * heads * np.ceil(seq / 128.0), seconds=seconds(rows),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- memory


def memory_fractions(
    measured: Sequence[Measured], base: Base, launch: float
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Part of the bandwidth by class, of single kernels and of chains of plain operations; and how the points scatter.

    bytes / (W (t - launches)), the median over the points of the class, at most 1. A chain counts its own traffic
    (``definitions.EAGER_TENSORS``), so both are parts of one bandwidth; the profile gets that of the fused kernel, and that
    of the chain where no fused one was measured (a CPU). The chain's is what a layer in plain torch is held against.
    """
    fractions: dict[str, float] = dict(base.guess.memory_fraction) if base.guess else {}
    chains: dict[str, float] = {}
    spread: dict[str, Any] = {}
    for op in MEMORY_OPS:
        rows = [row for row in measured if row.point.family == "memory_bound" and row.point["op"] == op]
        chain = [row for row in rows if row.point.values.get("kernel") == definitions.EAGER]
        fused = [row for row in rows if row.point.values.get("kernel") != definitions.EAGER]
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
    seconds = max(row.median - definitions.kernels(row.point) * launch, 0.2 * row.median)
    return moved_bytes(row.point) / seconds / base.bandwidth


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
