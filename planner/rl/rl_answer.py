"""Answers to questions about RL: the best placements with why, what stands next, and what would fit where nothing does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.costs import HOUR, rates_of
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.layout import FIELDS, Layout
from planner.record import record
from planner.rl.rl_framework import RlFramework, load_framework
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement
from planner.rl.rl_plan import PHASES, RlPlan, RlPrediction, load_rl_plan
from planner.rl.rl_question import ROLLOUT, RlQuestion, RlRequest, ask, read_fields
from planner.rl.rl_ranges import host_doubt, spread_of
from planner.rl.rl_search import Asked, Candidate, Found, search, update_fits
from planner.rl.rl_step import sampler_of
from planner.rl.weight_sync import sync_bytes
from planner.trainer import load_trainer
from planner.units import GIB, KILO, format_seconds, plural

GROWN = (2, 4, 8, 16, 32)
"""Times the GPUs that are tried where nothing fits, up to the first that does."""
SHARES = (0.8, 0.6, 0.4)
"""The same of the engine's share of the memory."""
MEMORY_TEXT = {"generate": "generation", "logprob": "the log-probs", "train": "the update", "sync": "weight sync"}
"""Phases whose memory is told, in words."""
PART_TEXT = {
    "prepare": "data, host, metrics", "generate": "generation", "reward": "rewards", "logprob": "log-probs of the policy",
    "reference": "log-probs of the reference", "critic": "values of the critic", "train": "update of the policy",
    "critic_train": "update of the critic", "sync": "weight sync", "switch": "memory moved between the phases",
    "wait": "waiting for answers",
}  # fmt: skip
"""Parts of a step, in words."""


@record
class Way:
    """One change that would fit."""

    change: str
    flag: str
    step_s: float


@record
class Answered:
    """The answer to a question."""

    question: RlQuestion
    plans: tuple[RlPlan, ...]
    """Best first; where none fits, those that miss by the least."""
    by_mode: dict[str, RlPlan]
    """The best of every kind of placement."""
    found: Found
    ways: tuple[Way, ...] = ()
    """What would fit, where nothing does."""
    why: str = ""

    @property
    def fit(self) -> bool:
        """The plans fit."""
        return self.found.fit


def answer(request: RlRequest, top: int = 3, progress: Callable[[str], None] = lambda _: None) -> Answered:
    """The best placements of a question. Raises PlannerError."""
    question = ask(request)
    progress(f"pricing placements on {question.asked.gpus} GPUs")
    found = search(question.job, question.asked, top)
    ways = () if found.fit else tuple(ways_out(question, found, progress))
    why = why_of(question, found)
    plans = tuple(plan_of(question, one, why if number == 0 else "") for number, one in enumerate(found.best))
    named = {name: plan_of(question, one, "") for name, one in found.by_mode.items()}
    return Answered(question=question, plans=plans, by_mode=named, found=found, ways=ways, why=why)


def ways_out(question: RlQuestion, nearest: Found, progress: Callable[[str], None]) -> list[Way]:
    """Changes that make a placement fit: another back end, a smaller share for the engine, states on the host, adapters, GPUs."""
    found, job, asked = list[Way](), question.job, question.asked
    tries: list[tuple[str, str, RlQuestion]] = []
    for backend in job.framework.backends:
        if backend.trainer != question.trainer:
            other = replace(question, job=job.replace(trainer=load_trainer(backend.trainer)), trainer=backend.trainer)
            tries.append((f"the back end {backend.name} of {job.framework.name}", f"--trainer {backend.trainer}", other))
    for share in SHARES if nearest.updates_fit else ():
        if share < (job.memory_share or max(job.framework.cache_share, job.framework.cache_share_alone)):
            smaller = replace(question, job=job.replace(memory_share=share))
            tries.append((f"{share:g} of the memory for the engine", f"--memory-share {share:g}", smaller))
    if not asked.train.get("offload_optimizer"):
        held = replace(asked, train={**asked.train, "offload_optimizer": 100})
        tries.append(("optimizer states in host memory", "--actor offload_optimizer=100", replace(question, asked=held)))
    if not job.workload.lora_rank:
        tuned = job.replace(workload=job.workload.replace(lora_rank=32))
        tries.append(("adapters of rank 32 in place of all weights", "--lora-rank 32", replace(question, job=tuned)))
    grown = [replace(asked, gpus=asked.gpus * times, train_gpus=0, generate_gpus=0) for times in GROWN if not asked.apart]
    if nearest.updates_fit or _some_update_fits(job, grown[:1] + grown[-1:], progress):
        for more in grown:
            tries.append((f"{more.gpus} GPUs", f"--gpus {more.gpus}", replace(question, asked=more)))
    for change, flag, one in tries:
        if flag.split()[0] in {way.flag.split()[0] for way in found}:
            continue
        progress(f"trying {change}")
        try:
            result = search(one.job, one.asked, 1, only_fitting=True)
        except PlannerError:
            continue
        if result.fit:
            found.append(Way(change=change, flag=flag, step_s=result.best[0].seconds))
    return found


def _some_update_fits(job: RlJob, tries: Sequence[Asked], progress: Callable[[str], None]) -> bool:
    """Whether the ends of a row of numbers of GPUs leave hope for those between."""
    for asked in tries:
        progress(f"trying an update on {asked.gpus} GPUs")
        with contextlib.suppress(PlannerError):
            if update_fits(job, asked):
                return True
    return False


def why_of(question: RlQuestion, found: Found) -> str:
    """Why the first is the first, and by how much the best of another kind is slower."""
    first = found.best[0]
    place, phases = first.placement, {name: float(np.ravel(value)[0]) for name, value in first.step.phases.items()}
    if not found.fit:
        chances = {name: float(np.ravel(one)[0]) for name, one in first.memory.chance.items()}
        phase, chance = max(chances.items(), key=lambda one: one[1])
        when = f"when {MEMORY_TEXT[phase]} begins"
        return f"Nothing fits: the nearest runs out of memory with a chance of {100 * chance:.0f} % {when}."
    learning = sum(phases[name] for name in PHASES if name in ("logprob", "reference", "critic", "train", "critic_train"))
    sampled = phases["generate"] + phases["reward"]
    if "generate" not in first.memory.peak:
        said = f"Recorded answers: the GPUs learn for {format_seconds(learning)}"
    elif place.mode == "colocated":
        who = "All GPUs sample" if place.gpus > 1 else "The GPU samples"
        said = f"{who} for {format_seconds(sampled)}, then {'learn' if place.gpus > 1 else 'learns'} for {format_seconds(learning)}"
    elif place.synchronous:
        on = f"{format_seconds(sampled)} on {plural(place.generate_gpus, 'GPU')}"
        said = f"Generation takes {on}, learning {format_seconds(learning)} after it"
    else:
        said = (
            f"Generation ({format_seconds(sampled)} on {plural(place.generate_gpus, 'GPU')}) and learning "
            f"({format_seconds(learning)} on {place.train_gpus}) run side by side; {_decides(phases, sampled, learning)}"
        )
    others = [(name, one) for name, one in found.by_mode.items() if one.placement != place and not _same(one.placement, place)]
    if others:
        name, other = min(others, key=lambda one: one[1].seconds)
        more = other.seconds / first.seconds - 1.0
        said += f"; the best {name} placement takes {format_seconds(other.seconds)}"
        said += f", {100 * more:.0f} % more" if more > 0.005 else ""
    elif len(found.best) > 1:
        more = found.best[1].seconds / first.seconds - 1.0
        next_ = f"takes {format_seconds(found.best[1].seconds)}, {100 * more:.1f} % more" if more > 0.0005 else "is as fast"
        said += f"; the next {next_}"
    return said + "."


def _decides(phases: Mapping[str, float], sampled: float, learning: float) -> str:
    """What makes a step of two pools as long as it is: the longer of both, and what neither hides where that is more."""
    alone = {"preparing data and host work": phases["prepare"], "weight sync": phases["sync"]}
    name, most = max(alone.items(), key=lambda one: one[1])
    if most > max(sampled, learning):
        return f"{name} takes more than either, {format_seconds(most)}"
    if sampled > learning + phases["prepare"]:
        return "generation decides"
    before = f" with the {format_seconds(phases['prepare'])} of data and host work before it" if sampled > learning else ""
    return f"learning{before} decides"


def _same(one: Placement, other: Placement) -> bool:
    return one.mode == other.mode and one.synchronous == other.synchronous


def plan_of(question: RlQuestion, one: Candidate, why: str) -> RlPlan:
    """A candidate as a plan."""
    job = question.job
    return RlPlan(
        workload=job.workload, hardware=question.hardware, generate_hardware=question.generate_hardware, gpus=question.asked.gpus,
        framework=job.framework.label, trainer=question.trainer, engine=job.engine.label, placement=one.placement,
        layouts=replace(one.layouts, actor=_counted(one)), network_bandwidth=question.network_bandwidth,
        memory_share=job.memory_share, offload=_offload(job.framework), prediction=predict(question, one),
        assumptions=question.assumptions, why=why,
    )  # fmt: skip


def _offload(framework: RlFramework) -> tuple[str, ...] | None:
    """What waits on the host where that is not what the framework does by itself."""
    own = load_framework(framework.label).offloaded
    return None if framework.offloaded == own else tuple(sorted(framework.offloaded))


def _counted(one: Candidate) -> Layout:
    """The actor's layout with the microbatches that packing leaves."""
    return one.layouts.actor.replace(num_microbatches=int(one.train.actor.microbatches[0]))


def predict(question: RlQuestion, one: Candidate) -> RlPrediction:
    """Plain numbers of a candidate."""
    job, place, step = question.job, one.placement, one.step
    seconds, work = one.seconds, job.workload
    sampler = sampler_of(job, place, one.layouts.rollout)
    flat = {name: float(np.ravel(value)[0]) for name, value in step.phases.items()}
    parts = {name: float(np.ravel(step.parts.get(name, 0.0))[0]) for name in (*PHASES, "wait")}
    spread = spread_of("step_s", host_doubt(job.framework.name, parts["prepare"] / seconds))
    sampled = float(np.ravel(one.rollout.generation.seconds)[0])
    return RlPrediction(
        step_s=seconds, parts_s=parts, phases_s={name: flat[name] for name in PHASES},
        idle={name: max(1.0 - float(np.ravel(busy)[0]) / seconds, 0.0) for name, busy in step.busy.items()},
        tokens_per_s_per_gpu=work.tokens / seconds / place.gpus,
        memory_gib={name: float(np.ravel(size)[0]) / GIB for name, size in one.memory.peak.items()},
        memory_limit_gib={name: size / GIB for name, size in one.memory.usable.items()},
        memory_risk={name: float(np.ravel(chance)[0]) for name, chance in one.memory.chance.items()},
        running=float(np.ravel(one.rollout.generation.running)[0]), tail_s=max(sampled - float(np.ravel(sampler.even)[0]), 0.0),
        longest_tokens=float(np.ravel(one.rollout.generation.longest)[0]), staleness=age_of(place, parts["wait"]),
        microbatches=float(one.train.actor.microbatches[0]), packed=float(one.train.actor.fill[0]),
        sync_bytes=sync_bytes(work.model, job.precision.weights), range_s=(seconds / spread, seconds * spread), fits=one.fits,
    )  # fmt: skip


def age_of(place: Placement, waiting: float) -> float:
    """Steps between the weights that an answer began with and those that train on it: all that is allowed where answers wait for
    the trainer, one where it waits for them."""
    if place.synchronous:
        return 0.0
    return 1.0 if waiting > 0.0 else float(place.staleness)


def usd_per_thousand_steps(plan: RlPlan, price_said: float | None = None) -> float | None:
    """Dollars of a thousand steps: GPUs of both pools at their prices; None without one."""
    assert plan.prediction is not None
    place = plan.placement
    pools = [(plan.hardware, plan.gpus if not plan.generate_hardware else place.gpus - place.generate_gpus)]
    if plan.generate_hardware:
        pools.append((plan.generate_hardware, place.generate_gpus))
    total = 0.0
    for name, gpus in pools:
        rate = rates_of(load_hardware(name), price=price_said).usd_per_gpu_hour
        if rate is None:
            return None
        total += rate * gpus
    return total * plan.prediction.step_s / HOUR * KILO


def estimate(base: RlPlan | Path | None, request: RlRequest) -> RlPlan:
    """One placement, priced: that of a plan or its file with what the request replaces, or of flags.

    What is not said of the layouts is chosen as the search does. Raises PlannerError where nothing of it is legal."""
    if base is not None:
        plan = load_rl_plan(base) if isinstance(base, Path) else base
        request = request_of_plan(plan, request)
    question = ask(request)
    if not question.asked.modes:
        asked = question.asked
        sized = asked.train_gpus not in (0, asked.gpus) or asked.generate_gpus not in (0, asked.gpus)
        apart = asked.apart or sized or asked.staleness[0] > 0
        mode = "split" if apart else "colocated"
        question = replace(question, asked=replace(asked, modes=(mode,)))
    if request.staleness is None:
        least = 1 if question.asked.modes == ("hybrid",) else 0
        question = replace(question, asked=replace(question.asked, staleness=(least, least)))
    found = search(question.job, question.asked, 1)
    return plan_of(question, found.best[0], "priced as given; what was left open is the best of its kind")


def request_of_plan(plan: RlPlan, said: RlRequest) -> RlRequest:
    """What a plan says, with what a request says in its place."""
    work, place, layouts = plan.workload, plan.placement, plan.layouts
    given = {one.name: getattr(said, one.name) for one in dataclasses.fields(said) if getattr(said, one.name) is not None}
    resized = bool({"gpus", "nodes", "train_gpus", "generate_gpus", "mode", "cluster"} & given.keys())
    keep = [name for name in FIELDS if name not in ("num_microbatches", "dp", "micro_batch_size", "dp_shard")]
    actor = {name: value for name, value in layouts.actor.to_dict().items() if name in keep}
    skip = ("replicas", "max_tokens", "receive_interval", "balance", "hold", "gpu_weights")
    rollout = {name: int(value) for name, value in vars(layouts.rollout).items() if name in ROLLOUT and name not in skip}
    base: dict[str, Any] = {
        "model": work.model, "gpus": plan.gpus, "hardware": plan.hardware, "framework": plan.framework, "trainer": plan.trainer,
        "engine": plan.engine, "algorithm": work.algorithm, "prompts": work.prompts, "samples": work.samples,
        "keep_rate": work.keep_rate, "prompt_length": work.prompt_length, "answers": work.answers, "max_length": work.max_length,
        "train_batch": work.train_batch, "epochs": work.epochs, "reference": work.reference, "turns": work.turns,
        "tool_time": f"{work.tool_s} s", "tool_tokens": work.tool_tokens, "reward_time": f"{work.reward_s} s",
        "precision": work.precision,
        "weights": layouts.rollout_precision.weights, "cache": layouts.rollout_precision.cache, "lora_rank": work.lora_rank,
        "mode": place.mode, "staleness": place.staleness, "sync": place.sync, "actor": actor, "rollout": rollout,
        "speculation": work.speculation, "memory_share": plan.memory_share or None,
        "offload": plan.offload,
        "network_bandwidth": None if plan.network_bandwidth is None else f"{plan.network_bandwidth} B/s",
    }  # fmt: skip
    if not resized:
        base |= {"train_gpus": place.train_gpus, "generate_gpus": place.generate_gpus, "critic_gpus": place.critic_gpus}
    for name in ("actor", "rollout"):
        if name in given:
            given[name] = {**base[name], **read_fields(given[name], f"--{name}")}
    if "nodes" in given or "cluster" in given:
        base["gpus"] = None
    return RlRequest(**{**base, **given})
