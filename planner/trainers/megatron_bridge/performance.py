"""The performance launcher of Megatron-Bridge: model, GPU and precision choose a published recipe, its options change it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.hardware.names import profile_named
from planner.trainers.reading.commands import Launch
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.settings import Settings

PROGRAM = r"\S*(?:setup_experiment|run_script|bootstrap)\.py"
OPTIONS = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp", "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "et",
    "global_batch_size": "gb", "micro_batch_size": "mb", "seq_length": "sl", "recompute_num_layers": "rl", "recompute_modules": "",
    "cuda_graph_impl": "",
}  # fmt: skip
"""Options that change a recipe, and their short names.  [scripts/performance/argument_parser.py]"""
NOT_PRICED = {
    "use_megatron_fsdp": "import its job as arguments of Megatron, with --trainer megatron-fsdp",
    "activation_offload_layers": "offloaded activations are not read here", "ol": "offloaded activations are not read here",
    "num_layers": "a model of its own", "hidden_size": "a model of its own", "num_moe_experts": "a model of its own",
}  # fmt: skip
TYPES = {"fp8": "fp8_cs"}
"""Older names of precisions."""


def is_launcher(found: Launch) -> bool:
    """Whether a command chooses a recipe by model, GPU and precision."""
    return _said(found, "model_recipe_name", "mr", "model_name") is not None


def settings(path: Path, said: Given, found: Launch) -> tuple[dict[str, Any], int | None, str | None, tuple[str, ...]]:
    """(settings of the recipe with the options of the command, GPUs, hardware, what was taken for what). Raises PlannerError."""
    for name, why in NOT_PRICED.items():
        if found.settings.get(name) not in (None, False, "false", "0", 0):
            raise PlannerError(f"{path}: --{name} {shown(found.settings[name])}: {why}")
    given = Settings(path, found.settings, said=said)  # asks for what is open
    gpu, dtype = str(given.first("gpu", "g", default="")).lower(), str(given.first("compute_dtype", "c", default="bf16")).lower()
    precision = TYPES.get(dtype, dtype)
    gpus = said.num_gpus or given.number("num_gpus") or given.number("ng")
    older = "_".join(str(_said(found, one) or "") for one in ("model_name", "model_size"))
    model = given.first("model_recipe_name", "mr") or older
    start, end = f"{model}_{_said(found, 'task') or 'pretrain'}_", f"gpu_{gpu}_{precision.replace('_', '')}_config"
    recipes, changed, hardware = published(), _changes(found), _hardware(gpu)
    fits = [name for name in recipes if re.fullmatch(rf"{re.escape(start)}\d+{re.escape(end)}", name)]
    if (asked := said.setting("recipe")) in recipes:
        fits = [str(asked)]
    if not fits and said.questions:  # their answers choose the recipe
        ask(str(path), said.questions)
    if not fits:
        missing = f"{start}{gpus or 'N'}{end}"
        about = f"{shown(missing)} is not among the performance recipes that are known: one like it"
        near = nearest_first(missing, recipes)[:3]
        said.questions.append(Question(name="recipe", about=about, choices=tuple(near)))
        return {"model.hf": "", **changed}, gpus, hardware, ()
    sizes = {int(name[len(start) : -len(end)]) if asked is None else gpus: name for name in fits}
    near_size = min(sizes, key=lambda one: abs((one or 0) - (gpus or max(one or 0 for one in sizes))))
    if gpus not in (None, near_size) and "train.global_batch_size" not in changed and said.global_batch_size is None:
        about = f"sequences per step: the recipe of {near_size} GPUs is started on {gpus}"
        said.questions.append(Question(name="--global-batch-size B", about=about))
    note = f"recipe {sizes[near_size]}, as Megatron-Bridge of 2026-11 publishes it, under the options of the command"
    launcher = {  # as _perf_precision and the launcher's overrides have it
        "mixed_precision": precision, "mixed_precision.grad_reduce_in_fp32": False, "model.cross_entropy_fusion_impl": "te",
    }  # fmt: skip
    return {**recipes[sizes[near_size]], **launcher, **changed}, gpus or near_size, hardware, (note,)


def published() -> Mapping[str, Mapping[str, Any]]:
    """Settings of the performance recipes by their names; those of pre-training with experts, which all say their degree of
    expert parallelism, send every expert as many tokens by force."""
    data: Mapping[str, Mapping[str, Any]] = library.read_yaml(Path(__file__).with_name("perf_recipes.yaml"))["recipes"]
    forced = {name: "_pretrain_" in name and "model.expert_model_parallel_size" in one for name, one in data.items()}
    return {name: {"model.moe_router_force_load_balancing": forced[name], **one} for name, one in data.items()}


def _hardware(gpu: str) -> str | None:
    try:
        return profile_named(gpu)
    except PlannerError:  # asked for, where the user does not say it
        return None


def _said(found: Launch, *names: str) -> Any:
    return next((found.settings[one] for one in names if found.settings.get(one) is not None), None)


def _changes(found: Launch) -> dict[str, Any]:
    """Settings that options of the command replace.  [scripts/performance/utils/overrides.py]"""
    given = {name: _said(found, *(one for one in (name, short) if one)) for name, short in OPTIONS.items()}
    places = {name: f"{'train' if 'batch' in name else 'model'}.{name}" for name in OPTIONS}
    changed = {places[name]: value for name, value in given.items() if value is not None}
    if (tp := changed.get("model.tensor_model_parallel_size")) is not None:
        changed["model.sequence_parallel"] = tp != 1
    if changed.get("model.recompute_num_layers"):
        changed |= {"model.recompute_granularity": "full", "model.recompute_method": "block"}
    if (modules := changed.get("model.recompute_modules")) is not None:
        names = modules if isinstance(modules, list) else re.split(r"[,\s]+", str(modules))
        changed |= {"model.recompute_granularity": "selective", "model.recompute_modules": names}
    backend = found.settings.get("moe_flex_dispatcher_backend")
    if backend is not None:
        flex = str(backend) != "None"
        changed |= {"model.moe_token_dispatcher_type": "flex" if flex else "alltoall", "model.moe_flex_dispatcher_backend": backend}
    if (overlap := found.settings.get("moe_a2a_overlap")) is not None:
        changed["comm_overlap.overlap_moe_expert_parallel_comm"] = overlap
    return changed
