"""One accelerator with its node and network, as measured: peaks, memory, prices and curves.

A profile is a file in ``profiles/hardware`` (or a user's own); every number there has a unit and a source. All methods
take scalars or columns of numpy and broadcast; they return float64 seconds of a **short burst** on an idle machine:
divide compute by ``sustained_clock`` for a training step. Nothing here knows about layouts or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner import arrays as npt
from planner import library, units
from planner.curves import (
    COLLECTIVES,
    AttentionCurve,
    CollectiveCurve,
    Column,
    GemmCurve,
    NetworkCurve,
    bus_factor,
    column,
    least_factor,
)
from planner.errors import PlannerError, UnknownNameError, nearest_first, shown

PASSES = ("forward", "dgrad", "wgrad")
MEMORY_OPS = (
    "norm_forward", "norm_backward", "elementwise", "swiglu", "rope", "cross_entropy", "optimizer", "quantize",
    "permute", "copy",
)  # fmt: skip
FAMILIES = ("gemm", "attention", "memory", "scale_up", "scale_out")
_QUANTITIES = {
    "memory": "bytes", "usable_memory": "bytes", "memory_bandwidth": "bytes/s", "scale_up_bandwidth": "bytes/s",
    "network_bandwidth": "bytes/s", "network_latency": "seconds", "pcie_bandwidth": "bytes/s", "host_memory": "bytes",
    "host_memory_bandwidth": "bytes/s", "launch_floor": "seconds", "graph_launch_floor": "seconds", "tdp": "watts",
    "context_memory": "bytes", "communicator_memory": "bytes", "expert_communicator_memory": "bytes",
    "workspace_memory": "bytes",
}  # fmt: skip
_COUNTS = ("compute_units", "gpus_per_node", "scale_up_domain")
_FACTORS = ("sustained_clock", "cpu_adam_bandwidth_fraction")
_TEXTS = ("name", "device", "vendor", "arch")
_OPTIONAL = (
    "prices",
    "sources",
    "notes",
    "unverified",
    "curves_from",
    "gemm_efficiency",
    "attention_efficiency",
    "kernels",
    "precise_accumulation",
)
SCALES: dict[str, str] = {
    "sustained_clock": "rate of tensor-core work in a training run",
    "memory_fraction": "share of the memory bandwidth that memory-bound operations reach",
    "scale_up": "bandwidth of collectives inside a node, their latency kept",
    "scale_out": "share of the NICs' line rate that collectives across nodes reach",
    "network_latency": "latencies across nodes",
}
"""What ``scale`` in a file that extends a profile may multiply: what a machine achieves, not what its parts are."""
_CURVES = ("gemm", "attention", "memory_fraction", "scale_up", "scale_out")
_DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0}
_LINK_TOLERANCE = 1.02  # timers and 1000-against-1024 rounding in published tables


@dataclass(frozen=True, kw_only=True)
class Price:
    """One dated price of one GPU for one hour."""

    usd_per_hour: float
    """Dollars; the middle of a published range."""
    kind: str
    """on-demand, spot, median, range, ..."""
    date: str
    """When it was read."""
    source: str
    """Where it was read."""


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One accelerator, its node and its network. Bytes, bytes/s, FLOP/s, seconds; bandwidths in one direction."""

    name: str
    """File name in the library."""
    device: str
    """The vendor's name of the part."""
    vendor: str
    """NVIDIA, AMD, Intel."""
    arch: str
    """Generation."""
    compute_units: float
    """Streaming multiprocessors or compute units: what tiles are dealt to."""
    peak_flops: dict[str, float]
    """Dense peak by dtype (bf16, fp16, fp32, tf32, fp8, fp4), FLOP/s."""
    memory: float
    """Nominal memory, bytes."""
    usable_memory: float
    """Total that the runtime reports, before any context, bytes."""
    memory_bandwidth: float
    """Nominal, bytes/s."""
    gpus_per_node: float
    """GPUs in one host."""
    scale_up_bandwidth: float
    """NVLink or like, bytes/s per GPU; PCIe where there is none."""
    scale_up_domain: float
    """GPUs in one NVLink domain: 8 in a box, 72 in a rack, 2 with bridges, 1 where only PCIe joins them."""
    network_bandwidth: float
    """Line rate of the NICs per GPU, bytes/s."""
    network_latency: float
    """Smallest message between two nodes, seconds: the scale for the latencies of scale_out_time."""
    pcie_bandwidth: float
    """Between one GPU and its host, bytes/s."""
    host_memory: float
    """Per node, bytes; an assumption that a user should replace."""
    host_memory_bandwidth: float
    """Per node, all sockets, bytes/s; an assumption likewise."""
    cpu_adam_bandwidth_fraction: float
    """Part of host_memory_bandwidth that an optimizer step on the CPU reaches (28 bytes per parameter)."""
    sustained_clock: float
    """Rate in a training run over the rate in a short burst (power limit)."""
    launch_floor: float
    """Seconds per kernel back to back in a stream."""
    graph_launch_floor: float
    """The same inside a CUDA graph."""
    tdp: float
    """Board power limit, watts."""
    context_memory: float
    """Driver context, kernels and runtime, bytes per process."""
    communicator_memory: float
    """Buffers of one NCCL communicator, bytes per process."""
    expert_communicator_memory: float
    """Buffers of a communicator that runs all-to-all (p2p connections to every peer), bytes."""
    workspace_memory: float
    """cuBLAS and cuBLASLt workspaces, bytes per process."""
    gemm: dict[str, GemmCurve]
    """By recipe: bf16, fp8 (per-tensor, dynamic), fp8_block, nvfp4."""
    attention: dict[tuple[str, str, str], AttentionCurve]
    """By (kernel, dtype, pass)."""
    kernels: dict[str, Any]
    """Attention kernels that are the best one, and ``slowdown`` of those known only relative to the best."""
    memory_fraction: dict[str, float]
    """Part of memory_bandwidth that each class of memory-bound operation reaches."""
    scale_up: dict[str, CollectiveCurve]
    """Measured collectives inside one domain."""
    scale_out: dict[str, NetworkCurve]
    """Constants of collectives across nodes."""
    measured: dict[str, str]
    """Per family (gemm, attention, memory, scale_up, scale_out): "measured" or "scaled from <profile>"."""
    precise_accumulation: dict[str, float] = field(default_factory=dict)
    """By recipe: time of a GEMM whose partial sums are promoted to fp32 registers (all but the forward pass in training)
    over its time when they are not (what was measured). Only tensor cores that add up in fewer bits need it."""
    prices: tuple[Price, ...] = ()
    """Dated prices."""
    unverified: tuple[str, ...] = ()
    """Fields that come from general knowledge and were not checked in a document."""
    notes: tuple[str, ...] = ()
    """What a user should know."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Where the numbers come from: repository, commit, licence."""

    # ------------------------------------------------------------------------------------------------ compute

    def peak(self, dtype: str) -> float:
        """Dense peak of a dtype or GEMM recipe, FLOP/s. Raises PlannerError when the device has none."""
        key = {"fp8_block": "fp8", "nvfp4": "fp4"}.get(dtype, dtype)
        if key in ("bf16", "fp16") and key not in self.peak_flops:
            key = {"bf16": "fp16", "fp16": "bf16"}[key]  # Volta has no bf16, Gaudi is listed without fp16
        if key not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise PlannerError(f"{self.name} has no {key} tensor cores; choose one of {known}")
        return self.peak_flops[key]

    def gemm_curve(self, dtype: str) -> GemmCurve:
        """The curve of a recipe; bf16 stands in for a dtype without one (its rate then scales with the peak)."""
        self.peak(dtype)
        recipe = {"fp4": "nvfp4", "fp16": "bf16"}.get(dtype, dtype)
        if recipe in self.gemm:
            return self.gemm[recipe]
        return replace(self.gemm["bf16"], operand_bytes=_DTYPE_BYTES.get(dtype, 1.0 if "8" in dtype else 2.0))

    def sustained_flops(self, dtype: str) -> float:
        """Rate of a large GEMM (16384 in each dimension) in a training run, FLOP/s: burst rate x sustained_clock."""
        size = 16384.0
        return float(2.0 * size**3 / self.gemm_time(size, size, size, dtype)) * self.sustained_clock

    def gemm_time(
        self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, dtype: str = "bf16", pass_: str = "forward",
        quantised: bool = False, gradient_bytes: float = 4.0,
    ) -> Column:  # fmt: skip
        """Seconds of one GEMM of a linear layer with m tokens, n outputs and k inputs.

        m, n, k are the *forward* dimensions Y[m,n] = X[m,k] W[n,k]^T, whatever the pass: dgrad runs (m, k, n), wgrad
        runs (n, k, m). Equation: ``curves.GemmCurve``. fp8, fp8_block and nvfp4 include the dynamic quantisation of the
        activation, unless the inputs are ``quantised``.

        wgrad adds its product to a gradient of g bytes per weight: it reads and writes 2 g n k where a plain GEMM
        writes 2 n k, and a part c of that is not hidden: t += c (2 g - 2) n k / W.  [``GemmCurve.accumulate``]
        dgrad and wgrad in per-tensor fp8 promote partial sums to fp32 registers: ``precise_accumulation``.
        """
        which = _index(pass_, PASSES, "pass")
        return column(self.gemm_times(m, n, k, dtype, quantised, gradient_bytes)[which])[()]

    def gemm_times(
        self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, dtype: str = "bf16", quantised: bool = False,
        gradient_bytes: float = 4.0,
    ) -> Column:  # fmt: skip
        """Seconds of all three passes of a GEMM, forward, dgrad and wgrad first: ``gemm_time`` at a third of its cost."""
        curve, peak = self.gemm_curve(dtype), self.peak(dtype)
        if quantised:
            curve = curve.without_quantisation(self.gemm["bf16"])
        tokens, outputs, inputs = np.broadcast_arrays(*(np.maximum(column(x), 1.0) for x in (m, n, k)))
        rows, columns = np.stack([tokens, tokens, outputs]), np.stack([outputs, inputs, inputs])
        depth = np.stack([inputs, outputs, tokens])
        time = np.asarray(curve.time(rows, columns, depth, peak, self.memory_bandwidth))
        time[1:] *= self.precise_accumulation.get(dtype, 1.0)
        time[2] += curve.accumulate * (2.0 * gradient_bytes - 2.0) * outputs * inputs / self.memory_bandwidth
        return time

    def grouped_gemm_time(
        self,
        tokens_per_group: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        groups: npt.ArrayLike,
        dtype: str = "bf16",
        pass_: str = "forward",
        quantised: bool = False,
        gradient_bytes: float = 4.0,
    ) -> Column:
        """Seconds of one grouped GEMM of MoE experts: ``groups`` experts of (tokens_per_group, n, k) in one kernel.

        n, k are the forward dimensions as in ``gemm_time``. Equation: ``GemmCurve.grouped_time``. Tokens are taken as
        equal in all groups: for a skewed router give the tokens of the busiest rank. Zero groups or tokens: 0.
        """
        which = _index(pass_, PASSES, "pass")
        curve, peak = self.gemm_curve(dtype), self.peak(dtype)
        if quantised:
            curve = curve.without_quantisation(self.gemm["bf16"])
        count = column(groups)
        tokens, outputs, inputs = (np.maximum(column(x), 1.0) for x in (tokens_per_group, n, k))
        rows, columns, depth = ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens))[which]
        time = curve.grouped_time(
            tokens, rows, columns, depth, count, which, peak, self.memory_bandwidth, gradient_bytes
        )
        if which:
            time = time * self.precise_accumulation.get(dtype, 1.0)
        return np.where((column(tokens_per_group) <= 0.0) | (count <= 0.0), 0.0, time)[()]

    def attention_time(
        self,
        batch: npt.ArrayLike,
        heads: npt.ArrayLike,
        kv_heads: npt.ArrayLike,
        head_dim: npt.ArrayLike,
        seq_q: npt.ArrayLike,
        seq_kv: npt.ArrayLike,
        causal: bool = True,
        pass_: str = "forward",
        dtype: str = "bf16",
        window: npt.ArrayLike = 0,
        value_dim: npt.ArrayLike = 0,
        kernel: str = "best",
    ) -> Column:
        """Seconds of one attention kernel, forward or backward (without the projections).

        FLOP = 2 b a pairs (d + d_v) forward, 2.5 x that backward [Dao 2022, FlashAttention]; pairs = s_q s_kv, half of
        it when causal, min(w, s) keys per query with a window of w (0 = none). Equation: ``curves.AttentionCurve``.
        ``value_dim`` 0 means head_dim (MLA: 192 and 128). ``kernel`` is "best", "fa2", "fa3" or "cudnn". kv_heads do
        not change the FLOP; their traffic is hidden behind compute at training lengths and is left out.
        """
        which = _index(pass_, ("forward", "backward"), "attention pass")
        batch, heads, d, s_q, s_kv, w, d_v = (
            column(x) for x in (batch, heads, head_dim, seq_q, seq_kv, window, value_dim)
        )
        d_v = np.where(d_v > 0.0, d_v, d)
        keys = np.where(w > 0.0, np.minimum(w, s_kv), s_kv)
        pairs = s_q * keys - (0.5 * keys * keys * np.minimum(s_q / s_kv, 1.0) if causal else 0.0)
        flop = 2.0 * batch * heads * pairs * (d + d_v) * (1.0, 2.5)[which]
        tiles = batch * heads * np.ceil(s_q / 128.0)
        curve, peak, slowdown = self._attention_curve(kernel, dtype, pass_)
        span = pairs / np.maximum(s_q, 1.0)
        return column(slowdown * curve.time(flop, span, tiles, 0.5 * (d + d_v), peak, self.compute_units))[()]

    def _attention_curve(self, kernel: str, dtype: str, pass_: str) -> tuple[AttentionCurve, float, float]:
        """Curve, peak and slowdown of a kernel; a dtype without its own curve runs on the bf16 one at the bf16 peak."""
        dtype = "bf16" if dtype in ("fp16", "bf16") or ("best", dtype, pass_) not in self.attention else dtype
        peak = self.peak(dtype)
        if (kernel, dtype, pass_) in self.attention:
            return self.attention[kernel, dtype, pass_], peak, 1.0
        slowdown = self.kernels.get("slowdown", {}).get(kernel)
        if slowdown is None and kernel not in self.kernels.get("same_as_best", ()):
            known = ["best", *self.kernels.get("same_as_best", ()), *self.kernels.get("slowdown", {})]
            raise UnknownNameError(f"attention kernel of {self.name}", kernel, known)
        return self.attention["best", dtype, pass_], peak, 1.0 if slowdown is None else float(slowdown[pass_])

    def memory_time(self, bytes_moved: npt.ArrayLike, op: str = "elementwise") -> Column:
        """Seconds to move bytes to and from memory: bytes / (W u), u the fraction of the operation's class.

        Classes: norm_forward, norm_backward, elementwise, swiglu, rope, cross_entropy, optimizer, quantize, permute,
        copy. bytes = what the algorithm must read and write; the launch floor is left to the caller.
        """
        fraction = self.memory_fraction[MEMORY_OPS[_index(op, MEMORY_OPS, "memory-bound operation")]]
        return (column(bytes_moved) / (self.memory_bandwidth * fraction))[()]

    # ------------------------------------------------------------------------------------------------ collectives

    def scale_up_time(self, op: str, size: npt.ArrayLike, n: npt.ArrayLike) -> Column:
        """Seconds of a collective of n GPUs inside one NVLink domain, or over PCIe in a box without one.

        ``op`` all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_recv; ``size`` is the full buffer S
        of nccl-tests: bytes of the reduced tensor, of the gathered result, of one rank's whole input to the exchange.
        n = 1 or size 0: 0. Equation: ``curves.CollectiveCurve``; never faster than the link.
        """
        curve = self.scale_up[COLLECTIVES[_index(op, COLLECTIVES, "collective")]]
        size, n = np.broadcast_arrays(column(size), column(n))
        link = np.where(
            n <= self.scale_up_domain, self.scale_up_bandwidth, min(self.pcie_bandwidth, self.scale_up_bandwidth)
        )
        floor = np.where(n > 1.0, least_factor(op, n) * size / link, 0.0)
        return np.maximum(curve.time(size, n), floor)[()]

    def scale_out_time(
        self,
        op: str,
        size: npt.ArrayLike,
        n: npt.ArrayLike,
        ranks_per_node: npt.ArrayLike,
        bandwidth: float | None = None,
        latency: float | None = None,
    ) -> Column:
        """Seconds of a collective of n ranks, ``ranks_per_node`` of them in each node (in each rack of an NVL72).

        t = min over two protocols of a + x/e  (``curves.NetworkCurve``), x = F S / (r b) with r = ranks_per_node and b
        the NIC of one GPU: a strided group owns only its ranks' NICs, its neighbours use the others at the same time.
        all_to_all: x = S/n (n - r)/b. Never below the same transfer at the bus bandwidth inside a node. ``bandwidth``
        and ``latency`` replace network_bandwidth (per GPU) and network_latency. A group in one node: scale_up_time.
        """
        curve = self.scale_out[COLLECTIVES[_index(op, COLLECTIVES, "collective")]]
        network = self.network_bandwidth if bandwidth is None else bandwidth
        stretch = 1.0 if latency is None else latency / self.network_latency
        size, n, r = np.broadcast_arrays(column(size), column(n), np.maximum(column(ranks_per_node), 1.0))
        many = np.maximum(n, 2.0)
        nodes = np.maximum(np.ceil(n / r), 2.0)
        if op == "all_to_all":
            transfer = size / many * np.maximum(many - r, 1.0) / network
        elif op == "send_recv":
            transfer = size / network
        else:
            transfer = bus_factor(op, many) * size / (r * network)
        whole = column(r >= self.gpus_per_node)
        time = curve.time(transfer, self._inside_transfer(op, size, many, r), many, nodes, whole, stretch)
        time = np.where(n <= r, self.scale_up_time(op, size, np.minimum(n, r)), time)
        return np.where((n <= 1.0) | (size <= 0.0), 0.0, time)[()]

    def _inside_transfer(self, op: str, size: Column, n: Column, r: Column) -> Column:
        """What the same collective still moves inside a node, at the bus bandwidth of the largest measured group."""
        bus = float(np.max(self.scale_up[op].bus_bandwidth()))
        if op == "all_to_all":
            return size / n * (np.minimum(r, n) - 1.0) / bus
        if op == "send_recv":
            return np.zeros_like(size)
        ring = bus_factor(op, n) * size / bus
        return np.where(r > 1.0, ring, least_factor(op, n) * size / self.scale_up_bandwidth)

    # ------------------------------------------------------------------------------------------------ changes

    def scaled(self, **factors: float) -> HardwareProfile:
        """A profile with some quantities multiplied: ``scaled(network_bandwidth=2)``; peak_flops means all dtypes.

        Curves follow: rates and fractions are relative to the peaks, and collectives keep their latency.
        """
        changes: dict[str, Any] = {}
        for key, factor in factors.items():
            if key not in (*_QUANTITIES, "peak_flops"):
                nearest = nearest_first(key, (*_QUANTITIES, "peak_flops"))[0]
                raise PlannerError(f"{self.name}: '{key}' cannot be scaled; did you mean {nearest}?")
            if not factor > 0:
                raise PlannerError(f"{self.name}: the factor of {key} must be above 0, it is {factor}")
            if key == "peak_flops":
                changes[key] = {dtype: rate * factor for dtype, rate in self.peak_flops.items()}
            else:
                changes[key] = getattr(self, key) * factor
        link = "scale_up_bandwidth" if self.scale_up_domain > 1 else "pcie_bandwidth"
        if link in factors:
            changes["scale_up"] = {op: curve.with_link(factors[link]) for op, curve in self.scale_up.items()}
            changes["scale_up_bandwidth"] = self.scale_up_bandwidth * factors[link]
        return replace(self, **changes)

    def achieving(self, **factors: float) -> HardwareProfile:
        """The profile with what the machine achieves multiplied, by name of SCALES: ``achieving(scale_out=0.7)``."""
        changes: dict[str, Any] = {}
        for key, factor in factors.items():
            if key not in SCALES:
                raise UnknownNameError("scale", key, SCALES)
            if not np.isfinite(factor) or not factor > 0:
                raise PlannerError(f"{self.name}: the scale of {key} must be above 0, it is {factor}")
        if "sustained_clock" in factors:
            changes["sustained_clock"] = self.sustained_clock * factors["sustained_clock"]
        if "memory_fraction" in factors:
            share = factors["memory_fraction"]
            changes["memory_fraction"] = {op: fraction * share for op, fraction in self.memory_fraction.items()}
        if "scale_up" in factors:
            changes["scale_up"] = {op: curve.with_link(factors["scale_up"]) for op, curve in self.scale_up.items()}
        share, latency = factors.get("scale_out", 1.0), factors.get("network_latency", 1.0)
        if (share, latency) != (1.0, 1.0):
            changes["scale_out"] = {op: c.stretched(latency).with_share(share) for op, c in self.scale_out.items()}
            changes["network_latency"] = self.network_latency * latency
        return replace(self, **changes) if changes else self

    # ------------------------------------------------------------------------------------------------ files

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a profile file, with every curve written out; ``from_dict`` reads it back."""
        symbol = {"bytes": "B", "bytes/s": "B/s", "seconds": "s", "watts": "W"}
        data: dict[str, Any] = {key: getattr(self, key) for key in (*_TEXTS, *_COUNTS, *_FACTORS)}
        data["peak_flops"] = {dtype: f"{rate!r} FLOP/s" for dtype, rate in self.peak_flops.items()}
        data |= {key: f"{getattr(self, key)!r} {symbol[unit]}" for key, unit in _QUANTITIES.items()}
        data["precise_accumulation"] = dict(self.precise_accumulation)
        data["gemm"] = {recipe: curve.to_dict() for recipe, curve in self.gemm.items()}
        data["attention"] = [
            {"kernel": kernel, "dtype": dtype, "pass": pass_, **curve.to_dict()}
            for (kernel, dtype, pass_), curve in self.attention.items()
        ]
        data["kernels"] = self.kernels
        data["memory_fraction"] = dict(self.memory_fraction)
        data["scale_up"] = {op: curve.to_dict() for op, curve in self.scale_up.items()}
        data["scale_out"] = {op: curve.to_dict() for op, curve in self.scale_out.items()}
        data["measured"] = dict(self.measured)
        data["prices"] = [
            {"usd_per_hour": f"{p.usd_per_hour!r} USD/h", "kind": p.kind, "date": p.date, "source": p.source}
            for p in self.prices
        ]
        data |= {"unverified": list(self.unverified), "notes": list(self.notes), "sources": self.sources}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, where: str = "hardware profile") -> HardwareProfile:
        """A profile from the data of a file. Raises PlannerError: what is wrong, where, and what would be right."""
        if "extends" in data:
            return _extended(data, where)
        data = _with_relatives(data, where)
        _check_keys(data, where)
        values: dict[str, Any] = {key: str(data[key]) for key in _TEXTS}
        values |= {key: units.parse(data[key], unit, what=f"{where}: {key}") for key, unit in _QUANTITIES.items()}
        values |= {key: _number(data[key], f"{where}: {key}") for key in (*_COUNTS, *_FACTORS)}
        values["peak_flops"] = {
            str(dtype): units.parse(rate, "FLOP/s", what=f"{where}: peak_flops {dtype}")
            for dtype, rate in _mapping(data["peak_flops"], f"{where}: peak_flops").items()
        }
        values |= _curves(data, where)
        values["kernels"] = _mapping(data.get("kernels", {}), f"{where}: kernels")
        values["precise_accumulation"] = {
            str(recipe): _number(factor, f"{where}: precise_accumulation {recipe}")
            for recipe, factor in _mapping(
                data.get("precise_accumulation", {}), f"{where}: precise_accumulation"
            ).items()
        }
        values["measured"] = {k: str(v) for k, v in _mapping(data["measured"], f"{where}: measured").items()}
        values["prices"] = tuple(_price(entry, f"{where}: prices") for entry in data.get("prices", ()))
        values |= {key: tuple(str(x) for x in data.get(key, ())) for key in ("unverified", "notes")}
        values["sources"] = data.get("sources", {})
        profile = cls(**values)
        _check_values(profile, where)
        return profile


def load_hardware(name: str) -> HardwareProfile:
    """The profile of a library name ("h100-sxm") or of a user's YAML file. Raises PlannerError when it is broken."""
    path: Path = library.find("hardware", name)
    return HardwareProfile.from_dict(library.read_yaml(path), where=path.name)


# ---------------------------------------------------------------------------------------------------- reading


def _extended(data: dict[str, Any], where: str, depth: int = 0) -> HardwareProfile:
    """A file that ``extends`` a profile: its own keys replace those of the base, then ``scale`` multiplies what the machine
    achieves (SCALES). ``calibration`` says where that comes from; it is kept among the sources."""
    own = dict(data)
    base = own.pop("extends")
    if not isinstance(base, str) or depth > 3:
        raise PlannerError(f"{where}: extends is {shown(base)}; it must name one profile, at most four levels deep")
    factors = {
        str(key): _number(value, f"{where}: scale {key}")
        for key, value in _mapping(own.pop("scale", {}), f"{where}: scale").items()
    }
    for key in factors:
        if key not in SCALES:
            raise PlannerError(f"{where}: unknown key 'scale {key}'; did you mean {nearest_first(key, SCALES)[0]}?")
    calibration = own.pop("calibration", None)
    path = library.find("hardware", base)
    below = library.read_yaml(path)
    if "extends" in below:
        if own.keys() - {"name", "device", "notes", "sources"}:
            raise PlannerError(f"{where}: extends {base}, which extends another profile; only scale may be given here")
        profile = _extended(below, path.name, depth + 1)
        profile = replace(profile, name=str(own.get("name", profile.name)))
    else:
        profile = HardwareProfile.from_dict({**below, **own}, where=where)
    profile = profile.achieving(**factors)
    if calibration is not None:
        profile = replace(profile, sources={**profile.sources, "calibration": calibration})
    _check_values(profile, where)
    return profile


def _index(value: str, known: tuple[str, ...], kind: str) -> int:
    if value not in known:
        raise UnknownNameError(kind, value, known)
    return known.index(value)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise PlannerError(f"{what}: '{value}' is not a plain number")
    if value <= 0:
        raise PlannerError(f"{what}: {value} must be above 0")
    return float(value)


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlannerError(f"{what}: expected a mapping of keys to values, found {type(value).__name__}")
    return value


def _check_keys(data: dict[str, Any], where: str) -> None:
    required = (*_TEXTS, "peak_flops", *_QUANTITIES, *_COUNTS, *_FACTORS, *_CURVES, "measured")
    known = (*required, *_OPTIONAL)
    for key in data:
        if key not in known:
            raise PlannerError(f"{where}: unknown key '{key}'; did you mean {nearest_first(str(key), known)[0]}?")
    for key in required:
        if key not in data:
            raise PlannerError(f"{where}: the key '{key}' is missing")


_KEYS_OF_FAMILY = {"gemm": ("gemm",), "attention": ("attention", "kernels"), "memory": ("memory_fraction",)}


def _with_relatives(data: dict[str, Any], where: str, family: str = "", depth: int = 0) -> dict[str, Any]:
    """Curves that the file does not hold, taken from the relative that ``curves_from`` names per family.

    GEMM, attention and memory curves are relative to peaks and follow by themselves; scale_up times are stretched by
    the ratio of the links; ``gemm_efficiency`` and ``attention_efficiency`` replace that of a recipe or a pass
    where the device's own best rate was measured. ``family`` limits the work to one family (for a relative).
    """
    if "curves_from" not in data:
        return data
    if depth > 4:
        raise PlannerError(f"{where}: curves_from goes round in a circle")
    data = dict(data)
    relatives = _mapping(data.pop("curves_from"), f"{where}: curves_from")
    raw: dict[str, dict[str, Any]] = {}
    for key, name in relatives.items():
        if key not in (*FAMILIES, "pcie"):
            raise PlannerError(
                f"{where}: unknown key 'curves_from {key}'; did you mean {nearest_first(key, FAMILIES)[0]}?"
            )
        if family and key != family and not (family == "scale_up" and key == "pcie"):
            continue
        if name not in raw:
            path = library.find("hardware", str(name))
            raw[name] = library.read_yaml(path)
        wanted = "scale_up" if key == "pcie" else key
        relative = _with_relatives(raw[name], f"{name}.yaml", wanted, depth + 1)
        if wanted == "scale_up":
            raw[name] = relative
            continue
        for curve_key in _KEYS_OF_FAMILY.get(key, (key,)):
            data.setdefault(curve_key, relative.get(curve_key))
    if any(key in relatives for key in ("scale_up", "pcie")) and family in ("", "scale_up") and "scale_up" not in data:
        data["scale_up"] = _joined_scale_up(data, relatives, raw, where)
    if family not in ("", "gemm", "attention"):
        return data
    for recipe, value in data.pop("gemm_efficiency", {}).items() if family != "attention" else ():
        data["gemm"] = dict(data["gemm"])
        data["gemm"][recipe] = {**data["gemm"][recipe], "efficiency": value}
    for pass_, value in data.pop("attention_efficiency", {}).items() if family != "gemm" else ():
        data["attention"] = [
            {**entry, "efficiency": [value] * len(entry["head_dims"])} if entry["pass"] == pass_ else entry
            for entry in data["attention"]
        ]
    return data


def _links(data: dict[str, Any], where: str) -> dict[str, float]:
    """Bandwidth of the scale-up link and of PCIe; a box without NVLink has PCIe for both."""
    keys = {"scale_up": "scale_up_bandwidth", "pcie": "pcie_bandwidth"}
    return {family: units.parse(data.get(key), "bytes/s", what=f"{where}: {key}") for family, key in keys.items()}


def _joined_scale_up(
    data: dict[str, Any], relatives: dict[str, str], raw: dict[str, dict[str, Any]], where: str
) -> dict[str, Any]:
    """Times per group size: the NVLink relative's up to the domain, the PCIe relative's beyond."""
    domain = _number(data.get("scale_up_domain"), f"{where}: scale_up_domain")
    joined: dict[str, Any] = {}
    for op in COLLECTIVES:
        rows: dict[int, Any] = {}
        first_size = "512 B"
        for family, link in _links(data, where).items():
            if family not in relatives:
                continue
            other, name = raw[relatives[family]], f"{relatives[family]}.yaml"
            other_family = "scale_up" if other.get("scale_up_domain", 1) > 1 else "pcie"
            ratio = link / _links(other, name)[other_family]
            plain = (
                CollectiveCurve.from_dict(op, other["scale_up"][op], f"{name}: scale_up {op}")
                .with_link(ratio)
                .to_dict()
            )
            within = {n: row for n, row in plain["us"].items() if (n <= domain) == (family == "scale_up")}
            rows |= within or {n: row for n, row in plain["us"].items() if n not in rows}
            first_size = plain["first_size"]
        joined[op] = {"first_size": first_size, "us": dict(sorted(rows.items()))}
    return joined


def _curves(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The five families of curves, each read by its own class."""
    gemm = {
        str(recipe): GemmCurve.from_dict(entry, f"{where}: gemm {recipe}")
        for recipe, entry in _mapping(data["gemm"], f"{where}: gemm").items()
    }
    attention = {
        (entry["kernel"], entry["dtype"], entry["pass"]): AttentionCurve.from_dict(entry, f"{where}: attention")
        for entry in data["attention"]
    }
    fractions = _mapping(data["memory_fraction"], f"{where}: memory_fraction")
    scale_up = _mapping(data["scale_up"], f"{where}: scale_up")
    scale_out = _mapping(data["scale_out"], f"{where}: scale_out")
    for family, entries, known in (
        ("memory_fraction", fractions, MEMORY_OPS),
        ("scale_up", scale_up, COLLECTIVES),
        ("scale_out", scale_out, COLLECTIVES),
    ):
        for key in known:
            if key not in entries:
                raise PlannerError(f"{where}: {family} has no '{key}'")
        for key in entries:
            if key not in known:
                raise PlannerError(
                    f"{where}: unknown key '{family} {key}'; did you mean {nearest_first(key, known)[0]}?"
                )
    return {
        "gemm": gemm,
        "attention": attention,
        "memory_fraction": {op: _number(fractions[op], f"{where}: memory_fraction {op}") for op in MEMORY_OPS},
        "scale_up": {op: CollectiveCurve.from_dict(op, scale_up[op], f"{where}: scale_up {op}") for op in COLLECTIVES},
        "scale_out": {op: NetworkCurve.from_dict(scale_out[op], f"{where}: scale_out {op}") for op in COLLECTIVES},
    }


def _price(entry: object, what: str) -> Price:
    data = _mapping(entry, what)
    known = [f.name for f in fields(Price)]
    for key in known:
        if key not in data:
            raise PlannerError(f"{what}: the key '{key}' is missing")
    rate = units.parse(data["usd_per_hour"], "USD/h", what=what)
    return Price(usd_per_hour=rate, kind=str(data["kind"]), date=str(data["date"]), source=str(data["source"]))


def _check_values(profile: HardwareProfile, where: str) -> None:
    """Physics: nothing faster than the peak, the memory or the link."""
    if profile.sustained_clock > 1:
        raise PlannerError(
            f"{where}: sustained_clock is {profile.sustained_clock:.2f}, faster than a short burst; at most 1"
        )
    for op, network in profile.scale_out.items():
        if max(network.fast.efficiency, network.bulk.efficiency) > 1:
            share = max(network.fast.efficiency, network.bulk.efficiency)
            raise PlannerError(f"{where}: scale_out {op} reaches {share:.2f} of the line rate of the NICs; at most 1")
    for recipe, curve in profile.gemm.items():
        if not 0 < curve.efficiency <= 1:
            raise PlannerError(f"{where}: gemm {recipe} runs at {curve.efficiency:.2f} of the peak; it cannot pass 1")
    for key, attention in profile.attention.items():
        if np.any(attention.efficiency > 1) or np.any(attention.efficiency <= 0):
            raise PlannerError(
                f"{where}: attention {' '.join(key)} runs faster than the peak; efficiency must be in 0..1"
            )
    for op, fraction in profile.memory_fraction.items():
        if fraction > 1:
            raise PlannerError(f"{where}: memory_fraction {op} is {fraction:.2f}, faster than the memory; at most 1")
    if profile.usable_memory > profile.memory * 1.08:  # 80 GB parts hold 80 GiB less the reserve
        raise PlannerError(f"{where}: usable_memory is larger than memory; check GB against GiB")
    for op, collective in profile.scale_up.items():
        for group, row in zip(collective.groups, collective.seconds, strict=True):
            link = profile.scale_up_bandwidth if group <= profile.scale_up_domain else profile.pcie_bandwidth
            shortest = least_factor(op, group) * collective.sizes / (link * _LINK_TOLERANCE)
            if np.any(row < shortest):
                worst = int(np.argmin(row / shortest))
                rate = units.format_bytes(float(least_factor(op, group) * collective.sizes[worst] / row[worst]))
                raise PlannerError(
                    f"{where}: scale_up {op} on {group:.0f} GPUs moves {rate}/s at "
                    f"{units.format_bytes(float(collective.sizes[worst]))}, "
                    f"above the link of {units.format_bytes(link)}/s"
                )
