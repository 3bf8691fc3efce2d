"""Memory of a GPU in every phase of a step, and the chance that it runs out when the phase begins.

generate   colocated: what the engine takes by its share, and what of training stays: everything where nothing is offloaded, else
           communicators, fragments and the context; on GPUs of its own: the engine alone
logprob    weights, workspace and what stays of the engine: its context, graphs and communicators where it sleeps, else all of it
train      the peak of the update, the critic's too, and what stays of the engine
sync       colocated: weights of both sides at once, and a bucket; else the engine and a bucket
Chances: ln(measured / predicted) of training is normal with the trainer's memory error, the cache of the engine with its spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.estimate import Estimate
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement
from planner.rl.rl_step import RolloutSide, TrainSide
from planner.serving.result import normal_share
from planner.serving.serving_memory import LOOSE

BUCKET = 1.0e9
"""Bytes of a bucket of weights where the framework's file says none."""
STAYS = ("communication_buffers", "fragmentation", "context")
"""Components of training that no offload moves."""


@dataclass(frozen=True, kw_only=True)
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
    states = train.actor.weights + found.memory["gradients"] + found.memory["optimizer_states"]
    stays = np.sum([found.memory[name] for name in STAYS], axis=0)
    if not job.framework.offload:
        stays = stays + states
    runtime = np.where(np.asarray(rollout.layout.engine_gpus) > 1, job.engine.accounting.group, 0.0) + job.engine.accounting.context
    taken = np.asarray(engine.usable - engine.reserve) + runtime + np.zeros_like(stays)
    asleep = np.asarray(engine.graphs) + runtime
    left = (asleep if job.framework.engine_sleeps else taken) if together else 0.0
    critic = _critic(job, placement, train)
    waits = "reference" in job.framework.offloaded and not job.workload.offline
    reference = 0.0 if waits or not job.workload.reference else train.actor.weights
    updating = found.memory_needed + critic + left + reference
    forward = train.actor.weights + found.memory["workspace"] + stays + left + reference
    if not job.framework.offload or not together:
        forward = forward + states - train.actor.weights
    error, usable, room = found.memory_error, found.usable_memory, float(np.max(engine.usable))
    if job.workload.offline:  # the reference stays beside the policy
        peak = {"logprob": forward - left, "train": updating - left}
        chance = {name: 1.0 - _below(size, usable, error) for name, size in peak.items()}
        return PhaseMemory(peak=peak, chance=chance, usable={"train": usable, "generate": room})
    bucket = job.framework.bucket or BUCKET
    sync = bucket + (np.asarray(engine.weights) + runtime + train.actor.weights + stays if together else taken)
    peak = {"generate": taken + (stays if together else 0.0), "logprob": forward, "train": updating, "sync": sync}
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


def _spare(runtime: Floats, left: Floats) -> Floats:
    """Chance that an engine by itself has this room left: it keeps to its share, what is uncertain is its runtime outside of it."""
    return np.asarray(normal_share(left / (LOOSE[2] * runtime)))


def _below(size: Floats, usable: float, error: float) -> Floats:
    """Chance that a size stays below what is usable: ln(measured / predicted) is normal with this deviation."""
    return np.asarray(normal_share(np.log(usable / np.maximum(size, 1.0)) / error))


def _critic(job: RlJob, placement: Placement, train: TrainSide) -> Floats:
    """What a critic on the same GPUs adds to the update: nothing where states of the one that waits are offloaded, but by how much
    its own update is larger."""
    if train.critic is None or placement.critic_gpus:
        return np.zeros_like(train.actor.weights)
    own: Estimate = train.critic.estimate
    if job.framework.offload:
        return np.maximum(own.memory_needed - train.actor.estimate.memory_needed, 0.0)
    return train.critic.states + own.memory["gradients"]
