"""What torchtitan alone does: blocks of keys merged by plain kernels, and key-value heads repeated in the models of 2024."""

from dataclasses import dataclass

import numpy as np

from planner.cost.layer.attention_layer import context_exchange
from planner.cost.layer.operators import Collective, MemoryBound, Number, Operator, Shard
from planner.cost.own_terms import OwnTerms
from planner.layout import CpMethod, Layout, Module, Schedule

MERGE_BYTES = (38.0, 30.0)
"""Bytes per element of the attention output and block of keys to merge blocks in plain fp32 operations, forward and backward.

Forward: cast 2 + 4, difference 8 + 4, times a sigmoid 4 + 4, difference 8 + 4. Backward: the gradients of queries, keys and
values are each added to an fp32 sum, 2 + 4 + 4. Balanced halves of the sequence make it three quarters of the rows.
[torch, _SDPAMerger and _templated_ring_attention_backward]
"""


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """torch.distributed.tensor.experimental's context parallelism."""

    repeats_key_values: bool = False
    """Key and value heads are repeated for all query heads before attention: context parallelism exchanges so many."""
    gathered_virtual_stages: int = 0
    """Virtual stages whose gathered weights a schedule holds at most: it drops and gathers the others again; 0 = all."""

    def most_gathered(self) -> int:
        """As its schedules say."""
        return self.gathered_virtual_stages

    def gathered_again(self, layout: Layout) -> Number:
        """(U - v) / v, as each virtual stage that is gathered is a v-th; of v virtual stages k are held, R = m / p rounds,

            U = 2 R (v - k) + 2 k + 1    R > 1: each goes forward and back through all v, and finds k there at both turns
            U = 2 v - k                  R = 1: all go forward, then all back

        U is that of every rank but the last, which has 2 less.  [torch 2.13, pipelining/schedules.py, _add_unshard_reshard]
        """
        k, v = self.gathered_virtual_stages, np.asarray(layout.vpp, dtype=float)
        rounds = np.maximum(np.asarray(layout.num_microbatches) // np.asarray(layout.pp), 1)
        gathers = np.where(rounds > 1, 2.0 * rounds * (v - k) + 2.0 * k + 1.0, 2.0 * v - k)
        drops = (np.asarray(layout.schedule) == Schedule.INTERLEAVED) & (v > k) & (k > 0)
        return np.where(drops, gathers / v - 1.0, 0.0)

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Context parallelism works through blocks of keys whose outputs are merged by plain fp32 operations."""
        if part != "layer":
            return operators, collectives
        blocks = np.where(np.asarray(shard.layout.cp_method) == CpMethod.ALLGATHER, shard.cp - 1.0, 0.0)
        merged = 0.75 * (shard.tokens * shard.model.attention_output_size / shard.tp) * blocks
        if shard.trainer.kernels.attention == "flash" and np.any(merged > 0):
            merge = MemoryBound(name="attention_merge", kind="elementwise", module=Module.CORE_ATTENTION,
                                forward=MERGE_BYTES[0] * merged, backward=MERGE_BYTES[1] * merged, launches=(0.0, 0.0))  # fmt: skip
            after = next(number for number, one in enumerate(operators, 1) if one.name == "core_attention")
            operators = [*operators[:after], merge, *operators[after:]]
        if self.repeats_key_values:
            exchange = iter(context_exchange(shard, every_head=True))
            collectives = [next(exchange) if one.group == "cp" else one for one in collectives]
        return operators, collectives

    def attention_gradient_bytes(self, shard: Shard) -> Number:
        """T ((8 + e) Q + e O + (12 + (c + 2) e) KV): values Q of queries, O of outputs, KV of keys and values per token; c ranks.

        Gradients of queries: their fp32 sum 4, those of a block e, and the fp32 sum that its kernel needs, or the copy in which a
        half is replaced, 4; of the output, e. Gradients of keys and values: those of a block e; their fp32 sums are received 4,
        joined 4, and sent while the next ones arrive 4. Keys and values of all ranks c e, and those of a block joined once more, e.
        [torch 2.13, _templated_ring_attention_backward, _AllGatherRotater, _AllToAllRotater]
        """
        model, e, c = shard.model, shard.element, shard.cp
        keys = shard.kv_heads * (model.key_size + model.value_size) / model.num_kv_heads
        queries = (8.0 + e) * model.query_size + e * model.attention_output_size
        total = shard.tokens * (queries / shard.tp + (12.0 + (c + 2.0) * e) * keys)
        return np.where((np.asarray(shard.layout.cp_method) == CpMethod.ALLGATHER) & (c > 1), total, 0.0)
