"""What the compute half of a profile measures, in the order in which it should be measured; no torch.

First what every profile needs, then shapes by their share of the predicted step time, then shapes around those of the models,
other types, whole layers. Stop anywhere: what is missing keeps the constants of the guess and is said. Shapes are those of the
layouts that a search would choose, from the cost model's own lists of operators: what is measured is what will be priced.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from planner import units
from planner.cluster import strides
from planner.cost.estimate import Estimate
from planner.cost.layer.operators import Attention, Gemm, MemoryBound, Operator, Shard
from planner.cost.layer.transformer_layer import embedding, head, layer
from planner.cost.price.compute import gemm_dtype, price
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.lab.profile import definitions
from planner.lab.profile.definitions import COMPILED, EAGER, GEMM_PASSES, Heads
from planner.lab.profile.layer_check import HOST_LAYER, first, shard_point
from planner.lab.profile.points import Point, Value
from planner.layout import Layout
from planner.model import load_model
from planner.record import record
from planner.rules import Job
from planner.search import search

MODELS = {"cuda": ("llama-8b", "llama-70b", "qwen3-30b-a3b"), "cpu": ("gpt3-125m",)}
"""Models of a profile when none is named: heads of 128 with grouped queries, sizes from 4k to 8k, and experts; on a CPU what
it can run."""
GPUS = {"cuda": (8, 64), "cpu": (1, 8)}  # Sizes of job whose best layouts count
DTYPE = {"cuda": "bf16", "cpu": "fp32"}  # Of what has one type only
CPU_SEQUENCE = 512
CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST, CPU_LONGEST_LAYER = 50e9, 8e9, 0.06, 0.6
"""FLOP/s and bytes/s of a slow core, and the longest run of an operator and of a layer there in seconds."""
CPU_TRAFFIC = 16.0 * units.MIB  # Bytes of a memory-bound point on a CPU: about what one operator of a layer moves there
YARDSTICK: dict[str, Any] = {"kind": "product", "m": 192, "n": 256, "k": 512, "dtype": "fp32"}
"""Rows, columns and depth of the product of a processor's yardstick: a few tenths of a millisecond."""
STREAM: dict[str, Any] = {"kind": "stream", "elements": 2**21, "dtype": "fp32"}
"""The yardstick of the update, which only moves bytes: a sum of two arrays into a third, 25 MB, a few milliseconds. What slows a
product down, a neighbour on the core, slows memory less."""
OPTIMIZER_STATES = 8192 * 512
"""Parameters of the update that a processor is timed with: 117 MB, as states of a model lie in memory, not in a cache."""
SUSTAINED_SECONDS = {"cuda": 20.0, "cpu": 3.0}
SUSTAINED_SIZE = {"cuda": 8192, "cpu": 512}
EXPERT_RANKS = 8  # On a GPU whole layers have an eighth of the experts, with the tokens of all, where they divide
BOTH = ("forward", "backward")
BEST = 12  # Layouts of each search whose operators count
LEAST_SHARE = 5e-4  # Operators below this share of every layout's step are left out
FEWEST_ROWS = 64  # Tokens below which a product is no layer of a training step


def compute_points(
    models: Sequence[str], hardware_guess: str, device: str, *, sequence_length: int | None = None
) -> list[Point]:
    """What to measure, in this order. Raises PlannerError where nothing of the models can be measured on the device."""
    check_device(device)
    named, cpu = models or MODELS[device], device == "cpu"
    length = sequence_length or (CPU_SEQUENCE if cpu else None)
    dtype, largest = ("fp32", CPU_TRAFFIC) if cpu else (None, units.GIB)
    shapes = with_kernels(weighed(named, GPUS[device], hardware_guess, length, dtype, largest), device)
    layers = [point for name in named for point in layer_points(name, device, length)]
    if cpu:
        shapes = affordable(shapes, CPU_LONGEST)
        layers = affordable(layers, CPU_LONGEST_LAYER)
        if not any(point.family == "gemm" for point in shapes):
            raise PlannerError(
                f"no layer of {', '.join(named)} at {length} tokens runs in {CPU_LONGEST:g} s on one core; "
                "profile a smaller model here, such as gpt3-125m, or shorter sequences"
            )
    kinds: dict[Any, Point] = {}  # the weightiest of every kind of operator and pass: any budget gives a whole profile
    for point in shapes:
        names = ("pass", "dtype", "op", "head_dim", "kernel")
        kinds.setdefault((point.family, *(point.values.get(name) for name in names)), point)
    anchors = set(kinds.values())
    rest = [point for point in shapes if point not in anchors]
    most = max(1, len(rest) // 4)  # layers and clocks after the shapes that most of the time is in
    last = spanning(device)
    classes = [point for point in last if point.family == "memory_bound"]
    first = [*facts(device), *kinds.values(), *classes, *rest[:most], *layers]
    return list(dict.fromkeys([*first, *machine(device), *rest[most:], *last]))


def check_device(device: str) -> None:
    """Raises PlannerError where the device is unknown."""
    if device not in MODELS:
        raise PlannerError(f"unknown device '{device}'; known: {', '.join(MODELS)}")


def facts(device: str) -> list[Point]:
    """Cheap, and needed by every profile."""
    cuda = device == "cuda"
    names = ("usable", "context", "allocator_rounding", "workspace") if cuda else ("usable",)
    return [
        *(Point.of("bytes", name=name) for name in names),
        *(Point.of("yardstick", **one) for one in (() if cuda else (YARDSTICK, STREAM))),
        *(Point.of("launch", kind=kind) for kind in ("stream", *(("graph",) if cuda else ()), *HOST_LAYER)),
    ]


def warm_up_point(device: str) -> Point:
    """A product and an addition of a layer's size."""
    rows, width = (4096, 4096) if device == "cuda" else (256, 512)
    return Point.of("warm_up", dtype=DTYPE[device], m=rows, n=width, k=width)


def machine(device: str) -> list[Point]:
    """Clocks under load, the host and the way to it."""
    cuda, size, dtype = device == "cuda", SUSTAINED_SIZE[device], DTYPE[device]
    points = [
        definitions.gemm(dtype, "forward", size, size, size),
        Point.of("sustained", dtype=dtype, m=size, n=size, k=size, seconds=SUSTAINED_SECONDS[device]),
        Point.of("host_stream", bytes=int((512 if cuda else 64) * units.MIB)),
        Point.of("cpu_adam", parameters=int((64 if cuda else 4) * units.MIB)),
    ]
    ways = ("h2d", "d2h") if cuda else ()
    return points + [Point.of("host_copy", direction=way, bytes=int(256 * units.MIB)) for way in ways]


def spanning(device: str) -> list[Point]:
    """Shapes around those of the models, for the fits: sizes that no layout has, classes that no trainer of the search uses."""
    cuda = device == "cuda"
    rows, width, span = (8192, 4096, (1, 4)) if cuda else (512, 512, (1, 2))
    dtypes = ("bf16", "fp16", "fp8", "tf32") if cuda else ("fp32", "bf16")
    points = [
        definitions.gemm(dtype, pass_, rows // scale, width // other, width // deep)
        for dtype, scale, other, deep, pass_ in product(dtypes, (1, 4), span, span, GEMM_PASSES)
    ]
    points += [*_attention(cuda), *_classes(cuda, rows, width)]
    if cuda:
        summed = (definitions.ACCUMULATING, "wgrad")
        points += [definitions.gemm("bf16", way, m, 4096, 4096) for way in summed for m in (2048, 4096, 8192)]
        points += [
            definitions.gemm(dtype, pass_, m, n, 4096)
            for dtype, m, n, pass_ in product(definitions.SCALED[1:], (2048, 8192), (4096, 14336), GEMM_PASSES)
        ]
    return points


def _attention(cuda: bool) -> list[Point]:
    """Lengths, head sizes, grouped queries or none, not causal; and one rank of context parallelism."""
    seqs = (1024, 4096, 16384) if cuda else (128, 256, 512, 1024)
    kernels, heads = (("flash", "cudnn"), 16) if cuda else (("default",), 4)
    grouped = (heads // 4, True)
    square = [
        definitions.attention(dtype, pass_, Heads(1, heads, kv, dim, dim, seq, causal=causal), kernel)
        for (kv, causal), dtype, dim in product(
            (grouped, (heads, True), (heads // 4, False)), ("bf16",) if cuda else ("fp32", "bf16"), (64, 128)
        )
        for seq in (seqs if cuda or ((kv, causal) == grouped and dtype != "bf16") else seqs[1:2])
        for kernel, pass_ in product(kernels, BOTH)
    ]
    keys, dtype = (16384, "bf16") if cuda else (512, "fp32")
    return square + [
        definitions.attention(dtype, pass_, Heads(1, heads, heads // 4, 128, 128, keys // ranks, keys), kernel)
        for ranks, kernel, pass_ in product((2, 4), kernels, BOTH)
    ]


def _classes(cuda: bool, rows: int, width: int) -> list[Point]:
    """One point of every class of memory-bound operator, of SwiGLU and RoPE by every kernel."""
    dtype, heads = DTYPE["cuda" if cuda else "cpu"], (width // 128, width // 512, 128)
    points = [
        definitions.memory_bound(op, pass_, rows, width, dtype)
        for op, pass_ in definitions.MEMORY_BYTES
        if op not in ("swiglu", "rope", "optimizer") and (op != "quantize" or cuda)
    ]
    for kernel, pass_ in product((COMPILED, EAGER) if cuda else (EAGER,), BOTH):
        points.append(definitions.memory_bound("swiglu", pass_, rows, width, dtype, kernel=kernel))
        points.append(definitions.rope(pass_, rows, heads, dtype, kernel))
    states = rows if cuda else OPTIMIZER_STATES // width
    return [*points, definitions.memory_bound("optimizer", "forward", states, width, "fp32")]


def layer_points(model: str, device: str, sequence_length: int | None) -> list[Point]:
    """Whole layers of a model, dense and with experts where it has them, forward and backward; on a GPU also the shard of a
    tensor parallel group of 8."""
    spec, cuda = load_model(model), device == "cuda"
    divides = spec.num_experts % EXPERT_RANKS == 0 and spec.num_experts >= EXPERT_RANKS * spec.top_k
    length = sequence_length or min(spec.max_sequence_length, 4096)
    kinds = [0] * (spec.num_plain_layers > 0)
    kinds += [EXPERT_RANKS if cuda and divides else 1] * (spec.num_moe_layers > 0)
    return [
        shard_point(spec, pass_, tp, kind, length, DTYPE[device])
        for tp in ((1, 8) if cuda else (1,))
        if not any(size % tp for size in (spec.num_heads, spec.ffn_size, spec.shared_expert_ffn_size))
        for kind in kinds for pass_ in BOTH
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ shapes of layouts


def weighed(
    models: Sequence[str], gpus: Sequence[int], hardware: str, sequence_length: int | None = None,
    dtype: str | None = None, largest: float = units.GIB,
) -> list[Point]:  # fmt: skip
    """Points of all models on all numbers of GPUs (they decide tp and micro batch), the largest share of a step first.

    The weight of a point is its largest share of the predicted step time in any layout. ``sequence_length`` None is the
    model's own, at most 8192; ``dtype`` replaces that of all operators; ``largest`` bytes of a memory-bound point at most:
    more only takes longer. Raises PlannerError.
    """
    points: list[Point] = []
    for model, count in product(models, gpus):
        job = resolve(Request(model=model, num_gpus=count, hardware=hardware, sequence_length=sequence_length)).job
        found = search(job, top=BEST)
        for layout, estimate in zip(found.layouts, found.estimates, strict=True):
            points += layout_points(job, layout, estimate, dtype, largest)
    return list(dict.fromkeys(sorted(points, key=lambda point: -point.weight)))


def layout_points(
    job: Job, layout: Layout, estimate: Estimate, dtype: str | None = None, largest: float = units.GIB
) -> list[Point]:
    """The operators of one layout, each with its share of the step time; those of equal shape are added up."""
    shard = Shard(
        workload=job.workload, trainer=job.trainer, layout=Layout.stack([layout]),
        ep_stride=np.array([strides(layout)["ep"] if layout.ep != 1 else 1], dtype=float),
    )  # fmt: skip
    model, hardware, stages = job.workload.model, job.cluster.hardware, first(layout.pp)
    parts = [
        (layer(shard, moe=False)[0], model.num_plain_layers / stages),
        (layer(shard, moe=True)[0] if model.num_moe_layers else [], model.num_moe_layers / stages),
        (embedding(shard)[0], 1.0 / stages),
        (head(shard)[0], 1.0 / stages),
    ]
    shapes = Shapes(shard=shard, hardware=hardware, dtype=dtype, largest=largest)
    weights: dict[Point, float] = {}
    for operators, count in parts:
        if not count or not operators:
            continue
        work = price(operators, shard, hardware)
        for operator in operators:
            seconds = {name: first(getattr(work[operator.name], name)) for name in ("forward", "dgrad", "wgrad")}
            for point in shapes.of(operator, seconds):
                share = point.weight * count * first(layout.num_microbatches) / first(estimate.step_time)
                weights[point] = weights.get(point, 0.0) + share
    return [replace(point, weight=weight) for point, weight in weights.items() if weight >= LEAST_SHARE]


@record
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

    def _gemm(self, gemm: Gemm, seconds: dict[str, float]) -> list[Point]:
        """MXFP8 and scales per row are priced as one scale per tensor, but measured as they are."""
        priced, asked = gemm_dtype(self.shard, gemm.low_precision, self.hardware), self.shard.workload.precision
        dtype = self.dtype or (asked if priced == "fp8" and asked in definitions.SCALED else priced)
        m, n, k, groups = (round(first(value)) for value in (gemm.m, gemm.n, gemm.k, gemm.groups))
        passes = [name for name in definitions.GEMM_PASSES if name != "wgrad" or gemm.trained]
        if min(m, n, k) < 1 or gemm.activations or (groups <= 1 and m < FEWEST_ROWS):
            return []
        if groups > 1:
            sizes: dict[str, Value] = {"tokens": m, "n": n, "k": k, "groups": groups, "dtype": dtype}
            return [Point.of("grouped_gemm", weight=seconds[name], **sizes, pass_=name) for name in passes]
        return [definitions.gemm(dtype, name, m, n, k, seconds[name]) for name in passes]

    def _attention(self, operator: Attention, seconds: dict[str, float]) -> list[Point]:
        """Queries and keys of one rank; with context parallelism it has more keys than queries."""
        model = self.shard.model
        sizes = definitions.Heads(
            batch=first(self.shard.batch) * first(operator.documents), heads=first(operator.heads),
            kv_heads=max(first(operator.kv_heads), 1.0), head_dim=float(model.head_dim),
            value_dim=model.attention_output_size / model.num_heads, seq=first(operator.seq_q), seq_kv=first(operator.seq_kv),
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
        columns, moved, e = float(model.hidden_size), first(operator.forward), shard.element
        if bytes_each := {"norm": 2.0 * e, "swiglu": 3.0 * e, "cross_entropy": 6.0}.get(kind):
            width = float(model.vocab_size) / first(shard.tp) if kind == "cross_entropy" else columns
            size = self._rows(moved, bytes_each, width), width, dtype
            more: dict[str, Any] = {"kernel": EAGER} if kind == "swiglu" else {}
            names = {name: f"norm_{name}" if kind == "norm" else kind for name in weights}
            return [definitions.memory_bound(names[name], name, *size, weights[name], **more) for name in weights]
        if kind == "rope":
            count = float(model.num_heads / first(shard.tp))
            kv, each = (count, model.qk_rope_head_dim) if model.is_mla else (first(shard.kv_heads), model.head_dim)
            rows = self._rows(2.0 * e * first(shard.tokens) * (count + kv) * each, 2.0 * e, (count + kv) * each)
            return [definitions.rope(name, rows, (count, kv, each), dtype, EAGER, weights[name]) for name in weights]
        if kind not in ("elementwise", "permute", "copy") or moved <= 0.0:
            return []
        element = definitions.ELEMENT[dtype]
        rows = self._rows(moved * element / e, definitions.MEMORY_BYTES[kind, "forward"][0] * element, columns)
        return [definitions.memory_bound(kind, "forward", rows, columns, dtype, sum(weights.values()))]

    def _rows(self, bytes_moved: float, each: float, width: float) -> float:
        """Rows of equal traffic, to a power of two: bandwidth does not change within an octave, nor beyond the largest."""
        wanted = min(bytes_moved, self.largest) / (each * width)
        return float(2 ** max(0, round(math.log2(max(wanted, 1.0)))))


def with_kernels(points: Sequence[Point], device: str) -> list[Point]:
    """On a GPU what torch.compile makes of plain operations stands before these themselves. Weight gradients of experts
    also as they are added to an fp32 sum: by torch's grouped kernel and another one that adds (a GPU), and one after the other."""

    cuda = device == "cuda"
    summed: dict[str, Value] = {"pass": definitions.ACCUMULATING}
    found: list[Point] = []
    for point in points:
        ways: list[dict[str, Value]] = [{}]
        if cuda and point.values.get("kernel") == EAGER:
            ways = [{"kernel": COMPILED}, {}]
        elif point.family == "grouped_gemm" and point["pass"] == "wgrad" and point["dtype"] in ("bf16", "fp16", "fp32"):
            ways = [{}, summed, {**summed, "kernel": "loop"}] if cuda else [{}, summed]
        found += [Point.of(point.family, weight=point.weight, **point.values | way) for way in ways]
    return found


def affordable(points: Sequence[Point], most_s: float) -> list[Point]:
    """Points whose one run takes at most ``most_s`` on a slow core: a CPU cannot wait for the shapes of a GPU."""

    def seconds(point: Point) -> float:
        return definitions.flop(point) / CPU_RATE + definitions.moved_bytes(point) / CPU_BANDWIDTH

    return [point for point in points if seconds(point) <= most_s]
