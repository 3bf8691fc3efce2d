"""What a report is about: a plan priced again, the search of its job, and everything computed from them once."""

import dataclasses

from planner.cost.estimate import Estimate
from planner.costs import Costs, Rates, costs, rates_of
from planner.defaults import ResolvedJob
from planner.plan_file import Plan, predict
from planner.questions.best_plan import resolved_of
from planner.questions.report.landscape import Landscape, landscape
from planner.record import record
from planner.rules import check
from planner.search import Finding, Pins, fits, search
from planner.timeline.operator_times import Computation, computation_of
from planner.timeline.priced_plan import Priced, price
from planner.units import TERA

MOVED = 1e-3
"""A plan whose stored step time differs from today's by more than this part is said to have been priced otherwise."""
ALTERNATIVES = 8
"""Best plans that the search is asked for: as many as it refines anyway."""


@record
class Spending:
    """What the costs are of."""

    tokens: float = TERA
    """To train on."""
    price: float | None = None
    """USD per GPU-hour; None = the first of the profile."""


@record
class Subject:
    """One plan, priced with the profile and the cost model of now."""

    plan: Plan
    """With its prediction of now."""
    stored_step_s: float
    """Step time that the plan file says."""
    resolved: ResolvedJob
    priced: Priced
    """With what lies under its estimate."""
    computation: Computation
    """Its operators and what keeps them from the peak."""
    fits: bool
    """By the rule of the search."""
    finding: Finding
    """The search of the job without pins."""
    landscape: Landscape
    rates: Rates
    costs: Costs
    """Of all tokens of the user's budget."""

    @property
    def is_best(self) -> bool:
        """The plan is the one that the search finds."""
        return self.finding.fit and self.plan.layout.to_dict() == self.finding.layouts[0].to_dict()

    @property
    def estimate(self) -> Estimate:
        """On the exact timeline, length 1."""
        return self.priced.estimate


def subject_of(plan: Plan, spending: Spending) -> Subject:
    """Price a plan again, look at the layouts around it and count what it costs.

    Raises PlannerError when its layout is not legal.
    """
    resolved = resolved_of(plan)
    job = resolved.job
    check(job, plan.layout)
    priced = price(job, plan.layout)
    found = priced.estimate
    finding = search(job, Pins(), ALTERNATIVES)
    rates = rates_of(job.cluster.hardware, price=spending.price)
    [ratios] = resolved.unstated([plan.layout]).ratios()
    return Subject(
        plan=dataclasses.replace(plan, prediction=predict(found, job, resolved.kind, 0, ratios)),
        stored_step_s=plan.prediction.step_time_s, resolved=resolved, priced=priced,
        computation=computation_of(priced), fits=bool(fits(job, found)[0]),
        finding=finding, landscape=landscape(job, plan.layout, found, finding), rates=rates,
        costs=costs(
            rates, num_gpus=plan.num_gpus, step_time_s=float(found.step_time[0]), tokens_per_step=job.workload.tokens,
            tokens=spending.tokens,
        ),
    )  # fmt: skip
