"""A serve plan priced again: what its file says, by the model of steps and queues as it is now."""

from dataclasses import replace

from planner.hardware import load_hardware
from planner.serving import pools
from planner.serving.engine import Engine, load_engine
from planner.serving.result import ServingEstimate
from planner.serving.serve_plan import ServePlan, predict_serving
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate


def served_of(plan: ServePlan, engine: Engine | None = None) -> Served:
    """Model, GPU, engine (or another in its place) and formats of a plan. Raises PlannerError where it names what is not there."""
    hardware, engine = load_hardware(plan.hardware), engine or load_engine(plan.engine)
    return Served(model=plan.model, hardware=hardware, engine=engine, precision=plan.precision)


def estimate_of_plan(plan: ServePlan, engine: Engine | None = None) -> ServingEstimate:
    """The estimate of one plan, of one pool or two."""
    served = served_of(plan, engine)
    if plan.prefill is None:
        return estimate(served, plan.layout, plan.traffic)
    return pools.estimate(served, plan.prefill, plan.layout, plan.traffic)


def priced(plan: ServePlan, engine: Engine | None = None) -> ServePlan:
    """The plan with its prediction; ``engine`` in place of the one that it names."""
    return replace(plan, prediction=predict_serving(estimate_of_plan(plan, engine)))
