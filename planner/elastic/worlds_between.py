"""Plans for every number of nodes between two: what an elastic launch goes on with when nodes leave and come back."""

from __future__ import annotations

from planner.elastic.best_layout import fitting, resolved_plan, with_size
from planner.errors import PlannerError
from planner.plan_file import Plan

MOST = 32
"""Numbers of nodes that get a plan."""


def worlds_between(old: Plan, new: Plan) -> list[Plan]:
    """Plans with the old one's batch on every number of whole nodes between two plans that has one, fewest GPUs first.
    Raises PlannerError for more than MOST numbers."""
    node = int(old.cluster().hardware.gpus_per_node)
    low, high = sorted((old.num_gpus, new.num_gpus))
    counts = [n for n in range(low, high + 1) if n % node == 0]
    if len(counts) > MOST:
        raise PlannerError(f"between {low} and {high} GPUs lie {len(counts)} numbers of nodes; at most {MOST} get a plan each")
    resolved, batch = resolved_plan(old), old.workload.global_batch_size
    known = {one.num_gpus: one for one in (old, new) if one.workload.global_batch_size == batch}
    plans = []
    for count in counts:
        if count in known:
            plans.append(known[count])
        elif found := fitting(with_size(resolved, count)):
            [ratios] = found.resolved.unstated(found.layouts[:1]).ratios()
            why = f"the fastest on {count} GPUs with the batch of {batch} sequences"
            plans.append(found.resolved.plan(found.layouts[0], found.estimates[0], why, ratios))
    if not plans:
        raise PlannerError(f"no number of whole nodes of {node} GPUs between {low} and {high} GPUs has a plan with this batch")
    return plans
