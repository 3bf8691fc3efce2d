"""Collectives inside of a node as curves by octave, and the constants of a network."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from planner.curves import COLLECTIVES, Column, bus_factor
from planner.lab.profile.fitting import error_of, short
from tools.hardware_fits.measured import SIZES

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


def scaled_by_pair(rows: list[dict[str, str]], gpu: str, relative: str) -> tuple[dict[str, Any], list[str], float]:
    """Curves of a box whose table is sound for two devices alone: the relative's, by the ratio of what two of each reach.

    The ratio is that of the times of the largest size of two devices, op by op; where two were not measured that of all_gather.
    """
    entry, _, error = build_scale_up(rows, relative)
    pairs = {
        name: {
            OP_NAMES[r["op"]]: (float(r["bytes"]), float(r["time_us"]))
            for r in sorted(rows, key=lambda one: float(one["bytes"]))
            if (r["gpu"], r["source"], r["world"], r["dtype"]) == (name, "aic-nccl", "2", "half")
        }
        for name in (gpu, relative)
    }
    ratios = {op: pairs[gpu][op][1] / time for op, (size, time) in pairs[relative].items() if pairs[gpu][op][0] == size}
    for op, curve in entry.items():
        slower = ratios.get(op, ratios["all_gather"])
        curve["us"] = {n: [short(row[0] + (x - row[0]) * slower, 4) for x in row] for n, row in curve["us"].items()}
    said = ", ".join(f"{op} {1 / ratio:.2f}" for op, ratio in sorted(ratios.items()))
    return entry, [f"{relative}, its rates times those of two {gpu} over those of two {relative}: {said}"], error


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
