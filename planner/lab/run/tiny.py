"""A small model of a plan's kind, split as the plan is: what is trained and compared before anything is timed."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.lab.reference.split import Split, Stage
from planner.model import ModelSpec

WIDTH = 8
"""Of a head."""


def tiny_of(split: Split, precision: str = "fp64") -> Split:
    """The same degrees, schedule, sharding, recompute and kind of layers; a few layers of small sizes, two sequences at most
    per microbatch, as many microbatches as the schedule needs to reach its steady state. SGD: Adam hides a gradient that is
    scaled wrongly."""
    layers = _layers(split)
    return dataclasses.replace(
        split, model=_model(split, sum(map(len, layers))), sequence_length=8 * split.cp * split.tp,
        micro_batch_size=min(split.micro_batch_size, 2), num_microbatches=_microbatches(split),
        stages=tuple(
            Stage(rank=stage.rank, layers=held) for stage, held in zip(split.stages, layers, strict=True)
        ),
        precision=precision, optimizer="sgd", balanced=False, clip=0.5, learning_rate=0.1,
    )  # fmt: skip


def precisions(split: Split) -> tuple[str, ...]:
    """In which precisions the tiny model is compared: fp64, and bf16 where the plan's passes are.

    Not with experts: rounding changes which one a token goes to, and a different expert is no error.
    """
    return ("fp64", "bf16") if split.precision == "bf16" and not split.model.is_moe else ("fp64",)


def _layers(split: Split) -> list[tuple[int, ...]]:
    """Numbers of the layers of each stage: one, or none where the stage has none; in a pipeline of one stage three."""
    each = 3 if len(split.stages) == 1 else 1
    found, start = [], 0
    for stage in split.stages:
        count = min(len(stage.layers), each)
        found.append(tuple(range(start, start + count)))
        start += count
    return found


def _microbatches(split: Split) -> int:
    """Interleaved schedules want a multiple of p, V-shaped ones at least 2 p."""
    return min(split.num_microbatches, 2 if split.pp == 1 else 2 * split.pp)


def _model(split: Split, layers: int) -> ModelSpec:
    """Sizes that the degrees divide, and the same relations between them."""
    model, wide = split.model, max(split.tp, 2)
    heads = 2 * wide
    sizes: dict[str, Any] = {
        "name": f"tiny {model.name}", "num_layers": layers, "hidden_size": WIDTH * heads, "num_heads": heads,
        "num_kv_heads": wide if model.num_kv_heads < model.num_heads and not model.is_mla else heads, "head_dim": WIDTH,
        "ffn_size": 24 * wide, "vocab_size": 32 * wide, "max_sequence_length": 8 * split.cp * split.tp,
        "num_position_embeddings": 8 * split.cp * split.tp if model.position == "learned" else 0,
        "published_parameters": 0.0, "published_active_parameters": 0.0,
    }  # fmt: skip
    if model.is_mla:
        sizes |= {
            "head_dim": 12, "q_lora_rank": 16 if model.q_lora_rank else 0, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8,
        }  # fmt: skip
    if model.is_moe:
        sizes |= _experts(split, layers)
    return dataclasses.replace(model, **sizes)


def _experts(split: Split, layers: int) -> dict[str, Any]:
    """As many experts per rank as there are, at most two; more ranks than experts stay that. Dense layers first, as there."""
    model = split.model
    shards = split.dp_shard * split.cp * split.tp // split.ep
    here = min(model.num_experts // split.ep, 2)
    if shards * split.ep <= model.num_experts:
        here = max(here, shards)  # experts are shared out whole
    number = split.ep * here
    number = max(number, split.ep * -(-2 // split.ep))
    return {
        "num_experts": number, "top_k": min(model.top_k, number, 2), "expert_ffn_size": 24 * max(shards, 1),
        "num_dense_layers": 1 if model.num_dense_layers and layers > 1 else 0,
        "moe_layer_interval": model.moe_layer_interval if model.moe_layer_interval < layers else 1,
        "shared_expert_ffn_size": 24 * max(split.tp, 2) if model.shared_expert_ffn_size else 0,
    }  # fmt: skip
