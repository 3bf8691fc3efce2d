"""Weight syncs and updates of trainers as published rows describe them, predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.errors import PlannerError, shown
from planner.hardware import load_hardware
from planner.hardware.names import profile_named
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.model_names import preset_of
from planner.record import record
from planner.rl.rl_framework import framework_names, load_framework
from planner.rl.training_phase import frozen_weights
from planner.rl.weight_sync import SyncSides, sync_bytes, sync_seconds, sync_table
from planner.trainer import load_trainer
from planner.units import GIB
from planner.workload import Workload

METHODS = (
    ("delta", "delta"), ("reshard", "reshard"), ("nixl", "rdma"), ("checkpoint-engine", "rdma"), ("mooncake", "rdma"),
    ("p2p", "rdma"), ("broadcast", "bucketed"), ("bucket", "bucketed"), ("ipc", "ipc"), ("colocated", "ipc"), ("disk", "disk"),
    ("tensor", "tensor"),
)  # fmt: skip
"""Words of a row's method, and which of SYNC_METHODS they mean; the first that stands in it counts."""
OWN = {
    "nemo": "nemo-rl", "verl": "verl", "slime": "slime", "miles": "slime", "openrlhf": "openrlhf", "areal": "areal",
    "prime": "prime-rl",
}  # fmt: skip
"""Beginnings of ids of rows -> framework."""


@record
class SyncRow:
    """A sync, predicted."""

    values: dict[str, float]
    fits: bool = True
    assumed: str = ""
    doubt: float = 0.0
    """What it leaves open beside the errors of other rows, in ln."""


@record
class UpdateRow(SyncRow):
    """An update of a trainer, predicted."""


def model_of(row: Mapping[str, Any]) -> ModelSpec:
    """The model of a row by name, spelt in any way. Raises PlannerError."""
    name = row.get("model")
    if not isinstance(name, str):
        raise PlannerError("the row names no model")
    return load_model(preset_of(name) or name)


def number(data: Mapping[str, Any], name: str, default: float = 1) -> float:
    """A positive number of a row, or the default."""
    value = data.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else float(default)


def framework_of(text: str) -> str:
    """The framework that a text begins with, with its version where it has one; '' = none of the library."""
    words = text.lower().replace("_", "-").split()
    name = next((one for one in framework_names() if words and words[0] in (one, one.replace("-", ""))), "")
    name = name or next((one for start, one in OWN.items() if words and words[0].startswith(start)), "")
    version = next((one.lstrip("v@") for one in words[1:2] if one.lstrip("v@")[:1].isdigit()), "")
    return f"{name}@{version}" if name and version else name


def sync_row(row: Mapping[str, Any], where: str) -> SyncRow:
    """Predict one sync. Raises PlannerError where the row does not say enough."""
    said = str(row["method"]).lower()
    method = next((name for word, name in METHODS if word in said), None)
    if method is None:
        raise PlannerError(f"{where}: the method {shown(said)} is not known")
    measured = row["measured"]
    if "sync_s" not in measured and "full_broadcast_s" in measured:
        method = "bucketed"
    model = model_of(row)
    hardware = load_hardware(profile_named(str(row["hardware"])) if row.get("hardware") else "h100-sxm")
    framework = next((name for start, name in OWN.items() if str(row["id"]).startswith(start)), "")
    train, generate = row["train"], row["generate"]
    nodes = hardware.gpus_per_node
    over = number(train, "tp") * number(train, "pp") * max(number(train, "ep"), 1.0)
    sharded = number(train, "fsdp", number(train, "dp_shard", 1))
    trainers = number(train, "gpus", number(train, "nodes", 0) * nodes or over * number(train, "dp"))
    engine = number(generate, "tp") * number(generate, "pp")
    rollouts = number(generate, "gpus", number(generate, "nodes", 0) * nodes or engine * number(generate, "dp"))
    over = max(over, sharded, trainers if framework == "verl" else 1.0)
    sides = SyncSides(
        train=Cluster(hardware=hardware, num_gpus=int(max(trainers, 1))),
        generate=Cluster(hardware=hardware, num_gpus=int(max(rollouts, 1))),
        trained_over=over, generated_over=engine, engines=max(rollouts / engine, 1.0),
    )  # fmt: skip
    said = str(row.get("precision", ""))
    weights = "fp8_block" if "fp8" in said else "nvfp4" if "fp4" in said else "bf16"
    seconds = sync_seconds(method, model, sides, framework=framework, weights=weights, offloaded=bool(row.get("offload")))
    return SyncRow(values={"sync_s": float(np.ravel(seconds)[0])})


def update_row(row: Mapping[str, Any], framework: str, where: str, sets: int = 1) -> UpdateRow:
    """Predict one optimizer step of a trainer. Raises PlannerError where the row does not say enough.

    ``sets`` of adapters for runs that share the base are all in memory, and a token passes through one: memory of ``sets`` times
    the rank.  [prime-rl, trainer/models/layers/lora/multi_linear.py: n_adapters]

    An RL trainer that runs alone hands its weights on after each update, to files: there is no engine that would receive them.
    Adapters are small, and those of a run without an orchestrator stay.
    """
    train, batch = row["train"], row["batch"]
    named = framework_of(framework.replace("(", " "))
    known = load_framework(named) if named else None
    trainer = load_trainer(_update_trainer(known.trainer if known else "fsdp", row, train))
    model, hardware = model_of(row), load_hardware(profile_named(str(row.get("hardware") or "h100-sxm")))
    if not number(batch, "global", 0) or not number(batch, "length", 0):
        raise PlannerError(f"{where}: the batch is not stated")
    gpus, dp = int(number(train, "gpus")), int(number(train, "dp", number(train, "gpus")))
    sequences, micro = int(number(batch, "global")), int(number(train, "micro"))
    layout = Layout(
        tp=int(number(train, "tp")), pp=int(number(train, "pp")), cp=int(number(train, "cp")), ep=int(number(train, "ep")), dp=dp,
        micro_batch_size=micro, num_microbatches=max(sequences // (dp * micro), 1), zero=int(number(train, "zero", 1)),
        recompute=2 if train.get("recompute") in ("full", "offload_activations") else 0,
        offload_activations=int(train.get("recompute") == "offload_activations"),
    )  # fmt: skip
    rank = int(number(train, "lora_rank", 0))
    work = Workload(
        model=model, sequence_length=int(number(batch, "length")), global_batch_size=sequences, lora_rank=rank,
        expert_imbalance=1.0, frozen_weights=frozen_weights(trainer, rank),
    )  # fmt: skip
    cluster = Cluster(hardware=hardware, num_gpus=gpus)
    found = estimate(work, cluster, trainer, layout)
    held = estimate(work.replace(lora_rank=rank * sets), cluster, trainer, layout) if rank and sets > 1 else found
    writes = known and row.get("phase") != "sft" and not rank and any("disk" in one.sync for one in known.placements)
    written = sync_bytes(model) / (sync_table().cost("disk").rate or math.inf) if writes else 0.0
    return UpdateRow(
        values={"train_s": float(found.step_time[0]) + written, "memory_gb": float(held.memory_reserved[0]) / GIB},
        fits=bool(held.out_of_memory_probability[0] <= 0.5), assumed="fake data: experts evenly loaded",
    )  # fmt: skip


def _update_trainer(trainer: str, row: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    """The trainer with the options that a row states: fine-tuning keeps its logits; kernels of attention."""
    kept = "+loss=kept" if row.get("phase") == "sft" else ""
    return trainer + kept + ("+attention_kernel=flash_attn" if train.get("attention") == "fa2" else "")


