"""What NeMo AutoModel alone does: adapters scaled on their narrow side, and a fake gate in its benchmarks of experts."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from planner.cost.layer.operators import Collective, Operator, Shard
from planner.cost.layer.parts import scale_adapters
from planner.cost.own_terms import OwnTerms
from planner.schema import one_of


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Layers with adapters, and layers with experts."""

    adapter_scale_bytes: float = 0.0
    """Bytes moved each way per output of a low-rank adapter to scale it, and for dropout where it is used; 0 where its narrow
    side is scaled."""
    expert_routing: Annotated[str, one_of("random", "neighbours")] = "random"
    """'random' experts for each token, or 'neighbours': token i takes experts i K onwards (a benchmark's fake gate)."""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Adapters with their own scaling; copies of a token to neighbouring experts."""
        if self.expert_routing == "neighbours":
            experts = float(shard.model.num_experts)
            collectives = [dataclasses.replace(one, neighbours=experts) if one.copies else one for one in collectives]
        return scale_adapters(operators, self.adapter_scale_bytes, shard), collectives
