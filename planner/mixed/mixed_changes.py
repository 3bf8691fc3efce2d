"""What if: a mixed plan without a kind, with a slower node, with another link; as it stands, and planned again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster_file import ClusterFile, Link
from planner.errors import PlannerError, shown
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_plan import MixedPlan, job_of, priced_plan
from planner.mixed.mixed_question import kind_of_node, slowed
from planner.mixed.mixed_search import MixedPins, search_mixed
from planner.search import SAFE
from planner.units import parse


@dataclass(frozen=True, kw_only=True)
class MixedChange:
    """One change."""

    change: str
    kept_s: float | None
    """Seconds of a step of the plan as it stands; None where it cannot run so."""
    best: MixedPlan | None
    """The best plan then; None where nothing fits."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"change": self.change, "kept_step_time_s": self.kept_s, "best": None if self.best is None else self.best.to_dict()}


@dataclass(frozen=True, kw_only=True)
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
        ends, rate = _halves(text, "--link", "us-east,us-west=2Gb/s")
        linked = relinked(plan.cluster, ends, parse(rate, "bytes/s", what="--link"))
        changes.append((f"{ends} at {rate}", linked, linked))
    if not changes:
        raise PlannerError("what should change? give --without KIND, --slowdown NODE=FACTOR or --link A,B=RATE")
    rows = [_changed(plan, name, cluster, kept, progress) for name, cluster, kept in changes]
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


def relinked(cluster: ClusterFile, ends: str, bandwidth: float) -> ClusterFile:
    """The cluster with another bandwidth between two kinds or sites; a link that there was keeps the rest. Raises PlannerError."""
    pair = tuple(one.strip() for one in ends.split(","))
    if len(pair) != 2:
        raise PlannerError(f"--link is between {shown(ends)}; write it like us-east,us-west=2Gb/s")
    old = next((one for one in cluster.links if set(one.between) == set(pair)), None)
    new = replace(old, bandwidth=bandwidth) if old else Link(between=(pair[0], pair[1]), bandwidth=bandwidth)
    return replace(cluster, links=tuple(new if one is old else one for one in cluster.links) if old else (*cluster.links, new))


def _changed(
    plan: MixedPlan, name: str, cluster: ClusterFile, as_it_is: ClusterFile, progress: Callable[[str], None]
) -> MixedChange:
    progress(name)
    job = job_of(plan.workload, cluster, plan.trainer)
    kept: float | None = None
    try:
        found = estimate_mixed(job_of(plan.workload, as_it_is, plan.trainer), plan.layout)
        kept = found.step_time if found.out_of_memory <= SAFE else None
    except PlannerError:  # a kind is gone
        kept = None
    layout = plan.layout
    pins = MixedPins(cp=layout.cp, ep=layout.ep, zero=layout.zero, schedule=layout.schedule)
    best = search_mixed(job, pins, top=1).best
    made = priced_plan(job, plan.trainer, best[0][0], plan.assumptions, f"planned again: {name}") if best else None
    return MixedChange(change=name, kept_s=kept, best=made)
