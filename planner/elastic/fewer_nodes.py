"""The best plan of a job on other numbers of nodes, with the same global batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.defaults import ResolvedJob
from planner.elastic.best_layout import Found, best_layout


@dataclass(frozen=True)
class Fewer:
    """Plans by number of nodes, each searched once."""

    resolved: ResolvedJob
    node_ranks: int
    nodes: int
    """Nodes of the plan."""
    step_time: float
    """Seconds of its step."""
    replicas: int
    """Data parallel replicas of it."""
    known: dict[int, Found | None] = field(default_factory=dict)

    def on(self, nodes: int) -> Found | None:
        """The best layout on at most so many nodes: some may stay idle where no layout shares out the batch over all; None where
        nothing fits."""
        if nodes <= 0:
            return None
        if nodes not in self.known:
            least = max(nodes // 2, 1) * self.node_ranks
            self.known[nodes] = best_layout(self.resolved, nodes * self.node_ranks, least=least)
        return self.known[nodes]

    def speed(self, missing: int) -> float:
        """Rate with some nodes missing over that of all: of the best plan with the same batch (beyond the third searched for the
        next power of two of missing nodes), or of the plan without the replicas that lost a node, whose batch is smaller."""
        ranks = self.nodes * self.node_ranks // self.replicas
        left = max(self.replicas - -(-missing * self.node_ranks // ranks), 0) / self.replicas
        if missing > 3:
            missing = min(1 << (missing - 1).bit_length(), max(self.nodes - 1, missing))
        found = self.on(self.nodes - missing)
        return left if found is None else max(min(self.step_time / found.step_time, 1.0), left)
