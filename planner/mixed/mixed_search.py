"""Search over mixed layouts: sets and orders of kinds, degrees by kind, exact cuts and shares; with a certificate."""

from __future__ import annotations

import itertools
import math
import time as clock
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.parameters import total_parameters
from planner.cost.state_dtypes import frozen_element, stored_as
from planner.mixed.best_first import BestFirst
from planner.mixed.mixed_axes import MixedPins, axes_of
from planner.mixed.mixed_candidates import Found
from planner.mixed.mixed_columns import Columns, columns_of
from planner.mixed.mixed_estimate import MixedEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_space import Space
from planner.mixed.stage_tables import Axes
from planner.record import record
from planner.workload import PAGED

GAP = 0.02
"""Part of the step time by which what is not looked at could still be faster."""
FINALISTS = 12
"""Layouts that are priced exactly, stage by stage, for the one that is asked for."""
OFFLOAD = 100
"""Percent of the optimizer states that go to the host where nothing fits otherwise."""
Priced = tuple[MixedLayout, MixedEstimate]


@record
class MixedFinding:
    """What a search found."""

    best: list[Priced]
    """Best first; empty where nothing fits."""
    mixed: Priced | None
    """The best that uses several kinds; None where none of those that were cut fits."""
    without: dict[str, Priced]
    """Of every kind of the best where it uses three or more: the best plan without that kind."""
    found: tuple[MixedLayout, ...]
    """All layouts that use several kinds and were cut, best first in closed form: for who wants more of a plan than speed."""
    candidates: int
    """Degrees of all sets of kinds."""
    cut: int
    """Of them cut exactly, the most promising first."""
    gap: float
    """Part of the time in closed form by which a candidate that was not cut could be faster than the best at the most."""
    seconds: float = field(default=0.0, compare=False)
    """Processor seconds."""


def search_mixed(
    job: MixedJob, pins: MixedPins | None = None, top: int = 3, gap: float = GAP, progress: Callable[[str], None] = lambda _: None
) -> MixedFinding:
    """The fastest mixed layouts whose cards hold their stages.

    Candidates: for every set of kinds, pipelines that go through all of them (any order, tp and stages by kind), and pipelines of
    each kind alone that share the batch. They are cut exactly in the order of their lower bound, until no other can be better than
    the FINALISTS-th of those that were cut; the finalists are then priced stage by stage and walked.
    """
    started = clock.process_time()
    pins = pins or MixedPins()
    found = _Searched()
    if least_states(job) <= memory_of(job):
        found = _search(job, pins, top, gap, pins.offload_optimizer or 0, progress)
        host = pins.offload_optimizer is None and not job.workload.lora_rank and job.trainer.legal.offload_optimizer
        if not found.best and host:
            progress("optimizer states on the host")
            found = _search(job, pins, top, gap, OFFLOAD, progress)
    return MixedFinding(
        best=found.best[:top], mixed=found.mixed, without=found.without, found=found.found, candidates=found.candidates,
        cut=found.cut, gap=found.gap, seconds=clock.process_time() - started,
    )  # fmt: skip


@dataclass
class _Searched:
    """What one pass found."""

    best: list[Priced] = field(default_factory=list)
    mixed: Priced | None = None
    without: dict[str, Priced] = field(default_factory=dict)
    found: tuple[MixedLayout, ...] = ()
    candidates: int = 0
    cut: int = 0
    gap: float = 0.0


def _search(
    job: MixedJob, pins: MixedPins, top: int, gap: float, offload: int, progress: Callable[[str], None]
) -> _Searched:  # fmt: skip
    """The search with a given part of the optimizer states on the host."""
    spaces, kinds = spaces_of(job, axes_of(job, pins, offload)), job.kinds
    columns = list[tuple[Space, Columns]]()
    for some in (some for size in range(1, len(kinds) + 1) for some in itertools.combinations(kinds, size)):
        progress(" + ".join(some))
        for apart, space in itertools.product((False, True) if len(some) > 1 else (False,), spaces):
            if (rows := columns_of(space, some, apart)) is not None:
                columns.append((space, rows))
    queue = BestFirst(columns, max(FINALISTS, 4 * top))
    single = queue.run(lambda one: len(one.kinds) == 1, gap / 2.0)
    beaten = single.kept[0].seconds if single.kept else np.inf
    several = queue.run(lambda one: len(one.kinds) > 1, gap, beaten)
    kept = sorted([*several.kept, *single.kept], key=lambda one: one.seconds)[: queue.wanted]
    kept += [one for one in several.kept[:2] if one not in kept]
    best = priced_best(job, kept)
    mixed = next((pair for pair in best if len(kinds_of(pair[0])) > 1), None)
    without = dict[str, Priced]()
    used = kinds_of(mixed[0]) if mixed else set()
    for kind in used if len(used) > 2 else ():
        progress(f"without {kind}")
        left = queue.run(lambda one, kind=kind: kind not in one.kinds and used.issuperset(one.kinds), gap)  # type: ignore[misc]
        if rest := priced_best(job, left.kept[:1]):
            without[kind] = rest[0]
            best = sorted([*best, *rest], key=lambda pair: pair[1].step_time)
    mixed = next((pair for pair in best if len(kinds_of(pair[0])) > 1), None)
    bound = min(several.bound, single.bound)
    return _Searched(
        best=best, mixed=mixed, without=without, candidates=queue.candidates, cut=queue.cuts,
        found=tuple(one.layout for one in queue.found if len(kinds_of(one.layout)) > 1),
        gap=max(1.0 - bound / kept[0].seconds, 0.0) if kept else 0.0,
    )  # fmt: skip


def spaces_of(job: MixedJob, every: list[Axes]) -> list[Space]:
    """A space for each axes; those with virtual stages stand on the one without."""
    found = list[Space]()
    for axes in every:
        plain = replace(axes, schedule="1f1b", vpp=1)
        found.append(Space(job, axes, next((one for one in found if axes.vpp > 1 and one.axes == plain), None)))
    return found


def priced_best(job: MixedJob, kept: list[Found]) -> list[Priced]:
    """Found layouts priced stage by stage, and walked; those that fit, best first. Where the trainer averages gradients in two
    levels and that is faster, it does so."""
    found = list[Priced]()
    for one in kept:
        ways = [one.layout, *two_levels(job, one.layout)]
        every = [(way, estimate_mixed(job, way)) for way in ways]
        found += sorted((pair for pair in every if pair[1].fits), key=lambda pair: pair[1].step_time)[:1]
    return sorted(found, key=lambda pair: pair[1].step_time)


def two_levels(job: MixedJob, layout: MixedLayout) -> list[MixedLayout]:
    """The layout with states shared inside kinds alone, where kinds of several sites have replicas of their own: as many as divide
    all."""
    alike: Counter[str] = Counter()
    for one in layout.pipelines:
        if len({stage.kind for stage in one.stages}) > 1:
            return []
        alike[one.stages[0].kind] += one.count
    if len({job.cluster.node_kind(kind).site for kind in alike}) < 2 or not job.trainer.legal.hsdp:
        return []
    return [replace(layout, dp_shard=math.gcd(*alike.values()))]


def least_states(job: MixedJob) -> float:
    """Bytes of the model that no split makes fewer: one copy of all weights, and of the optimizer states where they are trained."""
    work = job.workload
    count = total_parameters(work.model)
    if work.lora_rank:
        return count * min(frozen_element(work), work.element)
    trainer = stored_as(work, job.trainer)
    return count * (trainer.stored.weight_bytes + trainer.states_of(work.optimizer) * (work.optimizer not in PAGED))


def memory_of(job: MixedJob) -> float:
    """Bytes of all GPUs that the driver reports as usable."""
    return sum(one.num_gpus * one.hardware.usable_memory for one in job.clusters.values())


def kinds_of(layout: MixedLayout) -> set[str]:
    """Kinds that a layout uses."""
    return {stage.kind for one in layout.pipelines for stage in one.stages}
