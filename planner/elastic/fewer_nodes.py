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
        """Rate with some nodes missing over that of all; beyond the third searched at powers of two, like templates."""
        nodes = self.nodes - missing
        if missing > 3:
            while nodes & (nodes - 1) and nodes not in self.known:
                nodes &= nodes - 1
        found = self.on(nodes)
        return 0.0 if found is None else min(self.step_time / found.step_time, 1.0)
