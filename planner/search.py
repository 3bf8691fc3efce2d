"""Search: every legal layout of a job, memory first; the best are refined on the timeline of the pipeline."""

from __future__ import annotations

import time as clock
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.cost.estimate import CHUNK, Estimate, estimate
from planner.cost.price.deduplicate import distinct
from planner.cost.refine import refine
from planner.layout import FIELDS, Layout, Recompute
from planner.rules import Job, allowed, refusals
from planner.space import OFFLOADS, MemoryOption, Pins, base_layouts, recompute_options, stack, usual_modules

SAFE = 0.05
"""A layout fits when its chance of running out of memory is at most this; no other ranks above one that fits."""
FINALISTS = 2
"""Layouts that go to the timeline, for every one that is asked for; at least LEAST_FINALISTS, whatever is asked for, so
that the best plan does not depend on how many are shown."""
LEAST_FINALISTS = 16
SPLITS = 512
"""Layouts with a pipeline whose layers are also split otherwise than evenly: the fastest of those near enough to fitting."""
SPLIT_TIME, SPLIT_LAYERS = 1.5, 2.5
"""How much an uneven split can gain: part of the time that the slowest stage of an even one takes beyond the mean, and layers
that the fullest stage hands on. A layout slower or larger than that beyond the best is left out."""
OFFLOAD_GAIN = 0.9
"""Optimizer states go to the host when nothing fits without, or when that brings the step time below this share."""
PIECE = CHUNK
"""Candidates priced between two looks at the bound."""
FINE = ("vpp", "first_stage_layers", "last_stage_layers", "recompute_layers", "cp_method", "dp_shard", "schedule")
"""Fields that do not make a different plan: of layouts that differ in these alone, the best is kept."""
PLAN_FIELDS = tuple(name for name in FIELDS if name not in FINE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a search found."""

    layouts: list[Layout]
    """The best layouts, best first: those that fit by step time, else the closest by memory."""
    estimates: list[Estimate]
    """Their estimates, columns of length 1."""
    runner_up: tuple[Layout, Estimate] | None
    """The second best plan, also when only one is asked for."""
    fit: bool
    """The layouts fit; False: none of the space does, and these miss by the least."""
    unlimited: tuple[Layout, Estimate] | None
    """The fastest legal layout if memory were no limit."""
    searched: int
    """Layouts of the space, memory options included."""
    legal: int
    """Of those looked at, how many meet every rule."""
    priced: int
    """Layouts priced. The others break a rule, or differ from a priced one only by memory options that cannot make it faster."""
    fitting: int
    """Priced layouts that fit."""
    refused: dict[str, int]
    """When nothing is legal: layouts without memory options that each rule refused."""
    seconds: float
    """Wall time."""


def fits(job: Job, found: Estimate) -> NDArray[np.bool_]:
    """Device memory runs out with a chance of at most SAFE, and the node's host memory holds what is offloaded."""
    hardware = job.cluster.hardware
    per_node = found.host_memory * min(hardware.gpus_per_node, job.cluster.num_gpus)
    return (found.out_of_memory_probability <= SAFE) & (per_node <= hardware.host_memory)


def search(job: Job, pins: Pins | None = None, top: int = 5) -> Finding:
    """The ``top`` fastest layouts that fit, or those that miss by the least when none does.

    Every legal layout without memory options is priced. Recompute adds time and frees memory, so it is tried only on layouts that
    do not fit without it and are not already slower than the best that fit: this leaves out no layout that could be
    among the ``top``. Of layouts with a pipeline those nearest to being among the best are split unevenly over the stages as
    well. Offload is the last resort: it enters when nothing fits without it or when it saves a tenth of the time. The
    result is the optimum of the cost model over that space.
    """
    started = clock.perf_counter()
    pins = pins or Pins()
    run = _Run(job=job, wanted=max(top * FINALISTS, LEAST_FINALISTS))
    base = _pinned_options(base_layouts(job, pins), pins, job)
    plain = base.take(allowed(job, base))
    refused = {} if len(plain) else refusals(job, base)
    options = recompute_options(job, pins)
    shares = OFFLOADS if job.trainer.legal.offload_optimizer and "offload_optimizer" not in pins.values else ()
    left = _with_recompute(run, plain, options)
    _with_splits(run, pins)
    offloaded = len(plain) > 0 and _with_offload(run, left, shares, pins)
    layouts, estimates = run.best()
    if run.fitting:
        layouts, estimates = _refined(job, pins, layouts, estimates)
    return Finding(
        layouts=layouts[:top], estimates=estimates[:top], fit=run.fitting > 0, unlimited=run.unlimited,
        runner_up=(layouts[1], estimates[1]) if len(layouts) > 1 else None,
        searched=len(base) * (1 + len(options)) * (1 + len(shares) * offloaded), legal=run.legal,
        priced=run.priced, fitting=run.fitting, refused=refused, seconds=clock.perf_counter() - started,
    )  # fmt: skip


def _pinned_options(layout: Layout, pins: Pins, job: Job) -> Layout:
    """Memory options that the user fixed apply to every layout from the start."""
    fixed = {n: v for n, v in pins.values.items() if n.startswith("recompute") or n == "offload_optimizer"}
    if fixed.get("recompute") == Recompute.SELECTIVE and "recompute_modules" not in fixed:
        fixed["recompute_modules"] = usual_modules(job.trainer, job.model)
    return layout.replace(**fixed)


def _with_recompute(run: _Run, plain: Layout, options: list[MemoryOption]) -> _Open:
    """Prices layouts without memory options, and recompute on those that it could bring among the best; what does not fit."""
    left = run.price(plain)
    if not options or not len(left.layout):
        return left
    recomputed = stack([option.apply(left.layout, run.job.model) for option in options])
    more = run.price(recomputed.take(allowed(run.job, recomputed)))
    return _Open(
        layout=stack([left.layout, more.layout]),
        without_states=np.concatenate([left.without_states, more.without_states]),
        time=np.concatenate([left.time, more.time]),
    )


def _with_splits(run: _Run, pins: Pins) -> None:
    """Prices other splits of the layers over the stages where one could bring a layout among the best, or make it fit."""
    splits = _splits(run.job, pins, run.uneven())
    if splits is not None:
        run.price(splits[1])


def _with_offload(run: _Run, left: _Open, shares: tuple[int, ...], pins: Pins) -> bool:
    """Moves optimizer states to the host where that could make a layout fit, and fast enough; True when it is used.

    A layout is not faster with offload than without, so only those open ones below the wanted time can be. When nothing
    fits, the closest attempts are tried whatever they miss by.
    """
    if not shares:
        return False
    free_zero = "zero" not in pins.values
    enough = OFFLOAD_GAIN * run.fastest
    rows = np.flatnonzero((left.without_states <= run.job.cluster.hardware.usable_memory) & (left.time < enough))
    if not len(rows) and not run.fitting:
        legal = np.any(
            [allowed(run.job, _offloaded(run.job, left.layout, share, free_zero)) for share in shares], axis=0
        )
        rows = np.flatnonzero(legal)
        rows = rows[np.argsort(left.without_states[rows], kind="stable")][: 8 * run.wanted]
    if not len(rows):
        return False
    trial = _Run(job=run.job, wanted=run.wanted)
    moved = stack([_offloaded(run.job, left.layout.take(rows), share, free_zero) for share in shares])
    trial.price(moved.take(allowed(run.job, moved)))
    _with_splits(trial, pins)
    used = not run.fitting or trial.fastest < enough
    run.absorb(trial, used)
    return used


def _offloaded(job: Job, layout: Layout, share: int, free_zero: bool) -> Layout:
    """Layouts with a share of the optimizer states on the host.

    The optimizer that can do that is the one that shards: where there is one replica, which shards nothing, it takes the
    lowest level of sharding unless the level is pinned.
    """
    lowest = min((level for level in job.trainer.legal.zero if level and free_zero), default=0)
    zero = np.asarray(layout.zero)
    alone = (zero == 0) & (np.asarray(layout.dp) * np.asarray(layout.cp) == 1)
    return layout.replace(offload_optimizer=share, zero=np.where(alone, lowest, zero))


def _refined(
    job: Job, pins: Pins, layouts: list[Layout], estimates: list[Estimate]
) -> tuple[list[Layout], list[Estimate]]:
    """Finalists with the best split of layers over the stages, on the timeline of the pipeline, best first."""
    variants = [(one, found) for one, found in zip(layouts, estimates, strict=True)]
    variants += [pair for pair in best_splits(job, pins, layouts) if pair[0] not in layouts]
    refined = refine(
        job.workload, job.cluster, job.trainer, [one for one, _ in variants], [found for _, found in variants]
    )
    best: dict[tuple[int, ...], tuple[Layout, Estimate]] = {}
    for (one, _), found in zip(variants, refined, strict=True):
        key = plan_key(one)
        if key not in best or found.step_time[0] < best[key][1].step_time[0]:
            best[key] = (one, found)
    ranked = sorted(best.values(), key=lambda pair: float(pair[1].step_time[0]))
    return [one for one, _ in ranked], [found for _, found in ranked]


def best_splits(job: Job, pins: Pins, layouts: list[Layout]) -> list[tuple[Layout, Estimate]]:
    """For each layout with a pipeline: the fastest split of layers near an even one that is legal and fits."""
    splits = _splits(job, pins, Layout.stack(layouts))
    if splits is None:
        return []
    owner, candidates = splits
    found = estimate(job.workload, job.cluster, job.trainer, candidates)
    time = np.where(fits(job, found), found.step_time, np.inf)
    best = []
    for number in np.unique(owner):
        rows = np.flatnonzero(owner == number)
        row = int(rows[np.argmin(time[rows])])
        if np.isfinite(time[row]):
            best.append((candidates.row(row), found.row(row)))
    return best


def _splits(job: Job, pins: Pins, layouts: Layout) -> tuple[NDArray[np.intp], Layout] | None:
    """Every legal split of layers near an even one, with the row of its layout; None where there is none."""
    if not job.trainer.legal.uneven_stages or {"first_stage_layers", "last_stage_layers"} & set(pins.values):
        return None
    stages = np.broadcast_to(np.asarray(layouts.pp), (len(layouts),))
    near = {int(pp): _near_even(job.model.num_layers, int(pp)) for pp in np.unique(stages)}
    rows = [(owner, *split) for owner, pp in enumerate(stages) for split in near[int(pp)]]
    if not rows:
        return None
    owner, first, last = (np.array(side, dtype=np.int64) for side in zip(*rows, strict=True))
    middle = (job.model.num_layers - first - last) // np.maximum(stages[owner] - 2, 1)
    smallest = np.where(stages[owner] > 2, np.minimum(np.minimum(first, last), middle), np.minimum(first, last))
    candidates = layouts.take(owner)
    asked = np.asarray(candidates.recompute_layers)
    recomputed = np.minimum(asked, smallest)  # no stage repeats more layers than it has; 0 = all stays
    candidates = candidates.replace(first_stage_layers=first, last_stage_layers=last, recompute_layers=recomputed)
    mask = allowed(job, candidates)
    if "recompute_layers" in pins.values:
        mask &= recomputed == asked
    return (owner[mask], candidates.take(mask)) if np.any(mask) else None


def _near_even(total: int, pp: int) -> list[tuple[int, int]]:
    """Layers of the first and the last stage, where the stages between have the rounded-up share or one more."""
    if pp < 2:
        return []
    ends = {total - middle * (pp - 2) for middle in (-(-total // pp), -(-(total + 2) // pp))}
    return [
        (both - last, last) for both in ends for last in range(max(1, both // 2 - 2), both // 2 + 2) if both - last >= 1
    ]


def plan_key(layout: Layout) -> tuple[int, ...]:
    """What makes a plan a different one: all but vpp, layers of the end stages, schedule and the like."""
    return tuple(int(getattr(layout, name)) for name in PLAN_FIELDS)


class _Run:
    """Counts what a search prices and keeps the best of it."""

    def __init__(self, *, job: Job, wanted: int) -> None:
        self.job, self.wanted = job, wanted
        self.legal = self.priced = self.fitting = 0
        self.unlimited: tuple[Layout, Estimate] | None = None
        self._fast: dict[tuple[int, ...], tuple[float, Layout, Estimate]] = {}
        self._close: dict[tuple[int, ...], tuple[float, Layout, Estimate]] = {}
        self._uneven: list[tuple[Layout, NDArray[np.float64]]] = []
        self.bound = np.inf
        """Step time of the last wanted plan that fits: nothing slower can be among the best."""

    def price(self, layout: Layout) -> _Open:
        """Price legal candidates piece by piece; what does not fit and is not too slow already."""
        self.legal += len(layout)
        self.priced += len(layout)
        parts = []
        for start in range(0, len(layout), PIECE):
            piece = layout.take(slice(start, start + PIECE))
            found = estimate(self.job.workload, self.job.cluster, self.job.trainer, piece)
            parts.append(self._keep(piece, found))
        if not parts:
            return _Open(layout=layout, without_states=np.zeros(0), time=np.zeros(0))
        safe, time, without_states = (np.concatenate(values) for values in zip(*parts, strict=True))
        rows = ~safe.astype(bool) & (time < self.bound)
        return _Open(layout=layout.take(rows), without_states=without_states[rows], time=time[rows])

    def _keep(self, piece: Layout, found: Estimate) -> tuple[NDArray[Any], ...]:
        safe, time, peak = fits(self.job, found), found.step_time, found.memory_needed
        self.fitting += int(safe.sum())
        fastest = int(np.argmin(time))
        if self.unlimited is None or time[fastest] < self.unlimited[1].step_time[0]:
            self.unlimited = piece.row(fastest), found.row(fastest)
        self._keep_uneven(piece, time, peak)
        rows = np.flatnonzero(safe & (time < self.bound))
        if len(rows):
            self._fast = self._merge(self._fast, piece, found, rows, time)
            if len(self._fast) >= self.wanted:
                self.bound = max(one[0] for one in self._fast.values())
        elif not self._fast:
            self._close = self._merge(self._close, piece, found, np.arange(len(peak)), peak)
        return safe, time, peak - found.memory["optimizer_states"] * (1.0 + self.job.trainer.stored.fragmentation)

    def _keep_uneven(self, piece: Layout, time: NDArray[np.float64], peak: NDArray[np.float64]) -> None:
        """Remember what another split of the layers over the stages could bring among the best: SPLITS layouts at most."""
        stages = np.asarray(piece.pp, dtype=float)
        handed_on = np.minimum(SPLIT_LAYERS * stages / self.job.model.num_layers, 0.5)
        enough = peak * (1.0 - handed_on) <= self.job.cluster.hardware.usable_memory
        rows = np.flatnonzero((stages > 1) & enough & (time < SPLIT_TIME * self.bound))
        rows = rows[np.argsort(time[rows], kind="stable")][:SPLITS]
        if len(rows):
            self._uneven.append((piece.take(rows), time[rows]))

    def uneven(self) -> Layout:
        """The fastest of those layouts."""
        if not self._uneven:
            return Layout.stack([])
        layout = stack([one for one, _ in self._uneven])
        time = np.concatenate([times for _, times in self._uneven])
        return layout.take(np.argsort(time, kind="stable")[:SPLITS])

    def _merge(
        self, kept: dict[tuple[int, ...], tuple[float, Layout, Estimate]], piece: Layout, found: Estimate,
        rows: NDArray[np.intp], value: NDArray[np.float64],
    ) -> dict[tuple[int, ...], tuple[float, Layout, Estimate]]:  # fmt: skip
        """The ``wanted`` plans of least value among those kept and some rows, one for each key."""
        merged = dict(kept)
        ordered = rows[np.argsort(value[rows], kind="stable")]
        _, plan = distinct(piece.take(ordered), PLAN_FIELDS, few=0)
        _, first = np.unique(plan, return_index=True)  # the best row of each plan, as rows are in order of value
        for row in ordered[np.sort(first)[: self.wanted]]:
            one = piece.row(int(row))
            key = plan_key(one)
            if key not in merged or value[row] < merged[key][0]:
                merged[key] = (float(value[row]), one, found.row(int(row)))
        return dict(sorted(merged.items(), key=lambda item: item[1][0])[: self.wanted])

    @property
    def fastest(self) -> float:
        """Step time of the best layout that fits; infinite without one."""
        return min((time for time, _, _ in self._fast.values()), default=np.inf)

    def absorb(self, other: _Run, used: bool) -> None:
        """Count what another run priced, and keep what it found when that is ``used``."""
        self.legal, self.priced = self.legal + other.legal, self.priced + other.priced
        if not used:
            return
        self.fitting += other.fitting
        for mine, theirs in ((self._fast, other._fast), (self._close, other._close)):
            both = sorted({**mine, **theirs}.items(), key=lambda item: item[1][0])[: self.wanted]
            mine.clear()
            mine.update(both)

    def best(self) -> tuple[list[Layout], list[Estimate]]:
        """What fits, fastest first; or the closest, least memory first."""
        chosen = self._fast or self._close
        return [one for _, one, _ in chosen.values()], [found for _, _, found in chosen.values()]


@dataclass(frozen=True, kw_only=True)
class _Open:
    """Candidates that do not fit, their peak memory without any optimizer states, and their step times."""

    layout: Layout
    without_states: NDArray[np.float64]
    time: NDArray[np.float64]


__all__ = ["SAFE", "Finding", "Pins", "best_splits", "fits", "plan_key", "search"]
