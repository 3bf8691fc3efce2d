"""How often ``plan run`` saves: the interval of ``plan resilience`` for the plan, where it runs."""

from dataclasses import replace

from planner.cluster_file import ClusterFile
from planner.costs import HOUR
from planner.elastic.elastic_job import ElasticJob, surroundings_of
from planner.elastic.failure_answers import interval_of
from planner.plan_file import Plan
from planner.record import record
from planner.units import format_bytes, format_seconds


@record
class Interval:
    """Time between two saves."""

    seconds: float
    """From the end of one stall to the start of the next."""
    why: str
    """Where it comes from."""


def best_interval_of(plan: Plan, cluster: ClusterFile | None, mtbf: float | None) -> Interval:
    """Daly's interval for asynchronous saves. ``mtbf``: seconds between failures of one node; None = the cluster file's, else a
    published rate."""
    around = surroundings_of(cluster, plan.cluster().hardware)
    job = ElasticJob(plan=plan, around=around if mtbf is None else replace(around, mtbf=mtbf))
    stall, behind = format_seconds(job.times.stall), format_seconds(job.times.behind)
    why = (
        f"Daly's for a failure of the job every {job.mtbf / HOUR:,.0f} h ({job.node_mtbf.why}): a checkpoint has "
        f"{format_bytes(job.saved.size)}, stalls {stall} and is whole {behind} later"
    )
    return Interval(seconds=interval_of(job), why=why)
