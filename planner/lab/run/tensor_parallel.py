"""How the modules of a stage are laid over tensor-parallel ranks, and which of its linear layers multiply in 8 bits."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, parallel

from planner.lab.reference import transformer
from planner.lab.reference.eight_bits import RECIPES, QuantisedLinear, Shared, gathered_input
from planner.lab.reference.split import Split
from planner.lab.reference.virtual_stage import Part


def split_tensors(part: Part, mesh: DeviceMesh) -> None:
    """Tensor parallelism with sequence parallelism: norms work on tokens of this rank, matrices on its heads and columns."""
    gathered = parallel.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=Shard(1))
    parallel.parallelize_module(part, mesh, {
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    })  # fmt: skip
    quantised = any(isinstance(module, QuantisedLinear) for module in part.modules())
    if quantised:
        _split_quantised(part, mesh)
    for module in part.ahead if not quantised else ():
        split_columns = parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1))
        parallel.parallelize_module(module, mesh, {"projection": split_columns})
    for layer in part.every_layer() if not quantised else ():
        mlp = "mlp.shared" if isinstance(layer.mlp, transformer.Mixture) else "mlp"
        parallel.parallelize_module(layer, mesh, {  # names that a module has not are left out
            "attention": gathered, "attention.[qkv]": columns, "attention.out": rows,
            mlp: gathered, f"{mlp}.gate": columns, f"{mlp}.up": columns, f"{mlp}.down": rows,
        })  # fmt: skip
    for module in part.modules():  # weights that they read by themselves: MLA's up projections by heads, others on all ranks
        if isinstance(module, transformer.LatentAttention):
            for up in (module.q_up, module.kv_up) if not quantised else ():
                _spread(up, mesh, Shard(0))
            for down in (module.q_down, module.kv_down):
                if down is not None:
                    _spread(down, mesh, Replicate())
        elif isinstance(module, (transformer.Norm, Part, transformer.Mixture)):
            _spread(module, mesh, Replicate())


def _spread(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """The module's own parameters as DTensors; a bias along inputs that are shared out is on all ranks."""
    for name, value in list(module.named_parameters(recurse=False)):
        placement = placement if placement.is_replicate() or value.dim() > placement.dim else Replicate()
        setattr(module, name, nn.Parameter(distribute_tensor(value, mesh, [placement], src_data_rank=None)))


# ------------------------------------------------------------------------------------------------ in 8 bits


def quantised_names(split: Split) -> Iterator[tuple[str, int | None]]:
    """Linear layers of a layer that multiply in 8 bits, by the end of their names, and the dimension of the weight that
    tensor-parallel ranks share out. Down projections of MLA are whole on every rank and get a part of their gradient on each:
    its rounding would not be that of the sum, so that they stay in half precision there. So do head, router and routed experts."""
    names = {"q": 0, "k": 0, "v": 0, "q_up": 0, "kv_up": 0, "out": 1, "gate": 0, "up": 0, "down": 1, "projection": 0}
    yield from names.items()
    if split.tp == 1:
        yield from (("q_down", None), ("kv_down", None))


def quantise(part: Part, split: Split, group: Any) -> None:
    """Makes linear layers of a stage multiply in 8 bits. ``group`` of tensor parallelism, None = of one rank."""
    recipe = RECIPES[split.linear]
    recipe, names = recipe.sized(split.scale_block) if split.scale_block else recipe, dict(quantised_names(split))
    for path, module in part.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear) and name in names:
            module.__class__ = QuantisedLinear  # the same parameters
            assert isinstance(module, QuantisedLinear)
            module.how = Shared(recipe=recipe, fused=split.fused, split=names[name], group=group)
        if isinstance(module, transformer.Norm):
            module.quantised = name in ("attention_norm", "mlp_norm", "q_down_norm", "kv_down_norm")


def _split_quantised(part: Part, mesh: DeviceMesh) -> None:
    """Their weights as DTensors, and gathers where tokens of this rank become those of all."""
    for module in part.modules():
        if isinstance(module, QuantisedLinear) and module.how.split is not None:
            _spread(module, mesh, Shard(module.how.split))
        if isinstance(module, transformer.LatentAttention):  # its down projections read what is gathered as it is
            how = _how(module.out)
            _gathers(module, dataclasses.replace(how, recipe=dataclasses.replace(how.recipe, gathers=False)))
        elif isinstance(module, transformer.Attention):
            _gathers(module, _how(module.q))
        elif isinstance(module, transformer.Mlp):
            _gathers(module, _how(module.up))
    for module in part.ahead:
        _gathers(module.projection, _how(module.projection))
        module.projection.register_forward_hook(lambda _, __, y: _tokens_of_columns(y, mesh))


def _tokens_of_columns(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of some columns of all tokens, all columns of some tokens."""
    shared = DTensor.from_local(y, mesh, [Shard(-1)], run_check=False)
    return shared.redistribute(placements=[Shard(1)]).to_local()


def _how(linear: nn.Module) -> Shared:
    assert isinstance(linear, QuantisedLinear)
    return linear.how


def _gathers(module: nn.Module, how: Shared) -> None:
    """The module is given tokens of this rank and works on those of all."""

    def gather(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (gathered_input(given[0], how),)

    module.register_forward_pre_hook(gather)
