"""What Aleph Alpha's code of 2023 alone does: whole tensors between stages, gate and up apart, gathered logits."""

import dataclasses
from dataclasses import dataclass

from planner.cost.layer.operators import Collective, MemoryBound, Number, Operator, Shard
from planner.cost.layer.parts import input_gradient_sum
from planner.cost.memory.states import stage_output_bytes
from planner.cost.own_terms import OwnTerms
from planner.cost.pipeline.partition import column
from planner.layout import Layout
from planner.workload import Workload

GATHERED_LOGITS = 6.0
"""Bytes per logit that gathering adds: the shards received, their join, the gradient cast and cut, in half precision each.

They are blocks of sizes that nothing else of the loss has, so the allocator does not reuse one for the other: layouts of
runs/oss-hagemann2023-* that differ in tp alone run out of memory 5 to 8 bytes per logit apart.
"""


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Aleph-Alpha/scaling 737f855."""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Gate and up projection are two column-parallel layers: their input gradients are added, and without sequence parallelism
        each is reduced (core/nn/mlp.py). Every tensor-parallel rank gathers the logits of the whole vocabulary and computes the
        same loss (parallel_output false)."""
        if part == "layer" and shard.model.gated:
            added = input_gradient_sum(shard, "mlp", 1.0, shard.tokens, reader="norm")
            after = next((number for number, one in enumerate(operators, 1) if one.name == "mlp_up"), len(operators))
            operators = [*operators[:after], *added, *operators[after:]]
            collectives = [
                dataclasses.replace(one, count=2.0) if one.name == "mlp_reduce_gradient" else one for one in collectives
            ]
        if part == "head":
            operators = [_whole_loss(one, shard) if isinstance(one, MemoryBound) and one.name == "loss" else one
                         for one in operators]  # fmt: skip
            size = shard.tokens * float(shard.model.vocab_size) * shard.element
            collectives = [*collectives, Collective(name="head_logits", group="tp", op="all_gather", size=size, n=shard.tp,
                                                    stride=1.0, backward=False)]  # fmt: skip
        return operators, collectives

    def sends_whole_tensors(self) -> bool:
        """nn/parallel_module/communicator.py, send_data."""
        return True

    def stored_bytes(self, workload: Workload, layout: Layout) -> Number:
        """The pipeline engine keeps the output of a stage for each microbatch in flight, T_s h."""
        return stage_output_bytes(workload, layout) * (column(layout.pp) > 1)


def _whole_loss(loss: MemoryBound, shard: Shard) -> MemoryBound:
    """The loss of all V columns on every rank."""
    logits = shard.tokens * float(shard.model.vocab_size)
    return dataclasses.replace(loss, forward=loss.forward * shard.tp, backward=loss.backward * shard.tp,
                               kept=loss.kept * shard.tp + logits * GATHERED_LOGITS * (shard.tp > 1))  # fmt: skip
