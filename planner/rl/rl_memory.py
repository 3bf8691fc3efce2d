"""Memory of a GPU in every phase of a step, and the chance that it runs out when the phase begins.

generate   colocated: what the engine takes by its share, and what of training stays: communicators, fragments, the context, and the
           states of actor, critic and reference that do not wait on the host; on GPUs of its own: the engine alone
logprob    weights, workspace, states that stay, and what stays of the engine: its context, graphs and communicators where it
           sleeps, else all of it
train      the peak of the update, of the actor's or the critic's, beside what stays of the other and of the engine
sync       colocated: weights of both sides at once, states that stay, and a bucket; else the engine and a bucket
Chances: ln(measured / predicted) of training is normal with the trainer's memory error, the cache of the engine with its spread.
"""

from __future__ import annotations

import numpy as np

from planner.arrays import Floats
from planner.record import record
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement
from planner.rl.rl_step import RolloutSide, TrainSide
from planner.rl.training_phase import Learning
from planner.serving.result import normal_share
from planner.serving.serving_memory import LOOSE

BUCKET = 1.0e9
"""Bytes of a bucket of weights where the framework's file says none."""
STAYS = ("communication_buffers", "fragmentation", "context")
"""Components of training that no offload moves."""


@record
class PhaseMemory:
    """Columns by phase: generate, logprob, train, sync."""

    peak: dict[str, Floats]
    """Bytes of a GPU."""
    chance: dict[str, Floats]
    """That it runs out when the phase begins."""
    usable: dict[str, float]
    """Bytes of a GPU of each pool: train, generate."""

    @property
    def worst(self) -> Floats:
        """Largest chance of all phases."""
        return np.asarray(np.maximum.reduce(list(self.chance.values())))


def memory_of(job: RlJob, placement: Placement, train: TrainSide, rollout: RolloutSide) -> PhaseMemory:
    """Peaks and chances of both sides, whose rows fit each other."""
    found, engine = train.actor.estimate, rollout.generation.memory
    together = placement.mode != "split"
    fixed = np.sum([found.memory[name] for name in STAYS], axis=0)
    stays, beside = fixed + _kept(job, train.actor, together), _beside(job, placement, train)
    runtime = np.where(np.asarray(rollout.layout.engine_gpus) > 1, job.engine.accounting.group, 0.0) + job.engine.accounting.context
    taken = np.asarray(engine.usable - engine.reserve) + runtime + np.zeros_like(stays)
    asleep = np.asarray(engine.graphs) + runtime
    left = (asleep if job.framework.engine_sleeps else taken) if together else 0.0
    used = np.where(_stays(job, "weights", together), 0.0, train.actor.weights)
    forward = stays + used + found.memory["workspace"] + beside + left
    updating = _updating(job, placement, train) + _reference(job, placement, train) + left
    error, usable, room = found.memory_error, found.usable_memory, float(np.max(engine.usable))
    if job.workload.offline:  # nothing is generated: the reference stays beside the policy
        peak = {"logprob": forward - left, "train": updating - left}
        chance = {name: 1.0 - _below(size, usable, error) for name, size in peak.items()}
        return PhaseMemory(peak=peak, chance=chance, usable={"train": usable, "generate": room})
    sync = (job.framework.bucket or BUCKET) + (np.asarray(engine.weights) + runtime + stays + used + beside if together else taken)
    peak = {"generate": taken + (stays + beside if together else 0.0), "logprob": forward, "train": updating, "sync": sync}
    starts = np.asarray(engine.start_chance) + np.zeros_like(stays)
    if together:
        starts = starts * _below(peak["generate"], room, error)
    chance = {
        "generate": 1.0 - starts,
        "logprob": 1.0 - _below(forward, usable, error),
        "train": 1.0 - _below(updating, usable, error),
        "sync": 1.0 - (_below(sync, usable, error) if together else _spare(runtime, room - sync)),
    }
    return PhaseMemory(peak=peak, chance=chance, usable={"train": usable, "generate": room})


def _stays(job: RlJob, state: str, together: bool) -> bool:
    """Whether a state of training stays on the GPU when its phase is over: all do on GPUs that only train."""
    return not together or job.workload.offline or state not in job.framework.offloaded


def _kept(job: RlJob, learner: Learning, together: bool) -> Floats:
    """Bytes of a model under training that stay on the GPU between its phases: FSDP drops its gradients after the update."""
    memory = learner.estimate.memory
    dropped = job.trainer.code_base in ("fsdp", "torchtitan", "automodel")
    gradients = memory["gradients"] * (not dropped)
    sizes = {"weights": learner.weights, "gradients": gradients, "optimizer": memory["optimizer_states"]}
    return np.sum([size * _stays(job, name, together) for name, size in sizes.items()], axis=0)


def _beside(job: RlJob, placement: Placement, train: TrainSide) -> Floats:
    """Bytes of the critic and of the reference that stay on the actor's GPUs."""
    kept = _reference(job, placement, train)
    return kept if train.critic is None or placement.critic_gpus else kept + _kept(job, train.critic, placement.mode != "split")


def _reference(job: RlJob, placement: Placement, train: TrainSide) -> Floats:
    """Bytes of a frozen reference that does not wait on the host, wherever pools are."""
    waits = placement.reference_gpus or ("reference" in job.framework.offloaded and not job.workload.offline)
    return train.actor.weights * float(job.workload.reference and not waits)


def _updating(job: RlJob, placement: Placement, train: TrainSide) -> Floats:
    """Peak of the update: the actor's beside what stays of a critic on the same GPUs, or the critic's beside what stays of it."""
    own = train.actor.estimate.memory_needed
    if train.critic is None or placement.critic_gpus:
        return own
    together = placement.mode != "split"
    other = train.critic.estimate.memory_needed + _kept(job, train.actor, together)
    return np.maximum(own + _kept(job, train.critic, together), other)


def _spare(runtime: Floats, left: Floats) -> Floats:
    """Chance that an engine by itself has this room left: it keeps to its share, what is uncertain is its runtime outside of it."""
    return np.asarray(normal_share(left / (LOOSE[2] * runtime)))


def _below(size: Floats, usable: float, error: float) -> Floats:
    """Chance that a size stays below what is usable: ln(measured / predicted) is normal with this deviation."""
    return np.asarray(normal_share(np.log(usable / np.maximum(size, 1.0)) / error))
