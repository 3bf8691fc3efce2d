"""Health of the machines of a job: every pair of GPUs and of nodes, every NIC, and the slow member by bisection (torch).

Pairs of a round send at the same time, one way and then the other; in n - 1 rounds everyone meets everyone. Between nodes every GPU
talks to the one with its own number on the other node, as rails are wired, so that one round gives the pair of nodes (the sum)
and each NIC. Members of the bisection are nodes, or the GPUs of a single one; what they run is an all-reduce of all their GPUs.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from planner import library, units
from planner.lab.launch.place import Place
from planner.lab.launch.state import Pace, State
from planner.lab.profile.all_ranks import measure_ranks, rank_point
from planner.lab.profile.bisection import NORMAL, Group, find_slow, matches
from planner.lab.profile.collective_timing import taker_of
from planner.lab.profile.health_words import sentences
from planner.lab.profile.node_state import conditions, unlike
from planner.lab.profile.points import Settings
from planner.lab.profile.rank_groups import Ranks, at_work, header

SIZES = {"cpu": 4 * units.MIB, "cuda": 256 * units.MIB}
"""Bytes of an all-reduce; a transfer between two has a quarter. Both are far above where latency counts."""
SAMPLES, INNER = 5, 4
MOST_ROUNDS = 31
"""Of pairs of nodes: beyond 32 nodes each meets so many others only."""

MEDIAN = 1.2533  # Standard deviation of a median over that of a mean, normal samples
Pair = tuple[int, int]


class Check:
    """One rank of the check, and what it has measured."""

    def __init__(self, settings: Settings, ranks: Ranks, show: Callable[[State], object]) -> None:
        self.ranks, self.show = ranks, show
        self.size = int(settings.largest or SIZES[ranks.device])
        self.nodes = ranks.world // ranks.local
        self.everyone = ranks.form([range(ranks.world)])
        self.buffer = torch.zeros(self.size // 4, dtype=torch.float32, device=ranks.device)
        inside, between = matches(ranks.local), matches(self.nodes)[:MOST_ROUNDS]
        self.inside, self.between = inside, between
        self.scatters: list[float] = []
        """Of this rank's samples, relative, by measurement."""
        self.scatter: list[float] = []
        """Of a median of samples on the median rank, by round of the bisection."""
        self.pace = Pace("health", 2 * len(inside) + 2 * len(between) + self.nodes.bit_length() + 3)

    def run(self) -> dict[str, Any]:
        """Everything; the same on every rank."""
        ranks, local = self.ranks, self.ranks.local
        self.pace.next(self.show, "a product on every rank")
        product = measure_ranks(rank_point(ranks.device), ranks)
        pairs: dict[Pair, float] = {}
        for turn in self.inside:
            groups = [(node * local + a, node * local + b) for node in range(self.nodes) for a, b in turn]
            pairs |= self.transfers(groups, "pairs inside a node")
        rails: dict[Pair, float] = {}
        for turn in self.between:
            groups = [(a * local + rail, b * local + rail) for a, b in turn for rail in range(local)]
            rails |= self.transfers(groups, "pairs of nodes")
        members = self.nodes if self.nodes > 1 else local
        return {
            "device": ranks.names[0], "hosts": ranks.hosts[::local], "ranks_per_node": local, "bytes": self.size,
            "product": {"seconds": product.median, **product.details},
            "inside": [self.matrix(pairs, node * local, local) for node in range(self.nodes)],
            "between": self.of_nodes(rails) if self.nodes > 1 else None, "rails": self.of_rails(rails) if self.nodes > 1 else None,
            "bisection": self.bisection(members),
        }  # fmt: skip

    def transfers(self, pairs: Sequence[Pair], what: str) -> dict[Pair, float]:
        """Bytes/s from a to b and from b to a of all pairs, which run at once; what the receiver sees counts."""
        found: dict[Pair, float] = {}
        part = self.buffer[: max(self.buffer.numel() // 4, 1)]
        for back in (False, True):
            ways = [(b, a) if back else (a, b) for a, b in pairs]
            mine = next((way for way in ways if self.ranks.place.rank in way), None)

            def run(mine: Pair | None = mine) -> None:
                if mine is None:
                    return
                source, target = mine
                sends = source == self.ranks.place.rank
                step = dist.P2POp(dist.isend if sends else dist.irecv, part, target if sends else source, group=self.everyone)
                for work in dist.batch_isend_irecv([step]):
                    work.wait()

            seconds = self.seconds(run, f"{what}, all at once", list(mine or (self.ranks.place.rank,)))
            received = (mine, part.numel() * 4 / seconds) if mine and mine[1] == self.ranks.place.rank else None
            found |= dict(one for one in self.ranks.collect(received) if one)
        return found

    def all_reduces(self, groups: Sequence[Group]) -> list[float]:
        """Bus bandwidth of the all-reduce of each group of members, which run at once; the slowest rank of a group counts."""
        ranks, each = self.ranks, self.ranks.local if self.nodes > 1 else 1
        lists = [[member * each + i for member in group for i in range(each)] for group in groups]
        group = ranks.form(lists)
        own = next((one for one in lists if ranks.place.rank in one), [ranks.place.rank])

        def run() -> None:
            if group is not None:
                dist.all_reduce(self.buffer, group=group)

        seconds = self.seconds(run, f"an all-reduce in groups of {len(lists[0])} ranks", own)
        everyone = ranks.collect(seconds)
        self.scatter.append(median(ranks.collect(self.scatters[-1])) * MEDIAN / SAMPLES**0.5)
        ranks.destroy(group)
        slowest = [max(everyone[rank] for rank in one) for one in lists]
        return [2.0 * (len(one) - 1) / len(one) * self.size / took for one, took in zip(lists, slowest, strict=True)]

    def seconds(self, run: Callable[[], object], what: str, ranks: list[int]) -> float:
        """Of one run on this rank: the median of samples after a barrier of all."""
        self.pace.next(self.show, what)
        with self.ranks.watch.doing(what, ranks, max(self.ranks.timeout, 120.0)):
            timed = taker_of(None, self.ranks, run=run)
            timed(1, 1)
            self.buffer.zero_()
            taken = timed(SAMPLES, INNER)
            middle = median(taken)
            self.scatters.append(NORMAL * median(abs(one - middle) for one in taken) / middle)
            return middle

    def matrix(self, pairs: dict[Pair, float], first: int, count: int) -> list[list[float | None]]:
        """From row to column."""
        return [[pairs.get((first + a, first + b)) for b in range(count)] for a in range(count)]

    def of_nodes(self, rails: dict[Pair, float]) -> list[list[float | None]]:
        """From node to node, all rails together."""
        local = self.ranks.local
        found: list[list[float | None]] = [[None] * self.nodes for _ in range(self.nodes)]
        for (source, target), rate in rails.items():
            row, column = found[source // local], target // local
            row[column] = (row[column] or 0.0) + rate
        return found

    def of_rails(self, rails: dict[Pair, float]) -> list[list[float]]:
        """Median over partners and both ways of each GPU's number on each node: of its NIC, where each GPU has one."""
        local = self.ranks.local
        return [
            [median(rate for pair, rate in rails.items() if node * local + rail in pair) for rail in range(local)]
            for node in range(self.nodes)
        ]

    def bisection(self, members: int) -> dict[str, Any]:
        """What ``find_slow`` has found, as plain data."""
        found = find_slow(members, self.all_reduces, lambda: max(self.scatter))
        return {
            "members": "nodes" if self.nodes > 1 else "ranks", "healthy": found.healthy, "tolerance": found.tolerance,
            "rounds": [[{"members": list(group), "bandwidth": pace} for group, pace in one] for one in found.rounds],
            "slow": [{"member": one.member, "share": one.share, "path": [list(step) for step in one.path]} for one in found.slow],
            "links": [list(pair) for pair in found.pairs], "undecided": [list(group) for group in found.undecided],
        }  # fmt: skip


def work(settings: Settings, place: Place, show: Callable[[State], object] = lambda _: None) -> dict[str, Any] | None:
    """The check as this rank; rank 0 writes the file and returns its content. Ends the process where a rank or link fails."""
    with at_work(settings, place, show) as (ranks, shown):
        first_of_node = place.rank % ranks.local == 0
        states = ranks.collect(conditions(ranks.device) if first_of_node else None)
        found = Check(settings, ranks, shown if ranks.first else lambda _: None).run()
        found["conditions"] = states[0]
        found["unlike"] = unlike({ranks.hosts[rank]: one for rank, one in enumerate(states) if one is not None})
        if ranks.first:
            head = header(ranks)
            about = {name: head[name] for name in ("driver", "versions")} | {"command": settings.command}
            found = {"date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **about, **found, "sentences": sentences(found)}
            library.write_whole(Path(settings.output), library.dump_yaml({"health": json.loads(json.dumps(found))}))
        ranks.from_first([0.0])
    return found if ranks.first else None
