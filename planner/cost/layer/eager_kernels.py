"""Operators that run as several plain kernels where another trainer has one fused kernel: one table of what they move.

A row says, per value of the operator's tensor, the bytes read and written forward and backward, the bytes saved in addition, and
the kernels launched; each for half precision and for fp32, as casts are kernels too. Rows are counted from the code that is named,
with torch's backward formulas (clamp_backward, slice_backward, a cat for every split). Numbers per row of a tensor (scales, maxima,
targets) are left out. Which rows a trainer has is its ``unfused``.
"""

import dataclasses
from typing import Any

from planner.cost.layer.operators import MemoryBound, Number, Operator, Shard, loss_bytes
from planner.record import record

STRIDED_SLOWDOWN = 2.0
"""Time per byte of torch's kernel for views and broadcast operands over that of its vectorised kernel, which moves 16 bytes
per thread instead of one value, with an integer division per dimension.

A100 1.99: rotary embedding of Hugging Face in bf16, 20 bytes per value, 3.82 ms for 671 MB of values read and written once
[Liger-Kernel, benchmark/data/all_benchmark_data.csv] at the profile's element-wise bandwidth. H100 1.88: fp32 products and
negations 1.60 TB/s [pytorch issue 141265]. 8 TB/s generation 2.3: bf16 cast to fp32, the same kernel without the division,
2.32 TB/s [PaddlePaddle pull request 76988, torch's column]. No figure of a training run.
"""
Pair = tuple[float, float]
"""In half precision, and in fp32."""


@record
class Moved:
    """Bytes per value of one pass."""

    plain: Pair = (0.0, 0.0)
    """By kernels on contiguous tensors."""
    strided: Pair = (0.0, 0.0)
    """By kernels on views or broadcast operands, and casts up."""

    def bytes(self, element: float) -> float:
        """All of them, where an element has that many bytes."""
        return self.plain[element > 2] + self.strided[element > 2]

    def as_plain(self, element: float) -> float:
        """Bytes that take as long at the bandwidth of contiguous tensors."""
        return self.plain[element > 2] + STRIDED_SLOWDOWN * self.strided[element > 2]


@record
class Series:
    """One operator as several kernels."""

    forward: Moved
    backward: Moved
    saved: Pair = (0.0, 0.0)
    """Bytes per value that are kept for the backward pass in addition to those of the fused kernel."""
    launches: tuple[Pair, Pair] = ((0.0, 0.0), (0.0, 0.0))
    """Kernels forward and backward; 0 where the operator counts them itself."""


EAGER: dict[str, Series] = {
    # Clamp of gate and up, per value of both. Forward: each half clamped out of a view 2 e, joined 2 e. Backward: gate compared
    # with one bound and up with two, e + 1 each (1.5 on average); the two masks of up joined 3 (half of the values); the gradient,
    # a view, selected by them 2 e + 1; both halves joined 2 e.  [Megatron Core 0.15 to 0.17, fused_bias_geglu.py]
    "clamp": Series(forward=Moved(strided=(4.0, 8.0), plain=(4.0, 8.0)), backward=Moved(strided=(9.5, 16.5), plain=(5.5, 9.5)),
                    saved=(2.0, 4.0), launches=((3.0, 3.0), (9.0, 9.0))),
    # Of transformers: gate and up, views, clamped into tensors of their own; sigmoid of alpha gate, its product with gate, one more
    # than up. Forward: two clamps 2 e of a view, per pair of values times alpha 2 e, product 3 e, plus one 2 e (sigmoid is
    # SiLU's). Backward: clamps 3 e of a view and a mask 1, products 6 e, alpha 2 e, sums 3 e. Kept: the clamped gate, sigmoid,
    # their product, up plus one, of which SiLU's output is one that the activation has.  [modeling_gpt_oss.py: _apply_gate]
    "clamp_views": Series(forward=Moved(strided=(4.0, 8.0), plain=(7.0, 14.0)),
                          backward=Moved(strided=(7.0, 13.0), plain=(11.0, 22.0)),
                          saved=(3.0, 6.0), launches=((6.0, 6.0), (10.0, 10.0))),
    # Biases of experts times router weights added expert by expert, per output. Forward: product e, sum 3 e, joined 2 e. Backward:
    # gradient times router weight 2 e and summed over tokens e, times bias 2 e and summed over the width e, pieces joined 2 e.
    # Products broadcast.  [experts.py]
    "expert_bias": Series(forward=Moved(strided=(2.0, 4.0), plain=(10.0, 20.0)),
                          backward=Moved(strided=(8.0, 16.0), plain=(8.0, 16.0))),
    # Router weights in fp32 make all of it fp32: product 4, sum e + 4 + 4, joined 8, cast 4 + e; backward cast e + 4, products 8
    # each, sums 4 each, gradient of the output cast 4 + e and joined 2 e.
    "expert_bias_fp32": Series(forward=Moved(strided=(14.0, 16.0), plain=(14.0, 16.0)),
                               backward=Moved(strided=(22.0, 24.0), plain=(18.0, 24.0))),
    # Rotary embedding with a factor, per value of queries and keys. Forward: times cosine 2 e, half of it negated out of a view e,
    # joined with the other half, a view, 2 e, times sine 2 e, sum 3 e, joined with the part that does not rotate 2 e. Backward: two
    # products 4 e, negated e, halves joined 2 e, sum 3 e; the gradient of the empty part is a tensor of zeros e that is added 3 e.
    # Cosine, sine and their factor are made again in every layer, 6 small kernels.  [rope_utils.py]
    "scaled_rope": Series(forward=Moved(strided=(14.0, 28.0), plain=(10.0, 20.0)),
                          backward=Moved(strided=(14.0, 28.0), plain=(14.0, 28.0)), launches=((24.0, 24.0), (16.0, 16.0))),
    # SiLU of the gate and its product with up, per value of the inner width. Forward: SiLU 2 e, product 3 e. Backward: both factors
    # of the product 3 e each, SiLU 3 e. What SiLU put out is saved.
    "swiglu": Series(forward=Moved(plain=(10.0, 20.0)), backward=Moved(plain=(18.0, 36.0)), saved=(2.0, 4.0),
                     launches=((2.0, 2.0), (3.0, 3.0))),
    # The same where both are views of one tensor. Forward: SiLU out of a view 2 e, product with a view 3 e. Backward: gradient
    # times up, a view, 3 e, times the SiLU 3 e; SiLU backward with the gate, a view, 3 e; both joined 4 e, the gradient of a split.
    # [nanotron, models/llama.py, GLUActivation]
    "gate_views": Series(forward=Moved(strided=(10.0, 20.0)), backward=Moved(strided=(12.0, 24.0), plain=(14.0, 28.0)),
                         saved=(2.0, 4.0), launches=((2.0, 2.0), (4.0, 4.0))),
    # 0.5 x (1 + tanh(c (x + d x^3))) of plain operations, per value of the inner width, under autocast. Forward: cast 2 + 4, power
    # 4 + 4, times d 4 + 4, sum with x 2 + 4 + 4, times c 4 + 4, tanh 4 + 4, plus one 4 + 4, half of x 2 + 2, product 2 + 4 + 4,
    # cast 4 + 2. Backward: cast 6, factors 12 + 10 and a cast 6, tanh 12, times c 8, cast to x 6, times d 8, power 28, its cast 6,
    # half 4, two sums 12. Kept: x in fp32 4 (its input, 2, is not), tanh 4, one more 4, half of x 2.
    # [transformers, activations.py: NewGELUActivation; counted on fake tensors]
    "gelu_new": Series(forward=Moved(plain=(76.0, 72.0)), backward=Moved(plain=(118.0, 112.0)), saved=(12.0, 12.0),
                       launches=((10.0, 8.0), (16.0, 13.0))),
    "gelu_new_half": Series(forward=Moved(plain=(36.0, 72.0)), backward=Moved(plain=(56.0, 112.0)), saved=(6.0, 12.0),
                            launches=((8.0, 8.0), (13.0, 13.0))),
    # Softmax of attention scores. Forward: scale 2 + 2, masked fill 2 + 2, cast to fp32 2 + 4, softmax 4 + 4, cast back 4 + 2.
    # Backward: cast 2 + 4, softmax 8 + 4, cast 4 + 2, fill 2 + 2, scale 2 + 2. Kept: fp32 softmax 4, its half-precision copy 2,
    # mask 1.
    "softmax": Series(forward=Moved(plain=(28.0, 28.0)), backward=Moved(plain=(32.0, 32.0)), saved=(7.0, 7.0),
                      launches=((5.0, 5.0), (5.0, 5.0))),
    # Of classes of transformers. Forward: scale 2 + 2, mask added 2 + 2, softmax of half precision into fp32 2 + 4, copy 4 + 2.
    # Backward: cast 2 + 4, softmax 4 + 4 + 2, scale 2 + 2. Kept: softmax 4, copy 2.
    # [transformers, modeling_llama.py: eager_attention_forward; counted on fake tensors, docs/log/memory.md]
    "softmax_copy": Series(forward=Moved(plain=(20.0, 24.0)), backward=Moved(plain=(20.0, 20.0)), saved=(6.0, 4.0),
                           launches=((4.0, 3.0), (3.0, 2.0))),
    # The same in fp32, for which there is no fused kernel: scale 4 + 4, masked fill with a mask that all heads share 4 + 1 + 4,
    # softmax 4 + 4. Backward: softmax 8 + 4, fill 4 + 1 + 4, scale 4 + 4. Kept: softmax 4.
    # [Megatron-LM, fused_softmax.py, is_kernel_available: input_in_float16]
    "softmax_fp32": Series(forward=Moved(plain=(16.0, 16.0), strided=(9.0, 9.0)),
                           backward=Moved(plain=(20.0, 20.0), strided=(9.0, 9.0)), saved=(4.0, 4.0),
                           launches=((3.0, 3.0), (3.0, 3.0))),
}  # fmt: skip
"""By name in ``Trainer.kernels.unfused``."""
UNCOMPILED: dict[str, Series] = {
    # Forward: square 2 tensors, mean 1, times the scale 2, times the weight 2. Backward: scaled input 2, gradient times weight 2,
    # times the former 3, mean 1, times it 2, difference 3, times the scale 2; of the weight: product 3, sum 1.
    "norm": Series(forward=Moved(plain=(40.0, 28.0)), backward=Moved(plain=(94.0, 76.0)), launches=((8.0, 6.0), (12.0, 9.0))),
    # Forward: silu 2, product 3. Backward: sigmoid 2; of the gate 3 + 3, one minus 2, 3, plus one 2, 3; of up 3 + 3.
    "swiglu": Series(forward=Moved(plain=(30.0, 20.0)), backward=Moved(plain=(118.0, 96.0)),
                     launches=((4.0, 2.0), (13.0, 9.0))),
    # Four products of halves 4, difference and sum 3, joined 2; queries and keys apart; backward likewise.
    "rope": Series(forward=Moved(plain=(48.0, 36.0)), backward=Moved(plain=(48.0, 36.0)),
                   launches=((18.0, 14.0), (18.0, 14.0))),
    # Forward: largest logit 1; difference 2, exponential 2, sum 1. Backward: difference 2, exponential 2, times the scale 2.
    "cross_entropy": Series(forward=Moved(plain=(28.0, 24.0)), backward=Moved(plain=(36.0, 24.0)),
                            launches=((6.0, 4.0), (10.0, 8.0))),
}  # fmt: skip
"""By class of memory-bound operator, where nothing is compiled ('elementwise' in ``unfused``); the operators of
``planner.lab.reference.fused_operators``. A test runs them under a dispatch mode that counts the bytes of every kernel."""
TENSORS = {"norm": 2.0, "swiglu": 3.0, "rope": 2.0}
"""Tensors that the forward pass of one fused kernel reads and writes."""
ELEMENTWISE = ("norm", "cross_entropy")
"""Classes whose bandwidth in a profile is that of one kernel with its arithmetic; as several kernels they are element-wise."""


def eager(shard: Shard, row: str, values: Number, name: str, **more: Any) -> MemoryBound:
    """The operator of a row of EAGER over so many values."""
    series, e = EAGER[row], shard.element
    launches = series.launches[0][e > 2], series.launches[1][e > 2]
    return MemoryBound(**{
        "name": name, "kind": "elementwise", "launches": launches, "saved": values * series.saved[e > 2],
        "forward": values * series.forward.as_plain(e), "backward": values * series.backward.as_plain(e), **more,
    })  # fmt: skip


def uncompiled(operators: list[Operator], shard: Shard) -> list[Operator]:
    """The operators of a layer as a trainer runs them that compiles nothing; those of any other trainer as they are.

    bytes = elements x bytes per element of the row, elements = forward bytes / bytes per element of one fused kernel. The
    trainer's own passes must be 1. A layer norm is one kernel without a compiler too.
    """
    if "elementwise" not in shard.trainer.kernels.unfused:
        return operators
    return [_as_series(one, shard) if isinstance(one, MemoryBound) else one for one in operators]


def elements(one: Operator, shard: Shard) -> Number | None:
    """Elements of the tensor of an operator of UNCOMPILED, from the list of a trainer that fuses; None for any other."""
    if not isinstance(one, MemoryBound) or one.kind not in UNCOMPILED:
        return None
    if one.kind == "norm" and shard.model.norm != "rmsnorm":
        return None
    return one.forward / (loss_bytes(shard) if one.kind == "cross_entropy" else TENSORS[one.kind] * shard.element)


def _as_series(one: MemoryBound, shard: Shard) -> MemoryBound:
    count, e = elements(one, shard), shard.element
    if count is None:
        return one
    series = UNCOMPILED[one.kind]
    return dataclasses.replace(
        one, kind="elementwise" if one.kind in ELEMENTWISE else one.kind,
        forward=count * series.forward.bytes(e), backward=count * series.backward.bytes(e),
        launches=(series.launches[0][e > 2], series.launches[1][e > 2]),
    )  # fmt: skip
