"""Bytes that a change of layout moves: what each rank reads from a checkpoint, and what nodes send each other when state moves
while the job's processes hold it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats, NDArray
from planner.elastic.shards import Item, Places, Saved, items_of, nested
from planner.record import record

MOST_RANKS = 2**12
"""Ranks of one of the layouts whose exchange is computed: time grows with their square."""


@record
class Move:
    """What a change of layout moves, bytes."""

    own: Floats
    """That each new rank holds."""
    read: Floats
    """That each new rank reads from the old layout's checkpoint where stored shards are read whole."""
    shared: Floats
    """That each new rank reads where ranks with equal boxes read a part each and exchange the rest."""
    received: Floats
    """That each new node gets from other nodes."""
    sent: Floats
    """That each old node sends to other nodes."""
    fetched: Floats
    """That each new node puts into place: from other nodes, and from its own ranks where boxes differ."""
    cut: Floats
    """That each old node cuts out of larger boxes before it hands them on."""
    complete: bool
    """The ranks that are left hold everything."""
    exchanged: bool = True
    """The exchange was computed; else what nodes send is zero here."""

    @property
    def amplification(self) -> float:
        """Bytes read over bytes needed."""
        return float(self.read.sum() / self.own.sum())

    def to_dict(self) -> dict[str, float | bool | list[int]]:
        """Plain data: totals and the busiest; where the exchange was computed, every rank and node."""
        each = {
            "read_by_rank_bytes": self.read, "held_by_rank_bytes": self.own, "received_by_node_bytes": self.received,
            "sent_by_node_bytes": self.sent,
        }  # fmt: skip
        return {
            "needed_bytes": float(self.own.sum()), "read_bytes": float(self.read.sum()), "amplification": self.amplification,
            "most_read_by_a_rank_bytes": float(self.read.max()), "most_held_by_a_rank_bytes": float(self.own.max()),
            "live": self.complete, "exchanged": self.exchanged, "exchanged_bytes": float(self.received.sum()),
            "most_received_by_a_node_bytes": float(self.received.max()), "most_sent_by_a_node_bytes": float(self.sent.max()),
            **{name: [round(one) for one in sizes.tolist()] for name, sizes in each.items() if self.exchanged},
        }  # fmt: skip


def move_of(
    saved: Saved, old: Places, new: Places, node_ranks: int, left: Sequence[int] | None = None, *, exchange: bool = True
) -> Move:
    """What a change of layout moves. Ranks keep their numbers and nodes; ``left``: old ranks that are still there, default all.
    Of copies the nearest is taken, else those of all nodes in equal parts. Without ``exchange``, and beyond MOST_RANKS, only what
    ranks hold and read."""
    exchange = exchange and max(old.ranks, new.ranks) <= MOST_RANKS
    alive = np.arange(old.ranks) if left is None else np.asarray(sorted(left), dtype=np.int64)
    nodes = -(-max(old.ranks, new.ranks) // node_ranks)
    received, sent, fetched, cut = (np.zeros(nodes) for _ in range(4))
    complete = True
    items = items_of(saved, new, old)
    for item in items if exchange else ():
        complete &= _exchange(item, alive, node_ranks, (received, sent, fetched, cut))
    own = np.asarray(sum(one.own() for one in items))
    read = np.asarray(sum(one.read() for one in items))
    shared = np.asarray(sum(one.read() / one.copies for one in items))
    return Move(
        own=own, read=read, shared=shared, received=received, sent=sent, fetched=fetched, cut=cut, complete=complete,
        exchanged=exchange,
    )  # fmt: skip


def _exchange(item: Item, alive: NDArray[np.int64], node_ranks: int, sums: tuple[Floats, Floats, Floats, Floats]) -> bool:
    """Add what one item moves to the sums by node; whether the ranks that are left hold all of it."""
    received, sent, fetched, cut = sums
    boxes, first = np.unique(item.boxes()[alive], return_index=True)
    if not len(boxes):
        return False
    holders = alive[first]
    number = {int(box): i for i, box in enumerate(boxes)}
    held_by = np.zeros((len(boxes), len(received)), dtype=bool)
    held_by[[number[int(box)] for box in item.boxes()[alive]], alive // node_ranks] = True
    new_box = item.new.stage.astype(np.int64)
    for index, n in item.codes[0]:
        new_box = new_box * n + index
    own, complete = item.own(), True
    asked, asked_cut = np.zeros(len(boxes)), np.zeros(len(boxes))
    for node in range(-(-item.new.ranks // node_ranks)):
        ranks = np.arange(node * node_ranks, min((node + 1) * node_ranks, item.new.ranks))
        ranks = ranks[np.unique(new_box[ranks], return_index=True)[1]]  # copies inside a node come over its own links
        parts = item.parts(ranks, holders)
        met = item.layers(ranks, holders) * parts
        complete &= bool(np.all(met.sum(axis=1) >= own[ranks] * (1.0 - 1e-9)))
        here = held_by[:, node]
        by_box, smaller = met.sum(axis=0), (met * (parts < item.old_part * (1.0 - 1e-9))).sum(axis=0)
        received[node] += by_box[~here].sum()
        fetched[node] += by_box[~here].sum() + smaller[here].sum()
        cut[node] += smaller[here].sum()
        asked += by_box * ~here
        asked_cut += smaller * ~here
    copies = held_by.sum(axis=1)
    sent += (asked / copies) @ held_by
    cut += (asked_cut / copies) @ held_by
    return complete


DEGREES = ("tp", "pp", "dp", "ep", "cp")


def nesting(old: Places, new: Places) -> dict[str, bool]:
    """By degree that differs: whether a new shard is made of whole old ones, or lies inside one. Stages move whole layers, and cut
    nothing; dp and cp cut as many shards as share the states."""

    def parts(places: Places, name: str) -> int:
        if name == "pp":
            return 1
        return max(dense for dense, _ in places.shards.values()) if name in ("dp", "cp") else int(getattr(places.layout, name))

    changed = (name for name in DEGREES if int(getattr(new.layout, name)) != int(getattr(old.layout, name)))
    return {name: nested(parts(new, name), parts(old, name)) for name in changed}
