"""Links between kinds and sites: how fast one transfer is, and collectives of a group whose members are of several kinds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.cluster_file import Link
from planner.curves import bus_factor
from planner.record import record

ROUNDS = {"all_reduce": 2.0}
"""How often a ring passes every member; the others once."""


@dataclass(frozen=True)
class Member:
    """Members of one kind in a data parallel group."""

    cluster: Cluster
    inside: float
    """Of them in one scale-up domain."""
    share: float
    """Bytes that each has of the same parameters, over those of the kind that is priced: its tp over theirs."""


@dataclass(frozen=True)
class Crossing:
    """A link that the rings of a data parallel group cross."""

    link: Link
    sharing: float | Floats
    """Rings of equal size that cross it at the same time (of a node's card, where the link is per node)."""
    nodes: int = 1
    """Nodes of each end that send over it at the same time, each over its own connections; 1 where the link is per node."""


@record
class Spanned(Cluster):
    """GPUs of one kind whose data parallel groups reach over nodes of other kinds: a ring is as fast as its slowest hop.

    Of each kind the hop is that of its own network, as a group of its own of the same size has it. Different tp in two replicas:
    each moves the same parameters in as many pieces as its tp, all at once, so that its own share of bytes passes its own card.
    Over a link every ring carries ``bus_factor S``; n chunks are on their way at the same time, so that one chunk's way round
    the ring pays the latency, once for each of its two crossings.
    """

    members: tuple[Member, ...]
    crossings: tuple[Crossing, ...] = ()
    near: int = 0
    """Groups whose neighbours are closer than so many ranks stay inside the kind (reduction in two levels)."""

    def key(self) -> tuple[object, ...]:
        """Equal for equal links."""
        members = tuple((id(one.cluster), one.inside, one.share) for one in self.members)
        return self.near, members, tuple((one.link, one.nodes, np.asarray(one.sharing).tobytes()) for one in self.crossings)

    def of_rows(self, rows: NDArray[np.intp]) -> Cluster:
        """The same for some rows of what is priced."""
        taken = [replace(one, sharing=one.sharing[rows]) if isinstance(one.sharing, np.ndarray) else one for one in self.crossings]
        return replace(self, crossings=tuple(taken))

    def collective_time(self, op: str, size: object, n: object, stride: object) -> Floats:
        """Seconds of one collective of ``n`` replicas; zero for n = 1."""
        if self.near and float(np.max(np.asarray(stride, dtype=float))) < self.near:
            return super().collective_time(op, size, n, stride)
        size, n = np.asarray(size, dtype=float), np.asarray(n, dtype=float)
        slowest = np.zeros(np.broadcast_shapes(size.shape, n.shape))
        for one in self.members:
            inside = np.clip(one.inside, 1.0, np.maximum(n - 1.0, 1.0))
            slowest = np.maximum(slowest, one.cluster.hardware.scale_out_time(op, size * one.share, n, inside))
        for crossing in self.crossings:
            link = crossing.link
            carried = size * bus_factor(op, np.maximum(n, 2.0)) * crossing.sharing
            over = carried / link.speed(crossing.nodes) + 2.0 * ROUNDS.get(op, 1.0) * link.latency
            slowest = np.maximum(slowest, over)
        return np.where(n > 1, slowest, 0.0)
