"""Which points matter: the operators of the layouts that a search would choose, by their share of the predicted step time.

Shapes come from the cost model's own lists of operators, so what is measured is what will be priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import units
from planner.cluster import strides
from planner.cost.estimate import Estimate
from planner.cost.layer.operators import Attention, Gemm, MemoryBound, Operator, Shard
from planner.cost.layer.transformer_layer import embedding, head, layer
from planner.cost.price.compute import Work, gemm_dtype, price
from planner.defaults import Request, resolve
from planner.hardware import HardwareProfile
from planner.lab.profile import definitions
from planner.lab.profile.points import Point, Value
from planner.layout import Layout
from planner.rules import Job
from planner.search import search

BEST = 12
"""Layouts of each search whose operators count."""
LEAST_SHARE = 5e-4
"""Operators below this share of every layout's step are left out."""
FEWEST_ROWS = 64
"""Tokens below which a product is no layer of a training step."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a profile is for."""

    models: tuple[str, ...]
    """Presets or paths."""
    gpus: tuple[int, ...]
    """Sizes of job whose best layouts count: they decide tp and micro batch."""
    sequence_length: int | None = None
    """None = the model's own, at most 8192."""
    precision: str | None = None
    """None = bf16."""
    largest_traffic: float = units.GIB
    """Bytes of a memory-bound point at most: more only takes longer."""


def weighed(wanted: Wanted, hardware: str, dtype: str | None = None) -> list[Point]:
    """Points of all models and sizes, the largest share of a step first. ``dtype`` replaces that of all of them.

    The weight of a point is its largest share of the predicted step time in any layout, so that a shape which one layout
    lives on is not drowned by many layouts that hardly use it. Raises PlannerError.
    """
    points: dict[object, Point] = {}
    for model in wanted.models:
        for gpus in wanted.gpus:
            request = Request(
                model=model, num_gpus=gpus, hardware=hardware, sequence_length=wanted.sequence_length,
                precision=wanted.precision,
            )  # fmt: skip
            job = resolve(request).job
            found = search(job, top=BEST)
            for layout, estimate in zip(found.layouts, found.estimates, strict=True):
                _collect(points, layout_points(job, layout, estimate, dtype, wanted.largest_traffic))
    return sorted(points.values(), key=lambda point: -point.weight)


def _collect(points: dict[object, Point], more: Iterable[Point]) -> None:
    for point in more:
        before = points.get(point.identity)
        if before is None or before.weight < point.weight:
            points[point.identity] = point


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
    blocks = [
        (layer(shard, moe=False)[0], model.num_plain_layers / stages),
        (layer(shard, moe=True)[0] if model.num_moe_layers else [], model.num_moe_layers / stages),
        (embedding(shard)[0], 1.0 / stages),
        (head(shard)[0], 1.0 / stages),
    ]
    summed: dict[object, Point] = {}
    for operators, count in blocks:
        if not count or not operators:
            continue
        work = price(operators, shard, job.cluster.hardware)
        for operator in operators:
            for point in operator_points(operator, work[operator.name], shard, dtype, job.cluster.hardware, largest):
                share = point.weight * count * microbatches / step
                before = summed.get(point.identity)
                summed[point.identity] = Point(
                    family=point.family, key=point.key, weight=share + (before.weight if before else 0.0)
                )
    return [point for point in summed.values() if point.weight >= LEAST_SHARE]


def operator_points(
    operator: Operator, work: Work, shard: Shard, dtype: str | None, hardware: HardwareProfile, largest: float
) -> list[Point]:
    """An operator's passes as points, the predicted seconds of one run as weight."""
    seconds = {name: _one(getattr(work, name)) for name in ("forward", "dgrad", "wgrad")}
    if isinstance(operator, Gemm):
        return _gemm_points(operator, seconds, dtype or _gemm_dtype(shard, operator.low_precision, hardware))
    if isinstance(operator, Attention):
        return _attention_points(operator, seconds, shard, dtype or "bf16")
    if isinstance(operator, MemoryBound):
        return _memory_points(operator, seconds, shard, dtype or ("fp32" if shard.element > 2 else "bf16"), largest)
    return []


def _one(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])


def _gemm_dtype(shard: Shard, low_precision: bool, hardware: HardwareProfile) -> str:
    """The recipe that runs: MXFP8 and scales per row are priced at the rate of one scale per tensor, but measured as they are."""
    priced, asked = gemm_dtype(shard, low_precision, hardware), shard.workload.precision
    return asked if priced == "fp8" and asked in definitions.SCALED else priced


def _gemm_points(gemm: Gemm, seconds: dict[str, float], dtype: str) -> list[Point]:
    m, n, k, groups = (round(_one(value)) for value in (gemm.m, gemm.n, gemm.k, gemm.groups))
    passes = [name for name in definitions.GEMM_PASSES if name != "wgrad" or gemm.trained]
    if min(m, n, k) < 1:
        return []
    if groups > 1 and not gemm.activations:
        sizes: dict[str, Value] = {"tokens": m, "n": n, "k": k, "groups": groups, "dtype": dtype}
        return [Point.of("grouped_gemm", weight=seconds[name], **sizes, **{"pass": name}) for name in passes]
    if gemm.activations or m < FEWEST_ROWS:
        return []
    return [definitions.gemm(dtype, name, m, n, k, seconds[name]) for name in passes]


def _attention_points(operator: Attention, seconds: dict[str, float], shard: Shard, dtype: str) -> list[Point]:
    """Queries and keys of one rank; with context parallelism it has more keys than queries."""
    model = shard.model
    sizes: dict[str, Any] = {
        "batch": _one(shard.batch) * operator.documents, "heads": _one(operator.heads),
        "kv_heads": max(_one(operator.kv_heads), 1.0), "head_dim": float(model.head_dim),
        "value_dim": model.attention_output_size / model.num_heads, "seq": _one(operator.seq_q),
        "seq_kv": _one(operator.seq_kv),
    }  # fmt: skip
    if sizes["heads"] % sizes["kv_heads"]:
        return []
    both = (("forward", "forward"), ("backward", "dgrad"))
    return [definitions.attention(dtype, name, **sizes, weight=seconds[key]) for name, key in both]


_CLASSES = {"elementwise": "elementwise", "permute": "permute", "copy": "copy"}


def _memory_points(
    operator: MemoryBound, seconds: dict[str, float], shard: Shard, dtype: str, largest: float
) -> list[Point]:
    """Representatives of the operator's class, over as many elements as its forward pass moves."""
    weights = {"forward": seconds["forward"], "backward": seconds["dgrad"]}
    element, columns = definitions.ELEMENT[dtype], float(shard.model.hidden_size)
    kind = operator.kind

    def rows(bytes_moved: float, each: float, width: float) -> float:
        """Rows of equal traffic, to a power of two: bandwidth does not change within an octave, nor beyond the largest."""
        wanted = min(bytes_moved, largest) / (each * width)
        return float(2 ** max(0, round(math.log2(max(wanted, 1.0)))))

    moved = _one(operator.forward)
    if kind == "norm":
        count = rows(moved, 2.0 * shard.element, columns)
        return [
            definitions.memory_bound("norm_forward", "forward", count, columns, dtype, weights["forward"]),
            definitions.memory_bound("norm_backward", "backward", count, columns, dtype, weights["backward"]),
        ]
    if kind == "swiglu":
        count = rows(moved, 3.0 * shard.element, columns)
        return [definitions.swiglu(name, count, columns, dtype, definitions.EAGER, weights[name]) for name in weights]
    if kind == "rope":
        model = shard.model
        heads = float(model.num_heads / _one(shard.tp))
        kv, size = (heads, model.qk_rope_head_dim) if model.is_mla else (_one(shard.kv_heads), model.head_dim)
        each = 2.0 * shard.element
        count = rows(each * _one(shard.tokens) * (heads + kv) * size, each, (heads + kv) * size)
        return [
            definitions.rope(name, count, heads, kv, size, dtype, definitions.EAGER, weights[name]) for name in weights
        ]
    if kind == "cross_entropy":
        width = float(shard.model.vocab_size) / _one(shard.tp)
        count = rows(moved, 6.0, width)
        return [
            *(definitions.memory_bound("cross_entropy", name, count, width, dtype, weights[name]) for name in weights),
            definitions.memory_bound(*definitions.WHOLE_LOSS, count, width, dtype, 0.5 * sum(weights.values())),
        ]
    if kind not in _CLASSES or moved <= 0.0:
        return []
    each = definitions.MEMORY_BYTES[_CLASSES[kind], "forward"][0] * element
    count = rows(moved * element / shard.element, each, columns)
    return [definitions.memory_bound(_CLASSES[kind], "forward", count, columns, dtype, sum(weights.values()))]


def with_kernels(points: Sequence[Point], device: str) -> list[Point]:
    """Chains of plain operations as this device can run them, and weight gradients of experts also as they are added up.

    On a GPU what torch.compile makes of a chain stands before the chain itself; a processor runs the chain. A grouped
    weight gradient that is added to an fp32 sum: torch's grouped kernel and another one that adds, or one product after the
    other that adds itself; on a processor the latter, into the fp32 gradient.
    """
    found: list[Point] = []
    for point in points:
        if device == "cuda" and point.values.get("kernel") == definitions.EAGER:
            found.append(_changed(point, kernel=definitions.COMPILED))
        found.append(point)
        summed = point.family == "grouped_gemm" and point["pass"] == "wgrad"
        if summed and point["dtype"] in ("bf16", "fp16", "fp32"):
            found += [
                _changed(point, **{"pass": definitions.ACCUMULATING}, **more)
                for more in (({}, {"kernel": "loop"}) if device == "cuda" else ({},))
            ]
    return found


def _changed(point: Point, **values: Value) -> Point:
    return Point.of(point.family, weight=point.weight, **{**point.values, **values})


def affordable(points: Sequence[Point], rate: float, bandwidth: float, most_s: float) -> list[Point]:
    """Points whose one run takes at most ``most_s`` at a rate (FLOP/s) and a bandwidth (bytes/s): a CPU cannot wait for
    the shapes of a GPU."""
    return [
        point for point in points
        if definitions.flop(point) / rate + definitions.moved_bytes(point) / bandwidth <= most_s
    ]  # fmt: skip
