"""Attention kernels: fitted to one device, carried over to others by anchors."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.curves import Column
from planner.lab.profile.fit_attention import REFINED, Rows, attention_model, fit_all, refine_rate
from planner.lab.profile.fitting import error_of, short
from tools.hardware_fits import flash_attention_2
from tools.hardware_fits.measured import RANDOM
from tools.tables import floats

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
