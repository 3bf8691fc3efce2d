"""Products of quantised operands, as torch has them: fp8 with a scale per tensor, row or block, MXFP8, NVFP4; groups in fp8.

Operands are quantised before, so that the product alone is timed; the left one is row-major, the right one column-major,
and the passes differ in shape alone. What torch has: ``torch._scaled_mm``, ``F.scaled_mm`` (recipes by ``ScalingType``),
``torch._scaled_grouped_mm`` (a scale per row).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import PlannerError
from planner.lab.profile.definitions import ACCUMULATING, ELEMENT, rows_columns_depth
from planner.lab.profile.points import Point, Run
from planner.lab.profile.tensors import rotating, values

MULTIPLE = {"fp8": 16, "fp8_row": 16, "fp8_block": 128, "mxfp8": 32, "nvfp4": 32}
"""Columns and depth of a product are multiples of this: 16 bytes, or the block of the scales.  [torch, ScaledBlas.cpp]"""
LEAST_CAPABILITY = {"fp8": (8, 9), "fp8_row": (8, 9), "fp8_block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Tensor cores that have the type; block scales of fp32 are Hopper's, those of 8 bits Blackwell's."""
SCALE_TILE = (128, 4)
"""Scales of 8 bits lie in tiles of so many rows and blocks.  [cuBLAS, block scaling factors layout]"""
BLOCK = 128


def needs_gpu(point: Point, device: str) -> None:
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


def gemm(point: Point, device: str) -> Run:
    """One pass of a linear layer. Forward in plain fp8 adds up in the tensor core's own precision, as training does, the
    gradients in fp32."""
    dtype, pass_ = point["dtype"], point["pass"]
    if pass_ == ACCUMULATING:
        raise PlannerError(f"{point.label}: torch has no product in {dtype} that adds to an fp32 gradient")
    (rows, columns, depth), by = rows_columns_depth(point), MULTIPLE[dtype]
    if columns % by or depth % by or (dtype == "fp8_block" and rows % by):
        raise PlannerError(f"{point.label}: {dtype} needs columns and depth that are multiples of {by}")
    needs_gpu(point, device)
    plain = dtype in ("fp8", "fp8_row")
    if not plain and not hasattr(F, "scaled_mm"):
        raise PlannerError(f"{point.label}: products with block scales need torch 2.10 or newer")

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
    if dtype == "fp8_block":
        blocks, kind, other = depth // BLOCK, kinds.BlockWise1x128, kinds.BlockWise128x128
        left, right = (torch.ones(blocks, size, device=device).t() for size in (rows, columns))
        if pass_ != "wgrad":
            right = torch.ones(columns // BLOCK, 4 * math.ceil(blocks / 4), device=device).t()  # whole fours of blocks
        return {
            "scale_a": left, "scale_b": right, "scale_recipe_a": kind,
            "scale_recipe_b": kind if pass_ == "wgrad" else other,
        }  # fmt: skip
    scale_type, block = (torch.float8_e8m0fnu, 32) if dtype == "mxfp8" else (torch.float8_e4m3fn, 16)
    kind, place = kinds.BlockWise1x32, places.SWIZZLE_32_4_4
    found = {}
    for side, length in (("a", rows), ("b", columns)):
        tall, wide = (size * math.ceil(x / size) for x, size in zip((length, depth // block), SCALE_TILE, strict=True))
        scale: Any = torch.ones(tall * wide, device=device).to(scale_type)
        if dtype == "nvfp4":  # a scale of the whole tensor in addition
            scale = [scale, torch.ones(1, device=device)]
            kind, place = [kinds.BlockWise1x16, kinds.TensorWise], [places.SWIZZLE_32_4_4, places.NO_SWIZZLE]
        found |= {f"scale_{side}": scale, f"scale_recipe_{side}": kind, f"swizzle_{side}": place}
    return found


def grouped(point: Point, device: str) -> Run:
    """Experts with equal tokens in fp8 with a scale per row: torch's kernel for Hopper; other recipes it has not for every pass."""
    dtype, pass_, tokens, n, k, groups = point.each("dtype", "pass", "tokens", "n", "k", "groups")
    needs_gpu(point, device)
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


