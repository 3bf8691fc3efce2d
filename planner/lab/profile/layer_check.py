"""Whole layers as points, and what the cost model says of them: the sum of their operators."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from planner.cost.layer.operators import MemoryBound, Operator, Shard
from planner.cost.layer.transformer_layer import layer
from planner.cost.price.compute import price
from planner.hardware import HardwareProfile
from planner.lab.profile.definitions import EAGER_TENSORS
from planner.lab.profile.points import Point
from planner.layout import Layout
from planner.model import ModelSpec
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload

ROPE_PASSES = (EAGER_TENSORS["rope", "forward"][0] + EAGER_TENSORS["rope", "backward"][0]) / 4.0
"""Times the rotary embedding of plain torch operations reads or writes its input, over one kernel's two each way."""
SMALL = {"hidden": 16, "ffn": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "batch": 1, "seq": 16, "gated": True}
HOST_LAYER = {
    f"layer_{pass_}": Point.of("layer", pass_=pass_, dtype="fp32", **SMALL) for pass_ in ("forward", "backward")
}
"""Kinds of launch point: a layer whose tensors are next to nothing takes what the host needs to run a layer."""


def host_floor(seconds: Mapping[str, float], hardware: HardwareProfile) -> float:
    """Host seconds per kernel that a layer launches, so that the sum of operators of nothing is the layer of nothing.

    ``seconds`` measured by kind; products and attention hold their own launches, plain operations are left.
    """
    with_none, with_one = (dataclasses.replace(hardware, launch_floor=floor) for floor in (1e-12, 1.0))
    rest, all_kernels = (sum(predicted(HOST_LAYER[kind], by) for kind in seconds) for by in (with_none, with_one))
    return max(sum(seconds.values()) - rest, 0.0) / (all_kernels - rest)


@cache
def plain_trainer() -> Trainer:
    """Plain torch operations and nothing in parallel: torchtitan's memory rules, its fusions taken away.

    torch.autograd.grad adds to no gradient that was there before: one byte makes the traffic of accumulation, 2 g - 2, zero.
    """
    return load_trainer("torchtitan").replace(
        passes={"norm": 1.0, "elementwise": 1.0, "rope": ROPE_PASSES}, unfused=frozenset({"swiglu", "gradient_sum"}),
        gradient_bytes=1.0, dropout=False, attention_kernel="best",
    )  # fmt: skip


DENSE = {
    "hidden": "hidden_size", "ffn": "ffn_size", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim",
}  # fmt: skip
LATENT = {
    "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim",
}  # fmt: skip
EXPERTS = {
    "experts": "num_experts", "top_k": "top_k", "expert_ffn": "expert_ffn_size", "shared_ffn": "shared_expert_ffn_size",
}  # fmt: skip
FIELDS = DENSE | LATENT | EXPERTS
"""Sizes of a layer point and the fields of a model that they are; ``head_dim`` of latent attention is that of queries and keys."""


def model_of(point: Point) -> ModelSpec:
    """The model of one layer that a layer point stands for; its tensor parallel shard is a model of its own."""
    sizes, gated = point.values, bool(point["gated"])
    fields: dict[str, Any] = {FIELDS[name]: int(size) for name, size in sizes.items() if name in FIELDS}
    if "kv_rank" in sizes:
        fields["qk_nope_head_dim"] = int(sizes["head_dim"] - sizes["rope_dim"])
    if "experts" in sizes:
        fields["num_shared_experts"] = int(sizes["shared_ffn"] > 0)
    return ModelSpec(
        name="layer", num_layers=1, vocab_size=256, max_sequence_length=point["seq"], gated=gated,
        activation="silu" if gated else "relu", **fields,
    )  # fmt: skip


def shard_point(model: ModelSpec, pass_: str, tp: int, ep: int, seq: int, dtype: str) -> Point:
    """The layer of a model that one of ``tp`` ranks has: dense where ``ep`` is 0, else with every ep-th expert and T K rows
    for them, as many as the rank sends."""
    names = DENSE | (LATENT if model.is_mla else {}) | (EXPERTS if ep else {})
    ranks = {"ffn": tp, "heads": tp, "kv_heads": tp, "shared_ffn": tp, "experts": ep}
    sizes = {name: getattr(model, field) // ranks.get(name, 1) for name, field in names.items()}
    sizes["kv_heads"] = max(sizes["kv_heads"], 1)
    return Point.of("layer", pass_=pass_, batch=1, seq=seq, gated=model.gated, dtype=dtype, **sizes)


def between(shard: Shard, moe: bool) -> list[Operator]:
    """What plain torch does between the operators of a layer and the trainer's list, one of fused code, does not hold.

    gradient_sums: gradients of a tensor that several products read are added, two reads and a write for each beyond the
    first: query, key and value read the output of one norm, gate and up that of the other (and each expert's rows). What
    router, experts and shared experts read is in the list (``cost.experts.joined``).
    joins: heads of latent attention have a part that is rotated and one that is not. Forward q and k are joined, v is made
    contiguous (read and written each); backward every slice has a gradient of the whole size, zeros first (1), the part
    copied (1 in all), and two of them are added (3): 2 + 1 + 3 reads and writes less what the joins already hold.
    index_gradients: rows picked by number have a gradient that starts as zeros and is added into, row by row: in addition to what
    the list counts for the two permutations (5 of T K h) zeros 2, reads and writes of sums 2, weights of the experts 1.
    """
    model, e = shard.model, shard.element
    sums = (1.0 if model.is_mla else 2.0) + float(model.gated and not moe)
    none = 0.0 * shard.tokens
    rows = shard.expert_rows * model.hidden_size * e if moe else none
    added = 3.0 * (sums * shard.tokens * model.hidden_size * e + model.gated * rows)
    launches = (0.0, sums + float(moe and model.gated))
    found: list[Operator] = [
        MemoryBound(name="gradient_sums", kind="elementwise", forward=none, backward=added, launches=launches)
    ]
    if model.is_mla:
        heads = shard.tokens * model.num_heads * e / shard.tp
        forward = heads * (4.0 * model.head_dim + 2.0 * model.v_head_dim)
        backward = 6.0 * heads * (model.head_dim + model.qk_nope_head_dim + model.v_head_dim)
        found.append(MemoryBound(name="joins", kind="copy", forward=forward, backward=backward, launches=(3.0, 8.0)))
    if moe:
        picked = MemoryBound(
            name="index_gradients", kind="permute", forward=none, backward=5.0 * rows, launches=(0.0, 4.0)
        )
        found.append(picked)
    return found


def predicted(point: Point, hardware: HardwareProfile) -> float:
    """Seconds of a layer point: the sum of its operators by the profile's curves, in a short burst as it was measured."""
    return float(sum(predicted_parts(point, hardware).values()))


def predicted_parts(point: Point, hardware: HardwareProfile) -> dict[str, float]:
    """Seconds by operator; the sustained clock is left out, as a measured layer is a short burst too."""
    dtype, batch = point.each("dtype", "batch")
    workload = Workload(
        model=model_of(point), sequence_length=point["seq"], global_batch_size=batch,
        precision="fp32" if dtype == "tf32" else dtype,
    )  # fmt: skip
    layout = Layout.stack([Layout(micro_batch_size=batch)])
    shard = Shard(workload=workload, trainer=plain_trainer(), layout=layout, ep_stride=np.ones(1))
    moe = "experts" in point.values
    operators = layer(shard, moe=moe)[0] + between(shard, moe)
    work = price(operators, shard, dataclasses.replace(hardware, sustained_clock=1.0))
    passes = ("dgrad", "wgrad") if point["pass"] == "backward" else ("forward",)
    return {one.name: sum(first(getattr(work[one.name], name)) for name in passes) for one in operators}


def first(value: object) -> float:
    """The number, or the first of an array."""
    return float(np.ravel(np.asarray(value, dtype=float))[0])
