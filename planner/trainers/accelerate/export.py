"""accelerate: its YAML file with FSDP2 or HSDP, the arguments of transformers' Trainer or TRL, and a script around them."""

from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml, refused
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices
from planner.trainers.transformers.training_run import (
    LAYERS,
    OPTIMIZERS,
    family,
    rendered,
    shared_refusals,
    training_arguments,
)

LAUNCHER = (
    "accelerate", "launch", "--config_file", "accelerate.yaml", "--machine_rank", "$NODE_RANK",
    "--main_process_ip", "$MASTER_ADDR", "--main_process_port", "$MASTER_PORT",
)  # fmt: skip
SYNCS_EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
"""Sharded gradients are added up; by itself accelerate keeps whole ones until the last microbatch of a step (no_sync)."""


def refusals(job: ExportJob) -> list[str]:
    """What FSDP2 under accelerate cannot run, with its rule."""
    unknown = unknown_choices(job, "accelerate", OPTIMIZERS, ("bf16", "bf16_true", "fp16", "fp32", "fp8"))
    return unknown + refused(job, "accelerate") + shared_refusals(job)


def config(job: ExportJob) -> dict[str, Any]:
    """The YAML file of ``accelerate launch``."""
    return filled_yaml(job, "accelerate", "accelerate.txt", layer=LAYERS.get(family(job.model)))


def render(job: ExportJob) -> Rendered:
    """accelerate.yaml, training.json, train.py, and config.json of the model where its family is known."""
    layout, arguments = job.layout, training_arguments(job)
    if layout.zero == 0 and layout.recompute == Recompute.FULL:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if layout.zero and layout.num_microbatches > 1 and job.trainer.stored.gradients != "deferred":
        arguments |= SYNCS_EACH
    sizes = {"dp_replicate_size": layout.dp // job.shard, "dp_shard_size": job.shard}
    sizes |= {"cp_size": layout.cp} if layout.cp > 1 else {}
    training = {"training_arguments": arguments, "parallelism": sizes if layout.zero else None,
                "offload_activations": bool(layout.offload_activations and not layout.zero)}
    return rendered(job, {"accelerate.yaml": library.dump_yaml(config(job))}, training, launcher=LAUNCHER)
