"""What was observed of a running mixed plan: nodes that are slower than planned of their stages, their cost, a new plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner.assumption import Assumption
from planner.cluster_file import ClusterFile
from planner.costs import DAY
from planner.elastic.mixed_elastic_job import MixedElasticJob
from planner.elastic.observed import Observed
from planner.elastic.stragglers import Straggler, busy_times, grouped, levels, odd_gpus, slow_of, slow_pairs
from planner.errors import PlannerError
from planner.mixed.export.placement import Placement
from planner.mixed.local_updates import price_layout
from planner.mixed.mixed_changes import changed_plan
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_plan import MixedPlan, job_of, usd_per_second
from planner.mixed.mixed_question import kind_of_node, slowed
from planner.questions.watch.replans import LEAST_GAIN, Change, actions_of, in_steps, move_seconds, slower_ranks
from planner.questions.watch.watched import REMAINING, Costed, Watched

CHECK = "time the same matrix product on every GPU, or read clocks with 'dcgmi dmon -e 100,155' on all nodes"


@dataclass(frozen=True)
class Mixed:
    """A mixed plan as it is held up."""

    job: MixedElasticJob

    @property
    def plan(self) -> MixedPlan:
        """The plan."""
        return self.job.plan

    @property
    def placement(self) -> Placement:
        """Where its ranks are."""
        return self.job.placement

    @property
    def step(self) -> float:
        """Seconds of a step as planned."""
        return self.job.step_time

    def expected(self) -> dict[int, float]:
        """Seconds of a step that each rank is planned to be busy."""
        stages = self.plan.prediction.stages
        at: dict[int, float] = {}
        for one in self.placement.stages:
            mine = [each.busy_s for each in stages if each.pipeline == one.pipeline + 1]
            at |= dict.fromkeys(one.ranks, mine[one.stage])
        return at

    def node_of(self, rank: int) -> str:
        """The node of a rank as the cluster numbers it."""
        return next(one.name for one in self.placement.nodes if one.first_rank <= rank < one.first_rank + one.gpus)

    def slow_nodes(self, ranks: Mapping[int, float]) -> dict[str, float]:
        """Slow nodes, as slow as their slowest rank, in steps."""
        found: dict[str, float] = {}
        for rank, level in ranks.items():
            found[self.node_of(rank)] = max(found.get(self.node_of(rank), 1.0), in_steps(level))
        return found

    def clusters(self, slow: Mapping[str, float]) -> tuple[ClusterFile, ClusterFile]:
        """With the slow nodes, and with their kinds as slow as the slowest of each: equal replicas wait for it."""
        alone = whole = self.plan.cluster
        kinds: dict[str, float] = {}
        for node, factor in slow.items():
            alone = slowed(alone, node, factor)
            kind = kind_of_node(self.plan.cluster, node)
            kinds[kind] = max(kinds.get(kind, 1.0), factor)
        for kind, factor in kinds.items():
            whole = slowed(whole, kind, factor)
        return alone, whole

    def step_with(self, slow: Mapping[str, float]) -> float:
        """Seconds of a step as the plan stands."""
        job = job_of(self.plan.workload, self.clusters(slow)[1], self.plan.trainer)
        return max(price_layout(job, self.plan.layout).step_time, self.step)

    def dollars(self, loss: float) -> float | None:
        """Dollars a day of a part of the step."""
        each = usd_per_second(self.plan.job(), self.plan.layout)
        return None if each is None else loss * each * DAY


def found_in(mixed: Mixed, seen: Observed) -> list[Straggler]:
    """Slow ranks and nodes against what is planned of their stages, odd GPUs, slow pairs of ranks. Raises PlannerError."""
    names = {rank: one.name for one in mixed.placement.nodes for rank in range(one.first_rank, one.first_rank + one.gpus)}
    seen = replace(seen, nodes={**names, **seen.nodes})
    busy, expected, world = busy_times(seen), mixed.expected(), mixed.placement.world
    if busy and max(busy) >= world:
        raise PlannerError(f"rank {max(busy)} was measured, but the plan has {world} GPUs; is it the plan of this run?")
    found = []
    if busy:
        against = {rank: [value / expected[rank] for value in values] for rank, values in busy.items()}
        level = levels(against, dict.fromkeys(busy, 0))
        text = f"as the other {len(busy) - 1} ranks, against what is planned of their stages"
        found = grouped(slow_of(level), seen, 1, {rank: text for rank in busy}, {rank: len(busy[rank]) for rank in busy})
    most = max(one.gpus for one in mixed.placement.nodes)
    return found + slow_pairs(seen, most) + odd_gpus(seen, most, world)


def watched_mixed(
    job: MixedElasticJob, seen: Observed, remaining: float = REMAINING, progress: Callable[[str], None] = lambda _: None,
    before: Watched | None = None,
) -> Watched:  # fmt: skip
    """A running mixed plan at one moment; ``before``: the look before, whose plan is kept while the same nodes are as slow.

    Raises PlannerError.
    """
    mixed, plan = Mixed(job), job.plan
    found = found_in(mixed, seen)
    costs = []
    for one in found:
        slow = mixed.slow_nodes(slower_ranks([one]))
        loss = 1.0 - mixed.step / mixed.step_with(slow) if slow else 0.0
        costs.append(Costed(found=one, loss=loss, usd_per_day=mixed.dollars(loss), check=CHECK if slow else ""))
    nodes = mixed.slow_nodes(slower_ranks(found))
    now = mixed.step_with(nodes) if nodes else mixed.step
    again = None if before is None else before.again
    actions, loss = [], 1.0 - mixed.step / now
    if loss > LEAST_GAIN:
        other = Change(what=f"replace {', '.join(sorted(nodes))}", step=mixed.step, how="drain the node, start again from a save")
        if again is None or again[0] != nodes:
            again = nodes, _planned_again(mixed, nodes, progress)
        actions = actions_of([other, *again[1]], now, move_seconds(job), remaining)
    said = () if remaining != REMAINING else (
        Assumption("training left", "24 h", "assumed: what a change must pay for itself in", "--remaining"),
    )  # fmt: skip
    return Watched(
        title=f"{job.model} on {job.machines}", layout=job.layout_in_words, planned=mixed.step,
        batch=plan.layout.global_batch_size, seen=seen, measured=seen.step_time,
        interval=plan.prediction.step_time_range_s, findings=tuple(sorted(costs, key=lambda one: -one.loss)), loss=loss,
        usd_per_day=mixed.dollars(loss), actions=tuple(actions), remaining=remaining, assumptions=said if actions else (),
        again=again, skipped=_skipped(seen),
    )  # fmt: skip


def _skipped(seen: Observed) -> str:
    """What was read of rings and experts: neither is compared in a plan whose stages are unlike."""
    read = {
        "times that ranks communicate, by data parallel ring": "communication" in seen.ranks,
        "tokens of experts": bool(seen.experts) or "tokens" in seen.ranks,
    }
    said = " and ".join(what for what, there in read.items() if there)
    return f"{said} (a plan over several kinds of nodes)" if said else ""


def _planned_again(mixed: Mixed, nodes: Mapping[str, float], progress: Callable[[str], None]) -> list[Change]:
    """The best plan with the speeds that were measured; none where nothing fits."""
    best = changed_plan(mixed.plan, "plans with the measured speeds", *mixed.clusters(nodes), progress).best
    if best is None:
        return []
    what = f"plan again with the measured speeds: {shape_text(best.layout)}"
    return [Change(what=what, step=best.prediction.step_time_s, how="--output writes the plan", plan=best.to_dict())]
