"""What a reader finds in a trainer's configuration, and the plan that it makes."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from planner import library
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.explicit import complete, price_plan
from planner.hardware import load_hardware
from planner.hardware.asked import hardware_asked
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.plan_file import Plan
from planner.record import record
from planner.rules import check
from planner.trainer_options import spell
from planner.trainers.reading.given import MODEL, Question, ask
from planner.workload import peak_dtype

NOT_ARCHITECTURE = (
    "name", "source", "published_parameters", "published_active_parameters", "max_sequence_length", "num_shared_experts",
)  # fmt: skip
"""Fields that two names of one architecture may differ in; shared experts count by their joint width."""


@record
class Reading:
    """What people run today, in the planner's words."""

    trainer: str
    """Library name of the trainer."""
    fields: Mapping[str, int]
    """Fields of Layout that the configuration says; what is not said keeps the planner's default."""
    model: ModelSpec | None = None
    """The architecture; None = the configuration does not say it."""
    model_name: str = ""
    """What the configuration calls it, where that is no preset."""
    architecture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model that the trainer builds as the configuration says, whatever model it is or the user calls it."""
    sequence_length: int | None = None
    """Tokens per sequence; None = not said."""
    global_batch_size: int | None = None
    """Sequences per step; None = not said."""
    precision: str = "bf16"
    """One of workload.PRECISIONS."""
    optimizer: str = "adam"
    """One of workload.OPTIMIZERS."""
    lora_rank: int | None = None
    """Rank of the adapters, 0 = every weight is trained; None = the trainer's habit."""
    lora_targets: str = "all"
    """One of workload.LORA_TARGETS."""
    lora_whole: str = "none"
    """One of workload.LORA_WHOLE."""
    frozen_weights: str | None = None
    """Dtype of the base under adapters, one of workload.FROZEN_WEIGHTS; None = the trainer's habit."""
    objective: str = "lm"
    """One of workload.OBJECTIVES."""
    expert_imbalance: float | None = None
    """Tokens of the busiest expert rank over the mean, where the configuration decides it; None = of a trained router."""
    num_gpus: int | None = None
    """GPUs, where the configuration says how many."""
    hardware: str | None = None
    """Profile, where the configuration says it."""
    unread: tuple[str, ...] = ()
    """Settings that a plan does not hold, each with its value: listed, never dropped silently."""
    noise: tuple[str, ...] = ()
    """Names of settings that change neither time nor memory: counted, not listed."""
    notes: tuple[str, ...] = ()
    """What was taken for what."""
    questions: tuple[Question, ...] = ()
    """What decides time or memory and could not be read: asked for before the plan is priced."""


SAID = ("model", "num_gpus", "hardware", "trainer", "sequence_length", "global_batch_size")
"""What a user may say in addition to the configuration; it goes before what was read."""
WORKLOAD = ("precision", "optimizer", "lora_rank", "lora_targets", "lora_whole", "frozen_weights", "objective", "expert_imbalance")
"""What the configuration alone says of the workload."""
NEEDED = {
    "model": MODEL,
    "num_gpus": Question(name="--gpus N", about="how many GPUs run it"),
    "sequence_length": Question(name="--sequence-length S", about="how long its sequences are"),
    "global_batch_size": Question(name="--global-batch-size B", about="sequences per step"),
}
"""What a plan cannot be without, and the flag that says it."""


def reduced_last(job: Reading, by_trainer: bool = True) -> Reading:
    """The reading of FSDP under no_sync, where the trainer runs it so: gradients stay whole on every rank until the last microbatch
    of a step, where there are several; those of adapters alone are small."""
    some = job.fields.get
    several = some("dp", 2) > 1 and some("num_microbatches", 2) > 1 and some("pp", 1) == 1
    waits = by_trainer and several and some("zero", 0) >= 2 and not job.lora_rank
    return dataclasses.replace(job, trainer=spell(job.trainer, {"gradient_sync": "last"})) if waits else job


def to_plan(reading: Reading, said: Mapping[str, Any] = MappingProxyType({})) -> Plan:
    """The plan of a reading, priced; what is said (of SAID; None = not said) replaces what was read. Raises PlannerError, one
    sentence with all that neither says."""
    values = {name: said.get(name) or getattr(reading, name) for name in SAID}
    questions = [one for one in left_open(reading, values) if not (said.get("hardware") and one.name.startswith("--hardware"))]
    asked = [one.name for one in questions]
    missing = _other_hardware(reading.precision) if values["hardware"] is None else []
    questions += [one for one in missing if one.name not in asked]
    if questions:
        ask("the configuration", questions)
    if reading.architecture:
        values["model"] = built_as(_spec(values["model"]), reading.architecture)
    resolved = resolve(Request(**values, **{name: getattr(reading, name) for name in WORKLOAD}))
    layout, assumed = complete(resolved.job, dict(reading.fields))
    if said.get("global_batch_size") is None:
        _ask_for_a_batch_that_divides(layout, resolved.job.workload.global_batch_size)
    check(resolved.job, layout)
    plan = price_plan(resolved, layout, assumed)
    return dataclasses.replace(plan, why=f"read from a configuration of {reading.trainer}, not searched")


def left_open(reading: Reading, values: Mapping[str, Any]) -> list[Question]:
    """What a reader asks, and what a plan cannot be without and neither the file nor the user says; ``values``: those of NEEDED."""
    asked = [one.name for one in reading.questions]
    missing = [_needed(name, reading) for name in NEEDED if values[name] is None]
    return [*reading.questions, *(one for one in missing if one.name not in asked)]


def _other_hardware(precision: str) -> list[Question]:
    """What is asked where nothing names the GPUs and those that are taken then have no products in the precision of the job."""
    usual = hardware_asked(None, [])
    try:
        load_hardware(usual).peak(peak_dtype(precision))
    except PlannerError:
        about = f"the job is in {precision}, for which {usual}, taken where nothing names the GPUs, has no tensor cores"
        return [Question(name="--hardware NAME", about=about)]
    return []


def built_as(model: ModelSpec, fields: Mapping[str, Any]) -> ModelSpec:
    """The model as a trainer builds it, with these fields whatever its own say."""
    if all(getattr(model, name) == value for name, value in fields.items()):
        return model
    return dataclasses.replace(model, **fields, published_parameters=0.0, published_active_parameters=0.0)


def _ask_for_a_batch_that_divides(layout: Layout, batch: int) -> None:
    """A batch of the file that its replicas cannot share out, as trainers refuse it at their start too, or drop a part of it."""
    if (question := batch_that_divides(batch, int(layout.micro_batch_size), int(layout.dp))) is not None:
        ask("the configuration", [question])


def batch_that_divides(batch: int, micro: int, dp: int) -> Question | None:
    """What is asked where replicas cannot share a batch out; None = they can."""
    each = micro * dp
    if batch % each == 0:
        return None
    nearest = max(1, round(batch / each)) * each
    said = f"{batch} by the file, which micro batch {micro} x dp {dp} does not divide"
    return dataclasses.replace(NEEDED["global_batch_size"], about=f"{said}; {nearest}, or other --gpus")


def _spec(model: Any) -> ModelSpec:
    return load_model(model) if isinstance(model, str) else model


def _needed(name: str, reading: Reading) -> Question:
    return model_asked(reading.model_name) if name == "model" else NEEDED[name]


def model_asked(name: str) -> Question:
    """What is asked for a model: by the name that the configuration gives it, which is no preset; '' = it gives none."""
    about = f"{name} is no preset: its name on the hub, its config.json, or a preset that is like it"
    return dataclasses.replace(MODEL, about=about) if name else MODEL


def known_model(model: ModelSpec, name: str = "") -> ModelSpec:
    """The preset with the same architecture: the one called ``name`` first, then the one with the same longest sequence;
    the model itself when there is none."""
    presets = _presets().get(_architecture(model), [])
    if not presets:
        return dataclasses.replace(model, name=name) if name else model
    return min(presets, key=lambda one: (one.name != name, one.max_sequence_length != model.max_sequence_length))


def same_sizes(model: ModelSpec) -> list[ModelSpec]:
    """The presets that differ from it in the vocabulary at most."""
    presets, sizes = (one for some in _presets().values() for one in some), _architecture(model, "vocab_size")
    return [one for one in presets if _architecture(one, "vocab_size") == sizes]


def _architecture(model: ModelSpec, *but: str) -> tuple[object, ...]:
    named = (one.name for one in dataclasses.fields(ModelSpec) if one.compare)
    return tuple(getattr(model, name) for name in named if name not in NOT_ARCHITECTURE and name not in but)


@cache
def _presets() -> dict[tuple[object, ...], list[ModelSpec]]:
    found: dict[tuple[object, ...], list[ModelSpec]] = {}
    for name in library.names("models"):
        found.setdefault(_architecture(load_model(name)), []).append(load_model(name))
    return found
