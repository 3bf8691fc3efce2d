"""Which rank, node, stage or link holds a job up, from the times of its ranks and the states of its GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.elastic.observed import Gpu, Observed
from planner.elastic.shards import Places
from planner.errors import PlannerError

LEAST = 0.03
"""Part by which a rank must be slower than its peers: clocks of equal GPUs differ by as much."""
SPREADS = 4.0
"""And by so many standard deviations of its peers."""
LOW_CLOCK = 0.05
"""Part by which a clock is low."""
UNEVEN_TOKENS = 0.15
"""Part by which the busiest expert rank is above the mean and the plan."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """One thing that holds the job up."""

    kind: str
    """slow_rank, slow_node, slow_stage, slow_link, expert_imbalance, throttled or broken."""
    who: str
    """Rank, node, stage, GPU."""
    size: float
    """Times as long, or times as much, as its peers or the plan."""
    evidence: str
    """What was measured."""
    ranks: tuple[int, ...] = ()
    """Ranks that it concerns."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "ranks": list(self.ranks)}


def busy_times(seen: Observed) -> Mapping[int, Sequence[float]]:
    """Seconds of each rank in which it neither waits nor communicates: as measured, else the step less its waits."""
    if "compute" in seen.ranks:
        return seen.ranks["compute"]
    steps, waits = seen.ranks.get("step", {}), seen.ranks.get("wait") or seen.ranks.get("communication")
    if not waits:
        return {}
    return {
        rank: [max(a - b, 0.0) for a, b in zip(values, waits[rank], strict=False)]
        for rank, values in steps.items() if rank in waits
    }  # fmt: skip


def levels(busy: Mapping[int, Sequence[float]], classes: Mapping[int, int]) -> dict[int, float]:
    """Median over steps of a rank's time over the first quartile of its peers, the ranks of its class, in the same step: half of
    them may be slow."""
    ranks = sorted(busy)
    steps = min(len(busy[rank]) for rank in ranks)
    times = np.array([list(busy[rank])[-steps:] for rank in ranks], dtype=float)
    found = dict[int, float]()
    for one in sorted({classes[rank] for rank in ranks}):
        rows = [i for i, rank in enumerate(ranks) if classes[rank] == one]
        middle = np.maximum(np.quantile(times[rows], 0.25, axis=0), 1e-12)
        found |= {ranks[i]: float(np.median(times[i] / middle)) for i in rows}
    return found


def beyond(values: Floats) -> float:
    """From where on a level is no chance: 1 + 0.67 d + max(LEAST, SPREADS d), levels being 1 at the first quartile.

    The deviation d is that of the fast ones, the first quartile less the 5 % quantile: 0.97 of that of a normal distribution.
    """
    first, last = np.quantile(values, [0.25, 0.05])
    spread = float(first - last) / 0.97
    return 1.0 + 0.67 * spread + max(LEAST, SPREADS * spread)


def slow_ranks(seen: Observed, places: Places, node_ranks: int) -> list[Straggler]:
    """Ranks, or whole nodes, that are slower than the others of their pipeline stage; stages slower than the others."""
    busy = busy_times(seen)
    if not busy:
        return []
    if max(busy) >= places.ranks:
        raise PlannerError(f"rank {max(busy)} was measured, but the plan has {places.ranks} GPUs; is it the plan of this run?")
    stage = {rank: int(places.stage[rank]) for rank in busy}
    level = levels(busy, stage)
    limit = beyond(np.array(list(level.values())))
    slow = {rank: value for rank, value in level.items() if value > limit}
    node_of = {rank: seen.nodes.get(rank, f"node-{rank // node_ranks}") for rank in busy}
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in node_of.items():
        members[node].append(rank)
    found = []
    for node, ranks in members.items():
        hit = [rank for rank in ranks if rank in slow]
        if len(ranks) > 1 and len(hit) == len(ranks) and len(members) > 1:
            size = max(slow[rank] for rank in hit)
            text = f"all {len(ranks)} ranks of the node compute {size:.2f} times as long as their peers"
            found.append(Straggler(kind="slow_node", who=node, size=size, evidence=text, ranks=tuple(ranks)))
            continue
        for rank in hit:
            text = f"computes {slow[rank]:.2f} times as long as the {sum(1 for one in stage.values() if one == stage[rank])} "
            text += f"ranks of stage {stage[rank]}, median of {len(busy[rank])} steps"
            found.append(Straggler(kind="slow_rank", who=f"rank {rank} on {node}", size=slow[rank], evidence=text, ranks=(rank,)))
    return found + _slow_stage({rank: values for rank, values in busy.items() if rank not in slow}, stage)


def _slow_stage(busy: Mapping[int, Sequence[float]], stage: Mapping[int, int]) -> list[Straggler]:
    """The stage whose median rank computes longer than those of the others by twice LEAST; slow ranks are left out before."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for rank, values in busy.items():
        by_stage[stage[rank]].append(float(np.median(values)))
    if len(by_stage) < 2:
        return []
    middle = {one: float(np.median(values)) for one, values in by_stage.items()}
    worst = max(middle, key=lambda one: middle[one])
    rest = float(np.median([value for one, value in middle.items() if one != worst]))
    size = middle[worst] / max(rest, 1e-12)
    if size <= 1.0 + 2.0 * LEAST:
        return []
    text = f"its ranks compute {size:.2f} times as long as those of the other {len(middle) - 1} stages"
    return [Straggler(kind="slow_stage", who=f"stage {worst}", size=size, evidence=text)]


def slow_links(seen: Observed, planned: float) -> list[Straggler]:
    """Communication that even the rank that waits least has, over the plan's: the others' is in part waiting for the slowest."""
    times = seen.ranks.get("communication")
    if not times or planned <= 0:
        return []
    middle = {rank: float(np.median(values)) for rank, values in times.items()}
    least = min(middle, key=lambda rank: middle[rank])
    size = middle[least] / planned
    if size <= 1.3:
        return []
    text = f"even rank {least} communicates {middle[least]:.3g} s a step, {planned:.3g} s are planned"
    return [Straggler(kind="slow_link", who="the links between the ranks", size=size, evidence=text)]


def uneven_experts(seen: Observed, planned: float) -> list[Straggler]:
    """Tokens of the busiest expert rank over the mean, where that is above what is planned."""
    tokens = seen.ranks.get("tokens")
    if not tokens or len(tokens) < 2:
        return []
    middle = {rank: float(np.mean(values)) for rank, values in tokens.items()}
    mean = float(np.mean(list(middle.values())))
    busiest = max(middle, key=lambda rank: middle[rank])
    size = middle[busiest] / mean if mean > 0 else 1.0
    if size <= planned * (1.0 + UNEVEN_TOKENS):
        return []
    text = f"it gets {size:.2f} times the mean of {len(middle)} expert ranks, {planned:.2f} is planned"
    return [Straggler(kind="expert_imbalance", who=f"rank {busiest}", size=size, evidence=text, ranks=(busiest,))]


def throttled(gpus: Sequence[Gpu]) -> list[Straggler]:
    """GPUs whose clock is below the median of all, and those with an error of the driver."""
    found = [
        Straggler(kind="broken", who=one.name, size=1.0, evidence=f"the driver reported XID {one.xid}") for one in gpus if one.xid
    ]  # fmt: skip
    clocks = {one.name: one.clock for one in gpus if one.clock}
    if len(clocks) < 2:
        return found
    middle = float(np.median(list(clocks.values())))
    for one in gpus:
        if one.clock and one.clock < middle * (1.0 - LOW_CLOCK):
            why = f", {' and '.join(one.reasons)}" if one.reasons else ""
            heat = f", {one.temperature:.0f} C" if one.temperature else ""
            text = f"{one.clock:.0f} MHz, {middle:.0f} are usual here{why}{heat}"
            found.append(Straggler(kind="throttled", who=one.name, size=middle / one.clock, evidence=text))
    return found


def stragglers(seen: Observed, places: Places, node_ranks: int, *, communication: float, imbalance: float) -> list[Straggler]:
    """All that holds the job up, by what it costs at first sight: largest first. Raises PlannerError."""
    found = slow_ranks(seen, places, node_ranks) + slow_links(seen, communication)
    found += uneven_experts(seen, imbalance) + throttled(seen.gpus)
    return sorted(found, key=lambda one: -one.size)
