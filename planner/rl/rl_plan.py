"""RL plan: one placement of a step with its workload, its estimate and what was assumed; to YAML and back.

    planner_rl_plan: 1
    workload: {model: {...}, algorithm: grpo, prompts: 64, samples: 32, prompt_length: 512, answers: {said: ..., most: ...}, ...}
    hardware: h100-sxm                # of the pool that trains
    generate_hardware: ""             # of the pool that only generates; empty = the same
    gpus: 64
    framework: nemo-rl@0.5
    trainer: megatron-bridge          # planner's trainer that prices the updates
    engine: vllm@0.11
    placement: {mode: split, train_gpus: 32, generate_gpus: 32, staleness: 1, sync: reshard}
    layouts: {actor: {...}, rollout: {...}, rollout_precision: {...}}
    estimate: {...}
    why: ...
    assumptions: [...]

Seconds and GiB everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.record import record
from planner.rl.rl_framework import STATES
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_workload import RlWorkload
from planner.schema import Count, Name, Number, Text, check_keys, keys, one_of, plain, read, value_of, within

KIND = "rl_plan"
VERSION = 1
"""Format of RL plans. A file of another format is refused."""
PHASES = ("prepare", "generate", "reward", "logprob", "reference", "critic", "train", "critic_train", "sync", "switch")
"""Phases of a step, in their order. critic: values of the critic; critic_train: its update; switch: memory moved between them."""
POOLS = ("train", "generate")
MEMORY = ("generate", "logprob", "train", "sync")
"""Phases whose memory is told: log-probs and training on the pool that trains, generation and sync on the one that generates."""


@record
class RlPrediction:
    """An estimate of one placement as plain numbers."""

    step_s: Number
    """Seconds from one update of the policy to the next."""
    parts_s: Annotated[dict[str, Number], keys((*PHASES, "wait"))]
    """What of each phase the pool that trains spends or waits for; they sum to ``step_s``. wait: for answers still generated."""
    phases_s: Annotated[dict[str, Number], keys(PHASES)]
    """Seconds of each phase by itself, overlapped or not."""
    idle: Annotated[dict[str, Number], keys(POOLS)]
    """Share of the step in which a pool computes nothing."""
    tokens_per_s_per_gpu: Number
    """Tokens trained on, prompts included, by all GPUs of all pools."""
    memory_gib: Annotated[dict[str, Number], keys(MEMORY, required=False)]
    """Peak of a GPU in each phase."""
    memory_limit_gib: Annotated[dict[str, Number], keys(POOLS)]
    """Usable memory of a GPU of each pool."""
    memory_risk: Annotated[dict[str, Number], keys(MEMORY, required=False)]
    """Chance that a GPU runs out of memory when the phase begins."""
    running: Number
    """Answers that one engine runs at once at most."""
    tail_s: Number
    """What generation takes longer than if all answers had the mean length."""
    longest_tokens: Number
    """Expected longest answer of a step."""
    staleness: Number
    """Updates between the weights that an answer began with and those that train on it, mean."""
    microbatches: Number
    """Microbatches of an optimizer step and replica, after packing."""
    packed: Number
    """Tokens of a packed sequence over its capacity."""
    sync_bytes: Number
    """Bytes of the weights that are synchronised."""
    range_s: tuple[Number, Number] | None = None
    """Nine of ten measured steps lie within."""
    fits: bool = True
    """Every phase fits, with a chance of at most 5 % each."""

    @property
    def out_of_memory(self) -> float:
        """Largest chance of running out of memory of all phases."""
        return max(self.memory_risk.values(), default=0.0)


@record
class RlPlan:
    """One placement of RL, with everything needed to price or export it again."""

    workload: RlWorkload
    hardware: Name
    """Library name or path of the profile of the pool that trains."""
    generate_hardware: Text = ""
    """Of the pool that only generates; empty = the same."""
    gpus: Count
    """GPUs that were asked for; the placement may leave some idle."""
    framework: Name
    """Name and version, like nemo-rl@0.5."""
    trainer: Name
    """Trainer of the library that prices updates, with version and options."""
    engine: Name
    """Engine and version that generate."""
    placement: Placement
    layouts: RlLayouts
    network_bandwidth: float | None = None
    """Bytes/s per GPU; None = the profile's."""
    memory_share: Annotated[float, within(0, 1)] = 0.0
    """Engine's share of the memory of a GPU; 0 = the framework's default."""
    offload: tuple[Annotated[str, one_of(STATES)], ...] | None = None
    """States of training that wait on the host while the same GPUs generate; None = those of the framework."""
    prediction: RlPrediction | None = None
    """None in a plan that was read from a configuration and not priced yet."""
    assumptions: tuple[Assumption, ...] = ()
    why: Text = ""
    """Why this placement and not the next."""

    def __post_init__(self) -> None:
        if self.placement.gpus > self.gpus:
            raise PlannerError(f"the placement takes {self.placement.gpus} GPUs, the plan has {self.gpus}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of an RL plan."""
        found: dict[str, Any] = {f"planner_{KIND}": VERSION}
        for one in fields(self):
            name = "estimate" if one.name == "prediction" else one.name
            found[name] = plain(getattr(self, one.name))
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "RL plan") -> RlPlan:
        """From plain data. Raises PlannerError with the place, the key and what would be right."""
        library.version_of(data, KIND, VERSION, where=where)
        known = (f"planner_{KIND}", *("estimate" if one.name == "prediction" else one.name for one in fields(cls)))
        needed = ("workload", "hardware", "gpus", "framework", "trainer", "engine", "placement", "layouts")
        found = dict(check_keys(data, known, where, required=needed, hint="; the file is damaged or cut off"))
        del found[f"planner_{KIND}"]
        if "estimate" in found:
            found["prediction"] = value_of(RlPrediction | None, found.pop("estimate"), where, "estimate")
        return read(cls, found, where)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        library.write_whole(path, library.dump_yaml(self.to_dict()))


def load_rl_plan(path: Path) -> RlPlan:
    """Read an RL plan. Raises PlannerError with file and key when it is damaged, or newer than this planner."""
    return RlPlan.from_dict(library.read_yaml(path), where=str(path))
