"""Shapes of the measured curves of a hardware profile: few constants, plain numpy, scalars or columns.

Every curve is made so that it holds outside what was measured too: a rate never passes the peak or the link, a larger
operation never takes less time, and far from the measurements the form tends to its physical limit (roofline, latency).
The constants are fitted by ``tools/build_hardware_profiles.py``, which writes their held-out errors beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from planner import arrays as npt
from planner import units
from planner.errors import PlannerError, nearest_first

Column: TypeAlias = npt.NDArray[np.float64]
"""Result of every method: float64 of the broadcast shape of the arguments (a numpy scalar for scalars)."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def column(values: npt.ArrayLike) -> Column:
    """The values as float64."""
    return np.asarray(values, dtype=np.float64)


def bus_factor(op: str, n: npt.ArrayLike) -> Column:
    """Bytes on the busiest link over the buffer size S.  [nccl-tests, PERFORMANCE.md]

    2 (n-1)/n all_reduce; (n-1)/n all_gather, reduce_scatter, all_to_all; 1 broadcast, send_recv.
    """
    n = np.maximum(column(n), 1.0)
    if op == "all_reduce":
        return 2.0 * (n - 1.0) / n
    if op in ("broadcast", "send_recv"):
        return np.ones_like(n)
    return (n - 1.0) / n


def least_factor(op: str, n: npt.ArrayLike) -> Column:
    """Bytes each GPU must receive over S, whatever the algorithm: the physical floor of the time is this x S / link.

    An all_reduce inside the switch (NVLS, SHARP) receives S once, so its *bus* bandwidth may reach 2 (n-1)/n times the
    link; every other operation receives what its bus factor counts.
    """
    return np.minimum(bus_factor(op, n), 1.0)


def checked(data: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping, if it has the required keys and no others. Raises PlannerError with the nearest key."""
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: expected a mapping of keys to values, found {type(data).__name__}")
    known = (*required, *optional)
    for key in data:
        if key not in known:
            raise PlannerError(f"{where}: unknown key '{key}'; did you mean {nearest_first(str(key), known)[0]}?")
    for key in required:
        if key not in data:
            raise PlannerError(f"{where}: the key '{key}' is missing")
    return data


def numbers(values: object, where: str, *, above: float = -np.inf) -> Column:
    """A list of finite numbers as float64, none below a bound; text of numbers between blanks is a list too.

    Raises PlannerError.
    """
    try:
        if isinstance(values, list) and values and isinstance(values[0], str):
            values = [row.split() for row in values]
        result = np.array(values.split() if isinstance(values, str) else values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlannerError(f"{where}: expected numbers, found {str(values)[:60]}") from error
    if not np.all(np.isfinite(result)):
        raise PlannerError(f"{where}: numbers must be finite")
    if result.size and float(np.min(result)) < above:
        raise PlannerError(f"{where}: {float(np.min(result)):g} must not be below {above:g}")
    return result


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A correction factor over (log M, log N, log K), interpolated linearly in the logarithms, clamped outside."""

    m: Column
    n: Column
    k: Column
    log_factor: Column
    """Logarithm of measured / model (both above the launch time) at the nodes, shape (len(m), len(n), len(k))."""

    @classmethod
    def from_dict(cls, data: object, where: str) -> Grid:
        """``percent`` holds 100 x measured / model: one row per (m, n), m outermost, one number per k."""
        entry = checked(data, where, ("m", "n", "k", "percent"))
        m, n, k = (numbers(entry[axis], f"{where} {axis}", above=1.0) for axis in ("m", "n", "k"))
        percent = numbers(entry["percent"], f"{where} percent", above=1.0)
        if percent.size != m.size * n.size * k.size:
            raise PlannerError(f"{where}: percent has {percent.size} numbers, expected {m.size} x {n.size} x {k.size}")
        return cls(m=m, n=n, k=k, log_factor=np.log(percent / 100.0).reshape(m.size, n.size, k.size))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        percent = np.round(100.0 * np.exp(self.log_factor), 6).reshape(-1, self.k.size)
        return {"m": self.m.tolist(), "n": self.n.tolist(), "k": self.k.tolist(), "percent": percent.tolist()}

    @staticmethod
    def weights(nodes: Column, x: Column) -> tuple[npt.NDArray[np.intp], Column]:
        """Index of the node below x and the fraction of the way to the next one, in the logarithm."""
        logs = np.log(nodes)
        position = np.interp(np.log(np.maximum(x, 1.0)), logs, np.arange(len(nodes), dtype=np.float64))
        below = np.minimum(position.astype(np.intp), len(nodes) - 2)
        return below, position - below

    def factor(self, m: Column, n: Column, k: Column) -> Column:
        """exp(sum over the 8 corners of weight x log_factor)."""
        im, wm = self.weights(self.m, m)
        jn, wn = self.weights(self.n, n)
        lk, wk = self.weights(self.k, k)
        _, size_n, size_k = self.log_factor.shape
        flat = self.log_factor.ravel()
        base = (im * size_n + jn) * size_k + lk
        total: Column = column(0.0)
        for di, wi in ((0, 1.0 - wm), (1, wm)):
            for dj, wj in ((0, 1.0 - wn), (1, wn)):
                corner = base + (di * size_n + dj) * size_k
                total = total + wi * wj * ((1.0 - wk) * flat[corner] + wk * flat[corner + 1])
        return np.exp(total)


@dataclass(frozen=True, kw_only=True)
class Waves:
    """Tile and wave quantisation of a chip without balanced tiles (Ampere and before)."""

    tiles: Column
    """Candidate tiles, shape (number, 2): rows and columns of the output."""
    tile_cost: Column
    """Relative cost of one FLOP in each tile (1 = the best tile), shape (number,)."""
    compute_units: float

    @classmethod
    def from_dict(cls, data: object, where: str) -> Waves:
        """``tiles`` as pairs, ``tile_cost`` beside them."""
        entry = checked(data, where, ("tiles", "tile_cost", "compute_units"))
        tiles = numbers(entry["tiles"], f"{where} tiles", above=1.0).reshape(-1, 2)
        cost = numbers(entry["tile_cost"], f"{where} tile_cost", above=1.0)
        return cls(tiles=tiles, tile_cost=cost, compute_units=float(entry["compute_units"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return {
            "tiles": self.tiles.tolist(),
            "tile_cost": self.tile_cost.tolist(),
            "compute_units": self.compute_units,
        }

    def area(self, m: Column, n: Column) -> Column:
        """Output elements that the chip works through for M x N: min over tiles of cost x ceil(T/U) U x tile area.

        T = ceil(M/tm) ceil(N/tn) tiles on U compute units; the library picks the best tile. Where T <= U the library
        splits K instead, and what that loses is in the saturation constants: M N. Grows with M and N.
        """
        m, n = m[..., None], n[..., None]
        tiles_needed = np.ceil(m / self.tiles[:, 0]) * np.ceil(n / self.tiles[:, 1])
        area = np.ceil(tiles_needed / self.compute_units) * self.compute_units * self.tiles[:, 0] * self.tiles[:, 1]
        area = np.where(tiles_needed <= self.compute_units, m * n, area)
        best: Column = np.min(self.tile_cost * area, axis=-1)
        return best


@dataclass(frozen=True, kw_only=True)
class GemmCurve:
    """Time of one dense GEMM of output M x N and reduction K.

    t = t0 + r(M,N,K) max(2 (A + m0 N + n0 M + m0 n0)(K + k0) / (P e), bytes / (W u)) + q M K / W, never below 2MNK / P;
    q only where the activation is quantised first, P peak, W memory bandwidth, A = M N, or the area with tiles and waves
    (``Waves``), r residual grid (1 without one).
    With A = M N the first term is 2MNK/(P e) (1 + m0/M)(1 + n0/N)(1 + k0/K).
    """

    peak_name: str
    """Key of peak_flops that bounds it."""
    operand_bytes: float
    """Bytes per element of both inputs as the tensor core reads them."""
    quantise: bool
    """The measured time includes reading the 2-byte activation (M x K) and writing it quantised."""
    quantise_traffic: float = 0.0
    """What that costs: q bytes per element of the activation at the nominal bandwidth, q M K / W."""
    efficiency: float
    m0: float
    n0: float
    k0: float
    memory_efficiency: float
    launch: float
    """t0, seconds."""
    grid: Grid | None = None
    waves: Waves | None = None
    grouped_m0: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Saturation in tokens per group of a grouped GEMM: forward, dgrad, wgrad."""
    grouped_efficiency: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Rate of a large grouped GEMM over the rate of a large dense one: forward, dgrad, wgrad."""
    accumulate: float = 0.0
    """Part of the traffic of accumulating a weight gradient, at the nominal bandwidth, that its GEMM does not hide."""
    errors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: object, where: str) -> GemmCurve:
        """From a mapping with the names of the fields; ``launch`` has a unit."""
        constants = ("efficiency", "m0", "n0", "k0", "memory_efficiency")
        triples = ("grouped_m0", "grouped_efficiency")
        required = ("peak_name", "operand_bytes", "quantise", *constants, "launch")
        entry = checked(data, where, required, (*triples, "accumulate", "quantise_traffic", "grid", "waves", "errors"))
        values: dict[str, Any] = {
            key: float(numbers(entry[key], f"{where} {key}", above=0.0)) for key in ("operand_bytes", *constants)
        }
        for key in triples:
            if key in entry:
                values[key] = tuple(numbers(entry[key], f"{where} {key}", above=0.0).tolist())
        for key in ("accumulate", "quantise_traffic"):
            if key in entry:
                values[key] = float(numbers(entry[key], f"{where} {key}", above=0.0))
        return cls(
            peak_name=str(entry["peak_name"]),
            quantise=bool(entry["quantise"]),
            launch=units.parse(entry["launch"], "seconds", what=f"{where} launch"),
            grid=Grid.from_dict(entry["grid"], f"{where} grid") if "grid" in entry else None,
            waves=Waves.from_dict(entry["waves"], f"{where} waves") if "waves" in entry else None,
            errors=dict(entry.get("errors", {})),
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        names = ("peak_name", "operand_bytes", "quantise", "efficiency", "m0", "n0", "k0", "memory_efficiency")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data["launch"] = f"{self.launch!r} s"
        data |= {name: list(getattr(self, name)) for name in ("grouped_m0", "grouped_efficiency")}
        data |= {"accumulate": self.accumulate, "quantise_traffic": self.quantise_traffic}
        data["errors"] = self.errors
        data |= {
            name: part.to_dict() for name, part in (("grid", self.grid), ("waves", self.waves)) if part is not None
        }
        return data

    def without_quantisation(self, plain: GemmCurve) -> GemmCurve:
        """The GEMM alone, on inputs that are quantised already: one kernel, launched as ``plain``, that of bf16."""
        if not self.quantise:
            return self
        return replace(self, quantise=False, launch=min(self.launch, plain.launch))

    def bytes_moved(self, m: Column, n: Column, k: Column) -> Column:
        """Inputs once, output of 2 bytes once."""
        return self.operand_bytes * (m * k + n * k) + 2.0 * m * n

    def time(self, m: Column, n: Column, k: Column, peak: float, bandwidth: float) -> Column:
        """Seconds of one GEMM; the equation is in the class."""
        flop = 2.0 * m * n * k
        area = m * n if self.waves is None else self.waves.area(m, n)
        outputs = area + self.m0 * n + self.n0 * m + self.m0 * self.n0
        compute = 2.0 * outputs * (k + self.k0) / (peak * self.efficiency)
        memory = self.bytes_moved(m, n, k) / (bandwidth * self.memory_efficiency)
        work = np.maximum(compute, memory)
        if self.grid is not None:
            work = work * self.grid.factor(m, n, k)
        if self.quantise:
            work = work + self.quantise_traffic * m * k / bandwidth
        return np.maximum(self.launch + work, flop / peak)

    def grouped_time(
        self, tokens: Column, m: Column, n: Column, k: Column, groups: Column, which: int, peak: float,
        bandwidth: float, gradient_bytes: float = 4.0,
    ) -> Column:  # fmt: skip
        """Seconds of ``groups`` equal GEMMs of M x N x K in one kernel; ``which`` 0 forward, 1 dgrad, 2 wgrad.

        t = t0 + max(g 2MNK / (P e e_g) (1 + m_g/T)(1 + n0/N)(1 + k0/K), g bytes / (W u)), T tokens per group; in wgrad
        T is the reduction, and the gradient is accumulated: 2 ``gradient_bytes`` per weight, less the 2 of the output.
        m_g was measured with fp32 gradients; what it exceeds that of dgrad by is this traffic, and shrinks with it.
        """
        flop = 2.0 * m * n * k * groups
        accumulated = 2.0 * gradient_bytes - 2.0
        filling = self.grouped_m0[which]
        if which == 2:
            filling = self.grouped_m0[1] + (filling - self.grouped_m0[1]) * accumulated / 6.0
        saturation = (1.0 + filling / tokens) * (1.0 + self.n0 / n)
        saturation = saturation * (1.0 + (0.0 if which == 2 else self.k0) / k)
        compute = flop / (peak * self.efficiency * self.grouped_efficiency[which]) * saturation
        traffic = self.bytes_moved(m, n, k) + (accumulated * m * n if which == 2 else 0.0)
        memory = groups * traffic / (bandwidth * self.memory_efficiency)
        quantised = groups * self.quantise_traffic * m * k / bandwidth if self.quantise else 0.0
        return np.maximum(self.launch + np.maximum(compute, memory) + quantised, flop / peak)


@dataclass(frozen=True, kw_only=True)
class AttentionCurve:
    """Time of one attention kernel: t = t0 + F / (P e) (1 + s0/S) max(1, c U / T), and never below F / P.

    F FLOP, S the keys that a query sees on average (s/2 when causal), U compute units, T = batch x heads x ceil(s/128)
    tiles: few heads leave units idle. The constants are columns over the head size (mean of that of keys and of values:
    160 is MLA's 192 and 128), interpolated linearly between the measured sizes.
    """

    head_dims: Column
    launch: Column
    """t0, seconds."""
    efficiency: Column
    s0: Column
    c: Column
    errors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: object, where: str) -> AttentionCurve:
        """From a mapping: head_dims and, per head size, launch_us, efficiency, s0 and c."""
        names = ("head_dims", "launch_us", "efficiency", "s0", "c")
        entry = checked(data, where, ("kernel", "dtype", "pass", *names), ("errors",))
        values = {name: np.atleast_1d(numbers(entry[name], f"{where} {name}", above=0.0)) for name in names}
        if len({value.size for value in values.values()}) != 1:
            raise PlannerError(f"{where}: {', '.join(names)} must have equal lengths")
        launch = values.pop("launch_us") * 1e-6
        return cls(launch=launch, errors=dict(entry.get("errors", {})), **values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back (kernel, dtype and pass are the caller's)."""
        data = {name: getattr(self, name).tolist() for name in ("head_dims", "efficiency", "s0", "c")}
        return {**data, "launch_us": (self.launch * 1e6).round(9).tolist(), "errors": self.errors}

    def time(self, flop: Column, span: Column, tiles: Column, head_dim: Column, peak: float, units: float) -> Column:
        """Seconds; the equation is in the class."""
        launch, efficiency, s0, c = (
            np.interp(head_dim, self.head_dims, values) for values in (self.launch, self.efficiency, self.s0, self.c)
        )
        idle = np.maximum(1.0, c * units / np.maximum(tiles, 1.0))
        return np.maximum(launch + flop / (peak * efficiency) * (1.0 + s0 / np.maximum(span, 1.0)) * idle, flop / peak)


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """Measured times of one collective inside one domain, over (log2 size, log2 group)."""

    op: str
    sizes: Column
    """Buffer sizes S in bytes, increasing powers of two."""
    groups: Column
    """Group sizes that were measured, increasing, from 2."""
    seconds: Column
    """Shape (len(groups), len(sizes)), never decreasing along the size."""

    @classmethod
    def from_dict(cls, op: str, data: object, where: str) -> CollectiveCurve:
        """``us`` maps the group size to microseconds, one per octave from ``first_size``.

        Measured times that fall with the size are lifted to the longest before them: noise must not reward more bytes.
        """
        entry = checked(data, where, ("first_size", "us"))
        first = units.parse(entry["first_size"], "bytes", what=f"{where} first_size")
        rows = entry["us"]
        if not isinstance(rows, dict) or not rows:
            raise PlannerError(f"{where}: us must map group sizes to lists of microseconds")
        groups = numbers(sorted(rows), f"{where} group sizes", above=2.0)
        lists = [numbers(rows[key], f"{where} us {key}", above=1e-3) for key in sorted(rows)]
        if len({row.size for row in lists}) != 1 or lists[0].ndim != 1 or lists[0].size < 2:
            raise PlannerError(f"{where}: us must map group sizes to lists of equal length, two numbers or more")
        us = np.stack(lists)
        sizes: Column = first * np.exp2(np.arange(us.shape[1], dtype=np.float64))
        return cls(op=op, sizes=sizes, groups=groups, seconds=np.maximum.accumulate(us * 1e-6, axis=1))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        rows = (self.seconds * 1e6).round(6).tolist()
        us = {int(group): row for group, row in zip(self.groups, rows, strict=True)}
        return {"first_size": f"{float(self.sizes[0])!r} B", "us": us}

    def latency(self) -> Column:
        """Time of the smallest message per group size."""
        result: Column = self.seconds[:, 0]
        return result

    def bus_bandwidth(self) -> Column:
        """Bus bandwidth of the largest message per group size, bytes/s."""
        result: Column = bus_factor(self.op, self.groups) * self.sizes[-1] / self.seconds[:, -1]
        return result

    def with_link(self, ratio: float) -> CollectiveCurve:
        """The same curve on a link of ``ratio`` times the bandwidth: all but the latency scales."""
        latency = self.seconds[:, :1]
        return replace(self, seconds=latency + (self.seconds - latency) / ratio)

    def time(self, size: Column, n: Column) -> Column:
        """Seconds, log-log between the measured points; 0 for a group of one or no bytes.

        Above the largest size the last bus bandwidth holds, below the smallest the latency. Above the largest group the
        volume grows with the bus factor, the latency with n (all_reduce: with log2 n, it is a tree there).
        """
        n_in = np.clip(n, self.groups[0], self.groups[-1])
        rows = np.log(self.seconds)
        log_size = np.log2(np.maximum(size, 1.0))
        log_sizes = np.log2(self.sizes)
        position = np.interp(log_size, log_sizes, np.arange(len(log_sizes), dtype=np.float64))
        below = np.minimum(position.astype(np.intp), len(log_sizes) - 2)
        fraction = position - below
        group_position = np.interp(np.log2(n_in), np.log2(self.groups), np.arange(len(self.groups), dtype=np.float64))
        if len(self.groups) == 1:
            log_time = (1.0 - fraction) * rows[0, below] + fraction * rows[0, below + 1]
        else:
            lower = np.minimum(group_position.astype(np.intp), len(self.groups) - 2)
            share = group_position - lower
            log_time = (1.0 - share) * ((1.0 - fraction) * rows[lower, below] + fraction * rows[lower, below + 1])
            log_time = log_time + share * (
                (1.0 - fraction) * rows[lower + 1, below] + fraction * rows[lower + 1, below + 1]
            )
        time = np.exp(log_time) * np.maximum(size / self.sizes[-1], 1.0)
        time = self._beyond(time, n, n_in)
        return np.where((n <= 1.0) | (size <= 0.0), 0.0, time)

    def _beyond(self, time: Column, n: Column, n_in: Column) -> Column:
        """Groups larger than measured (and, for one measured group, smaller): volume and latency by their laws."""
        latency = np.interp(n_in, self.groups, self.latency())
        n = np.maximum(n, 2.0)
        growth = np.log2(n) / np.log2(n_in) if self.op == "all_reduce" else n / n_in
        growth = np.ones_like(n) if self.op == "send_recv" else growth
        volume = bus_factor(self.op, n) / bus_factor(self.op, n_in)
        return np.maximum(time - latency, 0.0) * volume + latency * growth


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One protocol of a collective across nodes: a straight line in the bytes."""

    efficiency: float
    """Bus bandwidth over the line rate of the NICs that the group has in a node."""
    latency: float
    latency_per_rank: float
    latency_per_doubling: float

    def stretched(self, factor: float) -> Segment:
        """The line with its latencies multiplied."""
        return replace(self, latency=self.latency * factor, latency_per_rank=self.latency_per_rank * factor,
                       latency_per_doubling=self.latency_per_doubling * factor)  # fmt: skip

    def latency_of(self, n: Column, nodes: Column) -> Column:
        """a = latency + per_rank (n - 1) + per_doubling log2(nodes), seconds: rings grow with n, trees with log2."""
        return self.latency + self.latency_per_rank * (n - 1.0) + self.latency_per_doubling * np.log2(nodes)

    @classmethod
    def from_dict(cls, data: object, where: str) -> Segment:
        """From a mapping with the names of the fields; latencies have units."""
        times = ("latency", "latency_per_rank", "latency_per_doubling")
        entry = checked(data, where, ("efficiency", *times))
        values = {key: units.parse(entry[key], "seconds", what=f"{where} {key}") for key in times}
        efficiency = float(numbers(entry["efficiency"], f"{where} efficiency", above=0.0))
        if not 0 < efficiency <= 1:
            raise PlannerError(
                f"{where}: efficiency {efficiency:g} is above the line rate of the NICs; it must be in 0..1"
            )
        return cls(efficiency=efficiency, **values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        times = ("latency", "latency_per_rank", "latency_per_doubling")
        return {"efficiency": self.efficiency, **{key: f"{getattr(self, key)!r} s" for key in times}}


@dataclass(frozen=True, kw_only=True)
class NetworkCurve:
    """Time of one collective across nodes: t = min over two protocols of a + x / e, x = F S / line rate.

    NCCL switches from a protocol of low latency and low bandwidth (``fast``, LL) to one of high latency and bandwidth
    (``bulk``, Simple); two lines fit the measured sweeps to 4 percent (median), one line to 11.
    """

    fast: Segment
    bulk: Segment
    two_nodes: float | None = None
    """Efficiency of bulk on exactly two whole nodes where measured (NVLS tree, may pass 1); never extrapolated."""
    inside: tuple[float, float, float] = (1.0, 0.0, 1.0)
    """Part of the bus bandwidth inside a rack that is left across racks: on two, loss per doubling, least."""
    source: str = ""
    """Cluster the constants were fitted on."""
    errors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: object, where: str) -> NetworkCurve:
        """From a mapping with ``fast`` and ``bulk``."""
        entry = checked(data, where, ("fast", "bulk"), ("two_nodes", "inside", "source", "errors"))
        two = entry.get("two_nodes")
        inside = numbers(entry.get("inside", [1.0, 0.0, 1.0]), f"{where} inside", above=0.0)
        if inside.shape != (3,) or inside[2] <= 0 or inside[0] < inside[2]:
            raise PlannerError(
                f"{where}: inside holds three numbers: share on two domains, loss per doubling, least share"
            )
        return cls(
            inside=(float(inside[0]), float(inside[1]), float(inside[2])),
            fast=Segment.from_dict(entry["fast"], f"{where} fast"),
            bulk=Segment.from_dict(entry["bulk"], f"{where} bulk"),
            two_nodes=None if two is None else float(numbers(two, f"{where} two_nodes", above=0.01)),
            source=str(entry.get("source", "")),
            errors=dict(entry.get("errors", {})),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back."""
        return {"fast": self.fast.to_dict(), "bulk": self.bulk.to_dict(), "two_nodes": self.two_nodes,
                "inside": list(self.inside), "source": self.source, "errors": self.errors}  # fmt: skip

    def stretched(self, factor: float) -> NetworkCurve:
        """The curve with all latencies multiplied."""
        return replace(self, fast=self.fast.stretched(factor), bulk=self.bulk.stretched(factor))

    def with_share(self, factor: float) -> NetworkCurve:
        """The curve with the shares of the line rate multiplied."""
        two = None if self.two_nodes is None else self.two_nodes * factor
        fast, bulk = (replace(line, efficiency=line.efficiency * factor) for line in (self.fast, self.bulk))
        return replace(self, fast=fast, bulk=bulk, two_nodes=two)

    def time(self, transfer: Column, floor: Column, n: Column, nodes: Column, whole: Column, stretch: float) -> Column:
        """Seconds. ``transfer`` x at line rate; ``floor`` the transfer inside the nodes, which bounds both protocols.

        ``whole`` is true where the group has every GPU of its nodes; ``stretch`` multiplies the latencies.
        """
        bulk = column(self.bulk.efficiency)
        if self.two_nodes is not None:
            bulk = np.where((nodes == 2.0) & (whole > 0), self.two_nodes, bulk)
        floor = floor / np.maximum(self.inside[0] - self.inside[1] * np.log2(nodes / 2.0), self.inside[2])
        slow_start = stretch * self.fast.latency_of(n, nodes) + np.maximum(transfer / self.fast.efficiency, floor)
        return np.minimum(slow_start, stretch * self.bulk.latency_of(n, nodes) + np.maximum(transfer / bulk, floor))
