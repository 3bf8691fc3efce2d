"""Seconds, step ends and memory of every stage that a search may put on one kind of GPU: priced in one batch, then looked up."""

from __future__ import annotations

import bisect
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.mixed.crossing import Crossing, Member, Spanned
from planner.mixed.mixed_job import RECOMPUTES, SCHEDULES, MixedJob
from planner.mixed.mixed_layout import INTERLEAVED
from planner.mixed.stage_pricing import price_stages, stage_contents
from planner.record import record

FIRST, MIDDLE, LAST = range(3)
BLOCK = 8
"""Places of a pipeline that are priced together."""
FLIGHTS = 8
"""Microbatches in flight up to which a bound looks at memory."""


@record
class Axes:
    """What a search varies, and what is the same for all stages."""

    tps: dict[str, tuple[int, ...]]
    """By kind."""
    micros: tuple[int, ...]
    """Sequences per forward pass."""
    replicas: tuple[int, ...]
    """Data parallel degrees for which memory and traffic of states are known, ascending: others take the next below."""
    cp: int
    ep: int
    zero: int
    schedule: str
    recomputes: tuple[str, ...]
    vpp: int = 1
    """Virtual stages."""
    piped: bool = True
    """Pipelines of several stages are looked at."""
    offload: int = 0
    """Percent of the optimizer states in host memory."""
    equal_shares: bool = False
    equal_tp: bool = False
    behind: bool = False
    """Stages before or among the leading dense layers of a model of experts are left out, as bounds do."""

    def replica_row(self, replicas: int) -> int:
        """Number of the largest known degree up to ``replicas``."""
        return max(bisect.bisect_right(self.replicas, replicas) - 1, 0)


class Place(NamedTuple):
    """A place in a pipeline, and how many microbatches pass it."""

    pp: int
    position: int
    microbatches: int

    def like(self, schedule: str) -> Place:
        """The place that stands for all with as many microbatches behind them."""
        if self.pp == 1:
            return Place(1, 0, min(self.microbatches, 2))
        if schedule == "1f1b":
            flight = min(self.microbatches, self.pp - self.position)
            return Place(flight + 1, 1, min(self.microbatches, flight + 1))
        return Place(2, 1, self.microbatches) if schedule == "gpipe" else self

    def neighbours(self, schedule: str) -> list[Place]:
        """Places that are asked for with this one: priced together they cost little more."""
        if schedule == INTERLEAVED and 0 < self.position < self.pp - 1:
            block = (self.position - 1) // BLOCK * BLOCK + 1
            return [self._replace(position=at) for at in range(block, min(block + BLOCK, self.pp - 1))]
        if schedule != "1f1b" or self.pp == 1 or self.microbatches < self.pp:
            return [self]
        first = (self.pp - 2) // BLOCK * BLOCK + 2
        return [Place(pp, 1, pp) for pp in range(first, first + BLOCK)]


class Choice(NamedTuple):
    """Of a stage with n layers behind s: arrays (L + 1, L + 1), by s and n."""

    seconds: Floats
    """Of a microbatch with the fastest recompute that fits; infinite where none does."""
    recompute: NDArray[np.intp]
    """Which of the axes' recomputes that is."""
    ends: Callable[[], Floats]
    """Seconds at the end of the step with each recompute, (recomputes, L + 1, L + 1)."""

    def end(self, at: tuple[int, int]) -> float:
        """Seconds at the end of the step of one of the stages."""
        return float(self.ends()[(int(self.recompute[at]), *at)])


class Held(NamedTuple):
    """Layers that stages hold by level, the first few summed; each further one holds as many as the last of them."""

    sums: NDArray[np.int32]
    """(tp, micro batch, replicas, stages, level)."""

    def of(self, place: tuple[Any, ...], stages: Any, level: Any = slice(None)) -> NDArray[np.int64]:
        """Of so many stages at (tp, micro batch, replicas)."""
        last = self.sums.shape[-2] - 1
        few, more = np.minimum(stages, last), np.maximum(stages - last, 0)
        found = self.sums[(*place, few, level)]
        if not np.any(more):
            return found
        return np.asarray(found + more * (self.sums[(*place, last, level)] - self.sums[(*place, last - 1, level)]))


class KindTables:
    """All stages of one kind, by (slot, tp, micro batch, recompute, replicas, dense layers before, layers)."""

    def __init__(self, job: MixedJob, kind: str, axes: Axes, spanned: bool, alone: bool = False) -> None:
        """``spanned``: gradients go over all kinds; ``alone``: the stage is the whole model, else one of several."""
        self.job, self.kind, self.axes, self.alone = job, kind, axes, alone
        model = job.workload.model
        self.total = model.num_layers
        self.lead = model.num_dense_layers if model.is_moe else 0
        layers = np.array([self.total]) if alone else np.arange(self.total + 1)
        starts = np.zeros(1, dtype=np.int64) if alone else np.arange(self.lead * axes.behind, self.lead + 1)
        sides = (
            np.array(axes.tps[kind]), np.array(axes.micros), np.array([int(RECOMPUTES[one]) for one in axes.recomputes]),
            np.array(axes.replicas), starts, layers,
        )  # fmt: skip
        self.shape = tuple(len(one) for one in sides)
        tp, micro, recompute, replicas, before, held = (one.ravel() for one in np.meshgrid(*sides, indexing="ij"))
        folded = job.trainers[kind].legal.expert_parallel == "folded"
        replicas = np.maximum(replicas, axes.ep // np.gcd(axes.ep, tp * axes.cp if folded else 1))  # fewer do not hold the experts
        rounds = np.maximum(job.workload.global_batch_size // (micro * replicas), 1)
        layout = job.layout(
            kind, tp=tp, pp=np.full(len(tp), 1 if alone else 2), dp=replicas, cp=axes.cp, ep=axes.ep, micro_batch_size=micro,
            num_microbatches=rounds, zero=axes.zero, schedule=1 if alone else int(SCHEDULES[axes.schedule]), recompute=recompute,
            vpp=1 if alone else axes.vpp, offload_optimizer=axes.offload,
        )  # fmt: skip

        def wide(values: NDArray[np.integer], slots: tuple[int, int, int] = (1, 1, 1)) -> Floats:
            return values[:, None] * np.array(slots, dtype=float)

        one = np.ones(len(tp), dtype=np.int64)
        ends = ((1, 1, 1), (1, 1, 1)) if alone else ((1, 0, 0), (0, 0, 1))
        contents = stage_contents(model, wide(before), wide(held), wide(one, ends[0]), wide(one, ends[1]), 1 if alone else axes.vpp)
        traffic = _spanned(job, kind, tp, held, axes) if spanned else None
        number = before * (self.total + 1) + held
        self.priced = price_stages(job, kind, layout, (contents, number), wide(one), traffic)
        self.row_numbers = np.arange(len(tp)).reshape(self.shape)
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._equal: dict[tuple[object, ...], Choice] = {}
        self._ends: dict[tuple[object, ...], Floats] = {}

    def interleaved(self, axes: Axes) -> KindTables | None:
        """The same stages with virtual ones: only when their traffic hides and how many microbatches wait differ. None where what a
        stage holds, or a term of the trainer, depends on the chunks."""
        trainer = self.job.trainers[self.kind]
        if self.lead or self.alone or trainer.terms or trainer.stored.gradients_on_demand:
            return None
        found, rows = copy.copy(self), len(self.priced.layout)
        for name in ("end", "least_end"):
            found.__dict__.pop(name, None)
        schedule = np.full(rows, int(SCHEDULES[axes.schedule]))
        found.axes, found._choices, found._equal, found._ends = axes, {}, {}, {}
        found.priced = replace(self.priced, layout=self.priced.layout.replace(vpp=np.full(rows, axes.vpp), schedule=schedule))
        return found

    def _shaped(self, values: Floats) -> Floats:
        return values.reshape(3, *self.shape)

    @cached_property
    def seconds(self) -> Floats:
        """Of a microbatch, both passes, without sends."""
        return self._shaped(self.priced.forward + self.priced.backward)

    @cached_property
    def end(self) -> Floats:
        """Of the end of a step; of what bounds look at without traffic, which may hide behind dense layers too."""
        return self._shaped(_sum(self.priced.update() if self.axes.behind else self.priced.step_end()))

    def _end_at(self, at: tuple[Any, ...]) -> Floats:
        """The same of one slot and (tp, micro batch, all recomputes, replicas): (recomputes, dense layers before, layers)."""
        if at not in self._ends:
            numbers, slot = self.row_numbers[at[1], at[2], :, at[3]], slice(at[0], at[0] + 1)
            self._ends[at] = _sum(self.priced.some(numbers.ravel(), slot).step_end()).reshape(numbers.shape)
        return self._ends[at]

    def fits(self, places: Sequence[Place], schedule: str, at: tuple[Any, ...]) -> NDArray[np.bool_]:
        """Whether the card holds a stage at some places with a chance of at most SAFE to run out, and its host what is there;
        places first.

        ``at``: which slot, and of it which (tp, micro batches, recompute, replicas).
        """
        numbers, slot = self.row_numbers[at[1:]], slice(at[0], at[0] + 1)
        placed = self.priced.placed(numbers.ravel(), tuple(places), (int(SCHEDULES[schedule]), self.axes.vpp), slot)
        return placed.fits.reshape(len(places), *numbers.shape)

    def choice(self, slot: int, tp: int, micro: int, replicas: int, place: Place) -> Choice:
        """The stages of one place of a pipeline."""
        row, place = self.axes.replica_row(replicas), place.like(self.axes.schedule)
        key = slot, tp, micro, row, place
        if key not in self._choices:
            at = slot, self.axes.tps[self.kind].index(tp), self.axes.micros.index(micro), slice(None), row
            places = place.neighbours(self.axes.schedule)
            for one, fresh in zip(places, self._chosen(at, places), strict=True):
                same = (fresh.seconds.tobytes(), fresh.recompute.tobytes(), *key[:4])  # often so whatever is in flight: one object
                self._choices[*key[:4], one] = self._equal.setdefault(same, fresh)
        return self._choices[key]

    def _chosen(self, at: tuple[Any, ...], places: Sequence[Place]) -> list[Choice]:
        """The choices of some rows at some places."""
        schedule = "1f1b" if self.alone else self.axes.schedule
        seconds = np.where(self.fits(places, schedule, at), self.seconds[at], np.inf)
        which = np.argmin(seconds, axis=1)
        seconds = np.take_along_axis(seconds, which[:, None], axis=1)[:, 0]
        if at[0] == MIDDLE and not self.alone:
            seconds[..., 0] = np.inf
        ends = functools.partial(self._end_at, (*at[:3], at[4]))
        return [Choice(*one, ends) for one in zip(seconds, which, strict=True)]

    @cached_property
    def per_layer(self) -> Floats:
        """Least seconds of a layer in any stage behind the leading dense ones, without recompute, (tp, micro batch)."""
        held = np.maximum(np.arange(self.total + 1), 1)[1:] if not self.alone else np.array([self.total])
        return np.asarray((self.seconds[:, :, :, 0, :, -1, -len(held):] / held).min(axis=(0, 3, 4)))

    def held(self, levels: Floats) -> Held:
        """Most layers behind the leading dense ones that stages of the kind hold together when none takes longer than a level, at
        the end of a pipeline, where the fewest microbatches wait. No order of kinds leaves them more."""
        each, behind = list[NDArray[np.int32]](), self.row_numbers[..., -1, :]
        buffered = not self.job.trainers[self.kind].stored.gradients_on_demand
        slots = slice(MIDDLE, MIDDLE + 1) if buffered else slice(None)  # embedding and head add to all that a buffered stage holds
        every, rows, placed = self.seconds[slots, ..., -1, :], behind.ravel(), self.priced
        fits, left = np.ones((len(every), behind.size), dtype=bool), np.arange(behind.size)
        plain = int(SCHEDULES["1f1b"]), self.axes.vpp
        for flight in range(1, min(FLIGHTS, self.total, self.job.clusters[self.kind].num_gpus) + 1):
            if len(left):
                found = placed.placed(rows[left], (Place(flight + 1, 1, flight + 1),), plain, slots).fits
                fits[:, left] = found
                left = left[np.flatnonzero(found.any(axis=0))]  # what has no room with few in flight has none with more
            seconds = np.where(fits.reshape(every.shape), every, np.inf).min(axis=(0, 3))
            least = np.minimum.accumulate(seconds[..., ::-1], axis=-1)[..., ::-1].reshape(-1, seconds.shape[-1])
            reached = np.searchsorted(levels, least) + (len(levels) + 1) * np.arange(len(least))[:, None]  # from which level on
            counts = np.bincount(reached.ravel(), minlength=len(least) * (len(levels) + 1)).reshape(len(least), -1)[:, :-1]
            most = np.cumsum(counts, axis=1, dtype=np.int32) - 1
            each.append(np.maximum(most, 0).reshape(*seconds.shape[:-1], len(levels)))
        none = np.zeros_like(each[0])
        return Held(np.cumsum(np.stack([none, *each], axis=-2), axis=-2, dtype=np.int32))

    @cached_property
    def least_end(self) -> Floats:
        """Least seconds at the end of a step of a stage with n layers or more, (tp, micro batch, replicas, n)."""
        least = self.end.min(axis=(0, 3, 5))
        return np.asarray(np.minimum.accumulate(least[..., ::-1], axis=-1)[..., ::-1])


def _sum(end: dict[str, Floats]) -> Floats:
    """Seconds at the end of a step that nothing hides."""
    return np.asarray(end.get("exposed", 0.0) + end["optimizer"] + end["offload"])


def _spanned(job: MixedJob, kind: str, tp: NDArray[np.integer], layers: NDArray[np.integer], axes: Axes) -> Cluster:
    """The links of gradients where every kind has replicas of its own; a link carries all layers in the time of one stage."""
    cluster = job.clusters[kind]
    members = tuple(  # as many to a domain as with the largest tp: no other degrees have a slower network
        Member(one, max(one.domain // (max(axes.tps[name], default=1) * axes.cp), 1.0), 1.0) for name, one in job.clusters.items()
    )
    sharing = (tp * axes.cp * job.workload.model.num_layers / np.maximum(layers, 1))[:, None]
    crossings = []
    for at, one in enumerate(job.kinds):
        for other in job.kinds[at + 1 :]:
            link = job.cluster.link(one, other)
            if link is not None:
                ends = job.cluster.node_kind(one), job.cluster.node_kind(other)
                rings = np.minimum(sharing, float(ends[0].gpus_per_node)) if link.per_node else sharing
                crossings.append(Crossing(link, rings, 1 if link.per_node else min(end.count for end in ends)))
    return Spanned(hardware=cluster.hardware, num_gpus=cluster.num_gpus, members=members, crossings=tuple(crossings))


