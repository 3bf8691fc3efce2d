"""The operators of a training step as torch runs them: one callable per point, its tensors made beforehand.

Operands rotate through sets that together exceed the last-level cache, as in a model whose weights are read once per
microbatch and whose activations were written many operators ago. Backward passes run on a graph that is kept.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name torch's own documentation uses

from planner.errors import PlannerError
from planner.lab.profile.definitions import (
    ACCUMULATING,
    ATTENTION_HALVES,
    ELEMENT,
    SCALED,
    keys,
    layer_weights,
    rows_columns_depth,
)
from planner.lab.profile.layer_check import model_of
from planner.lab.profile.points import Point, Run, Value
from planner.lab.profile.tensors import DTYPES, gradients, memory_bound, precision, rotating, values
from planner.lab.reference.attention_kernel import sdpa_choice
from planner.lab.reference.split import Split
from planner.lab.reference.transformer import Layer, Place, angles

MULTIPLE = {"fp8": 16, "fp8_row": 16, "fp8_block": 128, "mxfp8": 32, "nvfp4": 32}
"""Columns and depth of a product are multiples of this: 16 bytes, or the block of the scales.  [torch, ScaledBlas.cpp]"""
LEAST_CAPABILITY = {"fp8": (8, 9), "fp8_row": (8, 9), "fp8_block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Tensor cores that have the type; block scales of fp32 are Hopper's, those of 8 bits Blackwell's."""
SCALE_TILE = (128, 4)
"""Scales of 8 bits lie in tiles of so many rows and blocks.  [cuBLAS, block scaling factors layout]"""
BLOCK = 128


def operator(point: Point, device: str) -> Run:
    """The callable of a point of a family of operators. Raises PlannerError, KeyError where there is no such operator."""
    makers = {
        "gemm": _gemm, "grouped_gemm": _grouped, "attention": _attention, "memory_bound": memory_bound, "layer": layer,
    }  # fmt: skip
    precision(point["dtype"])
    return makers[point.family](point, device)


def _gemm(point: Point, device: str) -> Run:
    """F.linear forward; dY W for the input, dY^T X for the weight; or dW += dY^T X into an fp32 gradient, in the product's own
    kernel: from half precision torch has it on a GPU only, in place from 2.10 on."""
    m, n, k, dtype, pass_ = point.each("m", "n", "k", "dtype", "pass")
    if dtype in SCALED:
        return _scaled_gemm(point, device)
    if pass_ == ACCUMULATING:
        if device != "cuda" and dtype != "fp32":
            raise PlannerError(f"{point.label}: a product that adds to an fp32 gradient needs a GPU; this is a CPU")
        gradient, inputs = values((m, n), dtype, device), values((m, k), dtype, device)
        return added(torch.zeros(n, k, device=device), gradient, inputs)
    shapes = {"forward": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[pass_]

    def one() -> Run:
        left, right = (values(shape, dtype, device) for shape in shapes)
        if pass_ == "forward":
            return lambda: F.linear(left, right)
        return lambda: torch.mm(left.t() if pass_ == "wgrad" else left, right)

    return rotating(one, ELEMENT[dtype] * (m * k + n * k), device)


def added(total: Any, gradient: Any, inputs: Any) -> Run:
    """total += gradient^T inputs, one kernel."""
    how = {} if gradient.dtype == total.dtype else {"out_dtype": torch.float32}
    return lambda: torch.addmm(total, gradient.t(), inputs, out=total, **how)


def which_kernel(point: Point, device: str) -> dict[str, Value]:
    """What ran where torch chooses, for the file: how groups are multiplied, which attention."""
    if point.family == "grouped_gemm":
        return {"kernel_of_groups": grouped_kernel(point, device)}
    if point.family == "attention":
        return {"backend": _backend(point, device)}
    return {}


def _backend(point: Point, device: str) -> str:
    """The kernel that the key names, or the one that torch chooses for such shapes."""
    if point["kernel"] != "default":
        return str(point["kernel"])
    like = torch.empty(0, dtype=DTYPES[point["dtype"]], device=device)
    query, key, value = (
        like.new_empty(shape, requires_grad=point["pass"] == "backward") for shape in attention_shapes(point)
    )
    return sdpa_choice(query, key, value, causal=bool(point["causal"]))


def grouped_kernel(point: Point, device: str) -> str:
    """How groups are multiplied: torch's grouped kernel on a GPU (Ampere or newer), one GEMM after the other elsewhere or
    where the key says so. The grouped kernel does not add to a gradient: another kernel does."""
    if point.values.get("kernel") == "loop" or device != "cuda":
        return "loop"
    return "grouped_mm, then added" if point["pass"] == ACCUMULATING else "grouped_mm"


def _grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens: X[T, k] with offsets, W[g, n, k]; wgrad makes dW[g, n, k] from dY and X."""
    dtype, tokens, n, k, groups = point.each("dtype", "tokens", "n", "k", "groups")
    if dtype in SCALED:
        return _scaled_grouped(point, device)
    return rotating(lambda: _experts(point, device), ELEMENT[dtype] * groups * (tokens * (n + k) + n * k), device)


def _experts(point: Point, device: str) -> Run:
    """One set of experts and of their tokens."""
    dtype, pass_, tokens, n, k, groups = point.each("dtype", "pass", "tokens", "n", "k", "groups")
    inputs, gradient = values((tokens * groups, k), dtype, device), values((tokens * groups, n), dtype, device)
    weights = values((groups, n, k), dtype, device)
    total = torch.zeros(groups, n, k, device=device) if pass_ == ACCUMULATING else None
    if grouped_kernel(point, device) == "loop":
        return _loop(pass_, inputs.view(groups, tokens, k), gradient.view(groups, tokens, n), weights, total)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens
    left, right = {
        "forward": (inputs, weights.transpose(-2, -1)), "dgrad": (gradient, weights),
    }.get(pass_, (gradient.t(), inputs))  # fmt: skip
    if total is not None:
        return lambda: total.add_(F.grouped_mm(left, right, offs=ends))
    return lambda: F.grouped_mm(left, right, offs=ends)


def _loop(pass_: str, x: Any, g: Any, weights: Any, total: Any) -> Run:
    """One product after the other."""
    groups = range(len(weights))
    if pass_ == ACCUMULATING:
        each = [added(total[i], g[i], x[i]) for i in groups]
        return lambda: [one() for one in each]
    kinds: dict[str, Callable[[int], object]] = {
        "forward": lambda i: F.linear(x[i], weights[i]),
        "dgrad": lambda i: torch.mm(g[i], weights[i]),
        "wgrad": lambda i: torch.mm(g[i].t(), x[i]),
    }
    kind = kinds[pass_]
    return lambda: [kind(i) for i in groups]


def attention_shapes(point: Point) -> list[tuple[int, ...]]:
    """Of queries, keys and values: batch, heads, length, size of a head."""
    b, a, kv, d, d_v, s = point.each("batch", "heads", "kv_heads", "head_dim", "value_dim", "seq")
    return [
        (b, heads, int(length), size)
        for heads, length, size in ((a, s, d), (kv, keys(point), d), (kv, keys(point), d_v))
    ]


def _attention(point: Point, device: str) -> Run:
    """Scaled dot product attention with grouped queries, by the kernel that the key names.

    With more keys than queries, that of one rank of context parallelism: its queries are the first and the last piece of the
    sequence, each against its own keys, the last also against all before it. Outputs are left unmerged: that is priced apart.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    a, kv, s = point.each("heads", "kv_heads", "seq")
    dtype, kernel, causal, all_keys = point["dtype"], point["kernel"], bool(point["causal"]), int(keys(point))
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if kernel not in ("default", *backends):
        raise PlannerError(f"{point.label}: unknown kernel '{kernel}'; known: default, {', '.join(backends)}")
    query, key, value = (
        values(shape, dtype, device).requires_grad_(point["pass"] == "backward") for shape in attention_shapes(point)
    )

    def one(q: Any, k: Any, v: Any, masked: bool) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=masked, enable_gqa=a != kv)

    def parts() -> list[Any]:
        if all_keys == s:
            return [one(query, key, value, causal)]
        piece = s // ATTENTION_HALVES
        (first, last), before = query.split([piece, s - piece], dim=2), all_keys - (s - piece)
        own = one(last, key[:, :, before:], value[:, :, before:], True)
        return [
            one(first, key[:, :, :piece], value[:, :, :piece], True), own,
            one(last, key[:, :, :before], value[:, :, :before], False),
        ]  # fmt: skip

    def forward() -> list[Any]:
        with contextlib.nullcontext() if kernel == "default" else sdpa_kernel(backends[kernel]):
            return parts()

    return gradients(forward(), (query, key, value)) if point["pass"] == "backward" else forward


def built(point: Point, device: str) -> Layer:
    """The layer of the reference transformer that a layer point stands for, in plain torch operations, with random weights; of one
    rank of a tensor parallel group without its collectives."""
    model, dtype, sequence = model_of(point), DTYPES[point["dtype"]], point["seq"]
    place = Place()
    if model.position == "rope":
        width = model.qk_rope_head_dim if model.is_mla else model.head_dim
        tables = angles(torch.arange(sequence, device=device), width, torch.float32)
        place.cosine, place.sine = (table.to(dtype) for table in tables)
    # Every expert gets the same number of tokens, as the cost model has it; the router is computed all the same.
    split = Split(model=model, sequence_length=sequence, micro_batch_size=point["batch"], balanced=True)
    with torch.device("meta"):
        made = Layer(split, 0, place)
    made = made.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = values(tuple(parameter.shape), point["dtype"], device)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else torch.ones_like(drawn))
    return made


def layer(point: Point, device: str) -> Run:
    """Forward with what the backward pass needs kept, or the backward pass of the input and all weights."""
    dtype, shape = point["dtype"], tuple(point.each("batch", "seq", "hidden"))
    if dtype in SCALED:
        raise PlannerError(f"{point.label}: a whole layer runs in bf16, fp16, tf32 or fp32")

    def one() -> Run:
        made: Any = built(point, device)
        x = values(shape, dtype, device).requires_grad_(True)
        if point["pass"] == "forward":
            return lambda: made(x)
        return gradients([made(x)], (x, *made.parameters()))

    return rotating(one, layer_weights(point, resident=True) * ELEMENT[dtype], device)


# ------------------------------------------------------------------------------------------------ quantised operands
# They are quantised before, so that the product alone is timed; the left one is row-major, the right one column-major, and the
# passes differ in shape alone. What torch has: ``torch._scaled_mm``, ``F.scaled_mm`` (recipes by ``ScalingType``) and
# ``torch._scaled_grouped_mm`` (a scale per row).


def _needs_gpu(point: Point, device: str) -> None:
    """Raises PlannerError where the device has no such tensor cores; one scale per tensor also runs on a processor."""
    dtype = point["dtype"]
    if device != "cuda":
        if dtype == "fp8" and point.family == "gemm":
            return
        raise PlannerError(f"{point.label}: products in {dtype} need a GPU; this is a CPU")
    if not torch.cuda.is_available():
        return  # shapes are being checked without a device
    major, minor = torch.cuda.get_device_capability()
    least = LEAST_CAPABILITY[dtype]
    if (major, minor) < least:
        raise PlannerError(
            f"{point.label}: {dtype} needs compute capability {least[0]}.{least[1]}; this device has {major}.{minor}"
        )


def _scaled_gemm(point: Point, device: str) -> Run:
    """One pass of a linear layer. Forward in plain fp8 adds up in the tensor core's own precision, as training does, the
    gradients in fp32."""
    dtype, pass_ = point["dtype"], point["pass"]
    if pass_ == ACCUMULATING:
        raise PlannerError(f"{point.label}: torch has no product in {dtype} that adds to an fp32 gradient")
    (rows, columns, depth), by = rows_columns_depth(point), MULTIPLE[dtype]
    if columns % by or depth % by or (dtype == "fp8_block" and rows % by):
        raise PlannerError(f"{point.label}: {dtype} needs columns and depth that are multiples of {by}")
    _needs_gpu(point, device)
    plain = dtype in ("fp8", "fp8_row")

    def one() -> Run:
        left, right = _operand(rows, depth, dtype, device), _operand(columns, depth, dtype, device)
        if not plain:
            how = _recipe((rows, columns, depth), dtype, pass_, device)
            return lambda: F.scaled_mm(left, right.t(), output_dtype=torch.bfloat16, **how)
        shapes: tuple[tuple[int, ...], ...] = ((), ()) if dtype == "fp8" else ((rows, 1), (1, columns))
        a, b = (torch.ones(shape, device=device) for shape in shapes)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=pass_ == "forward"
        )

    return rotating(one, ELEMENT[dtype] * (rows * depth + columns * depth), device)


def _operand(rows: int, depth: int, dtype: str, device: str) -> Any:
    """Values of 8 bits, or pairs of values of 4 bits in one byte."""
    if dtype == "nvfp4":
        pairs = torch.randint(0, 256, (rows, depth // 2), device=device, dtype=torch.uint8)
        return pairs.view(torch.float4_e2m1fn_x2)
    return values((rows, depth), "fp8", device)


def _recipe(shape: tuple[int, int, int], dtype: str, pass_: str, device: str) -> dict[str, Any]:
    """Scales and how they lie. In fp8 with blocks activations and gradients have a scale per 1 x 128, weights per 128 x 128; the
    weight gradient multiplies two of the former.  [DeepSeek-V3, arXiv 2412.19437, section 3.3.2]"""
    rows, columns, depth = shape
    kinds, places = F.ScalingType, F.SwizzleType
    found: dict[str, Any] = {}
    if dtype == "fp8_block":
        blocks, one_row, tile = depth // BLOCK, kinds.BlockWise1x128, kinds.BlockWise128x128
        left, right = (torch.ones(blocks, size, device=device).t() for size in (rows, columns))
        found = {"scale_a": left, "scale_b": right, "scale_recipe_a": one_row, "scale_recipe_b": one_row}
        if pass_ != "wgrad":
            right = torch.ones(columns // BLOCK, 4 * math.ceil(blocks / 4), device=device).t()  # whole fours of blocks
            found |= {"scale_b": right, "scale_recipe_b": tile}
        return found
    scale_type, block = (torch.float8_e8m0fnu, 32) if dtype == "mxfp8" else (torch.float8_e4m3fn, 16)
    kind: Any = kinds.BlockWise1x32
    place: Any = places.SWIZZLE_32_4_4
    for side, length in (("a", rows), ("b", columns)):
        tall, wide = (size * math.ceil(x / size) for x, size in zip((length, depth // block), SCALE_TILE, strict=True))
        scale: Any = torch.ones(tall * wide, device=device).to(scale_type)
        if dtype == "nvfp4":  # a scale of the whole tensor in addition
            scale = [scale, torch.ones(1, device=device)]
            kind, place = [kinds.BlockWise1x16, kinds.TensorWise], [places.SWIZZLE_32_4_4, places.NO_SWIZZLE]
        found |= {f"scale_{side}": scale, f"scale_recipe_{side}": kind, f"swizzle_{side}": place}
    return found


def _scaled_grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens in fp8 with a scale per row: torch's kernel for Hopper; other recipes it has not for every pass."""
    dtype, pass_, tokens, n, k, groups = point.each("dtype", "pass", "tokens", "n", "k", "groups")
    _needs_gpu(point, device)
    if dtype not in ("fp8", "fp8_row") or pass_ == ACCUMULATING:
        raise PlannerError(
            f"{point.label}: torch multiplies groups in half precision and in fp8 with a scale per row; {dtype} {pass_} it has not"
        )
    if any(size % MULTIPLE["fp8"] for size in (tokens, n, k)):
        raise PlannerError(
            f"{point.label}: fp8 needs tokens, columns and depth that are multiples of {MULTIPLE['fp8']}"
        )
    rows, ends = tokens * groups, torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # of the right operand before it is transposed
        "forward": ((rows, k), (groups, n, k)), "dgrad": ((rows, n), (groups, k, n)), "wgrad": ((n, rows), (k, rows)),
    }  # fmt: skip
    scaled: tuple[tuple[int, ...], ...] = ((rows,), shapes[pass_][1][:2])
    if pass_ == "wgrad":  # rows of each group have a scale of their own
        scaled = ((n * groups,), (k * groups,))

    def one() -> Run:
        left, right = (values(shape, "fp8", device) for shape in shapes[pass_])
        a, b = (torch.ones(shape, device=device) for shape in scaled)
        return lambda: torch._scaled_grouped_mm(
            left, right.transpose(-2, -1), a, b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return rotating(one, float(groups * (tokens * (n + k) + n * k)), device)
