"""What the compute half of a profile measures, in the order in which it should be measured; no torch.

First what every profile needs, then shapes by their share of the predicted step time, then shapes around those of the models,
other types, whole layers. Stop anywhere: what is missing keeps the constants of the guess and is said.
"""

from collections.abc import Sequence
from typing import Any

from planner import units
from planner.errors import PlannerError
from planner.lab.profile import definitions
from planner.lab.profile.definitions import COMPILED, EAGER, GEMM_PASSES, Heads
from planner.lab.profile.layer_check import HOST_LAYER, shard_point
from planner.lab.profile.points import Point, Value, unique
from planner.lab.profile.shapes import Wanted, affordable, weighed, with_kernels
from planner.model import load_model

MODELS = {"cuda": ("llama-8b", "llama-70b", "qwen3-30b-a3b"), "cpu": ("gpt3-125m",)}
"""Models of a profile when none is named: heads of 128 with grouped queries, sizes from 4k to 8k, and experts; on a CPU what
it can run."""
GPUS = {"cuda": (8, 64), "cpu": (1, 8)}  # Sizes of job whose best layouts count
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
LARGEST_CHAIN = 2**22  # Elements of a chain's tensor at most: beyond the caches the time of an element stays the same
SUSTAINED_SECONDS = {"cuda": 20.0, "cpu": 3.0}
SUSTAINED_SIZE = {"cuda": 8192, "cpu": 512}
EXPERT_RANKS = 8  # On a GPU whole layers have an eighth of the experts, with the tokens of all, where they divide
BOTH = ("forward", "backward")


def compute_points(
    models: Sequence[str], hardware_guess: str, device: str, *, sequence_length: int | None = None
) -> list[Point]:
    """What to measure, in this order. Raises PlannerError where nothing of the models can be measured on the device."""
    check_device(device)
    named, cpu = tuple(models) or MODELS[device], device == "cpu"
    length = sequence_length or (CPU_SEQUENCE if cpu else None)
    wanted = Wanted(
        models=named, gpus=GPUS[device], sequence_length=length, dtype="fp32" if cpu else None,
        largest_traffic=CPU_TRAFFIC if cpu else units.GIB,
    )  # fmt: skip
    shapes = with_kernels(weighed(wanted, hardware_guess), device)
    layers = [point for name in named for point in layer_points(name, device, length)]
    chains = [point for name in named for point in chain_points(name, length)] if cpu else []
    if cpu:
        shapes = affordable(shapes, CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST)
        layers = affordable(layers, CPU_RATE, CPU_BANDWIDTH, CPU_LONGEST_LAYER)
        if not any(point.family == "gemm" for point in shapes):
            raise PlannerError(
                f"no layer of {', '.join(named)} at {length} tokens runs in {CPU_LONGEST:g} s on one core; "
                "profile a smaller model here, such as gpt3-125m, or shorter sequences"
            )
    last = spanning(device)
    anchors, rest = _anchors(shapes)
    half = max(1, len(rest) // 4)  # layers and clocks after the shapes that most of the time is in
    classes = [point for point in last if point.family == "memory_bound"]
    return unique(
        [*facts(device), *anchors, *chains, *classes, *rest[:half], *layers, *machine(device), *rest[half:], *last]
    )


def check_device(device: str) -> None:
    """Raises PlannerError where the device is unknown."""
    if device not in MODELS:
        raise PlannerError(f"unknown device '{device}'; known: {', '.join(MODELS)}")


def _anchors(shapes: list[Point]) -> tuple[list[Point], list[Point]]:
    """The weightiest point of every kind of operator and pass, so that any budget gives a whole profile; and the rest."""
    kinds: dict[tuple[Value | None, ...], Point] = {}
    for point in shapes:
        kind = (point.family, *(point.values.get(name) for name in ("pass", "dtype", "op", "head_dim", "kernel")))
        kinds.setdefault(kind, point)
    chosen = {point.identity for point in kinds.values()}
    return list(kinds.values()), [point for point in shapes if point.identity not in chosen]


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
    rows, width, dtype = (4096, 4096, "bf16") if device == "cuda" else (256, 512, "fp32")
    return Point.of("warm_up", dtype=dtype, m=rows, n=width, k=width)


def machine(device: str) -> list[Point]:
    """Clocks under load, the host and the way to it."""
    cuda, size = device == "cuda", SUSTAINED_SIZE[device]
    dtype = "bf16" if cuda else "fp32"
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
    dtype, width = ("bf16", 4096) if cuda else ("fp32", 512)
    rows, span = (8192, (1, 4)) if cuda else (512, (1, 2))
    points = [
        definitions.gemm(kind, pass_, rows // scale, width // other, width // deep)
        for kind in (("bf16", "fp16", "fp8", "tf32") if cuda else ("fp32", "bf16"))
        for scale in (1, 4) for other in span for deep in span for pass_ in GEMM_PASSES
    ]  # fmt: skip
    points += [*_attention(cuda), *_classes(cuda, rows, width, dtype)]
    if not cuda:
        return points
    sizes = (2048, 4096, 8192)
    points += [
        definitions.gemm("bf16", way, m, 4096, 4096) for way in (definitions.ACCUMULATING, "wgrad") for m in sizes
    ]
    return points + [
        definitions.gemm(kind, pass_, m, n, 4096)
        for kind in definitions.SCALED if kind != "fp8"
        for m in (2048, 8192) for n in (4096, 14336) for pass_ in GEMM_PASSES
    ]  # fmt: skip


def _attention(cuda: bool) -> list[Point]:
    """Lengths, head sizes, grouped queries or none, not causal; and one rank of context parallelism."""
    seqs = (1024, 4096, 16384) if cuda else (128, 256, 512, 1024)
    kernels, heads = (("flash", "cudnn"), 16) if cuda else (("default",), 4)
    variants = [(heads // 4, True), (heads, True), (heads // 4, False)]
    square = [
        definitions.attention(kind, pass_, Heads(1, heads, kv, dim, dim, seq, causal=causal), kernel)
        for kv, causal in variants
        for kind in (("bf16",) if cuda else ("fp32", "bf16"))
        for dim in (64, 128)
        for seq in (seqs if ((kv, causal) == variants[0] and kind != "bf16") or cuda else seqs[1:2])
        for kernel in kernels for pass_ in BOTH
    ]  # fmt: skip
    keys, kind = (16384, "bf16") if cuda else (512, "fp32")
    return square + [
        definitions.attention(kind, pass_, Heads(1, heads, heads // 4, 128, 128, keys // ranks, keys), kernel)
        for ranks in (2, 4) for kernel in kernels for pass_ in BOTH
    ]  # fmt: skip


def _classes(cuda: bool, rows: int, width: int, dtype: str) -> list[Point]:
    """One point of every class of memory-bound operator, of SwiGLU and RoPE by every kernel."""
    points = [
        definitions.memory_bound(op, pass_, rows, width, dtype)
        for op, pass_ in definitions.MEMORY_BYTES
        if op not in ("swiglu", "rope", "optimizer") and (op != "quantize" or cuda)
    ]
    for kernel in (COMPILED, EAGER) if cuda else (EAGER,):
        for pass_ in BOTH:
            points += [
                definitions.swiglu(pass_, rows, width, dtype, kernel),
                definitions.rope(pass_, rows, (width // 128, width // 512, 128), dtype, kernel),
            ]
    states = rows if cuda else OPTIMIZER_STATES // width
    return [*points, definitions.memory_bound("optimizer", "forward", states, width, "fp32")]


def chain_points(model: str, sequence_length: int | None) -> list[Point]:
    """The chains of plain kernels that a layer and the loss of a model are where nothing is compiled, at their own sizes: on a
    processor each kernel finds in the cache what the one before it has written, which no single kernel shows."""
    spec = load_model(model)
    seq = sequence_length or min(spec.max_sequence_length, 4096)
    columns = {"cross_entropy": spec.vocab_size}
    if spec.norm == "rmsnorm":
        columns["norm"] = spec.hidden_size
    if spec.gated:
        columns["swiglu"] = spec.ffn_size
    if spec.position == "rope" and not spec.is_mla:
        columns["rope"] = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return [
        Point.of(
            "chain", op=op, rows=min(seq, max(LARGEST_CHAIN // width, 1)), columns=width, head_dim=spec.head_dim,
            dtype="fp32", pass_=pass_,
        )
        for op, width in columns.items() for pass_ in BOTH
    ]  # fmt: skip


def layer_points(model: str, device: str, sequence_length: int | None) -> list[Point]:
    """Whole layers of a model, dense and with experts where it has them, forward and backward; on a GPU also the shard of a
    tensor parallel group of 8."""
    spec = load_model(model)
    cuda = device == "cuda"
    divides = spec.num_experts % EXPERT_RANKS == 0 and spec.num_experts >= EXPERT_RANKS * spec.top_k
    ep = EXPERT_RANKS if cuda and divides else 1
    seq = sequence_length or min(spec.max_sequence_length, 4096)
    kinds = [0] * (spec.num_plain_layers > 0) + [ep] * (spec.num_moe_layers > 0)
    return [
        shard_point(spec, pass_, tp, kind, seq, "bf16" if cuda else "fp32")
        for tp in ((1, 8) if cuda else (1,))
        if not any(size % tp for size in (spec.num_heads, spec.ffn_size, spec.shared_expert_ffn_size))
        for kind in kinds for pass_ in BOTH
    ]  # fmt: skip
