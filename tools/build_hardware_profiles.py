"""Thin and fit raw measurement tables into ``profiles/hardware/*.yaml``.

\b
    python tools/build_hardware_profiles.py DIRECTORY [name ...]

DIRECTORY holds gemm.csv, attention.csv, membound.csv, moe_gemm.csv, collectives.csv, specs.yaml and sources.yaml: public
measurements, one row each, with a source code. The planner itself never needs them. Every fit is made on a random half
(seed 0) and scored on the other half, the errors are written with the constants, then it is repeated on all rows.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import flash_attention_2

from planner.curves import COLLECTIVES, Column, GemmCurve, bus_factor
from planner.lab.profile.fit_attention import REFINED, Rows, attention_model, fit_all, refine_rate
from planner.lab.profile.fit_gemm import OPERAND, Device, fit_gemm, fit_grouped
from planner.lab.profile.fitting import error_of, short
from planner.schema import read

GB = 1e9
SIZES = 2.0 ** np.arange(9, 35)  # 512 B to 16 GiB, one per octave
RANDOM = np.random.default_rng(0)


def table(directory: Path, name: str) -> list[dict[str, str]]:
    """Rows of a csv file."""
    with open(directory / name, encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def floats(rows: list[dict[str, str]], *keys: str) -> list[Column]:
    """Columns of the rows as float64."""
    return [np.array([float(row[key]) for row in rows]) for key in keys]


# ---------------------------------------------------------------------------------------------------- GEMM


def fit_table(
    rows: list[dict[str, str]], recipe: str, peak: float, memory: float, units: float, ampere: bool
) -> GemmCurve:
    """``fit_gemm`` of the rows that are no slivers, scored on a random half; with the wave factor on Ampere."""
    m, n, k, us = floats(rows, "m", "n", "k", "time_us")
    keep = (m >= 128) & (n >= 256) & (k >= 256)
    m, n, k, t = m[keep], n[keep], k[keep], us[keep] * 1e-6
    device = Device(peak=peak, bandwidth=memory, units=units, waves=ampere)
    curve = fit_gemm(np.array((m, n, k)), t, recipe, device, RANDOM.random(len(t)) < 0.5)
    print("   ", recipe, len(t), curve.errors)
    return curve


def at_library_rate(
    curve: GemmCurve, plain: GemmCurve, shapes: list[tuple[int, int, int]], seconds: float, clock: float, peak: float,
    memory: float,
) -> GemmCurve:  # fmt: skip
    """The curve without its grid, at the rate where ``shapes`` take ``seconds`` together; grouped products stay as they are."""
    constants = replace(curve, grid=None)
    alone = constants.without_quantisation(plain)
    m, n, k = (np.array(axis, float) for axis in zip(*shapes, strict=True))
    launches = alone.launch * len(shapes)
    ratio = float((alone.time(m, n, k, peak, memory) - alone.launch).sum() / (seconds * clock - launches))
    grouped = triple(value / ratio for value in curve.grouped_efficiency)
    return replace(
        constants, efficiency=curve.efficiency * ratio, grouped_efficiency=grouped,
        errors={"rate": "cuBLAS", "ratio_to_table": short(ratio, 3), "table": curve.errors},  # of the table's curve
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- attention

DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
FLASH_ATTENTION_2 = ("H100-SXM", "H200-SXM")  # same compute; on other generations it is the best kernel, or absent
HEAD_DIMS = (64, 128, 160, 256)  # 160 stands for MLA: 192 for keys, 128 for values
# Rows of kernels that training uses; where a device has none, a device of the same compute stands in.
TRAINING_KERNELS = {
    "H100-SXM": ("H100-SXM", "H200-SXM"), "H200-SXM": ("H200-SXM",), "A100-SXM-80GB": ("A100-PCIe-80GB",),
    "B200-SXM": ("B200-SXM", "GB200-NVL72"), "B300-SXM": ("GB300-NVL72",), "GB200-NVL72": ("GB200-NVL72",),
    "GB300-NVL72": ("GB300-NVL72",), "L40S": ("RTX-4090",), "RTX-PRO-6000": ("RTX-4090",),
}  # fmt: skip


def attention_rows(rows: list[dict[str, str]]) -> Rows:
    """FLOP (FlashAttention convention: causal halved, backward 2.5 x), mean keys, tiles and seconds of the rows."""
    batch, heads, d, d_v, s, causal, us = floats(
        rows, "batch", "heads", "head_dim", "head_dim_v", "seq", "causal", "time_us"
    )
    backward = np.array([2.5 if row["pass"] == "bwd" else 1.0 for row in rows])
    flop = 2.0 * batch * heads * s * s * (d + d_v) * np.where(causal > 0, 0.5, 1.0) * backward
    return Rows(
        flop=flop, span=s * np.where(causal > 0, 0.5, 1.0), tiles=batch * heads * np.ceil(s / 128.0), seconds=us * 1e-6
    )


def fit_attention_base(table_rows: list[dict[str, str]], peak: float, units: float) -> tuple[Column, list[float]]:
    """(t0, e, s0, c) of one head size from a large table, with held-out errors."""
    rows = attention_rows(table_rows)
    half = RANDOM.random(len(rows.seconds)) < 0.5
    outside = rows.take(~half)
    error = error_of(attention_model(fit_all(rows.take(half), peak, units), outside, peak, units), outside.seconds)
    return fit_all(rows, peak, units), error


def fit_attention_anchor(
    table_rows: list[dict[str, str]], base: Column, peak: float, units: float
) -> tuple[Column, list[float]]:
    """Constants from the few rows of a training kernel; what they cannot show stays that of the large table."""
    rows = attention_rows(table_rows)
    many = len(rows.seconds) >= 10 and len({row["heads"] for row in table_rows}) >= 4
    found = fit_all(rows, peak, units, REFINED, base) if many else refine_rate(rows, base, peak, units)
    return found, error_of(attention_model(found, rows, peak, units), rows.seconds)


def build_attention(
    rows: list[dict[str, str]], gpu: str, specs: dict[str, Any], dtypes: list[str]
) -> list[dict[str, Any]]:
    """Entries of the profile: forward and backward per dtype, over the head sizes."""
    entries: list[dict[str, Any]] = []

    def select(device: str, dtype: str, pass_: str, d: int, impl: tuple[str, ...]) -> list[dict[str, str]]:
        return [
            r for r in rows
            if r["gpu"] == device and r["impl"] in impl and r["pass"] == pass_ and r["window"] == "0"
            and r["dtype"] in (DTYPES[dtype], "float16" if device == "RTX-4090" else "")
            and r["deterministic"] == ("1" if d == 160 and device == "H200-SXM" else "0")
            and (r["head_dim"], r["head_dim_v"]) == (("192", "128") if d == 160 else (str(d), str(d)))
        ]  # fmt: skip

    def of(device: str, key: str) -> float:
        return float(specs[device][key] if key != "peak" else specs[device]["peak_dense_tflops"][dtype] * 1e12)

    for dtype in dtypes:
        training = ("cudnn", "te-cudnn/fa", "fa2")
        peak, units = of(gpu, "peak"), of(gpu, "compute_units")
        base: dict[int, Column] = {}
        base_error: dict[int, list[float]] = {}
        for d in (64, 128, 256):
            table_rows = select(gpu, dtype, "fwd", d, ("trtllm-gen/fmha", "fa2"))
            if len(table_rows) > 60:
                base[d], base_error[d] = fit_attention_base(table_rows, peak, units)
        fa3 = select(gpu, dtype, "fwd", 128, ("fa3",))
        for pass_, name in (("fwd", "forward"), ("bwd", "backward")):
            found: dict[int, Column] = {}
            errors: dict[str, Any] = {}
            for d in HEAD_DIMS:
                for device in TRAINING_KERNELS[gpu]:
                    anchor = (
                        select(device, dtype, pass_, d, training)
                        if device != "A100-PCIe-80GB" or pass_ == "bwd"
                        else []
                    )
                    if not anchor or (device == "RTX-4090" and pass_ == "fwd"):
                        continue
                    if device == "RTX-4090":  # only its backward-to-forward rate carries over
                        forward = select(device, dtype, "fwd", d, training)
                        slow = np.median(floats(anchor, "tflops")[0]) / np.median(floats(forward, "tflops")[0])
                        found[d] = base[d] * np.array([1.0, float(slow), 1.0, 1.0])
                        errors[f"{d} (forward x {slow:.2f}, the ratio of RTX-4090)"] = "not measured here"
                    elif len(anchor) >= 3:
                        start = base.get(d, base.get(128))
                        assert start is not None
                        fitted, error = fit_attention_anchor(
                            anchor, start, of(device, "peak"), of(device, "compute_units")
                        )
                        if device != gpu and gpu in ("B300-SXM",):  # same kernels, other clock: ratio of the big tables
                            fitted[1] *= base_ratio(rows, gpu, device, dtype, 128 if d == 160 else d)
                        found[d] = fitted
                        errors[f"{d} ({len(anchor)} rows of {device}, in sample)"] = error
                    else:
                        continue
                    break
            if pass_ == "fwd" and 128 not in found:
                found[128], errors["128 (held out)"] = base[128], base_error[128]
            if 128 not in found:
                continue
            anchor_128, base_128 = found[128], base[128]
            for d in base:
                if d not in found:
                    gain = anchor_128[1] / base_128[1]
                    found[d] = np.array([base[d][0], base[d][1] * gain, max(base[d][2], 0.0), base[d][3]])
                    if pass_ == "bwd":
                        found[d][2] = anchor_128[2]
                    label = f"{d} (forward table x {gain:.2f}, the ratio at 128)"
                    errors[label] = base_error[d] if pass_ == "fwd" else "not measured here"
            entries.append(attention_entry("best", dtype, name, found, errors))
        if fa3 and dtype == "bf16":
            constants, error = fit_attention_base(fa3, peak, units)
            found = {d: base[d] * np.array([1.0, constants[1] / base[128][1], 1.0, 1.0]) for d in base} | {
                128: constants
            }
            entries.append(attention_entry("fa3", dtype, "forward", found, {"128 (fa3 rows, held out)": error}))
        if gpu in FLASH_ATTENTION_2 and dtype == "bf16":
            for name, (constants_by_size, fa2_errors) in flash_attention_2.fits(base, peak, units).items():
                entries.append(attention_entry("fa2", dtype, name, constants_by_size, fa2_errors))
    return entries


def attention_entry(
    kernel: str, dtype: str, pass_: str, found: dict[int, Column], errors: dict[str, Any]
) -> dict[str, Any]:
    """One entry of the file."""
    dims = sorted(found)
    columns = np.array([found[d] for d in dims])
    columns[:, 1] = np.minimum(columns[:, 1], 0.98)
    return {
        "kernel": kernel, "dtype": dtype, "pass": pass_, "head_dims": dims,
        "launch_us": [short(x * 1e6, 3) for x in columns[:, 0]], "efficiency": [short(x, 3) for x in columns[:, 1]],
        "s0": [short(x, 3) for x in columns[:, 2]], "c": [short(x, 3) for x in columns[:, 3]], "errors": errors,
    }  # fmt: skip


def base_ratio(rows: list[dict[str, str]], gpu: str, device: str, dtype: str, d: int) -> float:
    """Median rate of one device over another in the same kernel and shapes, over the ratio of their peaks (equal here)."""

    def rates(name: str) -> dict[tuple[str, ...], float]:
        keys = ("pass", "dtype", "batch", "heads", "kv_heads", "head_dim", "head_dim_v", "seq", "causal", "window")
        return {
            tuple(r[k] for k in keys): float(r["tflops"]) for r in rows
            if r["gpu"] == name and r["impl"] == "trtllm-gen/fmha" and r["dtype"] == DTYPES[dtype] and int(r["head_dim"]) == d
        }  # fmt: skip

    ours, theirs = rates(gpu), rates(device)
    return float(np.median([ours[key] / theirs[key] for key in ours if key in theirs]))


def triple(values: Iterable[float]) -> tuple[float, float, float]:
    """Forward, dgrad, wgrad, rounded."""
    forward, dgrad, wgrad = (short(value, 3) for value in values)
    return forward, dgrad, wgrad


# ---------------------------------------------------------------------------------------------------- grouped GEMM


def fit_grouped_backward(rows: list[dict[str, str]], curve: GemmCurve, peak: float, memory: float) -> dict[str, Any]:
    """(m_g, e_g) of forward, dgrad and wgrad on B200, from grouped rows whose source runs at its own sustained clock.

    The rate is taken relative to the same source's largest grouped forward rows, so that the burst or sustained level
    of the source drops out.
    """
    names = {"grouped-fwd": 0, "grouped-bwd_grad_act": 1, "grouped-bwd_grad_w": 2}
    rows = [r for r in rows if r["source"] == "simumax" and r["layout"] in names]
    level = max(float(r["tflops"]) for r in rows) * 1e12 / (peak * curve.efficiency)
    result: dict[str, Any] = {"m": [], "e": [], "errors": {}}
    for layout, which in names.items():
        m, n, k, groups, us = floats([r for r in rows if r["layout"] == layout], "m", "n", "k", "groups", "time_us")
        shape = ((m, n, k), (m, k, n), (n, k, m))[which]

        def time(p: Column, w: int = which, s: Any = shape, m: Column = m, g: Column = groups) -> Column:
            trial = replace(curve, grouped_m0=(p[0],) * 3, grouped_efficiency=(min(p[1], 1.0),) * 3, grid=None)
            rows_, columns_, depth_ = s
            return trial.grouped_time(m, rows_, columns_, depth_, g, w, peak * level, memory)

        m_g, e_g = fit_grouped(time, us * 1e-6, (150.0, 0.9), 0.3)
        result["m"].append(short(m_g, 3))
        result["e"].append(short(min(e_g, 1.0), 3))
        result["errors"][layout] = error_of(time(np.array([m_g, e_g])), us * 1e-6)
    return result


def fit_grouped_forward(
    rows: list[dict[str, str]], gpu: str, curve: GemmCurve, peak: float, memory: float
) -> dict[str, Any]:
    """(m_g, e_g) of the forward from fused expert FFNs (gate and up in one GEMM, activation, down), balanced router."""
    dtype = {"bf16": "bfloat16"}.get("bf16" if not curve.quantise else "fp8_block", "fp8_block")
    rows = [r for r in rows if r["gpu"] == gpu and r["dtype"] == dtype and r["distribution"] == "balanced"]
    tokens, h, f, top_k, experts, ep, us = floats(rows, "tokens", "hidden", "ffn", "topk", "experts", "ep", "time_us")
    local = experts / ep
    per_expert = tokens * top_k / experts
    keep = (per_expert >= 64) & (local >= 1)
    per_expert, h, f, local, t = per_expert[keep], h[keep], f[keep], local[keep], us[keep] * 1e-6

    def time(p: Column) -> Column:
        trial = replace(curve, grouped_m0=(p[0],) * 3, grouped_efficiency=(min(p[1], 1.0),) * 3, grid=None)
        up = trial.grouped_time(per_expert, per_expert, 2.0 * f, h, local, 0, peak, memory)
        down = trial.grouped_time(per_expert, per_expert, h, f, local, 0, peak, memory)
        rows_in = per_expert * local
        return up + down + rows_in * (6.0 * f + 4.0 * h) / (0.7 * memory)  # activation, gather and weighted sum

    half = RANDOM.random(len(t)) < 0.5

    def fit(chosen: Any) -> Column:
        return fit_grouped(lambda p: time(p)[chosen], t[chosen], (100.0, 0.8), 0.2)

    error = error_of(time(fit(half))[~half], t[~half])
    m_g, e_g = fit(np.ones(len(t), bool))
    return {"m": short(m_g, 3), "e": short(min(e_g, 1.0), 3), "error": error, "rows": len(t)}


# ---------------------------------------------------------------------------------------------------- collectives

OP_NAMES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
            "alltoall": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
UNWANTED = ("int8", "NVLS off", "torch.distributed", "UNTRUSTED", "pessimistic", "documentation")


def inside_points(rows: list[dict[str, str]], gpu: str) -> dict[str, dict[int, dict[float, float]]]:
    """Microseconds by op, group size and bytes inside one domain; the first source listed wins, later ones fill gaps."""
    points: dict[str, dict[int, dict[float, float]]] = {}
    order = {"aic-nccl": 0, "report-b200-ndr": 1, "dgxc-readme": 1, "report-mi300x": 1}
    for row in sorted(rows, key=lambda r: order.get(r["source"], 2)):
        inside = row["nodes"] == "1" or "one NVL72 rack" in row["nic"]
        if row["gpu"] != gpu or not inside or any(word in row["note"] for word in UNWANTED):
            continue
        group = 2 if row["op"] == "sendrecv" else int(row["world"])
        target = points.setdefault(OP_NAMES[row["op"]], {}).setdefault(group, {})
        target.setdefault(float(row["bytes"]), float(row["time_us"]))
    return points


def resample(points: dict[float, float]) -> list[float]:
    """One time per octave from 512 B to 16 GiB: log-log inside, latency below, the last bus bandwidth above."""
    size = np.array(sorted(points))
    # Noise adds time: a point above one of a larger size is a disturbed one, so the lower envelope from the right.
    time = np.minimum.accumulate(np.array([points[s] for s in size])[::-1])[::-1]
    inside = np.exp(np.interp(np.log(SIZES), np.log(size), np.log(time)))
    return [short(x, 4) for x in inside * np.maximum(SIZES / size[-1], 1.0)]


def build_scale_up(rows: list[dict[str, str]], gpu: str) -> tuple[dict[str, Any], list[str], float]:
    """Curves of the six collectives, remarks on what was derived, and the error of keeping one size per octave."""
    points, remarks = inside_points(rows, gpu), []
    curves: dict[str, dict[int, list[float]]] = {}
    for op, groups in points.items():
        full = {n: p for n, p in groups.items() if len(p) >= 10}
        curves[op] = {n: resample(p) for n, p in sorted(full.items())}
        for n, p in sorted(groups.items()):  # large groups or sizes measured at a few sizes only
            if n in full or not full:
                continue
            nearest = min(full, key=lambda other: abs(math.log(other / n)))
            base = np.array(curves[op][nearest])
            latency = base[0] * (math.log2(n) / math.log2(nearest) if op == "all_reduce" else n / nearest)
            volume = (base - base[0]) * float(bus_factor(op, n) / bus_factor(op, nearest))
            sizes = np.array(sorted(p))
            ratio = np.array([p[s] for s in sizes]) / np.interp(sizes, SIZES, latency + volume)
            row = latency + volume * np.exp(np.interp(np.log(SIZES), np.log(sizes), np.log(ratio)))
            curves[op][n] = [short(x, 4) for x in np.maximum.accumulate(row)]
            remarks.append(
                f"{op} of {n}: shape of {nearest} GPUs, scaled to {len(p)} measured sizes from {sizes[0] / 2**20:.0f} MiB"
            )
        curves[op] = dict(sorted(curves[op].items()))
    if "reduce_scatter" not in curves and "all_gather" in curves:
        curves["reduce_scatter"] = curves["all_gather"]
        remarks.append("reduce_scatter: as all_gather")
    if "all_gather" not in curves:  # AMD: all_reduce = reduce_scatter + all_gather, each of half the time
        half = {n: [short(x / 2, 4) for x in row] for n, row in curves["all_reduce"].items()}
        curves |= {op: half for op in ("all_gather", "reduce_scatter") if op not in curves}
        curves.setdefault("all_to_all", half)
        remarks.append("all_gather, reduce_scatter, all_to_all: half of all_reduce (its two phases); not measured")
    curves["broadcast"] = {n: [short(x * n / (n - 1), 4) for x in row] for n, row in curves["all_gather"].items()}
    remarks.append("broadcast: all_gather x n/(n-1), the pipelined ring moves S instead of (n-1)/n S; not measured")
    if "send_recv" not in curves:
        first = min(curves["all_gather"])
        moved = np.array(curves["all_gather"][first]) * 1.0
        share = (first - 1) / first  # all_gather of S moves S (n-1)/n over the link; a send of that much
        curves["send_recv"] = {
            2: [short(x, 4) for x in np.exp(np.interp(np.log(SIZES / share), np.log(SIZES), np.log(moved)))]
        }
        curves["send_recv"][2][-1] = short(curves["send_recv"][2][-2] * 2, 4)
        remarks.append("send_recv: the all_gather of two that moves as many bytes; not measured")
    entry = {op: {"first_size": "512 B", "us": curves[op]} for op in COLLECTIVES}
    return entry, remarks, octave_error(points)


def octave_error(points: dict[str, dict[int, dict[float, float]]]) -> float:
    """Median percent error of log-log interpolation at every other measured size (half the density of the file)."""
    errors: list[float] = []
    for groups in points.values():
        for p in groups.values():
            size = np.array(sorted(p))
            if len(size) < 10:
                continue
            time = np.array([p[s] for s in size])
            guess = np.exp(np.interp(np.log(size[1:-1:2]), np.log(size[::2]), np.log(time[::2])))
            errors += (100 * np.abs(guess / time[1:-1:2] - 1)).tolist()
    return round(float(np.median(errors)), 1) if errors else math.nan


def fit_network(size: Column, us: Column, n: int, ranks: int, op: str, line: float) -> tuple[Column, list[float]]:
    """(e1, a1, e2, a2) of t = min(a1 + x/e1, a2 + x/e2) on one measured sweep, best of nine starts, and its error."""
    moved = (
        size / n * (n - ranks) if op == "all_to_all" else bus_factor(op, n) * size / (1 if op == "send_recv" else ranks)
    )
    moved, t = moved / line, us * 1e-6

    def time(p: Column) -> Column:
        e1, a1, e2, a2 = np.exp(p)
        return np.asarray(np.minimum(a1 + moved / e1, a2 + moved / e2), float)

    def residual(p: Column) -> Column:
        return np.asarray(np.log(time(p) / t), float)

    low, high = np.log([1e-3, 1e-6, 0.03, 1e-6]), np.log([1.0, 1.0, 2.5, 1.0])
    best = None
    for share in (0.05, 0.15, 0.4):
        for late in (2.0, 4.0, 8.0):
            plateau = float(np.max(moved / t))
            start = np.clip(
                np.log([share * plateau, float(t.min()), plateau, late * float(t.min())]), low + 1e-6, high - 1e-6
            )
            fit = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-4)
            if best is None or fit.cost < best.cost:
                best = fit
    assert best is not None
    return np.exp(best.x), error_of(time(best.x), t)


# ---------------------------------------------------------------------------------------------------- devices

# name in the library -> device in the tables. MI250X is planned per GCD (one rank), see its notes.
MEASURED = {
    "a100-sxm-80gb": "A100-SXM-80GB", "h100-sxm": "H100-SXM", "h200-sxm": "H200-SXM", "b200-sxm": "B200-SXM",
    "b300-sxm": "B300-SXM", "gb200-nvl72": "GB200-NVL72", "gb300-nvl72": "GB300-NVL72", "rtx-pro-6000": "RTX-PRO-6000",
    "l40s": "L40S",
}  # fmt: skip
# name -> (device, relative of compute, relative of NVLink, relative of PCIe, relative of the network)
RELATED = {
    "h100-pcie": ("H100-PCIe", "h100-sxm", "h100-sxm", "rtx-pro-6000", "h100-sxm"),
    "h100-nvl": ("H100-NVL", "h100-sxm", "h100-sxm", "rtx-pro-6000", "h100-sxm"),
    "h100-sxm-96gb": ("H100-SXM", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "h800-sxm": ("H800-SXM", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "a100-sxm-40gb": ("A100-SXM-40GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "a100-pcie-80gb": ("A100-PCIe-80GB", "a100-sxm-80gb", "a100-sxm-80gb", "rtx-pro-6000", "a100-sxm-80gb"),
    "v100-sxm2-16gb": ("V100-SXM2-16GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "v100-sxm2-32gb": ("V100-SXM2-32GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "l4": ("L4", "l40s", None, "rtx-pro-6000", "h100-sxm"),
    "a10g": ("A10G", "a100-sxm-80gb", None, "rtx-pro-6000", "h100-sxm"),
    "rtx-3090": ("RTX-3090", "a100-sxm-80gb", "a100-sxm-80gb", "rtx-pro-6000", "h100-sxm"),
    "rtx-4090": ("RTX-4090", "l40s", None, "rtx-pro-6000", "h100-sxm"),
    "rtx-5090": ("RTX-5090", "rtx-pro-6000", None, "rtx-pro-6000", "h100-sxm"),
    "mi250x": ("MI250X", "a100-sxm-80gb", "mi300x", None, None),
    "mi300x": ("MI300X", "h100-sxm", None, None, "mi355x"),
    "mi325x": ("MI325X", "h100-sxm", "mi300x", None, "mi355x"),
    "mi355x": ("MI355X", "b200-sxm", "mi300x", None, None),
    "gaudi2": ("Gaudi2", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "gaudi3": ("Gaudi3", "h100-sxm", "h100-sxm", None, "h100-sxm"),
}
# Burst rate of the best shape (TFLOP/s) where only that was measured: it replaces the relative's efficiency.
BEST_RATE: dict[str, tuple[dict[str, float], str]] = {
    "a100-pcie-80gb": ({"bf16": 252.9}, "mamf: 300 W limit"),
    "mi300x": ({"bf16": 708.0, "fp8": 1273.0}, "amd-maf"),
    "mi325x": ({"bf16": 843.0, "fp8": 1519.0}, "amd-maf"),
    "mi355x": ({"bf16": 1565.0}, "mamf"),
    "gaudi2": ({"bf16": 418.7, "fp8": 826.5}, "mamf"),
    "gaudi3": ({"bf16": 1243.0, "fp8": 1290.0}, "mamf"),
    "v100-sxm2-16gb": ({"bf16": 88.9}, "community torch matmul, fp16, V100S (130 TFLOP/s peak)"),
    "v100-sxm2-32gb": ({"bf16": 88.9}, "community torch matmul, fp16, V100S (130 TFLOP/s peak)"),
    "rtx-3090": ({"bf16": 69.8}, "community torch matmul 76.5 (boost clock), limited to 0.98 of the nominal peak"),
    "rtx-4090": ({"bf16": 161.9}, "community torch matmul 160-173 (boost clock), limited to 0.98 of the nominal peak"),
    "rtx-5090": ({"bf16": 205.3}, "community torch matmul 224-236 (boost clock), limited to 0.98 of the nominal peak"),
}
# Attention efficiency where the device's own nominal peak makes the relative's fraction wrong.
ATTENTION_RATE: dict[str, tuple[tuple[float, float], str]] = {
    "rtx-3090": ((0.9, 0.60), "fractions of RTX 4090 (GeForce peaks are halved for fp32 accumulation)"),
    "rtx-4090": ((0.92, 0.60), "tvm-tl: 151 forward, 99 backward TFLOP/s at head size 128, causal, of 165"),
    "rtx-5090": ((0.9, 0.60), "fractions of RTX 4090 (GeForce peaks are halved for fp32 accumulation)"),
    "mi300x": ((0.40, 0.31), "H100 fractions x 0.65, the ratio of the GEMM fractions of the two"),
    "mi325x": ((0.48, 0.37), "H100 fractions x 0.77, the ratio of the GEMM fractions of the two"),
}
AOTRITON = (
    "fa2: AOTriton, the flash attention of PyTorch on ROCm; AITER is 1.18 to 1.62 times as fast forward on MI300X, five lengths and "
    "two head sizes (midiareshadi.github.io/blog/attn-dsl-bench, 2026), 1.4 the middle; backward and other devices assumed alike"
)
PCIE = {"Gen3": 15.75, "Gen4": 31.5, "Gen5": 63.0, "Gen6": 121.0}  # GB/s, x16, one direction, after line coding
# Host memory per node and its bandwidth: usual configurations of such servers, an assumption in every file.
HOST = {
    "Volta": (768, 256.0), "Ampere": (2048, 409.6), "Ada": (1024, 409.6), "Hopper": (2048, 614.4),
    "Blackwell": (2048, 716.8), "Blackwell Ultra": (2048, 819.2), "grace": (960, 1024.0), "box": (512, 409.6),
}  # fmt: skip
# NIC line rate per GPU in Gb/s (typical_nic of specs.yaml over the GPUs of a node), and GPUs per node.
NETWORK = {
    "v100-sxm2-16gb": (12.5, 8, "100 Gb/s per node of 8 (AWS p3dn)"), "v100-sxm2-32gb": (100, 8, "DGX-2: 8x100G IB"),
    "a100-sxm-40gb": (200, 8, "DGX: 8x200G IB; AWS p4d has 4x100G per node: 50 Gb/s per GPU"),
    "a100-sxm-80gb": (200, 8, "8x200G IB; AWS p4de has 50 Gb/s per GPU"),
    "a100-pcie-80gb": (50, 8, "varies; assumed 2x200G per node of 8"),
    "h100-sxm": (400, 8, "8x400G IB or RoCE; AWS p5 32x100G EFA; GCP A3 Mega 8x200G"),
    "h100-sxm-96gb": (400, 8, "as h100-sxm"),
    "h100-pcie": (50, 8, "varies; assumed 2x200G per node of 8"), "h100-nvl": (50, 8, "varies; assumed 2x200G per node of 8"),
    "h800-sxm": (400, 8, "8x400G IB"), "h200-sxm": (400, 8, "8x400G IB or RoCE; AWS p5en 3200G EFA"),
    "b200-sxm": (400, 8, "8x400G IB or RoCE; AWS p6-b200 3200G EFA"), "b300-sxm": (800, 8, "8x800G ConnectX-8"),
    "gb200-nvl72": (400, 4, "1x400G per GPU, 4 GPUs per tray"), "gb300-nvl72": (800, 4, "1x800G per GPU, 4 GPUs per tray"),
    "l40s": (25, 8, "200 Gb/s per node of 8; AWS g6e 100G"), "l4": (12.5, 8, "100 Gb/s per node of 8"),
    "a10g": (10, 4, "AWS g5.12xlarge: 40 Gb/s, 4 GPUs; g5.48xlarge: 100 Gb/s, 8 GPUs"),
    "rtx-3090": (6.25, 4, "none; 25 Gb/s Ethernet per box of 4 assumed"),
    "rtx-4090": (3.125, 8, "none; 25 Gb/s Ethernet per box of 8 assumed"),
    "rtx-5090": (3.125, 8, "none; 25 Gb/s Ethernet per box of 8 assumed"),
    "rtx-pro-6000": (50, 8, "varies; assumed 2x200G per node of 8"),
    "mi250x": (100, 8, "Frontier: 4x200G Slingshot per node of 4 packages = 8 GCDs"),
    "mi300x": (400, 8, "8x400G RoCE"), "mi325x": (400, 8, "8x400G"), "mi355x": (400, 8, "8x400G Pollara or CX7"),
    "gaudi2": (300, 8, "3x100G per card"), "gaudi3": (600, 8, "3x200G per card"),
}  # fmt: skip
# wgrad (NT-acc32) less the mean of forward and dgrad of the same shape, over 6 n k bytes / nominal bandwidth, median of the
# shapes with 1.5k to 5k tokens: B200 0.68 (93 shapes), A100 PCIe 0.64 (57 shapes; simumax). Relative to the GEMM that is
# 13 percent at 2k tokens, 7 at 4k and 3 above 8k on B200.
ACCUMULATE = 0.67
# Hopper's and Ada's fp8 tensor cores add up in fewer bits; outside the forward pass partial sums are promoted to fp32
# registers: 1.1 to 1.2 x the time (pytorch/ao issue 2377, H100), the middle. Blackwell has no such mode
# (TransformerEngine PR 2748), AMD's always adds in fp32 (pytorch PR 123987).
PRECISE_ACCUMULATION = {"Hopper": {"fp8": 1.15}, "Ada": {"fp8": 1.15}}
# Dense products in mxfp8 over those with one scale per tensor, operands quantised before, 12 products of one layer on B300:
# 7.161 of 6.812 ms (TransformerEngine @1609c89, docs/examples/gemm_profiling, June 2026).
BLOCK_SCALING = {"Blackwell": {"mxfp8": 1.05}, "Blackwell Ultra": {"mxfp8": 1.05}}
# nvfp4: the tables' products (TensorRT-LLM's CUTLASS kernel) lose a quarter of their rate from 8192 to 16384 in each dimension,
# cuBLAS, which Transformer Engine calls, nothing (B300: 131.94, 1044.08, 8775.88 us at 8192, 16384, 32768 cubed, cuBLAS 13.8;
# CUTLASS 129.69, 1177.26: vincentzed/gemm3, docs/benchmarks.md). So shapes follow the constants alone, without the grid, and the
# rate is that of cuBLAS where it was measured, operands quantised before: (m, n, k), seconds, and clock of the measurement
# (1 = burst; a loop of seconds runs at the sustained one).
#   B200   8192 cubed: 5.37 PFLOP/s (pytorch/ao PR 2427, June 2025), 5.24 (cuBLAS 13.3, DeepGEMM PR 348, June 2026) and 5.57
#          (13.0, cfregly/ai-performance-engineering @5b4df50, September 2026): the middle one. 4096 cubed 4.46, 6144 5.50 there
#   GB300  8192 cubed: 7.307 PFLOP/s (cuBLASLt, CUDA 13.1, "Outperforming cuBLAS on NVFP4", cudaforfun, August 2026)
#   B300   15872 tokens, 4096 x 12288, 4096 x 4096, 4096 x 16384, 16384 x 4096, three passes: 3.764 ms in a loop (Transformer
#          Engine's tutorial, as above); after pauses one product of 8192 cubed reaches 8.33 PFLOP/s
#   GB200  not measured: B200's x 1.083, the ratio of their fp8 constants
TUTORIAL_LAYER = [(15872, 12288, 4096), (15872, 4096, 4096), (15872, 16384, 4096), (15872, 4096, 16384)]
CUBLAS_NVFP4: dict[str, tuple[list[tuple[int, int, int]], float, str]] = {
    "b200-sxm": ([(8192, 8192, 8192)], 2 * 8192**3 / 5.37e15, "burst"),
    "gb200-nvl72": ([(8192, 8192, 8192)], 2 * 8192**3 / (5.37e15 * 1.083), "burst"),
    "gb300-nvl72": ([(8192, 8192, 8192)], 2 * 8192**3 / 7.307e15, "burst"),
    "b300-sxm": (
        [shape for m, n, k in TUTORIAL_LAYER for shape in ((m, n, k), (m, k, n), (n, k, m))], 3.764e-3, "sustained",
    ),
}  # fmt: skip
CUBLAS_SOURCE = (
    "rate of cuBLAS with quantised operands, shapes by the constants alone: B200 pytorch/ao PR 2427, DeepGEMM PR 348, "
    "cfregly/ai-performance-engineering @5b4df50; GB300 cudaforfun.substack.com (outperforming cuBLAS on NVFP4); B300 "
    "TransformerEngine @1609c89 docs/examples/gemm_profiling; GB200 as B200; constants from aic-trt"
)
# Rate of tensor-core work in a training run over its rate in a short burst: the power limit. Set on runs that are nearly
# all computation (tp 1, no pipeline); the other rows of those pages were seen too, so they are no blind test (docs/log):
#   Hopper            DGX Cloud 25.04 llama3.1 8b bf16 on H100 at 700 W, 5 runs; H200 alike, smaller limits may fall lower
#   Blackwell         Megatron-Bridge 25.09 and 25.11 llama3 8b fp8-cs on GB200; B200 alike (its 8b runs would give 0.86). GEMMs
#                     in a loop on one B200 reach 0.73 (SimuMax): a box with less cooling may fall to that
#   Blackwell Ultra   0.87 as suggested before; Megatron-Bridge 25.11 llama3 8b on GB300 agrees within 5 percent
#   CDNA              MLPerf 5.1 on 8 MI300X (LoRA of 70B) and 8 MI355X (8B), eight systems; beside power it stands for kernels that
#                     fill 304 and 256 units worse than the one shape that was measured
SUSTAINED = {"Hopper": 0.812, "Blackwell": 0.82, "Blackwell Ultra": 0.87, "CDNA": 0.83}  # others 0.95

# Part of the memory bandwidth per class of operation, with the rows behind it (bytes the algorithm must move / time).
_H100_MEMORY = {
    "norm_forward": (0.81, "liger fused_add_rms_norm 2709 of 3350 GB/s"),
    "norm_backward": (0.72, "H200 cuDNN rms_norm backward 3441 of 4800; Liger on H100 reaches 0.32-0.53, eager 0.11"),
    "elementwise": (0.90, "H100 PCIe STREAM triad 1832 of 2039; vidur residual add 3247 of 3350 is partly L2"),
    "swiglu": (0.90, "as STREAM triad (2 reads, 1 write); the old vLLM kernel reaches 0.58"),
    "rope": (0.75, "A100 Liger 1539 of 2039; the old vLLM kernel reaches 0.47 here"),
    "cross_entropy": (0.63, "A100 Liger fused, fp32 logits, 1293 of 2039"),
    "optimizer": (0.72, "fused AdamW: 0.65-0.80 at 28 B per parameter; torch fused 2117 GB/s on the HBM2e part"),
    "quantize": (0.90, "aic-trt fp8-quantize 3011 of 3350; the amax pass alone 0.36"),
    "permute": (0.50, "B200 simumax 4000 of 8000"),
    "copy": (0.84, "H100 PCIe STREAM scale 1704 of 2039"),
}
MEMORY: dict[str, dict[str, tuple[float, str]]] = {
    "h100-sxm": _H100_MEMORY,
    "a100-sxm-80gb": _H100_MEMORY | {
        "norm_forward": (0.69, "liger rms_norm 1409 of 2039"),
        "norm_backward": (0.71, "liger layer_norm forward 1666, both 1523: backward about 1450; rms_norm bf16 only 0.28-0.31"),
        "elementwise": (0.86, "STREAM triad 1759 of 2039; vidur residual add 1798"),
        "swiglu": (0.86, "as STREAM triad (2 reads, 1 write); the old vLLM kernel reaches 0.49"),
        "quantize": (0.85, "as copy; no fp8"), "copy": (0.85, "STREAM scale 1732 of 2039"),
    },
    "h200-sxm": _H100_MEMORY | {
        "norm_forward": (0.78, "cudnn-fe cuDNN rms_norm 3728 of 4800"),
        "norm_backward": (0.72, "cudnn-fe cuDNN rms_norm 3441 of 4800; torch.compile 0.36"),
        "elementwise": (0.74, "STREAM triad 3534 of 4800"), "swiglu": (0.74, "as STREAM triad"),
        "rope": (0.74, "as STREAM triad"), "quantize": (0.84, "aic-trt fp8-quantize 4052 of 4800"),
        "copy": (0.66, "STREAM scale 3165 of 4800"),
    },
    "gb200-nvl72": _H100_MEMORY | {
        "norm_forward": (0.74, "cudnn-fe cuDNN rms_norm 5943 of 8000"),
        "norm_backward": (0.62, "cudnn-fe cuDNN rms_norm 4922 of 8000; torch.compile 0.28"),
        "elementwise": (0.67, "B200 simumax element-wise 5328 of 8000"), "swiglu": (0.67, "as element-wise"),
        "rope": (0.67, "as element-wise"), "cross_entropy": (0.32, "B200 simumax 2597 of 8000 (fused 2236)"),
        "optimizer": (0.65, "lower end of 0.65-0.80; torch foreach, which makes several passes, 2412-2837 of 8000"),
        "quantize": (0.58, "aic-trt fp8-quantize 4656 of 8000"), "copy": (0.67, "as element-wise"),
    },
    "l40s": _H100_MEMORY | {
        "elementwise": (0.93, "L40 STREAM triad 803 of 864"), "swiglu": (0.93, "as STREAM triad"),
        "quantize": (0.79, "aic-trt fp8-quantize 684 of 864"), "copy": (0.94, "L40 STREAM scale 816 of 864"),
    },
}  # fmt: skip
MEMORY |= {
    "b200-sxm": MEMORY["gb200-nvl72"] | {"quantize": (0.55, "aic-trt fp8-quantize 4363 of 8000")},
    "b300-sxm": MEMORY["gb200-nvl72"], "gb300-nvl72": MEMORY["gb200-nvl72"], "rtx-pro-6000": MEMORY["l40s"],
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------- networks


def seg(
    efficiency: float, latency_us: float = 0.0, per_rank_us: float = 0.0, per_doubling_us: float = 0.0
) -> dict[str, Any]:
    """One protocol as it stands in the file."""
    return {
        "efficiency": short(min(efficiency, 1.0), 3),
        "latency": f"{short(latency_us, 3)} us",
        "latency_per_rank": f"{short(per_rank_us, 3)} us",
        "latency_per_doubling": f"{short(per_doubling_us, 3)} us",
    }


class Sweeps:
    """Measured sweeps across nodes, found by source, operation and ranks."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def fit(self, source: str, op: str, world: int, line: float, note: str = "") -> tuple[Column, list[float]]:
        """(e1, a1, e2, a2) and the error of one sweep; NIC line rate per GPU in bytes/s."""
        rows = [
            r for r in self.rows
            if r["source"] == source and OP_NAMES[r["op"]] == op and int(r["world"]) == world and int(r["nodes"]) > 1
            and note in r["note"] and float(r["bytes"]) >= 1024
        ]  # fmt: skip
        size, us = floats(sorted(rows, key=lambda r: float(r["bytes"])), "bytes", "time_us")
        return fit_network(size, us, world, int(rows[0]["gpus_per_node"]), op, line)

    def ring(self, source: str, op: str, world: int, line: float, note: str = "") -> dict[str, Any]:
        """An operation whose latency grows with the number of ranks."""
        (e1, a1, e2, a2), error = self.fit(source, op, world, line, note)
        per = 1e6 / (world - 1)
        return {
            "fast": seg(e1, 0.0, a1 * per), "bulk": seg(e2, 0.0, a2 * per),
            "source": f"{source}, {world} GPUs{', ' + note if note else ''}", "errors": {"median_p90_percent": error},
        }  # fmt: skip

    def tree(
        self,
        source: str,
        world: int,
        line: float,
        beyond: float,
        why: str,
        doubling: tuple[float, float],
        note: str = "",
    ) -> dict[str, Any]:
        """all_reduce: latency grows with log2(nodes); ``beyond`` is the efficiency on more than two nodes."""
        (e1, a1, e2, a2), error = self.fit(source, "all_reduce", world, line, note)
        fast, bulk = doubling
        return {
            "fast": seg(e1, max(a1 * 1e6 - fast, 1.0), 0.0, fast), "bulk": seg(beyond, max(a2 * 1e6 - bulk, 1.0), 0.0, bulk),
            "two_nodes": short(e2, 3), "source": f"{source}, {world} GPUs on two nodes; more nodes: {why}",
            "errors": {"two_nodes_median_p90_percent": error},
        }  # fmt: skip


# Latency of an all_reduce per doubling of the nodes, us: NCCL's own tree constants, 2 hops of 5 (LL) to 8.5 (LL128), and
# for bulk the intercept of 8 H100 nodes (coreweave, 252 us) less that of two (about 150), over two doublings.
IB_DOUBLING = (13.5, 50.0)
# Measured on Slingshot, 2 to 540 nodes: 24-37 us (fast), 305 us (bulk).
SLINGSHOT_DOUBLING = (30.0, 305.0)


def build_networks(rows: list[dict[str, str]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """name -> (latency of the smallest message, constants of the six operations)."""
    sweeps, ib, hdr = Sweeps(rows), 50e9, 25e9
    send = sweeps.ring("vidur", "send_recv", 2, ib)
    if send["bulk"]["efficiency"] < 0.5:  # the A100 rows of this source are a slow fabric: take the H100 ones
        h100 = Sweeps([r for r in rows if r["gpu"] == "H100-SXM"])
        send = h100.ring("vidur", "send_recv", 2, ib)
    send = {**send, **{part: {**send[part], "latency": send[part]["latency_per_rank"], "latency_per_rank": "0 us"}
                       for part in ("fast", "bulk")}}  # fmt: skip
    gather = sweeps.ring("gke-a3u", "all_gather", 16, ib)
    exchange = sweeps.ring("report-b200-ndr", "all_to_all", 16, ib, "tuned")
    check = "nccl-1229 (8 GiB, 4 to 128 nodes)"
    hopper = {
        "all_gather": gather, "reduce_scatter": {**gather, "source": gather["source"] + f" (all_gather); checked on {check}"},
        "broadcast": {**gather, "source": "as all_gather; not measured"}, "all_to_all": exchange, "send_recv": send,
    }  # fmt: skip
    ring = gather["bulk"]["efficiency"]
    h200_reduce = sweeps.tree(
        "report-h200-roce", 16, ib, ring, "the ring of all_gather; SHARP reaches 0.97", IB_DOUBLING
    )
    h100_reduce = {
        **h200_reduce, "two_nodes": 1.04,
        "source": "latencies of H200 RoCE; two nodes: median of 391, 415 and 464 GB/s at three sites; more: ring of all_gather",
    }  # fmt: skip
    b200 = {op: sweeps.ring("report-b200-ndr", op, 16, ib) for op in ("all_gather", "reduce_scatter")}
    b200 |= {"broadcast": {**b200["all_gather"], "source": "as all_gather; not measured"}, "all_to_all": exchange}
    b200["all_reduce"] = sweeps.tree(
        "report-b200-ndr", 16, ib, 0.955, "stas, 32 GPUs on EFA, 382 of 400 GB/s", IB_DOUBLING
    )
    b200_send = sweeps.ring("report-b200-ndr", "send_recv", 16, ib, "tuned")
    b200["send_recv"] = {**b200_send, **{
        part: {**b200_send[part], "latency": f"{short(15 * float(b200_send[part]['latency_per_rank'].split()[0]), 3)} us",
               "latency_per_rank": "0 us"} for part in ("fast", "bulk")}}  # fmt: skip
    b300 = b200 | {
        "all_reduce": {**b200["all_reduce"], "two_nodes": 0.958, "source": "B200 latencies; oci, 16 GPUs, 766 of 800 GB/s"},
        "all_to_all": {**exchange, "bulk": {**exchange["bulk"], "efficiency": 0.965},
                       "source": "B200 latencies; oci, 16 GPUs at 8 GiB: 181 GB/s bus = 96.5 of 100 per GPU"},
    }  # fmt: skip
    rack_gather = sweeps.ring("gcp-a4x-max", "all_gather", 8, 100e9)
    rack = {op: rack_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": {
            **b200["all_reduce"], "two_nodes": None, "inside": [0.90, 0.12, 0.48],
            "bulk": {**b200["all_reduce"]["bulk"], "latency": "0 us", "latency_per_doubling": "0 us", "latency_per_rank": "3.2 us"},
            "source": "B200 latencies; racks: oci, 128 and 192 GPUs, 800 and 749 of 892 GB/s inside; coreweave, 1440 GPUs, slope 429, 4.6 ms",
        },
        "all_to_all": {**exchange, "bulk": {**exchange["bulk"], "efficiency": 0.87},
                       "source": "B200 latencies; oci GB200, 128 and 192 GPUs: 45 and 42 of 50 GB/s per GPU (GB300: 24 of 100)"},
        "send_recv": b200["send_recv"],
    }  # fmt: skip
    gb300 = rack | {"all_reduce": {**rack["all_reduce"], "inside": [0.79, 0.105, 0.42],
                                   "source": "as gb200-nvl72, less by oci GB300, 128 GPUs: 738 of 930 GB/s inside"}}  # fmt: skip
    hdr_gather = sweeps.ring("alcf-sophia", "all_gather", 16, hdr)
    a100 = {op: hdr_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": sweeps.tree("alcf-sophia", 16, hdr, 0.817, "coreweave, 64 GPUs, slope 163 of 200 GB/s", (13.5, 50.0)),
        "all_to_all": sweeps.ring("alcf-sophia", "all_to_all", 16, hdr),
        "send_recv": {**send, "source": "fractions of H100 (the A100 rows of that source are a slow fabric)"},
    }  # fmt: skip
    pollara_reduce = sweeps.tree("report-mi355x-pollara", 16, ib, 0.926, "oci, 32 GPUs, 370 of 400 GB/s", IB_DOUBLING)
    pollara_exchange = sweeps.ring("report-mi355x-pollara", "all_to_all", 16, ib)
    pollara_exchange["bulk"]["efficiency"] = 0.86
    pollara_exchange["source"] += "; efficiency between two nodes (0.955) and four (oci, 0.78)"
    pollara_gather = {**gather, "bulk": {**gather["bulk"], "efficiency": 0.926},
                      "source": "latencies of H200 RoCE, bandwidth of the all_reduce; not measured"}  # fmt: skip
    mi355x = {op: pollara_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": pollara_reduce, "all_to_all": pollara_exchange, "send_recv": send,
    }  # fmt: skip
    sling_gather = sweeps.ring("alcf-polaris", "all_gather", 32, 12.5e9, "setup 5")
    sling_reduce = sweeps.tree(
        "alcf-polaris", 8, 12.5e9, 0.77, "the same fabric, 32 GPUs", SLINGSHOT_DOUBLING, "setup 5"
    )
    slingshot = {op: sling_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": {**sling_reduce, "two_nodes": None}, "all_to_all": sweeps.ring("alcf-polaris", "all_to_all", 8, 12.5e9, "setup 5"),
        "send_recv": send,
    }  # fmt: skip
    return {
        "h100-sxm": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
        "h200-sxm": ("17.6 us", {"all_reduce": h200_reduce, **hopper}),
        "b200-sxm": ("14 us", b200), "b300-sxm": ("14 us", b300), "gb200-nvl72": ("14 us", rack), "gb300-nvl72": ("14 us", gb300),
        "a100-sxm-80gb": ("17.6 us", a100), "mi355x": ("17.6 us", mi355x), "mi250x": ("17.6 us", slingshot),
        "l40s": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
        "rtx-pro-6000": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- files


def base_fields(name: str, device: str, spec: dict[str, Any], latency: str) -> dict[str, Any]:
    """Everything of a file but the curves."""
    nic, gpus, nic_note = NETWORK[name]
    pcie_text = str(spec["pcie"])
    generation = pcie_text[:4] if pcie_text[:3] == "Gen" else ""
    pcie = PCIE.get(generation, 225.0)  # NVLink-C2C: 450 GB/s one way per superchip of two GPUs
    domain = int(spec["scale_up"]["domain_gpus"])
    link = float(spec["scale_up"]["gbs_per_direction"]) if domain > 1 else pcie
    arch = str(spec["arch"])
    host_key = (
        "grace"
        if "Grace" in pcie_text
        else "box"
        if name.startswith("rtx-") and "pro" not in name
        else arch.split(" (")[0]
    )
    host_gib, host_bandwidth = HOST.get(host_key, (2048, 614.4))
    peaks = {k: v for k, v in spec["peak_dense_tflops"].items() if k in ("bf16", "fp16", "fp32", "tf32", "fp8", "fp4")}
    prices = []
    for entry in spec["price"]:
        value = str(entry["usd_per_gpu_hour"])
        ends = [float(x) for x in value.split("-")]
        kind = str(entry["kind"]) + (f" {value}, the middle" if len(ends) == 2 else "")
        prices.append(
            {
                "usd_per_hour": f"{short(sum(ends) / len(ends))} USD/h",
                "kind": kind,
                "date": str(entry["date"]),
                "source": str(entry["source"]),
            }
        )
    notes = [str(spec["note"])] if spec.get("note") else []
    notes += [
        f"network: {nic_note}",
        "host_memory and host_memory_bandwidth: a usual server of this generation, assumed; put in your own",
        "cpu_adam_bandwidth_fraction: 10e9 parameters in 2.57 s on 256 GB/s (ZeRO-Offload paper, CPU-Adam on DGX-2), from memory, not re-checked",
    ]
    if name == "mi250x":
        notes.append(
            "one rank is one GCD: everything here is half a package; 200 GB/s per direction to the GCD beside it, 50-100 to others"
        )
    unverified = [*map(str, spec.get("unverified", ())), "compute_units", "peak_flops.fp32", "pcie_bandwidth", "host_memory",
                  "host_memory_bandwidth", "cpu_adam_bandwidth_fraction"]  # fmt: skip
    half = 0.5 if name == "mi250x" else 1.0
    precise = {"precise_accumulation": PRECISE_ACCUMULATION[arch]} if arch in PRECISE_ACCUMULATION else {}
    if arch in BLOCK_SCALING:
        precise["block_scaling"] = BLOCK_SCALING[arch]
    return {
        "name": name, "device": device, "vendor": spec["vendor"], "arch": arch,
        "compute_units": int(spec["compute_units"] * half),
        "peak_flops": {k: f"{short(v * half, 6)} TFLOP/s" for k, v in peaks.items()},
        "memory": f"{spec['memory_gb'] * half:g} GB", "usable_memory": f"{spec['usable_gib'] * half:g} GiB",
        "memory_bandwidth": f"{spec['memory_bw_gbs'] * half:g} GB/s",
        "gpus_per_node": gpus, "scale_up_bandwidth": f"{50 if name == 'mi250x' else link:g} GB/s",
        "scale_up_domain": 8 if name == "mi250x" else domain,
        "network_bandwidth": f"{nic:g} Gb/s", "network_latency": latency, "pcie_bandwidth": f"{pcie:g} GB/s",
        "host_memory": f"{host_gib} GiB", "host_memory_bandwidth": f"{host_bandwidth:g} GB/s",
        "cpu_adam_bandwidth_fraction": 0.43, "sustained_clock": SUSTAINED.get("CDNA" if arch.startswith("CDNA") else arch, 0.95),
        **precise,
        "launch_floor": "2.5 us", "graph_launch_floor": "1.4 us", "tdp": f"{spec['tdp_w'] * half:g} W",
        "context_memory": "1.0 GiB", "communicator_memory": "0.6 GiB", "expert_communicator_memory": "1.2 GiB",
        "workspace_memory": "64 MiB", "prices": prices, "unverified": list(dict.fromkeys(unverified)), "notes": notes,
    }  # fmt: skip


COMMON_SOURCES = {
    "specs": "stas00/ml-engineering @744d01e (CC-BY-SA-4.0, facts only); ai-dynamo/aiconfigurator @095f58a system yaml "
    "(Apache-2.0); vendor datasheets through those; usable_memory from public runtime logs",
    "sustained_clock": "Hopper 0.812 from llama3.1 8b bf16 on H100 in three releases of DGX Cloud (24.11, 25.03, 25.04; 15 runs); Blackwell 0.82 from Megatron-Bridge 25.09 and 25.11 llama3 8b fp8-cs on GB200"
    "; CDNA 0.83 from MLPerf 5.1 on MI300X and MI355X; Blackwell Ultra 0.87 and others 0.95 suggested, A100 PCIe burst 253, sustained 230 TFLOP/s (MooreThreads/SimuMax @4dcaae5)",
    "launch_floor": "gpu-benches @1c36d50, back-to-back kernels on A100 and H200",
    "memory_overheads": "stas00/ml-engineering (context 0.47-0.92 GiB), nccl issues 964, 864, 1685, 2363, 986; PyTorch PR 120925",
}


def source_text(codes: Iterable[str], sources: dict[str, Any]) -> dict[str, str]:
    """The source codes used, each as repository, commit, licence and trust (A raw table, B partly known, C indicative)."""
    result = {}
    for code in sorted(set(codes)):
        entry = sources[code]
        place = (
            f"{entry['repo']} @{entry['commit'][:7]}" if "commit" in entry else entry.get("repo", entry.get("doc", ""))
        )
        path = entry.get("path") or (entry.get("doc") if "repo" in entry else "") or ""
        result[code] = f"{place}{' ' + path if path else ''} ({entry['licence']}; trust {entry['trust']})"
    return result


def compact(data: Any) -> Any:
    """Lists of six numbers or more, and the rows of a grid, as one text: YAML reads that ten times faster."""
    if isinstance(data, dict):
        return {
            key: [" ".join(f"{x:g}" for x in row) for row in value] if key == "percent" else compact(value)
            for key, value in data.items()
        }
    if isinstance(data, list) and len(data) >= 6 and all(isinstance(x, (int, float)) for x in data):
        return " ".join(f"{x:.6g}" for x in data)
    return [compact(x) for x in data] if isinstance(data, list) else data


def write(name: str, data: dict[str, Any], directory: Path) -> None:
    """One file: leaf collections on one line each."""
    head = f"# {data['device']}: written by tools/build_hardware_profiles.py; every number with its source under sources.\n"

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    data = compact(data)
    text = yaml.dump(data, Dumper=Plain, sort_keys=False, default_flow_style=None, width=100000, allow_unicode=True)
    (directory / f"{name}.yaml").write_text(head + text, encoding="utf-8")
    print(f"{name}: {len(text) / 1024:.1f} kB")


def build_measured(name: str, raw: dict[str, list[dict[str, str]]], specs: dict[str, Any], sources: dict[str, Any],
                   networks: dict[str, tuple[str, dict[str, Any]]], grouped: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The file of a device with its own tables."""
    device = MEASURED[name]
    spec = specs[device]
    memory, units = spec["memory_bw_gbs"] * 1e9, float(spec["compute_units"])
    latency, scale_out = networks[name]
    data = base_fields(name, device, spec, latency)
    gemm: dict[str, Any] = {}
    for recipe, (peak_name, _, _) in OPERAND.items():
        dtype = {"bf16": "bfloat16"}.get(recipe, recipe)
        rows = [r for r in raw["gemm"] if r["gpu"] == device and r["dtype"] == dtype and r["layout"] == "TN"
                and r["source"] in ("aic-trt", "aic-sgl")]  # fmt: skip
        if len(rows) < 500:
            continue
        peak = spec["peak_dense_tflops"][peak_name] * 1e12
        curve = fit_table(rows, recipe, peak, memory, units, spec["arch"] == "Ampere")
        forward = {"m": grouped["m"][0], "e": grouped["e"][0], "error": grouped["errors"]["grouped-fwd"], "rows": 0}
        moe_dtype = "bfloat16" if recipe == "bf16" else recipe
        moe_rows = [r for r in raw["moe_gemm"] if r["gpu"] == device and r["dtype"] == moe_dtype]
        if moe_rows and device != "A100-SXM-80GB":  # the A100 rows are an untuned Triton kernel
            forward = fit_grouped_forward(raw["moe_gemm"], device, curve, peak, memory)
        # Backward was measured on B200 only: its ratios to the forward carry over.
        ratio_m = [x / grouped["m"][0] for x in grouped["m"]]
        ratio_e = [x / grouped["e"][0] for x in grouped["e"]]
        curve = replace(
            curve,
            accumulate=ACCUMULATE,
            grouped_m0=triple(forward["m"] * x for x in ratio_m),
            grouped_efficiency=triple(min(forward["e"] * x, 1.0) for x in ratio_e),
            errors=curve.errors | {"grouped_forward_median_p90_percent": forward["error"],
                                   "grouped_rows": forward["rows"] or "B200 constants"},
        )  # fmt: skip
        if recipe == "nvfp4" and name in CUBLAS_NVFP4:
            shapes, seconds, clock = CUBLAS_NVFP4[name]
            factor = 1.0 if clock == "burst" else SUSTAINED[spec["arch"]]
            curve = at_library_rate(curve, read(GemmCurve, gemm["bf16"], name), shapes, seconds, factor, peak, memory)
        plain = curve.to_dict()
        for key in ("efficiency", "m0", "n0", "k0", "memory_efficiency", "quantise_traffic"):
            plain[key] = short(plain[key])
        plain["launch"] = f"{short(curve.launch * 1e6)} us"
        for axis in ("m", "n", "k"):
            if "grid" in plain:
                plain["grid"][axis] = [int(x) for x in plain["grid"][axis]]
        if "grid" in plain:
            plain["grid"]["percent"] = [[round(x) for x in row] for row in plain["grid"]["percent"]]
        gemm[recipe] = plain
    data["gemm"] = gemm
    dtypes = ["bf16"] + (
        ["fp8"] if name in ("h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72", "gb300-nvl72", "b300-sxm") else []
    )
    data["attention"] = build_attention(raw["attention"], device, specs, dtypes)
    data["kernels"] = kernels(spec["arch"])
    data["memory_fraction"] = {op: value for op, (value, _) in MEMORY[name].items()}
    measured = {family: "measured" for family in ("gemm", "attention", "memory", "scale_up", "scale_out")}
    remarks: list[str] = []
    error = math.nan
    if name == "l40s":
        data["curves_from"] = {"pcie": "rtx-pro-6000"}
        measured["scale_up"] = "scaled from rtx-pro-6000 (its own table has PCIe P2P off)"
    else:
        data["scale_up"], remarks, error = build_scale_up(raw["collectives"], device)
    if name in ("l40s", "rtx-pro-6000", "h100-sxm", "a100-sxm-80gb"):
        measured["attention"] = {"h100-sxm": "forward measured, backward from h200-sxm (same compute)",
                                 "a100-sxm-80gb": "forward measured, backward from a100-pcie-80gb"}.get(
            name, "forward measured, backward scaled from rtx-4090")  # fmt: skip
    if name in ("l40s", "rtx-pro-6000"):
        measured["scale_out"] = "scaled from h100-sxm"
    if name == "h100-sxm":
        measured["scale_out"] = (
            "all_reduce measured at two and eight nodes, rings from h200-sxm, all_to_all from b200-sxm"
        )
        measured["memory"] = "part measured, part from a100, h100-pcie and h200"
    data["scale_out"] = scale_out
    data["measured"] = measured
    codes = {r["source"] for table_name in ("gemm", "attention", "collectives", "moe_gemm", "membound") for r in raw[table_name]
             if r["gpu"] == device}  # fmt: skip
    data["sources"] = {
        **COMMON_SOURCES,
        **({"fa2": flash_attention_2.SOURCE} if device in FLASH_ATTENTION_2 else {}),
        "memory_fraction": {op: text for op, (_, text) in MEMORY[name].items()},
        "scale_up": remarks
        + ([f"one time per octave; log-log between: median error below {error} percent"] if remarks else []),
        **({"gemm_nvfp4": CUBLAS_SOURCE} if name in CUBLAS_NVFP4 else {}),
        "gemm_passes": "accumulate: traffic of fp32 wgrad accumulation that is not hidden, B200 0.68, A100 PCIe 0.64 (simumax); others alike",
        "grouped": f"B200 grouped rows (simumax), errors {grouped['errors']}; forward of others: fused expert FFNs (aic-trt)",
        "tables": source_text(codes & set(sources), sources),
    }
    return data


# FlashAttention 1 in Triton of before MLIR (llm-foundry 2023, attn_impl triton), time over that of the best kernel: least
# squares on the bf16 llm-foundry rows in which attention is above 30 percent of the step, 30 of A100 (residual 3 percent, one
# factor fits 512 to 65536 tokens and head sizes 64 and 128) and 28 of H100. FlashAttention-2 paper, section 4.1: 1.3-2.5 x.
TRITON = {"Ampere": {"forward": 1.13, "backward": 1.86}, "Hopper": {"forward": 2.35, "backward": 3.35}}


def kernels(arch: str) -> dict[str, Any]:
    """Which attention kernels a trainer may name."""
    triton = {"triton": TRITON[arch]} if arch in TRITON else {}
    if arch in ("Hopper",):
        return {"same_as_best": ["fa3", "cudnn"], "slowdown": triton}
    if arch.startswith("Blackwell") and "(" not in arch:
        # FlashAttention 4 of 2026 on B200: 1605 TFLOP/s, up to 1.3 times cuDNN 9.13 [together.ai/blog/flashattention-4]
        return {"same_as_best": ["cudnn"], "slowdown": {"fa4": {"forward": 0.77, "backward": 0.77}}}
    return {"same_as_best": ["fa2", "cudnn"], "slowdown": triton}


def build_related(name: str, specs: dict[str, Any], networks: dict[str, tuple[str, dict[str, Any]]],
                  sources: dict[str, Any], raw: dict[str, list[dict[str, str]]]) -> dict[str, Any]:  # fmt: skip
    """The file of a device without its own tables: peaks of its own, curves of the nearest relative."""
    device, compute, link, pcie, network = RELATED[name]
    spec = dict(specs[device])
    if name == "h100-sxm-96gb":
        spec |= {"memory_gb": 96, "usable_gib": 94.5, "memory_bw_gbs": 2400, "tdp_w": 500, "price": [],
                 "note": "H100 variant with 96 GB of HBM2e at 500 W (Grand Teton); usable memory and bandwidth from general knowledge",
                 "unverified": ["memory", "usable_memory", "memory_bandwidth", "sustained_clock"]}  # fmt: skip
    latency = networks[network][0] if network in networks else networks.get(name, ("17.6 us", {}))[0]
    data = base_fields(name, device, spec, latency)
    if (
        spec["tdp_w"] < specs[device]["tdp_w"]
    ):  # power is f V^2 and V about f: a lower limit lowers the clock by its cube root
        share = (spec["tdp_w"] / specs[device]["tdp_w"]) ** (1 / 3)
        data["sustained_clock"] = round(data["sustained_clock"] * share, 3)
        data["notes"].append(f"sustained_clock: {share:.3f} of {device} (cube root of the ratio of the power limits)")
    families = {"gemm": compute, "attention": compute, "memory": compute}
    if link:
        families["scale_up"] = link
    if pcie:
        families["pcie"] = pcie
    if network:
        families["scale_out"] = network
    data["curves_from"] = families
    measured = {family: f"scaled from {relative}" for family, relative in families.items() if family != "pcie"}
    notes: dict[str, Any] = {}
    if "scale_up" not in measured:
        measured["scale_up"] = f"scaled from {pcie}"
    if name in BEST_RATE:
        rates, why = BEST_RATE[name]
        half = 0.5 if name == "mi250x" else 1.0
        reference = {"bf16": 1.0, "fp8": 1.0}
        own = {}
        for recipe, rate in rates.items():
            peak_key = recipe if recipe in spec["peak_dense_tflops"] else "fp16"
            own[recipe] = short(min(rate / (spec["peak_dense_tflops"][peak_key] * half) * reference[recipe], 1.0), 3)
            if name.startswith("v100"):
                own[recipe] = short(rate / 130.0, 3)
        data["gemm_efficiency"] = own
        notes["gemm_efficiency"] = f"best measured shape {rates} TFLOP/s: {why}"
        measured["gemm"] += "; plateau measured"
    if name in ATTENTION_RATE:
        (forward, backward), why = ATTENTION_RATE[name]
        data["attention_efficiency"] = {"forward": forward, "backward": backward}
        notes["attention_efficiency"] = why
    if name in ("mi300x", "mi325x", "mi355x"):  # what PyTorch picks by itself on ROCm; the best is Composable Kernel's and AITER's
        data["kernels"] = {"slowdown": {"fa2": {"forward": 1.4, "backward": 1.4}}}
        notes["kernels"] = AOTRITON
    if name in ("mi300x", "mi355x"):
        if name == "mi300x":
            data["scale_up"], remarks, _ = build_scale_up(raw["collectives"], device)
            measured["scale_up"] = "all_reduce measured on 8; others derived"
            notes["scale_up"] = remarks
        if name in networks:
            data["scale_out"] = networks[name][1]
            measured["scale_out"] = "measured"
    if name == "mi250x":
        data["scale_out"] = networks[name][1]
        measured["scale_out"] = "constants of Slingshot-11 from Polaris (A100)"
    data["measured"] = measured
    codes = {
        r["source"] for table_name in raw for r in raw[table_name] if r["gpu"] == device and r["source"] in sources
    }
    data["sources"] = {**COMMON_SOURCES, **notes, "tables": source_text(codes, sources)}
    return data


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("only", metavar="[NAME]...", nargs=-1)
def main(directory: Path, only: tuple[str, ...]) -> None:
    """Build all files, or those named."""
    raw = {
        name: table(directory, f"{name}.csv") for name in ("gemm", "attention", "membound", "moe_gemm", "collectives")
    }
    specs = yaml.safe_load((directory / "specs.yaml").read_text(encoding="utf-8"))["gpus"]
    sources = yaml.safe_load((directory / "sources.yaml").read_text(encoding="utf-8"))
    target = Path(__file__).resolve().parent.parent / "profiles" / "hardware"
    target.mkdir(parents=True, exist_ok=True)
    networks = build_networks(raw["collectives"])
    b200 = specs["B200-SXM"]
    rows = [r for r in raw["gemm"] if r["gpu"] == "B200-SXM" and r["dtype"] == "bfloat16" and r["source"] == "aic-trt"]
    random_state = RANDOM.bit_generator.state
    curve = fit_table(rows, "bf16", 2250e12, 8000e9, float(b200["compute_units"]), False)
    grouped = fit_grouped_backward([r for r in raw["gemm"] if r["gpu"] == "B200-SXM"], curve, 2250e12, 8000e9)
    print("grouped", grouped)
    for name in MEASURED:
        if not only or name in only:
            RANDOM.bit_generator.state = random_state  # the same halves whichever files are asked for
            write(name, build_measured(name, raw, specs, sources, networks, grouped), target)
    for name in RELATED:
        if not only or name in only:
            write(name, build_related(name, specs, networks, sources, raw), target)


if __name__ == "__main__":
    main()
