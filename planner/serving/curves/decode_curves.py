"""``DecodeCurves``: the seconds of every kernel of a serving step on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, Unpack

import numpy as np

from planner import arrays as npt
from planner.curves import Column, column, index
from planner.hardware import HardwareProfile, load_hardware
from planner.linear_attention import LinearAttention
from planner.record import record
from planner.serving.curves.expert_kernels import fused as fused_experts
from planner.serving.curves.expert_kernels import routed_time, slowest_rank
from planner.serving.curves.kernel_laws import CHUNK, LAWS, compute_dtype, keys_seen
from planner.serving.curves.kernel_shapes import ExpertShape, HeadShape, PrefillShape, SparseShape
from planner.serving.curves.kernel_tables import BEST_SHARE, Kernel, kernel_from, nearest, table
from planner.serving.curves.linear_products import Products
from planner.serving.curves.message_times import EXCHANGES, SmallAllReduce, exchange_sizes
from planner.serving.serving_layout import CACHES, WEIGHT_BYTES, WEIGHTS
from planner.units import MICRO

ENGINES = ("vllm", "trtllm", "sglang")
"""In the order in which another's kernel stands for one that was not measured."""
KINDS = ("graph", "eager", "nccl")
UNPACKING = 1.4
"""Time of a product bound by tensor cores that unpacks 4-bit weights, over that of the plain 16-bit one (A100, int4)."""
HEAD_DIMS = (64.0, 128.0)
"""Widths of a head that were measured."""
NARROW = 96.0
"""Below it the kernel of the narrower one stands for a width."""
VERIFY = 0.5
"""Time of each further token of a sequence in an update over that of the first: drafts to verify (Kimi delta attention, 2 to 8)."""
LIKE = {"fp8": ("fp8_block",), "fp8_block": ("fp8",), "mxfp4": ("nvfp4", "int4"), "int4": ("mxfp4",)}
"""Formats whose kernel stands for one that was not measured, before bf16 does."""
TILE = 128.0
"""Queries of a prompt that one block of attention takes."""

ANOTHER = "h100-sxm"
"""Device whose numbers stand for an operator that was not measured on any relative."""


def _columns(**sizes: npt.ArrayLike) -> dict[str, Column]:
    """Sizes as float64, none below one."""
    return {name: np.maximum(column(values), 1.0) for name, values in sizes.items()}


@record
class DecodeCurves:
    """Seconds of one call of each kernel, alone on one device, inside a CUDA graph unless ``eager`` is said.

    All methods take scalars or columns and return float64 of the broadcast shape. They grow with every size, and are never faster
    than memory and tensor cores allow.
    """

    hardware: HardwareProfile
    engine: str
    """Whose kernels are meant where engines differ: vllm, trtllm, sglang."""
    kernels: Mapping[str, Mapping[str, Kernel]]
    """By operator, then by format and what else tells kernels apart, as in the file."""
    all_reduce: Mapping[str, SmallAllReduce]
    """By "engine kind"."""
    provenance: dict[str, str] = field(default_factory=dict)
    """By operator: measured, or scaled from a relative; by operator and weights: derived, where that was not measured."""
    _found: dict[tuple[object, ...], Kernel] = field(default_factory=dict, compare=False, repr=False)
    errors: dict[str, Any] = field(default_factory=dict)
    """By operator and format, median and 90th percentile of the error in percent: ``held_out`` on the half of the rows that was
    left out, ``all`` on every row, ``law`` without the mesh, ``skewed`` on routing that was not fitted."""

    def linear_time(
        self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, weights: str, fused: bool = True
    ) -> Column:
        """Seconds of a linear layer forward: m tokens, n outputs, k inputs; ``weights`` and ``fused`` as in ``products``."""
        rows, outputs, inputs = np.broadcast_arrays(column(m), column(n), column(k))
        found = self.products(outputs.ravel(), inputs.ravel(), weights, fused)
        return found.time(rows.ravel(), np.arange(rows.size)).reshape(rows.shape)[()]

    def products(self, n: Column, k: Column, weights: str, fused: bool = True) -> Products:
        """Linear layers of n outputs and k inputs, of any number of rows; ``weights`` of WEIGHTS.

        ``fused``: the kernel before quantises its output for this one, as engines do for fp8 and nvfp4; else a kernel of its own
        does, and is included.
        """
        weights = WEIGHTS[index(weights, WEIGHTS, "weight format")]
        curve = self.hardware.gemm_curve(compute_dtype(self.hardware, weights))
        if fused and curve.quantise:
            curve = curve.without_quantisation(self.hardware.gemm["bf16"])
        sizes = _columns(n=n, k=k)
        return Products(
            n=sizes["n"], k=sizes["k"], kernel=self._weighted("linear", weights, fused), curve=curve,
            slower=self._unpacking(weights),
        )  # fmt: skip

    def decode_attention_time(
        self, *, batch: npt.ArrayLike, context: npt.ArrayLike, cache: str = "bf16", window: npt.ArrayLike = 0,
        **shape: Unpack[HeadShape],
    ) -> Column:  # fmt: skip
        """Seconds of attention of one token per sequence against ``context`` cached ones; heads of one rank, ``cache`` of CACHES.

        ``window`` w > 0: the last w tokens only. Widths of heads that were not measured: as many bytes at the nearest width.
        """
        cache = CACHES[index(cache, CACHES, "cache format")]
        kv_heads = np.maximum(column(shape["kv_heads"]), 1.0)
        rows, group = column(batch) * kv_heads, column(shape["heads"]) / kv_heads
        width, last = column(shape["head_dim"]), column(window)
        seen = np.where(last > 0.0, np.minimum(column(context), last), column(context))
        narrow = width < NARROW
        walked = np.maximum(column(context), 1.0) if last.any() else None

        def time(measured: float) -> Column:
            kernel = self._cached("decode_attention", cache, measured)
            own = float(kernel.axes["head_dim"][0]) if kernel.axes else measured
            sizes = _columns(rows=rows, group=group, context=seen * width / own, head_dim=own)
            whole = kernel.time(sizes)
            if walked is None or "window" not in self.kernels:
                return whole
            windowed = self._cached("window", cache, measured).time({**sizes, "walked": walked})
            return np.where(last > 0.0, np.maximum(windowed, whole), whole)

        if narrow.all() or not narrow.any():
            return time(HEAD_DIMS[0] if narrow.all() else HEAD_DIMS[1])[()]
        return np.where(narrow, time(HEAD_DIMS[0]), time(HEAD_DIMS[1]))[()]

    def decode_mla_time(
        self, batch: npt.ArrayLike, heads: npt.ArrayLike, context: npt.ArrayLike, cache: str = "bf16"
    ) -> Column:
        """Seconds of MLA's attention of one token per sequence against a latent cache of 512 + 64 channels; heads of one rank."""
        kernel = self._cached("decode_mla", CACHES[index(cache, CACHES, "cache format")])
        return kernel.time(_columns(batch=batch, heads=heads, context=context))[()]

    def prefill_attention_time(
        self, *, queries: npt.ArrayLike, keys: npt.ArrayLike, batch: npt.ArrayLike = 1, window: npt.ArrayLike = 0,
        **shape: Unpack[PrefillShape],
    ) -> Column:  # fmt: skip
        """Seconds of causal attention of the last ``queries`` of ``keys`` tokens, per sequence; heads of one rank.

        Query number i of q sees keys - q + i, at most ``window`` (0 = all) of them, in whole tiles; the curve is the profile's for
        equal work. Never faster than reading the keys and values; ``batch`` below one: that share of the time of one sequence.
        """
        q = np.maximum(np.ceil(column(queries) / TILE), 1.0) * TILE
        s = np.maximum(column(keys), q)
        w = np.where(column(window) > 0.0, column(window), np.inf)
        seen = (keys_seen(s, w) - keys_seen(s - q, w)) / q
        width, value = column(shape["head_dim"]), column(shape["value_dim"])
        value = np.where(value > 0.0, value, width)
        many, kv_heads = np.maximum(column(batch), 1.0), column(shape["kv_heads"])
        time = self.hardware.attention_time(
            many, shape["heads"], kv_heads, width, q, seen, causal=False, value_dim=value
        )
        read = 2.0 * many * kv_heads * np.minimum(np.maximum(column(keys), 1.0), w + q) * (width + value)
        least = read / (BEST_SHARE * self.hardware.memory_bandwidth)
        return (np.minimum(column(batch), 1.0) * np.maximum(time, least))[()]

    def sparse_prefill_time(
        self, *, queries: npt.ArrayLike, keys: npt.ArrayLike, batch: npt.ArrayLike = 1, cache: str = "bf16",
        **shape: Unpack[SparseShape],
    ) -> Column:  # fmt: skip
        """Seconds of DeepSeek sparse attention of the last ``queries`` of ``keys`` tokens over a latent cache; heads of one rank.

        The indexer scores every pair; up to ``top_k`` keys attention is dense (MLA's, 192 and 128 wide), beyond that each query
        gathers its own. Projections are not in it. ``batch`` below one: that share of the time of one sequence.
        """
        q = np.maximum(column(queries), 1.0)
        s, many = np.maximum(column(keys), q), np.maximum(column(batch), 1.0)
        heads, top_k = column(shape["heads"]), np.maximum(column(shape["top_k"]), 1.0)
        dense = self.prefill_attention_time(
            queries=q, keys=np.minimum(s, np.maximum(top_k, q)), heads=heads, kv_heads=heads, head_dim=192.0, value_dim=128.0,
            batch=many, window=top_k,
        )  # fmt: skip
        sizes = _columns(
            queries=many * q, pairs=many * q * (s - 0.5 * q), heads=heads, selected=np.minimum(s, top_k),
            channels=column(shape["index_heads"]) * column(shape["index_dim"]),
        )  # fmt: skip
        kernel = self._cached("sparse_prefill", CACHES[index(cache, CACHES, "cache format")])
        scored = kernel.part("score", sizes)
        sparse = np.where(s > top_k, kernel.time(sizes), 0.0)
        return (np.minimum(column(batch), 1.0) * np.maximum(dense + scored, sparse))[()]

    def all_reduce_time(self, num_bytes: npt.ArrayLike, n: npt.ArrayLike, kind: str, engine: str = "") -> Column:
        """Seconds of an all-reduce of ``num_bytes`` over n ranks of one domain; ``kind`` of KINDS, ``engine`` "" = own.

        graph, eager: the engine's own kernel, inside a CUDA graph or launched by the host. nccl: ``hardware.scale_up_time``; which
        of them runs at a size is the engine's rule.
        """
        kind = KINDS[index(kind, KINDS, "kind of all-reduce")]
        engine = ENGINES[index(engine or self.engine, ENGINES, "engine")]
        size, ranks = column(num_bytes), column(n)
        if kind == "nccl":
            return column(self.hardware.scale_up_time("all_reduce", size, ranks))[()]
        own = next(curve for name in (engine, *ENGINES) if (curve := self.all_reduce.get(f"{name} {kind}")) is not None)
        link = self.hardware.scale_up_bandwidth
        return np.maximum(own.time(size, ranks), np.where(ranks > 1.0, size / link, 0.0))[()]

    def experts_time(
        self,
        tokens: npt.ArrayLike,
        *,
        weights: str,
        skewed: bool = True,
        sent: npt.ArrayLike = False,
        **shape: Unpack[ExpertShape],
    ) -> Column:
        """Seconds of the routed experts of one layer on the slowest rank; ``tokens`` of the whole group of ep x moe_tp ranks.

        ``skewed``: some experts are far more popular than others (a power law of 1.2); else only chance makes ranks differ.
        ``sent``: only the copies for a rank's own experts arrive there (dispatch and combine), else every rank sorts them all.
        """
        weights = WEIGHTS[index(weights, WEIGHTS, "weight format")]
        size = _columns(tokens=tokens, **shape)
        touched, rows = slowest_rank(size["tokens"], size["top_k"], size["experts"], size["ep"], skewed)
        pairs = np.where(sent, rows, size["tokens"] * size["top_k"])
        own = {
            "touched": touched,
            "rows": rows,
            "pairs": pairs,
            "hidden": size["hidden"],
            "ffn": size["ffn"] / size["moe_tp"],
        }
        return routed_time(self._weighted("experts", weights), own, self._unpacking(weights))[()]

    def dispatch_time(
        self, tokens_per_rank: npt.ArrayLike, hidden: npt.ArrayLike, top_k: npt.ArrayLike, experts: npt.ArrayLike,
        ep: npt.ArrayLike,
    ) -> Column:  # fmt: skip
        """Seconds to send fp8 copies of the tokens of each rank to their experts on ep ranks; 0 for one rank.

        The faster of two kernels: low latency (a copy per expert) and throughput (a copy per rank).  [DeepEP]
        """
        return self._exchange(
            "dispatch", _columns(tokens=tokens_per_rank, hidden=hidden, top_k=top_k, experts=experts, ep=ep)
        )

    def combine_time(
        self, tokens_per_rank: npt.ArrayLike, hidden: npt.ArrayLike, top_k: npt.ArrayLike, experts: npt.ArrayLike,
        ep: npt.ArrayLike,
    ) -> Column:  # fmt: skip
        """Seconds to bring the bf16 results back and sum them; as ``dispatch_time``."""
        return self._exchange(
            "combine", _columns(tokens=tokens_per_rank, hidden=hidden, top_k=top_k, experts=experts, ep=ep)
        )

    def _exchange(self, phase: str, sizes: Mapping[str, Column]) -> Column:
        times = [
            self.kernels["exchange"][f"{kernel} {phase}"].time(exchange_sizes(self.hardware, kernel, phase, sizes))
            for kernel in EXCHANGES
        ]
        return np.where(sizes["ep"] > 1.0, np.minimum(*times), 0.0)[()]

    def linear_attention_time(
        self, linear: LinearAttention, batch: npt.ArrayLike, tokens: npt.ArrayLike = 1, tp: npt.ArrayLike = 1
    ) -> Column:
        """Seconds of the convolution and the scan of one linear-attention layer (no projections), heads split over tp.

        ``tokens`` per sequence: 1 updates the state, more scan a prompt. ``batch`` below one: that share of the time of one.
        """
        ranks = column(tp)
        sizes = _columns(
            batch=batch, tokens=tokens, heads=linear.value_heads / ranks, channels=linear.conv_size / ranks,
            key_dim=linear.key_head_dim, value_dim=linear.value_head_dim,
        )  # fmt: skip
        kind = "gated_delta_net" if linear.kind == "mamba2" else linear.kind
        share = np.minimum(column(batch), 1.0)
        update = share * self._state("linear_update", kind).time(sizes)
        if not np.any(sizes["tokens"] > 1.0):
            return update[()]
        scan = self._state("linear_scan", kind).time({**sizes, "tokens": np.maximum(sizes["tokens"], CHUNK)})
        steps = (1.0 + VERIFY * (sizes["tokens"] - 1.0)) * update
        return np.where(sizes["tokens"] > 1.0, np.maximum(np.minimum(share * scan, steps), update), update)[()]

    def _state(self, operator: str, kind: str) -> Kernel:
        """Kernel of one kind of linear attention; kinds that were not measured here move like a gated delta net."""
        found = self._of_engine(operator, kind) or self._of_engine(operator, "gated_delta_net")
        assert found is not None, f"every file has {operator} of the gated delta net"
        return found

    def _kept(self, key: tuple[object, ...], make: Callable[[], Kernel]) -> Kernel:
        if key not in self._found:  # looked for once
            self._found[key] = make()
        return self._found[key]

    def _weighted(self, operator: str, weights: str, fused: bool = False) -> Kernel:
        """The kernel for a weight format; ``fused``: without the quantisation of its input."""
        return self._kept((operator, weights, fused), lambda: self._of_weights(operator, weights, fused))

    def _of_weights(self, operator: str, weights: str, fused: bool) -> Kernel:
        """As measured, or the kernel of the nearest format reading these weights where none was, in the end that of bf16.

        Without the quantisation of its input, a product has one launch less, though not less than that of bf16, and walks along k
        in tiles of as many bytes as that; bandwidth, rate and what shapes showed are its own.
        """
        weights = {"fp16": "bf16"}.get(weights, weights)
        plain = self._of_engine(operator, "bf16")
        assert plain is not None, f"every file has {operator} in bf16"
        near = (self._of_engine(operator, one) for one in (weights, *LIKE.get(weights, ())))
        own = next((one for one in near if one is not None), None)
        if own is None:
            own = plain.reading(weights, **({"compute": UNPACKING} if self._unpacking(weights) > 1.0 else {}))
        elif own.dtype != weights:
            own = own.reading(weights)
        if operator == "experts":
            measured = any(
                name in self.kernels[operator] for name in (f"{weights} {self.engine}", f"bf16 {self.engine}")
            )
            return own if measured else fused_experts(own, self._weighted("linear", "bf16").numbers)
        if not fused or weights == "bf16" or compute_dtype(self.hardware, weights) == "bf16":
            return own
        shorter = WEIGHT_BYTES[weights] / WEIGHT_BYTES["bf16"]
        once = {name: plain.numbers.get(name, 0.0) * by for name, by in (("launch", 1.0), ("depth", shorter))}
        once["launch"] = max(once["launch"], own.numbers["launch"] - self.hardware.launch_floor / MICRO)
        return replace(own, numbers={**own.numbers, **{k: min(v, own.numbers.get(k, v)) for k, v in once.items()}})

    def _unpacking(self, weights: str) -> float:
        """Time of a product bound by tensor cores whose weights are unpacked for it, over that of a plain one."""
        small = weights in ("int4", "nvfp4", "mxfp4")
        return UNPACKING if small and compute_dtype(self.hardware, weights) == "bf16" else 1.0

    def _cached(self, operator: str, cache: str, width: float = 0.0) -> Kernel:
        """The kernel for a cache format and a width of heads, or that of bf16 reading this cache where none was measured."""
        return self._kept((operator, cache, width), lambda: self._of_cache(operator, cache, width))

    def _of_cache(self, operator: str, cache: str, width: float) -> Kernel:
        cache = {"fp16": "bf16"}.get(cache, cache)
        for one in (width, *HEAD_DIMS[::-1]) if width else (0.0,):
            shape = f" {one:.0f}" if one else ""
            if (found := self._of_engine(operator, cache + shape)) is not None:
                return found
            if (found := self._of_engine(operator, "bf16" + shape)) is not None:
                return found.reading(cache)
        raise AssertionError(f"every file has {operator} in bf16")

    def _of_engine(self, operator: str, name: str) -> Kernel | None:
        # Numbers are of NVIDIA devices. Elsewhere engines run the vendor's kernels: AITER is to AMD what TensorRT-LLM is to NVIDIA.
        known = self.kernels.get(operator, {})
        own = self.engine if self.hardware.vendor == "NVIDIA" else "trtllm"
        names = (f"{name} {own}", name, *(f"{name} {other}" for other in ENGINES))
        return next((known[one] for one in names if one in known), None)


_BUILT: dict[tuple[str, str], DecodeCurves] = {}


def decode_curves(hardware: HardwareProfile, engine: str = "vllm") -> DecodeCurves:
    """The curves of a device, for the kernels of one engine; kept by name, and read anew for a profile that was changed."""
    engine = ENGINES[index(engine, ENGINES, "engine")]
    kept = _BUILT.get((hardware.name, engine))
    if kept is None or kept.hardware is not hardware:
        kept = _BUILT[hardware.name, engine] = _built(hardware, engine)
    return kept


def _built(hardware: HardwareProfile, engine: str) -> DecodeCurves:
    name = nearest(hardware)
    data, kernels = table(name), _kernels(hardware, name)
    errors: dict[str, Any] = {}
    said = {"all_reduce": "measured" if name == hardware.name else f"scaled from {name}"}
    said["prefill_attention"] = hardware.measured["attention"]
    for operator, whose, entries in _operators(name):
        said[operator] = "measured" if whose == hardware.name else f"scaled from {whose}"
        errors[operator] = {key: entry["errors"] for key, entry in entries.items() if "errors" in entry}
    for operator in ("linear", "experts"):
        known = {key.split()[0] for key in kernels[operator]} | {"fp16"}
        said |= {f"{operator} {one}": "derived from another format" for one in WEIGHTS if one not in known}
    if not any(key.endswith(engine) for key in kernels["experts"]):
        said["experts"] += f"; launches of {engine} derived"
    messages = {
        key: SmallAllReduce.from_dict(entry, f"{name}.yaml: all_reduce {key}")
        for key, entry in data["all_reduce"].items()
    }
    if name != hardware.name:
        ratio = hardware.scale_up_bandwidth / load_hardware(name).scale_up_bandwidth
        messages = {key: curve.with_link(ratio) for key, curve in messages.items()}
    return DecodeCurves(
        hardware=hardware, engine=engine, kernels=kernels, all_reduce=messages, provenance=said, errors=errors
    )  # fmt: skip


def _operators(name: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Operators of a device with the file that has them and their kernels: what it has not is that of another."""
    own = table(name)["kernels"]
    others = [key for key in LAWS if key not in own]
    return [(key, name, one) for key, one in own.items()] + [(key, ANOTHER, table(ANOTHER)["kernels"][key]) for key in others]


def _kernels(hardware: HardwareProfile, name: str) -> Mapping[str, Mapping[str, Kernel]]:
    """Kernels of a device, from which each engine takes its own; those of the curves that are kept are shared."""
    kept = next((one for one in _BUILT.values() if one.hardware is hardware), None)
    return kept.kernels if kept is not None else {
        operator: {
            key: kernel_from(entry, operator, key.split()[0], hardware, f"{whose}.yaml: {operator} {key}")
            for key, entry in entries.items()
        }
        for operator, whose, entries in _operators(name)
    }  # fmt: skip
