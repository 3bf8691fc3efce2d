"""Degrees made layouts: every order of kinds, cut exactly, shares by water-filling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.cost.own_terms import flushes
from planner.errors import PlannerError
from planner.layout import Layout
from planner.mixed.cut import Cut
from planner.mixed.mixed_columns import Degrees
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.mixed.mixed_space import Priced, Space
from planner.mixed.shares import Replicas, longest, shared
from planner.mixed.stage_tables import FIRST, LAST, MIDDLE, Choice, Place
from planner.record import record


@record
class Found:
    """A candidate with its cut and shares, priced in closed form."""

    layout: MixedLayout
    seconds: float


def layouts_of(space: Space, degrees: Degrees, below: float, near: float = np.inf) -> Iterator[Found]:
    """The layouts of one candidate: every order of its kinds, each cut exactly; shares by water-filling.

    Left out are those that do not fit, cuts that take ``below`` seconds or more, and orders that take ``near`` at the least.
    """
    if degrees.apart:
        found = _apart(space, degrees)
        if found is not None:
            yield found
        return
    for order in itertools.permutations(range(len(degrees.kinds))):
        found = _together(space, degrees, order, below) if _order_bound(space, degrees, order) < min(below, near) else None
        if found is not None:
            yield found


def _order_bound(space: Space, degrees: Degrees, order: tuple[int, ...]) -> float:
    """The bound of ``sharpened`` where every kind has as many microbatches waiting as its place in the pipeline asks for."""
    axes, layers = space.axes, space.layers
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
        each.append(float(space.per_layer(kind)[tp, b]))
    enough = np.flatnonzero(sums >= layers)
    if not len(enough):
        return np.inf
    level = float(space.levels[max(enough[0] - 1, 0)])
    return (max(layers * min(each), level) - level) / axes.vpp + rounds * level


def _together(space: Space, degrees: Degrees, order: tuple[int, ...], below: float) -> Found | None:
    """Pipelines that go through the kinds in one order; None where they do not fit, or take ``below`` seconds at the least."""
    places = [(degrees.kinds[at], degrees.tps[at]) for at in order for _ in range(degrees.stages[at])]
    replicas = degrees.replicas[0]
    rounds = -(-space.microbatch_sum[degrees.micro] // replicas)
    cut = _cut(space, places, (degrees.micro, replicas, replicas, rounds), False, below)
    if cut is None:
        return None
    return _with_shares(space, [(places, cut, replicas)], degrees.micro)


def _apart(space: Space, degrees: Degrees) -> Found | None:
    """Pipelines of each kind alone."""
    parts = []
    total, b = sum(degrees.replicas), space.axes.micros.index(degrees.micro)
    speeds = [
        stages / float(space.per_layer(kind)[space.axes.tps[kind].index(tp), b])
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
        parts.append((places, cut, degrees.replicas[at]))
    return _with_shares(space, parts, degrees.micro)


def _cut(
    space: Space, places: list[tuple[str, int]], numbers: tuple[int, int, int, int], spanned: bool, below: float = np.inf
) -> Priced | None:  # fmt: skip
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
) -> Priced | None:  # fmt: skip
    """The same, not looked up. A pipeline that runs empty f times takes f ((sum tau - max tau) / v + 2 sum d) + m max tau, with
    hand-overs d where they overlap with computation, else as a part of tau."""
    p, (micro, replicas, count, rounds), vpp = len(places), numbers, space.axes.vpp
    shape = Pipeline(
        stages=tuple(Stage(kind=kind, tp=tp, layers=1) for kind, tp in places), count=count, micro_batch_size=micro
    )
    tables, choices = {kind: space.table(kind, spanned, p == 1) for kind in dict(places)}, list[Choice]()
    for at, (kind, tp) in enumerate(places):
        slot = MIDDLE if p == 1 else FIRST if at == 0 else LAST if at == p - 1 else MIDDLE
        choices.append(tables[kind].choice(slot, tp, micro, replicas, Place(p, at, rounds)))
    if p == 1:
        alone = float(choices[0].seconds[0, 0])
        whole = Cut(layers=(space.job.workload.model.num_layers,), slowest=alone, total=alone)
        return Priced(whole, choices, 0.0) if np.isfinite(alone) else None
    hops, fill, link = [sum(one) for one in space.hops.times(shape, vpp)], 0.0, 0.0
    if not space.blocking:
        hops, fill, link = [0.0] * p, 2.0 * sum(space.hops.between(shape, vpp)), space.hops.busiest_link(shape, vpp)
    empty = float(flushes(space.job.trainer, Layout(num_microbatches=rounds)))
    costs = [space.costs(one, hop) for one, hop in zip(choices, hops, strict=True)]
    cut = space.cuts(costs).best(rounds * vpp / empty, (below / empty - fill) * vpp)
    if cut is None:
        return None
    cut = replace(cut, layers=tuple(vpp * layers for layers in cut.layers), slowest=max(cut.slowest, link))
    return Priced(cut, choices, empty * (max(cut.total - cut.slowest, 0.0) / vpp + fill))


def _with_shares(space: Space, parts: list[tuple[list[tuple[str, int]], Priced, int]], micro: int) -> Found | None:
    """Pipelines with their shares, as a layout with its seconds in closed form."""
    replicas = [Replicas(fixed=one.fixed, each=one.cut.slowest, count=count) for _, one, count in parts]
    try:
        shares = shared(replicas, space.microbatch_sum[micro], space.axes.equal_shares)
    except PlannerError:
        return None
    axes, pipelines, ends = space.axes, list[Pipeline](), list[float]()
    for (places, one, _), some in zip(parts, shares, strict=True):
        stages, start = list[Stage](), 0
        for (kind, tp), choice, layers in zip(places, one.choices, one.cut.layers, strict=True):
            at = (0, 0) if len(places) == 1 else (min(start // axes.vpp, len(choice.seconds) - 1), layers)
            recompute = axes.recomputes[int(choice.recompute[at])]
            stages.append(Stage(kind=kind, layers=layers, tp=tp, recompute=recompute))
            ends.append(choice.end(at))
            start += layers
        for rounds in sorted(set(some), reverse=True):
            pipelines.append(
                Pipeline(stages=tuple(stages), count=some.count(rounds), micro_batch_size=micro, num_microbatches=rounds)
            )
    piped = any(len(one.stages) > 1 for one in pipelines)
    layout = MixedLayout(
        pipelines=tuple(pipelines), cp=axes.cp, ep=axes.ep, zero=axes.zero, schedule=axes.schedule if piped else "1f1b",
        vpp=axes.vpp if piped else 1, offload_optimizer=axes.offload,
    )  # fmt: skip
    return Found(layout=layout, seconds=longest(replicas, shares) + max(ends))
