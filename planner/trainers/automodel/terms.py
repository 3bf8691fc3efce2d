"""What NeMo AutoModel alone does: adapters scaled on their narrow side, a fake gate in its benchmarks of experts, and sparse
attention as a mask over all keys."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from planner.cost.layer.attention_layer import attention_block
from planner.cost.layer.operators import Collective, GatheredRows, MemoryBound, Operator, Shard
from planner.cost.layer.parts import scale_adapters
from planner.cost.own_terms import OwnTerms
from planner.schema import one_of, within


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Layers with adapters, and layers with experts."""

    adapter_scale_bytes: float = 0.0
    """Bytes moved each way per output of a low-rank adapter to scale it, and for dropout where it is used; 0 where its narrow
    side is scaled."""
    expert_routing: Annotated[str, one_of("random", "neighbours")] = "random"
    """'random' experts for each token, or 'neighbours': token i takes experts i K onwards (a benchmark's fake gate)."""

    local_batch: Annotated[int, within(0)] = 0
    """Microbatches of one call of the pipeline's schedule, local_batch_size over pp_microbatch_size; 0 = those of a step."""

    def flush(self) -> int:
        """Gradients are accumulated over calls of the schedule, after each of which the pipeline is empty."""
        return self.local_batch

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Adapters with their own scaling; copies of a token to neighbouring experts."""
        if part == "layer" and shard.model.is_sparse:
            operators, collectives = _masked(shard, operators, collectives)
        if self.expert_routing == "neighbours":
            experts = float(shard.model.num_experts)
            collectives = [dataclasses.replace(one, neighbours=experts) if one.copies else one for one in collectives]
        return scale_adapters(operators, self.adapter_scale_bytes, shard), collectives


SPARSE = ("index_scores", "index_choice", "core_attention", "qkv")
"""Operators of sparse attention that its kernels share with no mask."""
PLAIN_EFFICIENCY = 0.8
"""Part of the fp32 peak of ordinary cores in a large batched product (assumed: no kernel of it was measured)."""


def _masked(
    shard: Shard, operators: list[Operator], collectives: list[Collective]
) -> tuple[list[Operator], list[Collective]]:
    """Full attention with the unchosen keys masked out: the choice saves nothing, and its scores are plain kernels.

    S = b a_i s^2 scores: products in fp32 on ordinary cores, 2 S d_i FLOP, all pairs; written, ReLU, times the weights, summed over
    heads, 4 + 8 + 8 + 4 bytes each, two of them kept. The mask, b s^2 a values, is filled, chosen and copied for every head, then
    read by attention each way. No gradient reaches the indexer.  [components/models/deepseek_v32/layers.py]
    """
    model = shard.model
    dense = dataclasses.replace(model, index_top_k=0, index_heads=0, index_head_dim=0, index_layers=0)
    plain, _ = attention_block(dataclasses.replace(shard, workload=shard.workload.replace(model=dense)))
    own = {one.name: one for one in plain if one.name in SPARSE}
    share, length = model.index_layers / model.num_layers, float(shard.workload.sequence_length)
    scores = shard.batch * model.index_heads * length * length * share
    mask = length * length * model.num_heads * shard.element
    nothing = np.zeros_like(shard.tp)
    own["index_scores"] = GatheredRows(
        name="index_scores", efficiency=PLAIN_EFFICIENCY, dtype="fp32", gathered=(nothing, nothing), model_flop=nothing,
        flop=(2.0 * scores * model.index_head_dim, nothing), launches=(4.0, 0.0),
    )  # fmt: skip
    own["index_choice"] = MemoryBound(
        name="index_choice", kind="elementwise", forward=24.0 * scores + 3.0 * mask, backward=mask, saved=8.0 * scores + mask,
        launches=(8.0, 1.0),
    )  # fmt: skip
    left = [one for one in collectives if not one.name.startswith(("index_", "kv_"))]
    return [own.get(one.name, one) for one in operators], left
