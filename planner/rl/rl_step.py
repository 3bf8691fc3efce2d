"""One step of RL from its two sides: what each pool spends, what overlaps, what the step takes; columns over placements.

Symbols: G generation with its rewards, L what learners compute (log-probs, reference, values, updates), S weight sync, M memory
switches, P host time of the step.

colocated                       T = P + G + L + M + S
split, synchronous              T = P + G + L + S
split, s steps ahead            T = max(G, P + L) + S      every batch is sampled from its first to its last answer; where new
                                                           weights enter running engines (partial) G without its tail
hybrid, synchronous             T = P + G + L + M + S      G with the engines of all GPUs
hybrid, s steps ahead           T = B + max(1 - (B - S) / G', 0) G,  B = P + L + M + S: engines that never train sample at 1 / G',
                                but for S, which stops them; those of the trainer help when it is idle

Learners of pools of their own (reference, critic, reward model) compute beside the actor's: L takes the longest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.layout import Layout
from planner.model import ModelSpec
from planner.record import record
from planner.rl.generation import Generation, HostCost, Sampler
from planner.rl.memory_switch import copied, switch_seconds
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement
from planner.rl.rl_plan import PHASES
from planner.rl.training_phase import Learning, priced
from planner.rl.weight_sync import SyncSides, sync_seconds
from planner.serving.serving_layout import ServingLayout

MOST_AHEAD = 8
"""Further steps whose answers fill the engines: more change nothing."""


@record
class TrainSide:
    """The pool that trains, on columns of layouts of length N, with the pools of further learners."""

    gpus: int
    layout: Layout
    actor: Learning
    critic: Learning | None
    """Of the critic, on its own pool or the actor's."""
    seconds: dict[str, Floats]
    """Of logprob, reference, critic, reward, train, critic_train by themselves."""

    def take(self, rows: Any) -> TrainSide:
        """Some rows."""
        seconds = {name: one[rows] for name, one in self.seconds.items()}
        critic = None if self.critic is None else self.critic.take(rows)
        return replace(self, layout=self.layout.take(rows), actor=self.actor.take(rows), critic=critic, seconds=seconds)


@record
class RolloutSide:
    """Engines on columns of layouts of length N."""

    gpus: int
    layout: ServingLayout
    generation: Generation

    def take(self, rows: Any) -> RolloutSide:
        """Some rows."""
        return replace(self, layout=self.layout.take(rows), generation=self.generation.take(rows))


@record
class Step:
    """A step of every placement; columns."""

    parts: dict[str, Floats]
    """Seconds by PHASES and "wait", as the pool that trains sees them; they sum to the step."""
    phases: dict[str, Floats]
    """Seconds of each phase by itself."""
    busy: dict[str, Floats]
    """Seconds in which each pool computes: train, generate."""

    @property
    def seconds(self) -> Floats:
        """Of a step."""
        return np.asarray(sum(self.parts.values()))


def resized(layout: Layout, gpus: int) -> Layout:
    """The layout on another number of GPUs: more or fewer replicas, at least one."""
    model = np.asarray(layout.tp) * np.asarray(layout.pp) * np.asarray(layout.cp)
    experts = np.minimum(layout.ep, np.maximum(gpus // np.asarray(layout.pp), 1))
    return layout.replace(dp=np.maximum(gpus // model, 1), dp_shard=np.zeros_like(model), ep=experts)


def train_side(job: RlJob, placement: Placement, layout: Layout, actor: Learning | None = None) -> TrainSide:
    """Price log-probs, updates and further learners on layouts of the actor; ``actor`` where that is priced already."""
    work, gpus = job.workload, placement.train_gpus
    layout = _columns(layout)
    actor = actor or priced(job.learner(gpus), layout, work)
    zero = np.zeros(len(layout))
    needed = job.framework.recomputes_logprobs if placement.synchronous else job.framework.recomputes_logprobs_async
    seconds = {"logprob": actor.forward if needed else zero, "train": actor.update}
    seconds |= {name: zero for name in ("reference", "critic", "critic_train")} | {"reward": zero + work.reward_s * work.rounds}
    critic = None
    if work.reference:
        apart = placement.reference_gpus
        reference = _forward(job, work.model, layout, apart) if apart else actor.forward
        moved = 0.0 if apart or "reference" not in job.framework.offloaded else 2.0 * copied(job.hardware, actor.weights)
        seconds["reference"] = reference + moved
    if work.critic is not None:
        over = placement.critic_gpus or gpus
        same = work.critic == work.model and over == gpus
        critic = actor if same else priced(job.learner(over, work.critic), resized(layout, over), work)
        seconds["critic"], seconds["critic_train"] = critic.forward, critic.update
    if work.reward_model is not None:
        scored = work.generated * work.rounds
        seconds["reward"] = seconds["reward"] + scored * _forward(job, work.reward_model, layout, placement.reward_gpus)
    return TrainSide(gpus=gpus, layout=layout, actor=actor, critic=critic, seconds=seconds)


def _forward(job: RlJob, model: ModelSpec, layout: Layout, apart: int) -> Floats:
    """A forward pass of another model over all answers, on GPUs of its own or the actor's."""
    learner = job.learner(apart or int(np.max(layout.num_gpus)), model)
    return priced(learner, resized(layout, apart) if apart else layout, job.workload).forward


def sampler_of(job: RlJob, placement: Placement, layout: ServingLayout) -> Sampler:
    """The engines of layouts of the rollout; ``replicas`` are all engines of the pool."""
    slower = job.host.slower(job.generate_hardware.name)
    host = HostCost(hosts_step=job.host.hosts_step * slower, stall=job.host.stall)
    if job.framework.in_process and placement.synchronous:
        host = replace(host, sample=job.host.sample)
    return Sampler(job.served(placement.mode), layout, job.workload, host)


def rollout_side(job: RlJob, placement: Placement, sampler: Sampler) -> RolloutSide:
    """Generation with as many steps ahead as a placement allows."""
    lead = float(min(placement.staleness, MOST_AHEAD))
    return RolloutSide(gpus=placement.generate_gpus, layout=sampler.layout, generation=sampler.generation(lead))


def step_of(job: RlJob, placement: Placement, train: TrainSide, rollout: RolloutSide) -> Step:
    """Put the sides together; their rows fit each other."""
    work, own = job.workload, train.seconds
    generation = rollout.generation
    one = placement.mode == "colocated"
    prepare = job.host.step + job.host.token * work.tokens
    phases: dict[str, Floats] = {name: np.zeros_like(own["train"]) for name in PHASES} | own
    phases["prepare"] = prepare + phases["prepare"]
    phases["sync"] = _sync(job, placement, train, rollout)
    if placement.mode != "split":
        moved = _moved(job, train.actor)
        if train.critic is not None and not placement.critic_gpus:
            moved = moved + _moved(job, train.critic)
        phases["switch"] = switch_seconds(job.hardware, moved)
    phases["generate"] = (generation.steady if placement.partial else generation.seconds) * work.rounds
    if work.offline:
        phases |= dict.fromkeys(("prepare", "generate", "reward", "logprob", "sync", "switch"), np.zeros_like(own["train"]))
    phases = {name: seconds * job.factors.get(name, 1.0) for name, seconds in phases.items()}
    if placement.synchronous or one:
        return _in_turn(placement, phases)
    if placement.mode == "split":
        return _ahead(placement, phases)
    alone = placement.rollout_only / placement.generate_gpus
    return _helped(placement, phases, alone)


def _moved(job: RlJob, learner: Learning) -> Floats:
    """Bytes of a GPU for weights and optimizer states that wait in host memory while it generates."""
    sizes = {"weights": learner.weights, "optimizer": learner.estimate.memory["optimizer_states"]}
    return np.sum([size * (name in job.framework.offloaded) for name, size in sizes.items()], axis=0)


def _columns(layout: Layout) -> Layout:
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value)) for value in layout.columns().values()))
    return Layout(**dict(zip(layout.columns(), columns, strict=True)))


def model_over(layout: Layout, moe: bool) -> Floats:
    """GPUs that hold the trainer's weights once: stages times tensor ranks, or expert ranks; all where weights are sharded."""
    dense = np.asarray(layout.tp) * np.asarray(layout.pp)
    experts = np.asarray(layout.ep) * np.asarray(layout.etp) * np.asarray(layout.pp)
    over = np.maximum(dense, experts) if moe else dense
    return np.where(np.asarray(layout.zero) == 3, np.asarray(layout.num_gpus), over).astype(float)


def _sync(job: RlJob, placement: Placement, train: TrainSide, rollout: RolloutSide) -> Floats:
    colocated = placement.mode != "split"
    hardware = job.hardware if colocated else job.generate_hardware
    engines = np.asarray(rollout.layout.replicas)
    sides = SyncSides(
        train=job.cluster(train.gpus),
        generate=job.replace(hardware=hardware).cluster(rollout.gpus),
        trained_over=model_over(train.layout, job.workload.model.is_moe),
        generated_over=np.asarray(rollout.layout.engine_gpus),
        engines=engines,
        between=job.between,
    )
    return sync_seconds(placement.sync, job.workload.model, sides, framework=job.framework.name, weights=_sent(job))


def _sent(job: RlJob) -> str:
    """Format in which weights travel: that of the rollout."""
    return job.precision.weights


def _pooled(placement: Placement, phases: dict[str, Floats]) -> tuple[dict[str, Floats], Floats]:
    """Of learners the seconds on the critical path: those of pools of their own only where they are the longest."""
    apart = {"reference": placement.reference_gpus, "critic": placement.critic_gpus, "critic_train": placement.critic_gpus}
    stages = (("logprob", "reference", "critic"), ("train", "critic_train"))
    path: dict[str, Floats] = {}
    for stage in stages:
        here = sum((phases[name] for name in stage if not apart.get(name)), np.zeros_like(phases["train"]))
        longest = np.maximum.reduce([here, *(phases[name] for name in stage if apart.get(name))])
        for name in stage:
            path[name] = phases[name] if not apart.get(name) else np.zeros_like(here)
        path["wait"] = path.get("wait", 0.0) + longest - here
    learning = sum((path[name] for stage in stages for name in stage), np.zeros_like(phases["train"]))
    return path, np.asarray(learning)


def _in_turn(placement: Placement, phases: dict[str, Floats]) -> Step:
    """One after the other."""
    path, learning = _pooled(placement, phases)
    parts = {**phases, **path}
    generate = phases["generate"]
    both = {"train": learning + generate, "generate": generate + learning}
    apart = {"train": learning, "generate": generate}
    mixed = {"train": learning + generate, "generate": generate}
    busy = {"colocated": both, "split": apart, "hybrid": mixed}[placement.mode]
    return Step(parts=parts, phases=phases, busy=busy)


def _ahead(placement: Placement, phases: dict[str, Floats]) -> Step:
    """Two pools side by side: the slower one decides."""
    path, learning = _pooled(placement, phases)
    sampled = phases["generate"] + phases["reward"]
    zero = np.zeros_like(sampled)
    parts = {**phases, **path, "generate": zero, "reward": zero}
    inside = learning + path["wait"] + phases["prepare"]
    parts["wait"] = path["wait"] + np.maximum(sampled - inside, 0.0)
    return Step(parts=parts, phases=phases, busy={"train": learning, "generate": phases["generate"]})


def _helped(placement: Placement, phases: dict[str, Floats], alone: float) -> Step:
    """The trainer's GPUs sample while they do not train; ``alone``: share of the engines that never train."""
    path, learning = _pooled(placement, phases)
    zero = np.zeros_like(learning)
    busy = learning + path["wait"] + phases["prepare"] + phases["switch"] + phases["sync"]
    sampled = phases["generate"] + phases["reward"]
    done = np.minimum((busy - phases["sync"]) * alone / np.maximum(sampled, 1e-9), 1.0)
    parts = {**phases, **path, "reward": zero, "generate": (1.0 - done) * sampled}
    step = busy + parts["generate"]
    used = {"train": learning + parts["generate"], "generate": np.minimum(step - phases["sync"], sampled / alone)}
    return Step(parts=parts, phases=phases, busy=used)
