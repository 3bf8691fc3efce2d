"""Plans side by side: the differences of their inputs, and the effect of each on time and memory.

Effects are prices with one input changed after the other, each on top of those before it: they sum to the whole difference, and
in another order each may have another size. An input that cannot change alone (tp without dp, when the number of GPUs stays)
waits, and then changes together with the fewest others that make it legal.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.cluster import Cluster
from planner.cost.estimate import PARTS, Estimate
from planner.cost.memory.states import COMPONENTS
from planner.errors import PlannerError
from planner.layout import BOOLEANS, FIELDS, NAMES, module_names
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.record import record
from planner.rules import Job, check, check_workload
from planner.timeline.priced_plan import estimate_of, price_plan
from planner.trainer import Trainer
from planner.units import GIB, GIGA
from planner.workload import Workload

WORKLOAD = tuple(field.name for field in dataclasses.fields(Workload) if field.name != "model")
CLUSTER = ("hardware", "network_bandwidth", "num_gpus")
GROUPS = {"workload": WORKLOAD, "cluster": CLUSTER, "trainer": ("trainer",), "layout": FIELDS}
"""Inputs of a plan except its model, by group, in the order in which differences are applied."""
ASSUMED_AS = {
    "sequence length": "sequence_length", "global batch": "global_batch_size", "precision": "precision",
    "optimizer": "optimizer", "expert imbalance": "expert_imbalance", "hardware": "hardware", "trainer": "trainer",
    "network": "network_bandwidth", "state sharding": "zero", "recompute modules": "recompute_modules",
    "adapters": "lora_rank", "frozen weights": "frozen_weights",
}  # fmt: skip
"""Assumptions of a plan that are one of its inputs."""
SPLIT = {"pp", "first_stage_layers", "last_stage_layers"}
"""Say together how many layers a stage has: one alone makes stages of lengths that nobody asked for."""
MOST_TRIES = 4000
"""Combinations of inputs that are tried for a legal one before the rest is changed together."""


@record
class Difference:
    """One input that is not the same in all plans."""

    group: str
    """'model' or one of GROUPS."""
    field: str
    """Name of the input."""
    values: tuple[str, ...]
    """As text, one for each plan."""
    assumed: tuple[bool, ...]
    """The plan assumed it: its user did not say."""


@record
class Effect:
    """One change, or several that only work together, on the way from one plan to another."""

    changes: tuple[tuple[str, str, str], ...]
    """Input, value before, value after."""
    step_time_s: float
    """Seconds that the step gets longer."""
    memory_peak_gib: float
    """GiB that the peak of the worst stage grows by."""
    parts_s: Mapping[str, float]
    """The same seconds by part; they sum to step_time_s."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        inputs = [{"input": field, "from": old, "to": new} for field, old, new in self.changes]
        time = {"step_time_s": self.step_time_s, "memory_peak_gib": self.memory_peak_gib, "time_s": dict(self.parts_s)}
        return {"inputs": inputs, **time}


@record
class Comparison:
    """Two plans or more."""

    names: tuple[str, ...]
    plans: tuple[Plan, ...]
    differences: tuple[Difference, ...]
    only_assumed: tuple[Difference, ...]
    """Further assumptions that are not the same, '-' where a plan makes none."""
    ways: tuple[tuple[Effect, ...], ...]
    """Changes from the first plan to each other one, in the order in which they are applied: they sum to the difference of the
    two plans. None where the models differ."""
    usable_gib: tuple[float, ...]
    """Memory of each plan's card."""

    @property
    def same_model(self) -> bool:
        """All plans train one model, so that differences have effects."""
        return _same_model(self.plans)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        plans = []
        for name, plan, usable in zip(self.names, self.plans, self.usable_gib, strict=True):
            one = plan.prediction
            plans.append({
                "file": name, "model": plan.workload.model.name, "step_time_s": one.step_time_s,
                "step_time_range_s": list(one.step_time_range_s),
                "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu, "mfu": one.mfu,
                "memory_peak_gib": one.memory_peak_gib, "memory_limit_gib": usable,
                "out_of_memory_probability": one.out_of_memory_probability,
                "time_s": {part: one.time_s[part] for part in PARTS},
                "memory_gib": {component: one.memory_gib[component] for component in COMPONENTS},
            })  # fmt: skip
        ways = [
            {"from": self.names[0], "to": name, "changes": [one.to_dict() for one in effects]}
            for name, effects in zip(self.names[1:], self.ways, strict=False)
        ]
        differences = [vars(one) for one in (*self.differences, *self.only_assumed)]
        return {"plans": plans, "differences": differences, "effects": ways}


def compare(plans: list[Plan], names: list[str]) -> Comparison:
    """Compare plans with the first. Raises PlannerError for fewer than two, or for one that no longer prices as it says."""
    if len(plans) < 2:
        raise PlannerError("a comparison needs two plans or more; name a second plan file")
    priced = [price_plan(plan, where=name).estimate for plan, name in zip(plans, names, strict=True)]
    others = range(1, len(plans)) if _same_model(plans) else ()
    ways = (tuple(_effects(priced[0], plans[0], priced[n], plans[n])) for n in others)
    return Comparison(
        names=tuple(names), plans=tuple(plans), differences=tuple(_differences(plans)),
        only_assumed=tuple(_other_assumptions(plans)), ways=tuple(ways),
        usable_gib=tuple(one.usable_memory / GIB for one in priced),
    )  # fmt: skip


def _same_model(plans: Sequence[Plan]) -> bool:
    return all(plan.workload.model == plans[0].workload.model for plan in plans)


def inputs(plan: Plan) -> dict[str, Any]:
    """Every input of a plan but the model, by name."""
    values = {name: getattr(plan.workload, name) for name in WORKLOAD} | {name: getattr(plan, name) for name in CLUSTER}
    return {**values, "trainer": plan.trainer, **{name: int(value) for name, value in plan.layout.columns().items()}}


def text_of(field: str, value: Any) -> str:
    """An input as plan files and flags write it."""
    if field == "network_bandwidth":
        return "of the profile" if value is None else f"{8 * value / GIGA:.6g} Gb/s"
    if field in NAMES:
        return NAMES[field][int(value)]
    if field in BOOLEANS:
        return "yes" if value else "no"
    if field == "recompute_modules":
        return ", ".join(module_names(int(value))) or "none"
    return str(value)


def _differences(plans: list[Plan]) -> Iterator[Difference]:
    said = [{ASSUMED_AS[one.what] for one in plan.assumptions if one.what in ASSUMED_AS} for plan in plans]
    models = [plan.workload.model for plan in plans]
    if not _same_model(plans):
        yield Difference(group="model", field="model", values=_model_names(models), assumed=(False,) * len(plans))
    every = [inputs(plan) for plan in plans]
    for group, fields in GROUPS.items():
        for field in fields:
            values = [one[field] for one in every]
            if any(value != values[0] for value in values):
                texts, assumed = (text_of(field, value) for value in values), (field in names for names in said)
                yield Difference(group=group, field=field, values=tuple(texts), assumed=tuple(assumed))


def _model_names(models: list[ModelSpec]) -> tuple[str, ...]:
    """Names of the models; with their sizes where two of one name differ."""
    names = [one.name for one in models]
    if len(set(names)) > 1:
        return tuple(names)
    fields = [f.name for f in dataclasses.fields(ModelSpec)]
    differ = [name for name in fields if any(getattr(one, name) != getattr(models[0], name) for one in models)]
    return tuple(f"{one.name}: {', '.join(f'{name} {getattr(one, name)}' for name in differ)}" for one in models)


def _other_assumptions(plans: list[Plan]) -> Iterator[Difference]:
    """Assumptions that are no input of their own, where plans differ in them."""
    every = [{one.what: one.value for one in plan.assumptions if one.what not in ASSUMED_AS} for plan in plans]
    for what in dict.fromkeys(what for one in every for what in one):
        values = tuple(one.get(what, "-") for one in every)
        if len(set(values)) > 1:
            yield Difference(group="assumed", field=what, values=values, assumed=tuple(what in one for one in every))


def _changed(plan: Plan, target: Mapping[str, Any], names: Iterable[str]) -> Plan:
    """A plan with some of its inputs as ``target`` has them. Raises PlannerError."""
    new = {name: target[name] for name in names}
    layout = plan.layout.replace(**{name: value for name, value in new.items() if name in FIELDS})
    workload = plan.workload.replace(**{name: value for name, value in new.items() if name in WORKLOAD})
    rest = {name: value for name, value in new.items() if name in (*CLUSTER, "trainer")}
    return dataclasses.replace(plan, workload=workload, layout=layout, **rest)


def _effects(first: Estimate, plan: Plan, last: Estimate, other: Plan) -> Iterator[Effect]:
    """The changes from one plan to another of the same model, one after the other."""
    target, before = inputs(other), first

    @functools.cache
    def machine(*named: Any) -> tuple[Cluster, Trainer]:
        at = dataclasses.replace(plan, **dict(zip((*CLUSTER, "trainer"), named, strict=True)))
        return at.cluster(), at.load_trainer()

    def job_of(one: Plan) -> Job:
        cluster, trainer = machine(*(getattr(one, name) for name in (*CLUSTER, "trainer")))
        return Job(workload=one.workload, cluster=cluster, trainer=trainer)

    def legal(names: Sequence[str]) -> bool:
        try:
            changed = _changed(plan, target, names)
            job = job_of(changed)
            check_workload(job.workload, job.cluster, job.trainer)
            check(job, changed.layout)
        except PlannerError:
            return False
        return True

    while left := [field for field, value in inputs(plan).items() if value != target[field]]:
        # The fewest inputs, first in order, that can change now; all that are left where no combination is legal.
        every = itertools.chain.from_iterable(itertools.combinations(left, size) for size in range(1, len(left)))
        splits = SPLIT & set(left)
        whole = (some for some in every if not splits & set(some) or splits <= set(some))
        together = next((some for some in itertools.islice(whole, MOST_TRIES) if legal(some)), tuple(left))
        old, plan = inputs(plan), _changed(plan, target, together)
        after = last if len(together) == len(left) else estimate_of(job_of(plan), plan.layout)
        yield Effect(
            changes=tuple((name, text_of(name, old[name]), text_of(name, target[name])) for name in together),
            step_time_s=float(after.step_time[0] - before.step_time[0]),
            memory_peak_gib=float(after.memory_peak[0] - before.memory_peak[0]) / GIB,
            parts_s={part: float(after.time[part][0] - before.time[part][0]) for part in PARTS},
        )  # fmt: skip
        before = after
