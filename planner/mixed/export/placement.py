"""Which GPUs of which node hold a stage: the nodes of a kind are filled in the order of the cluster file.

Ranks are numbered node by node, as torchrun numbers them, and count GPUs in use only: a node may start fewer processes than it has
GPUs, and nodes without any are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster_file import ClusterFile
from planner.errors import PlannerError
from planner.mixed.mixed_layout import MixedLayout


@dataclass(frozen=True, kw_only=True)
class UsedNode:
    """A node with processes of the job."""

    name: str
    """As the cluster file numbers it: node-0, node-1, ..."""
    kind: str
    gpus: int
    """Processes on it."""
    first_rank: int
    """Rank of its first process."""


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """One stage of one replica."""

    pipeline: int
    """Place of its pipeline in the layout."""
    replica: int
    """Of all replicas of the job."""
    stage: int
    ranks: tuple[int, ...]
    """Tensor parallel ranks fastest, then context parallel ones."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lies."""

    nodes: tuple[UsedNode, ...]
    """In rank order."""
    stages: tuple[StageRanks, ...]
    """By pipeline, then by stage, then by replica: replicas of a stage are neighbours."""

    @property
    def world(self) -> int:
        """Processes."""
        return sum(one.gpus for one in self.nodes)

    def of_replica(self, replica: int) -> tuple[StageRanks, ...]:
        """The stages of a replica, first to last."""
        return tuple(sorted((one for one in self.stages if one.replica == replica), key=lambda one: one.stage))


def place(layout: MixedLayout, cluster: ClusterFile, *, apart: bool = False) -> Placement:
    """Where every stage lies. A group of a stage stays inside a node where the node has room for one; a larger one takes whole nodes.

    ``apart``: a kind that returns after another one starts on a new node. Raises PlannerError where a kind has fewer GPUs than that
    takes.
    """
    free = {
        one.kind: [[name, one.kind, one.gpus_per_node] for name in cluster.names_of(one.kind)] for one in cluster.nodes
    }
    taken = list[tuple[int, int, int, list[tuple[str, int]]]]()
    first, before = 0, ""
    for number, pipeline in enumerate(layout.pipelines):
        for position, stage in enumerate(pipeline.stages):
            if apart and stage.kind != before:
                each = cluster.node_kind(stage.kind).gpus_per_node
                free[stage.kind] = [node for node in free[stage.kind] if node[2] == each]
            before = stage.kind
            for replica in range(first, first + pipeline.count):
                taken.append((number, replica, position, _take(free, stage.kind, stage.tp * layout.cp, layout, cluster)))
        first += pipeline.count
    used: dict[str, int] = {}
    for *_, slots in taken:
        for name, slot in slots:
            used[name] = max(used.get(name, 0), slot + 1)
    nodes, rank, starts = [], 0, {}
    for kind in cluster.nodes:
        for name in cluster.names_of(kind.kind):
            if name in used:
                starts[name] = rank
                nodes.append(UsedNode(name=name, kind=kind.kind, gpus=used[name], first_rank=rank))
                rank += used[name]
    return Placement(
        nodes=tuple(nodes),
        stages=tuple(
            StageRanks(
                pipeline=number, replica=replica, stage=position, ranks=tuple(starts[name] + slot for name, slot in slots)
            )  # fmt: skip
            for number, replica, position, slots in taken
        ),
    )


def _take(
    free: dict[str, list[list]], kind: str, size: int, layout: MixedLayout, cluster: ClusterFile
) -> list[tuple[str, int]]:
    """The next GPUs of a kind, as node and number on it."""
    each = cluster.node_kind(kind).gpus_per_node
    whole = max(-(-size // each), 1)
    for start in range(len(free[kind])):
        some = free[kind][start : start + whole]
        if len(some) < whole or (any(left != each for *_, left in some) and whole > 1) or some[0][2] < min(size, each):
            continue
        slots = []
        for node in some:
            count = min(size - len(slots), node[2])
            slots += [(node[0], each - node[2] + number) for number in range(count)]
            node[2] -= count
        return slots
    has = cluster.node_kind(kind).num_gpus
    raise PlannerError(
        f"the plan takes {layout.gpus_of(kind)} GPUs of {kind} in groups of {size}, for which its {has} GPUs, {each} on a node, "
        "have no room; choose a tensor parallel degree that divides the GPUs of a node"
    )
