"""accelerate: its YAML file with FSDP2 or HSDP, the arguments of transformers' Trainer or TRL, and a script around them."""

import dataclasses
from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices
from planner.trainers.transformers.training_run import (
    LAYERS,
    OPTIMIZERS,
    family,
    rendered,
    shared_refusals,
    training_arguments,
)

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "no", "fp8": "fp8"}
"""Names of accelerate's mixed_precision, by precision."""
LAUNCHER = (
    "accelerate", "launch", "--config_file", "accelerate.yaml", "--machine_rank", "$NODE_RANK",
    "--main_process_ip", "$MASTER_ADDR", "--main_process_port", "$MASTER_PORT",
)  # fmt: skip


def refusals(job: ExportJob) -> list[str]:
    """What FSDP2 under accelerate cannot run, with its rule."""
    layout, found = job.layout, unknown_choices(job, "accelerate", OPTIMIZERS, PRECISIONS)
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(layout, name) > 1:
            found.append(f"{name} {getattr(layout, name)}: a plan of FSDP alone is data parallel only; use {name} 1")
    if layout.zero not in (0, 2, 3):
        found.append(f"zero {layout.zero}: FSDP2 shards states, gradients and weights alike; use 0, 2 or 3")
    if layout.zero and job.shard == 1 < layout.dp:
        found.append(
            f"dp_shard 1 of dp {layout.dp}: FSDP2 needs a shard group of more than one rank [ParallelismConfig]; use zero 0"
        )
    if layout.offload_optimizer:
        found.append(
            f"offload_optimizer {layout.offload_optimizer}: fsdp_offload_params moves weights, gradients and states together, "
            "which the plan did not price; plan for trainer deepspeed"
        )
    return found + shared_refusals(job)


def config(job: ExportJob) -> dict[str, Any]:
    """The YAML file of ``accelerate launch``."""
    layout, work, kind = job.layout, job.workload, family(job.model)
    data: dict[str, Any] = filled_yaml(
        job, "accelerate", "accelerate.txt", kind="FSDP" if layout.zero else "MULTI_GPU", precision=PRECISIONS[work.precision],
        rendezvous="c10d" if job.num_nodes > 1 else "static", reshard=layout.zero == 3,
        recompute=layout.recompute == Recompute.FULL, offload=bool(layout.offload_activations),
    )  # fmt: skip
    if layout.zero:
        if kind:
            data["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = LAYERS[kind]
        sizes = {**parallelism(job), "tp_size": 1, "cp_size": 1, "sp_size": 1}
        data["parallelism_config"] = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    else:
        del data["fsdp_config"]
    if work.precision == "fp8":
        data["fp8_config"] = {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}
    return data


def parallelism(job: ExportJob) -> dict[str, int]:
    """Sizes of accelerate's ParallelismConfig: replicas of the shard group, and the shard group."""
    return {"dp_replicate_size": job.layout.dp // job.shard, "dp_shard_size": job.shard}


def render(job: ExportJob) -> Rendered:
    """accelerate.yaml, training.json, train.py, and config.json of the model where its family is known."""
    layout, work, arguments = job.layout, job.workload, training_arguments(job)
    if layout.zero == 0 and layout.recompute == Recompute.FULL:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    training = {"training_arguments": arguments, "parallelism": parallelism(job) if layout.zero else None}
    found = rendered(job, {"accelerate.yaml": library.dump_yaml(config(job))}, training, LAUNCHER)
    needs_torchao = work.precision == "fp8" or work.optimizer == "adam_8bit"
    note = "accelerate starts one process per GPU itself; with several nodes set NODE_RANK on each."
    return dataclasses.replace(
        found,
        notes=(*found.notes, note),
        install=(*found.install, *(("pip install torchao",) if needs_torchao else ())),
    )
