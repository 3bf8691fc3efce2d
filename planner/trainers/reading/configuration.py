"""What a reader finds in a trainer's configuration, and the plan that it makes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from planner import library
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.explicit import complete, price_plan
from planner.model import ModelSpec, load_model
from planner.plan_file import Plan
from planner.rules import check

NOT_ARCHITECTURE = (
    "name", "source", "published_parameters", "published_active_parameters", "max_sequence_length", "num_shared_experts",
)  # fmt: skip
"""Fields that two names of one architecture may differ in; shared experts count by their joint width."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What people run today, in the planner's words."""

    trainer: str
    """Library name of the trainer."""
    fields: Mapping[str, int]
    """Fields of Layout that the configuration says; what is not said keeps the planner's default."""
    model: ModelSpec | None = None
    """The architecture; None = the configuration does not say it."""
    sequence_length: int | None = None
    """Tokens per sequence; None = not said."""
    global_batch_size: int | None = None
    """Sequences per step; None = not said."""
    precision: str = "bf16"
    """One of workload.PRECISIONS."""
    optimizer: str = "adam"
    """One of workload.OPTIMIZERS."""
    num_gpus: int | None = None
    """GPUs, where the configuration says how many."""
    hardware: str | None = None
    """Profile, where the configuration says it."""
    unread: tuple[str, ...] = ()
    """Settings that a plan does not hold, each with its value: listed, never dropped silently."""
    notes: tuple[str, ...] = ()
    """What was taken for what."""


SAID = ("model", "num_gpus", "hardware", "trainer", "sequence_length", "global_batch_size")
"""What a user may say in addition to the configuration; it goes before what was read."""
NEEDED = {
    "model": ("which model it trains", "--model"), "num_gpus": ("how many GPUs run it", "--gpus"),
    "sequence_length": ("how long its sequences are", "--sequence-length"),
    "global_batch_size": ("its global batch", "--global-batch-size"),
}  # fmt: skip
"""What a plan cannot be without, and the flag that says it."""


def to_plan(reading: Reading, said: Mapping[str, Any] = MappingProxyType({})) -> Plan:
    """The plan of a reading, priced; what is said (of SAID; None = not said) replaces what was read. Raises PlannerError for
    what neither says."""
    values = {name: said.get(name) or getattr(reading, name) for name in SAID}
    for name, (what, flag) in NEEDED.items():
        if values[name] is None:
            raise PlannerError(f"the configuration does not say {what}; give {flag}")
    resolved = resolve(Request(**values, precision=reading.precision, optimizer=reading.optimizer))
    layout, assumed = complete(resolved.job, dict(reading.fields))
    check(resolved.job, layout)
    plan = price_plan(resolved, layout, assumed)
    return dataclasses.replace(plan, why=f"read from a configuration of {reading.trainer}, not searched")


def known_model(model: ModelSpec, name: str = "") -> ModelSpec:
    """The preset with the same architecture: the one called ``name`` first, then the one with the same longest sequence;
    the model itself when there is none."""
    presets = _presets().get(_architecture(model), [])
    if not presets:
        return dataclasses.replace(model, name=name) if name else model
    return min(presets, key=lambda one: (one.name != name, one.max_sequence_length != model.max_sequence_length))


def _architecture(model: ModelSpec) -> tuple[object, ...]:
    named = (one.name for one in dataclasses.fields(ModelSpec) if one.compare)
    return tuple(getattr(model, name) for name in named if name not in NOT_ARCHITECTURE)


@cache
def _presets() -> dict[tuple[object, ...], list[ModelSpec]]:
    found: dict[tuple[object, ...], list[ModelSpec]] = {}
    for name in library.names("models"):
        found.setdefault(_architecture(load_model(name)), []).append(load_model(name))
    return found
