"""Seconds to bring trained weights into the rollout engines, by method.

T = base + tensors x host time of a tensor + bytes: host times and rates of profiles/rl_weight_sync.yaml. A quantised tensor travels
with its scales, a tensor as well, unless the engine quantises what arrives. W bytes of the model, over ``link`` times the link
where software is no narrower:

ipc, bucketed   every rank of the trainer gathers all weights over its model-parallel group (all-gather of W); bucketed also
                broadcasts W to all engines
reshard         a rank of an engine receives its shard W / (tp pp), a rank of the trainer sends its part of what all engines receive
tensor, rdma, delta, disk      W / rate

What waits in host memory is copied to the GPU first, at ``offload_rate``.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import numpy as np

from planner import library
from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.parameters import total_parameters
from planner.model import ModelSpec
from planner.model_names import named
from planner.record import record
from planner.rl.rl_layout import SYNC_METHODS
from planner.schema import Bandwidth, Seconds, Text, check_keys, read, value_of, within
from planner.serving.serving_layout import WEIGHT_BYTES

HALF = 2.0
"""Bytes of a parameter that is not quantised."""


@record
class SyncCost:
    """Host times and rates of one method in one framework."""

    base: Seconds
    """Of a sync, whatever its size."""
    tensor: Seconds
    """Of one tensor of the checkpoint."""
    rate: Bandwidth | None = None
    """Bytes/s of the whole weights where software bounds them; None: the link does."""
    link: Annotated[float, within(0.01, 1.0)] = 1.0
    """Part of the link's bandwidth that is reached."""
    source: Text = ""


@record
class SyncTable:
    """All methods."""

    methods: dict[str, SyncCost]
    frameworks: dict[str, dict[str, SyncCost]]
    """Framework -> method."""
    offload_rate: Bandwidth
    """Bytes/s of whole weights that come from host memory first."""
    cast_on_arrival: tuple[str, ...]
    """Frameworks that send bf16 whatever the engine's format: it quantises one bucket while the next is transferred."""
    fused_experts: tuple[str, ...]
    """Names of models whose checkpoints hold the experts of a layer as one tensor."""

    def cost(self, method: str, framework: str = "") -> SyncCost:
        """Of a method in a framework."""
        return self.frameworks.get(framework, {}).get(method, self.methods[method])


@cache
def sync_table() -> SyncTable:
    """Of profiles/rl_weight_sync.yaml."""
    path = library.profiles_directory() / "rl_weight_sync.yaml"
    data = check_keys(library.read_yaml(path), SyncTable.__dataclass_fields__, path.name)
    frameworks = {
        name: {method: read(SyncCost, cost, f"{path.name}: {name}: {method}") for method, cost in methods.items()}
        for name, methods in check_keys(data["frameworks"], tuple(data["frameworks"]), path.name).items()
    }
    return SyncTable(
        methods={one: read(SyncCost, data["methods"][one], f"{path.name}: {one}") for one in SYNC_METHODS},
        frameworks=frameworks,
        offload_rate=value_of(Bandwidth, data["offload_rate"], path.name, "offload_rate"),
        cast_on_arrival=value_of(tuple[str, ...], data["cast_on_arrival"], path.name, "cast_on_arrival"),
        fused_experts=value_of(tuple[str, ...], data["fused_experts"], path.name, "fused_experts"),
    )


def tensors_of(model: ModelSpec) -> int:
    """Tensors of the model's checkpoint: projections, biases and norms of a layer; gate, up and down of every expert.

    With grouped queries q, k, v, o; with MLA the down and up projections and norms of the compressed states.
    """
    if model.is_mla:
        attention = 7 if model.q_lora_rank else 5
    else:
        attention = 4 + 2 * model.qk_norm + 3 * (model.qkv_bias or model.linear_bias)
    norms, mlp = model.norms_per_layer, model.num_mlp_matrices
    fused = named(model.name, sync_table().fused_experts)
    routed = mlp * (1 if fused else model.num_experts) + 2
    sparse = model.num_moe_layers * (routed + mlp * bool(model.num_shared_experts))
    return round(model.num_layers * (attention + norms) + model.num_plain_layers * mlp + sparse + 3)


def sync_bytes(model: ModelSpec, weights: str = "bf16") -> float:
    """Bytes of the weights as engines get them."""
    return total_parameters(model) * WEIGHT_BYTES[weights]


@record
class SyncSides:
    """Both sides of a sync; numbers or columns that fit each other."""

    train: Cluster
    generate: Cluster
    trained_over: Any
    """GPUs that together hold the trainer's model once."""
    generated_over: Any
    """GPUs of one engine."""
    engines: Any
    between: float = 0.0
    """Bytes/s of the link between pools of two sites or kinds, all GPUs together; 0 = the network of both."""


def sync_seconds(
    method: str, model: ModelSpec, sides: SyncSides, *, framework: str = "", weights: str = "bf16", offloaded: bool = False
) -> Floats:
    """Seconds of one sync. ``offloaded``: the trainer's weights wait in host memory."""
    table = sync_table()
    weights = "bf16" if framework in table.cast_on_arrival else weights
    cost, size = table.cost(method, framework), sync_bytes(model, weights)
    over, engine, engines = (np.asarray(one, dtype=float) for one in (sides.trained_over, sides.generated_over, sides.engines))
    tensors = tensors_of(model) * (1.0 if WEIGHT_BYTES[weights] >= HALF else 2.0)
    host = cost.base + tensors * cost.tensor
    if cost.rate is not None:
        moved = np.full(np.broadcast_shapes(over.shape, engine.shape, engines.shape), size / cost.rate)
    elif method == "reshard":
        out, into = _link(sides.train, over), _link(sides.generate, engine)
        received, sent = size / engine / np.minimum(out, into), size * engines / sides.train.num_gpus / out
        moved = np.maximum(received, sent) / cost.link
    else:
        moved = sides.train.collective_time("all_gather", size, over, 1)
        if method != "ipc":
            reached = engine * engines + 1.0
            apart = np.maximum(reached, sides.generate.domain + 1.0)  # the pools are different nodes
            moved = moved + sides.generate.collective_time("all_gather", size, apart, 1)
        moved = moved / cost.link
    if sides.between:
        moved = np.maximum(moved, size / sides.between)
    return np.asarray(host + moved + (size / table.offload_rate if offloaded else 0.0))


def _link(cluster: Cluster, group: Floats) -> Floats:
    """Bytes/s of a GPU towards the other side: its share of the network, the local link where all is in one domain."""
    hardware = cluster.hardware
    local = cluster.num_gpus <= cluster.domain
    return np.where(local & (group <= cluster.domain), hardware.scale_up_bandwidth, hardware.network_bandwidth) + 0.0 * group
