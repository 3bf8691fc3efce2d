"""The plans of a job for every number of GPUs that it may get, exported before it starts: a failure does not wait for a search."""

import dataclasses
from collections.abc import Callable, Iterable

from planner.cost.estimate import Estimate
from planner.elastic.moves import nesting
from planner.elastic.reshape import EQUAL
from planner.elastic.shards import places_of, places_of_plan
from planner.errors import PlannerError
from planner.lab.elastic.run_flags import Adapter
from planner.layout import Layout
from planner.plan_file import Plan, predict
from planner.questions.best_plan import best_of, on_cluster, resolved_of
from planner.record import record
from planner.search import Finding, Pins
from planner.trainers.bundle.nearest import refusals_of
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target

CANDIDATES = 20
"""Plans that a search gives, of which the best one that the target runs is taken."""


@record
class World:
    """The plan for one number of GPUs."""

    plan: Plan
    """Of the same job and batch."""
    changed: str
    """What differs from the layout of the plan that the user gave; "" = nothing."""

    @property
    def words(self) -> str:
        """The layout in short."""
        layout = self.plan.layout
        words = [f"{name} {int(getattr(layout, name))}" for name in ("tp", "pp", "dp")]
        return ", ".join([*words, f"micro batch {int(layout.micro_batch_size)}"])


def worlds_of(
    plan: Plan, counts: Iterable[int], adapter: Adapter, say: Callable[[str], object]
) -> tuple[dict[int, World], list[str]]:
    """(number of GPUs -> its plan, why the others have none): the plan itself for its own number, elsewhere the best one of the
    same job with the same global batch that the trainer runs. Raises PlannerError where the plan itself cannot be exported."""
    target, found, missing = load_target(adapter.target), {}, []
    for gpus in sorted(set(counts), reverse=True):
        if gpus == plan.num_gpus:
            if reasons := refusals_of(target, ExportJob.of(plan)):
                raise PlannerError(f"{target.name} cannot run this plan: {'; '.join(reasons)}")
            found[gpus] = World(plan=plan, changed="")
            continue
        say(f"planning for {gpus} GPUs")
        other, why = replanned(plan, gpus, adapter)
        if other is None:
            missing.append(f"{gpus} GPUs: {why}")
        else:
            found[gpus] = World(plan=other, changed=_changes(plan, other))
    if not found:
        raise PlannerError(f"no number of GPUs has a plan: {'; '.join(missing)}")
    return found, missing


def replanned(plan: Plan, gpus: int, adapter: Adapter) -> tuple[Plan | None, str]:
    """(the best plan of the same job on other GPUs that the trainer runs, why there is none)."""
    target = load_target(adapter.target)
    pins = Pins(values={}) if adapter.reshards_data else Pins(values={"dp": int(plan.layout.dp)})
    best = best_of(on_cluster(resolved_of(plan), num_gpus=gpus), pins, CANDIDATES)
    if not best.fits or best.finding is None or best.prediction is None:
        kept = "" if adapter.reshards_data else f"; {adapter.target} reads its data on with the same dp only, here {plan.layout.dp}"
        return None, best.why_not + kept
    reasons: list[str] = []
    for layout, estimate in _nesting_first(plan, best.finding):
        prediction = predict(estimate, best.resolved.job, best.resolved.kind)
        other = dataclasses.replace(plan, num_gpus=gpus, layout=layout, prediction=prediction, why="")
        reasons = refusals_of(target, ExportJob.of(other))
        if not reasons:
            return other, ""
    return None, f"{target.name} cannot run the best plans: {'; '.join(reasons)}"


def _nesting_first(plan: Plan, found: Finding) -> list[tuple[Layout, Estimate]]:
    """Fastest first; of those within EQUAL of the fastest, layouts whose shards nest with the plan's: they are read once."""
    old, trainer = places_of_plan(plan), plan.load_trainer()
    pairs = list(zip(found.layouts, found.estimates, strict=True))
    most = (1.0 + EQUAL) * float(found.estimates[0].step_time[0])

    def place(pair: tuple[Layout, Estimate]) -> bool:
        nests = nesting(old, places_of(plan.workload, trainer, pair[0]))
        return float(pair[1].step_time[0]) > most or not all(nests.values())

    return sorted(pairs, key=place)


def _changes(old: Plan, new: Plan) -> str:
    before, after = old.layout.to_dict(), new.layout.to_dict()
    return ", ".join(f"{name} {after[name]} instead of {before[name]}" for name in after if after[name] != before.get(name))
