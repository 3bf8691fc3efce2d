"""Which rank, node, stage, link or expert holds a job up, from the times of its ranks and the states of its GPUs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.elastic.expert_placement import unevenness
from planner.elastic.gpu_states import Gpu
from planner.elastic.observed import Observed
from planner.elastic.shards import Places
from planner.errors import PlannerError
from planner.record import record
from planner.units import plural

LEAST = 0.03
"""Part by which a rank must be slower than its peers: clocks of equal GPUs differ by as much."""
SPREADS = 4.0
"""And by so many standard deviations of its peers."""
LOW_CLOCK = 0.05
"""Part by which a clock is low."""
UNEVEN_TOKENS = 0.15
"""Part by which the busiest expert rank is above the mean and the plan."""
SLOW_LINK = 0.3
"""Part by which communication is above that of the others, or the plan's."""
LINKS = 3
"""Pairs of ranks that are named, the slowest first."""


@record
class Straggler:
    """One thing that holds the job up."""

    kind: str
    """slow_rank, slow_node, slow_stage, slow_link, narrow_bus, expert_imbalance, throttled or broken."""
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


def slow_ranks(seen: Observed, places: Places, node_ranks: int, stages: Sequence[float]) -> list[Straggler]:
    """Ranks, or whole nodes, that are slower than the others of their pipeline stage; stages slower than the others, against the
    seconds of ``stages`` as planned."""
    busy = busy_times(seen)
    if not busy:
        return []
    if max(busy) >= places.ranks:
        raise PlannerError(f"rank {max(busy)} was measured, but the plan has {places.ranks} GPUs; is it the plan of this run?")
    stage = {rank: int(places.stage[rank]) for rank in busy}
    slow = slow_of(levels(busy, stage))
    peers = Counter(stage.values())
    text = {rank: f"as the {peers[at]} ranks of stage {at}" for rank, at in stage.items()}
    found = grouped(slow, seen, node_ranks, text, {rank: len(values) for rank, values in busy.items()})
    return found + _slow_stage({rank: values for rank, values in busy.items() if rank not in slow}, stage, stages)


def slow_of(level: Mapping[int, float]) -> dict[int, float]:
    """The ranks whose level is no chance."""
    limit = beyond(np.array(list(level.values())))
    return {rank: value for rank, value in level.items() if value > limit}


def grouped(
    slow: Mapping[int, float], seen: Observed, node_ranks: int, peers: Mapping[int, str], steps: Mapping[int, int]
) -> list[Straggler]:
    """Slow ranks one by one, those of a node that is slow as a whole together. ``peers``: of every rank that was measured, what it
    is compared with, in words; ``steps``: over how many."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank in peers:
        members[node_of(seen, rank, node_ranks)].append(rank)
    found = []
    for node, ranks in members.items():
        hit = [rank for rank in ranks if rank in slow]
        if len(ranks) > 1 and len(hit) == len(ranks) and len(members) > 1:
            size = max(slow[rank] for rank in hit)
            text = f"all {len(ranks)} ranks of the node compute {size:.2f} times as long as their peers"
            found.append(Straggler(kind="slow_node", who=node, size=size, evidence=text, ranks=tuple(ranks)))
            continue
        for rank in hit:
            text = f"computes {slow[rank]:.2f} times as long {peers[rank]}, median of {plural(steps[rank], 'step')}"
            found.append(Straggler(kind="slow_rank", who=f"rank {rank} on {node}", size=slow[rank], evidence=text, ranks=(rank,)))
    return found


def node_of(seen: Observed, rank: int, node_ranks: int) -> str:
    """Name of a rank's node, as it was said, else by its number."""
    return seen.nodes.get(rank, f"node-{rank // node_ranks}")


def _slow_stage(
    busy: Mapping[int, Sequence[float]], stage: Mapping[int, int], planned: Sequence[float]
) -> list[Straggler]:
    """The stage whose median rank computes longer than planned, against the others, by twice LEAST; slow ranks are left out
    before."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for rank, values in busy.items():
        by_stage[stage[rank]].append(float(np.median(values)) / planned[stage[rank]])
    if len(by_stage) < 2:
        return []
    middle = {one: float(np.median(values)) for one, values in by_stage.items()}
    worst = max(middle, key=lambda one: middle[one])
    rest = float(np.median([value for one, value in middle.items() if one != worst]))
    size = middle[worst] / max(rest, 1e-12)
    if size <= 1.0 + 2.0 * LEAST:
        return []
    text = f"against the plan its ranks compute {size:.2f} times as long as those of the other {len(middle) - 1} stages"
    return [Straggler(kind="slow_stage", who=f"stage {worst}", size=size, evidence=text)]


def slow_links(seen: Observed, places: Places, node_ranks: int, planned: float) -> list[Straggler]:
    """Pairs of ranks, rings of data parallel ranks, or all links, whose communication takes longer than that of others or than
    planned. What even the rank that waits least has is the links'; more is waiting for the slowest rank."""
    found = slow_pairs(seen, node_ranks)
    times = seen.ranks.get("communication")
    if found or not times or max(times) >= places.ranks:
        return found
    middle = {rank: float(np.median(values)) for rank, values in times.items()}
    if ring := _slow_ring(middle, places):
        return [ring]
    least = min(middle, key=lambda rank: middle[rank])
    size = middle[least] / planned if planned > 0 else 1.0
    if size <= 1.0 + SLOW_LINK:
        return []
    text = f"even rank {least} communicates {middle[least]:.3g} s a step, {planned:.3g} s are planned"
    return [Straggler(kind="slow_link", who="the links between the ranks", size=size, evidence=text)]


def slow_pairs(seen: Observed, node_ranks: int) -> list[Straggler]:
    """Pairs slower than the median of the pairs of their kind: inside a node, or across nodes."""
    kinds: dict[bool, dict[tuple[int, int], float]] = defaultdict(dict)
    for pair, values in seen.pairs.items():
        ends = [node_of(seen, rank, node_ranks) for rank in pair]
        kinds[ends[0] == ends[1]][pair] = float(np.median(values))
    found = []
    for inside, pairs in kinds.items():
        usual = float(np.median(list(pairs.values())))
        for (a, b), value in pairs.items():
            if usual > 0 and value > usual * (1.0 + SLOW_LINK):
                nodes = node_of(seen, a, node_ranks), node_of(seen, b, node_ranks)
                where = f"inside {nodes[0]}" if inside else f"{nodes[0]} to {nodes[1]}"
                text = f"{value:.3g} s, {usual:.3g} s is the median of {len(pairs)} pairs {'inside' if inside else 'across'} nodes"
                who = f"rank {a} to rank {b}, {where}"
                found.append(Straggler(kind="slow_link", who=who, size=value / usual, evidence=text, ranks=(a, b)))
    return sorted(found, key=lambda one: -one.size)[:LINKS]


def _slow_ring(middle: Mapping[int, float], places: Places) -> Straggler | None:
    """The ring of data parallel ranks, those of one stage and one place in it, whose least communication is above that of the
    other rings; None where there are fewer than three, or none stands out."""
    inner = int(places.layout.tp) * int(places.layout.cp)
    rings: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in middle:
        rings[int(places.stage[rank]), int(places.inside[rank]) % inner].append(rank)
    rings = {key: ranks for key, ranks in rings.items() if len(ranks) > 1}
    if len(rings) < 3:
        return None
    least = {key: min(middle[rank] for rank in ranks) for key, ranks in rings.items()}
    worst = max(least, key=lambda key: least[key])
    usual = float(np.median([value for key, value in least.items() if key != worst]))
    if usual <= 0 or least[worst] <= usual * (1.0 + SLOW_LINK):
        return None
    ranks = sorted(rings[worst])
    names = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    text = f"no rank of it communicates less than {least[worst]:.3g} s a step, {usual:.3g} s is the median of the other "
    text += f"{len(rings) - 1} rings"
    who = f"the data parallel ring of ranks {names}"
    return Straggler(kind="slow_link", who=who, size=least[worst] / usual, evidence=text, ranks=tuple(ranks))


def uneven_experts(seen: Observed, loads: Floats | None, ranks: int, planned: float) -> list[Straggler]:
    """Tokens of the busiest expert rank over the mean, where that is above what is planned: of ``loads`` by layer and expert on
    ``ranks`` ranks, else of the tokens of ranks."""
    tokens = seen.ranks.get("tokens")
    if loads is not None and ranks > 1:
        size, who, of = unevenness(loads, ranks), "the busiest expert rank of each layer", ranks
    elif tokens and len(tokens) > 1:
        middle = {rank: float(np.mean(values)) for rank, values in tokens.items()}
        busiest, mean = max(middle, key=lambda rank: middle[rank]), float(np.mean(list(middle.values())))
        size, who, of = middle[busiest] / mean if mean > 0 else 1.0, f"rank {busiest}", len(middle)
    else:
        return []
    if size <= planned * (1.0 + UNEVEN_TOKENS):
        return []
    text = f"it gets {size:.2f} times the mean of {of} expert ranks, {planned:.2f} is planned"
    return [Straggler(kind="expert_imbalance", who=who, size=size, evidence=text)]


def _rank_of(gpu: Gpu, firsts: Mapping[str, int], node_ranks: int, ranks: int) -> int | None:
    """The rank of a GPU by its node, whose first rank tables of ranks say or its number, and its place there; None where that is
    open."""
    number = re.search(r"(\d+)$", gpu.node)
    usual = int(number[1]) * node_ranks if number else 0 if ranks <= node_ranks else None
    first = firsts.get(gpu.node, usual)
    if first is None or not gpu.index.isdigit() or int(gpu.index) >= node_ranks or first + int(gpu.index) >= ranks:
        return None
    return first + int(gpu.index)


def odd_gpus(seen: Observed, node_ranks: int, ranks: int) -> list[Straggler]:
    """GPUs whose clock is below the median of all, that use fewer lanes of PCIe than they have, or with an error of the driver."""
    found = []
    clocks = [one.clock for one in seen.gpus if one.clock]
    middle = float(np.median(clocks)) if len(clocks) > 1 else 0.0
    firsts = {name: rank for rank, name in sorted(seen.nodes.items(), reverse=True)}
    for one in seen.gpus:
        rank = _rank_of(one, firsts, node_ranks, ranks)
        odd = list[tuple[str, float, str]]()
        if one.xid:
            odd.append(("broken", 1.0, f"the driver reported XID {one.xid}"))
        if one.clock and one.clock < middle * (1.0 - LOW_CLOCK):
            why = f", {' and '.join(one.reasons)}" if one.reasons else ""
            heat = f", {one.temperature:.0f} C" if one.temperature else ""
            odd.append(("throttled", middle / one.clock, f"{one.clock:.0f} MHz, {middle:.0f} are usual here{why}{heat}"))
        if one.width and one.most_width and one.width < one.most_width:
            text = f"{one.width:.0f} of {one.most_width:.0f} lanes of PCIe"
            odd.append(("narrow_bus", one.most_width / one.width, text))
        at = () if rank is None else (rank,)
        found += [Straggler(kind=kind, who=one.name, size=size, evidence=text, ranks=at) for kind, size, text in odd]
    return found


def _explained(found: list[Straggler]) -> list[Straggler]:
    """Slow ranks with the low clock that explains them, which is then no finding of its own."""
    low = {one.ranks[0]: one for one in found if one.kind == "throttled" and one.ranks}
    slow = {rank for one in found if one.kind in ("slow_rank", "slow_node") for rank in one.ranks}
    kept = []
    for one in found:
        if one.kind == "throttled" and slow & {*one.ranks}:
            continue
        why = [f"{low[rank].who}: {low[rank].evidence}" for rank in one.ranks if rank in low]
        said = one.kind in ("slow_rank", "slow_node") and why
        kept.append(replace(one, evidence=f"{one.evidence}; {why[0]}") if said else one)
    return kept


@record
class Planned:
    """What a plan expects of what is observed."""

    places: Places
    node_ranks: int
    """GPUs of a node."""
    stages: Sequence[float]
    """Seconds of a microbatch by pipeline stage, or numbers in proportion."""
    communication: float
    """Seconds of a step that nothing hides."""
    imbalance: float
    """Tokens of the busiest expert rank over the mean."""


def stragglers(seen: Observed, plan: Planned, loads: Floats | None = None) -> list[Straggler]:
    """All that holds the job up, by what it costs at first sight: largest first. ``loads``: tokens by layer and expert.
    Raises PlannerError."""
    places, node_ranks = plan.places, plan.node_ranks
    found = slow_ranks(seen, places, node_ranks, plan.stages) + slow_links(seen, places, node_ranks, plan.communication)
    found += uneven_experts(seen, loads, int(places.layout.ep), plan.imbalance) + odd_gpus(seen, node_ranks, places.ranks)
    return sorted(_explained(found), key=lambda one: -one.size)
