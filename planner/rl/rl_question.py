"""A question about RL with everything loaded and its defaults said: what the search and the estimate work on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from planner.assumption import Assumption
from planner.cluster_file import ClusterFile, read_cluster
from planner.errors import PlannerError, listed, shown
from planner.hardware import HardwareProfile, load_hardware
from planner.hardware.asked import hardware_asked
from planner.layout import FIELDS, Layout
from planner.model import ModelSpec, load_model
from planner.record import record
from planner.rl.answer_lengths import AnswerLengths, read_answers
from planner.rl.phase_factors import load_factors
from planner.rl.rl_framework import STATES, RlFramework, load_framework
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import ASYNCHRONOUS, MODES, SYNC_METHODS
from planner.rl.rl_search import Asked
from planner.rl.rl_workload import ALGORITHMS, Algorithm, RlWorkload
from planner.schema import value_of, within
from planner.serving.engine import load_engine
from planner.serving.serving_inputs import read_speculation, share_of
from planner.serving.serving_layout import CACHES, WEIGHTS, Precision, ServingLayout
from planner.trainer import known_as, load_trainer
from planner.units import parse, parse_count
from planner.workload import usual_name

FRAMEWORK, ALGORITHM, PROMPTS, PROMPT_LENGTH, MAX_LENGTH, MEAN = "verl", "grpo", 64, 512, 8192, 2048
"""What a step is where nothing is said: the batch of recipes of mathematics (64 prompts of about 500 tokens)."""
GRAIN = 512
"""Tokens that the largest length is a multiple of."""
STALENESS = (0, 8)
"""Steps ahead that are tried where nothing is said."""
GPUS = Annotated[int, within(1, 2**17)]
KEEP_RATE = Annotated[float, within(0.001, 1)]
ROLLOUT = tuple(vars(ServingLayout()))
"""Fields of the rollout's layout."""


@record
class AskedBatch:
    """What a user said of the batch; None = not said. Numbers and times also as text with a suffix or a unit."""

    algorithm: str | None = None
    prompts: int | None = None
    samples: int | None = None
    prompt_length: object = None
    keep_rate: float | str | None = None
    answers: object = None
    max_length: object = None
    train_batch: int | None = None
    epochs: int | None = None
    reference: bool | None = None
    critic: str | None = None
    reward_model: str | None = None
    reward_time: object = None
    turns: int | None = None
    tool_time: object = None
    tool_tokens: object = None
    speculation: object = None


@record
class RlRequest(AskedBatch):
    """What a user said; None = not said."""

    model: str | ModelSpec | None = None
    gpus: int | None = None
    nodes: int | None = None
    hardware: str | None = None
    cluster: str | Path | None = None
    """A cluster file: its kinds train and generate."""
    framework: str | None = None
    trainer: str | None = None
    engine: str | None = None
    precision: str | None = None
    weights: str | None = None
    """Of the rollout."""
    cache: str | None = None
    lora_rank: int | None = None
    mode: str | None = None
    """Of MODES; several with commas."""
    staleness: object = None
    """A number, a range 0..8, or ``any``."""
    train_gpus: int | None = None
    generate_gpus: int | None = None
    critic_gpus: int | None = None
    """Of a pool of the critic alone; 0 = on the actor's."""
    sync: str | None = None
    memory_share: float | None = None
    offload: object = None
    """States of STATES with commas, or ``none``."""
    calibrated: str | Path | None = None
    """A file of ``plan calibrate --rl``."""
    network_bandwidth: object = None
    price: float | None = None
    actor: object = None
    """Fields of the actor's layout: tp=4,pp=2,recompute=full, or a mapping."""
    rollout: object = None
    """Fields of the rollout's layout: tp=4,max_batch=256, or a mapping."""


@record
class RlQuestion:
    """What is asked, with its defaults."""

    job: RlJob
    asked: Asked
    hardware: str
    """Of the pool that trains, as files name it."""
    generate_hardware: str = ""
    """Of the pool that generates where it is another."""
    trainer: str
    network_bandwidth: float | None = None
    assumptions: tuple[Assumption, ...] = field(default=())


def ask(request: RlRequest) -> RlQuestion:
    """Load what is named, choose what is not, and say so. Raises PlannerError."""
    assumed: list[Assumption] = []
    if request.model is None:
        raise PlannerError("which model? give --model")
    _check(request)
    model = load_model(request.model) if isinstance(request.model, str) else request.model
    framework = _framework(request, assumed)
    trainer = known_as(request.trainer) if request.trainer else framework.trainer
    engine = request.engine or framework.engine
    if not request.engine:
        assumed.append(Assumption("engine", engine, f"what {framework.label} is built with", "--engine"))
    pools = _pools(request, assumed)
    bandwidth = None
    if request.network_bandwidth is not None:
        bandwidth = parse(request.network_bandwidth, "bytes/s", what="--network-bandwidth")
        pools = replace(pools, train=replace(pools.train, network_bandwidth=bandwidth))
        pools = replace(pools, generate=replace(pools.generate, network_bandwidth=bandwidth))
    job = RlJob(
        workload=_workload(request, model, framework, pools.train, assumed), framework=framework, trainer=load_trainer(trainer),
        engine=load_engine(engine), hardware=pools.train, generate_hardware=pools.generate,
        precision=_rollout_precision(request, pools.generate, assumed), memory_share=request.memory_share or 0.0,
        between=pools.between, price=request.price,
    )  # fmt: skip
    if request.calibrated is not None:
        own = load_factors(Path(request.calibrated))
        if own.framework != framework.name:
            raise PlannerError(f"{request.calibrated} is of runs of {own.framework}, and this is asked of {framework.name}")
        job = replace(job, factors=own.factors)
        assumed.append(Assumption("phases", str(request.calibrated), f"corrected by runs of {own.framework}", "--calibrated"))
    if framework.note:
        assumed.append(Assumption("framework", framework.label, framework.note, "--framework"))
    return RlQuestion(
        job=job, asked=_asked(request, pools, framework, assumed), hardware=pools.names[0], generate_hardware=pools.names[1],
        trainer=trainer, network_bandwidth=bandwidth, assumptions=tuple(assumed),
    )  # fmt: skip


def _check(request: RlRequest) -> None:
    """Raises PlannerError on a number that means nothing; 0 would read as not said."""
    for flag in ("prompts", "samples", "epochs", "turns"):
        if getattr(request, flag) == 0:
            raise PlannerError(f"--{flag} is 0; it must be a whole number from 1")
    share = request.memory_share
    if share is not None and not 0.0 < share <= 1.0:
        raise PlannerError(f"--memory-share is {shown(share)}; it must be a share above 0 and up to 1, like 0.6")


def _framework(request: RlRequest, assumed: list[Assumption]) -> RlFramework:
    found = load_framework(request.framework or FRAMEWORK)
    if request.framework is None:
        assumed.append(Assumption("framework", found.label, "the most used", "--framework"))
    return found if request.offload is None else found.offloading(read_states(request.offload))


def read_states(said: object) -> tuple[str, ...]:
    """``weights,optimizer`` or ``none``. Raises PlannerError."""
    names = [one.strip() for one in str(said).split(",")] if isinstance(said, str) else list(said)  # type: ignore[call-overload]
    if unknown := [one for one in names if one not in (*STATES, "none")]:
        raise PlannerError(f"--offload is {shown(unknown[0])}; it must be of {listed(STATES)}, or none")
    return tuple(one for one in names if one != "none")


@record
class _Pools:
    """Kinds of GPUs of both pools."""

    train: HardwareProfile
    generate: HardwareProfile
    names: tuple[str, str]
    gpus: int
    sizes: tuple[int, int] = (0, 0)
    """Of two kinds: those that train and those that generate."""
    between: float = 0.0


def _pools(request: RlRequest, assumed: list[Assumption]) -> _Pools:
    """GPUs of one kind, or those of a cluster file."""
    if request.cluster is not None:
        if request.hardware or request.gpus or request.nodes:
            raise PlannerError("--cluster says what there is; leave --hardware, --gpus and --nodes out")
        return _of_cluster(read_cluster(Path(request.cluster)), request, assumed)
    name = hardware_asked(request.hardware, assumed)
    hardware = load_hardware(name)
    gpus = request.gpus or (request.nodes or 0) * int(hardware.gpus_per_node)
    if not gpus:
        raise PlannerError("how many GPUs? give --gpus or --nodes")
    if request.gpus and request.nodes and request.nodes * int(hardware.gpus_per_node) != request.gpus:
        raise PlannerError(f"{request.nodes} nodes do not have {request.gpus} GPUs; leave --nodes or --gpus out")
    value_of(GPUS, gpus, "--gpus", "gpus")
    return _Pools(train=hardware, generate=hardware, names=(name, ""), gpus=gpus)


def _of_cluster(cluster: ClusterFile, request: RlRequest, assumed: list[Assumption]) -> _Pools:
    """One kind: as --hardware and --gpus. Two: the one with the faster products trains, the other generates."""
    kinds = cluster.nodes
    if len(kinds) == 1:
        one = kinds[0]
        return _Pools(train=one.profile, generate=one.profile, names=(one.hardware, ""), gpus=one.num_gpus)
    if len(kinds) > 2:
        raise PlannerError(f"the cluster has {len(kinds)} kinds of nodes; a pool each for training and generation takes two")
    train, generate = sorted(kinds, key=lambda one: (-one.profile.sustained_flops("bf16"), -one.num_gpus))
    assumed.append(Assumption("pools", f"{train.kind} trains, {generate.kind} generates", "the faster products train", "--cluster"))
    link = cluster.link(train.kind, generate.kind)
    per_node = min(train.count, generate.count) if link is not None and link.per_node else 1
    return _Pools(
        train=train.profile, generate=generate.profile, names=(train.hardware, generate.hardware),
        gpus=train.num_gpus + generate.num_gpus, sizes=(train.num_gpus, generate.num_gpus),
        between=0.0 if link is None else link.bandwidth * per_node,
    )  # fmt: skip


def _workload(
    request: RlRequest, model: ModelSpec, framework: RlFramework, hardware: HardwareProfile, assumed: list[Assumption]
) -> RlWorkload:
    """The step; what is not said is assumed aloud."""
    algorithm = request.algorithm or ALGORITHM
    if algorithm not in ALGORITHMS:
        raise PlannerError(f"--algorithm is {shown(algorithm)}; it must be one of {listed(ALGORITHMS)}")
    rules = ALGORITHMS[algorithm]
    prompts = request.prompts or PROMPTS
    samples = request.samples or rules.samples
    prompt = _tokens(request.prompt_length, "--prompt-length", PROMPT_LENGTH)
    longest = int(_tokens(request.max_length, "--max-length", 0.0)) or _longest(request, model, prompt)
    room = longest - prompt
    if room < 1:
        raise PlannerError(f"--max-length {longest} leaves no room for an answer after prompts of {prompt:g} tokens")
    answers = read_answers(MEAN if request.answers is None else request.answers, room)
    for name, said, value in (
        ("algorithm", request.algorithm, f"{algorithm}: {rules.what}"), ("prompts", request.prompts, str(prompts)),
        ("samples", request.samples, str(samples)), ("prompt_length", request.prompt_length, f"{prompt:g} tokens"),
        ("max_length", request.max_length, f"{longest} tokens of prompt and answer"),
        ("answers", request.answers, f"mean {answers.mean:.0f}, p99 {answers.quantile(0.99):.0f}"),
    ):  # fmt: skip
        if said is None:
            assumed.append(Assumption(name.replace("_", " "), value, "usual", f"--{name.replace('_', '-')}"))
    reference = rules.reference if request.reference is None else request.reference
    return RlWorkload(
        model=model, algorithm=algorithm, prompts=prompts, samples=samples, prompt_length=prompt, answers=answers,
        max_length=longest, train_batch=request.train_batch or 0, epochs=request.epochs or 1,
        reference=reference, critic=(load_model(request.critic) if request.critic else model) if rules.critic else None,
        reward_model=load_model(request.reward_model) if request.reward_model else None,
        reward_s=_seconds(request.reward_time, "--reward-time"), turns=request.turns or 1,
        tool_s=_seconds(request.tool_time, "--tool-time"), tool_tokens=_tokens(request.tool_tokens, "--tool-tokens", 0.0),
        speculation=read_speculation(request.speculation),
        precision=_precision(request, hardware, assumed), lora_rank=request.lora_rank or 0,
        **_sampled_again(_kept(request.keep_rate), rules, framework, assumed),
    )  # fmt: skip


def _kept(said: float | str | None) -> float | None:
    """0.3 or 30%. Raises PlannerError."""
    return share_of(said, "--keep-rate") if isinstance(said, str) else said


def _sampled_again(said: float | None, rules: Algorithm, framework: RlFramework, assumed: list[Assumption]) -> dict[str, float]:
    """Dynamic sampling: answers of a round, and the share of prompts that is kept."""
    again = framework.resamples or (said or 1.0) < 1.0
    kept = (rules.keep_rate if again else 1.0) if said is None else said
    if said is None and rules.keep_rate < 1.0:
        why = "share of prompts whose answers are neither all right nor all wrong: it falls as the policy learns"
        why = why if again else f"{framework.label} is not told to sample groups without a gradient again"
        assumed.append(Assumption("keep rate", f"{kept:g}", why, "--keep-rate"))
    return {"generated": rules.generated if again else 1.0, "keep_rate": value_of(KEEP_RATE, kept, "--keep-rate", "keep_rate")}


def _longest(request: RlRequest, model: ModelSpec, prompt: float) -> int:
    """Prompt and answer at most: with a 99th percentile twice that, else MAX_LENGTH, within what the model was published for."""
    answers = request.answers
    if isinstance(answers, AnswerLengths):
        return int(prompt + answers.most) + 1
    ends = [float(parse_count(one, what="--answers")[0]) for one in re.findall(r"(?:p99|max)\s*=\s*([\w.]+)", str(answers or ""))]
    bare = re.fullmatch(r"\s*(?:fixed:|mean=)?([\d.]+[kK]?)\s*", str(answers or ""))
    means = [4.0 * float(parse_count(bare[1], what="--answers")[0])] if bare else []
    wanted = prompt + max([2.0 * one for one in ends] + means + [MAX_LENGTH - prompt])
    return int(min(-(-wanted // GRAIN) * GRAIN, max(model.max_sequence_length, MAX_LENGTH)))


def _tokens(said: object, what: str, default: float) -> float:
    if said is None:
        return default
    if isinstance(said, (int, float)) and not isinstance(said, bool):
        return float(said)
    return float(parse_count(str(said), what=what)[0])


def _seconds(said: object, what: str) -> float:
    return 0.0 if said is None else parse(said, "seconds", what=what)


def _precision(request: RlRequest, hardware: HardwareProfile, assumed: list[Assumption]) -> str:
    """Of the updates: as said, else bf16, or fp16 where the GPUs that train have no bf16."""
    if request.precision:
        return usual_name(request.precision)
    if hardware.lacks_bf16:
        assumed.append(Assumption("precision", "fp16", f"{hardware.name} has no bf16", "--precision"))
    return "fp16" if hardware.lacks_bf16 else "bf16"


def _rollout_precision(request: RlRequest, hardware: HardwareProfile, assumed: list[Assumption]) -> Precision:
    """Of the engines, which load bf16 as fp16 where the GPUs have no bf16."""
    weights, cache = request.weights or ("fp16" if hardware.lacks_bf16 else "bf16"), request.cache or "bf16"
    if hardware.lacks_bf16 and not request.weights:
        why = f"{hardware.name} has no bf16: engines load such weights as fp16 there"
        assumed.append(Assumption("weights", weights, why, "--weights"))
    for flag, value, known in (("--weights", weights, WEIGHTS), ("--cache", cache, CACHES)):
        if value not in known:
            raise PlannerError(f"{flag} is {shown(value)}; it must be one of {listed(known)}")
    return Precision(weights=weights, cache=cache)


def _asked(request: RlRequest, pools: _Pools, framework: RlFramework, assumed: list[Assumption]) -> Asked:
    """What of the placement is fixed."""
    modes = tuple(one.strip() for one in (request.mode or "").split(",") if one.strip())
    if unknown := [one for one in modes if one not in MODES]:
        raise PlannerError(f"--mode is {shown(unknown[0])}; it must be one of {listed(MODES)}")
    if request.sync is not None and request.sync not in SYNC_METHODS:
        raise PlannerError(f"--sync is {shown(request.sync)}; it must be one of {listed(SYNC_METHODS)}")
    staleness = read_staleness(request.staleness) if request.staleness is not None else STALENESS
    if request.staleness is None and not modes:
        why = f"what {framework.label} can run ahead, at most {STALENESS[1]}"
        assumed.append(Assumption("staleness", f"{staleness[0]} to {staleness[1]} steps", why, "--staleness"))
    return Asked(
        gpus=pools.gpus, modes=modes, staleness=staleness, train_gpus=request.train_gpus or pools.sizes[0],
        generate_gpus=request.generate_gpus or pools.sizes[1], critic_gpus=request.critic_gpus,
        sync=request.sync or "", train=read_fields(request.actor, "--actor"),
        rollout=read_fields(request.rollout, "--rollout"), apart=bool(pools.names[1]),
    )  # fmt: skip


def read_staleness(said: object) -> tuple[int, int]:
    """``2``, ``0..8`` or ``any``. Raises PlannerError."""
    text = str(said).strip()
    if text == "any":
        return 0, ASYNCHRONOUS
    found = re.fullmatch(r"(\d{1,4})(?:\s*(?:\.\.|-)\s*(\d{1,4}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if low > high or high > ASYNCHRONOUS:
        known = f"a number of steps up to {ASYNCHRONOUS}, a range with the smaller first like 0..8, or any"
        raise PlannerError(f"--staleness is {shown(said)}; write {known}")
    return low, high


def read_fields(said: object, flag: str) -> dict[str, int]:
    """Fields of a layout: ``tp=4,pp=2,recompute=full``, or a mapping. Raises PlannerError."""
    if said is None:
        return {}
    parts = said if isinstance(said, Mapping) else dict(_pair(one, flag) for one in str(said).split(",") if one.strip())
    if flag == "--rollout":
        if unknown := [name for name in parts if name not in ROLLOUT]:
            raise PlannerError(f"{flag}: {shown(unknown[0])} is no field; known: {listed(ROLLOUT)}")
        return {name: value_of(GPUS, _whole(value), flag, name) for name, value in parts.items()}
    if unknown := [name for name in parts if name not in FIELDS]:
        raise PlannerError(f"{flag}: {shown(unknown[0])} is no field; known: {listed(FIELDS)}")
    layout = Layout.from_dict({name: _whole(value) for name, value in parts.items()}, where=flag)
    return {name: int(getattr(layout, name)) for name in parts}


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise PlannerError(f"{flag}: {shown(text)} is no field with a value; write tp=4,pp=2")
    return name.strip().replace("-", "_"), value.strip()


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value
