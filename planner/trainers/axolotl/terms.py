"""What axolotl alone does: context parallelism of ring-flash-attn, which cuts a sequence in contiguous pieces, one a rank."""

from dataclasses import dataclass, replace

import numpy as np

from planner.cost.layer.operators import Attention, Collective, Number, Operator, Shard
from planner.cost.own_terms import OwnTerms
from planner.layout import Module

HEAD_BUFFERS = 3.0
"""Buffers for keys and values of the whole sequence, one head at a time: the current, the next, their gradients."""


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """llama3_flash_attn_varlen_func with heads_k_stride 1, axolotl's choice for packed samples.

    [axolotl 0.19.0, utils/ctx_managers/sequence_parallel.py: chunk(...)[local_rank]; ring_flash_attn/llama3_flash_attn_varlen.py]
    """

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """The last rank of c attends (2c - 1) / c times the mean and the others wait for it; heads of keys are gathered one by
        one, the next while the current is worked on, and their gradients are scattered one by one."""
        if part != "layer" or np.all(shard.cp == 1):
            return operators, collectives
        documents = shard.workload.sequence_length / (shard.workload.document_length or shard.workload.sequence_length)
        pieces = np.maximum(shard.cp / documents, 1.0)  # of one document; none of it is attended to from outside
        heads = np.where(shard.cp > 1, shard.kv_heads, 1.0)
        found: list[Operator] = []
        for one in operators:
            if isinstance(one, Attention) and one.name == "core_attention":
                forward, backward = one.launches
                one = replace(one, seq_kv=one.seq_kv * (2.0 - 1.0 / pieces), launches=(forward * heads, backward * heads))
            found.append(one)
        return found, [_by_head(one, heads) for one in collectives]

    def attention_gradient_bytes(self, shard: Shard) -> Number:
        """Buffers of one head: the whole sequence's keys and values."""
        model = shard.model
        head = (model.key_size + model.value_size) / model.num_kv_heads * shard.element
        return np.where(shard.cp > 1, HEAD_BUFFERS * shard.tokens * shard.cp * head, 0.0)


def _by_head(one: Collective, heads: Number) -> Collective:
    """Keys and values: a call for each of them and each head; those that are gathered hide behind the attention of other heads."""
    if one.group != "cp" or one.op not in ("all_gather", "reduce_scatter"):
        return one
    calls = 2.0 * np.asarray(heads, dtype=float)
    smaller = replace(one, size=one.size / calls, count=one.count * calls)
    if one.op == "reduce_scatter":
        return smaller
    behind = "core_attention.dgrad" if one.backward else "core_attention.forward"
    return replace(smaller, overlap="cp", overlaps_with=behind, module=Module.CORE_ATTENTION)
