"""torchtune's own configuration, components and builders on an exported folder, and the keys that its recipe reads."""

import os
import re
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking import setting_names as names
from planner.trainers.checking.import_standins import hide, settle_torch, stand_in

NEEDED = ("torch", "omegaconf", "torchtune")
FOR_TOKENIZERS = ("triton", "kagglehub", "blobfile", "sentencepiece", "tiktoken")


def asks(job: ExportJob) -> dict[str, Any]:
    """Parameters of the model, its adapters and the length of a sample."""
    work = job.workload
    return {"total": round(total_parameters(job.model)), "lora_rank": work.lora_rank, "length": work.sequence_length,
            "frozen": work.frozen_weights, "shards": job.cluster.num_gpus > 1}  # fmt: skip


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    stand_in(*FOR_TOKENIZERS)
    hide("torchao")  # quantised tensors, which no model here holds; it wants one of early 2025


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    from omegaconf import OmegaConf

    name = _recipe(Path("run.sh"))
    answer.same("recipe of the smoke run", _recipe(Path("smoke.sh")), name)
    config, layout = OmegaConf.load("torchtune.yaml"), asked["layout"]
    read = _keys(name)
    for key in [*config, *{one.split(".")[0] for one in names.script_settings(Path())}]:
        if key not in read:
            raise ValueError(f"{key}: the recipe {name} does not read it")
    _components(config)
    answer.reached("parsed")
    answer.same("global batch", config.batch_size * config.gradient_accumulation_steps * layout["dp"], asked["batch"])
    answer.same("recompute", 2 * config.enable_activation_checkpointing, layout["recompute"])
    if asked["shards"]:
        answer.same("reshard after forward", config.fsdp_reshard_after_forward, layout["zero"] == 3)
        answer.same("offload", config.fsdp_cpu_offload, bool(layout["offload_parameters"]))
    answer.same("length", (config.tokenizer.max_seq_len, config.dataset.packed), (asked["length"], True))
    if config.get("optimizer_in_bwd") and (config.clip_grad_norm is not None or config.gradient_accumulation_steps > 1):
        raise ValueError("optimizer_in_bwd goes with neither clipping nor accumulation")
    answer.same("quantised base", config.model.get("quantize_base", False), asked["frozen"] == "nf4_dq")
    answer.reached("validated")
    if asked.get("deep"):
        base, adapters = _model(config.model)
        answer.same("parameters of the model", base, asked["total"])
        answer.same("adapters", adapters > 0, asked["lora_rank"] > 0)
        answer.reached("model built")


def _recipe(script: Path) -> str:
    found = re.search(r"\b(\w+_finetune_\w+)\b", script.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{script}: no recipe is started")
    return found.group(1)


def _keys(recipe: str) -> set[str]:
    """Keys that a recipe reads of its configuration, in its own source and in that of its checkpoint client."""
    import torchtune
    from torchtune._recipe_registry import get_all_recipes
    from torchtune.training.checkpointing import _checkpoint_client

    files = [one.file_path for one in get_all_recipes() if one.name == recipe]
    if not files:
        raise ValueError(f"torchtune has no recipe {recipe}")
    own = Path(torchtune.__file__).parents[1] / "recipes" / files[0]
    text = own.read_text(encoding="utf-8") + Path(_checkpoint_client.__file__).read_text(encoding="utf-8")
    return set(re.findall(r"\bcfg\.(?!get\b)(\w+)", text)) | set(re.findall(r'cfg\.get\(\s*"(\w+)"', text))


def _components(config: Any) -> None:
    """Every component exists and takes the names it is given."""
    import inspect

    from omegaconf import DictConfig
    from torchtune.config._utils import _get_component_from_path

    for section, given in config.items():
        if not isinstance(given, DictConfig) or "_component_" not in given:
            continue
        kind = _get_component_from_path(given["_component_"])
        known = inspect.signature(kind).parameters
        if any(one.kind is one.VAR_KEYWORD for one in known.values()):
            continue
        unknown = [key for key in given if key != "_component_" and key not in known]
        if unknown:
            raise ValueError(f"{section}: {given['_component_']} takes no {', '.join(unknown)}")


def _model(settings: Any) -> tuple[int, int]:
    """Parameters of torchtune's own model on the meta device: the base's, the adapters'."""
    import torch
    from omegaconf import OmegaConf
    from torchtune import config

    plain = OmegaConf.create({key: value for key, value in settings.items() if key != "quantize_base"})
    with torch.device("meta"):
        model = config.instantiate(plain)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    adapters = sum(size for name, size in sizes.items() if "lora_" in name)
    return sum(sizes.values()) - adapters, adapters
