"""Products of 8-bit operands as one process computes them, in plain torch: each number is rounded by arithmetic.

It shares no code with planner/lab/reference, and uses none of torch's types of 8 bits.
[E4M3 and E5M2: arXiv 2209.05433; hybrid recipe: Transformer Engine; blocks: arXiv 2412.19437, section 3.3.2]
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits behind the point, exponent of the least normal number, largest number."""


@dataclass(frozen=True)
class Rounding:
    """Which numbers share a scale in Y = X W^T, dX = dY W and dW = dY^T X, and which tokens."""

    name: str
    """fp8: one scale per operand; fp8_row: one per line that is summed; fp8_block, mxfp8: one per block of it."""
    block: int
    """Numbers of a block."""
    groups: tuple[Tensor, ...]
    """Numbers of the tokens that one pass of one rank has, in its order."""

    @property
    def of_gradients(self) -> tuple[int, int, float]:
        """Format of dY."""
        return E5M2 if self.name == "fp8" else E4M3

    def round(self, x: Tensor, kind: tuple[int, int, float], weight: bool = False) -> Tensor:
        """What a matrix is after rounding, whose rows are to be summed."""
        if self.name == "fp8":
            return _rounded(x, x.abs().max(), kind, False)
        if self.name == "fp8_row":
            return _rounded(x, x.abs().amax(1, keepdim=True), kind, True)
        most = x.abs()
        for axis in (0, 1) if weight and self.name == "fp8_block" else (1,):
            each = [part.amax(axis, keepdim=True).expand_as(part) for part in most.split(self.block, axis)]
            most = torch.cat(each, axis)
        return _rounded(x, most, kind, True)


def _rounded(x: Tensor, most: Tensor, kind: tuple[int, int, float], power: bool) -> Tensor:
    """x in steps of 2^(exponent - bits) after it is scaled so that ``most`` becomes the largest number; ties go to even."""
    bits, least, largest = kind
    scale = largest / most.double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(scale))) if power else scale.float().double()
    y = (x.double() * scale).float().double() if x.dtype == torch.float64 else (x.float() * scale.float()).double()
    step = torch.exp2((torch.frexp(y).exponent - 1).clamp(min=least).double() - bits)
    return ((y / step).round() * step).clamp(-largest, largest) / scale


class RoundedProduct(Function):
    """Y = X W^T of tokens (n, in) and a weight (out, in), each rounded, as are dY and both in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Rounding) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how, right, y = how, how.round(w, E4M3, True), x.new_zeros(len(x), len(w))
        for one in how.groups:
            y[one] = (how.round(x[one], E4M3) @ right.T).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), how = ctx.saved_tensors, ctx.how
        right, dx, dw = how.round(w.T, E4M3, True).T, torch.zeros_like(x), torch.zeros_like(w, dtype=torch.float64)
        for one in how.groups:
            dx[one] = (how.round(dy[one], how.of_gradients) @ right).to(x.dtype)
            dw += (how.round(dy[one].T, how.of_gradients) @ how.round(x[one].T, E4M3).T).to(w.dtype)
        return dx, dw.to(w.dtype), None
