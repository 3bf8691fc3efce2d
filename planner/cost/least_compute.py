"""The least GPU time of a token: computation alone, on the shapes of a layer that compute it fastest."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.operators import Operator
from planner.cost.price.compute import price
from planner.cost.price.deduplicate import distinct
from planner.cost.price.layer_costs import SHAPE_FIELDS, ends_of, operators_of, shard_of
from planner.cost.price.stage_times import block_counts
from planner.cost.state_dtypes import stored_as
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.trainer import Trainer
from planner.workload import Workload


class LeastCompute:
    """Of some layouts of a job, on any hardware: what their operators are does not depend on it."""

    def __init__(self, workload: Workload, trainer: Trainer, layouts: Layout) -> None:
        self._workload = workload
        self._shapes = distinct(layouts, SHAPE_FIELDS)[0]
        self._shard = shard_of(workload, stored_as(workload, trainer), self._shapes)

    @cached_property
    def _operators(self) -> list[tuple[float, list[Operator]]]:
        """Those of each block, with how many of it the model has."""
        layers, counts = operators_of(self._shard), block_counts(self._workload.model)
        found = [(counts[name], operators) for name, (operators, _) in ends_of(self._shard).items()]
        found += [(share, operators) for share, (operators, _) in layers["images"]]
        return found + [(counts[name] * share, made[0]) for name in ("dense", "moe") for share, made in layers[name]]

    def gpu_seconds(self, hardware: HardwareProfile) -> float:
        """GPU-seconds per token that no plan undercuts: communication, idle time, recompute and the optimizer only add to

            min over shapes of  t c sum(blocks) (forward + dgrad + wgrad) / (b s)

        The slowest stage takes at least the mean of all, sum(blocks) / p, for each of m microbatches: on N = t c p d GPUs
        N T >= t c d m sum(blocks), and B = b m d. Infinite where there is no layout."""
        if not len(self._shapes):
            return np.inf
        seconds: Floats = np.zeros(len(self._shapes))
        for count, operators in self._operators:
            for work in price(operators, self._shard, hardware).values():
                seconds = seconds + count * (self._workload.forwards * work.forward + work.dgrad + work.wgrad)
        ranks = np.asarray(self._shapes.tp) * np.asarray(self._shapes.cp)
        tokens = self._shard.batch * self._workload.sequence_length
        return float(np.min(ranks * seconds / tokens))
