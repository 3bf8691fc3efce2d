"""How the modules of a stage are split: DTensor for tensor parallelism, fully_shard or replicate for data parallelism."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from planner.lab.reference.split import Split
from planner.lab.reference.transformer import LatentAttention, Layer, Mixture, Norm, Part


class Meshes:
    """The ranks of a job as grids: pp, replicas, shards, cp and tp (fastest); for experts pp, replicas, shards and ep."""

    def __init__(self, split: Split, device: str) -> None:
        self.split = split
        shape = (split.pp, split.dp // split.dp_shard, split.dp_shard, split.cp, split.tp)
        self.all = init_device_mesh(device, shape, mesh_dim_names=("pp", "replica", "shard", "cp", "tp"))
        self.dense = self._data(self.all, ("shard", "cp"), split.dp_shard * split.cp)
        self.expert = self.dense
        self.experts: DeviceMesh | None = None
        if split.model.is_moe:
            inner = split.dp_shard * split.cp * split.tp // split.ep
            tiled = (split.pp, split.dp // split.dp_shard, inner, split.ep)
            self.experts = init_device_mesh(device, tiled, mesh_dim_names=("pp", "replica", "expert_shard", "ep"))
            self.expert = self._data(self.experts, ("expert_shard",), inner)

    def _data(self, mesh: DeviceMesh, names: tuple[str, ...], shards: int) -> DeviceMesh:
        """The mesh over which gradients are summed and states are sharded."""
        replicas = self.split.dp // self.split.dp_shard
        if self.split.zero == 0:
            return mesh["replica", *names]._flatten(f"all_{names[0]}")
        inner = mesh[names]._flatten(f"flat_{names[0]}") if len(names) > 1 else mesh[names[0]]
        return inner if replicas == 1 else DeviceMesh._concatenate([mesh["replica"], inner])

    def group(self, name: str) -> Any:
        """Process group of one dimension; None where it has one rank."""
        mesh = self.experts if name == "ep" else self.all
        return mesh.get_group(name) if mesh is not None and mesh[name].size() > 1 else None


def split_tensors(part: Part, mesh: DeviceMesh) -> None:
    """Tensor parallelism with sequence parallelism: norms work on tokens of this rank, matrices on its heads and columns."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(part, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    })  # fmt: skip
    for layer in part.layers.values():
        assert isinstance(layer, Layer)
        mlp = "mlp.shared" if isinstance(layer.mlp, Mixture) else "mlp"
        parallelize_module(layer, mesh, {  # names that a module has not are left out
            "attention": gathered, "attention.[qkv]": columns, "attention.out": rows,
            mlp: gathered, f"{mlp}.gate": columns, f"{mlp}.up": columns, f"{mlp}.down": rows,
        })  # fmt: skip
    _replicate_rest(part, mesh)


def _replicate_rest(part: Part, mesh: DeviceMesh) -> None:
    """Weights that the modules read by themselves: MLA's up projections by heads, all others the same on all ranks."""
    for module in part.modules():
        if isinstance(module, LatentAttention):
            _spread(module.q_up, mesh, Shard(0))
            _spread(module.kv_up, mesh, Shard(0))
            for down in (module.q_down, module.kv_down):
                if down is not None:
                    _spread(down, mesh, Replicate())
        elif isinstance(module, (Norm, Part, Mixture)):
            _spread(module, mesh, Replicate())


def _spread(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """The module's own parameters as DTensors."""
    for name, value in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(value, mesh, [placement], src_data_rank=None)))


def shard_states(part: Part, split: Split, meshes: Meshes) -> None:
    """Shards (or replicas) of weights in their own precision, gathered in the one that computes; gradients are sums."""
    half = split.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )  # fmt: skip
    if split.zero == 0:
        unit: Any = partial(replicate, mp_policy=policy)
    else:
        unit = partial(fully_shard, mp_policy=policy, reshard_after_forward=split.zero == 3)
    first, ends = ([one for one in many if one is not None] for many in ((part.embedding,), (part.norm, part.head)))
    tied = part.embedding is not None and part.head is not None and part.head.weight is part.embedding.weight
    for modules in ([*first, *ends],) if tied else (first, ends):
        if modules:
            unit(modules, mesh=meshes.dense)
    for layer in part.layers.values():
        if isinstance(layer.mlp, Mixture):
            placed = _expert_placement(split, meshes) if split.zero else {}
            unit(layer.mlp.experts, mesh=meshes.expert, **placed)
        unit(layer, mesh=meshes.dense)
    unit(part, mesh=meshes.dense)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _expert_placement(split: Split, meshes: Meshes) -> dict[str, Any]:
    """More ranks than experts: every expert's rows are sharded instead of the experts."""
    shards = split.dp_shard * split.cp * split.tp // split.ep
    return {"shard_placement_fn": lambda _: Shard(1)} if shards * split.ep > split.model.num_experts else {}
