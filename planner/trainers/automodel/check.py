"""NeMo AutoModel's own configuration classes, meshes, batch arithmetic and model on an exported folder."""

import os
from typing import Any

from planner.cost.parameters import total_parameters
from planner.layout import Layout
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import pretend_ranks, settle_torch, stand_in

NEEDED = ("torch", "transformers", "torchdata", "nemo_automodel")
SECTIONS = {
    "recipe", "seed", "step_scheduler", "dist_env", "model", "peft", "fp8", "distributed", "loss_fn", "dataset", "dataloader",
    "optimizer", "checkpoint",
}  # fmt: skip
"""Sections that the recipe reads (train_ft.py); it ignores others without a word."""
ON_CPU = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "experts": "torch", "dispatcher": "torch", "rope_fusion": False}
"""Back ends that need no GPU: the same parameters."""


def asks(job: ExportJob) -> dict[str, Any]:
    """Layers of every virtual stage, and the parameters of the model without adapters."""
    stages = [len(layers) for _, _, layers in job.virtual_stages()]
    return {"stages": stages, "total": round(total_parameters(job.model)), "lora_rank": job.workload.lora_rank,
            "experts": job.model.is_moe}  # fmt: skip


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    stand_in("triton", "tiktoken")


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    from nemo_automodel.components.config.loader import load_yaml_config

    for name in ("automodel.yaml", "automodel-smoke.yaml"):
        config = load_yaml_config(name)
        unknown = sorted(set(config.to_dict()) - SECTIONS)
        if unknown:
            raise ValueError(f"{name}: the recipe reads no section {', '.join(unknown)}")
        _typed(asked, config, answer)
    answer.reached("validated")
    pretend_ranks(asked["world"] - 1, asked["world"])
    _meshes(asked, config, answer)
    answer.reached("groups built")
    if asked.get("deep"):
        answer.same("parameters of the model", _parameters(config, asked["experts"]), asked["total"])
        answer.reached("model built")


def _typed(asked: Request, config: Any, answer: Checked) -> None:
    """Every section as the object that the recipe makes of it."""
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from nemo_automodel.recipes._typed_config import RecipeConfig

    layout, recipe = asked["layout"], RecipeConfig(config)
    for made in (recipe.dataloader, recipe.optimizer, recipe.loss_fn, recipe.checkpoint, config.model.backend.instantiate()):
        if made is None:
            raise ValueError("a section is missing: the recipe needs a dataset, an optimizer, a loss and checkpoints")
    rank = config.peft.instantiate().dim if config.get("peft", None) else 0
    answer.same("rank of the adapters", rank, asked["lora_rank"])
    answer.reached("parsed")
    found = parse_distributed_section(config.distributed.to_dict())
    strategy, pipeline, steps = found["strategy_config"], found["pipeline_config"], recipe.step_scheduler
    answer.same("reshard after forward", strategy.reshard_after_forward, layout["zero"] == 3)
    checkpointing = found["activation_checkpointing"]
    answer.same("recompute", {False: 0, "selective": 1, True: 2}[checkpointing], layout["recompute"])
    answer.same("offload", strategy.offload_policy is not None, bool(layout["offload_parameters"]))
    local = config.get("step_scheduler.local_batch_size", 1)
    pace = StepScheduler(steps.global_batch_size, local, layout["dp"], None, max_steps=1, preemption_signal=None)
    parts = local // pipeline.pp_microbatch_size if pipeline else 1
    answer.same("global batch", steps.global_batch_size, asked["batch"])
    answer.same("microbatches", pace.grad_acc_steps * parts, layout["num_microbatches"])
    if pipeline:
        split = pipeline.module_fqns_per_model_part
        layers = [sum(name.startswith("model.layers.") for name in part) for part in split]
        answer.same("layers per stage", layers, asked["stages"])


def _meshes(asked: Request, config: Any, answer: Checked) -> None:
    """The last rank's groups on AutoModel's meshes are those that the plan was priced with."""
    from nemo_automodel.recipes._dist_utils import create_distributed_setup_from_config

    context = create_distributed_setup_from_config(config, world_size=asked["world"]).mesh_context
    layout, last = Layout(**asked["layout"]), asked["world"] - 1
    meshes = {"tp": (context.device_mesh, "tp"), "cp": (context.device_mesh, "cp"), "dp": (context.device_mesh, "dp"),
              "pp": (context.device_mesh, "pp"), "ep": (context.moe_mesh, "ep")}  # fmt: skip
    for name, (mesh, axis) in meshes.items():
        if mesh is not None:
            answer.same(f"{name} group of the last rank", sorted(mesh[axis].mesh.flatten().tolist()), group_of(layout, name, last))
    answer.same("shard group", context.dp_shard_size, asked["shard"])


def _parameters(config: Any, experts: bool) -> int:
    """Parameters of AutoModel's own class for config.json, in tensors without data."""
    import torch
    from nemo_automodel._transformers.registry import ModelRegistry
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig

    sizes = AutoConfig.from_pretrained("model")
    kind = ModelRegistry.model_arch_name_to_cls[sizes.architectures[0]]
    attention = {"attn": "flex"} if sizes.model_type == "gpt_oss" else {}  # sinks: flex or Transformer Engine
    backend = config.model.backend.instantiate(**{**ON_CPU, **attention})
    torch.cuda.current_device = lambda: 0  # its router asks for the device by name
    with FakeTensorMode() if experts else torch.device("meta"):
        model = kind(sizes, backend=backend)
    return sum(one.numel() for one in model.parameters())
