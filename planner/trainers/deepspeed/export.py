"""DeepSpeed: its JSON file, under transformers' Trainer."""

from typing import Any

from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml, json_text, refused
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices
from planner.trainers.deepspeed import VERSIONS
from planner.trainers.transformers.training_run import OPTIMIZERS, family, rendered, shared_refusals, training_arguments

PRECISIONS = ("bf16", "fp16", "fp32")
EXPERT_PRESETS = ("mixtral", "qwen3_moe")
"""Presets of AutoEP, model_types of transformers; DeepSeek's MLA models have presets of their own."""
LEARNING_RATE = 3e-4
"""transformers wants the same number in the JSON and in its own arguments."""


def refusals(job: ExportJob) -> list[str]:
    """What DeepSpeed's JSON cannot say or DeepSpeed cannot run, with its rule."""
    unknown = unknown_choices(job, "DeepSpeed", OPTIMIZERS, PRECISIONS)
    own = refused(job, "deepspeed", family=family(job.model), presets=EXPERT_PRESETS)
    return unknown + own + shared_refusals(job)


def config(job: ExportJob) -> dict[str, Any]:
    """ds_config.json. DeepSpeed counts every AutoTP rank as a replica in its batch rule, train = micro x steps x world / sp."""
    preset = family(job.model)
    return filled_yaml(
        job, "deepspeed", "ds_config.txt", rate=LEARNING_RATE, preset=preset if preset in EXPERT_PRESETS else None
    )


def render(job: ExportJob) -> Rendered:
    """ds_config.json, training.json, train.py, and config.json of the model where its family is known."""
    layout = job.layout
    arguments = training_arguments(job) | {"learning_rate": LEARNING_RATE}
    if layout.recompute == Recompute.FULL:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    training = {
        "training_arguments": arguments,
        "parallelism": {"sp_size": layout.cp, "sp_backend": "deepspeed"} if layout.cp > 1 else None,
        "offload_activations": bool(layout.offload_activations),
    }
    return rendered(job, {"ds_config.json": json_text(config(job))}, training, deepspeed=VERSIONS)
