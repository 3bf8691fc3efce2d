"""The least GPU time of a token: computation alone, or with the communication that passes wait for, on the shapes of a layer that
are the fastest."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.operators import Operator
from planner.cost.price.compute import price
from planner.cost.price.deduplicate import distinct
from planner.cost.price.layer_costs import (
    INDEX,
    SHAPE_FIELDS,
    ShapePrices,
    distinct_shapes,
    ends_of,
    operators_of,
    shard_of,
)
from planner.cost.price.stage_times import EXPOSED, block_counts
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
        return _least(self._workload, self._shapes, seconds)


def exposed_gpu_seconds(workload: Workload, shapes: ShapePrices, layouts: Layout) -> float:
    """The same bound for some layouts on one kind of hardware, with the communication of layers that no computation hides: both
    passes of a stage wait for it."""
    if not len(layouts):
        return np.inf
    some = distinct_shapes(layouts)[0]
    blocks, seconds = shapes.blocks(some), np.zeros(len(some))
    for name, count in block_counts(workload.model).items():
        block = getattr(blocks, name)
        for quantity in ("forward", "dgrad", "wgrad", *EXPOSED[0], *EXPOSED[1]):
            seconds = seconds + count * block[INDEX[quantity]]
    return _least(workload, some, seconds)


def _least(workload: Workload, shapes: Layout, seconds: Floats) -> float:
    """The least GPU-seconds per token; ``seconds``: of a microbatch in all layers, on each rank that shares it."""
    ranks = np.asarray(shapes.tp) * np.asarray(shapes.cp)
    tokens = np.asarray(shapes.micro_batch_size) * float(workload.sequences * workload.sequence_length)
    return float(np.min(ranks * seconds / tokens))
