"""Degrees of mixed layouts as columns, with lower bounds of their time: a rough one of all, a sharp one of those that need it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.layout import divisors
from planner.mixed.mixed_space import Space
from planner.record import record

MOST_STAGES = 64
"""Stages of one pipeline that are searched."""
HUGE = 1e15
"""Seconds of what does not fit."""
COLUMNS = 50_000
"""Rows of degrees of one set of kinds: with more kinds, pipelines have fewer stages on each."""


@record
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


@record
class Columns:
    """Candidates of one set of kinds, (N,) or (N, kinds)."""

    kinds: tuple[str, ...]
    apart: bool
    tps: NDArray[np.intp]
    stages: NDArray[np.intp]
    replicas: NDArray[np.intp]
    micro: NDArray[np.intp]
    bound: Floats
    """Seconds below which no step of the candidate is, whatever its memory."""

    def row(self, number: int) -> Degrees:
        """One of them."""
        def numbers(column: NDArray[np.intp]) -> tuple[int, ...]:
            return tuple(int(one) for one in column[number])

        return Degrees(
            kinds=self.kinds, apart=self.apart, tps=numbers(self.tps), stages=numbers(self.stages), replicas=numbers(self.replicas),
            micro=int(self.micro[number]),
        )  # fmt: skip


def columns_of(space: Space, kinds: tuple[str, ...], apart: bool) -> Columns | None:
    """All degrees of some kinds; None where there are none.

    Together: R = min over k of n_k / (p_k t_k c) pipelines. Apart: R_k = n_k / (p_k t_k c). With tau_k the least seconds of a
    layer on kind k, L layers behind the leading dense ones and M microbatches in all, a stage of every pipeline takes at least
    z = L / sum of p_k / tau_k, or as long as its slowest hop, and no step is shorter than

        together   (L min tau_k - z) / v + M / R z
        apart      (M + sum of R_k e_k / z_k) / (sum of R_k / z_k), and e_k + z_k
                   z_k = L tau_k / p_k,  e_k = max(L tau_k - z_k, 0)
    """
    job, axes = space.job, space.axes
    layers, rounds = job.workload.model.num_layers, space.microbatch_sum
    if not rounds or layers % axes.vpp or not (axes.piped or apart or len(kinds) == 1):
        return None
    if axes.vpp > 1 and (apart or len({job.cluster.node_kind(kind).site for kind in kinds}) > 1):
        return None  # chunks would cross a long link once more each
    longest_run = _longest_run(space, kinds)
    gpus = [job.clusters[kind].num_gpus // axes.cp for kind in kinds]
    stages_of = range(1, min(longest_run, layers) + 1)
    options = [
        np.array([(tp, p) for tp in axes.tps[kind] for p in stages_of if tp * p <= n], dtype=np.intp)
        for kind, n in zip(kinds, gpus, strict=True)
    ]
    if not all(map(len, options)):
        return None
    each = np.meshgrid(*(np.arange(len(one)) for one in options), indexing="ij")
    tps, stages = (
        np.stack([one[at.ravel(), side] for one, at in zip(options, each, strict=True)], axis=1) for side in (0, 1)
    )  # fmt: skip
    keep = apart | ((stages.sum(axis=1) * axes.vpp <= layers) & ((stages.sum(axis=1) > 1) | (axes.vpp == 1)))
    keep = keep & ((tps == tps[:, :1]).all(axis=1) | (not axes.equal_tp))
    tps, stages = tps[keep], stages[keep]
    replicas = np.array(gpus) // (tps * stages)
    groups = axes.ep // np.gcd(axes.ep, tps * axes.cp if job.trainer.legal.expert_parallel == "folded" else 1) * np.ones_like(tps)
    if not apart:
        replicas = np.broadcast_to(replicas.min(axis=1, keepdims=True), replicas.shape)
        groups = np.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape)
    found = [_rough(space, kinds, (tps, stages, replicas // groups * groups, groups), micro, apart) for micro in rounds]
    every = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    if not len(every[0]):
        return None
    return Columns(
        kinds=kinds, apart=apart, tps=every[0], stages=every[1], replicas=every[2], micro=every[3].astype(np.intp), bound=every[4]
    )  # fmt: skip


def _longest_run(space: Space, kinds: tuple[str, ...]) -> int:
    """Stages on one kind that are looked at."""
    most = min(MOST_STAGES, space.job.workload.model.num_layers) if space.axes.piped else 1
    while most > 2 and np.prod([float(len(space.axes.tps[kind]) * most) for kind in kinds]) > COLUMNS:
        most -= 1
    return most


def _rough(
    space: Space, kinds: tuple[str, ...], degrees: tuple[NDArray[np.intp], ...], micro: int, apart: bool
) -> tuple[NDArray[Any], ...]:
    """The rows with one micro batch, and their rough bounds: tp, stages, replicas, micro batch, seconds."""
    tps, stages, replicas, groups = degrees
    axes, layers = space.axes, space.layers
    batch, b = space.microbatch_sum[micro], axes.micros.index(micro)
    if not apart and (axes.vpp > 1 or axes.equal_shares):
        replicas = _equal(space, replicas, groups, stages, batch)
    together = replicas.sum(axis=1) if apart else replicas[:, 0]
    rows = (replicas.min(axis=1) >= 1) & (together <= batch)
    if apart and axes.equal_shares:
        rows &= batch % np.maximum(together, 1) == 0
    tps, stages, replicas, together = tps[rows], stages[rows], replicas[rows], together[rows]
    each = np.stack(
        [space.per_layer(kind)[np.searchsorted(np.array(axes.tps[kind]), tps[:, at]), b] for at, kind in enumerate(kinds)], axis=1
    )  # fmt: skip
    if apart:
        bound = _apart_bound(layers * each, layers * each / stages, replicas, batch)
    else:
        hop = space.least_hop(kinds, micro, together) if axes.vpp == 1 else np.zeros(len(together))
        level = np.maximum(layers / (stages / each).sum(axis=1), hop)
        bound = _together_bound(space, layers * each.min(axis=1) + 2.0 * hop * (len(kinds) - 1), level, batch / together)
    return tps, stages, replicas, np.full(len(bound), micro), bound


def _together_bound(space: Space, total: Floats, level: Floats, rounds: Floats) -> Floats:
    """(sum tau - max tau) / v + m max tau, from a bound of both."""
    return np.asarray((np.maximum(total, level) - level) / space.axes.vpp + np.ceil(rounds) * level)


def _apart_bound(total: Floats, level: Floats, replicas: NDArray[np.intp], batch: Any) -> Floats:
    """Seconds in which replicas of several kinds together do all microbatches, (N, kinds) to (N,)."""
    rate, fill = (replicas / level).sum(axis=1), np.maximum(total - level, 0.0)
    return np.asarray(np.maximum((batch + (replicas * fill / level).sum(axis=1)) / rate, (fill + level).max(axis=1)))


def _equal(
    space: Space, replicas: NDArray[np.intp], groups: NDArray[np.intp], stages: NDArray[np.intp], batch: int
) -> NDArray[np.intp]:
    """As many replicas as take equal shares, of whole rounds of microbatches where stages are interleaved; 0: none."""
    @functools.cache
    def most(limit: int, group: int, length: int) -> int:
        parts = batch // length if batch % length == 0 else 0
        return max((n for n in divisors(parts) if n <= limit and n % group == 0), default=0) if parts else 0

    length = stages.sum(axis=1) if space.axes.vpp > 1 else np.ones(len(stages), dtype=np.intp)
    columns = replicas[:, 0], groups[:, 0], length
    sizes = tuple(int(one.max(initial=0)) + 1 for one in columns)
    codes = np.ravel_multi_index(columns, sizes)
    table = np.zeros(int(np.prod(sizes)), dtype=np.intp)
    for code in np.flatnonzero(np.bincount(codes, minlength=len(table))):
        table[code] = most(*map(int, np.unravel_index(code, sizes)))
    return np.broadcast_to(table[codes][:, None], replicas.shape)


def sharpened(space: Space, columns: Columns, rows: NDArray[np.intp]) -> Floats:
    """Bounds of some rows with memory: infinite where it rules them out.

    z is the level below the smallest at which the stages of a pipeline hold all layers (``KindTables.held``); at the end comes the
    least end of a step on the stage with the most layers, L / p at the least.
    """
    axes, layers, apart, kinds = space.axes, space.layers, columns.apart, columns.kinds
    tps, stages, replicas, micro = (one[rows] for one in (columns.tps, columns.stages, columns.replicas, columns.micro))
    batch, b = (np.array(space.job.workload.global_batch_size) // micro), np.searchsorted(np.array(axes.micros), micro)
    together = replicas.sum(axis=1) if apart else replicas[:, 0]
    known = np.maximum(np.searchsorted(np.array(axes.replicas), together, side="right") - 1, 0)
    held = [space.held(kind) for kind in kinds]
    at = [np.searchsorted(np.array(axes.tps[kind]), tps[:, number]) for number, kind in enumerate(kinds)]
    each = np.stack([space.per_layer(kind)[tp, b] for kind, tp in zip(kinds, at, strict=True)], axis=1)
    places = [((tp, b, known), stages[:, number]) for number, tp in enumerate(at)]
    share = np.minimum(-(-layers // (stages if apart else stages.sum(axis=1, keepdims=True))), layers)
    share = np.broadcast_to(share, stages.shape)
    over = [space.table(kind, apart and len(kinds) > 1, behind=True) for kind in kinds]
    ends = [table.least_end[tp, b, known, share[:, number]] for number, (table, tp) in enumerate(zip(over, at, strict=True))]
    if apart:
        level = np.stack([space.level([one], [place], layers) for one, place in zip(held, places, strict=True)], axis=1)
        bound = _apart_bound(layers * each, np.where(np.isfinite(level), level, HUGE), replicas, batch) + np.max(ends, axis=0)
    else:
        level = space.level(held, places, layers)
        hop = np.zeros(len(rows))
        for size in np.unique(micro) if axes.vpp == 1 else ():
            own = micro == size
            hop[own] = space.least_hop(kinds, int(size), together[own])
        level = np.maximum(np.where(np.isfinite(level), level, HUGE), hop)
        total = layers * each.min(axis=1) + 2.0 * hop * (len(kinds) - 1)
        bound = _together_bound(space, total, level, batch / together) + np.min(ends, axis=0)
    return np.where(bound < HUGE, bound, np.inf)
