"""What if: a mixed plan without a kind, with a slower node, with another link; as it stands, and planned again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.cluster_file import ClusterFile
from planner.errors import PlannerError, shown
from planner.mixed.known_links import changed_link
from planner.mixed.local_search import search_local
from planner.mixed.local_updates import price_layout
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import MixedPlan, job_of, priced_plan
from planner.mixed.mixed_question import kind_of_node, slowed
from planner.mixed.mixed_search import kinds_of
from planner.mixed.one_kind import Alone, alone_of
from planner.mixed.run_limits import search_within
from planner.record import record


@record
class MixedChange:
    """One change."""

    change: str
    kept_s: float | None
    """Seconds of a step of the plan as it stands; None where it cannot run so."""
    best: MixedPlan | None
    """The best plan then; None where nothing fits."""
    alone: Alone | None = None
    """Where that is on one kind: what the ordinary search finds for it, if that is faster."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "change": self.change, "kept_step_time_s": self.kept_s, "best": None if self.best is None else self.best.to_dict(),
            **({} if self.alone is None else {"alone": vars(self.alone)}),
        }  # fmt: skip


@record
class MixedChanges:
    """A mixed plan and its changes."""

    plan: MixedPlan
    rows: tuple[MixedChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        return {"plan": self.plan.to_dict(), "changes": [one.to_dict() for one in self.rows]}


def mixed_what_if(
    plan: MixedPlan, *, without: Sequence[str] = (), slowdown: Sequence[str] = (), link: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> MixedChanges:  # fmt: skip
    """Each change by itself. ``without``: kinds; ``slowdown``: 'node-3=1.4'; ``link``: 'us-east,us-west=2Gb/s'.

    Raises PlannerError.
    """
    changes = [(f"without {one}", plan.cluster.without(one), plan.cluster.without(one)) for one in without]
    for text in slowdown:
        node, factor = _halves(text, "--slowdown", "node-3=1.4")
        times = _factor(factor, text)
        whole = slowed(plan.cluster, kind_of_node(plan.cluster, node), times)  # equal replicas all wait for the slow one
        changes.append((f"{node} slower by {factor}", slowed(plan.cluster, node, times), whole))
    for text in link:
        linked = changed_link(plan.cluster, text)
        changes.append((" at ".join(text.split("=", 1)), linked, linked))
    if not changes:
        raise PlannerError("what should change? give --without KIND, --slowdown NODE=FACTOR or --link A,B=RATE")
    rows = [changed_plan(plan, name, cluster, kept, progress) for name, cluster, kept in changes]
    return MixedChanges(plan=plan, rows=tuple(rows))


def _halves(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise PlannerError(f"{flag} is {shown(text)}; write it like {example}")
    return name.strip(), value.strip()


def _factor(text: str, whole: str) -> float:
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0.5 <= factor <= 100.0:
        raise PlannerError(f"--slowdown is {shown(whole)}; the factor must be a number from 0.5 to 100: its time over others'")
    return factor


def _best(job: MixedJob, plan: MixedPlan) -> MixedLayout | None:
    """The best layout of a job within what the plan fixes, with its local updates while there are two sites; None where nothing
    fits."""
    outer = plan.layout.outer
    if outer is None or len(job.cluster.sites) < 2:
        found = search_within(job, plan.trainer, plan.pins, 1).best
        return found[0][0] if found else None
    try:
        return search_local(job, outer, plan.pins).layout
    except PlannerError:  # nothing fits on one of the sites
        return None


def changed_plan(
    plan: MixedPlan, name: str, cluster: ClusterFile, as_it_is: ClusterFile, progress: Callable[[str], None]
) -> MixedChange:
    """A plan on another cluster: planned again on ``cluster``, and as it stands on ``as_it_is``. ``name``: of the change."""
    progress(name)
    job = job_of(plan.workload, cluster, plan.trainer)
    kept: float | None = None
    try:
        found = price_layout(job_of(plan.workload, as_it_is, plan.trainer), plan.layout)
        kept = found.step_time if found.fits else None
    except PlannerError:  # a kind is gone
        kept = None
    best = _best(job, plan)
    made = priced_plan(job, plan.trainer, best, plan.assumptions, f"planned again: {name}", plan.pins) if best else None
    kinds = kinds_of(best) if best else set(job.kinds)
    alone = alone_of(job, min(kinds), plan.pins.of_layout()) if len(kinds) == 1 else None
    step = made.prediction.step_time_s if made else float("inf")
    faster = alone is not None and alone.step_time_s is not None and alone.step_time_s < step
    return MixedChange(change=name, kept_s=kept, best=made, alone=alone if faster else None)
