"""DeepSpeed: its JSON file, under transformers' Trainer."""

import dataclasses
from typing import Any

from planner.layout import Recompute
from planner.trainers.bundle.quoting import json_text, refused
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
    layout, work = job.layout, job.workload
    zero: dict[str, Any] = {"stage": layout.zero, "overlap_comm": True, "contiguous_gradients": True,
                            "reduce_bucket_size": 500_000_000}  # fmt: skip
    if layout.zero in (1, 2):
        zero |= {"reduce_scatter": True, "allgather_partitions": True, "allgather_bucket_size": 500_000_000}
    if layout.zero == 3:
        zero |= {"stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
                 "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000,
                 "stage3_gather_16bit_weights_on_model_save": False}  # fmt: skip
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": layout.offload_optimizer / 100}
    data: dict[str, Any] = {
        "train_batch_size": work.global_batch_size * layout.tp,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": work.precision == "bf16"},
        "fp16": {"enabled": work.precision == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if layout.offload_optimizer:  # DeepSpeed's own AdamW, which steps on the host
        params = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        data["optimizer"] = {"type": "AdamW", "params": params}
    if layout.cp > 1:
        data["sequence_parallel_size"] = layout.cp
    if layout.tp > 1:
        data["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.ep > 1:
        data["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep, "expert_tensor_parallel_size": 1}
        if family(job.model) in EXPERT_PRESETS:
            data["expert_parallel"]["preset_model"] = family(job.model)
    return data


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
    notes = ["zero_to_fp32.py, which DeepSpeed writes into every checkpoint, joins the shards of the weights."]
    if layout.tp > 1:
        notes.insert(
            0,
            f"train_batch_size is {layout.tp} times the batch of the plan: DeepSpeed's batch rule counts AutoTP ranks as replicas.",
        )
    found = rendered(job, {"ds_config.json": json_text(config(job))}, training)
    install = (*found.install, f"pip install 'deepspeed{VERSIONS}'")
    return dataclasses.replace(found, notes=(*found.notes, *notes), install=install)
