"""What was observed of a running job against its plan: stragglers with their cost, and re-plans that pay for themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.assumption import Assumption
from planner.cost.layer.routing import busiest
from planner.costs import DAY, HOUR
from planner.elastic.elastic_job import ElasticJob
from planner.elastic.expert_placement import loads_of
from planner.elastic.observed import Observed
from planner.elastic.stragglers import Planned, Straggler, node_of, stragglers
from planner.explain import layout_text
from planner.questions.doctor.mechanisms import Mechanism, slower
from planner.questions.watch.replans import (
    LEAST_GAIN,
    Action,
    Change,
    Held,
    actions_of,
    changes_of_experts,
    changes_of_nodes,
    changes_of_stage,
    move_seconds,
    planned_again,
    replica_times,
    slower_ranks,
    stretch,
)
from planner.record import record
from planner.timeline.priced_plan import Priced, estimate_of, price_plan
from planner.units import format_seconds

SLOW = ("slow_rank", "slow_node", "throttled", "slow_stage")
"""Kinds that 'plan doctor' prices as a slow GPU; the others by what slow links, buses and uneven experts cost."""
OTHERS = ("slow_link", "narrow_bus", "expert_imbalance", "slow_stage")
"""Kinds that other nodes do not mend."""
REMAINING = DAY
Again = tuple[Mapping[Any, float], Sequence[Change]] | None


@record
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


@record
class Watched:
    """A running job at one moment."""

    title: str
    """Model and GPUs."""
    layout: str
    """In words."""
    planned: float
    """Seconds of a step."""
    batch: int
    """Sequences of a step."""
    seen: Observed
    measured: float | None
    """Seconds of a step; None where nothing said it."""
    interval: tuple[float, float]
    """Nine of ten runs of the plan lie within."""
    findings: tuple[Costed, ...]
    """The most expensive first."""
    loss: float
    """Part of the step time that all of them cost together."""
    usd_per_day: float | None
    """The same in dollars; None without a price."""
    actions: tuple[Action, ...]
    """Those that pay first, then the largest gain."""
    remaining: float
    assumptions: tuple[Assumption, ...]
    again: Again = None
    """Slow nodes, and the plan with their speeds."""
    skipped: str = ""
    """What was read and not looked at; '' where nothing is left out."""

    @property
    def best(self) -> Action | None:
        """What pays most; None where nothing does."""
        return next((one for one in self.actions if one.pays), None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if best := self.best:
            what = best.what.partition(":")[0]
            return f"{what}: {100.0 * best.gain:.1f} % of each step, repaid after {format_seconds(best.pays_after or 0.0)}"
        if self.findings:
            return "nothing that would pay for its move"
        if self.measured is not None and self.measured > self.interval[1]:
            return "slower than nine of ten runs of such a plan, and no rank stands out: ask 'plan doctor'"
        return "as planned"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sources": list(self.seen.sources), "ranks": len({r for one in self.seen.ranks.values() for r in one}),
            "gpus": len(self.seen.gpus), "at_step": self.seen.at, "step_time_s": self.measured,
            "planned_step_time_s": self.planned,
            "interval_s": list(self.interval), "findings": [one.to_dict() for one in self.findings],
            "loss_percent": 100.0 * self.loss, "usd_per_day": self.usd_per_day,
            "actions": [one.to_dict() for one in self.actions], "verdict": self.verdict,
            "assumptions": [vars(one) for one in self.assumptions], "skipped": self.skipped,
        }  # fmt: skip


@dataclass(frozen=True)
class Pricing:
    """Seconds of a step of a plan that something holds up, by the mechanisms of ``plan doctor``."""

    job: ElasticJob
    base: Priced

    @cached_property
    def mechanisms(self) -> dict[str, Mechanism]:
        """What could make the plan slower."""
        return {one.key: one for one in slower(self.base)}

    @property
    def microbatches(self) -> int:
        """Of a step and replica."""
        return int(self.base.layout.num_microbatches)

    def step_with(self, key: str, size: float) -> float:
        """With a mechanism of some size; as planned where the plan cannot have it."""
        mechanism = self.mechanisms.get(key)
        return self.base.step_time if mechanism is None else float(
            estimate_of(*mechanism.change(self.base, max(size, 1.0))).step_time[0]
        )  # fmt: skip

    def mechanism_of(self, one: Straggler) -> tuple[str, float]:
        """Mechanism and size of a straggler; '' where none prices it."""
        hardware = self.job.hardware
        if one.kind in SLOW:
            ranks = dict.fromkeys(one.ranks, one.size)
            pipeline = np.array([[one.size] + [1.0] * (int(self.base.layout.pp) - 1)])
            return "slow_gpu", stretch(replica_times(self.job.places, ranks) if ranks else pipeline, self.microbatches)
        if one.kind == "slow_link":
            return ("network" if "network" in self.mechanisms else "scale_up"), one.size
        if one.kind == "narrow_bus":  # what a card of the network gets through the bus; all of it where GPUs have no other link
            over = hardware.network_bandwidth * one.size / hardware.pcie_bandwidth
            return ("scale_up", one.size) if hardware.scale_up_domain <= 1 else ("network", max(over, 1.0))
        if one.kind == "expert_imbalance":
            return "expert_imbalance", self.uneven(one.size)
        return "", 1.0

    def uneven(self, size: float) -> float:
        """Size of the mechanism for tokens of the busiest expert rank over the mean."""
        mechanism = self.mechanisms.get("expert_imbalance")
        return size / mechanism.now if mechanism is not None else 1.0

    def lost(self, one: Straggler) -> float:
        """Seconds of a step that a straggler costs."""
        key, size = self.mechanism_of(one)
        return max(self.step_with(key, size) - self.base.step_time, 0.0) if key else 0.0

    def costed(self, one: Straggler) -> Costed:
        """A straggler with its part of the step, and dollars a day."""
        mechanism = self.mechanisms.get(self.mechanism_of(one)[0])
        check = mechanism.check if mechanism is not None else ""
        if one.kind == "broken":
            check = "nvidia-smi -q on that node; drain it before it ends the job"
        lost = self.lost(one)
        loss = lost / (self.base.step_time + lost)
        return Costed(found=one, loss=loss, usd_per_day=self.dollars(loss), check=check)

    def dollars(self, loss: float) -> float | None:
        """Dollars a day of a part of the step."""
        price = self.job.usd_per_hour
        return None if price is None else loss * self.job.plan.num_gpus * price * DAY / HOUR


def stage_seconds(base: Priced) -> list[float]:
    """Seconds of a microbatch on every pipeline rank: the first and the last stage have embedding and head."""
    pp = int(base.layout.pp)
    first, middle, last = (base.times.forward + base.times.backward)[:, 0].tolist()
    return [first, *[middle] * (pp - 2), last] if pp > 1 else [first]


def watched(
    job: ElasticJob, seen: Observed, remaining: float = REMAINING, progress: Callable[[str], None] = lambda _: None,
    before: Watched | None = None,
) -> Watched:  # fmt: skip
    """A running job at one moment; ``before``: the look before, whose plan is kept while the same nodes are as slow.

    Raises PlannerError.
    """
    pricing, prediction = Pricing(job, price_plan(job.plan)), job.plan.prediction
    exposed = sum(value for name, value in prediction.time_s.items() if "communication" in name)
    imbalance = float(busiest(job.plan.workload, np.asarray(job.plan.layout.ep)))
    layers, loads = loads_of(seen.experts, job.plan.workload.model.num_experts) if seen.experts else ((), None)
    planned = Planned(
        places=job.places, node_ranks=job.node_ranks, stages=stage_seconds(pricing.base), communication=exposed, imbalance=imbalance
    )
    found = stragglers(seen, planned, loads)
    costs = sorted((pricing.costed(one) for one in found), key=lambda one: -one.loss)
    extra = sum(max((pricing.lost(one) for one in found if one.kind == kind), default=0.0) for kind in OTHERS)

    def step_at(size: float) -> float:
        return pricing.step_with("slow_gpu", size) + extra

    held = Held(job=job, levels=slower_ranks(found), step_at=step_at)
    now = step_at(stretch(replica_times(job.places, held.levels), pricing.microbatches))
    unplaced = [one for one in found if one.kind == "throttled" and not one.ranks]
    now = max(now, *(step_at(pricing.mechanism_of(one)[1]) for one in unplaced), 0.0)
    loss = 1.0 - pricing.base.step_time / now
    actions, again = list[Action](), None if before is None else before.again
    if loss > LEAST_GAIN:
        changes = _changes(held, pricing, found, (layers, loads), seen, progress)
        if held.levels and (again is None or again[0] != held.nodes):
            progress("plans with the measured speeds")
            again = held.nodes, planned_again(held)
        if held.levels and again is not None:
            changes += [replace(one, step=one.step + extra) for one in again[1]]
        actions = actions_of(changes, now, move_seconds(job), remaining)
    assumed = [one for one in job.assumptions() if one.what not in ("failures", "saves")]
    if remaining == REMAINING:
        assumed.append(Assumption("training left", "24 h", "assumed: what a change must pay for itself in", "--remaining"))
    plan = job.plan
    return Watched(
        title=f"{plan.workload.model.name} on {plan.num_gpus} x {plan.hardware}", layout=layout_text(plan.layout),
        planned=job.step_time, batch=plan.workload.global_batch_size, seen=seen, measured=seen.step_time,
        interval=prediction.step_time_range_s, findings=tuple(costs), loss=loss, usd_per_day=pricing.dollars(loss),
        actions=tuple(actions), remaining=remaining, assumptions=tuple(assumed) if actions else (), again=again,
    )  # fmt: skip


def _changes(
    held: Held, pricing: Pricing, found: Sequence[Straggler], experts: tuple[Sequence[int], Floats | None], seen: Observed,
    progress: Callable[[str], None],
) -> list[Change]:
    """What could be done about all that was found."""
    worst = {kind: max((one for one in found if one.kind == kind), key=pricing.lost) for kind in {one.kind for one in found}}
    changes: list[Change] = []
    if held.levels:
        names = {node: node_of(seen, node * held.job.node_ranks, held.job.node_ranks) for node in held.nodes}
        changes += changes_of_nodes(held, names, progress)
    elif one := worst.get("throttled"):
        changes.append(Change(what=f"replace the node of {one.who}", step=held.step_at(1.0), how="drain the node, start again"))
    if (one := worst.get("slow_stage")) and not held.levels:
        cost = pricing.lost(one)
        changes += changes_of_stage(held, one.size, lambda size: held.step_at(size) - cost)
    if (one := worst.get("expert_imbalance")) and pricing.lost(one) > 0:
        slow = stretch(replica_times(held.places, held.levels), pricing.microbatches)
        rest = held.step_at(slow) - pricing.lost(one) - pricing.base.step_time
        changes += changes_of_experts(
            held, experts[1], experts[0], lambda size: rest + pricing.step_with("expert_imbalance", pricing.uneven(size))
        )
    return changes
