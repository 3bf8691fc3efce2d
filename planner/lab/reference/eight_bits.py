"""Linear layers in 8 bits: operands with scales as a plan's precision says, products of them, and what a backward pass keeps.

Y = Q(X) Q(W)^T, dX = Q(dY) Q(W), dW = Q(dY)^T Q(X), each operand with scales of its own along the dimension that is summed. A scale
is of a tile of the operand as it lies on all tensor-parallel ranks: where it spans what they share out, its largest value is the
largest of all ranks, so that a split layer rounds as a whole one does.
[torchao float8, hp_tensor_to_float8_dynamic on DTensor; Transformer Engine, with_amax_reduction]

An eager layer keeps its input as it is [torchao, matmul_with_hp_or_float8_args]. A compiled one keeps none that one kernel makes
again from what is kept anyway (a norm, SwiGLU), else the operand of the weight gradient in 8 bits: the cut of torch.compile
through layers of torchao 0.18 (torch 2.13, 2026-11), without the copies of weights that it keeps under tensor parallelism.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from planner.lab.reference.fused_operators import OPS, compiled
from planner.lab.reference.local_part import whole
from planner.record import record

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WHOLE = 0
"""Of a side of a tile: the whole dimension."""
LEAST = 1e-12
"""Of a largest value: a tile of zeros has a finite scale.  [torchao, EPS]"""
ALIGNED = 16
"""Rows, columns and depth of what the GPU's kernel multiplies are multiples of this."""


@record
class Recipe:
    """How operands get their scales."""

    tile: tuple[int, int]
    """Rows and columns of an activation or gradient that share a scale, where columns are summed; the other way round else."""
    weights: tuple[int, int]
    """The same of a weight."""
    gradients: torch.dtype
    """Of dY; X and W are e4m3."""
    power_of_two: bool
    """Scales are rounded down to a power of two."""
    gathers: bool = False
    """What tensor parallelism gathers is cast first.  [torchao, PrepareFloat8ModuleInput, Float8RowwiseParallel]"""

    @property
    def one_scale(self) -> bool:
        """Of a whole operand, whichever axis is summed."""
        return self.tile == (WHOLE, WHOLE)

    def sized(self, block: int) -> Recipe:
        """With sides of another length, where they are no whole dimension and no single row."""
        (a, b), (c, d) = ([block if side > 1 else side for side in one] for one in (self.tile, self.weights))
        return dataclasses.replace(self, tile=(a, b), weights=(c, d))


RECIPES = {
    "fp8": Recipe(tile=(WHOLE, WHOLE), weights=(WHOLE, WHOLE), gradients=E5M2, power_of_two=False, gathers=True),
    "fp8_row": Recipe(tile=(1, WHOLE), weights=(1, WHOLE), gradients=E4M3, power_of_two=True),
    "fp8_block": Recipe(tile=(1, 128), weights=(128, 128), gradients=E4M3, power_of_two=True),
    "mxfp8": Recipe(tile=(1, 32), weights=(1, 32), gradients=E4M3, power_of_two=True),
}
"""By precision of a plan. [torchao 0.18, Float8LinearConfig.from_recipe_name; Transformer Engine, Format.HYBRID with one scale per
tensor, Float8BlockScaling, MXFP8BlockScaling; DeepSeek-V3, arXiv 2412.19437, section 3.3.2]"""


class Quantised(NamedTuple):
    """A matrix (rows, columns) in 8 bits."""

    values: Tensor
    """Of the 8-bit type: what is meant times the scale."""
    scale: Tensor
    """Of each tile, (tiles of rows, 1, tiles of columns, 1)."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""

    @property
    def turned(self) -> Quantised:
        """Transposed."""
        return Quantised(self.values.t(), self.scale.permute(2, 3, 0, 1), self.tile[::-1])


# ------------------------------------------------------------------------------------------------ operators


def _tiled(x: Tensor, rows: int, columns: int) -> Tensor:
    """(rows, columns) as (tiles, rows of one, tiles, columns of one), with zeros up to whole tiles."""
    more = (-x.shape[0] % rows, -x.shape[1] % columns)
    x = functional.pad(x, (0, more[1], 0, more[0])) if any(more) else x
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fp8_largest(x: Tensor, rows: int, columns: int) -> Tensor:
    """The largest absolute value of each tile."""
    return torch.linalg.vector_norm(_tiled(x, rows, columns), math.inf, dim=(1, 3), keepdim=True, dtype=_wide(x))


def _fp8_cast(x: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """x times its scales, rounded in fp32 to 8 bits; what is too large becomes the largest."""
    most = torch.finfo(dtype).max
    found = (_tiled(x, rows, columns).to(_wide(x)) * scale).float().clamp(-most, most).to(dtype)
    whole = found.view(found.shape[0] * rows, -1)
    return whole if whole.shape == x.shape else whole[: x.shape[0], : x.shape[1]].contiguous()


def _meant(values: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """What a quantised matrix stands for."""
    found = (_tiled(values.to(dtype), rows, columns) / scale.to(dtype)).flatten(2).flatten(0, 1)
    return found[: values.shape[0], : values.shape[1]]


def _fp8_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, sides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """a b^T of what both stand for, (m, k) x (n, k); ``sides`` of both tiles."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left, right = _meant(a, scale_a, sides[0], sides[1], wide), _meant(b, scale_b, sides[2], sides[3], wide)
    return (left @ right.t()).to(dtype)


def _product_on_gpu(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, sides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same by the GPU's kernel, where it has one for such scales and sizes."""
    one = scale_a.numel() == scale_b.numel() == 1
    rows = tuple(sides) == (1, a.shape[1], 1, b.shape[1])
    if dtype == torch.float64 or not (one or rows) or any(size % ALIGNED for size in (*a.shape, b.shape[0])):
        return _fp8_product(a, scale_a, b, scale_b, sides, dtype)
    shapes: tuple[tuple[int, ...], ...] = ((), ()) if one else ((-1, 1), (1, -1))
    scales = (s.float().reciprocal().reshape(shape) for s, shape in zip((scale_a, scale_b), shapes, strict=True))
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), *scales, out_dtype=dtype)


_LIBRARY = torch.library.Library("planner", "FRAGMENT")
for _real, _on_gpu, _signature, _fake in (
    (_fp8_largest, compiled(_fp8_largest), "(Tensor x, int rows, int columns) -> Tensor",
     lambda x, rows, columns: x.new_empty(-(-x.shape[0] // rows), 1, -(-x.shape[1] // columns), 1, dtype=_wide(x))),
    (_fp8_cast, compiled(_fp8_cast), "(Tensor x, Tensor scale, int rows, int columns, ScalarType dtype) -> Tensor",
     lambda x, scale, rows, columns, dtype: x.new_empty(x.shape, dtype=dtype)),
    (_fp8_product, _product_on_gpu,
     "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, int[] sides, ScalarType dtype) -> Tensor",
     lambda a, scale_a, b, scale_b, sides, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype)),
):  # fmt: skip
    _name = _real.__name__.lstrip("_")
    _LIBRARY.define(_name + _signature)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _on_gpu, "CUDA")
    torch.library.register_fake(f"planner::{_name}", _fake, lib=_LIBRARY)


# ------------------------------------------------------------------------------------------------ a layer


@record
class Shared:
    """How a linear layer, weight (out, in), is split over tensor-parallel ranks."""

    recipe: Recipe
    """Of its operands."""
    fused: bool
    """As compiled layers."""
    split: int | None = None
    """Dimension of the weight that ranks share out: 0 columns of the output, 1 of the input; None = whole."""
    group: Any = None
    """Process group of tensor parallelism; None = of one rank."""

    def quantised(self, x: Tensor, axis: int, tile: tuple[int, int], shared: int | None, dtype: torch.dtype = E4M3) -> Quantised:
        """A matrix to be summed along ``axis``, whose dimension ``shared`` ranks share out."""
        wanted = tile if axis else tile[::-1]
        rows, columns = (side or size for side, size in zip(wanted, x.shape, strict=True))
        most = OPS.fp8_largest(x, rows, columns)
        if self.over_ranks(axis, tile, shared):
            most = collectives.wait_tensor(collectives.all_reduce(most, "max", self.group))
        scale = torch.finfo(dtype).max / most.double().clamp(min=LEAST)
        scale = (scale.log2().floor().exp2() if self.recipe.power_of_two else scale).float()
        return Quantised(OPS.fp8_cast(x, scale, rows, columns, dtype), scale, (rows, columns))

    def over_ranks(self, axis: int, tile: tuple[int, int], shared: int | None) -> bool:
        """Whether a tile spans what ranks share out."""
        return self.group is not None and shared is not None and (tile if axis else tile[::-1])[shared] == WHOLE

    def input(self, x: Tensor, axis: int) -> Quantised:
        """X (tokens, in)."""
        return self.quantised(x, axis, self.recipe.tile, 1 if self.split == 1 else None)

    def gradient(self, dy: Tensor, axis: int) -> Quantised:
        """dY (tokens, out)."""
        return self.quantised(dy, axis, self.recipe.tile, 1 if self.split == 0 else None, self.recipe.gradients)

    def weight(self, w: Tensor, axis: int) -> Quantised:
        """W (out, in)."""
        return self.quantised(w, axis, self.recipe.weights, self.split)


def remembers(x: Tensor, function: Callable[..., Tensor], *of: Tensor) -> Tensor:
    """x, which a compiled layer makes again by one kernel where it is needed again."""
    x.made = (function, of)
    return x


Made = dict[int, Quantised]
"""Operands of a tensor by the axis that is summed."""


def operands(x: Tensor) -> Made:
    """What has been made of an activation already, by the axis that is summed: layers that read the same share it."""
    if not hasattr(x, "operands"):
        x.operands = {}
    return x.operands


def _gathered(x: Tensor, group: Any) -> Tensor:
    """(batch, tokens, width) of all ranks; 8 bits travel as bytes."""
    if x.dtype in (E4M3, E5M2):
        return _gathered(x.view(torch.uint8), group).view(x.dtype)
    return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), 1, group))


def _cast_and_gathered(x: Tensor, how: Shared, dtype: torch.dtype) -> Quantised:
    """A scale of the tokens (batch, tokens, width) of all ranks, and all of them in 8 bits."""
    mine = how.quantised(x.flatten(0, 1), 1, how.recipe.tile, 0, dtype)
    every = _gathered(mine.values.view(x.shape), how.group).flatten(0, 1)
    return Quantised(every, mine.scale, (every.shape[0], every.shape[1]))


def _scattered(x: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of (batch, tokens, width); the tokens of this one."""
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", 1, group))


class GatheredInput(Function):
    """Tokens of all tensor-parallel ranks, of which linear layers read columns of their output. Cast before they travel the result
    has a shape and no memory: those layers take the operand from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Shared) -> tuple[Tensor, ...]:
        ctx.group = how.group
        if not how.recipe.gathers:
            return (_gathered(x, how.group),)
        found = _cast_and_gathered(x, how, E4M3)
        ctx.mark_non_differentiable(found.values, found.scale)
        whole = (x.shape[0], found.values.shape[0] // x.shape[0], x.shape[2])
        return x.new_zeros(()).expand(whole), found.values, found.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.group), None


def gathered_input(x: Tensor, how: Shared) -> Tensor:
    """(batch, tokens, width) of this rank -> of all ranks."""
    whole, *cast = GatheredInput.apply(x, how)
    if cast:
        operands(whole)[1] = Quantised(cast[0], cast[1], (cast[0].shape[0], cast[0].shape[1]))
        whole.stands_in = True
    return whole


class Product(Function):
    """Y of X (batch, tokens, in) and W (out, in), as the module's text says; where ranks share out the input, this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Shared, ready: Made) -> Tensor:
        ctx.how, ctx.shape, ctx.dtype, again = how, x.shape, x.dtype, getattr(x, "made", None)
        if 1 not in ready:
            ready[1] = how.input(x.flatten(0, -2), 1)
        if how.fused and again is not None and not how.over_ranks(0, how.recipe.tile, 1 if how.split == 1 else None):
            ctx.kind, ctx.again = "again", again[0]
            ctx.save_for_backward(w, *again[1])
        elif how.fused or hasattr(x, "stands_in"):
            if 0 not in ready:
                ready[0] = ready[1] if how.recipe.one_scale else how.input(x.flatten(0, -2), 0)
            ctx.kind, ctx.tile = "operand", ready[0].tile
            ctx.save_for_backward(w, ready[0].values, ready[0].scale)
        else:
            ctx.kind = "input"
            ctx.save_for_backward(w, x)
        return product(ready[1], how.weight(w, 1), x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        how, (w, *kept) = ctx.how, ctx.saved_tensors
        dy, to_x, to_w = dict(getattr(gradient, "operands", {})), None, None
        for axis in (1, 0):
            if axis not in dy and ctx.needs_input_grad[1 - axis]:
                other = dy.get(1 - axis) if how.recipe.one_scale else None
                dy[axis] = other or how.gradient(gradient.flatten(0, -2), axis)
        if ctx.needs_input_grad[0]:
            to_x = product(dy[1], how.weight(w, 0).turned, ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if ctx.kind == "operand":
                x = Quantised(kept[0], kept[1], ctx.tile)
            else:
                x = how.input((ctx.again(*kept) if ctx.kind == "again" else kept[0]).flatten(0, -2), 0)
            to_w = product(dy[0].turned, x.turned, w.dtype)
        return to_x, to_w, None, None


class ScatteredOutput(Function):
    """Sum over tensor-parallel ranks of (batch, tokens, width), of which each has its tokens. Its gradient is gathered; cast before
    it travels it has a shape and no memory, and the layer takes the operand from it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, how: Shared) -> Tensor:
        ctx.how, ctx.shape = how, y.shape
        return _scattered(y, how.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        how = ctx.how
        if not how.recipe.gathers:
            return _gathered(gradient, how.group), None
        found = gradient.new_zeros(()).expand(ctx.shape)
        dy = operands(found)
        dy[0] = dy[1] = _cast_and_gathered(gradient, how, how.recipe.gradients)
        return found, None


def product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """a b^T, (m, k) x (n, k)."""
    return OPS.fp8_product(a.values, a.scale, b.values, b.scale, (*a.tile, *b.tile), dtype)


class QuantisedLinear(nn.Linear):
    """A linear layer of (batch, tokens, in) whose products are of 8-bit operands; ``how`` is set where it becomes one."""

    how: Shared

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of all tensor-parallel ranks in; out as well, or those of this rank where the input is shared out."""
        kept = self.how.fused or hasattr(x, "stands_in")  # eager code casts for each layer, and keeps the input
        y: Tensor = Product.apply(x, whole(self.weight), self.how, operands(x) if kept else {})
        if self.how.split == 1 and self.how.group is not None:
            y = ScatteredOutput.apply(y, self.how)
        return y if self.bias is None else y + whole(self.bias)
