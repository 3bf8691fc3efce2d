"""Which GPUs of which node hold a stage: the nodes of a kind are filled in the order of the cluster file.

Ranks are numbered node by node, as torchrun numbers them, and count GPUs in use only: a node may start fewer processes than it has
GPUs, and nodes without any are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster_file import ClusterFile
from planner.errors import PlannerError
from planner.mixed.mixed_layout import MixedLayout, Stage
from planner.record import record


@record
class UsedNode:
    """A node with processes of the job."""

    name: str
    """As the cluster file numbers it: node-0, node-1, ..."""
    kind: str
    gpus: int
    """Processes on it."""
    first_rank: int
    """Rank of its first process."""


@record
class StageRanks:
    """One stage of one replica."""

    pipeline: int
    """Place of its pipeline in the layout."""
    replica: int
    """Of all replicas of the job."""
    stage: int
    ranks: tuple[int, ...]
    """Tensor parallel ranks fastest, then context parallel ones."""


@record
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
    """Where every stage lies. A group of a stage stays inside a node where the node has room for one; a larger one takes whole
    nodes.

    ``apart``: a kind that returns after another one starts on a new node. Raises PlannerError where a kind has fewer GPUs than that
    takes.
    """
    each = {one.kind: one.gpus_per_node for one in cluster.nodes}
    rooms = {kind: [_Room(name, gpus) for name in cluster.names_of(kind)] for kind, gpus in each.items()}
    taken = list[tuple[int, int, int, list[tuple[str, int]]]]()
    first, before = 0, ""
    for number, pipeline in enumerate(layout.pipelines):
        for position, stage in enumerate(pipeline.stages):
            if apart and stage.kind != before:
                rooms[stage.kind] = [one for one in rooms[stage.kind] if one.free == each[stage.kind]]
            before = stage.kind
            for replica in range(first, first + pipeline.count):
                slots = _take(rooms[stage.kind], each[stage.kind], stage.tp * layout.cp)
                if slots is None:
                    raise PlannerError(_no_room(stage, layout, cluster))
                taken.append((number, replica, position, slots))
        first += pipeline.count
    used: dict[str, int] = {}
    for *_, slots in taken:
        for name, slot in slots:
            used[name] = max(used.get(name, 0), slot + 1)
    nodes, rank, starts = list[UsedNode](), 0, dict[str, int]()
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
                pipeline=number,
                replica=replica,
                stage=position,
                ranks=tuple(starts[name] + slot for name, slot in slots),
            )  # fmt: skip
            for number, replica, position, slots in taken
        ),
    )


@dataclass
class _Room:
    """A node that is being filled."""

    name: str
    free: int
    """GPUs."""


def _take(rooms: list[_Room], each: int, size: int) -> list[tuple[str, int]] | None:
    """The next GPUs of a kind with ``each`` on a node, as node and number on it; None where there is no room."""
    while rooms and not rooms[0].free:
        rooms.pop(0)
    whole = max(-(-size // each), 1)
    for start in range(len(rooms) - whole + 1):
        some = rooms[start : start + whole]
        if (whole > 1 and any(one.free != each for one in some)) or some[0].free < min(size, each):
            continue
        slots = list[tuple[str, int]]()
        for one in some:
            count = min(size - len(slots), one.free)
            slots += [(one.name, each - one.free + number) for number in range(count)]
            one.free -= count
        return slots
    return None


def _no_room(stage: Stage, layout: MixedLayout, cluster: ClusterFile) -> str:
    kind, size = cluster.node_kind(stage.kind), stage.tp * layout.cp
    return (
        f"the plan takes {layout.gpus_of(kind.kind)} GPUs of {kind.kind} in groups of {size}, for which its {kind.num_gpus} GPUs, "
        f"{kind.gpus_per_node} on a node, have no room; choose a tensor parallel degree that divides the GPUs of a node"
    )
