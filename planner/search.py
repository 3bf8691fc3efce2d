"""Search: every legal layout of a job, memory first; the best are refined on the timeline of the pipeline."""

from __future__ import annotations

import time as clock
from functools import cached_property
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, unique
from planner.cost.estimate import Estimate
from planner.cost.least_compute import LeastCompute, exposed_gpu_seconds
from planner.cost.refine import Walks
from planner.layout import Layout, Recompute
from planner.memory_attempts import attempts, host_shares, lean_peak, memory_bounds, on_host, splits
from planner.priced_layouts import PLAN_FIELDS, SAFE, SearchedJob, estimates_of, fits, price, price_legal
from planner.record import record
from planner.rules import Job, allowed, refusals
from planner.space import Pins, base_layouts, host_options, recompute_options, stack, usual_modules

FINALISTS = 2
"""Layouts that go to the timeline, for every one that is asked for; at least LEAST_FINALISTS, whatever is asked for, so
that the best plan does not depend on how many are shown."""
LEANEST = 256
"""Layouts that say how near to fitting a job can be brought, where nothing fits."""
LEAST_FINALISTS = 16


@record
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
    """The fastest legal layout if memory were no limit; with ``only_fitting`` of those that could be made to fit."""
    too_slow: float | None = None
    """Seconds that a step takes at the least, where that is more than was asked for: then nothing else was looked at."""
    last_peak: float = np.inf
    """Bytes that the last of the plans needs that an answer names, the runner-up included; infinite where there are not so many."""
    held_back: tuple[Layout, Estimate] | None = None
    """The fastest with optimizer states on the host, where it fits and is faster than the best, but not by a tenth."""
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


def search(
    job: Job, pins: Pins | None = None, top: int = 5, within: float = np.inf, only_fitting: bool = False
) -> Finding:
    """The ``top`` fastest layouts that fit, or those that miss by the least when none does.

    Every legal layout without memory options is priced. Recompute adds time and frees memory, so it is tried only on layouts that
    do not fit without it and are not already slower than the best that fit: this leaves out no layout that could be
    among the ``top``. Of layouts with a pipeline those nearest to being among the best are split unevenly over the stages as
    well. Offload of optimizer states enters when nothing fits without it or when it saves a tenth of the time; weights and
    activations on the host when nothing fits without them. The result is the optimum of the cost model over that space.

    ``within``: seconds that a step may take. Where no plan can be as fast, none is looked for.
    ``only_fitting``: where nothing fits the closest attempts do not matter, nor does what would be if memory were no limit:
    layouts that no option can make fit are not priced.
    """
    job, pins = SearchedJob.of(job), pins or Pins()
    space = _space(job, pins)
    if not only_fitting:
        return _search(job, pins, space.legal, top, within, only_fitting)
    legal = space.legal.take(_bounds(job, pins)[1])
    if len(space.legal) and not len(legal):
        return _none(space.size * (1 + len(recompute_options(job, pins))))
    return _search(job, pins, legal, top, within, only_fitting)


def closest(job: Job, pins: Pins | None, top: int, found: Finding) -> Finding:
    """What ``search`` finds where nothing fits, but for ``unlimited``; ``found``: the same with ``only_fitting``.

    Only layouts are priced that may need less than the last of the closest attempts, of which the leanest layouts with everything
    on the host, or ``found``, give as many.
    """
    job, pins = SearchedJob.of(job), pins or Pins()
    legal = _space(job, pins).legal
    least, searched = _bounds(job, pins)
    tried = False
    while not found.fit and np.any(~searched & (least <= found.last_peak)):
        limit = found.last_peak
        if not tried:
            leanest = legal.take(np.lexsort([np.asarray(legal.vpp), np.asarray(legal.micro_batch_size), least])[:LEANEST])
            limit = min(limit, lean_peak(job, pins, leanest, recompute_options(job, pins), _named(top)))
        searched = least <= limit
        found, tried = _search(job, pins, legal.take(searched), top, np.inf, False), True
    return found


def _wanted(top: int) -> int:
    """Plans of which the best are chosen."""
    return max(top * FINALISTS, LEAST_FINALISTS)


def _named(top: int) -> int:
    """Plans that an answer names: also the runner-up."""
    return max(top, 2)


def _search(job: SearchedJob, pins: Pins, legal: Layout, top: int, within: float, only_fitting: bool) -> Finding:
    """What a search finds among some of the legal layouts of its space."""
    started = clock.perf_counter()
    space, wanted, named = _space(job, pins), _wanted(top), _named(top)
    plain = price_legal(job, legal)
    if len(plain) and plain.least > within:
        return Finding(
            layouts=[], estimates=[], runner_up=None, fit=False, unlimited=None, too_slow=plain.least,
            searched=space.size, legal=len(plain), priced=len(plain), fitting=0, refused={},
            seconds=clock.perf_counter() - started,
        )  # fmt: skip
    options = recompute_options(job, pins)
    tried = attempts(job, pins, plain, options, wanted, only_fitting)
    found, offloaded = tried.found, tried.offload_pays
    free = [int(np.argmin(found.time))] if len(found) else []
    resorts = [] if tried.any_fits else host_options(job, pins)
    moved = tried.moved.joined(price(job, stack([on_host(job, tried.even.layout, one, pins) for one in resorts])))
    offloaded = offloaded or (len(moved) > 0 and not tried.any_fits)
    priced = len(found) + len(moved)
    held = [moved.layout.row(int(moved.best(1)[0]))] if not offloaded and moved.fastest < found.fastest else []
    found = found.joined(moved) if offloaded else found
    best = found.best(wanted)
    layouts = [found.layout.row(int(row)) for row in (*best, *free)]
    estimates = estimates_of(job, layouts)
    unlimited = (layouts.pop(), estimates.pop()) if layouts else None
    if found.fits.any():
        layouts, estimates = _refined(job, pins, layouts, estimates, named)
    return Finding(
        layouts=layouts[:top], estimates=estimates[:top], fit=bool(found.fits.any()), unlimited=unlimited,
        runner_up=(layouts[1], estimates[1]) if len(layouts) > 1 else None,
        searched=space.size * (1 + len(options)) * (1 + (len(host_shares(job, pins)) + len(resorts)) * offloaded),
        legal=priced, priced=priced, fitting=int(found.fits.sum()), seconds=clock.perf_counter() - started,
        refused={} if len(space.legal) else refusals(job, _base(job, pins)),
        held_back=(held[0], estimates_of(job, held)[0]) if held else None,
        last_peak=float(found.peak[best[named - 1]]) if len(best) >= named else np.inf,
    )  # fmt: skip


@record
class _Space:
    """The layouts of a job without memory options."""

    asked: tuple[Any, ...]
    """What they depend on: all of the job but its hardware, of which no rule asks."""
    size: int
    legal: Layout
    """Those that meet every rule."""

    @cached_property
    def compute(self) -> LeastCompute:
        """What computing them takes at the least."""
        workload, trainer, *_ = self.asked
        return LeastCompute(workload, trainer, self.legal)


_LAST: list[_Space] = []
"""That of the last job: one job on many kinds of hardware has one."""


def _space(job: Job, pins: Pins) -> _Space:
    """The space of a job; where only the hardware is another than in the last one, that."""
    asked = (job.workload, job.trainer, job.cluster.num_gpus, pins)
    for last in _LAST:
        if last.asked == asked:
            return last
    base = _base(job, pins)
    space = _Space(asked=asked, size=len(base), legal=base.take(allowed(job, base)) if len(base) else base)
    _LAST[:] = [space]
    return space


_BOUNDED: list[tuple[SearchedJob, Pins, tuple[Floats, NDArray[np.bool_]]]] = []
"""That of the last job: a bound, a search and the closest attempts ask for it in turn."""


def _bounds(job: SearchedJob, pins: Pins) -> tuple[Floats, NDArray[np.bool_]]:
    """``memory_bounds`` of the space of a job."""
    for last, pinned, found in _BOUNDED:
        if last is job and pinned == pins:
            return found
    found = memory_bounds(job, pins, _space(job, pins).legal)
    _BOUNDED[:] = [(job, pins, found)]
    return found


def _none(searched: int) -> Finding:
    """What a search finds where no layout can fit."""
    return Finding(
        layouts=[], estimates=[], runner_up=None, fit=False, unlimited=None, searched=searched, legal=0, priced=0, fitting=0,
        refused={}, seconds=0.0,
    )  # fmt: skip


def least_step(job: Job, pins: Pins | None = None) -> float:
    """Seconds of a step that no plan of a job undercuts, by its computation alone: found in a few hundredths of the time of a
    search. Infinite where no layout is legal."""
    gpu_seconds = _space(job, pins or Pins()).compute.gpu_seconds(job.cluster.hardware)
    return job.workload.tokens * gpu_seconds / job.cluster.num_gpus


def least_fitting_step(job: SearchedJob, pins: Pins | None = None) -> float:
    """The same of the layouts that may fit, with the communication that their passes wait for: closer, in a few tenths of the time
    of a search. Infinite where none may fit."""
    pins = pins or Pins()
    legal = _space(job, pins).legal
    gpu_seconds = exposed_gpu_seconds(job.workload, job.shapes, legal.take(_bounds(job, pins)[1]))
    return job.workload.tokens * gpu_seconds / job.cluster.num_gpus


def _base(job: Job, pins: Pins) -> Layout:
    """Every layout of a job without memory options but those that the user fixed."""
    return _pinned_options(base_layouts(job, pins), pins, job)


def _pinned_options(layout: Layout, pins: Pins, job: Job) -> Layout:
    """Memory options that the user fixed apply to every layout from the start."""
    fixed = {n: v for n, v in pins.values.items() if n.startswith(("recompute", "offload"))}
    if fixed.get("offload_activations") and not job.trainer.legal.offload_saved_tensors:
        fixed.setdefault("recompute", int(Recompute.FULL))
    if fixed.get("recompute") == Recompute.SELECTIVE and "recompute_modules" not in fixed:
        fixed["recompute_modules"] = usual_modules(job.trainer, job.model)
    return layout.replace(**fixed)


def _refined(
    job: SearchedJob, pins: Pins, layouts: list[Layout], estimates: list[Estimate], wanted: int
) -> tuple[list[Layout], list[Estimate]]:
    """The ``wanted`` fastest finalists with the best split of layers over the stages, on the timeline of the pipeline, best
    first; what cannot be among them is not walked."""
    variants = [(one, found) for one, found in zip(layouts, estimates, strict=True)]
    variants += [pair for pair in best_splits(job, pins, layouts) if pair[0] not in layouts]
    walks = Walks(
        job.workload, job.cluster, job.trainer, [one for one, _ in variants], [found for _, found in variants], job.shapes
    )
    keys = [plan_key(one) for one, _ in variants]
    least = [walks.least(row) for row in range(len(variants))]
    best: dict[tuple[int, ...], tuple[float, int, Estimate]] = {}
    for row in np.argsort(least, kind="stable").tolist():
        if len(best) >= wanted and least[row] > sorted(time for time, _, _ in best.values())[wanted - 1]:
            break
        found = walks.exact(row)
        one = (float(found.step_time[0]), row, found)
        best[keys[row]] = min(best.get(keys[row], one), one, key=lambda pair: pair[:2])
    ranked = sorted(best.items(), key=lambda pair: (pair[1][0], keys.index(pair[0])))[:wanted]
    return [variants[row][0] for _, (_, row, _) in ranked], [found for _, (_, _, found) in ranked]


def best_splits(job: Job, pins: Pins, layouts: list[Layout]) -> list[tuple[Layout, Estimate]]:
    """For each layout with a pipeline: the fastest split of layers near an even one that is legal and fits."""
    owner, candidates = splits(job, pins, Layout.stack(layouts))
    if not len(owner):
        return []
    found = SearchedJob.of(job).estimate(candidates)
    time = np.where(fits(job, found), found.step_time, np.inf)
    best = []
    for number in unique(owner):
        rows = np.flatnonzero(owner == number)
        row = int(rows[np.argmin(time[rows])])
        if np.isfinite(time[row]):
            best.append((candidates.row(row), found.row(row)))
    return best


def plan_key(layout: Layout) -> tuple[int, ...]:
    """What makes a plan a different one: all but vpp, layers of the end stages, schedule and the like."""
    return tuple(int(getattr(layout, name)) for name in PLAN_FIELDS)


__all__ = ["PLAN_FIELDS", "SAFE", "Finding", "Pins", "best_splits", "closest", "fits", "least_fitting_step", "least_step",
           "plan_key", "search"]
