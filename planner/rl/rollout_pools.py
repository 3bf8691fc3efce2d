"""Pools that generate: legal layouts of the engines on their GPUs, several sizes priced as one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from planner.arrays import NDArray
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement
from planner.rl.rl_step import RolloutSide, rollout_side, sampler_of
from planner.serving.candidates import engine_layouts
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_rules import legal

LARGEST_ENGINE = 64
"""GPUs of one engine."""
ALONE = {"pp": 1, "attn_dp": 1, "dcp": 1}
"""Degrees of an engine that frameworks of RL leave at 1."""


def rollout_candidates(job: RlJob, placement: Placement, pins: Mapping[str, int]) -> ServingLayout | None:
    """Legal layouts of the engines on the GPUs of a placement, as many replicas as they hold; None = there is none."""
    served, gpus = job.served(placement.mode), placement.generate_gpus
    if job.workload.offline:  # one that stands for none, whose numbers nobody reads
        return ServingLayout(tp=np.ones(1, int), max_batch=np.ones(1, int), max_tokens=np.full(1, 2048))
    fixed = {**ALONE, **{name: value for name, value in pins.items() if name != "max_batch"}}
    layout = engine_layouts(served.model, min(gpus, LARGEST_ENGINE), fixed)
    count = int(np.size(layout.tp))
    if not count:
        return None
    batch = pins.get("max_batch") or job.max_batch(placement.mode, not placement.synchronous)
    tokens = served.engine.default_max_tokens(served.hardware, layout)
    layout = replace(
        layout, max_batch=np.full(count, batch) * np.asarray(layout.attn_dp),
        max_tokens=np.broadcast_to(np.asarray(tokens, dtype=np.int64), (count,)),
        replicas=np.maximum(gpus // np.asarray(layout.engine_gpus), 1),
    )  # fmt: skip
    good = legal(served.model, served.hardware, served.engine, served.precision, layout)
    kept = np.flatnonzero(np.broadcast_to(good, (count,)) & (np.asarray(layout.num_gpus) <= gpus))
    return layout.take(kept) if len(kept) else None


class Rollouts:
    """Engines of the pools that generate, by their sizes."""

    def __init__(self, job: RlJob, places: Mapping[int, Placement], pins: Mapping[str, int]) -> None:
        self.job, self.rows = job, dict[int, slice]()
        found = {gpus: rollout_candidates(job, one, pins) for gpus, one in places.items()}
        layouts = {gpus: layout for gpus, layout in found.items() if layout is not None}
        start = 0
        for gpus, layout in layouts.items():
            self.rows[gpus] = slice(start, start + len(np.asarray(layout.tp)))
            start = self.rows[gpus].stop
        whole = ServingLayout(**{name: _joined(layouts.values(), name) for name in vars(ServingLayout())}) if layouts else None
        self.sampler = None if whole is None else sampler_of(job, next(iter(places.values())), whole)
        self.sides: dict[int, RolloutSide] = {}
        """By steps ahead."""

    def side(self, placement: Placement) -> RolloutSide | None:
        """The engines of a placement; None = there are none."""
        rows = self.rows.get(placement.generate_gpus)
        if self.sampler is None or rows is None:
            return None
        if placement.staleness not in self.sides:
            self.sides[placement.staleness] = rollout_side(self.job, placement, self.sampler)
        return replace(self.sides[placement.staleness].take(rows), gpus=placement.generate_gpus)


def _joined(layouts: Iterable[ServingLayout], name: str) -> NDArray[np.int64]:
    """A field of several columns of layouts, one after the other."""
    return np.concatenate([np.broadcast_to(getattr(one, name), np.shape(one.tp)) for one in layouts])
