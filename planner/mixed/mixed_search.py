"""Search over mixed layouts: sets and orders of kinds, degrees by kind, exact cuts and shares; with a certificate."""

from __future__ import annotations

import itertools
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.cost.parameters import total_parameters
from planner.cost.state_dtypes import frozen_element, stored_as
from planner.errors import PlannerError
from planner.mixed.mixed_candidates import Columns, Found, Space, columns_of, layouts_of
from planner.mixed.mixed_estimate import MixedEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.stage_tables import Axes
from planner.rules import divisors
from planner.search import SAFE
from planner.space import MICRO_BATCHES
from planner.workload import PAGED

LARGEST_TP = 64
CUTS = 1500
"""Candidates that are cut exactly, at most; what is left out then is said with its bound."""
GAP = 0.02
"""Part of the step time by which what is not looked at could still be faster."""
EACH = 6
"""Candidates of every set of kinds that are cut first."""
FEW = 100
"""The same of those that use several kinds and cannot be faster than one kind alone."""
FINALISTS = 12
"""Layouts that are priced exactly, stage by stage, for the one that is asked for."""


@dataclass(frozen=True, kw_only=True)
class MixedPins:
    """What the user fixed; None = searched."""

    tp: int | None = None
    """Of every kind."""
    micro_batch_size: int | None = None
    recompute: str | None = None
    zero: int | None = None
    schedule: str | None = None
    cp: int = 1
    ep: int | None = None


@dataclass(frozen=True, kw_only=True)
class MixedFinding:
    """What a search found."""

    best: list[tuple[MixedLayout, MixedEstimate]]
    """Best first; empty where nothing fits."""
    mixed: tuple[MixedLayout, MixedEstimate] | None
    """The best that uses several kinds; None where none of those that were cut fits."""
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
    if least_states(job) > memory_of(job):
        return MixedFinding(best=[], mixed=None, candidates=0, cut=0, gap=0.0, seconds=clock.process_time() - started)
    spaces = [Space(job, axes) for axes in axes_of(job, pins)]
    kinds = job.kinds
    sets = [some for size in range(1, len(kinds) + 1) for some in itertools.combinations(kinds, size)]
    columns = list[tuple[Space, Columns]]()
    for space in spaces:
        for some in sets:
            progress(" + ".join(some))
            for apart in (False, True) if len(some) > 1 else (False,):
                found = columns_of(space, some, apart)
                if found is not None:
                    columns.append((space, found))
    wanted = max(FINALISTS, 4 * top)
    single = _cut_in_order([one for one in columns if len(one[1].kinds) == 1], wanted, gap / 2.0)
    beaten = single.kept[0].seconds if single.kept else np.inf
    several = _cut_in_order([one for one in columns if len(one[1].kinds) > 1], wanted, gap, beaten)
    kept = sorted([*several.kept, *single.kept], key=lambda one: one.seconds)[:wanted]
    kept += [one for one in several.kept[:2] if one not in kept]
    bound = min(several.bound, single.bound)
    best = list[tuple[MixedLayout, MixedEstimate]]()
    for one in kept:
        estimate = estimate_mixed(job, one.layout)
        if estimate.out_of_memory <= SAFE:
            best.append((one.layout, estimate))
    best.sort(key=lambda pair: pair[1].step_time)
    mixed = next((pair for pair in best if len(kinds_of(pair[0])) > 1), None)
    return MixedFinding(
        best=best[:top], mixed=mixed, candidates=sum(len(one.bound) for _, one in columns), cut=several.cut + single.cut,
        gap=max(1.0 - bound / kept[0].seconds, 0.0) if kept else 0.0,
        seconds=clock.process_time() - started,
    )  # fmt: skip


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


def axes_of(job: MixedJob, pins: MixedPins) -> list[Axes]:
    """What is searched, once for every level of sharding and degree of experts."""
    legal, model = job.trainer.legal, job.workload.model
    tps = {kind: _tps(job, kind, pins) for kind in job.kinds}
    if empty := [kind for kind, some in tps.items() if not some]:
        heads = f"leave --tp out, or choose a divisor of {model.num_heads} heads"
        raise PlannerError(f"no tensor parallel degree suits {empty[0]}; {heads}")
    batch = job.workload.global_batch_size
    micros = (pins.micro_batch_size,) if pins.micro_batch_size else tuple(b for b in MICRO_BATCHES if batch % b == 0)
    if batch % micros[0]:
        raise PlannerError(f"micro_batch_size {micros[0]} does not divide the global batch of {batch}")
    pipelined = legal.zero_with_pp if legal.pp else legal.zero
    levels = (pins.zero,) if pins.zero is not None else tuple(sorted({min([z for z in pipelined if z >= 1] or [max(legal.zero)])}))
    schedule = pins.schedule or ("1f1b" if "1f1b" in legal.schedules or not legal.schedules else legal.schedules[0])
    if schedule not in ("1f1b", "gpipe"):
        raise PlannerError(f"schedule {schedule} is not planned on mixed clusters; choose 1f1b or gpipe")
    most = min(sum(one.num_gpus for one in job.clusters.values()) // pins.cp, batch)
    replicas = tuple(2**n for n in range(most.bit_length()))
    recomputes = ("none", pins.recompute) if pins.recompute not in (None, "none") else job.recomputes
    if pins.recompute == "none":
        recomputes = ("none",)
    experts = (pins.ep,) if pins.ep else _experts(job) if model.is_moe else (1,)
    return [
        Axes(tps=tps, micros=micros, replicas=replicas, cp=pins.cp, ep=ep, zero=zero, schedule=schedule, recomputes=recomputes)
        for zero in levels for ep in experts
    ]  # fmt: skip


def _tps(job: MixedJob, kind: str, pins: MixedPins) -> tuple[int, ...]:
    """Tensor parallel degrees of a kind: inside its fast link, divisors of the heads."""
    legal, model, cluster = job.trainers[kind].legal, job.workload.model, job.clusters[kind]
    most = min(int(cluster.domain), cluster.num_gpus, LARGEST_TP)
    found = [n for n in divisors(model.num_heads) if n <= most and model.ffn_size % n == 0 and most % n == 0]
    if not legal.kv_replication and not model.is_mla:
        found = [n for n in found if model.num_kv_heads % n == 0]
    found = found if legal.tp else [1]
    return tuple(n for n in found if pins.tp in (None, n))


def _experts(job: MixedJob) -> tuple[int, ...]:
    """Expert parallel degrees: none, a node's, and eight times as many."""
    if job.trainer.legal.expert_parallel == "none":
        return (1,)
    return tuple(n for n in (1, 8, 64) if job.workload.model.num_experts % n == 0)


def kinds_of(layout: MixedLayout) -> set[str]:
    """Kinds that a layout uses."""
    return {stage.kind for one in layout.pipelines for stage in one.stages}


@dataclass(frozen=True)
class _InOrder:
    """What came of some candidates."""

    kept: list[Found]
    """The best, in closed form."""
    cut: int
    """How many were cut."""
    bound: float
    """Of those that were not."""


def _cut_in_order(columns: list[tuple[Space, Columns]], wanted: int, gap: float, beaten: float = np.inf) -> _InOrder:
    """Candidates cut in the order of their bounds, after the most promising of every set of kinds, which show what is reached.

    Of candidates that cannot be faster than ``beaten`` seconds a few are cut all the same, to say how far they fall behind.
    """
    if not columns:
        return _InOrder([], 0, np.inf)
    bounds = np.concatenate([one.bound for _, one in columns])
    owner = np.concatenate([np.full(len(one.bound), number) for number, (_, one) in enumerate(columns)])
    row = np.concatenate([np.arange(len(one.bound)) for _, one in columns])
    ranked = np.argsort(bounds, kind="stable")
    first = np.zeros(len(bounds), dtype=bool)
    for number in range(len(columns)):
        first[ranked[owner[ranked] == number][:EACH]] = True
    kept = list[Found]()
    for number, at in enumerate([*ranked[first[ranked]], *ranked[~first[ranked]]]):
        below = kept[wanted - 1].seconds if len(kept) >= wanted else np.inf
        near = (1.0 - gap) * kept[0].seconds if kept else np.inf
        most = FEW if bounds[at] >= beaten else CUTS
        if not first[at] and (number >= most or bounds[at] >= min(below, near)):
            return _InOrder(kept[:wanted], number, float(bounds[at]))
        if bounds[at] < below:
            space, some = columns[owner[at]]
            fresh = list(layouts_of(space, some.row(int(row[at])), below))
            kept = sorted([*kept, *fresh], key=lambda one: one.seconds)[: 2 * wanted] if fresh else kept
    return _InOrder(kept[:wanted], len(ranked), np.inf)
