"""Which points matter: the operators of the layouts that a search would choose, by their share of the predicted step time.

Shapes come from the cost model's own lists of operators, so what is measured is what will be priced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner import units
from planner.cluster import strides
from planner.cost.estimate import Estimate
from planner.cost.layer.operators import Attention, Gemm, MemoryBound, Operator, Shard
from planner.cost.layer.transformer_layer import embedding, head, layer
from planner.cost.price.compute import gemm_dtype, price
from planner.defaults import Request, resolve
from planner.hardware import HardwareProfile
from planner.lab.profile import definitions
from planner.lab.profile.definitions import COMPILED, EAGER
from planner.lab.profile.points import Identity, Point, Value
from planner.layout import Layout
from planner.rules import Job
from planner.search import search

BEST = 12  # Layouts of each search whose operators count
LEAST_SHARE = 5e-4  # Operators below this share of every layout's step are left out
FEWEST_ROWS = 64  # Tokens below which a product is no layer of a training step


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a profile is for."""

    models: tuple[str, ...]  # Presets or paths
    gpus: tuple[int, ...]  # Sizes of job whose best layouts count: they decide tp and micro batch
    sequence_length: int | None = None  # None = the model's own, at most 8192
    dtype: str | None = None  # Replaces that of all operators
    largest_traffic: float = units.GIB  # Bytes of a memory-bound point at most: more only takes longer


def weighed(wanted: Wanted, hardware: str) -> list[Point]:
    """Points of all models and sizes, the largest share of a step first.

    The weight of a point is its largest share of the predicted step time in any layout, so that a shape which one layout
    lives on is not drowned by many layouts that hardly use it. Raises PlannerError.
    """
    points: dict[Identity, Point] = {}
    for model in wanted.models:
        for gpus in wanted.gpus:
            length = wanted.sequence_length
            job = resolve(Request(model=model, num_gpus=gpus, hardware=hardware, sequence_length=length)).job
            found = search(job, top=BEST)
            for layout, estimate in zip(found.layouts, found.estimates, strict=True):
                for point in layout_points(job, layout, estimate, wanted.dtype, wanted.largest_traffic):
                    before = points.get(point.identity)
                    if before is None or before.weight < point.weight:
                        points[point.identity] = point
    return sorted(points.values(), key=lambda point: -point.weight)


def layout_points(
    job: Job, layout: Layout, estimate: Estimate, dtype: str | None = None, largest: float = units.GIB
) -> list[Point]:
    """The operators of one layout, each with its share of the step time; those of equal shape are added up."""
    shard = Shard(
        workload=job.workload, trainer=job.trainer, layout=Layout.stack([layout]),
        ep_stride=np.array([strides(layout)["ep"] if layout.ep != 1 else 1], dtype=float),
    )  # fmt: skip
    model, step = job.workload.model, float(estimate.step_time[0])
    microbatches = float(np.asarray(layout.num_microbatches))
    stages = float(np.asarray(layout.pp))
    parts = [
        (layer(shard, moe=False)[0], model.num_plain_layers / stages),
        (layer(shard, moe=True)[0] if model.num_moe_layers else [], model.num_moe_layers / stages),
        (embedding(shard)[0], 1.0 / stages),
        (head(shard)[0], 1.0 / stages),
    ]
    shapes = Shapes(shard=shard, hardware=job.cluster.hardware, dtype=dtype, largest=largest)
    summed: dict[Identity, Point] = {}
    for operators, count in parts:
        if not count or not operators:
            continue
        work = price(operators, shard, job.cluster.hardware)
        for operator in operators:
            seconds = {name: _one(getattr(work[operator.name], name)) for name in ("forward", "dgrad", "wgrad")}
            for point in shapes.of(operator, seconds):
                before = summed.get(point.identity)
                share = point.weight * count * microbatches / step + (before.weight if before else 0.0)
                summed[point.identity] = replace(point, weight=share)
    return [point for point in summed.values() if point.weight >= LEAST_SHARE]


def _one(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The points of operators of one shard of a model, the predicted seconds of one run as weight."""

    shard: Shard
    hardware: HardwareProfile
    dtype: str | None  # Replaces that of all operators
    largest: float  # Bytes of a memory-bound point at most

    def of(self, operator: Operator, seconds: dict[str, float]) -> list[Point]:
        """An operator's passes as points; ``seconds`` of one run by pass."""
        if isinstance(operator, Gemm):
            return self._gemm(operator, seconds)
        if isinstance(operator, Attention):
            return self._attention(operator, seconds)
        return self._memory(operator, seconds) if isinstance(operator, MemoryBound) else []

    def _gemm_dtype(self, low_precision: bool) -> str:
        """The recipe that runs: MXFP8 and scales per row are priced as one scale per tensor, but measured as they are."""
        priced, asked = gemm_dtype(self.shard, low_precision, self.hardware), self.shard.workload.precision
        return asked if priced == "fp8" and asked in definitions.SCALED else priced

    def _gemm(self, gemm: Gemm, seconds: dict[str, float]) -> list[Point]:
        dtype = self.dtype or self._gemm_dtype(gemm.low_precision)
        m, n, k, groups = (round(_one(value)) for value in (gemm.m, gemm.n, gemm.k, gemm.groups))
        passes = [name for name in definitions.GEMM_PASSES if name != "wgrad" or gemm.trained]
        if min(m, n, k) < 1:
            return []
        if groups > 1 and not gemm.activations:
            sizes: dict[str, Value] = {"tokens": m, "n": n, "k": k, "groups": groups, "dtype": dtype}
            return [Point.of("grouped_gemm", weight=seconds[name], **sizes, pass_=name) for name in passes]
        if gemm.activations or m < FEWEST_ROWS:
            return []
        return [definitions.gemm(dtype, name, m, n, k, seconds[name]) for name in passes]

    def _attention(self, operator: Attention, seconds: dict[str, float]) -> list[Point]:
        """Queries and keys of one rank; with context parallelism it has more keys than queries."""
        shard, model = self.shard, self.shard.model
        sizes = definitions.Heads(
            batch=_one(shard.batch) * operator.documents, heads=_one(operator.heads),
            kv_heads=max(_one(operator.kv_heads), 1.0), head_dim=float(model.head_dim),
            value_dim=model.attention_output_size / model.num_heads, seq=_one(operator.seq_q), seq_kv=_one(operator.seq_kv),
        )  # fmt: skip
        if sizes.heads % sizes.kv_heads:
            return []
        both = (("forward", "forward"), ("backward", "dgrad"))
        return [definitions.attention(self.dtype or "bf16", name, sizes, weight=seconds[key]) for name, key in both]

    def _memory(self, operator: MemoryBound, seconds: dict[str, float]) -> list[Point]:
        """Representatives of the operator's class, over as many elements as its forward pass moves."""
        shard, model, kind = self.shard, self.shard.model, operator.kind
        dtype = self.dtype or ("fp32" if shard.element > 2 else "bf16")
        weights = {"forward": seconds["forward"], "backward": seconds["dgrad"]}
        columns, moved = float(model.hidden_size), _one(operator.forward)
        if kind == "norm":
            rows = self._rows(moved, 2.0 * shard.element, columns)
            return [
                definitions.memory_bound(f"norm_{name}", name, rows, columns, dtype, weights[name]) for name in weights
            ]
        if kind == "swiglu":
            rows = self._rows(moved, 3.0 * shard.element, columns)
            return [definitions.swiglu(name, rows, columns, dtype, EAGER, weights[name]) for name in weights]
        if kind == "rope":
            count = float(model.num_heads / _one(shard.tp))
            kv, size = (count, model.qk_rope_head_dim) if model.is_mla else (_one(shard.kv_heads), model.head_dim)
            each, width = 2.0 * shard.element, (count + kv) * size
            rows = self._rows(each * _one(shard.tokens) * (count + kv) * size, each, width)
            return [definitions.rope(name, rows, (count, kv, size), dtype, EAGER, weights[name]) for name in weights]
        if kind == "cross_entropy":
            width = float(model.vocab_size) / _one(shard.tp)
            rows = self._rows(moved, 6.0, width)
            return [
                *(definitions.memory_bound(kind, name, rows, width, dtype, weights[name]) for name in weights),
                definitions.memory_bound(*definitions.WHOLE_LOSS, rows, width, dtype, 0.5 * sum(weights.values())),
            ]
        if kind not in ("elementwise", "permute", "copy") or moved <= 0.0:
            return []
        element = definitions.ELEMENT[dtype]
        each = definitions.MEMORY_BYTES[kind, "forward"][0] * element
        rows = self._rows(moved * element / shard.element, each, columns)
        return [definitions.memory_bound(kind, "forward", rows, columns, dtype, sum(weights.values()))]

    def _rows(self, bytes_moved: float, each: float, width: float) -> float:
        """Rows of equal traffic, to a power of two: bandwidth does not change within an octave, nor beyond the largest."""
        wanted = min(bytes_moved, self.largest) / (each * width)
        return float(2 ** max(0, round(math.log2(max(wanted, 1.0)))))


def with_kernels(points: Sequence[Point], device: str) -> list[Point]:
    """Chains of plain operations as this device can run them, and weight gradients of experts also as they are added up.

    On a GPU what torch.compile makes of a chain stands before the chain itself; a processor runs the chain. A grouped
    weight gradient that is added to an fp32 sum: torch's grouped kernel and another one that adds, or one product after the
    other that adds itself; on a processor the latter, into the fp32 gradient.
    """

    def changed(point: Point, **values: Value) -> Point:
        return Point.of(point.family, weight=point.weight, **{**point.values, **values})

    found: list[Point] = []
    for point in points:
        if device == "cuda" and point.values.get("kernel") == EAGER:
            found.append(changed(point, kernel=COMPILED))
        found.append(point)
        summed = point.family == "grouped_gemm" and point["pass"] == "wgrad"
        if summed and point["dtype"] in ("bf16", "fp16", "fp32"):
            added = changed(point, **{"pass": definitions.ACCUMULATING})
            found += [added, changed(added, kernel="loop")] if device == "cuda" else [added]
    return found


def affordable(points: Sequence[Point], rate: float, bandwidth: float, most_s: float) -> list[Point]:
    """Points whose one run takes at most ``most_s`` at a rate (FLOP/s) and a bandwidth (bytes/s): a CPU cannot wait for
    the shapes of a GPU."""
    return [
        point for point in points
        if definitions.flop(point) / rate + definitions.moved_bytes(point) / bandwidth <= most_s
    ]  # fmt: skip
