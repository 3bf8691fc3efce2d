"""The linear-attention block of a layer: projections, causal convolution, chunked scan, gated norm, and what it keeps.

T tokens of one rank, K, V the widths of all its keys and values, H its value heads of width d_v, d_k that of a key head, r = H / G
value heads per key head, C the chunk, e bytes of an element. Value heads and key heads are split by tensor parallelism, so all of
these are 1/t of the model's. In Mamba-2 C and B are queries and keys, x are values, d_k is the state size N, d_v the head P, the
key heads are groups (linear_attention.py).
"""

from typing import NamedTuple

import numpy as np

from planner.cost.layer.adapters import read_again
from planner.cost.layer.operators import NEVER, REPEATED, Collective, MemoryBound, Operator, Scan, Shard
from planner.cost.layer.parts import input_gradient_sum, linear, norm, rank_order, residual, tp_pair
from planner.linear_attention import LinearAttention


class Traffic(NamedTuple):
    """Bytes per token and value head that a scan reads and writes, of a pass."""

    together: float
    """By kernels that work on all chunks at once."""
    carried: float
    """By kernels that pass the state from chunk to chunk."""


def linear_block(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    """Norm, input projection, convolution, scan, gated norm, output projection and residual of one layer; its collectives."""
    m, tp, tokens, e = _sizes(shard), shard.tp, shard.tokens, shard.element
    h, inner = float(shard.model.hidden_size), m.value_size / tp
    separate = 3.0 if m.gate_rank else 1.0 if m.kind == "gated_delta_net" else 0.0
    operators: list[Operator] = [
        norm(shard, "linear_norm", "linear_in", "linear_decay_down", "linear_gate_down", inside=NEVER),
        *linear(shard, "linear_in", tokens, m.input_size / tp, h, kept=tokens * m.input_size / tp * e, module=REPEATED),
        *_low_rank_gates(shard),
        *input_gradient_sum(shard, "linear", separate * shard.trainer.kernels.separate_projections, tokens, reader="norm"),
        _convolution(shard),
        *_prepared(shard),
        scan(shard),
        MemoryBound(name="gated_norm", kind="norm", forward=3 * tokens * inner * e, backward=5 * tokens * inner * e,
                    kept=tokens * inner * shard.input_element * read_again(shard, "linear_out"), launches=(1.0, 2.0)),
        *linear(shard, "linear_out", tokens, h, inner, module=REPEATED, gathered=(1.0, shard.quantising_ranks)),
        residual(shard, "linear_residual"),
        *rank_order(shard, "linear", NEVER),
    ]  # fmt: skip
    return operators, tp_pair(shard, "linear", "linear_in", "linear_out", NEVER) + _head_exchange(shard)


def _sizes(shard: Shard) -> LinearAttention:
    """The linear-attention layers of the model, which it has."""
    assert shard.model.linear is not None
    return shard.model.linear


def _convolution(shard: Shard) -> Operator:
    """SiLU of a causal convolution of each channel of Q, K and V: read and written, backward read twice and written; with Mamba-2
    its output is not kept and made again.  [mamba_ssm, ssd_combined.py, MambaSplitConv1dScanCombinedFn; fla, convolution.py]"""
    m = _sizes(shard)
    values = shard.tokens * m.conv_size / shard.tp * shard.element
    again = 2.0 if m.kind == "mamba2" else 0.0
    none = (0.0 * values, 0.0 * values)
    return Scan(name="convolution", forward=2.0 * values, backward=(3.0 + again) * values, carried=none, steps=none, products=none,
                flop=2.0 * m.conv_kernel * shard.tokens * m.conv_size / shard.tp, kept=none[0] if again else values,
                launches=(1.0, 2.0))  # fmt: skip


def _low_rank_gates(shard: Shard) -> list[Operator]:
    """Decay and output gate of Kimi delta attention, each h -> rank -> all heads; the first half is whole on every rank."""
    m, tokens, e = _sizes(shard), shard.tokens, shard.element
    if not m.gate_rank:
        return []
    h, rank = float(shard.model.hidden_size), float(m.gate_rank)
    found: list[Operator] = []
    for name, width in (("decay", m.decay_size / shard.tp), ("gate", m.value_size / shard.tp)):
        found += linear(shard, f"linear_{name}_down", tokens, rank, h, kept=tokens * rank * e, module=REPEATED)
        found += linear(shard, f"linear_{name}", tokens, width, rank, kept=tokens * width * e, module=REPEATED)
    return found


def _prepared(shard: Shard) -> list[Operator]:
    """L2 norms of queries and keys, their repetition for every value head, copies of values and of the output in the order of the
    kernels; the scan keeps queries and keys as normalised and repeated. Mamba-2 in Megatron, whose tensors have the sequence
    first: its input and output copied from several sequences, a view of one.

    Forward 4 K for the norms, 2 K + 2 H d_k written for all value heads, 2 V + 2 V copied; backward one read more of the norms.
    [Megatron Core, gated_delta_net/common.py, _prepare_input_for_gated_delta_rule; transformers, modeling_qwen3_next.py]
    """
    m, tokens, e = _sizes(shard), shard.tokens, shard.element
    if m.kind == "mamba2":
        several = np.where(np.asarray(shard.batch) > 1.0, float(shard.trainer.kernels.transformer_engine), 0.0)
        order = several * 2.0 * tokens * (m.input_size + m.value_size) / shard.tp * e
        return [MemoryBound(name="linear_inputs", kind="copy", forward=order, backward=order,
                            launches=(2.0 * several, 2.0 * several))]  # fmt: skip
    keys, repeated, values = (size / shard.tp for size in (m.key_size, m.value_heads * m.key_head_dim, m.value_size))
    apart = m.value_heads > m.key_heads
    moved = 4.0 * keys + apart * (2.0 * keys + 2.0 * repeated) + 4.0 * values
    return [MemoryBound(name="linear_inputs", kind="elementwise", forward=tokens * moved * e,
                        backward=tokens * (moved + 2.0 * keys) * e, kept=tokens * 2.0 * repeated * e,
                        launches=(6.0, 8.0))]  # fmt: skip


def scan(shard: Shard) -> Scan:
    """The recurrence over the sequence in chunks: what is inside a chunk as matrix products, and a state from chunk to chunk.

    Kept: its output; the triangular matrix of each chunk, C per token and head; decays in fp32 (Kimi: those of each channel are
    made again from the gate, which is kept; so are the states of the chunks). FLOP per token, causal halves counted once; those of
    Mamba-2 take time of their own, backward H (3 d_v C + 10 d_k d_v): states again, their gradient, those of x, B, C and C B^T:
    Mamba-2            G d_k C + H (d_v C + 4 d_k d_v)                       [arXiv 2405.21060, section 6, block decomposition]
    delta rules        H (C (3 d_k + 2 d_v) + C^2 / 3 + 6 d_k d_v)           [arXiv 2412.06464, section 3.3; 2510.26692]
    """
    m, e = _sizes(shard), shard.element
    heads = shard.tokens * m.value_heads / shard.tp
    (forward, backward), chunk = traffic(m, e), float(m.chunk_size)
    dk, dv, groups = float(m.key_head_dim), float(m.value_head_dim), m.key_heads / m.value_heads
    if m.kind == "mamba2":
        kept, flop = dv * e, groups * dk * chunk + dv * chunk + 4.0 * dk * dv
        launches, products = (6.0, 14.0), (flop, 3.0 * dv * chunk + 10.0 * dk * dv)
    else:
        triangles = 2.0 if m.gate_rank else 1.0
        kept = dv * e + triangles * chunk * e + 8.0
        flop = chunk * (3.0 * dk + 2.0 * dv) + chunk * chunk / 3.0 + 6.0 * dk * dv
        launches, products = (6.0, 9.0), (0.0, 0.0)
    one = shard.workload.sequence_length / chunk * np.ones_like(shard.tp)
    passed = 0.0 if m.kind == "mamba2" else 1.0
    return Scan(
        name="scan", module=NEVER, forward=heads * forward.together, backward=heads * backward.together,
        carried=(heads * forward.carried, heads * backward.carried), steps=(passed * one, 2.0 * passed * one),
        products=(heads * products[0], heads * products[1]), flop=heads * flop, kept=heads * kept, launches=launches,
    )  # fmt: skip


def traffic(m: LinearAttention, e: float) -> tuple[Traffic, Traffic]:
    """Bytes of a scan per token and value head, forward and backward: every tensor of every kernel once.

    Mamba-2  forward: states of the chunks x, B -> S (fp32); passed on S -> S (e); C B^T of each group (fp32); output x, C, S -> y.
             backward: the first three again; dS of dy; passed back; x, dy, dS -> dx; x, dS -> dB; dy, S -> dC; x, dy -> d(C B^T),
             two products of it; decays x, dy. S stands for d_k d_v / C.  [mamba_ssm, ops/triton/ssd_combined.py]
    delta    forward: K K^T -> A (fp32), inverted -> (e); k, v, A -> w, u; carried: k, w, u -> S, v'; output q, k, v', S -> o.
             backward: w, u again; carried: S, v' again, and q, k, w, do, dv -> dS, dv; q, k, do -> dv; q, k, v', w, do, dv, S, dS
             -> dq, dk, dw; k, v, A, dw, du -> dk, dv; gradients of keys added.  [fla, ops/gated_delta_rule/chunk.py]
    Kimi     in addition decays of each channel in fp32: gate read, running sum written, read by the products in a chunk, w and
             output; queries and keys scaled by them written; Q K^T as a second matrix.  [fla, ops/kda/chunk_fwd.py, chunk_bwd.py]
    """
    k, v, c = float(m.key_head_dim), float(m.value_head_dim), float(m.chunk_size)
    state = k * v / c
    if m.kind == "mamba2":
        shared = m.key_heads / m.value_heads
        forward = 3 * v * e + state * (8 + 2 * e) + shared * (8 * c + 4 * k * e) + 26
        backward = 12 * v * e + state * (28 + 4 * e) + shared * (24 * c + 6 * k * e + 8 * k) + 60
        return Traffic(forward, 0.0), Traffic(backward, 0.0)
    carried, back = (2 * k + 2 * v + state) * e, (5 * k + 5 * v + 2 * state) * e
    forward = (5 * k + 4 * v + state) * e + c * (8 + 2 * e)
    backward = (12 * k + 11 * v + 2 * state) * e + 2 * c * e
    if m.gate_rank:
        forward += 6 * k * 4 + (2 * k + 3 * c) * e
        backward += 12 * k * 4 + (6 * k + 4 * c) * e
    return Traffic(forward, carried), Traffic(backward, back)


def backward_bytes(m: LinearAttention, e: float) -> float:
    """Most bytes per token that are alive for a moment in the backward pass of the scan, of all heads.

    Mamba-2: the convolution's output made again, the gradient of all that the input projection put out, states and their
    gradients in fp32. Delta rules: w, u, v', gradients of queries, keys, values, w, u and output, states and their gradients.
    """
    states = m.value_heads * float(m.key_head_dim * m.value_head_dim) / m.chunk_size
    if m.kind == "mamba2":
        return (m.conv_size + m.input_size + m.value_size) * e + 8.0 * states
    heads = m.value_heads * (4.0 * m.key_head_dim + 5.0 * m.value_head_dim)
    return heads * e + 2.0 * states * e + 8.0 * m.decay_size * (m.gate_rank > 0)


def _head_exchange(shard: Shard) -> list[Collective]:
    """All-to-all between a split of tokens and a split of heads before the convolution and after the scan, whatever way
    attention's keys take: the scan needs the whole sequence.  [Megatron Core, mamba_context_parallel.py; gdn.py, a2a_cp_to_hp]"""
    m, tp = _sizes(shard), shard.tp
    size = shard.tokens * (m.input_size + m.value_size) / tp * shard.element
    return [
        Collective(name=f"linear_heads{suffix}", group="cp", op="all_to_all", size=size, n=shard.cp, stride=tp, backward=backward)
        for suffix, backward in (("", False), ("_gradient", True))
    ]
