"""What DistFlashAttn alone does: a ring of half the hops, and checkpoints that keep what attention put out."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.cost.layer.operators import Attention, Collective, Operator, Shard
from planner.cost.own_terms import OwnTerms


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Li 2023, arXiv 2310.03294, sections 3.1 to 3.3."""

    recompute_keeps_attention: bool = False
    """Full recompute keeps what attention put out: attention and its ring are not repeated."""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Keys and values travel only where causal attention needs them: c / 2 hops, idle ranks help out."""
        hops, kept = np.floor(shard.cp / 2.0), self.recompute_keeps_attention
        collectives = [
            dataclasses.replace(
                one, count=hops if one.name.startswith("ring") else one.count, kept_by_recompute=kept
            ) if one.group == "cp" else one
            for one in collectives
        ]  # fmt: skip
        operators = [
            dataclasses.replace(one, kept_by_recompute=kept) if isinstance(one, Attention) else one for one in operators
        ]
        return operators, collectives
