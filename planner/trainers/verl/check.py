"""verl's own configuration, composed by Hydra and validated for the plan's number of GPUs, on an exported folder."""

import os
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import ExportJob, library_trainer
from planner.trainers.checking import Checked, Request
from planner.trainers.checking import setting_names as names
from planner.trainers.checking.import_standins import settle_torch, stand_in

NEEDED = ("torch", "transformers", "verl", "hydra", "ray", "tensordict", "codetiming")


def asks(job: ExportJob) -> dict[str, Any]:
    """The engine below."""
    return {"megatron": library_trainer(job.plan.trainer) == "megatron"}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
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


def _degrees(asked: Request, actor: Any, answer: Checked) -> None:
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


def known_names(root: Path) -> dict[str, names.Names]:
    """Keys of its composed Hydra configurations."""
    folder = root / "verl" / "trainer" / "config"
    return {
        name: dict(names.keys(names.load(folder / f"_generated_{name}.yaml")))
        for name in ("ppo_trainer", "ppo_megatron_trainer")
    }


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    lines = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    section = (
        "ppo_megatron_trainer" if "--config-name=ppo_megatron_trainer" in names.script_words(folder) else "ppo_trainer"
    )
    yield from ((section, line.split("=")[0]) for line in lines)
    yield from ((section, name) for name in names.script_settings(folder))
