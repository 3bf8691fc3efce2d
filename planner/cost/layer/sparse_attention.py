"""DeepSeek sparse attention (DSA): an indexer scores all keys for every query, attention reads the best of them.

What is priced is the sparse stage of training: attention on chosen keys with compressed keys and values (absorbed MLA), the
indexer trained with it by a loss of its own on the chosen keys, its inputs detached. Left out: the dense warm-up, 1,000 steps
in which the indexer alone is trained.  [DeepSeek-V3.2, section 2; megatron/core/transformer/experimental_attention_variant,
main of 2026-08; dsa_indexer_use_sparse_loss as in Megatron-Bridge, glm5_bridge.py]
"""

import numpy as np

from planner.cost.layer.operators import (
    NEVER,
    REPEATED,
    Collective,
    GatheredRows,
    Gemm,
    MemoryBound,
    Number,
    Operator,
    Shard,
)
from planner.layout import Module

CORE_EFFICIENCY = 0.43
"""Part of the bf16 peak that attention on chosen keys reaches where its FLOP bound it.

Modules of vLLM 0.24 on H100 and H200, DeepSeek-V3.2 with 128 heads, 4k to 32k tokens, projections and indexer taken off: 0.39 to
0.45.  [aiconfigurator @095f58a, sparse attention tables]
"""
INDEX_EFFICIENCY = 0.6
"""Part of the peak that the scores of the indexer reach, with the choice of the best keys: 0.5 to 0.9 in the same tables (fp8)."""
INDEX_BYTES = 4.0
"""Bytes of a choice: a 32 bit index."""


def chosen_keys(shard: Shard) -> float:
    """Mean keys of a query, of L tokens in a document: (K^2 / 2 + (L - K) K) / L, or L / 2 where L is at most K."""
    length = float(shard.workload.document_length or shard.workload.sequence_length)
    best = min(float(shard.model.index_top_k), length)
    return (0.5 * best * best + (length - best) * best) / length


def indexer(shard: Shard) -> list[Operator]:
    """Projections, scores of all pairs, choice, and the gradient of its loss; whole on every tensor rank.

    Scores: 2 a_i d_i FLOP per pair, half of them causal, written and read once in fp32. The loss compares with attention's own
    weights: its scores once more, 2 a (r_kv + d_rope) per chosen key and head of the rank; then 4 a_i d_i for both gradients.
    Layers that take the choice of another one have none of it: their mean.  [dsa.py: linear_wq_b, linear_wk and
    linear_weights_proj are duplicated; compute_dsa_indexer_loss]
    """
    model, e, tokens, tp = shard.model, shard.element, shard.tokens, shard.tp
    share = model.index_layers / model.num_layers
    width = float(model.index_heads * model.index_head_dim)
    small = float(model.index_head_dim + model.index_heads)
    trained = shard.workload.lora_rank == 0
    length = float(shard.workload.document_length or shard.workload.sequence_length)
    pairs = tokens * 0.5 * length * share
    chosen = tokens * chosen_keys(shard) * share
    compressed = float(model.kv_lora_rank + model.qk_rope_head_dim)
    kept = tokens * share * (width + small) * e
    module = Module.CORE_ATTENTION | REPEATED

    def projection(name: str, columns: float, depth: float) -> Gemm:
        return Gemm(name=name, m=tokens * share, n=columns, k=depth, trained=trained, low_precision=False, module=module)

    target, gradients = 2.0 * chosen * model.num_heads / tp * compressed, 4.0 * chosen * width
    return [
        projection("index_queries", width, float(model.q_lora_rank)),
        projection("index_keys", small, float(model.hidden_size)),
        GatheredRows(name="index_scores", module=module, efficiency=INDEX_EFFICIENCY, model_flop=2.0 * pairs * width,
                 flop=(2.0 * pairs * width, (target + gradients) * trained), gathered=(np.zeros_like(tp), np.zeros_like(tp)),
                 saved=kept, launches=(8.0, 8.0)),
        MemoryBound(name="index_choice", module=module, kind="elementwise", forward=8.0 * pairs, backward=0.0,
                    launches=(2.0, 0.0)),
    ]  # fmt: skip


def sparse_core(shard: Shard) -> list[Operator]:
    """Softmax over the chosen keys, on compressed keys and values: 2 a/t (2 r_kv + d_rope) FLOP per query and key.

    Keys are gathered token by token, r_kv + d_rope values each, once per 64 or 128 heads: below that many heads of a
    rank tensor parallelism gains nothing. Backward: the kernel computes its output again, then 2.5 times the FLOP, and adds
    gradients of keys in fp32, twice the bytes. The backward pass was not measured. Kept: queries and outputs of compressed width,
    the indices, the output.  [FlashMLA, sparse prefill; Megatron, ops/sparse_mla.py]
    """
    model, e, tokens = shard.model, shard.element, shard.tokens
    heads = model.num_heads / shard.tp
    latent, rope = float(model.kv_lora_rank), float(model.qk_rope_head_dim)
    chosen = tokens * chosen_keys(shard)
    flop = 2.0 * chosen * heads * (2.0 * latent + rope)
    read = chosen * (latent + rope) * 2.0
    output = tokens * model.attention_output_size / shard.tp * e
    kept = output + tokens * heads * (latent * e + 4.0) + tokens * model.index_top_k * INDEX_BYTES
    return [
        GatheredRows(name="core_attention", module=Module.CORE_ATTENTION, heads=heads, efficiency=CORE_EFFICIENCY,
                 flop=(flop, 3.5 * flop), gathered=(read, 4.0 * read), kept=kept, launches=(2.0, 6.0),
                 model_flop=2.0 * chosen * heads * (model.head_dim + model.value_head_size)),
    ]  # fmt: skip


def absorbed_queries(shard: Shard) -> Number:
    """Bytes of queries in the space of compressed keys, and of those keys and values: what attention on chosen keys reads."""
    model = shard.model
    width = float(model.kv_lora_rank + model.qk_rope_head_dim)
    return shard.tokens * (model.num_heads / shard.tp + 1.0) * width * shard.element


def sparse_exchange(shard: Shard) -> list[Collective]:
    """What indexer and attention need of other ranks.

    tp: the inputs of the indexer gathered, h + r_q values per token; the weights of the chosen keys summed over the heads of all
    ranks, in fp32. cp: compressed keys with values and the indexer's keys gathered, their gradients scattered.
    [dsa.py: forward_before_topk, compute_dsa_indexer_loss, DSAttention.forward]
    """
    model, e, tokens, tp, cp = shard.model, shard.element, shard.tokens, shard.tp, shard.cp
    share = model.index_layers / model.num_layers
    keys = tokens * cp * (model.kv_lora_rank + model.qk_rope_head_dim + share * model.index_head_dim) * e
    inputs = tokens * (model.hidden_size + model.q_lora_rank) * e * share

    def one(name: str, group: str, op: str, size: Number, n: Number, stride: Number, backward: bool) -> Collective:
        return Collective(name=name, group=group, op=op, size=size, n=n, stride=stride, backward=backward, module=NEVER)

    target = tokens * chosen_keys(shard) * 4.0 * share * (shard.workload.lora_rank == 0)
    return [
        one("index_gather", "tp", "all_gather", inputs, shard.split, np.ones_like(tp), False),
        one("index_target", "tp", "all_reduce", target, tp, np.ones_like(tp), True),
        one("kv_gather", "cp", "all_gather", keys, cp, tp, False),
        one("kv_scatter_gradient", "cp", "reduce_scatter", keys, cp, tp, True),
    ]
