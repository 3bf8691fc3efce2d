"""verl's own configuration, composed by Hydra and validated for the plan's number of GPUs, on an exported folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import ExportJob, library_trainer
from planner.trainers.checking import Checked
from planner.trainers.checking.child import Answer, Request, ask, request, serve
from planner.trainers.checking.import_standins import settle_torch, stand_in


def check(job: ExportJob, folder: Path) -> Checked:
    """How far verl goes with one folder."""
    return check_many([(job, folder)])[0]


def check_many(pairs: Sequence[tuple[ExportJob, Path]]) -> list[Checked]:
    """The same for many."""
    requests = [
        request(
            job, folder, batch=job.workload.global_batch_size, megatron=library_trainer(job.plan.trainer) == "megatron"
        )
        for job, folder in pairs
    ]
    needed = ("torch", "transformers", "verl", "hydra", "ray", "tensordict", "codetiming")
    return ask("verl", "planner.trainers.verl.check", needed, requests)


def _one(asked: Request, answer: Answer) -> None:
    settle_torch()
    stand_in("triton")
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    words = (Path(asked["folder"]) / "overrides.txt").read_text(encoding="utf-8").splitlines()
    words += [
        "actor_rollout_ref.model.path=model",
        "data.train_files=prompts.parquet",
        "data.val_files=prompts.parquet",
    ]
    GlobalHydra.instance().clear()
    folder = os.path.join(os.path.dirname(verl.trainer.__file__ or ""), "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose(config_name="ppo_megatron_trainer" if asked["megatron"] else "ppo_trainer", overrides=words)
    answer.reached("parsed")
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(config, use_reference_policy=False, use_critic=False)
    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    _degrees(asked, actor, answer)
    batch = actor.ppo_micro_batch_size_per_gpu * asked["layout"]["num_microbatches"] * asked["layout"]["dp"]
    answer.same("global batch", batch, asked["batch"])
    answer.reached("validated")


def _degrees(asked: Request, actor: Any, answer: Answer) -> None:
    layout = asked["layout"]
    if not asked["megatron"]:
        engine, size = actor.fsdp_config, actor.fsdp_config.fsdp_size
        answer.same("shard group", asked["world"] if size == -1 else size, asked["shard"])
        answer.same("reshard after forward", engine.reshard_after_forward, layout["zero"] == 3)
        answer.same("strategy", engine.strategy, "fsdp2")
        return
    engine = actor.megatron
    found = (
        engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size, engine.context_parallel_size,
        engine.expert_model_parallel_size, engine.expert_tensor_parallel_size or layout["etp"],
    )  # fmt: skip
    answer.same("degrees", found, tuple(layout[name] for name in ("tp", "pp", "cp", "ep", "etp")))
    answer.same("sequence parallel", int(engine.sequence_parallel), layout["sequence_parallel"])


if __name__ == "__main__":
    serve(_one)
