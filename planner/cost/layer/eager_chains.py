"""Chains of plain torch operations where other models have one fused kernel: what they move, and how fast.

Those of gpt-oss: read in Megatron Core 0.15 to 0.17 (experts.py, fused_bias_geglu.py, rope_utils.py) with torch's backward formulas
(clamp_backward, slice_backward, a cat for every split). Ring attention merges its steps with them: read in Transformer Engine
1.6 and 2.2, AttnFuncWithCP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.layer.operators import NEVER, REPEATED, MemoryBound, Number, Operator, Shard
from planner.layout import CpMethod, Module
from planner.workload import LOW_PRECISIONS

STRIDED_SLOWDOWN = 2.0
"""Time per byte of torch's kernel for views and broadcast operands over that of its vectorised kernel, which moves 16 bytes
per thread instead of one value, with an integer division per dimension.

A100 1.99: rotary embedding of Hugging Face in bf16, 20 bytes per value, 3.82 ms for 671 MB of values read and written once
[Liger-Kernel, benchmark/data/all_benchmark_data.csv] at the profile's element-wise bandwidth. H100 1.88: fp32 products and
negations 1.60 TB/s [pytorch issue 141265]. 8 TB/s generation 2.3: bf16 cast to fp32, the same kernel without the division,
2.32 TB/s [PaddlePaddle pull request 76988, torch's column]. No figure of a training run.
"""
MASK_BYTES = 1.0
"""One bool."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes per value of one pass through a chain."""

    plain: float = 0.0
    """By kernels on contiguous tensors."""
    strided: float = 0.0
    """By kernels on views or broadcast operands, and casts up."""

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.plain + self.strided

    @property
    def as_plain(self) -> float:
        """Bytes that take as long at the bandwidth of contiguous tensors."""
        return self.plain + STRIDED_SLOWDOWN * self.strided


def clamp_moved(e: float) -> tuple[Moved, Moved]:
    """Clamp of gate and up, per value of both, forward and backward; ``e`` bytes per value.

    Forward: each half clamped out of a view 2 e, joined 2 e. Backward: gate compared with one bound and up with two, e + 1
    each; the two masks of up joined 3; the gradient, a view, selected by them 2 e + 1; both halves joined 2 e.
    """
    compared, half = 1.5, 0.5
    return (
        Moved(strided=2 * e, plain=2 * e),
        Moved(strided=compared * (e + MASK_BYTES) + 2 * e + MASK_BYTES, plain=half * 3 * MASK_BYTES + 2 * e),
    )


def bias_moved(e: float, fp32_weights: bool) -> tuple[Moved, Moved]:
    """Biases of experts times router weights added expert by expert, per output.

    Forward: product e, sum 3 e, joined 2 e. Backward: gradient times router weight 2 e and summed over tokens e, times
    bias 2 e and summed over the width e, pieces joined 2 e. Products broadcast. Router weights in fp32 make all of it
    fp32: product 4, sum e + 4 + 4, joined 8, cast 4 + e; backward cast e + 4, products 8 each, sums 4 each, gradient of
    the output cast 4 + e and joined 2 e.
    """
    if not fp32_weights:
        return Moved(strided=e, plain=5 * e), Moved(strided=4 * e, plain=4 * e)
    return (
        Moved(strided=4 + e + 8, plain=8 + 4 + e),
        Moved(strided=e + 4 + 16, plain=8 + 4 + e + 2 * e),
    )


def rope_moved(e: float) -> tuple[Moved, Moved]:
    """Rotary embedding with a factor, per value of queries and keys.

    Forward: times cosine 2 e, half of it negated out of a view e, joined with the other half, a view, 2 e, times sine
    2 e, sum 3 e, joined with the part that does not rotate 2 e. Backward: two products 4 e, negated e, halves joined 2 e,
    sum 3 e; the gradient of the empty part is a tensor of zeros e that is added 3 e.
    """
    return Moved(strided=7 * e, plain=5 * e), Moved(strided=7 * e, plain=7 * e)


def gated_moved() -> tuple[Moved, Moved]:
    """SiLU of the gate and its product with up where both are views of one tensor, in tensors of the inner width.

    Forward: SiLU out of a view 2, product with a view 3. Backward: gradient times up, a view, 3, times the SiLU 3; SiLU
    backward beside the gate, a view, 3; both joined 4, the gradient of a split.  [nanotron, models/llama.py, GLUActivation]
    """
    return Moved(strided=5.0), Moved(strided=6.0, plain=7.0)


def qkv_copies(shard: Shard) -> list[Operator]:
    """Copies of queries, keys and values Q, K, V around the rotary embedding, each tensor read and written.

    Forward: Q, K, V out of the projection in an order of their own, out of views; K and V joined; their order changed, a
    view. Backward: gradients of K and V joined, those of all three joined, K and V as views, and copied in the order of the
    projection, a view.  [nanotron, models/llama.py, CausalSelfAttention: permute().contiguous(), cat, permute().contiguous();
    torch: the gradients of split and of unpacking are a cat and a stack, a view of a permuted gradient is a copy]
    """
    if "qkv_copies" not in shard.trainer.kernels.unfused or shard.model.is_mla:
        return []
    model = shard.model
    keys = shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads
    queries = model.query_size / shard.tp
    whole, joined = (2.0 * shard.tokens * each * shard.element for each in (queries + keys, keys))
    query = whole - joined
    return [MemoryBound(name="qkv_copies", kind="elementwise", module=NEVER, launches=(3.0, 3.0),
                        forward=STRIDED_SLOWDOWN * (whole + joined) + joined,
                        backward=STRIDED_SLOWDOWN * (whole + joined) + joined + query)]  # fmt: skip


def scaled_rope(shard: Shard) -> bool:
    """The rotary embedding is a chain, as it has a factor."""
    return shard.model.scaled_rope and "scaled_rope" in shard.trainer.kernels.unfused


def rope_chain(rotated: Number, shard: Shard) -> Operator:
    """The rotary embedding as a chain; cosine, sine and their factor are made again in every layer, 6 small kernels."""
    forward, backward = rope_moved(shard.element)
    values = rotated / shard.element
    return MemoryBound(name="rope", kind="elementwise", module=Module.MLA_UP_PROJECTION | REPEATED,
                       forward=forward.as_plain * values, backward=backward.as_plain * values,
                       launches=(24.0, 16.0))  # fmt: skip


def clamp(shard: Shard, rows: Number, width: Number) -> list[Operator]:
    """Clamp of gate and up before the activation, as kernels of its own; its output is kept beside its input.

    The activation behind it copies a number to the GPU from memory that is not pinned: the host waits until the GPU is
    there.  [fused_bias_geglu.py, weighted_bias_quick_geglu_impl: torch.tensor(linear_offset, device=...)]
    """
    if not shard.model.clamped_activation or "clamp" not in shard.trainer.kernels.unfused:
        return []
    forward, backward = clamp_moved(shard.element)
    values = rows * width
    return [MemoryBound(name="experts_clamp", kind="elementwise", module=Module.MLP_ACTIVATION | Module.MOE | REPEATED,
                        forward=forward.as_plain * values, backward=backward.as_plain * values,
                        saved=values * shard.element, launches=(3.0, 9.0), captured=False, waits=True)]  # fmt: skip


def expert_bias(shard: Shard, rows: Number) -> list[Operator]:
    """Biases of the second linear layers of the experts. DeepEP and HybridEP carry router weights in fp32.

    Backward also adds the gradients of both biases of every expert to the accumulated ones, a kernel each.
    [megatron/core/distributed: DistributedDataParallel._make_backward_post_hook]
    """
    if not shard.model.expert_bias or "expert_bias" not in shard.trainer.kernels.unfused:
        return []
    forward, backward = bias_moved(shard.element, shard.trainer.kernels.expert_dispatch != "alltoall")
    local = np.maximum(shard.model.num_experts / shard.ep, 1.0)
    values = rows * shard.model.hidden_size
    return [MemoryBound(name="expert_bias", kind="elementwise", module=Module.MOE | REPEATED, captured=False,
                        forward=forward.as_plain * values, backward=backward.as_plain * values,
                        launches=(2.0 * local + 1.0, 6.0 * local + 1.0))]  # fmt: skip


def attention_bias(shard: Shard) -> list[Operator]:
    """Bias of the output projection, added by a kernel of its own where biases of experts exclude the fused one.

    Output read and written, the bias broadcast; backward its gradient is a sum over tokens.  [TransformerConfig:
    bias_dropout_fusion is refused with biases in grouped experts]
    """
    if not (shard.model.linear_bias and shard.model.expert_bias) or "expert_bias" not in shard.trainer.kernels.unfused:
        return []
    values = shard.tokens_split * shard.model.hidden_size * shard.element
    return [MemoryBound(name="attention_bias", kind="elementwise", module=NEVER, forward=2 * STRIDED_SLOWDOWN * values,
                        backward=values, launches=(1.0, 2.0))]  # fmt: skip


def ring_merge(shard: Shard) -> list[Operator]:
    """What ring attention of Transformer Engine adds around the c attention kernels of a rank, causal and balanced.

    Forward: the rank's own step scaled into the output, Q read and written; each other step, three quarters of the rows at
    the mean, scaled and added, 3 Q; keys and values joined, 2 KV, and the half that an earlier rank's block needs copied.
    Backward: gradients of queries copied, then added likewise; those of keys and values joined and added to what travels,
    5 KV per step and share. Q, KV: bytes of queries and of keys with values of one rank.
    """
    model, cp = shard.model, shard.cp
    ring = (np.asarray(shard.layout.cp_method) == CpMethod.RING) & (cp > 1)
    if not shard.trainer.kernels.transformer_engine or shard.trainer.kernels.attention != "flash" or not np.any(ring):
        return []
    queries = shard.tokens * model.attention_output_size / shard.tp * shard.element
    key_values = (
        shard.tokens * shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads * shard.element
    )
    others = cp - 1.0
    merged = queries * (2.0 + 2.25 * others)
    return [MemoryBound(name="ring_merge", kind="elementwise", module=Module.CORE_ATTENTION,
                        forward=np.where(ring, merged + key_values * (2.0 + 0.5 * others), 0.0),
                        backward=np.where(ring, merged + key_values * (5.0 + 4.25 * others), 0.0),
                        launches=(np.where(ring, 4.0 + 2.0 * others, 0.0), np.where(ring, 3.0 + 4.0 * others, 0.0)))]  # fmt: skip


def attention_casts(shard: Shard) -> list[Operator]:
    """Casts around attention in fp8: queries, keys and values in, the output out of fp8; its gradient in, theirs out.

    Read in one precision and written in the other, e + 1 bytes per value.  [TransformerEngine, FusedAttnFunc: cast_to_fp8,
    cast_from_fp8; the layers around it work in half precision unless fp8_mha is set]
    """
    model, trainer = shard.model, shard.trainer
    if (
        trainer.kernels.attention_dtype != "fp8"
        or trainer.kernels.attention != "flash"
        or shard.workload.precision not in LOW_PRECISIONS
    ):
        return []
    per_token = model.query_size / shard.tp + shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads
    moved = shard.tokens * (per_token + model.attention_output_size / shard.tp) * (shard.element + 1.0)
    return [MemoryBound(name="attention_casts", kind="quantize", module=Module.CORE_ATTENTION, forward=moved,
                        backward=moved, launches=(4.0, 4.0))]  # fmt: skip
