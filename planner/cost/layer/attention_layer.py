"""The attention block of a layer: projections, core attention, and how keys and values reach every rank."""

import numpy as np

from planner.cost.layer.adapters import read_again
from planner.cost.layer.eager_kernels import EAGER, STRIDED_SLOWDOWN, eager
from planner.cost.layer.operators import (
    NEVER,
    REPEATED,
    Attention,
    Collective,
    Gemm,
    MemoryBound,
    Number,
    Operator,
    Shard,
)
from planner.cost.layer.parts import input_gradient_sum, linear, norm, rank_order, residual, tp_pair
from planner.cost.layer.save_list import attention_products, listed_output, repeats
from planner.cost.layer.sparse_attention import absorbed_queries, indexer, sparse_core, sparse_exchange
from planner.layout import CpMethod, Module
from planner.workload import LOW_PRECISIONS


def attention_block(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    """Norm, projections, core attention, output projection and residual of one layer; its collectives."""
    model, tp, tokens, e = shard.model, shard.tp, shard.tokens, shard.element
    h = float(model.hidden_size)
    output_size = model.attention_output_size / tp
    operators: list[Operator] = [
        norm(shard, "attention_norm", "qkv", "mla_down", "mla_q_up", *(("mlp_up",) if model.norms_per_layer == 1 else ()),
             inside=None if model.is_mla else NEVER, first=True)  # fmt: skip
    ]
    operators += _projections(shard)
    apart = shard.trainer.kernels.separate_projections
    if model.is_mla:  # down projections are whole on every rank: their input is not gathered
        operators += input_gradient_sum(shard, "attention", 1.0 * apart, shard.tokens_split, reader="copy")
    else:
        operators += input_gradient_sum(shard, "attention", 2.0 * apart, tokens, reader="norm")
    operators += _qkv_copies(shard)
    operators += [*indexer(shard), *sparse_core(shard)] if model.is_sparse else _core_attention(shard)
    if model.attention_gate:  # output times sigmoid of the gate: both factors are kept, the gate by its projection
        gated = tokens * output_size * e
        operators.append(MemoryBound(name="attention_gate", kind="elementwise", forward=3 * gated, backward=5 * gated,
                                     kept=gated, launches=(1.0, 2.0)))  # fmt: skip
    last = attention_products(model)
    operators += linear(
        shard, "attention_out", tokens, h, output_size, module=REPEATED, share=repeats(last), kept=listed_output(shard, last),
        gathered=(1.0, shard.quantising_ranks),
    )  # fmt: skip
    operators += _attention_bias(shard)
    operators.append(residual(shard, "attention_residual"))
    if model.norms_per_layer > 2:  # Gemma: a norm after each block as well
        operators.append(norm(shard, "attention_post_norm"))
    operators += rank_order(shard, "attention", NEVER)
    collectives = tp_pair(shard, "attention", "qkv", "attention_out", NEVER)
    return operators, collectives + (sparse_exchange(shard) if model.is_sparse else context_exchange(shard))


def _projections(shard: Shard) -> list[Operator]:
    """Query, key and value projections and the rotary embedding; Q, K and V are kept for the backward pass.

    MLA: the down projections work on T_s tokens, or on T where layers save their gathered input, and are whole on every rank,
    the up projections are split by heads [DeepSeek-V2, section 2.1]; Megatron can repeat the latter instead of keeping Q, K and
    V. K is the output of its up projection next to the rotary part, which all heads share and the concatenation copies to each.
    """
    model, e, tp, tokens = shard.model, shard.element, shard.tp, shard.tokens
    h = float(model.hidden_size)
    passes = shard.trainer.kernels.rope_passes
    if not model.is_mla:
        query, gate = model.query_size / tp, model.query_gate_size / tp
        key_value = shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads
        share = float(model.key_size / (model.query_size + model.query_gate_size + model.key_size + model.value_size))
        heads = [*linear(shard, "qkv", tokens, query + gate + key_value, h, saved=tokens * (query + gate + key_value) * e,
                         module=REPEATED, share=share, gathered=(shard.quantising_ranks, 1.0))]  # fmt: skip
        rotated = tokens * (query + key_value / 2) * e
    else:
        rank_q, rank_kv = model.q_lora_rank, model.kv_lora_rank + model.qk_rope_head_dim
        query, key = model.query_size / tp, model.query_size / tp
        value = model.attention_output_size / tp
        up = Module.MLA_UP_PROJECTION | REPEATED
        rows = tokens if shard.trainer.stored.gathered_inputs else shard.tokens_split
        low = bool(rank_q)  # products: wq_a wq_b wkv_a wkv_b, else wq wkv_a wkv_b
        heads = linear(shard, "mla_down", rows, float(rank_q + rank_kv), h, saved=rows * (rank_q + rank_kv) * e,
                       module=REPEATED, share=float(not low))  # fmt: skip
        normed = float(rank_q + model.kv_lora_rank)
        heads.append(MemoryBound(name="mla_norm", kind="norm", forward=2 * tokens * normed * e,
                                 backward=3 * tokens * normed * e, launches=(2.0, 4.0), module=REPEATED,
                                 saved=tokens * normed * shard.input_element * read_again(shard, "qkv", "mla_q_up")))  # fmt: skip
        source = float(rank_q) if rank_q else h  # queries that are not compressed come from the hidden state itself
        heads += linear(shard, "mla_q_up", tokens, query, source, module=up, share=float(low), saved=tokens * query * e)
        kv_up = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim) / tp
        heads += linear(shard, "qkv", tokens, kv_up, float(model.kv_lora_rank), module=up, share=float(low),
                        saved=absorbed_queries(shard) if model.is_sparse else tokens * kv_up * e)  # fmt: skip
        joined = 0.0 if model.is_sparse else tokens * (key + value - kv_up) * e
        heads.append(MemoryBound(name="mla_keys", kind="copy", forward=0.0 * tokens, backward=0.0 * tokens, module=up,
                                 saved=joined, launches=(0.0, 0.0)))  # fmt: skip
        rotated = 2 * tokens * model.num_heads * model.qk_rope_head_dim / tp * e
    if model.position == "rope" and _scaled_rope(shard):
        heads.append(eager(shard, "scaled_rope", rotated / e, "rope", module=Module.MLA_UP_PROJECTION | REPEATED))
    elif model.position == "rope":
        heads.append(MemoryBound(name="rope", kind="rope", forward=2 * rotated * passes, backward=2 * rotated * passes,
                                 module=Module.MLA_UP_PROJECTION | REPEATED,
                                 launches=(2.0 * passes, 2.0 * passes)))  # fmt: skip
    if model.qk_norm:
        kernels = shard.trainer.kernels
        norms = kernels.norm_passes  # of queries and of keys, as the norms of the layer run
        heads.append(MemoryBound(name="qk_norm", kind="norm", forward=2 * rotated * norms, backward=3 * rotated * norms,
                                 saved=rotated * kernels.saved_norm_bytes / 2, module=Module.NORM | REPEATED,
                                 launches=(2.0 * norms, 4.0 * norms)))  # fmt: skip
    return heads


def _split(shard: Shard) -> tuple[Number, Number]:
    """Parts that context parallelism makes of the heads and of the queries of a sequence: Ulysses splits heads, others queries."""
    a2a = np.asarray(shard.layout.cp_method) == CpMethod.A2A
    return np.where(a2a, shard.cp, 1.0), np.where(a2a, 1.0, shard.cp)


def _scores(shard: Shard) -> Number:
    """Scores of a layer on a rank: of every query of it with every key of the sequence."""
    of_heads, of_queries = _split(shard)
    heads, sequence = shard.model.num_heads / shard.tp / of_heads, shard.workload.sequence_length
    return shard.batch * heads * (sequence / of_queries) * sequence


def score_gradients(shard: Shard) -> Number:
    """Bytes of gradients of scores that lie beside what a layer saved, where softmax runs in fp32: its gradient 4 and that of the
    scores e; in half precision the copy of the softmax, 2, is gone by then."""
    there = _copies_softmax(shard) and shard.trainer.kernels.attention != "flash"
    return (4.0 if shard.element < 4 else 8.0) * _scores(shard) * there


def _copies_softmax(shard: Shard) -> bool:
    """Whether softmax leaves half precision, which it does not beside attention sinks.  [transformers, modeling_gpt_oss.py]"""
    return "softmax_copy" in shard.trainer.kernels.unfused and not shard.model.attention_sinks


def _core_attention(shard: Shard) -> list[Operator]:
    """Softmax(Q K^T / sqrt d) V, inside each of the documents that are packed into a sequence.

    Flash: keeps the output (the input of the output projection) and one fp32 number per row and head. Unfused: scores,
    softmax and dropout pass through memory; softmax output, dropout mask and output are kept, 5 a s^2 b / t bytes
    [Korthikanti 2022, section 4.1], 2 without dropout.
    """
    model, e, tp, tokens, workload = shard.model, shard.element, shard.tp, shard.tokens, shard.workload
    head_split, query_split = _split(shard)
    heads = model.num_heads / tp / head_split
    kv_heads = np.maximum(shard.kv_heads / head_split, 1.0)
    seq_q = workload.sequence_length / query_split
    packed = workload.sequence_length / (workload.document_length or workload.sequence_length)
    output = tokens * model.attention_output_size / tp
    kept = output * e
    if shard.trainer.kernels.attention == "flash":
        return [
            Attention(
                name="core_attention", module=Module.CORE_ATTENTION, heads=heads, kv_heads=kv_heads,
                documents=packed, seq_q=seq_q / packed,
                seq_kv=np.full_like(tp, float(workload.sequence_length) / packed), kept=kept + tokens * heads * head_split * 4,
                launches=(1.0, 3.0),
            ),
            *_ring_merge(shard),
            *_attention_casts(shard),
        ]  # fmt: skip
    scores = _scores(shard)
    mask = shard.dropout
    passes = shard.trainer.kernels.elementwise_passes
    module = Module.CORE_ATTENTION
    bytes_each = (2 * e * passes, 3 * e * passes, e)
    launches = ((1 + mask) * passes, (1 + mask) * passes)
    unfused = "softmax" in shard.trainer.kernels.unfused
    if unfused or _copies_softmax(shard) or e > 2:
        row = EAGER["softmax" if unfused else "softmax_copy" if _copies_softmax(shard) else "softmax_fp32"]
        bytes_each = row.forward.as_plain(e), row.backward.as_plain(e), row.saved[e > 2]
        launches = row.launches[0][e > 2] + mask, row.launches[1][e > 2] + mask
    s, d = float(workload.sequence_length), float(model.head_dim)
    value_dim = model.attention_output_size / model.num_heads
    return [
        Gemm(name="scores", module=module, m=seq_q, n=s, k=d, groups=shard.batch * heads, activations=True, useful=0.5,
             low_precision=False, launches=(1.0, 2.0)),
        MemoryBound(name="softmax", module=module, kind="elementwise",
                    forward=scores * (bytes_each[0] + mask * passes * (2 * e + 1)),
                    backward=scores * (bytes_each[1] + mask * passes * (2 * e + 1)),
                    saved=scores * (bytes_each[2] + mask * (e + 1)), launches=launches),
        Gemm(name="values", module=module, m=seq_q, n=value_dim, k=s, groups=shard.batch * heads, activations=True, useful=0.5,
             low_precision=False, launches=(1.0, 2.0), kept=kept),
    ]  # fmt: skip


def context_exchange(shard: Shard, *, every_head: bool = False) -> list[Collective]:
    """How keys and values of the whole sequence reach every context-parallel rank.

    ring: c - 1 hops of the local K and V, backward with their gradients as well [Liu 2023, ring attention];
    allgather: K and V gathered, gradients reduce-scattered, gathered again backward [Dubey 2024, section 3.3.2];
    a2a: Q, K, V and the output change between a split of tokens and a split of heads [Jacobs 2023, Ulysses].
    ``every_head``: keys and values are exchanged once for every query head.
    """
    model, e, tokens, cp, tp = shard.model, shard.element, shard.tokens, shard.cp, shard.tp
    method = np.asarray(shard.layout.cp_method)
    per_token = shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads
    if model.is_mla or every_head:
        per_token = (model.query_size + model.attention_output_size) / tp
    key_value = tokens * per_token * e
    moved = tokens * (model.query_size + model.attention_output_size) / tp * e + key_value

    def one(name: str, op: str, size: Number, used: int, backward: bool, count: Number = 1.0) -> Collective:
        hides = used == CpMethod.RING
        overlaps_with = ("core_attention.dgrad" if backward else "core_attention.forward") if hides else ""
        return Collective(
            name=name, group="cp", op=op, size=size, n=np.where(method == used, cp, 1.0), stride=tp, backward=backward,
            count=count, module=Module.CORE_ATTENTION if hides else NEVER, overlap="cp" if hides else "",
            overlaps_with=overlaps_with,
        )  # fmt: skip

    hops = np.maximum(cp - 1, 0.0)
    return [
        one("ring", "send_recv", key_value, CpMethod.RING, False, hops),
        one("ring_gradient", "send_recv", 2 * key_value, CpMethod.RING, True, hops),
        one("kv_gather", "all_gather", key_value * cp, CpMethod.ALLGATHER, False),
        one("kv_gather_again", "all_gather", key_value * cp, CpMethod.ALLGATHER, True),
        one("kv_scatter_gradient", "reduce_scatter", key_value * cp, CpMethod.ALLGATHER, True),
        one("heads", "all_to_all", moved, CpMethod.A2A, False),
        one("heads_gradient", "all_to_all", moved, CpMethod.A2A, True),
    ]


def _scaled_rope(shard: Shard) -> bool:
    """The rotary embedding has a factor, and is several kernels then."""
    return shard.model.scaled_rope and "scaled_rope" in shard.trainer.kernels.unfused


def _qkv_copies(shard: Shard) -> list[Operator]:
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


def _attention_bias(shard: Shard) -> list[Operator]:
    """Bias of the output projection, added by a kernel of its own where biases of experts exclude the fused one.

    Output read and written, the bias broadcast; backward its gradient is a sum over tokens.  [TransformerConfig:
    bias_dropout_fusion is refused with biases in grouped experts]
    """
    if not (shard.model.linear_bias and shard.model.expert_bias) or "expert_bias" not in shard.trainer.kernels.unfused:
        return []
    values = shard.tokens_split * shard.model.hidden_size * shard.element
    return [MemoryBound(name="attention_bias", kind="elementwise", module=NEVER, forward=2 * STRIDED_SLOWDOWN * values,
                        backward=values, launches=(1.0, 2.0))]  # fmt: skip


def _ring_merge(shard: Shard) -> list[Operator]:
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


def _attention_casts(shard: Shard) -> list[Operator]:
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
