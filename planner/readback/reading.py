"""What a reader finds in a trainer's configuration, and the plan that it makes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from planner import library
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.explicit import complete, price_plan
from planner.model import ModelSpec, load_model
from planner.plan import Plan
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
    model: ModelSpec
    """The architecture."""
    sequence_length: int
    """Tokens per sequence."""
    global_batch_size: int
    """Sequences per step."""
    layout: dict[str, int]
    """Fields of Layout that the configuration says."""
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


def to_plan(
    reading: Reading, *, num_gpus: int | None = None, hardware: str | None = None, trainer: str | None = None
) -> Plan:
    """The plan of a reading, priced; what is given replaces what was read. Raises PlannerError."""
    gpus = num_gpus or reading.num_gpus
    if gpus is None:
        raise PlannerError("the configuration does not say how many GPUs run it; give --gpus")
    resolved = resolve(
        Request(
            model=reading.model, num_gpus=gpus, hardware=hardware or reading.hardware, trainer=trainer or reading.trainer,
            sequence_length=reading.sequence_length, global_batch_size=reading.global_batch_size,
            precision=reading.precision, optimizer=reading.optimizer,
        )
    )  # fmt: skip
    layout, assumed = complete(resolved.job, reading.layout)
    check(resolved.job, layout)
    plan = price_plan(resolved, layout, assumed)
    return dataclasses.replace(plan, why=f"read from a configuration of {reading.trainer}, not searched")


def known_model(model: ModelSpec, name: str = "") -> ModelSpec:
    """The preset with the same architecture, the one called ``name`` first; the model itself when there is none."""
    presets = _presets().get(_architecture(model), [])
    for preset in presets:
        if preset.name == name:
            return preset
    return presets[0] if presets else dataclasses.replace(model, name=name) if name else model


def _architecture(model: ModelSpec) -> tuple[object, ...]:
    return tuple(getattr(model, one.name) for one in dataclasses.fields(ModelSpec) if one.name not in NOT_ARCHITECTURE)


@cache
def _presets() -> dict[tuple[object, ...], list[ModelSpec]]:
    found: dict[tuple[object, ...], list[ModelSpec]] = {}
    for name in library.names("models"):
        found.setdefault(_architecture(load_model(name)), []).append(load_model(name))
    return found
