"""axolotl: its YAML file, with FSDP2 settings of its own or DeepSpeed's JSON."""

from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml, json_text
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.deepspeed import export as deepspeed
from planner.trainers.transformers.fine_tuning import (
    SMOKE_PREPARE,
    SMOKE_STEPS,
    front_end_refusals,
    on_deepspeed,
    smoke_data,
)
from planner.trainers.transformers.training_run import OPTIMIZERS

OWN_OPTIMIZERS = {**OPTIMIZERS, "adam_8bit": "ao_adamw_8bit"}
"""adamw_torch_8bit is checked to work with FSDP2 only under axolotl's own name [utils/schemas/validation.py]."""


def refusals(job: ExportJob) -> list[str]:
    """What axolotl or the library below it cannot run, with its rule."""
    found = front_end_refusals(job, "axolotl")
    if job.layout.offload_activations and job.layout.recompute != Recompute.FULL:
        found.append(
            "offload_activations without recompute full: axolotl moves the inputs of checkpointed layers; use recompute full"
        )
    return found


def config(job: ExportJob, *, smoke: bool = False) -> dict[str, Any]:
    """axolotl.yaml. Unknown keys are accepted silently, so the tests compare every key here with the schema."""
    layout, work = job.layout, job.workload
    found: dict[str, Any] = filled_yaml(
        job, "axolotl", "axolotl.txt", smoke=smoke, path="data/smoke.jsonl" if smoke else "./data-link",
        prepared="prepared-smoke" if smoke else "prepared", steps=SMOKE_STEPS if smoke else 1000,
        bf=work.precision in ("bf16", "fp8"), fp=work.precision == "fp16", low=work.precision == "fp8",
        optimizer=OWN_OPTIMIZERS[work.optimizer], output="smoke-output" if smoke else "output", save="no" if smoke else "steps",
    )  # fmt: skip
    if work.lora_rank:
        alpha = 2 * work.lora_rank
        found |= {"adapter": "lora", "lora_r": work.lora_rank, "lora_alpha": alpha, "lora_target_linear": True}
    full = layout.recompute == Recompute.FULL
    if full:
        found["activation_offloading"] = bool(layout.offload_activations)
    return {**found, **_sharding(job, full)}


def _sharding(job: ExportJob, full: bool) -> dict[str, Any]:
    """DeepSpeed's file, FSDP2 with its mesh, or plain replicas. FSDP and DeepSpeed together would be accepted silently."""
    layout, shard = job.layout, job.shard
    checkpoint: dict[str, Any] = {"gradient_checkpointing": full}
    if full:
        checkpoint["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if on_deepspeed(job):
        return {**checkpoint, "deepspeed": "ds_config.json"}
    if not layout.zero:
        return checkpoint
    sharded = {
        "reshard_after_forward": layout.zero == 3, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT", "offload_params": False, "cpu_ram_efficient_loading": False,
        "activation_checkpointing": full,
    }  # fmt: skip
    mesh = {"dp_shard_size": shard, "dp_replicate_size": layout.dp // shard}
    return {"fsdp_version": 2, "fsdp_config": sharded, **mesh}


def render(job: ExportJob) -> Rendered:
    """axolotl.yaml, its smoke variant, and DeepSpeed's file where the plan is one of DeepSpeed."""
    files = {
        f"axolotl{'-smoke' if smoke else ''}.yaml": library.dump_yaml(config(job, smoke=smoke))
        for smoke in (False, True)
    }
    files["make_smoke_data.py"] = smoke_data(job)
    if not on_deepspeed(job):
        return run_of(job, "axolotl", files, {"prepare": SMOKE_PREPARE})
    files["ds_config.json"] = json_text(deepspeed.config(job))
    return run_of(job, "axolotl", files, {"prepare": SMOKE_PREPARE, "install": ("pip install 'deepspeed>=0.16'",)})
