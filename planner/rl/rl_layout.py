"""Where the models of an RL step live and how each is split: placement, pools, layouts of actor, rollout, reference and critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any

from planner.errors import PlannerError
from planner.layout import Layout
from planner.record import record
from planner.schema import check, check_keys, one_of, plain, read, within
from planner.serving.serve_plan import layout_from
from planner.serving.serving_layout import Precision, ServingLayout

MODES = ("colocated", "split", "hybrid")
"""colocated: all GPUs train and generate in turn; split: a pool trains, another generates; hybrid: the pool that trains also
generates while it does not train, beside a pool that only generates."""
SYNC_METHODS: Mapping[str, str] = {
    "ipc": "CUDA IPC handles of the shard on the same GPU, gathered to the rollout's split",
    "reshard": "NCCL point to point, every rank sends what the other side's ranks lack",
    "bucketed": "gathered on the trainer and broadcast by NCCL in buckets",
    "tensor": "gathered and broadcast tensor by tensor",
    "rdma": "a transfer engine (NIXL, Mooncake, checkpoint-engine): pinned buckets, RDMA reads, broadcast among engines",
    "delta": "only the weights that changed, sparse",
    "disk": "written to shared storage and loaded by every engine",
}
Gpus = Annotated[int, within(0, 2**21)]
ASYNCHRONOUS = 1000
"""Staleness of a run without a bound."""


@record
class Placement:
    """Which GPUs do what, and how far generation may run ahead."""

    mode: Annotated[str, one_of(MODES)]
    train_gpus: Annotated[int, within(1, 2**21)]
    """GPUs of the actor (colocated: all)."""
    generate_gpus: Annotated[int, within(1, 2**21)]
    """GPUs that generate (colocated: all; hybrid: all; split: those of the rollout's pool)."""
    critic_gpus: Gpus = 0
    """GPUs of a pool of the critic alone; 0 = on those of the actor."""
    reference_gpus: Gpus = 0
    """GPUs of a pool of the reference alone; 0 = on those of the actor."""
    reward_gpus: Gpus = 0
    """GPUs of a pool of the reward model alone; 0 = on those of the actor."""
    staleness: Annotated[int, within(0, ASYNCHRONOUS)] = 0
    """Steps that the weights of an answer may be old: 0 synchronous, 1 one step off, ASYNCHRONOUS without a bound."""
    partial: bool = False
    """New weights enter while answers are generated (partial rollouts, in-flight updates): engines are never drained."""
    sync: Annotated[str, one_of(*SYNC_METHODS)] = "ipc"
    """How trained weights reach the rollout, one of SYNC_METHODS."""

    def __post_init__(self) -> None:
        check(self)
        train, generate = self.train_gpus, self.generate_gpus
        if self.mode == "colocated" and train != generate:
            raise PlannerError(f"colocated: {train} GPUs train and {generate} generate; they must be the same, or the mode split")
        if self.mode == "hybrid" and train >= generate:
            raise PlannerError(f"hybrid: {train} GPUs train and {generate} generate; those that generate must hold these and more")
        if self.mode == "colocated" and self.staleness:
            raise PlannerError("colocated pools generate and train in turn: staleness must be 0; split them for more")
        if self.partial and not self.staleness:
            raise PlannerError("partial rollouts carry answers over to the next step: staleness must be at least 1")

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        other = self.critic_gpus + self.reference_gpus + self.reward_gpus
        return other + (self.train_gpus + self.generate_gpus if self.mode == "split" else self.generate_gpus)

    @property
    def rollout_only(self) -> int:
        """GPUs that generate and do not train."""
        return {"colocated": 0, "split": self.generate_gpus, "hybrid": self.generate_gpus - self.train_gpus}[self.mode]

    @property
    def synchronous(self) -> bool:
        """Every answer is of the newest weights."""
        return self.staleness == 0


@record
class RlLayouts:
    """How each model is split over the GPUs of its pool."""

    actor: Layout
    """Degrees, sharding, recompute; its number of microbatches follows from packing."""
    rollout: ServingLayout
    """Degrees, replicas, largest batch."""
    rollout_precision: Precision = field(default_factory=Precision)
    """Formats of the rollout's weights and cache."""
    reference: Layout | None = None
    """None = as the actor."""
    critic: Layout | None = None
    """None = as the actor."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``from_dict`` reads it back."""
        usual = {name: getattr(self, name) for name in ("reference", "critic") if getattr(self, name) is not None}
        return {
            "actor": self.actor.to_dict(), "rollout": {name: int(value) for name, value in vars(self.rollout).items()},
            "rollout_precision": plain(self.rollout_precision), **{name: one.to_dict() for name, one in usual.items()},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: object, *, where: str = "layouts") -> RlLayouts:
        """From plain data. Raises PlannerError."""
        found = dict(check_keys(data, [one.name for one in fields(cls)], where, required=("actor", "rollout")))
        found["rollout"] = layout_from(found["rollout"], f"{where}: rollout")
        for name in ("actor", "reference", "critic"):
            if found.get(name) is not None:
                found[name] = Layout.from_dict(found[name], where=f"{where}: {name}")
        if "rollout_precision" in found:
            found["rollout_precision"] = read(Precision, found["rollout_precision"], f"{where}: rollout_precision")
        return cls(**found)


