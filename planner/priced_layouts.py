"""Legal layouts with the columns that a search compares them by."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.cost.estimate import CHUNK, Estimate, estimate
from planner.cost.price.deduplicate import distinct
from planner.cost.price.layer_costs import ShapePrices
from planner.layout import FIELDS, Layout
from planner.record import record
from planner.rules import Job, allowed
from planner.space import stack

SAFE = 0.05
"""A layout fits when its chance of running out of memory is at most this; no other ranks above one that fits."""
REFINED = 0.9
"""Uneven splits and the timeline leave at least this share of the time of the fastest pipeline with even stages and one with
lighter ends (a test compares): without a pipeline there is nothing to split, and no plan is faster than the fastest layout."""
PIECE = CHUNK
"""Candidates priced at once."""
FEW = 64
"""Layouts looked at for each plan that is wanted, before all are."""
FINE = ("vpp", "first_stage_layers", "last_stage_layers", "recompute_layers", "cp_method", "dp_shard", "schedule")
"""Fields that do not make a different plan: of layouts that differ in these alone, the best is kept."""
PLAN_FIELDS = tuple(name for name in FIELDS if name not in FINE)
COMPARED = ("time", "peak", "without_states", "fits")


def fits(job: Job, found: Estimate) -> NDArray[np.bool_]:
    """Device memory runs out with a chance of at most SAFE, and the node's host memory holds what is offloaded."""
    return (found.out_of_memory_probability <= SAFE) & host_holds(job, found.host_memory)


def host_holds(job: Job, offloaded: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The host memory of a node holds so many bytes of each of its GPUs."""
    hardware = job.cluster.hardware
    return np.asarray(offloaded * min(hardware.gpus_per_node, job.cluster.num_gpus) <= hardware.host_memory)


def safe_memory(usable: float, error: float) -> float:
    """The most bytes that a plan may need to be safe: U exp(-sigma ln(1 / SAFE - 1) / 1.702)
    [Estimate.out_of_memory_probability, solved for the peak]"""
    return usable * float(np.exp(-error * np.log(1.0 / SAFE - 1.0) / 1.702))


@record
class SearchedJob(Job):
    """A job of which many batches of layouts are priced."""

    shapes: ShapePrices
    """Of layers, which most of these layouts share."""

    @classmethod
    def of(cls, job: Job) -> SearchedJob:
        """The job itself where it is one."""
        if isinstance(job, SearchedJob):
            return job
        shapes = ShapePrices(job.workload, job.cluster, job.trainer)
        return cls(workload=job.workload, cluster=job.cluster, trainer=job.trainer, shapes=shapes)

    def estimate(self, layout: Layout) -> Estimate:
        """Layouts priced."""
        return estimate(self.workload, self.cluster, self.trainer, layout, self.shapes)


@record
class Priced:
    """Legal layouts, and the columns that a search compares them by."""

    layout: Layout
    time: NDArray[np.float64]
    """Seconds of a step."""
    peak: NDArray[np.float64]
    """Bytes of memory."""
    without_states: NDArray[np.float64]
    """The same without any optimizer states."""
    fits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Priced:
        """Some of them."""
        return Priced(layout=self.layout.take(rows), **{name: getattr(self, name)[rows] for name in COMPARED})

    def joined(self, more: Priced) -> Priced:
        """These and others."""
        columns = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in COMPARED}
        return Priced(layout=stack([self.layout, more.layout]), **columns) if len(more) else self

    def best(self, wanted: int) -> NDArray[np.intp]:
        """Rows of the best plans, each with its best layout: by time of what fits, or by memory where nothing does."""
        value, rows = (self.time, np.flatnonzero(self.fits)) if self.fits.any() else (self.peak, np.arange(len(self)))
        rows = rows[np.argsort(value[rows], kind="stable")]
        for some in (rows[: FEW * wanted], rows):  # the first few hold enough plans, as a rule
            _, plan = distinct(self.layout.take(some), PLAN_FIELDS, few=0)
            _, first = np.unique(plan, return_index=True)
            if len(first) >= wanted:
                break
        return some[np.sort(first)[:wanted]]

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


def price(job: SearchedJob, layout: Layout) -> Priced:
    """The legal ones of some layouts, priced."""
    return price_legal(job, layout.take(allowed(job, layout)) if len(layout) else layout)


def price_legal(job: SearchedJob, legal: Layout) -> Priced:
    """Legal layouts, priced piece by piece."""
    columns: dict[str, list[Any]] = {name: [np.zeros(0, dtype=bool if name == "fits" else float)] for name in COMPARED}
    for start in range(0, len(legal), PIECE):
        found = job.estimate(legal.take(slice(start, start + PIECE)))
        needed, states = found.memory_needed, found.memory["optimizer_states"] * (1.0 + job.trainer.stored.fragmentation)
        for name, values in zip(COMPARED, (found.step_time, needed, needed - states, fits(job, found)), strict=True):
            columns[name].append(values)
    return Priced(layout=legal, **{name: np.concatenate(parts) for name, parts in columns.items()})


def estimates_of(job: SearchedJob, layouts: list[Layout]) -> list[Estimate]:
    """Estimates of some layouts, each alone."""
    if not layouts:
        return []
    found = job.estimate(Layout.stack(layouts))
    return [found.row(number) for number in range(len(layouts))]
