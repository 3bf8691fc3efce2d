"""Whole RL steps as published rows describe them, predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.hardware.names import profile_named
from planner.layout import Layout, Recompute
from planner.record import record
from planner.rl.answer_lengths import AnswerLengths, read_answers
from planner.rl.published_parts import SyncRow, framework_of, model_of, number
from planner.rl.rl_framework import RlFramework, load_framework
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import ASYNCHRONOUS, MODES, Placement
from planner.rl.rl_memory import memory_of
from planner.rl.rl_ranges import host_doubt
from planner.rl.rl_step import rollout_side, sampler_of, step_of, train_side
from planner.rl.rl_workload import ALGORITHMS, RlWorkload
from planner.serving.engine import load_engine
from planner.serving.serving_layout import Precision, ServingLayout
from planner.trainer import load_trainer
from planner.units import GIB

PROMPT = 128
"""Tokens of a prompt where a row does not say: mathematics, as most of these runs train on."""
MEAN, USUAL = 0.5, 8192.0
"""Mean answer over the longest where a row does not say; of limits above USUAL tokens, which fewer answers reach, it grows as their
root."""
GUESSED = 2.0
"""Factor that a mean which nobody said may be off by."""
FRAMEWORK = "verl"
"""Where neither row nor file names one that the library has."""


@record
class StepRow(SyncRow):
    """A step, predicted."""


@record
class AskedStep:
    """What a row says that ran."""

    job: RlJob
    place: Placement
    layout: Layout
    rollout: ServingLayout
    assumed: str = ""


def asked_step(row: Mapping[str, Any], framework: str, where: str) -> AskedStep:
    """What a row says that ran. Raises PlannerError where it does not say enough."""
    known = load_framework(framework_of(framework) or FRAMEWORK)
    place = _placement(row["placement"], known, where)
    work, assumed = _workload(row, known.resamples and place.synchronous, where)
    job = _job(row, known, work)
    layout, rollout = _layouts(row, job, place)
    return AskedStep(job=job, place=place, layout=layout, rollout=rollout, assumed=assumed)


def step_row(row: Mapping[str, Any], framework: str, where: str) -> StepRow:
    """Predict one step. Raises PlannerError where the row does not say enough."""
    asked = asked_step(row, framework, where)
    job, place = asked.job, asked.place
    train, engines = train_side(job, place, asked.layout), rollout_side(job, place, sampler_of(job, place, asked.rollout))
    step = step_of(job, place, train, engines)
    memory = memory_of(job, place, train, engines)
    seconds = float(np.ravel(step.seconds)[0])
    values = {f"{name}_s": float(np.ravel(step.phases[name])[0]) for name in ("generate", "train", "sync")}
    values |= {
        "step_s": seconds,
        "logprob_s": float(np.ravel(step.phases["logprob"] + step.phases["reference"])[0]),
        "tokens_per_s_per_gpu": job.workload.tokens / seconds / place.gpus,
        "memory_gb": max(float(np.ravel(one)[0]) for one in memory.peak.values()) / GIB,
    }
    hosted = host_doubt(job.framework.name, float(np.ravel(step.parts["prepare"])[0]) / seconds)
    doubt = math.hypot(hosted, math.log(GUESSED) * bool(asked.assumed))
    return StepRow(values=values, fits=memory.worst[0] <= 0.5, assumed=asked.assumed, doubt=doubt)


def _workload(row: Mapping[str, Any], again: bool, where: str) -> tuple[RlWorkload, str]:
    """The batch of a row; what it leaves out is assumed and said. ``again``: groups without a gradient are sampled again."""
    batch, algorithm = row["batch"], str(row.get("algorithm") or "grpo").lower()
    algorithm = algorithm if algorithm in ALGORITHMS else "grpo"
    rules, assumed = ALGORITHMS[algorithm], []
    longest = number(batch, "max_length", 0) or number(batch, "max_prompt", 0) + number(batch, "max_answer", 0)
    if not longest and not number(batch, "mean_length", 0):
        raise PlannerError(f"{where}: neither lengths of answers nor the largest length are stated")
    samples = int(number(batch, "samples_per_prompt", rules.samples))
    sequences = number(batch, "generated_sequences", number(batch, "prompts", 64) * samples)
    prompt = number(batch, "prompt_length", PROMPT)
    longest = int(longest or prompt + 4 * number(batch, "mean_length"))
    room = max(longest - prompt, 2.0)
    mean = number(batch, "mean_length", MEAN * min(room, math.sqrt(room * USUAL)))
    if not number(batch, "mean_length", 0):
        assumed.append(f"answers of {mean:.0f} tokens in the mean")
    said = batch.get("answers")
    answers = read_answers(str(said), room) if said else AnswerLengths.lognormal(min(mean, room), None, room)
    trained = max(round(sequences / samples), 1) * samples
    update = int(number(batch, "train_batch", trained))
    train = row["train"]
    work = RlWorkload(
        model=model_of(row), algorithm=algorithm, prompts=trained // samples, samples=samples, prompt_length=prompt,
        answers=answers, max_length=max(longest, int(prompt + answers.most) + 1),
        train_batch=update if update < trained and trained % update == 0 else 0, generated=rules.generated if again else 1.0,
        keep_rate=number(batch, "keep_rate", rules.keep_rate if again else 1.0),
        reference=rules.reference and row.get("reference", True) is not False, critic=model_of(row) if rules.critic else None,
        precision=_training(train.get("precision")), lora_rank=int(number(train, "lora_rank", 0)),
    )  # fmt: skip
    return work, "; ".join(assumed)


def _training(said: object) -> str:
    """Precision of training by the word of a row."""
    return "fp8_block" if "block" in str(said) else "fp8" if "fp8" in str(said) else "bf16"


def _job(row: Mapping[str, Any], known: RlFramework, work: RlWorkload) -> RlJob:
    """Trainer by its back end, engine by the row or the framework, precision of the rollout."""
    train, generate = row["train"], row["generate"]
    if not row.get("hardware"):
        raise PlannerError("the row names no hardware")
    hardware = load_hardware(profile_named(str(row["hardware"])))
    other = row["placement"].get("generate_hardware") or generate.get("hardware")
    backend = str(train.get("engine") or train.get("backend") or "").lower()
    split = number(train, "pp") > 1 or number(train, "ep") > 1
    wants = "megatron" if "megatron" in backend or split else "fsdp" if "fsdp" in backend else ""
    trainer = next((one.trainer for one in known.backends if one.name == wants), known.trainer)
    engine = known.rollout(str(generate.get("engine") or "").lower().partition(" ")[0])
    said = str(generate.get("precision") or "bf16")
    weights = ("fp8_block" if work.model.is_moe else "fp8") if "fp8" in said else "nvfp4" if "fp4" in said else "bf16"
    return RlJob(
        workload=work, framework=known, trainer=load_trainer(trainer), engine=load_engine(engine.label), hardware=hardware,
        generate_hardware=load_hardware(profile_named(str(other))) if other else hardware, precision=Precision(weights=weights),
        memory_share=number(generate, "memory_share", 0),
    )  # fmt: skip


def _placement(said: Mapping[str, Any], known: RlFramework, where: str) -> Placement:
    """The placement of a row."""
    mode = str(said.get("mode") or "colocated")
    ahead = "async" in mode or "off" in mode
    mode = next((one for one in MODES if one in mode), "split" if ahead else "colocated")
    gpus = int(number(said, "gpus", 0))
    train = int(number(said, "train_gpus", gpus // 2 if mode == "split" else gpus))
    generate = int(number(said, "generate_gpus", gpus - train if mode == "split" else gpus))
    if not train or not generate:
        raise PlannerError(f"{where}: the GPUs of the pools are not stated")
    steps = said.get("staleness_steps")
    staleness = int(np.ceil(float(steps))) if isinstance(steps, (int, float)) and not isinstance(steps, bool) else int(ahead)
    staleness = 0 if mode == "colocated" else min(staleness, ASYNCHRONOUS)
    offered = next((one for one in known.placements if one.holds(mode, staleness)), known.placements[0])
    partial = bool(said.get("partial_rollout", offered.partial)) and staleness > 0
    return Placement(
        mode=mode, train_gpus=train, generate_gpus=generate, staleness=staleness, partial=partial,
        sync=offered.sync[0] if offered.mode == mode else "ipc" if mode == "colocated" else "bucketed",
    )  # fmt: skip


def _layouts(row: Mapping[str, Any], job: RlJob, place: Placement) -> tuple[Layout, ServingLayout]:
    """Both layouts; degrees that are not stated follow from the others."""
    train, generate, moe = row["train"], row["generate"], job.workload.model.is_moe
    tp, pp, cp = (int(number(train, name)) for name in ("tp", "pp", "cp"))
    zero = int(number(train, "zero", 3 if job.trainer.code_base in ("fsdp", "torchtitan") else 1))
    recompute = train.get("recompute")
    layout = Layout(
        tp=tp, pp=pp, cp=cp, ep=int(number(train, "ep")), dp=max(place.train_gpus // (tp * pp * cp), 1),
        zero=zero if pp == 1 else min(zero, 1),
        sequence_parallel=int(tp > 1), micro_batch_size=1,
        recompute=Recompute.FULL if recompute in ("full", None, True) else Recompute.NONE,
        offload_optimizer=100 if train.get("optimizer_offload") else 0,
    )  # fmt: skip
    ranks, attn_dp = int(number(generate, "tp")), int(number(generate, "attn_dp", number(generate, "attention_dp")))
    ep = int(number(generate, "ep"))
    stages = int(number(generate, "pp"))
    plain = ServingLayout(
        tp=max(ranks // attn_dp, 1), pp=stages, attn_dp=attn_dp, ep=min(ep, ranks) if moe else 1,
        moe_tp=max(ranks // ep, 1) if moe else 1,
        replicas=max(place.generate_gpus // (ranks * stages), 1),
    )  # fmt: skip
    batch = int(number(generate, "max_batch", job.max_batch(place.mode, not place.synchronous) * attn_dp))
    return layout, ServingLayout(**{**vars(plain), "max_batch": batch})
