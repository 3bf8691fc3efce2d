"""What was observed of a running job against its plan: stragglers with their cost, and re-plans that pay for themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cost.layer.routing import busiest
from planner.costs import DAY
from planner.elastic.best_layout import best_layout, resolved_plan
from planner.elastic.elastic_job import ElasticJob
from planner.elastic.observed import Observed
from planner.elastic.stragglers import Straggler, stragglers
from planner.plan_file import Assumption
from planner.questions.doctor.mechanisms import Mechanism, slower
from planner.timeline.priced_plan import Priced, estimate_of, price_plan

MECHANISMS = {
    "slow_rank": "slow_gpu", "slow_node": "slow_gpu", "slow_stage": "slow_gpu", "throttled": "slow_gpu", "slow_link": "network",
    "expert_imbalance": "expert_imbalance",
}  # fmt: skip
"""Kind of a straggler -> mechanism of 'plan doctor' that prices it."""
LEAST_LOSS = 1e-3
"""Findings that cost less of the step are not acted on."""
REMAINING = DAY


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A straggler with what it costs."""

    found: Straggler
    loss: float
    """Part of the step time that it costs; 0 where it is not priced."""
    usd_per_day: float | None
    check: str
    """The command that decides, of the mechanism."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.found.to_dict(), "loss_percent": 100.0 * self.loss, "usd_per_day": self.usd_per_day, "check": self.check}


@dataclass(frozen=True, kw_only=True)
class Action:
    """What could be done, and whether it pays."""

    what: str
    gain: float
    """Part of the step time that it wins."""
    cost: float
    """Seconds that training stands still for it."""
    pays_after: float | None
    """Seconds until it has repaid; None = never."""
    pays: bool
    """Within the training that is left."""
    how: str
    """The command, or setting."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "gain_percent": 100.0 * self.gain}


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A running job at one moment."""

    job: ElasticJob
    seen: Observed
    measured: float | None
    """Seconds of a step; None where nothing said it."""
    interval: tuple[float, float]
    """Nine of ten runs of the plan lie within."""
    findings: tuple[Costed, ...]
    """The most expensive first."""
    actions: tuple[Action, ...]
    """The largest gain first."""
    remaining: float
    assumptions: tuple[Assumption, ...]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if best := next((one for one in self.actions if one.pays), None):
            return f"{best.what}: {100.0 * best.gain:.1f} % of each step, repaid after {best.pays_after or 0.0:.0f} s"
        if self.findings:
            return "nothing that would pay for its move"
        if self.measured is not None and self.measured > self.interval[1]:
            return "slower than nine of ten runs of such a plan, and no rank stands out: ask 'plan doctor'"
        return "as planned"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sources": list(self.seen.sources), "ranks": len({r for one in self.seen.ranks.values() for r in one}),
            "gpus": len(self.seen.gpus), "step_time_s": self.measured, "planned_step_time_s": self.job.step_time,
            "interval_s": list(self.interval), "findings": [one.to_dict() for one in self.findings],
            "actions": [one.to_dict() for one in self.actions], "verdict": self.verdict,
            "assumptions": [vars(one) for one in self.assumptions],
        }  # fmt: skip


def step_with(base: Priced, mechanism: Mechanism, size: float) -> float:
    """Seconds of a step with a mechanism of some size."""
    return float(estimate_of(*mechanism.change(base, max(size, 1.0))).step_time[0])


def one_stage(slow: float, base: float, pp: int, microbatches: int) -> float:
    """Seconds of a step in which one stage of a pipeline is slower: all stages slower would take ``slow``.

    T = sum tau_j + (m - 1) max tau_j: with one stage x times slower (p - 1 + m x) / (p - 1 + m) of the time, so of what all stages
    would cost the part m / (p - 1 + m).
    """
    return base + (slow - base) * microbatches / (pp - 1.0 + microbatches)


def costed(job: ElasticJob, base: Priced, found: Sequence[Straggler]) -> list[Costed]:
    """Every straggler with its part of the step and dollars a day, by the mechanisms of ``plan doctor``."""
    mechanisms = {one.key: one for one in slower(base)}
    layout, price, answers = base.layout, job.usd_per_hour, []
    for one in found:
        mechanism = mechanisms.get(MECHANISMS.get(one.kind, ""))
        loss, check = 0.0, "nvidia-smi -q on that node; drain it before it ends the job" if one.kind == "broken" else ""
        if mechanism is not None:
            size = one.size / mechanism.now if mechanism.key == "expert_imbalance" else one.size
            step = step_with(base, mechanism, size)
            if mechanism.key == "slow_gpu":
                step = one_stage(step, base.step_time, int(layout.pp), int(layout.num_microbatches))
            loss, check = max(1.0 - base.step_time / step, 0.0), mechanism.check
        usd = None if price is None else loss * job.plan.num_gpus * price * 24.0
        answers.append(Costed(found=one, loss=loss, usd_per_day=usd, check=check))
    return sorted(answers, key=lambda one: -one.loss)


def shared_out(slow: float, replicas: int, microbatches: int) -> tuple[int, float]:
    """Microbatches of the one slow replica of R, and the time over that of equal shares: the others take what it leaves.

    min over k of max(k x, ceil((R m - k) / (R - 1))) / (m x), x its slowness, m the equal share; exact.
    """
    k = np.arange(1, microbatches + 1)
    times = np.maximum(k * slow, np.ceil((replicas * microbatches - k) / (replicas - 1)))
    best = len(times) - 1 - int(np.argmin(times[::-1]))  # of equals the most, which costs the others least
    return int(k[best]), float(times[best] / (microbatches * slow))


def actions_of(
    job: ElasticJob, worst: Costed, remaining: float, step_at: Callable[[float], float], progress: Callable[[str], None]
) -> list[Action]:
    """What could be done about the most expensive finding, each with its gain and its cost. ``step_at``: seconds of a step in which
    one GPU is some times slower."""
    layout, found, loss = job.plan.layout, worst.found, worst.loss
    now = job.step_time / (1.0 - loss)
    whole = job.times.behind + job.times.stall + sum(value for name, value in job.start.items() if name != "detection")
    tried: list[tuple[str, float, float, str]] = []
    if found.kind in ("slow_rank", "slow_node", "throttled", "slow_stage"):
        swap = "a node of the spares" if job.around.spares else "another node, when one is there"
        if found.kind != "slow_stage":
            what = f"replace {found.who if found.kind == 'slow_node' else f'the node of {found.who}'} by {swap}"
            tried.append((what, job.step_time, whole, "drain the node, start again from a save"))
            progress("without the slow node")
            left = (job.nodes - 1) * job.node_ranks
            fewer = best_layout(resolved_plan(job.plan), left, least=max(left // 2, 1)) if left >= 1 else None
            if fewer is not None:
                how = f"plan reshape PLAN --gpus {left}"
                tried.append((f"go on without that node, on {fewer.gpus} GPUs", fewer.step_time, whole, how))
        dp, m = int(layout.dp), int(layout.num_microbatches)
        if dp > 1 and found.kind in ("slow_rank", "throttled") and m > 1:
            k, ratio = shared_out(found.size, dp, m)
            how = f"{k} of {m} microbatches for that replica, each rank's loss weighted by its samples (own training loop)"
            tried.append(("uneven shares of the batch", step_at(found.size * ratio), whole, how))
        pp, layers = int(layout.pp), job.plan.workload.model.num_layers // int(layout.pp)
        if pp > 1 and layers > 1:
            k, ratio = shared_out(found.size, pp, layers)
            how = f"{k} instead of {layers} layers there (Megatron: --pipeline-model-parallel-layout)"
            tried.append(("fewer layers on the slow stage", step_at(found.size * ratio), whole, how))
    if found.kind == "expert_imbalance":
        how = "a stronger balancing loss or bias, or experts placed by load (EPLB)"
        tried.append(("balance the experts", job.step_time, 0.0, how))
    answers = []
    for what, step, cost, how in tried:
        gain = 1.0 - step / now
        after = cost / gain if gain > 0 else None
        pays = after is not None and gain > LEAST_LOSS and after < remaining
        answers.append(Action(what=what, gain=gain, cost=cost, pays_after=after, pays=pays, how=how))
    return sorted(answers, key=lambda one: (not one.pays, -one.gain))


def watched(
    job: ElasticJob, seen: Observed, remaining: float = REMAINING, progress: Callable[[str], None] = lambda _: None
) -> Watched:
    """A running job at one moment. Raises PlannerError."""
    base = price_plan(job.plan)
    prediction = job.plan.prediction
    exposed = sum(value for name, value in prediction.time_s.items() if "communication" in name)
    imbalance = float(busiest(job.plan.workload, np.asarray(job.plan.layout.ep)))
    found = stragglers(seen, job.places, job.node_ranks, communication=exposed, imbalance=imbalance)
    costs = costed(job, base, found)
    mechanism = next((one for one in slower(base) if one.key == "slow_gpu"), None)

    def step_at(size: float) -> float:
        step = base.step_time if mechanism is None else step_with(base, mechanism, size)
        return one_stage(step, base.step_time, int(base.layout.pp), int(base.layout.num_microbatches))

    actions = actions_of(job, costs[0], remaining, step_at, progress) if costs and costs[0].loss > LEAST_LOSS else []
    assumed = [one for one in job.assumptions() if one.what not in ("failures", "saves")]
    if remaining == REMAINING:
        assumed.append(Assumption("training left", "24 h", "assumed: what a change must pay for itself in", "--remaining"))
    measured = seen.step_time
    return Watched(
        job=job, seen=seen, measured=None if measured is None or not math.isfinite(measured) else measured,
        interval=prediction.step_time_range_s, findings=tuple(costs), actions=tuple(actions), remaining=remaining,
        assumptions=tuple(assumed) if actions else (),
    )  # fmt: skip
