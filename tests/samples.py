"""Small models and jobs for the tests of the cost model, the rules and the search."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np

from planner import library
from planner.cluster import Cluster
from planner.cost.estimate import Estimate, estimate
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.linear_attention import LinearAttention
from planner.model import ModelSpec
from planner.rules import Job, allowed
from planner.space import OFFLOADS, Pins, base_layouts, recompute_options, stack
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload

TRAINERS: dict[str, Trainer] = {name: load_trainer(name) for name in library.names("trainers")}
HARDWARE: dict[str, HardwareProfile] = {name: load_hardware(name) for name in library.names("hardware")}


def model(name: str, **changes: Any) -> ModelSpec:
    """A small Llama with changes."""
    sizes: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 1024,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 64,
        "ffn_size": 4096,
        "vocab_size": 32000,
        "max_sequence_length": 8192,
    }
    return ModelSpec(name=name, **{**sizes, **changes})


MLA = {
    "head_dim": 96,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
EXPERTS = {"num_experts": 16, "top_k": 2, "expert_ffn_size": 1024}
MODELS: dict[str, ModelSpec] = {
    "gpt": model(
        "gpt",
        gated=False,
        activation="gelu",
        norm="layernorm",
        position="learned",
        num_position_embeddings=8192,
        tied_embeddings=True,
        linear_bias=True,
    ),
    "gqa": model("gqa", num_kv_heads=4),
    "window": model("window", window=1024, num_windowed_layers=6, norms_per_layer=4, qk_norm=True),
    "moe": model("moe", num_kv_heads=4, **EXPERTS),
    "mla": model(
        "mla", num_shared_experts=1, shared_expert_ffn_size=1024, num_dense_layers=1, mtp_layers=1, **MLA, **EXPERTS
    ),
    "hybrid": model(
        "hybrid", num_kv_heads=4, expert_hidden_size=256, num_shared_experts=1, shared_expert_ffn_size=1024, **EXPERTS,
        linear=LinearAttention(kind="mamba2", num_layers=4, num_mlp_layers=3, key_heads=2, key_head_dim=64, value_heads=8,
                               value_head_dim=64, chunk_size=128),
    ),  # fmt: skip
    "parallel": model("parallel", parallel_attention=True, norms_per_layer=1, gated=False, activation="gelu"),
}


def job(
    model_name: str = "gqa",
    trainer: str | Trainer = "megatron",
    gpus: int = 8,
    hardware: str | HardwareProfile = "h100-sxm",
    sequence: int = 4096,
    batch: int = 32,
    **workload: Any,
) -> Job:
    return Job(
        workload=Workload(model=MODELS[model_name], sequence_length=sequence, global_batch_size=batch, **workload),
        cluster=Cluster(hardware=HARDWARE[hardware] if isinstance(hardware, str) else hardware, num_gpus=gpus),
        trainer=TRAINERS[trainer] if isinstance(trainer, str) else trainer,
    )


@lru_cache(maxsize=128)
def legal_layouts(model_name: str, trainer: str, gpus: int, batch: int, most: int) -> Layout:
    """``most`` legal layouts of a job, levers included, drawn from all of them with a fixed seed."""
    one = job(model_name, trainer, gpus, batch=batch)
    base = base_layouts(one, Pins())
    every = stack([base, *(lever.apply(base, one.model) for lever in recompute_options(one, Pins()))])
    if one.trainer.legal.offload_optimizer:
        every = stack([every, *(every.replace(offload_optimizer=share) for share in OFFLOADS)])
    every = every.take(allowed(one, every))
    rows = np.random.default_rng(0).permutation(len(every))[:most]
    return every.take(rows)


def priced(one: Job, layout: Layout) -> Estimate:
    return estimate(one.workload, one.cluster, one.trainer, layout)


def tight(one: Job, memory: float) -> Job:
    """The same job where a card has so many usable bytes."""
    hardware = one.cluster.hardware.scaled(usable_memory=memory / one.cluster.hardware.usable_memory)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=hardware))
