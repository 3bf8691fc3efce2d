"""An RL plan with what it names loaded, in the words that all frameworks share: what an exporter looks at."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.record import record
from planner.rl.rl_framework import OfferedPlacement, RlFramework, RolloutEngine, TrainingBackend, load_framework
from planner.rl.rl_plan import RlPlan
from planner.rl.rl_workload import RlWorkload
from planner.serving.serving_layout import ServingLayout
from planner.trainer import load_trainer
from planner.trainers.bundle.target import ExportJob
from planner.workload import Workload


@record
class ActorPlan:
    """The actor's update as exporters of trainings look at a plan."""

    workload: Workload
    hardware: str
    num_gpus: int
    trainer: str
    layout: Layout


@record
class FrameworkJob:
    """An RL plan for one framework."""

    plan: RlPlan
    framework: RlFramework
    """Of the target; of the plan's version where the plan was made for it."""
    backend: TrainingBackend
    engine: RolloutEngine
    offered: OfferedPlacement
    hardware: HardwareProfile
    """Of the pool that trains."""
    generate_hardware: HardwareProfile
    """Of the pool that generates."""
    actor: ExportJob
    """The update, for the words that exports of trainings share."""

    @staticmethod
    def of(plan: RlPlan, to: str) -> FrameworkJob:
        """The job of a plan for a framework. Raises PlannerError where the framework has no such placement, trainer or engine."""
        own = plan.framework.partition("@")[0] == to
        framework = load_framework(plan.framework if own else to)
        if plan.offload is not None and plan.placement.mode != "split":
            framework = framework.offloading(plan.offload)
        place, hardware = plan.placement, load_hardware(plan.hardware)
        layout = plan.layouts.actor
        work = Workload(
            model=plan.workload.model, sequence_length=plan.workload.max_length, precision=plan.workload.precision,
            global_batch_size=max(int(layout.dp) * int(layout.micro_batch_size), 1), lora_rank=plan.workload.lora_rank,
        )  # fmt: skip
        actor: Any = ActorPlan(
            workload=work, hardware=plan.hardware, num_gpus=place.train_gpus, trainer=plan.trainer, layout=layout
        )
        cluster = Cluster(hardware=hardware, num_gpus=place.train_gpus)
        job = FrameworkJob(
            plan=plan, framework=framework, backend=framework.backend_of(plan.trainer), hardware=hardware,
            generate_hardware=load_hardware(plan.generate_hardware) if plan.generate_hardware else hardware,
            engine=framework.rollout(plan.engine), offered=framework.placement(place.mode, place.staleness),
            actor=ExportJob(plan=actor, cluster=cluster, trainer=load_trainer(plan.trainer)),
        )  # fmt: skip
        if problems := job.problems():
            raise PlannerError(f"{framework.label} cannot run this plan: {'; '.join(problems)}")
        return job

    @property
    def work(self) -> RlWorkload:
        """What a step works on."""
        return self.plan.workload

    @property
    def layout(self) -> Any:
        """The actor's layout in plain integers."""
        return self.actor.layout

    @cached_property
    def rollout(self) -> Any:
        """The rollout's layout in plain integers."""
        return ServingLayout(**{name: int(value) for name, value in vars(self.plan.layouts.rollout).items()})

    @property
    def colocated(self) -> bool:
        """Both on the same GPUs."""
        return self.plan.placement.mode == "colocated"

    @property
    def staleness(self) -> int:
        """Steps that generation runs ahead."""
        return self.plan.placement.staleness

    @property
    def two_kinds(self) -> bool:
        """Pools are of unlike GPUs."""
        return self.generate_hardware.name != self.hardware.name

    @property
    def per_node(self) -> int:
        """GPUs of a node that trains, as many as the job uses."""
        place = self.plan.placement
        return min(int(self.hardware.gpus_per_node), place.train_gpus if self.two_kinds else place.gpus)

    @property
    def nodes(self) -> int:
        """Nodes of all pools."""
        place = self.plan.placement
        if self.two_kinds:
            return self.train_pool[0] + self.rollout_pool[0]
        return -(-place.gpus // self.per_node)

    def pool(self, gpus: int) -> tuple[int, int]:
        """(nodes, GPUs of each) of a pool."""
        return (gpus // self.per_node, self.per_node) if self.plan.placement.gpus > self.per_node else (1, gpus)

    @property
    def train_pool(self) -> tuple[int, int]:
        """Nodes that train, and their GPUs."""
        return self.pool(self.plan.placement.train_gpus)

    @property
    def rollout_pool(self) -> tuple[int, int]:
        """Nodes that generate, and their GPUs; of hybrid pools those that never train."""
        gpus = self.plan.placement.rollout_only or self.plan.placement.generate_gpus
        if not self.two_kinds:
            return self.pool(gpus)
        node = min(int(self.generate_hardware.gpus_per_node), gpus)
        return gpus // node, node

    @property
    def critic_pool(self) -> tuple[int, int]:
        """Nodes of the critic, and their GPUs; the actor's where it has none of its own."""
        return self.pool(self.plan.placement.critic_gpus or self.plan.placement.train_gpus)

    @property
    def answer_limit(self) -> int:
        """Tokens of an answer at most."""
        return min(int(self.work.answers.most), self.work.max_length - 1)

    @property
    def prompt_limit(self) -> int:
        """Tokens of a prompt at most."""
        return self.work.max_length - self.answer_limit

    @property
    def batch(self) -> int:
        """Answers of an optimizer step."""
        return self.work.train_batch or self.work.trained

    @property
    def tokens_per_gpu(self) -> int:
        """Tokens of a packed micro batch on one GPU."""
        return -(-self.work.max_length * int(self.layout.micro_batch_size) // int(self.layout.cp))

    @property
    def cache_share(self) -> float:
        """The engine's share of the memory."""
        if self.plan.memory_share:
            return self.plan.memory_share
        return self.framework.cache_share if self.colocated else self.framework.cache_share_alone

    @property
    def engine_batch(self) -> int:
        """Sequences that one engine runs at once."""
        return int(self.rollout.max_batch)

    def problems(self) -> list[str]:
        """What no framework can run of it: sentences with the numbers and the remedy."""
        place, found = self.plan.placement, list[str]()
        if self.nodes > 1:
            each = int(self.generate_hardware.gpus_per_node) if self.two_kinds else self.per_node
            pools = (("train", place.train_gpus, self.per_node), ("train the critic", place.critic_gpus, self.per_node),
                     ("generate", place.rollout_only, min(each, place.rollout_only or 1)))  # fmt: skip
            for what, gpus, node in pools:
                if gpus % node:
                    found.append(
                        f"{gpus} GPUs {what}, which are no whole nodes of {node}; frameworks give whole nodes to a "
                        f"pool: plan with a multiple of {node}"
                    )
        if place.reference_gpus or place.reward_gpus:
            found.append("reference or reward model have GPUs of their own, which is not exported; plan on the actor's")
        if self.work.critic is not None and ("own" if place.critic_gpus else "actor") not in self.offered.critic:
            where = {"own": "on a pool of its own (--critic-gpus)", "actor": "on the actor's GPUs (--critic-gpus 0)"}
            have = " or ".join(where[one] for one in self.offered.critic) or "nowhere: plan with grpo"
            found.append(f"a {place.mode} critic is trained {have}")
        if self.work.trained % self.batch or self.batch % self.work.samples:
            found.append(
                f"an update of {self.batch} answers is no whole number of prompts with {self.work.samples} each; change train_batch"
            )
        if self.plan.placement.sync not in self.offered.sync:
            found.append(f"weight sync {place.sync} is none of {', '.join(self.offered.sync)}; plan with one of them")
        return found
