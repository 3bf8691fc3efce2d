"""RL plans for tests of exports and imports, one of each placement that frameworks have, and a small job for tests of prices."""

from __future__ import annotations

from typing import Any

from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.rl.answer_lengths import read_answers
from planner.rl.rl_framework import load_framework
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_plan import RlPlan
from planner.rl.rl_workload import RlWorkload
from planner.serving.engine import load_engine
from planner.serving.serving_layout import Precision, ServingLayout
from planner.trainer import load_trainer

H100 = load_hardware("h100-sxm")
MODEL = load_model("qwen3-8b")


def rl_plan(framework: str = "verl", staleness: int | None = 0, gpus: int = 16, **changes: Any) -> RlPlan:
    """A plan of GRPO for Qwen3 8B; ``staleness`` None = colocated; ``place``: further fields of the placement."""
    found, own = load_framework(framework), changes.pop("place", {})
    split = staleness is not None
    each = (gpus - own.get("critic_gpus", 0)) // 2 if split else gpus
    mode = "split" if split else "colocated"
    offered = found.placement(mode, staleness or 0)
    placement = Placement(**{
        "mode": mode, "train_gpus": each, "generate_gpus": each, "staleness": staleness or 0, "sync": offered.sync[0],
        "partial": offered.partial and bool(staleness), **own,
    })  # fmt: skip
    trainer = changes.pop("trainer", found.trainer)
    mega = trainer.startswith("megatron")
    zero = {"deepspeed": 3, "megatron": 1, "megatron-bridge": 1}.get(trainer, 3)
    degrees = {"tp": 2, "sequence_parallel": 1} if mega else {}
    actor = Layout(**{"dp": each // degrees.get("tp", 1), "zero": zero, "recompute": 2, **degrees, **changes.pop("actor", {})})
    rollout = ServingLayout(**{"tp": 2, "replicas": each // 2, "max_batch": 128, "max_tokens": 8192, **changes.pop("rollout", {})})
    work: dict[str, Any] = {
        "model": load_model("qwen3-8b"), "prompts": 64, "samples": 8, "prompt_length": 512, "max_length": 5120,
        "answers": read_answers("mean=1200,p99=4096", 4096), "reference": True, **changes.pop("work", {}),
    }  # fmt: skip
    return RlPlan(
        workload=RlWorkload(**work), hardware="h100-sxm", gpus=gpus, framework=found.label, trainer=trainer,
        engine=changes.pop("engine", found.engine), placement=placement, layouts=RlLayouts(actor=actor, rollout=rollout), **changes,
    )  # fmt: skip


def workload(**changes: Any) -> RlWorkload:
    """A small step of GRPO."""
    given: dict[str, Any] = {
        "model": MODEL, "prompts": 32, "samples": 8, "prompt_length": 128, "max_length": 4096,
        "answers": read_answers("mean=1000,p99=3000", 3968),
    }  # fmt: skip
    return RlWorkload(**{**given, **changes})


def job(**changes: Any) -> RlJob:
    """That step on H100 with NeMo RL."""
    framework = load_framework("nemo-rl@0.5")
    given: dict[str, Any] = {
        "workload": workload(), "framework": framework, "trainer": load_trainer("megatron"), "engine": load_engine("vllm@0.11"),
        "hardware": H100, "generate_hardware": H100, "precision": Precision(),
    }  # fmt: skip
    return RlJob(**{**given, **changes})
