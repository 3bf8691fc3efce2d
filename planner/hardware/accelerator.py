"""One accelerator: its figures and measured curves, and the seconds of products, attention and memory-bound operations."""

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Any

import numpy as np

from planner import arrays as npt
from planner.curves import AttentionCurve, Column, GemmCurve, column, index
from planner.errors import PlannerError, UnknownNameError, shown
from planner.record import record
from planner.schema import (
    Bandwidth,
    Bytes,
    FlopRate,
    Line,
    Name,
    Positive,
    Rule,
    Seconds,
    Watts,
    check_keys,
    group,
    keys,
)

PASSES = ("forward", "dgrad", "wgrad")
MEMORY_OPS = (
    "norm_forward", "norm_backward", "elementwise", "swiglu", "rope", "cross_entropy", "optimizer", "quantize",
    "permute", "copy",
)  # fmt: skip
HOPPER_MMA = 0.629
"""Rate of mma.sync on Hopper over the peak, which only wgmma reaches: the mean over dtypes and shapes on H800.
[Luo et al. 2024, arXiv 2402.13499, tensor cores]"""
PLAIN_EFFICIENCY = 0.88
"""Part of the fp32 peak that large products reach on ordinary cores: 7.2 of 8.1 TFLOP/s on T4.  [Jia 2019, arXiv 1903.07486]"""
DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0}


def _attention_curves(data: object, where: str) -> dict[tuple[str, str, str], AttentionCurve]:
    """The list of a profile file: one entry per kernel, dtype and pass. Raises PlannerError."""
    found = {}
    for entry in data if isinstance(data, list) else ():
        own = check_keys(entry, entry, where, required=("kernel", "dtype", "pass"))
        which = (str(own["kernel"]), str(own["dtype"]), str(own["pass"]))
        if not all(word.isprintable() for word in which) or which[2] not in ("forward", "backward"):
            raise PlannerError(f"{where}: {shown(' '.join(which))} does not end in forward or backward")
        found[which] = AttentionCurve.from_dict(entry, where)
    if not found:
        raise PlannerError(f"{where} is {shown(data)}; it must be a list of curves")
    return found


_Kernels = Annotated[
    dict[str, Any],
    group({"same_as_best": list[Line], "slowdown": dict[str, Annotated[dict[str, Positive], keys(("forward", "backward"))]]}),
]


@record
class Compute:
    """What one accelerator computes, and how fast. Bytes, bytes/s, FLOP/s, seconds."""

    name: Name
    """File name in the library."""
    device: Name
    """The vendor's name of the part."""
    vendor: Name
    """NVIDIA, AMD, Intel."""
    arch: Name
    """Generation; CPU = processors without a GPU."""
    compute_units: Positive
    """Streaming multiprocessors or compute units: what tiles are assigned to."""
    peak_flops: dict[str, FlopRate]
    """Dense peak by dtype (bf16, fp16, fp32, tf32, fp8, fp4), FLOP/s."""
    memory: Bytes
    """Nominal memory, bytes."""
    usable_memory: Bytes
    """Total that the runtime reports, before any context, bytes."""
    memory_bandwidth: Bandwidth
    """Nominal, bytes/s."""
    sustained_clock: Positive
    """Rate in a training run over the rate in a short burst (power limit)."""
    launch_floor: Seconds
    """Seconds per kernel back to back in a stream."""
    graph_launch_floor: Seconds
    """The same inside a CUDA graph."""
    tdp: Watts
    """Board power limit, watts."""
    context_memory: Bytes
    """Driver context, kernels and runtime, bytes per process."""
    communicator_memory: Bytes
    """Buffers of one NCCL communicator, bytes per process."""
    expert_communicator_memory: Bytes
    """Buffers of a communicator that runs all-to-all (p2p connections to every peer), bytes."""
    workspace_memory: Bytes
    """cuBLAS and cuBLASLt workspaces, bytes per process."""
    gemm: dict[str, GemmCurve]
    """By recipe: bf16, fp8 (per-tensor, dynamic), fp8_block, nvfp4."""
    attention: Annotated[dict[tuple[str, str, str], AttentionCurve], Rule(reader=_attention_curves)]
    """By (kernel, dtype, pass)."""
    kernels: _Kernels = field(default_factory=dict)
    """Attention kernels that are the best one, and ``slowdown`` of those known only relative to the best."""
    memory_fraction: Annotated[dict[str, Positive], keys(MEMORY_OPS)]
    """Part of memory_bandwidth that each class of memory-bound operation reaches."""
    precise_accumulation: dict[str, Positive] = field(default_factory=dict)
    """By recipe: time of a GEMM whose partial sums are promoted to fp32 registers (all but the forward pass in training)
    over its time when they are not (what was measured). Only tensor cores that add up in fewer bits need it."""
    block_scaling: dict[str, Positive] = field(default_factory=dict)
    """By precision (mxfp8): time of a dense GEMM whose operands carry a scale per block over that of one scale per tensor."""
    serial_launches: bool = False
    """Kernels do not hide the host's work to launch others: both times add up."""

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on processors: a profile that was measured where there is no GPU."""
        return self.arch == "CPU"

    def missing_curves(self) -> Iterator[str]:
        """Curves that every price without its own falls back to, and that are not there."""
        if "bf16" not in self.gemm:
            yield "gemm has no curve of bf16, which stands for every precision without one"
        for pass_ in ("forward", "backward"):
            if ("best", "bf16", pass_) not in self.attention:
                yield f"attention has no curve of the best bf16 kernel {pass_}, which stands for every one without a curve"

    @property
    def lacks_bf16(self) -> bool:
        """Whether its 16-bit products are in fp16 alone, as on Volta and Turing."""
        return "bf16" not in self.peak_flops and "fp16" in self.peak_flops

    def peak(self, dtype: str) -> float:
        """Dense peak of a dtype or GEMM recipe, FLOP/s. Raises PlannerError when the device has none."""
        key = {"fp8_block": "fp8", "nvfp4": "fp4"}.get(dtype, dtype)
        if key in ("bf16", "fp16") and key not in self.peak_flops:
            key = {"bf16": "fp16", "fp16": "bf16"}[key]  # Volta has no bf16, Gaudi is listed without fp16
        if key not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise PlannerError(f"{self.name} has no {key} tensor cores; choose one of {known}, or other hardware")
        return self.peak_flops[key]

    def by_columns(self, dtype: str) -> float:
        """Part of the peak that products reach whose operands do not both lie along the reduction, as in dgrad and wgrad.

        Hopper's warp-group instructions take operands of 4 bytes in that order alone; others go through those of Ampere,
        HOPPER_MMA of the peak.  [CUTLASS, functionality: sm_90, tf32 x tf32, layouts T x N only; PTX ISA, wgmma: imm-trans for
        .f16 and .bf16]
        """
        return HOPPER_MMA if dtype == "tf32" and self.arch == "Hopper" else 1.0

    def gemm_curve(self, dtype: str) -> GemmCurve:
        """The curve of a recipe; that of bf16 for a dtype without one (its rate then scales with the peak).

        Products in fp32 leave the tensor cores, which starve sooner: PLAIN_EFFICIENCY of the peak, and a tile fills in the same
        time, so that its k0 is shorter by the ratio of the peaks.
        """
        self.peak(dtype)
        recipe = {"fp4": "nvfp4", "fp16": "bf16"}.get(dtype, dtype)
        if recipe in self.gemm:
            return self.gemm[recipe]
        bf16 = self.gemm["bf16"]
        slower = self.peak(dtype) / self.peak("bf16") if dtype == "fp32" else 1.0
        if slower < 1.0:  # a processor's own cores compute both
            return replace(bf16, operand_bytes=4.0, efficiency=PLAIN_EFFICIENCY, k0=bf16.k0 * slower, grid=None)
        return replace(bf16, operand_bytes=DTYPE_BYTES.get(dtype, 1.0 if "8" in dtype else 2.0))

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
        which = index(pass_, PASSES, "pass")
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
        peaks = np.array([peak, *(2 * [peak * self.by_columns(dtype)])]).reshape(3, *[1] * (rows.ndim - 1))
        time = np.asarray(curve.time(rows, columns, depth, peaks, self.memory_bandwidth))
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
        which = index(pass_, PASSES, "pass")
        curve, peak = self.gemm_curve(dtype), self.peak(dtype)
        if quantised:
            curve = curve.without_quantisation(self.gemm["bf16"])
        count = column(groups)
        tokens, outputs, inputs = (np.maximum(column(x), 1.0) for x in (tokens_per_group, n, k))
        rows, columns, depth = ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens))[which]
        peak = peak * (self.by_columns(dtype) if which else 1.0)
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
        which = index(pass_, ("forward", "backward"), "attention pass")
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
        """Curve, peak and slowdown of a kernel; a dtype without its own curve runs on the bf16 one at the bf16 peak.

        fp32 operands are multiplied at the rate of tf32, or at that of fp32 where there is none: the bf16 curve at that peak.
        """
        own = (kernel, "bf16", pass_) in self.attention
        measured = (kernel if own else "best", dtype, pass_) in self.attention
        rate = "tf32" if "tf32" in self.peak_flops else "fp32"
        wide = dtype == "fp32" and not measured
        dtype = dtype if dtype != "fp16" and measured else "bf16"
        peak = self.peak(rate if wide else dtype)
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
        fraction = self.memory_fraction[MEMORY_OPS[index(op, MEMORY_OPS, "memory-bound operation")]]
        return (column(bytes_moved) / (self.memory_bandwidth * fraction))[()]
