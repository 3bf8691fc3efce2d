"""Tables, costs and cuts of one set of axes, priced when they are first asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cost.pipeline.schedules import sends_overlap
from planner.layout import Layout
from planner.mixed.boundaries import Hops, link_seconds
from planner.mixed.cut import Cut, Cuts, StageCosts
from planner.mixed.mixed_job import SCHEDULES, MixedJob
from planner.mixed.mixed_layout import Pipeline, Stage
from planner.mixed.stage_tables import Axes, Choice, Held, KindTables

STEP = 1.01
"""Ratio of neighbouring levels of ``Space.level``: a bound is at most so much too low."""


class Priced(NamedTuple):
    """A pipeline that was cut."""

    cut: Cut
    choices: list[Choice]
    """What may stand at each of its places."""
    fixed: float
    """Seconds of a step further to those of the slowest stage for each microbatch."""


@dataclass
class Space:
    """Tables of all kinds for one set of axes, priced when they are first asked for."""

    job: MixedJob
    axes: Axes
    base: Space | None = None
    """The same without virtual stages, whose layers take as long, and need no more memory."""
    _tables: dict[tuple[str, bool, bool, bool], KindTables] = field(default_factory=dict)
    _layers: dict[str, Floats] = field(default_factory=dict)
    _costs: dict[tuple[int, float], StageCosts] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], Priced | None] = field(default_factory=dict)
    _stages: dict[tuple[StageCosts, ...], Cuts] = field(default_factory=dict)
    _held: dict[str, Held] = field(default_factory=dict)

    def table(self, kind: str, spanned: bool, alone: bool = False, behind: bool = False) -> KindTables:
        """All stages of one kind, or those ``behind`` the leading dense layers where no given link is ``spanned``, whose traffic a
        bound needs; without a given link replicas apart differ by their own networks alone, whose slowest counts."""
        spanned = spanned and any(self.job.cluster.link(kind, other) for other in self.job.kinds if other != kind)
        behind = behind and not spanned and self.layers < self.job.workload.model.num_layers
        key = kind, spanned, alone, behind
        if key not in self._tables:
            ready = self.base.table(*key).interleaved(self.axes) if self.base is not None else None
            self._tables[key] = ready or KindTables(self.job, kind, replace(self.axes, behind=behind), spanned, alone)
        return self._tables[key]

    @property
    def layers(self) -> int:
        """Layers that bounds count: without the leading dense ones of a model of experts, which are the shorter ones."""
        model = self.job.workload.model
        return model.num_layers - (model.num_dense_layers if model.is_moe else 0)

    def per_layer(self, kind: str) -> Floats:
        """Least seconds of a layer in any stage of a kind, without recompute, (tp, micro batch); priced without memory."""
        if self.base is not None:
            return self.base.per_layer(kind)
        if kind not in self._layers:
            few = replace(self.axes, replicas=self.axes.replicas[:2], recomputes=self.axes.recomputes[:1], behind=True)
            self._layers[kind] = KindTables(self.job, kind, few, False).per_layer
        return self._layers[kind]

    @cached_property
    def levels(self) -> Floats:
        """Seconds of a stage, in steps of STEP, from the shortest layer to the whole model on the slowest GPU."""
        if self.base is not None:
            return self.base.levels
        tables = [self.table(kind, False, behind=True) for kind in self.job.kinds if self.axes.tps[kind]]
        low, high = min(float(one.per_layer.min()) for one in tables), max(float(one.seconds.max()) for one in tables)
        return np.asarray(low * STEP ** np.arange(np.ceil(np.log(high / low) / np.log(STEP)) + 2))

    def held(self, kind: str) -> Held:
        """Layers that stages of a kind hold by level."""
        if self.base is not None:
            return self.base.held(kind)
        if kind not in self._held:
            self._held[kind] = self.table(kind, False, behind=True).held(self.levels)
        return self._held[kind]

    def level(self, held: list[Held], places: list[tuple[tuple[Any, ...], NDArray[np.intp]]], layers: int) -> Floats:
        """The level below the smallest one at which stages hold so many layers, (N,); infinite where none does.

        ``places``: (tp, micro batch, replicas) and stages of each kind.
        """
        low = np.zeros(len(places[0][1]), dtype=np.intp)
        high = np.full(len(low), len(self.levels))
        for _ in range(len(self.levels).bit_length()):
            middle = np.minimum((low + high) // 2, len(self.levels) - 1)
            enough = np.sum([one.of(*place, middle) for one, place in zip(held, places, strict=True)], axis=0) >= layers
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return np.where(high < len(self.levels), self.levels[np.clip(high - 1, 0, len(self.levels) - 1)], np.inf)

    def least_hop(self, kinds: tuple[str, ...], micro: int, count: NDArray[np.intp]) -> Floats:
        """Least seconds of a send from one kind to another over a given link that so many pipelines share, (N,)."""
        found = np.full(len(count), 0.0 if len(kinds) == 1 else np.inf)
        for one, other in itertools.combinations(kinds, 2):
            link = self.job.cluster.link(one, other)
            ends = (Stage(kind=one, layers=1), Stage(kind=other, layers=1))
            shape = Pipeline(stages=ends, micro_batch_size=micro)
            alone = link_seconds(link, self.job, self.axes.cp, shape, ends) if link else 0.0
            sharing = count if link and not link.per_node else 1
            found = np.minimum(found, (alone - link.latency) * sharing + link.latency if link else 0.0)
        return found

    @property
    def microbatch_sum(self) -> dict[int, int]:
        """Microbatches of a step by micro batch size."""
        batch = self.job.workload.global_batch_size
        return {one: batch // one for one in self.axes.micros if batch % one == 0}

    @cached_property
    def hops(self) -> Hops:
        """Seconds of sends."""
        return Hops(self.job, self.axes.cp)

    @property
    def blocking(self) -> bool:
        """Whether stages wait for their sends: else these overlap with other microbatches."""
        return not bool(sends_overlap(self.job.trainer, Layout(schedule=int(SCHEDULES[self.axes.schedule]))))

    def costs(self, choice: Choice, hop: float) -> StageCosts:
        """Seconds of a stage with its sends, by the layers of one of its chunks."""
        key = id(choice), hop
        if key not in self._costs:
            self._costs[key] = StageCosts(choice.seconds[:, :: self.axes.vpp] + hop)
        return self._costs[key]

    def cuts(self, costs: list[StageCosts]) -> Cuts:
        """All cuts over some stages."""
        key = tuple(costs)
        if key not in self._stages:
            self._stages[key] = Cuts(costs)
        return self._stages[key]
