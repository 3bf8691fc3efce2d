"""How many parameters a rank holds, trains and updates, by state sharding."""

import numpy as np

from planner.arrays import Floats
from planner.cost.pipeline.partition import StageParameters
from planner.layout import Layout
from planner.workload import Workload


def column(value: object) -> Floats:
    """A layout field as a float column of shape (N, 1)."""
    return np.atleast_1d(np.asarray(value, dtype=float))[..., None]


def shard_groups(layout: Layout) -> tuple[Floats, Floats]:
    """Ranks over which states are sharded: dense weights over dp_shard * cp, experts over their part of edp."""
    replicas = column(layout.dp) / column(layout.shard)
    return column(layout.shard) * column(layout.cp), np.maximum(column(layout.edp) / replicas, 1.0)


def trained_parameters(workload: Workload, parameters: StageParameters) -> tuple[Floats, Floats]:
    """Parameters that get gradients: all of them, or the adapters (which count as dense)."""
    if workload.lora_rank:
        return parameters.adapters, np.zeros_like(parameters.expert)
    return parameters.dense, parameters.expert


def local_states(workload: Workload, layout: Layout, parameters: StageParameters) -> Floats:
    """Parameters whose optimizer states live on one rank."""
    dense, expert = trained_parameters(workload, parameters)
    dense_shard, expert_shard = shard_groups(layout)
    sharded = column(layout.zero) >= 1
    return dense / np.where(sharded, dense_shard, 1.0) + expert / np.where(sharded, expert_shard, 1.0)


def gathered_bytes(workload: Workload) -> float:
    """Bytes per parameter of weights that are gathered: in fp32 the fp32 weights themselves."""
    return 4.0 if workload.precision == "fp32" else 2.0
