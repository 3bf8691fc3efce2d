"""Degrees of mixed layouts as columns, with a lower bound of their time; each becomes a layout when its turn comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.errors import PlannerError
from planner.mixed.boundaries import Hops, link_seconds
from planner.mixed.cut import Cut, StageCosts, best_cut_of
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.mixed.shares import Replicas, longest, water_fill
from planner.mixed.stage_tables import FIRST, LAST, MIDDLE, Axes, Choice, Held, KindTables

MOST_STAGES = 64
"""Stages of one pipeline that are searched."""
HUGE = 1e15
"""Seconds of what does not fit."""
STEP = 1.01
"""Ratio of neighbouring levels of ``Space.level``: a bound is at most so much too low."""
COLUMNS = 100_000
"""Rows of degrees of one set of kinds: with more kinds, pipelines have fewer stages on each."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of one candidate."""

    kinds: tuple[str, ...]
    """Those that it uses, in the order of the cluster."""
    tps: tuple[int, ...]
    """By kind."""
    stages: tuple[int, ...]
    """By kind: of every pipeline, or where ``apart`` of those of the kind."""
    replicas: tuple[int, ...]
    """By kind; all equal unless ``apart``."""
    micro: int
    apart: bool
    """Every kind has pipelines of its own; else every pipeline goes through all kinds."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Candidates of one set of kinds, (N,) or (N, kinds)."""

    kinds: tuple[str, ...]
    apart: bool
    tps: NDArray[np.intp]
    stages: NDArray[np.intp]
    replicas: NDArray[np.intp]
    micro: NDArray[np.intp]
    bound: Floats
    """Seconds below which no step of the candidate is."""

    def row(self, number: int) -> Degrees:
        """One of them."""
        def numbers(column: NDArray[np.intp]) -> tuple[int, ...]:
            return tuple(int(one) for one in column[number])

        return Degrees(
            kinds=self.kinds, apart=self.apart, tps=numbers(self.tps), stages=numbers(self.stages), replicas=numbers(self.replicas),
            micro=int(self.micro[number]),
        )  # fmt: skip


@dataclass
class Space:
    """Tables of all kinds for one set of axes, priced when they are first asked for."""

    job: MixedJob
    axes: Axes
    _tables: dict[tuple[str, bool, bool], KindTables] = field(default_factory=dict)
    _costs: dict[tuple[int, float], StageCosts] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], tuple[Cut, list[Choice]] | None] = field(default_factory=dict)
    _held: dict[str, Held] = field(default_factory=dict)

    def table(self, kind: str, spanned: bool, alone: bool) -> KindTables:
        """All stages of one kind; without a given link replicas apart differ by their own networks alone, whose slowest counts."""
        spanned = spanned and any(self.job.cluster.link(kind, other) for other in self.job.kinds if other != kind)
        key = kind, spanned, alone
        if key not in self._tables:
            self._tables[key] = KindTables(self.job, kind, self.axes, spanned, alone)
        return self._tables[key]

    @cached_property
    def levels(self) -> Floats:
        """Seconds of a stage, in steps of STEP, from the shortest layer to the whole model on the slowest GPU."""
        tables = [self.table(kind, False, False) for kind in self.job.kinds]
        low, high = min(float(one.per_layer.min()) for one in tables), max(float(one.seconds.max()) for one in tables)
        return np.asarray(low * STEP ** np.arange(np.ceil(np.log(high / low) / np.log(STEP)) + 2))

    def held(self, kind: str) -> Held:
        """Layers that stages of a kind hold by level."""
        if kind not in self._held:
            self._held[kind] = self.table(kind, False, False).held(self.levels)
        return self._held[kind]

    def level(self, held: list[Held], places: list[tuple[tuple[Any, ...], NDArray[np.intp]]], layers: int) -> Floats:
        """The level below the smallest one at which stages hold so many layers, (N,); infinite where none does.

        ``places``: (tp, micro batch, replicas) and stages of each kind.
        """
        low = np.zeros(len(places[0][1]), dtype=np.intp)
        high = np.full(len(low), len(self.levels))
        for _ in range(len(self.levels).bit_length()):
            middle = np.minimum((low + high) // 2, len(self.levels) - 1)
            enough = np.sum([one.of(*place, middle) for one, place in zip(held, places, strict=True)], axis=0) >= layers
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return np.where(high < len(self.levels), self.levels[np.clip(high - 1, 0, len(self.levels) - 1)], np.inf)

    def least_hop(self, kinds: tuple[str, ...], micro: int, count: NDArray[np.intp]) -> Floats:
        """Least seconds of a send from one kind to another over a given link that so many pipelines share, (N,)."""
        found = np.full(len(count), 0.0 if len(kinds) == 1 else np.inf)
        for one, other in itertools.combinations(kinds, 2):
            link = self.job.cluster.link(one, other)
            ends = (Stage(kind=one, layers=1), Stage(kind=other, layers=1))
            shape = Pipeline(stages=ends, micro_batch_size=micro)
            alone = link_seconds(link, self.job, self.axes.cp, shape, ends) if link else 0.0
            sharing = count if link and not link.per_node else 1
            found = np.minimum(found, (alone - link.latency) * sharing + link.latency if link else 0.0)
        return found

    @property
    def microbatch_sum(self) -> dict[int, int]:
        """Microbatches of a step by micro batch size."""
        batch = self.job.workload.global_batch_size
        return {one: batch // one for one in self.axes.micros if batch % one == 0}

    @cached_property
    def hops(self) -> Hops:
        """Seconds of sends."""
        return Hops(self.job, self.axes.cp)

    def costs(self, choice: Choice, hop: float) -> StageCosts:
        """Seconds of a stage with its sends."""
        key = id(choice), hop
        if key not in self._costs:
            self._costs[key] = StageCosts(choice.seconds + hop)
        return self._costs[key]


def columns_of(space: Space, kinds: tuple[str, ...], apart: bool) -> Columns | None:
    """All degrees of some kinds that memory does not rule out; None where there are none.

    Together: R = min over k of n_k / (p_k t_k c) pipelines. Apart: R_k = n_k / (p_k t_k c). With tau_k the least seconds of a
    layer on kind k, M microbatches in all, and z the level below the smallest at which the stages of a pipeline hold all layers
    (``KindTables.held``), no step is shorter than

        together   L min tau_k + (M / R - 1) z
        apart      (M + sum of R_k e_k / z_k) / (sum of R_k / z_k), and e_k + z_k,    e_k = max(L tau_k - z_k, 0)

    and the least end of a step on the stage with the most layers, L / p at the least.
    """
    job, axes = space.job, space.axes
    layers = job.workload.model.num_layers
    rounds = space.microbatch_sum
    if not rounds:
        return None
    longest_run = _longest_run(space, kinds)
    gpus = [job.clusters[kind].num_gpus // axes.cp for kind in kinds]
    options = [
        [(tp, p) for tp in axes.tps[kind] for p in range(1, longest_run + 1) if tp * p <= n and p <= layers]
        for kind, n in zip(kinds, gpus, strict=True)
    ]
    pairs = np.array(list(itertools.product(*options)), dtype=np.intp).reshape(-1, len(kinds), 2)
    tps, stages = np.ascontiguousarray(pairs[..., 0]), np.ascontiguousarray(pairs[..., 1])
    replicas = np.array(gpus) // (tps * stages)
    if not apart:
        replicas = np.broadcast_to(replicas.min(axis=1, keepdims=True), replicas.shape)
    replicas = replicas // axes.ep * axes.ep
    found = [_bounded(space, kinds, (tps, stages, replicas), micro, apart) for micro in rounds]
    every = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    if not len(every[0]):
        return None
    return Columns(
        kinds=kinds, apart=apart, tps=every[0], stages=every[1], replicas=every[2], micro=every[3].astype(np.intp), bound=every[4]
    )  # fmt: skip


def _longest_run(space: Space, kinds: tuple[str, ...]) -> int:
    """Stages on one kind that are looked at."""
    most = min(MOST_STAGES, space.job.workload.model.num_layers) if space.job.trainer.legal.pp else 1
    while most > 2 and np.prod([float(len(space.axes.tps[kind]) * most) for kind in kinds]) > COLUMNS:
        most -= 1
    return most


def _bounded(
    space: Space, kinds: tuple[str, ...], degrees: tuple[NDArray[np.intp], ...], micro: int, apart: bool
) -> tuple[NDArray[Any], ...]:
    """The rows with one micro batch that may fit, and their bounds: tp, stages, replicas, micro batch, seconds."""
    tps, stages, replicas = degrees
    axes, layers = space.axes, space.job.workload.model.num_layers
    batch, b = space.microbatch_sum[micro], space.axes.micros.index(micro)
    together = replicas.sum(axis=1) if apart else replicas[:, 0]
    rows = np.flatnonzero((replicas.min(axis=1) >= 1) & (together <= batch) & (apart | (stages.sum(axis=1) <= layers)))
    tps, stages, replicas, together = tps[rows], stages[rows], replicas[rows], together[rows]
    known = np.maximum(np.searchsorted(np.array(axes.replicas), together, side="right") - 1, 0)
    tables = [space.table(kind, False, False) for kind in kinds]
    held = [space.held(kind) for kind in kinds]
    at = [np.searchsorted(np.array(axes.tps[kind]), tps[:, number]) for number, kind in enumerate(kinds)]
    each = np.stack([table.per_layer[tp, b] for table, tp in zip(tables, at, strict=True)], axis=1)
    places = [((tp, b, known), stages[:, number]) for number, tp in enumerate(at)]
    share = np.minimum(-(-layers // (stages if apart else stages.sum(axis=1, keepdims=True))), layers)
    share = np.broadcast_to(share, stages.shape)
    over = [space.table(kind, apart and len(kinds) > 1, False) for kind in kinds]
    ends = [table.least_end[tp, b, known, share[:, number]] for number, (table, tp) in enumerate(zip(over, at, strict=True))]
    if apart:
        level = np.stack([space.level([one], [place], layers) for one, place in zip(held, places, strict=True)], axis=1)
        rate = (replicas / np.where(np.isfinite(level), level, HUGE)).sum(axis=1)
        level = np.where(np.isfinite(level), level, HUGE)
        fill = np.maximum(layers * each - level, 0.0)
        bound = np.maximum((batch + (replicas * fill / level).sum(axis=1)) / rate, (fill + level).max(axis=1))
        bound = bound + np.max(ends, axis=0)
    else:
        level = space.level(held, places, layers)
        hop = space.least_hop(kinds, micro, together)
        level = np.maximum(np.where(np.isfinite(level), level, HUGE), hop)
        total = np.maximum(layers * each.min(axis=1) + 2.0 * hop * (len(kinds) - 1), level)
        bound = total + (np.ceil(batch / together) - 1.0) * level + np.min(ends, axis=0)
    one = np.flatnonzero(bound < HUGE)
    return tps[one], stages[one], replicas[one], np.full(len(one), micro), bound[one]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A candidate with its cut and shares, priced in closed form."""

    layout: MixedLayout
    seconds: float


def layouts_of(space: Space, degrees: Degrees, below: float) -> Iterator[Found]:
    """The layouts of one candidate: every order of its kinds, each cut exactly; shares by water-filling.

    None where memory does not do, and orders that take ``below`` seconds at the least are left out.
    """
    if degrees.apart:
        found = _apart(space, degrees)
        if found is not None:
            yield found
        return
    for order in itertools.permutations(range(len(degrees.kinds))):
        found = _together(space, degrees, order, below) if _order_bound(space, degrees, order) < below else None
        if found is not None:
            yield found


def _order_bound(space: Space, degrees: Degrees, order: tuple[int, ...]) -> float:
    """The bound of ``columns_of`` where every kind has as many microbatches waiting as its place in the pipeline asks for."""
    axes, layers = space.axes, space.job.workload.model.num_layers
    known, b, behind = axes.replica_row(degrees.replicas[0]), axes.micros.index(degrees.micro), sum(degrees.stages)
    sums, each = np.zeros(len(space.levels), dtype=np.int64), list[float]()
    rounds = -(-space.microbatch_sum[degrees.micro] // degrees.replicas[0])
    for at in order:
        kind = degrees.kinds[at]
        tp = axes.tps[kind].index(degrees.tps[at])
        held, place, most = space.held(kind), (tp, b, known), min(behind, rounds)
        behind -= degrees.stages[at]
        before = max(min(behind, rounds), most - degrees.stages[at])
        sums += held.of(place, most) - held.of(place, before)
        if (more := degrees.stages[at] - (most - before)) > 0:  # stages that wait for as many as there are
            sums += more * (held.of(place, most) - held.of(place, most - 1))
        each.append(float(space.table(kind, False, False).per_layer[tp, b]))
    enough = np.flatnonzero(sums >= layers)
    if not len(enough):
        return np.inf
    level = float(space.levels[max(enough[0] - 1, 0)])
    return max(layers * min(each), level) + (rounds - 1.0) * level


def _together(space: Space, degrees: Degrees, order: tuple[int, ...], below: float) -> Found | None:
    """Pipelines that go through the kinds in one order; None where they do not fit, or take ``below`` seconds at the least."""
    places = [(degrees.kinds[at], degrees.tps[at]) for at in order for _ in range(degrees.stages[at])]
    replicas = degrees.replicas[0]
    rounds = -(-space.microbatch_sum[degrees.micro] // replicas)
    cut = _cut(space, places, (degrees.micro, replicas, replicas, rounds), False, below)
    if cut is None:
        return None
    return _with_shares(space, [(places, *cut, replicas)], degrees.micro)


def _apart(space: Space, degrees: Degrees) -> Found | None:
    """Pipelines of each kind alone."""
    parts = []
    total, b = sum(degrees.replicas), space.axes.micros.index(degrees.micro)
    speeds = [
        stages / float(space.table(kind, False, False).per_layer[space.axes.tps[kind].index(tp), b])
        for kind, tp, stages in zip(degrees.kinds, degrees.tps, degrees.stages, strict=True)
    ]
    rate = sum(count * speed for count, speed in zip(degrees.replicas, speeds, strict=True))
    for at, kind in enumerate(degrees.kinds):
        share = speeds[at] / rate
        rounds = max(round(space.microbatch_sum[degrees.micro] * share), 1)
        places = [(kind, degrees.tps[at])] * degrees.stages[at]
        cut = _cut(space, places, (degrees.micro, total, degrees.replicas[at], rounds), len(degrees.kinds) > 1)
        if cut is None:
            return None
        parts.append((places, *cut, degrees.replicas[at]))
    return _with_shares(space, parts, degrees.micro)


def _cut(
    space: Space, places: list[tuple[str, int]], numbers: tuple[int, int, int, int], spanned: bool, below: float = np.inf
) -> tuple[Cut, list[Choice]] | None:  # fmt: skip
    """The best cut of one pipeline, and what may stand at each of its places; None where it takes ``below`` seconds or more, of
    which later calls may have less but not more.

    ``numbers``: micro batch, replicas of the model, pipelines like this one, microbatches of each.
    """
    key = tuple(places), numbers, spanned
    if key not in space._cuts:
        space._cuts[key] = _fresh_cut(space, places, numbers, spanned, below)
    return space._cuts[key]


def _fresh_cut(
    space: Space, places: list[tuple[str, int]], numbers: tuple[int, int, int, int], spanned: bool, below: float
) -> tuple[Cut, list[Choice]] | None:  # fmt: skip
    """The same, not looked up."""
    p, (micro, replicas, count, rounds) = len(places), numbers
    stages = tuple(Stage(kind=kind, tp=tp, layers=1) for kind, tp in places)
    shape = Pipeline(stages=stages, count=count, micro_batch_size=micro)
    hops = [sum(one) for one in space.hops.times(shape)]
    choices = list[Choice]()
    for at, (kind, tp) in enumerate(places):
        slot = MIDDLE if p == 1 else FIRST if at == 0 else LAST if at == p - 1 else MIDDLE
        flight = min(rounds, p - at) if space.axes.schedule == "1f1b" else rounds
        choices.append(space.table(kind, spanned, p == 1).choice(slot, tp, micro, replicas, flight, rounds))
    if p == 1:
        alone = float(choices[0].seconds[0, 0])
        whole = Cut(layers=(space.job.workload.model.num_layers,), slowest=alone, total=alone)
        return (whole, choices) if np.isfinite(alone) else None
    cut = best_cut_of([space.costs(one, hop) for one, hop in zip(choices, hops, strict=True)], rounds, below)
    return None if cut is None else (cut, choices)


def _with_shares(space: Space, parts: list[tuple[list[tuple[str, int]], Cut, list[Choice], int]], micro: int) -> Found | None:
    """Pipelines with their shares, as a layout with its seconds in closed form."""
    replicas = [Replicas(fixed=cut.total - cut.slowest, each=cut.slowest, count=count) for _, cut, _, count in parts]
    try:
        shares = water_fill(replicas, space.microbatch_sum[micro])
    except PlannerError:
        return None
    pipelines, ends = list[Pipeline](), list[float]()
    for (places, cut, choices, _), some in zip(parts, shares, strict=True):
        stages, start = list[Stage](), 0
        for (kind, tp), choice, layers in zip(places, choices, cut.layers, strict=True):
            at = (0, 0) if len(places) == 1 else (min(start, len(choice.end) - 1), layers)
            recompute = space.axes.recomputes[int(choice.recompute[at])]
            stages.append(Stage(kind=kind, layers=layers, tp=tp, recompute=recompute))
            ends.append(float(choice.end[at]))
            start += layers
        for rounds in sorted(set(some), reverse=True):
            pipelines.append(
                Pipeline(stages=tuple(stages), count=some.count(rounds), micro_batch_size=micro, num_microbatches=rounds)
            )
    axes = space.axes
    layout = MixedLayout(pipelines=tuple(pipelines), cp=axes.cp, ep=axes.ep, zero=axes.zero, schedule=axes.schedule)
    return Found(layout=layout, seconds=longest(replicas, shares) + max(ends))
