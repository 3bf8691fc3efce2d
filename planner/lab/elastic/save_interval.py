"""How often ``plan run`` saves: Daly's interval for what one save of this plan stalls, and for how often its nodes fail."""

import math
from dataclasses import dataclass

from planner.cluster_file import ClusterFile, Storage
from planner.costs import HOUR
from planner.elastic.checkpoints import best_interval, save_times
from planner.elastic.failure_rates import constants, node_mtbf
from planner.elastic.shards import saved_of
from planner.plan_file import Plan
from planner.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Time between two saves."""

    seconds: float
    """From the start of one to the start of the next."""
    why: str
    """Where it comes from."""


def interval_of(plan: Plan, cluster: ClusterFile | None, mtbf: float | None, ranks: int) -> Interval:
    """The interval of a plan, of ``ranks`` ranks on each node: ``best_interval`` of asynchronous saves.

    ``mtbf``: seconds between failures of one node; None = the cluster file's, else a published rate. Storage: the cluster file's,
    else each node reaches the rate of profiles/elastic.yaml. Failures of nodes are independent: M of the job is that of a node over
    the nodes.
    """
    known, nodes = constants(), math.ceil(plan.num_gpus / ranks)
    said = min((one.mtbf for one in cluster.nodes if one.mtbf), default=None) if cluster is not None else None
    rate = mtbf or said or node_mtbf(plan.cluster().hardware).seconds
    each = known.storage_node.value
    storage = cluster.storage if cluster is not None and cluster.storage is not None else None
    storage = storage or Storage(read=each * nodes, write=each * nodes, per_node=each)
    size = saved_of(plan.workload, plan.load_trainer()).size
    times = save_times(size, storage, ranks=plan.num_gpus, node_ranks=ranks, copy=known.host_copy.value)
    seconds = best_interval(times, rate / nodes, plan.prediction.step_time_s)
    why = (
        f"Daly's for a failure of the job every {rate / nodes / HOUR:.3g} h: a checkpoint has {format_bytes(size)}, stalls "
        f"{format_seconds(times.stall)} and is whole {format_seconds(times.behind)} later"
    )
    return Interval(seconds=seconds, why=why)
