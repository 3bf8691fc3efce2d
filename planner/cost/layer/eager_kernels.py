"""Operators that a compiler makes one kernel of, as the chains of plain torch kernels that they are without it.

The chains are those of ``planner.lab.reference.fused_operators``; a test runs them under a dispatch mode that counts the bytes of every
kernel's tensors. Numbers per row (scales, maxima, targets) are left out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from planner.cost.layer.operators import MemoryBound, Number, Operator, Shard, loss_bytes

CHAINS = "chains"
"""Name among ``Trainer.unfused`` of a run whose norms, activations, rotary embedding and loss are such chains."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One pass of an operator."""

    single: float
    """Bytes per element that its kernels read and write, tensors in fp32."""
    half: float
    """The same of half-precision tensors: casts to fp32 and back are kernels too."""
    kernels: tuple[float, float]
    """Kernels, in fp32 and in half precision; those on single numbers of rows among them."""

    def bytes(self, element: float) -> float:
        """Bytes per element of a tensor whose elements have that many."""
        return self.single if element > 2 else self.half

    def launches(self, element: float) -> float:
        """Kernels likewise."""
        return self.kernels[0] if element > 2 else self.kernels[1]


FORWARD: dict[str, Chain] = {
    # square 2 tensors, mean 1, times the scale 2, times the weight 2
    "norm": Chain(single=28.0, half=40.0, kernels=(6.0, 8.0)),
    # silu 2, product 3
    "swiglu": Chain(single=20.0, half=30.0, kernels=(2.0, 4.0)),
    # four products of halves 4, difference and sum 3, joined 2; q and k apart
    "rope": Chain(single=36.0, half=48.0, kernels=(14.0, 18.0)),
    # largest logit 1; difference 2, exponential 2, sum 1
    "cross_entropy": Chain(single=24.0, half=28.0, kernels=(4.0, 6.0)),
}
"""By class of memory-bound operator."""
BACKWARD: dict[str, Chain] = {
    # scaled input 2, gradient times weight 2, times the former 3, mean 1, times it 2, difference 3, times the scale 2; of the
    # weight: product 3, sum 1
    "norm": Chain(single=76.0, half=94.0, kernels=(9.0, 12.0)),
    # sigmoid 2; of the gate 3 + 3, one minus 2, 3, plus one 2, 3; of up 3 + 3
    "swiglu": Chain(single=96.0, half=118.0, kernels=(9.0, 13.0)),
    "rope": FORWARD["rope"],
    # difference 2, exponential 2, times the scale 2
    "cross_entropy": Chain(single=24.0, half=36.0, kernels=(8.0, 10.0)),
}
"""Likewise."""
TENSORS = {"norm": 2.0, "swiglu": 3.0, "rope": 2.0}
"""Tensors that the forward pass of one fused kernel reads and writes."""
ELEMENTWISE = ("norm", "cross_entropy")
"""Classes whose bandwidth in a profile is that of one kernel with its arithmetic; their chains are element-wise kernels."""


def as_chains(operators: list[Operator], shard: Shard) -> list[Operator]:
    """The operators of a layer as a trainer runs them that compiles nothing; those of any other trainer as they are.

    bytes = elements x bytes per element of the chain, elements = forward bytes / bytes per element of one fused kernel. The
    trainer's own passes must be 1. A layer norm is one kernel without a compiler too.
    """
    if CHAINS not in shard.trainer.kernels.unfused:
        return operators
    return [_chained(one, shard) if isinstance(one, MemoryBound) else one for one in operators]


def elements(one: Operator, shard: Shard) -> Number | None:
    """Elements of the tensor that a chain works on, from the list of a trainer that fuses; None for what is no chain."""
    if not isinstance(one, MemoryBound) or one.kind not in FORWARD:
        return None
    if one.kind == "norm" and shard.model.norm != "rmsnorm":
        return None
    return one.forward / (loss_bytes(shard) if one.kind == "cross_entropy" else TENSORS[one.kind] * shard.element)


def _chained(one: MemoryBound, shard: Shard) -> MemoryBound:
    count, e = elements(one, shard), shard.element
    if count is None:
        return one
    forward, backward = FORWARD[one.kind], BACKWARD[one.kind]
    return dataclasses.replace(
        one, kind="elementwise" if one.kind in ELEMENTWISE else one.kind,
        forward=count * forward.bytes(e), backward=count * backward.bytes(e),
        launches=(forward.launches(e), backward.launches(e)),
    )  # fmt: skip
