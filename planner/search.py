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
from planner.space import (
    OFFLOADS,
    Pins,
    base_layouts,
    host_options,
    recompute_options,
    stack,
    usual_modules,
)

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
REFINED = 0.9
"""Uneven splits and the timeline leave at least this share of the time of the fastest pipeline with even stages and one with
lighter ends (a test compares): without a pipeline there is nothing to split, and no plan is faster than the fastest layout."""
OFFLOAD_GAIN = 0.9
"""Optimizer states go to the host when nothing fits without, or when that brings the step time below this share; what gains
less is named with the best plan: it depends on host memory and PCIe, which few profiles have measured."""
HELD_BACK = 256
"""Layouts that could gain less than that with states on the host, tried from the fastest."""
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
    too_slow: float | None = None
    """Seconds that a step takes at the least, where that is more than was asked for: then nothing else was looked at."""
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


def fits(job: Job, found: Estimate) -> NDArray[np.bool_]:
    """Device memory runs out with a chance of at most SAFE, and the node's host memory holds what is offloaded."""
    hardware = job.cluster.hardware
    per_node = found.host_memory * min(hardware.gpus_per_node, job.cluster.num_gpus)
    return (found.out_of_memory_probability <= SAFE) & (per_node <= hardware.host_memory)


def search(
    job: Job, pins: Pins | None = None, top: int = 5, within: float = np.inf, only_fitting: bool = False
) -> Finding:
    """The ``top`` fastest layouts that fit, or those that miss by the least when none does.

    Every legal layout without memory options is priced. Recompute adds time and frees memory, so it is tried only on layouts that
    do not fit without it and are not already slower than the best that fit: this leaves out no layout that could be
    among the ``top``. Of layouts with a pipeline those nearest to being among the best are split unevenly over the stages as
    well. Offload of optimizer states enters when nothing fits without it or when it saves a tenth of the time; weights and
    activations on the host when nothing fits without them. The result is the optimum of the cost model over that space.

    ``within``: seconds that a step may take. Where no plan can be as fast, whatever its memory, none is looked for.
    ``only_fitting``: where nothing fits the closest attempts do not matter, and layouts whose weights and gradients alone are too
    large are not priced with every kind of recompute.
    """
    started = clock.perf_counter()
    pins, wanted = pins or Pins(), max(top * FINALISTS, LEAST_FINALISTS)
    base = _pinned_options(base_layouts(job, pins), pins, job)
    plain = _price(job, base)
    if len(plain) and plain.least > within:
        return Finding(
            layouts=[], estimates=[], runner_up=None, fit=False, unlimited=None, too_slow=plain.least,
            searched=len(base), legal=len(plain), priced=len(plain), fitting=0, refused={}, seconds=clock.perf_counter() - started,
        )  # fmt: skip
    rows, options = ~plain.fits & (plain.time < plain.bound(wanted)), recompute_options(job, pins)
    slow = plain.take(rows & _may_fit(job, plain) if only_fitting else rows).layout
    even = plain.joined(_price(job, stack([option.apply(slow, job.model) for option in options])))
    found = even.joined(_price_splits(job, pins, even, wanted))
    free = [int(np.argmin(found.time))] if len(found) else []
    shares = OFFLOADS if job.trainer.legal.offload_optimizer and "offload_optimizer" not in pins.values else ()
    moved = _price(job, _offload(job, pins, even, found, wanted) if shares else stack([]))
    moved = moved.joined(_price_splits(job, pins, moved, wanted))
    resorts = [] if found.fits.any() or moved.fits.any() else host_options(job, pins)
    moved = moved.joined(_price(job, stack([_on_host(job, even.layout, one, pins) for one in resorts])))
    priced = len(found) + len(moved)
    offloaded = len(moved) > 0 and (not found.fits.any() or moved.fastest < OFFLOAD_GAIN * found.fastest)
    held = [moved.layout.row(int(moved.best(1)[0]))] if not offloaded and moved.fastest < found.fastest else []
    found = found.joined(moved) if offloaded else found
    layouts = [found.layout.row(int(row)) for row in (*found.best(wanted), *free)]
    estimates = _estimates(job, layouts)
    unlimited = (layouts.pop(), estimates.pop()) if layouts else None
    if found.fits.any():
        layouts, estimates = _refined(job, pins, layouts, estimates)
    return Finding(
        layouts=layouts[:top], estimates=estimates[:top], fit=bool(found.fits.any()), unlimited=unlimited,
        runner_up=(layouts[1], estimates[1]) if len(layouts) > 1 else None,
        searched=len(base) * (1 + len(options)) * (1 + (len(shares) + len(resorts)) * offloaded), legal=priced, priced=priced,
        fitting=int(found.fits.sum()), refused={} if len(plain) else refusals(job, base),
        seconds=clock.perf_counter() - started,
        held_back=(held[0], _estimates(job, held)[0]) if held else None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """Legal layouts, and the columns that a search compares them by."""

    layout: Layout
    time: NDArray[np.float64]
    """Seconds of a step."""
    peak: NDArray[np.float64]
    """Bytes of memory."""
    without_states: NDArray[np.float64]
    """The same without any optimizer states."""
    weights_and_gradients: NDArray[np.float64]
    fits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> _Priced:
        """Some of them."""
        return _Priced(layout=self.layout.take(rows), **{name: getattr(self, name)[rows] for name in COMPARED})

    def joined(self, more: _Priced) -> _Priced:
        """These and others."""
        columns = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in COMPARED}
        return _Priced(layout=stack([self.layout, more.layout]), **columns) if len(more) else self

    def best(self, wanted: int) -> NDArray[np.intp]:
        """Rows of the best plans, each with its best layout: by time of what fits, or by memory where nothing does."""
        value, rows = (self.time, np.flatnonzero(self.fits)) if self.fits.any() else (self.peak, np.arange(len(self)))
        rows = rows[np.argsort(value[rows], kind="stable")]
        _, plan = distinct(self.layout.take(rows), PLAN_FIELDS, few=0)
        _, first = np.unique(plan, return_index=True)
        return rows[np.sort(first)[:wanted]]

    def bound(self, wanted: int) -> float:
        """Step time of the last wanted plan that fits: nothing slower can be among the best."""
        rows = self.best(wanted)
        return float(self.time[rows[-1]]) if self.fits.any() and len(rows) == wanted else np.inf

    @property
    def fastest(self) -> float:
        """Step time of the best layout that fits; infinite without one."""
        return float(np.min(self.time[self.fits], initial=np.inf))

    @property
    def least(self) -> float:
        """Step time below which no plan of these layouts is, whatever is split, recomputed or moved."""
        return float(np.min(self.time * np.where(np.asarray(self.layout.pp) > 1, REFINED, 1.0), initial=np.inf))


COMPARED = ("time", "peak", "without_states", "weights_and_gradients", "fits")


def _price(job: Job, layout: Layout) -> _Priced:
    """The legal ones of some layouts, priced piece by piece."""
    legal = layout.take(allowed(job, layout)) if len(layout) else layout
    columns: dict[str, list[Any]] = {name: [np.zeros(0, dtype=bool if name == "fits" else float)] for name in COMPARED}
    for start in range(0, len(legal), PIECE):
        found = estimate(job.workload, job.cluster, job.trainer, legal.take(slice(start, start + PIECE)))
        states = found.memory["optimizer_states"] * (1.0 + job.trainer.stored.fragmentation)
        needed, stay = found.memory_needed, found.memory["weights"] + found.memory["gradients"]
        for name, values in zip(COMPARED, (found.step_time, needed, needed - states, stay, fits(job, found)), strict=True):
            columns[name].append(values)
    return _Priced(layout=legal, **{name: np.concatenate(parts) for name, parts in columns.items()})


def _estimates(job: Job, layouts: list[Layout]) -> list[Estimate]:
    """Estimates of some layouts, each alone."""
    if not layouts:
        return []
    found = estimate(job.workload, job.cluster, job.trainer, Layout.stack(layouts))
    return [found.row(number) for number in range(len(layouts))]


def _pinned_options(layout: Layout, pins: Pins, job: Job) -> Layout:
    """Memory options that the user fixed apply to every layout from the start."""
    fixed = {n: v for n, v in pins.values.items() if n.startswith(("recompute", "offload"))}
    if fixed.get("offload_activations") and not job.trainer.legal.offload_saved_tensors:
        fixed.setdefault("recompute", int(Recompute.FULL))
    if fixed.get("recompute") == Recompute.SELECTIVE and "recompute_modules" not in fixed:
        fixed["recompute_modules"] = usual_modules(job.trainer, job.model)
    return layout.replace(**fixed)


def _price_splits(job: Job, pins: Pins, found: _Priced, wanted: int) -> _Priced:
    """Other splits of the layers over the stages, where one could bring a layout among the best, or make it fit."""
    stages = np.broadcast_to(np.asarray(found.layout.pp, dtype=float), (len(found),))
    enough = found.peak * (1.0 - _handed_on(job, stages)) <= job.cluster.hardware.usable_memory
    rows = np.flatnonzero((stages > 1) & enough & (found.time < SPLIT_TIME * found.bound(wanted)))
    rows = rows[np.argsort(found.time[rows], kind="stable")][:SPLITS]
    return _price(job, _splits(job, pins, found.layout.take(rows))[1])


def _may_fit(job: Job, found: _Priced) -> NDArray[np.bool_]:
    """Whether some recompute, offload or other split of the layers could make layouts fit: all but weights and gradients may go,
    and these too where parameters may live on the host."""
    stages = np.broadcast_to(np.asarray(found.layout.pp, dtype=float), (len(found),))
    least = found.weights_and_gradients * (1.0 - _handed_on(job, stages))
    return (least <= job.cluster.hardware.usable_memory) | job.trainer.legal.offload_parameters


def _handed_on(job: Job, stages: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of its memory that a stage may lose to others by another split of the layers, at most."""
    return np.where(stages > 1, np.minimum(SPLIT_LAYERS * stages / job.model.num_layers, 0.5), 0.0)


def _offload(job: Job, pins: Pins, even: _Priced, found: _Priced, wanted: int) -> Layout:
    """Layouts with optimizer states on the host, where that could make one fit, and fast enough.

    A layout is not faster with offload than without, so only those below the wanted time that do not fit can be; of those that
    could gain little, the fastest. When nothing fits, the closest attempts are tried whatever they miss by.
    """
    large = even.take(~even.fits & (even.time < found.fastest))
    rows = np.flatnonzero(large.without_states <= job.cluster.hardware.usable_memory)
    rows = rows[np.argsort(large.time[rows], kind="stable")]
    rows = rows[: max(int(np.sum(large.time[rows] < OFFLOAD_GAIN * found.fastest)), HELD_BACK)]
    if not len(rows) and not found.fits.any():
        moved = [_offloaded(job, large.layout, share, pins) for share in OFFLOADS]
        rows = np.flatnonzero(np.any([allowed(job, one) for one in moved], axis=0))
        rows = rows[np.argsort(large.without_states[rows], kind="stable")][: 8 * wanted]
    return stack([_offloaded(job, large.layout.take(rows), share, pins) for share in OFFLOADS])


def _offloaded(job: Job, layout: Layout, share: int, pins: Pins) -> Layout:
    """Layouts with a share of the optimizer states on the host.

    The optimizer that can do that is the one that shards: where there is one replica, which shards nothing, it takes the
    lowest level of sharding unless the level is pinned.
    """
    lowest = min((level for level in job.trainer.legal.zero if level and "zero" not in pins.values), default=0)
    return _sharding_alone(layout.replace(offload_optimizer=share), lowest)


def _on_host(job: Job, layout: Layout, options: dict[str, int], pins: Pins) -> Layout:
    """Layouts with what is the last resort; one replica, which shards nothing, takes the highest level of sharding."""
    highest = 0 if "zero" in pins.values else max(job.trainer.legal.zero)
    moved = layout.replace(**options)
    return _sharding_alone(moved, highest) if "offload_parameters" in options else moved


def _sharding_alone(layout: Layout, level: int) -> Layout:
    """One replica, for which every level means the same otherwise, at least at this level of sharding."""
    zero = np.asarray(layout.zero)
    alone = np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return layout.replace(zero=np.where(alone, np.maximum(zero, level), zero))


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
    owner, candidates = _splits(job, pins, Layout.stack(layouts))
    if not len(owner):
        return []
    found = estimate(job.workload, job.cluster, job.trainer, candidates)
    time = np.where(fits(job, found), found.step_time, np.inf)
    best = []
    for number in np.unique(owner):
        rows = np.flatnonzero(owner == number)
        row = int(rows[np.argmin(time[rows])])
        if np.isfinite(time[row]):
            best.append((candidates.row(row), found.row(row)))
    return best


def _splits(job: Job, pins: Pins, layouts: Layout) -> tuple[NDArray[np.intp], Layout]:
    """Every legal split of layers near an even one, after the row of its layout."""
    none = np.zeros(0, dtype=np.intp)
    if not job.trainer.legal.uneven_stages or {"first_stage_layers", "last_stage_layers"} & set(pins.values):
        return none, layouts.take(none)
    stages = np.broadcast_to(np.asarray(layouts.pp), (len(layouts),))
    near = {int(pp): _near_even(job.model.num_layers, int(pp)) for pp in np.unique(stages)}
    rows = [(owner, *split) for owner, pp in enumerate(stages) for split in near[int(pp)]]
    if not rows:
        return none, layouts.take(none)
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
    return owner[mask], candidates.take(mask)


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


__all__ = ["SAFE", "Finding", "Pins", "best_splits", "fits", "plan_key", "search"]
