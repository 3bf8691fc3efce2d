"""Measured collectives to curves of a profile, and to lines for sizes and groups that were not measured.

The measured points are the curve; a line t = a + S/b is used only to fill an octave that is missing at either end, and to say
how well latency and bandwidth describe the rest. Fitted to log t, so that all sizes count alike. Measured overlaps give one
slowdown per link and direction.
"""

import math
from collections.abc import Sequence
from dataclasses import field, replace
from statistics import median
from typing import Any

import numpy as np

from planner import units
from planner.curves import COLLECTIVES, CollectiveCurve, NetworkCurve, Segment, bus_factor
from planner.errors import PlannerError
from planner.hardware.links import LINKS, SIDES, MeasuredOverlap, impossible
from planner.lab.profile.fitting import columns, error_of, fitted, of, seconds
from planner.lab.profile.patterns import factor
from planner.lab.profile.points import Measured
from planner.lab.profile.timing import summarise
from planner.record import record

TINY = 1e-9  # Seconds: no latency is shorter
BEYOND = 1.25
"""A line rate may exceed the best measured transfer by a quarter: latency is that much of a message of some ms."""
FEW = 4  # Points across nodes that determine two protocols
VAGUE = 25.0  # Percent of spread from which an overlap says nothing: the library's is kept, with a note
CURVE = ("op", "n", "stride", "per_node", "nodes", "dtype")  # What the points of a curve have in common


@record
class Curve:
    """One collective in one pattern with one type of elements, over the size."""

    op: str
    n: int
    stride: int
    per_node: int
    nodes: int
    dtype: str
    points: tuple[Measured, ...]  # By rising size
    sizes: Any  # Bytes
    seconds: Any  # Medians


def curves(measured: Sequence[Measured]) -> list[Curve]:
    """The measured collectives, one curve per operation, pattern and type."""
    found: dict[tuple[Any, ...], list[Measured]] = {}
    for one in measured:
        found.setdefault(tuple(one.point.each(*CURVE)), []).append(one)
    result = []
    for key, mine in found.items():
        mine.sort(key=lambda one: one.point["size"])
        pattern, sizes = dict(zip(CURVE, key, strict=True)), columns(mine, "size")[0]
        result.append(Curve(**pattern, points=tuple(mine), sizes=sizes, seconds=seconds(mine)))
    return result


@record
class Line:
    """t = a + S c."""

    latency: float  # a, seconds
    per_byte: float  # c, seconds per byte; 1/c is the algorithm bandwidth
    errors: dict[str, float] = field(default_factory=dict)  # Median and largest |fit / measured - 1|, percent

    def time(self, size: Any) -> Any:
        """Seconds."""
        return self.latency + self.per_byte * np.asarray(size, dtype=float)

    def to_dict(self) -> dict[str, Any]:
        """For the file: latency in microseconds, bandwidth, residuals in percent."""
        rate = units.format_bytes(1.0 / max(self.per_byte, 1e-18)) + "/s"
        latency = units.format_seconds(self.latency)
        return {"form": "one", "latency": [latency], "bandwidth": [rate], **self.errors}


def fit_line(sizes: Any, seconds: Any) -> Line:
    """The line with the least |log fit - log measured| (soft_l1: one bad point does not pull), started through the first and the
    last point."""
    if len(sizes) < 2:
        raise PlannerError(f"{len(sizes)} size does not determine a line")

    def line(x: Any) -> Line:
        return Line(latency=float(np.exp(x[0])), per_byte=float(np.exp(x[1])))

    def residual(x: Any) -> Any:
        return np.log(line(x).time(sizes) / seconds)

    slope = max((seconds[-1] - seconds[0]) / max(sizes[-1] - sizes[0], 1.0), 1e-15)
    start = max(seconds[0] - slope * sizes[0], 0.1 * seconds[0], TINY), slope
    found = line(fitted(residual, np.log(start), np.log(1e-18), np.log(1e6), scale=0.05).x)
    return replace(found, errors=_errors(found.time(sizes) / seconds))


def rows(curve: Curve) -> dict[str, Any]:
    """A curve with its fit for the file: numbers between blanks, one per octave measured. Latency (of the smallest message),
    algorithm and bus bandwidth (of the size where they are largest) in base units, each with its spread in percent, and the least
    confidence of any interval of the curve."""

    def text(name: str, scale: float = 1.0) -> str:
        return " ".join(f"{getattr(one, name) * scale:.5g}" for one in curve.points)

    smallest, best = curve.points[0], curve.points[int(np.argmax(curve.sizes / curve.seconds))]
    rate = best.point["size"] / best.median
    return {
        **{name: getattr(curve, name) for name in CURVE},
        "sizes": " ".join(str(int(size)) for size in curve.sizes),
        "us": text("median", units.MEGA), "low_us": text("low", units.MEGA), "high_us": text("high", units.MEGA),
        "repetitions": text("repetitions"), "outliers": text("outliers"),
        "latency": f"{smallest.median:.5g} s", "latency_percent": round(100.0 * smallest.spread, 2),
        "algorithm_bandwidth": f"{rate:.5g} B/s", "bus_bandwidth": f"{rate * factor(curve.op, curve.n):.5g} B/s",
        "bandwidth_percent": round(100.0 * best.spread, 2),
        "confidence": round(min(one.confidence for one in curve.points), 4),
        "fits": [fit_line(curve.sizes, curve.seconds).to_dict()] if len(curve.points) > 1 else [],
    }  # fmt: skip


def scale_up(all_curves: Sequence[Curve], dtype: str) -> dict[str, Any]:
    """``scale_up`` of a profile: every collective among neighbours inside a node. Raises PlannerError naming what lacks."""
    result: dict[str, Any] = {}
    for op in COLLECTIVES:
        mine = {
            one.n: one for one in sorted(all_curves, key=lambda one: one.n)
            if (one.op, one.dtype, one.nodes, one.stride) == (op, dtype, 1, 1) and len(one.points) > 1
        }  # fmt: skip
        if not mine:
            raise PlannerError(f"no {op} inside a node was measured at two sizes or more")
        first, last = min(one.sizes[0] for one in mine.values()), max(one.sizes[-1] for one in mine.values())
        sizes = first * np.exp2(np.arange(round(math.log2(last / first)) + 1))
        seconds = np.stack([_filled(one, sizes) for one in mine.values()])
        data = CollectiveCurve(op=op, sizes=sizes, groups=np.array(list(mine), float), seconds=seconds).to_dict()
        us = {int(n): " ".join(f"{value:.5g}" for value in row) for n, row in data["us"].items()}
        result[op] = {"first_size": data["first_size"], "us": us}
    return result


def _filled(curve: Curve, sizes: Any) -> Any:
    """Between measured sizes log-log; beyond them the fitted line, joined to the last point."""
    inside = np.exp(np.interp(np.log(sizes), np.log(curve.sizes), np.log(curve.seconds)))
    nearest = np.clip(sizes, curve.sizes[0], curve.sizes[-1])
    fit = fit_line(curve.sizes, curve.seconds)
    return inside * fit.time(sizes) / fit.time(nearest)


def transfer_bytes(op: str, size: Any, n: int, per_node: int) -> Any:
    """Bytes through the NIC of one rank: F S / r; all_to_all S/n (n - r); send_recv S.  [HardwareProfile.scale_out_time]"""
    if op == "all_to_all":
        return size / n * max(n - per_node, 1)
    if op == "send_recv":
        return size
    return bus_factor(op, n) * size / per_node


def _moved(curve: Curve) -> Any:
    """The same for the sizes of a curve."""
    return transfer_bytes(curve.op, curve.sizes, curve.n, curve.per_node)


def network_rate(all_curves: Sequence[Curve]) -> float:
    """Bytes per second through one NIC, what every efficiency is relative to: the most that any fitted line reaches (the largest
    message holds the latency too), but at most BEYOND times the best that was measured."""
    rates = []
    for one in all_curves:
        if one.nodes > 1 and one.op in COLLECTIVES and len(one.points) > 1:
            moved = _moved(one)
            best = float(np.max(moved / one.seconds))
            rates += [best, min(1.0 / fit_line(moved, one.seconds).per_byte, BEYOND * best)]
    if not rates:
        raise PlannerError("nothing across nodes was measured")
    return max(rates)


def scale_out(all_curves: Sequence[Curve], dtype: str, bandwidth: float, source: str) -> dict[str, Any]:
    """``scale_out`` of a profile from all patterns across nodes. Raises PlannerError naming what lacks."""
    result = {}
    for op in COLLECTIVES:
        mine = [one for one in all_curves if one.op == op and one.dtype == dtype and one.nodes > 1]
        if not any(len(one.points) > 1 for one in mine):
            raise PlannerError(f"no {op} across nodes was measured at two sizes or more")
        few = sum(len(one.points) for one in mine) < FEW
        result[op] = (_one_line if few else _network)(op, mine, bandwidth, source).to_dict()
    return result


def _one_line(op: str, mine: Sequence[Curve], bandwidth: float, source: str) -> NetworkCurve:
    """A short budget leaves the ends and the middle of a curve: t = a + x/e, whatever the size."""
    curve = max(mine, key=lambda one: len(one.points))
    line = fit_line(_moved(curve) / bandwidth, curve.seconds)
    efficiency = min(1.0 / max(line.per_byte, TINY), 1.0)
    one = Segment(efficiency=efficiency, latency=line.latency, latency_per_rank=0.0, latency_per_doubling=0.0)
    return NetworkCurve(fast=one, bulk=one, source=source, errors=line.errors)


def _errors(ratio: Any) -> dict[str, float]:
    """Of fit / measured, percent."""
    off = 100.0 * np.abs(ratio - 1.0)
    return {"median_percent": round(float(np.median(off)), 2), "worst_percent": round(float(np.max(off)), 2)}


def _network(op: str, mine: Sequence[Curve], bandwidth: float, source: str) -> NetworkCurve:
    """Two protocols, t = min over both of a + x/e; latency also per rank or per doubling where several groups show it."""
    x = np.concatenate([_moved(one) / bandwidth for one in mine])
    t = np.concatenate([one.seconds for one in mine])
    n, nodes = np.array([(one.n, one.nodes) for one in mine for _ in one.points], float).T
    tree = op in ("all_reduce", "broadcast")
    grows = len(set((nodes if tree else n).tolist())) > 1

    def build(p: Any) -> NetworkCurve:
        growth = np.exp(p[4:6]) if grows else (0.0, 0.0)
        fast, bulk = (
            Segment(
                efficiency=float(1.0 / (1.0 + np.exp(-slope))), latency=float(np.exp(latency)),
                latency_per_rank=0.0 if tree else float(more), latency_per_doubling=float(more) if tree else 0.0,
            )
            for latency, slope, more in zip(p[0:2], p[2:4], growth, strict=True)
        )  # fmt: skip
        return NetworkCurve(fast=fast, bulk=bulk, source=source)

    def error(p: Any) -> Any:
        zero = np.zeros_like(x)
        return np.log(build(p).time(x, zero, n, np.maximum(nodes, 2.0), zero, 1.0) / t)

    least = max(float(np.min(t)), TINY)
    growth = [math.log(0.05 * least)] * 2 if grows else []
    starts = [[math.log(0.9 * least), math.log(k * least), 0.0, 3.0, *growth] for k in (1.0, 3.0)]
    best = min((fitted(error, start, -40.0, 12.0, scale=0.05) for start in starts), key=lambda one: one.cost)
    return replace(build(best.x), errors=_errors(np.exp(error(best.x))))


def residuals(all_curves: Sequence[Curve]) -> dict[str, list[float]]:
    """[median, 90th percentile] of |fit / measured - 1| in percent, by curve."""
    found = {}
    for one in all_curves:
        if len(one.points) >= 2:
            line = fit_line(one.sizes, one.seconds)
            name = f"{one.op} n{one.n} stride{one.stride} {one.dtype}"
            found[name] = error_of(line.time(one.sizes), one.seconds, 2)
    return found


def fit_overlap(measured: Sequence[Measured]) -> tuple[dict[str, Any], list[str]]:
    """(key of the file by link, notes). One ratio per link and direction: the median over the collectives.

    Its spread is half the interval of that median (order statistics over the collectives), or the scatter of the single
    ratios where that is more. A link with a ratio that cannot be is left out and said; the cost model then assumes one.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for link in LINKS:
        values: dict[str, float] = {}
        problems: list[str] = []
        mine = [one for one in measured if (one.point["nodes"] > 1) == (link == "across")]
        for side, name in zip(SIDES, ("gemm", "collective"), strict=True):
            ratios = of(mine, "overlap", of=name)
            if not ratios:
                continue
            over = summarise([float(one.details["slowdown"]) for one in ratios], "wall")
            own = median(float(one.details.get("spread", one.spread)) for one in ratios)
            value, spread = round(over.median, 3), round(100.0 * max(over.spread, own), 2)
            values |= {side: value, f"{side}_spread": spread}
            said = f"overlap {link}: {side} takes {value:.2f} times as long"
            if spread > VAGUE:
                problems.append(f"{said}, known to {spread:.0f} % only; not used")
            elif problem := impossible(value, spread):
                problems.append(f"{said}, {problem}; not used")
        notes += problems
        if set(SIDES) <= values.keys() and not problems:
            found[link] = MeasuredOverlap(**values).to_dict()
    return found, notes
