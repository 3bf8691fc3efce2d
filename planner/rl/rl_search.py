"""Search: every placement of a step: sizes of the pools, layouts of trainer and rollout, staleness; the fastest that fit.

Both sides of every size of pool are priced once, as columns; every pair of a legal trainer's layout with a legal engine's layout is
then put together. Nothing is left out but layouts whose own update cannot fit, so the result is the optimum of the cost model over
that space (a test compares with pricing one by one). Engines are whole replicas; what a pool cannot use stays idle.
"""

from __future__ import annotations

import itertools
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from planner.errors import PlannerError, listed
from planner.layout import FIELDS, Layout, Recompute, Schedule
from planner.record import record
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_memory import PhaseMemory, memory_of
from planner.rl.rl_step import RolloutSide, Step, TrainSide, rollout_side, sampler_of, step_of, train_side
from planner.rl.rollout_pools import Rollouts
from planner.rl.training_phase import Learning, priced, workload_of
from planner.rules import Job, allowed
from planner.search import SAFE
from planner.serving.serving_layout import ServingLayout
from planner.space import Pins, base_layouts

STEPS = (0, 1, 2, 4, 8)
"""Staleness that is tried, within what is asked for; the ends of the range as well."""
NEAR = 0.01
"""Placements this much slower than the fastest are as good: the one with the least staleness is taken."""
SIZES = 16
"""Sizes of the pool that generates whose engines are priced as one table: enough rows, and not too much memory."""
MOST_SIZES = 128
"""Sizes of pools that are tried: of more nodes, several at once are added."""
TIE = 1e-6
"""Of equal steps, as the other pool decides them, the trainer that is done first."""


@record
class Asked:
    """What a user fixed of a placement; the search varies the rest."""

    gpus: int
    """GPUs at most."""
    modes: tuple[str, ...] = ()
    """Of MODES; empty = those of the framework."""
    staleness: tuple[int, int] = (0, 8)
    """Least and most."""
    train_gpus: int = 0
    """0 = any."""
    generate_gpus: int = 0
    """0 = any; of two kinds: those of the kind that generates."""
    critic_gpus: int | None = None
    """Of a pool of the critic alone, 0 = on the actor's GPUs; None = what the framework has."""
    sync: str = ""
    """Method of weight sync; empty = the framework's."""
    train: Mapping[str, int] = field(default_factory=dict)
    """Fields of the trainer's layout."""
    rollout: Mapping[str, int] = field(default_factory=dict)
    """Fields of the rollout's layout."""
    apart: bool = False
    """Pools are of two kinds: both sizes are given, and only split placements are possible."""


@record
class Candidate:
    """One priced placement."""

    placement: Placement
    layouts: RlLayouts
    train: TrainSide
    """One row."""
    rollout: RolloutSide
    """One row."""
    step: Step
    memory: PhaseMemory

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(np.ravel(self.step.seconds)[0])

    @property
    def chance(self) -> float:
        """Largest chance of running out of memory of all phases."""
        return float(np.ravel(self.memory.worst)[0])

    @property
    def fits(self) -> bool:
        """Every phase fits."""
        return self.chance <= SAFE


@record
class Found:
    """What a search found."""

    best: tuple[Candidate, ...]
    """Best first; where none fits, those that miss by the least."""
    by_mode: Mapping[str, Candidate]
    """The best of every mode and of synchronous and asynchronous split placements, by name."""
    fit: bool
    searched: int
    """Placements that were priced."""
    fitting: int
    updates_fit: bool
    """Some update fits by itself."""
    seconds: float
    """Wall time."""


def price(job: RlJob, placement: Placement, layouts: RlLayouts) -> Candidate:
    """One placement. No legality is checked."""
    train = train_side(job, placement, layouts.actor)
    rollout = rollout_side(job, placement, sampler_of(job, placement, layouts.rollout))
    return Candidate(
        placement=placement, layouts=layouts, train=train, rollout=rollout,
        step=step_of(job, placement, train, rollout), memory=memory_of(job, placement, train, rollout),
    )  # fmt: skip


def search(job: RlJob, asked: Asked, top: int = 5, *, only_fitting: bool = False) -> Found:
    """The ``top`` fastest placements that fit, or those that miss by the least. Raises PlannerError where none is legal;
    ``only_fitting``: also, before generation is priced, where no update fits even by itself."""
    started, rows = clock.perf_counter(), list[_Row]()
    places = placements(job, asked)
    sides = _Sides(job, asked, places)
    if only_fitting and not sides.updates_fit:
        raise PlannerError(f"no update of {job.workload.model.name} fits on {asked.gpus} GPUs")
    searched = fitting = 0
    for placement in places:
        train, rollout = sides.train(placement), sides.rollout(placement)
        if train is None or rollout is None:
            continue
        found, count, good = _pairs(job, placement, train, rollout)
        searched, fitting, rows = searched + count, fitting + good, rows + found
    if not rows:
        raise PlannerError(_nothing(job, asked, places, sides))
    rows = _ranked(rows)
    best = [_whole(job, one) for one in _varied(rows, top)]
    named: dict[str, Candidate] = {}
    for one in rows:
        name = _name(one.placement)
        if name not in named and one.fits:
            named[name] = _whole(job, one)
    return Found(
        best=tuple(best), by_mode=named, fit=rows[0].fits, searched=searched, fitting=fitting, updates_fit=sides.updates_fit,
        seconds=clock.perf_counter() - started,
    )  # fmt: skip


def update_fits(job: RlJob, asked: Asked) -> bool:
    """Whether some update fits by itself, generation aside. Raises PlannerError where nothing is legal."""
    return _Sides(job, asked, placements(job, asked)).updates_fit


def placements(job: RlJob, asked: Asked) -> list[Placement]:
    """Sizes of pools, modes and staleness that the framework has and the question allows. Raises PlannerError."""
    found, modes = [], asked.modes or job.framework.modes
    if unknown := [one for one in modes if one not in job.framework.modes]:
        raise PlannerError(f"{job.framework.label} has no {unknown[0]} placement; it has {listed(job.framework.modes)}")
    for mode in modes:
        if (asked.apart and mode != "split") or (job.workload.offline and mode != "colocated"):
            continue
        for (train, generate, critic), staleness in itertools.product(
            _with_critic(job, asked, mode), _steps(asked) if mode != "colocated" else [0]
        ):
            offered = next((one for one in job.framework.placements if one.holds(mode, staleness)), None)
            if offered is None or (mode == "colocated" and asked.staleness[0] > 0):
                continue
            if job.workload.critic is not None and ("own" if critic else "actor") not in offered.critic:
                continue
            found.append(
                Placement(
                    mode=mode, train_gpus=train, generate_gpus=generate, critic_gpus=critic, staleness=staleness,
                    partial=offered.partial and staleness > 0, sync=asked.sync or offered.sync[0],
                )
            )  # fmt: skip
    return found


def _with_critic(job: RlJob, asked: Asked, mode: str) -> list[tuple[int, int, int]]:
    """(train, generate, critic): a critic on the actor's GPUs, 0, or on as many of its own, which generation then lacks."""
    pairs = sizes(job, asked, mode)
    found = [(train, generate, 0) for train, generate in pairs if not asked.critic_gpus]
    if job.workload.critic is not None and mode == "split" and not asked.apart and asked.critic_gpus != 0:
        sized = [(a, asked.generate_gpus or b - (asked.critic_gpus or a), asked.critic_gpus or a) for a, b in pairs]
        found += [(a, b, c) for a, b, c in sized if b >= 1 and a + b + c <= asked.gpus]
    return found


def sizes(job: RlJob, asked: Asked, mode: str) -> list[tuple[int, int]]:
    """(train, generate) GPUs: whole nodes where there are several, any number inside of one."""
    gpus, node = asked.gpus, int(job.hardware.gpus_per_node)
    if asked.apart:
        return [(asked.train_gpus, asked.generate_gpus)]
    if mode == "colocated":
        return [(gpus, gpus)] if asked.train_gpus in (0, gpus) and asked.generate_gpus in (0, gpus) else []
    unit = node * max(-(-gpus // (node * MOST_SIZES)), 1) if gpus > node and gpus % node == 0 else 1
    trains = [asked.train_gpus] if asked.train_gpus else list(range(unit, gpus, unit))
    if mode == "hybrid":  # all GPUs generate; a pool that is asked for is that, or the part that never trains
        trains = [one for one in trains if asked.generate_gpus in (0, gpus, gpus - one)]
    found = [(train, gpus if mode == "hybrid" else asked.generate_gpus or gpus - train) for train in trains]
    return [(a, b) for a, b in found if a >= 1 and b >= 1 and (a < b if mode == "hybrid" else a + b <= gpus)]


def _steps(asked: Asked) -> list[int]:
    low, high = asked.staleness
    return sorted({low, high, *(one for one in STEPS if low <= one <= high)})


def train_candidates(job: RlJob, gpus: int, pins: Mapping[str, int]) -> Layout | None:
    """Legal layouts of the trainer on so many GPUs, with and without recompute; None = there is none."""
    work = job.workload
    one = workload_of(job.learner(gpus), work, work.max_length, 0, gpus)
    rules = Job(workload=one, cluster=job.cluster(gpus), trainer=job.trainer)
    fixed = {"micro_batch_size": 1, "vpp": 1, "schedule": int(Schedule.ONE_F_ONE_B), **pins}
    fixed = {name: value for name, value in fixed.items() if name not in ("recompute", "num_microbatches")}
    base = base_layouts(rules, Pins(values=fixed))
    answers = work.trained // work.updates * work.epochs
    base = base.take(_usual(job, base, pins, answers)) if len(base) else base
    kinds = [pins["recompute"]] if "recompute" in pins else [int(Recompute.NONE), int(Recompute.FULL)]
    both = [base.replace(recompute=np.full(len(base), kind)) for kind in kinds]
    columns = {name: np.concatenate([np.broadcast_to(getattr(one, name), len(base)) for one in both]) for name in vars(base)}
    layout = Layout(**columns)
    kept = np.flatnonzero(allowed(rules, layout)) if len(layout) and len(base) else np.zeros(0, dtype=int)
    return layout.take(kept) if len(kept) else None


def _usual(job: RlJob, layout: Layout, pins: Mapping[str, int], answers: int) -> Any:
    """Rows that are worth a look where nothing else is fixed: replicas that have an answer, tensor ranks with a fast link, states
    sharded as far as the trainer does it, over all replicas; whole experts."""
    column = {name: np.broadcast_to(np.asarray(value), (len(layout),)) for name, value in layout.columns().items()}
    rules, alone = job.trainer.legal, column["dp"] * column["cp"] == 1
    level = np.where(column["pp"] > 1, max(rules.zero_with_pp or (0,)), max(rules.zero))
    kept = column["dp"] <= answers
    if "zero" not in pins:
        kept &= alone | (column["zero"] == level)
    if "tp" not in pins:
        kept &= column["tp"] <= job.hardware.scale_up_domain
    if "dp_shard" not in pins:
        kept &= column["dp_shard"] == 0
    if "etp" not in pins and rules.etp:
        kept &= column["etp"] == 1
    return np.flatnonzero(kept)


class _Sides:
    """Both sides of every size of pool, priced once."""

    def __init__(self, job: RlJob, asked: Asked, places: Sequence[Placement]) -> None:
        self.job, self.asked = job, asked
        gpus = sorted({one.train_gpus for one in places})
        found = {one: train_candidates(job, one, asked.train) for one in gpus}
        self.layouts = {one: layout for one, layout in found.items() if layout is not None}
        self.actors = _together(job, self.layouts)
        self.trains: dict[tuple[int, int, bool], TrainSide | None] = {}
        self.pools: dict[tuple[bool, bool], dict[int, Placement]] = {}
        for place in places:
            self.pools.setdefault((place.mode == "split", place.synchronous), {}).setdefault(place.generate_gpus, place)
        self.rollouts: dict[tuple[bool, bool, int], Rollouts] = {}

    @property
    def updates_fit(self) -> bool:
        """Whether some update fits by itself."""
        return any(bool(one.fits_alone.any()) for one in self.actors.values())

    def train(self, placement: Placement) -> TrainSide | None:
        """Of the pool that trains; layouts whose update cannot fit at all are left out where others can."""
        key = (placement.train_gpus, placement.critic_gpus, placement.synchronous)
        if key not in self.trains:
            layout, actor = self.layouts.get(placement.train_gpus), self.actors.get(placement.train_gpus)
            self.trains[key] = None
            if layout is not None and actor is not None:
                rows = _possible(actor)
                self.trains[key] = train_side(self.job, placement, layout.take(rows), actor.take(rows))
        return self.trains[key]

    def rollout(self, placement: Placement) -> RolloutSide | None:
        """Of the pool that generates: engines of several sizes of pool are priced as one table, but where waits for tools, which
        are those of its middle layout, lengthen answers."""
        kind = (placement.mode == "split", placement.synchronous)
        sizes, together = list(self.pools[kind]), 1 if self.job.workload.waits else SIZES
        number = sizes.index(placement.generate_gpus) // together
        key = (*kind, number)
        if key not in self.rollouts:
            some = {gpus: self.pools[kind][gpus] for gpus in sizes[number * together : (number + 1) * together]}
            self.rollouts[key] = Rollouts(self.job, some, self.asked.rollout)
        return self.rollouts[key].side(placement)


def _together(job: RlJob, layouts: Mapping[int, Layout]) -> dict[int, Learning]:
    """The actor on the layouts of all sizes of pool, priced as one table."""
    if not layouts:
        return {}
    columns = {name: np.concatenate([getattr(one, name) for one in layouts.values()]) for name in FIELDS}
    whole = priced(job.learner(max(layouts)), Layout(**columns), job.workload)
    ends = np.cumsum([len(one) for one in layouts.values()])
    pieces = zip(layouts, ends - [len(one) for one in layouts.values()], ends, strict=True)
    return {gpus: whole.take(slice(start, end)) for gpus, start, end in pieces}


def _possible(actor: Learning) -> Any:
    """Rows of layouts that can fit by themselves; the nearest where none can."""
    rows = np.flatnonzero(actor.fits_alone)
    return rows if len(rows) else np.argsort(actor.estimate.memory_needed)[:8]


@record
class _Row:
    placement: Placement
    actor: Layout
    rollout: ServingLayout
    seconds: float
    chance: float

    @property
    def fits(self) -> bool:
        return self.chance <= SAFE


def _pairs(job: RlJob, placement: Placement, train: TrainSide, rollout: RolloutSide) -> tuple[list[_Row], int, int]:
    """Every trainer's layout with every engine's: the best few, how many there are, how many fit."""
    n, m = len(train.layout), len(np.asarray(rollout.layout.tp))
    a, b = np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
    left, right = train.take(a), rollout.take(b)
    step = step_of(job, placement, left, right)
    seconds = step.seconds
    chance = np.broadcast_to(memory_of(job, placement, left, right).worst, seconds.shape)
    good = chance <= SAFE
    order = np.argsort(np.where(good, seconds + TIE * step.busy["train"], np.inf)) if good.any() else np.argsort(chance)
    rows = [
        _Row(
            placement=placement, actor=left.layout.row(int(i)), rollout=right.layout.row(int(i)),
            seconds=float(seconds[i]), chance=float(chance[i]),
        )
        for i in order[:4]
    ]  # fmt: skip
    return rows, len(a), int(good.sum())


def _ranked(rows: list[_Row]) -> list[_Row]:
    """Those that fit by time, the least stale of the nearly fastest first; the others by their chance."""
    good = sorted((one for one in rows if one.fits), key=lambda one: one.seconds)
    if not good:
        return sorted(rows, key=lambda one: one.chance)
    near = [one for one in good if one.seconds <= good[0].seconds * (1.0 + NEAR)]
    first = min(near, key=lambda one: (one.placement.staleness, one.seconds))
    return [first, *(one for one in good if one is not first)]


def _varied(rows: Sequence[_Row], top: int) -> list[_Row]:
    """The first few, of placements that differ in more than the staleness."""
    found: dict[tuple[object, ...], _Row] = {}
    for one in rows:
        place = one.placement
        key = (place.mode, place.train_gpus, place.synchronous, one.actor.tp, one.actor.pp, one.rollout.tp, one.rollout.ep)
        found.setdefault(key, one)
        if len(found) == top:
            break
    return list(found.values())


def _name(placement: Placement) -> str:
    if placement.mode == "colocated":
        return "colocated"
    return f"{placement.mode}, {'synchronous' if placement.synchronous else 'asynchronous'}"


def _whole(job: RlJob, row: _Row) -> Candidate:
    return price(job, row.placement, RlLayouts(actor=row.actor, rollout=row.rollout, rollout_precision=job.precision))


def _nothing(job: RlJob, asked: Asked, places: Sequence[Placement], sides: _Sides) -> str:
    """Why nothing is legal: what the user fixed is named where that alone rules everything out."""
    if job.workload.critic is not None and not any(one.critic for one in job.framework.placements):
        return f"{job.framework.label} trains no value model; use grpo, or a framework with {job.workload.algorithm}"
    if not places:
        return job.framework.no_place(asked.gpus, asked.train_gpus, asked.generate_gpus)
    for flag, pins, side in (("--actor", asked.train, sides.train), ("--rollout", asked.rollout, sides.rollout)):
        if pins and all(side(one) is None for one in places):
            said = ",".join(f"{name}={value}" for name, value in pins.items())
            return f"{flag} {said}: no such layout of {job.workload.model.name} is legal on {asked.gpus} GPUs; change it or --gpus"
    return (
        f"no layout of {job.workload.model.name} is legal on {asked.gpus} GPUs with {job.framework.label}, trainer "
        f"{job.trainer.name} and {job.engine.label}; change --gpus, a fixed degree, or the framework"
    )
