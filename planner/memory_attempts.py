"""What could make layouts fit, priced: recompute, other splits of the layers, states and more on the host."""

from __future__ import annotations

import numpy as np

from planner.arrays import Floats, NDArray, unique
from planner.cost.price.deduplicate import distinct
from planner.cost.unique_stages import KEPT_FIELDS, kept_bytes
from planner.layout import Layout
from planner.priced_layouts import Priced, SearchedJob, host_holds, price, safe_memory
from planner.record import record
from planner.rules import Job, allowed
from planner.space import OFFLOADS, MemoryOption, Pins, stack

SPLITS = 512
"""Layouts with a pipeline whose layers are also split otherwise than evenly: the fastest of those near enough to fitting."""
SPLIT_TIME, SPLIT_LAYERS = 1.5, 2.5
"""How much an uneven split can gain: part of the time that the slowest stage of an even one takes beyond the mean, and layers
that the fullest stage hands on. A layout slower or larger than that beyond the best is left out."""
OFFLOAD_GAIN = 0.9
"""Optimizer states go to the host when nothing fits without, or when that brings the step time below this share; what gains
less is named with the best plan: it depends on host memory and PCIe, which few profiles have measured."""
HELD_BACK = 256
"""Layouts that could gain less than that with states on the host, tried from the fastest."""
ROUNDING = 1e-9
"""Part by which a bound may be above the room and still count as met."""
WAVE, WAVES = 2048, 4
"""Layouts that do not fit are tried with memory options from the fastest: so many, then so many times as many while the best plans
leave room for others."""


@record
class Tried:
    """Layouts of a job, the more the further they were changed to fit."""

    even: Priced
    """Without memory options, and with recompute."""
    found: Priced
    """These, and with other splits of the layers."""
    moved: Priced
    """With optimizer states on the host."""

    @property
    def any_fits(self) -> bool:
        """Something fits."""
        return bool(self.found.fits.any() or self.moved.fits.any())

    @property
    def offload_pays(self) -> bool:
        """States on the host are taken: nothing fits without, or it is much faster."""
        return len(self.moved) > 0 and (not self.found.fits.any() or self.moved.fastest < OFFLOAD_GAIN * self.found.fastest)

    split_up_to: tuple[float, float]
    """Step time of the slowest of the first, and of those with states on the host, that are split; infinite where layouts are too
    few to leave one out."""

    def reach(self, wanted: int) -> float:
        """Step time from which on no layout matters: it is slower than the last wanted plan, is not split, and does not make
        states on the host pay less than they do."""
        if self.offload_pays:
            bound = max(self.found.joined(self.moved).bound(wanted), self.moved.fastest / OFFLOAD_GAIN)
            return max(bound, min(SPLIT_TIME * bound, max(self.split_up_to)))
        bound = self.found.bound(wanted)  # states are moved of faster layouts than the best alone
        return max(bound, min(SPLIT_TIME * bound, self.split_up_to[0]))


def host_shares(job: Job, pins: Pins) -> tuple[int, ...]:
    """Percents of the optimizer states that may be tried in host memory."""
    return OFFLOADS if job.trainer.legal.offload_optimizer and "offload_optimizer" not in pins.values else ()


def attempts(
    job: SearchedJob, pins: Pins, plain: Priced, options: list[MemoryOption], wanted: int, only_fitting: bool
) -> Tried:
    """The layouts with every option that could make one fit and bring it among the ``wanted`` best.

    Those that do not fit are taken from the fastest on, in waves: no option makes one faster but an uneven split, which only the
    fastest get, so that nothing beyond the last wanted plan and these is tried (``Tried.reach``). What is too large whatever is
    tried follows only where nothing fits, for the closest attempts; ``only_fitting``: nothing given is.
    """
    rows = np.flatnonzero(~plain.fits & (plain.time < plain.bound(wanted)))
    hopeless = rows[:0]
    if not only_fitting and len(rows) > WAVE:  # fewer are tried at once
        small = memory_bounds(job, pins, plain.layout.take(rows))[1]
        rows, hopeless = rows[small], rows[~small]
    rows = rows[np.argsort(plain.time[rows], kind="stable")]
    even, done, needed = plain, 0, min(WAVE, len(rows))
    while True:
        even, done = even.joined(_with_options(job, plain, options, rows[done:needed])), needed
        tried = _split_and_moved(job, pins, even, wanted, closest=done == len(rows) and not len(hopeless))
        needed = int(np.searchsorted(plain.time[rows], tried.reach(wanted)))
        if needed <= done:
            break
        needed = min(needed, WAVES * done)
    if tried.any_fits or not len(hopeless):
        return tried
    even = even.joined(_with_options(job, plain, options, hopeless))
    return _split_and_moved(job, pins, even, wanted, closest=True)


def _with_options(job: SearchedJob, plain: Priced, options: list[MemoryOption], rows: NDArray[np.intp]) -> Priced:
    """Some layouts with each kind of recompute."""
    some = plain.layout.take(np.sort(rows))
    return price(job, stack([option.apply(some, job.model) for option in options]))


def _split_and_moved(job: SearchedJob, pins: Pins, even: Priced, wanted: int, *, closest: bool) -> Tried:
    near, split_up_to = _to_split(job, even, wanted)
    found = even.joined(price(job, splits(job, pins, near)[1]))
    moved = price(job, _offload(job, pins, even, found, wanted if closest else 0))
    near, moved_up_to = _to_split(job, moved, wanted)
    moved = moved.joined(price(job, splits(job, pins, near)[1]))
    return Tried(even=even, found=found, moved=moved, split_up_to=(split_up_to, moved_up_to))


def _to_split(job: Job, found: Priced, wanted: int) -> tuple[Layout, float]:
    """Layouts of which another split of the layers over the stages could be among the best, or fit; and the step time up to
    which they are taken, infinite where all are."""
    stages = np.broadcast_to(np.asarray(found.layout.pp, dtype=float), (len(found),))
    enough = found.peak * (1.0 - _handed_on(job, stages)) <= job.cluster.hardware.usable_memory
    rows = np.flatnonzero((stages > 1) & enough & (found.time < SPLIT_TIME * found.bound(wanted)))
    rows = rows[np.argsort(found.time[rows], kind="stable")][:SPLITS]
    return found.layout.take(rows), float(found.time[rows[-1]]) if len(rows) == SPLITS else np.inf


def memory_bounds(job: Job, pins: Pins, layout: Layout) -> tuple[Floats, NDArray[np.bool_]]:
    """Bytes that layouts need on the device whatever recompute, offload or other split of the layers is tried, and of which no such
    option is known not to fit, there or, with what is offloaded, on the host; 0 and all where parameters may live on the host."""
    if job.trainer.legal.offload_parameters or not len(layout):
        return np.zeros(len(layout)), np.ones(len(layout), dtype=bool)
    safe = safe_memory(job.cluster.hardware.usable_memory, job.trainer.stored.memory_error) * (1.0 + ROUNDING)
    found, rows = _kept(job, pins, layout)
    least = np.min([device for device, _ in found], axis=0)
    return least[rows], np.any([(device <= safe) & host_holds(job, host) for device, host in found], axis=0)[rows]


def _kept(job: Job, pins: Pins, layout: Layout) -> tuple[list[tuple[Floats, Floats]], NDArray[np.intp]]:
    """``kept_bytes`` of distinct layouts as they are and with each share of the states on the host, and the row of each layout."""
    some, rows = distinct(layout, KEPT_FIELDS)
    moved = [some, *(_offloaded(job, some, share, pins) for share in host_shares(job, pins))]
    if job.trainer.legal.offload_frozen_tables:
        moved = [one.replace(offload_activations=1) for one in moved]
    return [kept_bytes(job.workload, job.cluster, job.trainer, one) for one in moved], rows


def lean_peak(job: SearchedJob, pins: Pins, layouts: Layout, options: list[MemoryOption], wanted: int) -> float:
    """Bytes that the last wanted plan needs of some layouts with all recompute and optimizer states on the host; infinite where
    they are fewer plans."""
    lean = options[-1].apply(layouts, job.model) if options else layouts
    for share in host_shares(job, pins)[-1:]:
        lean = _offloaded(job, lean, share, pins)
    priced = price(job, lean)
    rows = priced.best(wanted)
    return float(priced.peak[rows[-1]]) if len(rows) == wanted else np.inf


def _handed_on(job: Job, stages: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of its memory that a stage may lose to others by another split of the layers, at most."""
    return np.where(stages > 1, np.minimum(SPLIT_LAYERS * stages / job.model.num_layers, 0.5), 0.0)


def _offload(job: Job, pins: Pins, even: Priced, found: Priced, closest: int) -> Layout:
    """Layouts with optimizer states on the host, where that could make one fit, and fast enough.

    A layout is not faster with offload than without, so only those below the wanted time that do not fit can be; of those that
    could gain little, the fastest. When nothing fits, the ``closest`` attempts are tried whatever they miss by.
    """
    shares = host_shares(job, pins)
    if not shares:
        return stack([])
    large = even.take(~even.fits & (even.time < found.fastest))
    rows = np.flatnonzero(large.without_states <= job.cluster.hardware.usable_memory)
    rows = rows[np.argsort(large.time[rows], kind="stable")]
    rows = rows[: max(int(np.sum(large.time[rows] < OFFLOAD_GAIN * found.fastest)), HELD_BACK)]
    if not len(rows) and not found.fits.any() and closest:
        moved = [_offloaded(job, large.layout, share, pins) for share in shares]
        rows = np.flatnonzero(np.any([allowed(job, one) for one in moved], axis=0))
        rows = rows[np.argsort(large.without_states[rows], kind="stable")][: 8 * closest]
    return stack([_offloaded(job, large.layout.take(rows), share, pins) for share in shares])


def _offloaded(job: Job, layout: Layout, share: int, pins: Pins) -> Layout:
    """Layouts with a share of the optimizer states on the host.

    The optimizer that can do that is the one that shards: where there is one replica, which shards nothing, it takes the
    lowest level of sharding unless the level is pinned.
    """
    lowest = min((level for level in job.trainer.legal.zero if level and "zero" not in pins.values), default=0)
    return _sharding_alone(layout.replace(offload_optimizer=share), lowest)


def on_host(job: Job, layout: Layout, options: dict[str, int], pins: Pins) -> Layout:
    """Layouts with what is the last resort; one replica, which shards nothing, takes the highest level of sharding."""
    highest = 0 if "zero" in pins.values else max(job.trainer.legal.zero)
    moved = layout.replace(**options)
    return _sharding_alone(moved, highest) if "offload_parameters" in options else moved


def _sharding_alone(layout: Layout, level: int) -> Layout:
    """One replica, for which every level means the same otherwise, at least at this level of sharding."""
    zero = np.asarray(layout.zero)
    alone = np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return layout.replace(zero=np.where(alone, np.maximum(zero, level), zero))


def splits(job: Job, pins: Pins, layouts: Layout) -> tuple[NDArray[np.intp], Layout]:
    """Every legal split of layers near an even one, after the row of its layout."""
    none = np.zeros(0, dtype=np.intp)
    if not job.trainer.legal.uneven_stages or {"first_stage_layers", "last_stage_layers"} & set(pins.values):
        return none, layouts.take(none)
    stages = np.broadcast_to(np.asarray(layouts.pp), (len(layouts),))
    near = {int(pp): _near_even(job.model.num_layers, int(pp)) for pp in unique(stages)}
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
