"""Points beside the shapes of the models: facts, clocks, shapes around those of the models, other types, whole layers."""

from __future__ import annotations

from planner import units
from planner.lab.profile import definitions
from planner.lab.profile.definitions import COMPILED, EAGER
from planner.lab.profile.layer_check import HOST_LAYER, shard_point
from planner.lab.profile.points import Point, Value
from planner.model import load_model

YARDSTICK: dict[str, Value] = {"kind": "product", "m": 192, "n": 256, "k": 512, "dtype": "fp32"}
"""Rows, columns and depth of the product of a processor's yardstick: a few tenths of a millisecond."""
STREAM: dict[str, Value] = {"kind": "stream", "elements": 2**21, "dtype": "fp32"}
"""The yardstick of the update, which only moves bytes: a sum of two arrays into a third, 25 MB, a few milliseconds. What slows a
product down, a neighbour on the core, slows memory less."""
OPTIMIZER_STATES = 8192 * 512
"""Parameters of the update that a processor is timed with: 117 MB, as states of a model lie in memory, not in a cache."""
LARGEST_CHAIN = 2**22
"""Elements of a chain's tensor at most: beyond the caches the time of an element stays the same."""
SUSTAINED_SECONDS = {"cuda": 20.0, "cpu": 3.0}
SUSTAINED_SIZE = {"cuda": 8192, "cpu": 512}
EXPERT_RANKS = 8
"""On a GPU whole layers have an eighth of the experts, with the tokens of all, where they divide."""


def facts(device: str) -> list[Point]:
    """Cheap, and needed by every profile."""
    names = ("usable", "context", "allocator_rounding", "workspace") if device == "cuda" else ("usable",)
    kinds = ("stream", "graph", *HOST_LAYER) if device == "cuda" else ("stream", *HOST_LAYER)
    both = (YARDSTICK, STREAM) if device == "cpu" else ()
    rate = [Point(family="yardstick", key=tuple(sorted(one.items()))) for one in both]
    return [
        *(Point.of("bytes", name=name) for name in names),
        *rate,
        *(Point.of("launch", kind=kind) for kind in kinds),
    ]


def warm_up_point(device: str) -> Point:
    """A product and an addition of a layer's size."""
    rows, width, dtype = (4096, 4096, "bf16") if device == "cuda" else (256, 512, "fp32")
    return Point.of("warm_up", dtype=dtype, m=rows, n=width, k=width)


def machine(device: str) -> list[Point]:
    """Clocks under load, the host and the way to it."""
    size, dtype = SUSTAINED_SIZE[device], "bf16" if device == "cuda" else "fp32"
    points = [
        definitions.gemm(dtype, "forward", size, size, size),
        Point.of("sustained", dtype=dtype, m=size, n=size, k=size, seconds=SUSTAINED_SECONDS[device]),
        Point.of("host_stream", bytes=int((512 if device == "cuda" else 64) * units.MIB)),
        Point.of("cpu_adam", parameters=int((64 if device == "cuda" else 4) * units.MIB)),
    ]
    if device == "cuda":
        points += [Point.of("host_copy", direction=way, bytes=int(256 * units.MIB)) for way in ("h2d", "d2h")]
    return points


def spanning(device: str) -> list[Point]:
    """Shapes around those of the models, for the fits: sizes that no layout has, classes that no trainer of the search uses."""
    cuda = device == "cuda"
    dtype, width = ("bf16", 4096) if cuda else ("fp32", 512)
    rows, span = (8192, (1, 4)) if cuda else (512, (1, 2))
    more = [
        definitions.gemm(kind, pass_, rows // scale, width // other, width // deep)
        for kind in (("bf16", "fp16", "fp8", "tf32") if cuda else ("fp32", "bf16"))
        for scale in (1, 4) for other in span for deep in span
        for pass_ in definitions.GEMM_PASSES
    ]  # fmt: skip
    more += [*_attention(cuda), *_classes(cuda, rows, width, dtype)]
    if cuda:
        more += [definitions.gemm("bf16", definitions.ACCUMULATING, m, 4096, 4096) for m in (2048, 4096, 8192)]
        more += [definitions.gemm("bf16", "wgrad", m, 4096, 4096) for m in (2048, 4096, 8192)]
        more += [
            definitions.gemm(kind, pass_, m, n, 4096)
            for kind in definitions.SCALED if kind != "fp8"
            for m in (2048, 8192) for n in (4096, 14336) for pass_ in definitions.GEMM_PASSES
        ]  # fmt: skip
    return more


def _attention(cuda: bool) -> list[Point]:
    """Lengths, head sizes, grouped queries or none, not causal; and one rank of context parallelism."""
    seqs, dims = ((1024, 4096, 16384), (64, 128)) if cuda else ((128, 256, 512, 1024), (64, 128))
    kernels, heads = (("flash", "cudnn"), 16) if cuda else (("default",), 4)
    variants = [(heads // 4, True), (heads, True), (heads // 4, False)]
    square = [
        definitions.attention(kind, pass_, 1, heads, kv, dim, dim, seq, kernel=kernel, causal=causal)
        for kv, causal in variants
        for kind in (("bf16",) if cuda else ("fp32", "bf16"))
        for dim in dims for seq in (seqs if ((kv, causal) == variants[0] and kind != "bf16") or cuda else seqs[1:2])
        for kernel in kernels for pass_ in ("forward", "backward")
    ]  # fmt: skip
    keys, kind = (16384, "bf16") if cuda else (512, "fp32")
    return square + [
        definitions.attention(kind, pass_, 1, heads, heads // 4, 128, 128, keys // ranks, seq_kv=keys, kernel=kernel)
        for ranks in (2, 4) for kernel in kernels for pass_ in ("forward", "backward")
    ]  # fmt: skip


def _classes(cuda: bool, rows: int, width: int, dtype: str) -> list[Point]:
    """One point of every class of memory-bound operator, of SwiGLU and RoPE by every kernel."""
    more = [
        definitions.memory_bound(op, pass_, rows, width, dtype)
        for op, pass_ in definitions.MEMORY_BYTES
        if op not in ("swiglu", "rope", "optimizer") and (op != "quantize" or cuda)
    ]
    for kernel in (COMPILED, EAGER) if cuda else (EAGER,):
        for pass_ in ("forward", "backward"):
            more += [
                definitions.swiglu(pass_, rows, width, dtype, kernel),
                definitions.rope(pass_, rows, width // 128, width // 512, 128, dtype, kernel),
            ]
    states = rows if cuda else OPTIMIZER_STATES // width
    return [*more, definitions.memory_bound("optimizer", "forward", states, width, "fp32")]


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
            "chain", weight=0.0, op=op, rows=min(seq, max(LARGEST_CHAIN // width, 1)), columns=width,
            head_dim=spec.head_dim, dtype="fp32", **{"pass": pass_},
        )
        for op, width in columns.items() for pass_ in ("forward", "backward")
    ]  # fmt: skip


def layer_points(model: str, device: str, sequence_length: int | None) -> list[Point]:
    """Whole layers of a model, dense and with experts where it has them, forward and backward; on a GPU also the shard of a
    tensor parallel group of 8."""
    spec = load_model(model)
    cuda = device == "cuda"
    divides = spec.num_experts % EXPERT_RANKS == 0 and spec.num_experts >= EXPERT_RANKS * spec.top_k
    ep = EXPERT_RANKS if cuda and divides else 1
    seq = sequence_length or min(spec.max_sequence_length, 4096)
    points = []
    for tp in (1, 8) if cuda else (1,):
        if any(size % tp for size in (spec.num_heads, spec.ffn_size, spec.shared_expert_ffn_size)):
            continue
        kinds = [0] * (spec.num_plain_layers > 0) + [ep] * (spec.num_moe_layers > 0)
        points += [
            shard_point(spec, pass_, tp, kind, seq, "bf16" if cuda else "fp32")
            for kind in kinds for pass_ in ("forward", "backward")
        ]  # fmt: skip
    return points
