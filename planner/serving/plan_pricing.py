"""One deployment priced, and a serve plan priced again: what its file says, by the model of steps and queues as it is now."""

import itertools
from dataclasses import replace

import numpy as np

from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.serving import pools
from planner.serving.chain import Chain, ChainEngine, Hop, chain_memory
from planner.serving.engine import Engine, load_engine
from planner.serving.pool_search import priced_pools
from planner.serving.priced_table import estimate_row
from planner.serving.result import ServingEstimate, ServingMemory
from planner.serving.serve_plan import ServePlan, predict_serving
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate, estimate_of
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_rows import with_ranges
from planner.serving.serving_rules import violations
from planner.serving.traffic import Traffic


def require_legal(served: Served, layout: ServingLayout, prefill: ServingLayout | None) -> None:
    """Raise PlannerError with every rule that a deployment breaks."""
    broken = [
        sentence
        for one in (layout, *([prefill] if prefill else []))
        for sentence in violations(served.model, served.hardware, served.engine, served.precision, one)
    ]
    if broken:
        raise PlannerError("; ".join(dict.fromkeys(broken)))


def priced_either(
    served: Served, layout: ServingLayout, prefill: ServingLayout | None, traffic: Traffic
) -> ServingEstimate:
    """One pool or two, priced. Raises PlannerError for a load that two pools have not."""
    if prefill is None:
        return estimate(served, layout, traffic)
    if traffic.load not in ("concurrency", "rate"):
        raise PlannerError(f"two pools are priced under --concurrency or --rate, not {traffic.load}")
    return priced_pools(served, prefill, layout, traffic)


def served_of(plan: ServePlan, engine: Engine | None = None) -> Served:
    """Model, GPU, engine (or another in its place) and formats of a plan. Raises PlannerError where it names what is not there."""
    hardware, engine = load_hardware(plan.hardware), engine or load_engine(plan.engine)
    return Served(model=plan.model, hardware=hardware, engine=engine, precision=plan.precision)


def chain_of(plan: ServePlan, engine: Engine | None = None) -> Chain:
    """The stages of a plan on several kinds as a chain of one row."""
    runs = [list(run) for _, run in itertools.groupby(plan.stages, key=lambda one: one.kind)]
    hops = [
        Hop(bandwidth=np.inf if run[-1].link_bandwidth is None else run[-1].link_bandwidth, latency=run[-1].link_latency)
        for run in runs[:-1]
    ]
    return Chain(
        kinds=tuple(served_of(replace(plan, hardware=run[0].hardware), engine) for run in runs), hops=tuple(hops),
        layers=np.array([[one.layers for one in plan.stages]]),
        kind=np.array([[number for number, run in enumerate(runs) for _ in run]]),
    )  # fmt: skip


def memory_of_chain(plan: ServePlan) -> ServingMemory:
    """Memory of the fullest GPU of a plan on several kinds, as columns of one row."""
    return chain_memory(chain_of(plan), plan.layout.take(np.zeros(1, dtype=np.intp)), plan.traffic)


def priced_at(plan: ServePlan, traffic: Traffic, engine: Engine | None = None) -> ServingEstimate:
    """A plan under some traffic: on one kind, on two pools, or with stages on several kinds."""
    if not plan.stages:
        return priced_either(served_of(plan, engine), plan.layout, plan.prefill, traffic)
    chain, layout = chain_of(plan, engine), plan.layout.take(np.zeros(1, dtype=np.intp))
    found = estimate_of(ChainEngine(chain, layout, traffic), chain_memory(chain, layout, traffic))
    one: ServingEstimate = estimate_row(found, 0)
    return one


def estimate_of_plan(plan: ServePlan, engine: Engine | None = None) -> ServingEstimate:
    """The estimate of one plan, of one pool or two."""
    if plan.stages:
        return priced_at(plan, plan.traffic, engine)
    served = served_of(plan, engine)
    if plan.prefill is None:
        return estimate(served, plan.layout, plan.traffic)
    return pools.estimate(served, plan.prefill, plan.layout, plan.traffic)


def priced(plan: ServePlan, engine: Engine | None = None) -> ServePlan:
    """The plan with its prediction, without intervals; ``engine`` in place of the one that it names."""
    return replace(plan, prediction=predict_serving(estimate_of_plan(plan, engine)))


def price_again(plan: ServePlan) -> ServePlan:
    """The same with the rules of its engine checked and intervals for its numbers. Raises PlannerError where it breaks a rule."""
    for name in dict.fromkeys(one.hardware for one in plan.stages) or (plan.hardware,):
        require_legal(served_of(replace(plan, hardware=name)), plan.layout, plan.prefill)
    found = priced_at(plan, plan.traffic)
    return replace(plan, prediction=with_ranges(found, plan.model, plan.traffic.load, plan.prefill is not None))
