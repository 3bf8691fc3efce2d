"""What a configuration of an RL framework says, in planner's words, and the RL plan that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.hardware.asked import hardware_asked
from planner.layout import Layout
from planner.model import ModelSpec
from planner.record import record
from planner.rl.answer_lengths import read_answers
from planner.rl.rl_framework import RlFramework
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_plan import RlPlan
from planner.rl.rl_workload import ALGORITHMS, RlWorkload
from planner.serving.serving_layout import Precision, ServingLayout
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import percent

MAX_TOKENS = 8192
"""Tokens that a step of an engine computes at most, where nothing is said."""
ALONE = "reinforce++"
"""Algorithm of single answers: on-policy distillation is configured as a group of one."""
PREFERRED_BATCH = 256
"""Sequences that an engine runs at once where neither configuration nor framework says: vLLM's own default."""


@record
class RlSaid:
    """What the user adds to the file; None = not said."""

    model: str | None = None
    hardware: str | None = None
    gpus: int | None = None
    """GPUs of all pools."""
    answers: str | None = None
    """As ``plan rl --answers``."""
    prompt_length: float | None = None
    """Tokens of a prompt, mean."""


@record
class RlFound:
    """A configuration."""

    given: Settings
    framework: RlFramework
    trainer: str
    model_name: str
    train_gpus: int
    generate_gpus: int
    """Of a pool of its own; 0 = colocated."""
    hybrid: bool = False
    """Those that train generate as well."""
    actor: Mapping[str, int]
    """Fields of Layout; dp follows."""
    rollout: Mapping[str, int]
    """tp, pp, attn_dp, ep, max_batch; replicas follow."""
    engine: str = ""
    """Name of the engine; '' = the framework's usual one."""
    prompts: int
    samples: int
    train_batch: int = 0
    """Answers of an optimizer step; 0 = all."""
    epochs: int = 1
    prompt_limit: int
    """Tokens of a prompt at most."""
    answer_limit: int
    """Tokens of an answer at most."""
    staleness: int = 0
    partial: bool = False
    sync: str = ""
    """'' = the framework's usual method."""
    algorithm: str = "grpo"
    reference: bool = False
    critic: bool = False
    precision: str = "bf16"
    rollout_precision: str = "bf16"
    lora_rank: int = 0
    memory_share: float = 0.0
    """Of the engine; 0 = the framework's default."""
    offload: tuple[str, ...] | None = None
    """States that wait on the host while the same GPUs generate; None = as the framework has it."""
    notes: tuple[str, ...] = ()


@record
class RlRead:
    """The plan that a file says, not priced."""

    plan: RlPlan
    unread: tuple[str, ...]
    notes: tuple[str, ...]


def to_rl_plan(found: RlFound, said: RlSaid, given: Given) -> RlRead:
    """The plan of a configuration. Raises PlannerError, one sentence with all that neither says."""
    model, notes = _model(found, said, given)
    if said.answers is None:
        given.questions.append(
            Question(name="--answers mean=M,p99=P", about="how long answers are; the file has their limit alone")
        )
    if said.prompt_length is None and found.prompt_limit <= 1:
        given.questions.append(Question(name="--input-tokens N", about="prompts: the file has one limit for prompt and answer"))
    if given.questions or model is None:
        ask(str(found.given.path), given.questions)
    assumed: list[Assumption] = []
    most = found.prompt_limit + found.answer_limit
    prompt = said.prompt_length or found.prompt_limit
    answers = read_answers(said.answers, float(min(found.answer_limit, most - prompt)))
    if said.prompt_length is None:
        why = "the limit of the configuration: prompts are shorter in the mean"
        assumed.append(Assumption("prompt length", str(found.prompt_limit), why, "--input-tokens"))
    rules, again, algorithm = ALGORITHMS[found.algorithm], found.framework.resamples, found.algorithm
    if found.samples < rules.fewest:
        algorithm = ALONE
        notes = (*notes, f"one answer to a prompt has no advantage in {found.algorithm}: priced as {ALONE}, whose step is the same")
    work = RlWorkload(
        model=model, algorithm=algorithm, prompts=found.prompts, samples=found.samples, epochs=found.epochs,
        prompt_length=prompt, answers=answers,
        max_length=most, train_batch=0 if found.train_batch in (0, found.prompts * found.samples) else found.train_batch,
        reference=found.reference, critic=model if found.critic else None,
        generated=rules.generated if again else 1.0, keep_rate=rules.keep_rate if again else 1.0,
        precision=found.precision, lora_rank=found.lora_rank,
    )  # fmt: skip
    train, generate = _pools(found, said)
    generate += train if found.hybrid else 0
    hardware = hardware_asked(said.hardware, assumed)
    load_hardware(hardware)
    mode = "hybrid" if found.hybrid else "split" if found.generate_gpus else "colocated"
    offered = found.framework.placement(mode, found.staleness)
    plan = RlPlan(
        workload=work, hardware=hardware, gpus=train + (generate if mode == "split" else generate - train),
        framework=found.framework.label, trainer=found.trainer, engine=found.framework.rollout(found.engine).label,
        placement=Placement(
            mode=mode, train_gpus=train, generate_gpus=generate, staleness=found.staleness,
            partial=found.partial and found.staleness > 0, sync=found.sync or offered.sync[0],
        ),
        layouts=_layouts(found, model, (train, generate)),
        memory_share=found.memory_share, offload=_offload(found, mode), assumptions=tuple(assumed),
        why=f"read from a configuration of {found.framework.name}, not searched",
    )  # fmt: skip
    return RlRead(plan=plan, unread=(), notes=(*notes, *found.notes))


def _offload(found: RlFound, mode: str) -> tuple[str, ...] | None:
    """What waits on the host where that is said and is not what the framework does by itself."""
    if found.offload is None or mode == "split":
        return None
    states = found.framework.offloading(found.offload).offloaded
    return None if states == found.framework.offloaded else tuple(sorted(states))


def _model(found: RlFound, said: RlSaid, given: Given) -> tuple[ModelSpec | None, tuple[str, ...]]:
    if said.model is not None:
        return Given(model=said.model).spec(), ()
    model, notes = named_model(found.model_name, found.given.path) if found.model_name else (None, ())
    if model is None:
        about = f"{found.model_name} is no preset" if found.model_name else "which model it trains"
        given.questions.append(Question(name="--model NAME", about=about))
    return model, notes


def _pools(found: RlFound, said: RlSaid) -> tuple[int, int]:
    """GPUs of both pools, in the proportion of the file where the user says another number."""
    train, generate = found.train_gpus, found.generate_gpus
    if said.gpus is not None and said.gpus != train + generate:
        share = said.gpus * train / (train + generate)
        if share != int(share):
            raise PlannerError(
                f"--gpus {said.gpus}: {found.given.path} has {train} GPUs that train and {generate} that generate, whose ratio "
                "that number does not keep"
            )
        train, generate = int(share), said.gpus - int(share)
    return train, generate or train


def _layouts(found: RlFound, model: ModelSpec, pools: tuple[int, int]) -> RlLayouts:
    """dp of the actor and engines of the rollout follow from the GPUs. Raises PlannerError."""
    (train, generate), actor, rollout = pools, dict(found.actor), dict(found.rollout)
    if rollout.get("ep", 1) > rollout.get("tp", 1) * rollout.get("attn_dp", 1):  # vLLM spreads experts over tp times dp
        rollout["attn_dp"] = rollout["ep"] // rollout.get("tp", 1)
    inner = actor.get("tp", 1) * actor.get("pp", 1) * actor.get("cp", 1)
    engine = rollout.get("tp", 1) * rollout.get("pp", 1) * rollout.get("attn_dp", 1)
    where = found.given.path
    if train % inner:
        raise PlannerError(f"{where}: {train} GPUs train, no multiple of tp * pp * cp = {inner}")
    if generate % engine:
        raise PlannerError(f"{where}: {generate} GPUs generate, no multiple of the {engine} of an engine")
    ranks = rollout.get("tp", 1) * rollout.get("attn_dp", 1)
    ep = rollout.get("ep", 1)
    replicas = rollout.pop("replicas", 0) or generate // engine
    if replicas * engine > generate:
        raise PlannerError(f"{where}: {replicas} engines of {engine} GPUs do not fit into the {generate} that generate")
    batch = rollout.pop("max_batch", 0) or found.framework.max_batch or PREFERRED_BATCH
    return RlLayouts(
        actor=Layout(**{"etp": actor.get("tp", 1) if actor.get("ep", 1) > 1 else 1, **actor, "dp": train // inner}),
        rollout=ServingLayout(
            **{
                **rollout,
                "replicas": replicas,
                "moe_tp": ranks // ep if model.is_moe else 1,
                "max_batch": batch,
                "max_tokens": MAX_TOKENS,
            }
        ),
        rollout_precision=Precision(weights=found.rollout_precision),
    )


def micro_batch(tokens: int, length: int) -> int:
    """Sequences of full length that a packed micro batch of so many tokens holds: one at least."""
    return max(tokens // max(length, 1), 1)


@dataclass
class Seen:
    """Settings read by their first name that is there."""

    given: Settings
    names: list[str] = field(default_factory=list)

    def first(self, *names: str, default: Any = None) -> Any:
        """The first of some names that has a value."""
        return self.given.first(*names, default=default)

    def size(self, *names: str, default: int = 1) -> int:
        """The same as a whole number."""
        for name in names:
            if self.given.get(name) is not None:
                return self.given.size(name, default)
        return default

    def flag(self, *names: str, default: bool = False) -> bool:
        """The same as yes or no."""
        for name in names:
            if self.given.get(name) is not None:
                return self.given.flag(name, default)
        return default

    def share(self, *names: str) -> float:
        """A share of the memory; 0 where nothing is said. Raises PlannerError."""
        for name in names:
            if self.given.get(name) is not None:
                return percent(self.given.get(name), self.given.where(name)) / 100
        return 0.0
